"""Decisions on a phone: what waits is sent to the people who may answer, and their replies are answers."""
