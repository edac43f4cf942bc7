"""Unattended agents: hot state, sensors and signals, the pace of turns, triggers, and upkeep."""
