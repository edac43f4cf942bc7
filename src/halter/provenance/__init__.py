"""Provenance: which values of a call come from trusted text, and which from what others wrote."""
