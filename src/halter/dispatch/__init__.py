"""Dispatch: which process runs which session."""
