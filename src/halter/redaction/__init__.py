"""Removal of secrets and personal data from text, in linear time."""
