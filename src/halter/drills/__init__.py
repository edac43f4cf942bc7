"""Proofs of the promises, which a person runs on their own machine and store."""
