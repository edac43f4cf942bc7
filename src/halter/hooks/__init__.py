"""Hooks: the tool calls of other programs pass the guard, and are journaled like those of any agent."""
