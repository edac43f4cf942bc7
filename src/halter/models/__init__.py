"""Connections to models, and what their tokens cost."""
