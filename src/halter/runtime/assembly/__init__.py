"""Assembles an agent: what it may touch, which code of its folder runs, and which tools it gets."""
