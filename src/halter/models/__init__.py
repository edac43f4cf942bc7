"""Connections to models, and the prices of their tokens."""
