"""Decisions over chat platforms: open decisions are sent to the people who may answer, and replies answer them."""
