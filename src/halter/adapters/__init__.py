"""The guard for agents of other frameworks: each module guards one of them, and imports it."""
