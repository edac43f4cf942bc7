"""Secrets and personal data taken out of text, in linear time."""
