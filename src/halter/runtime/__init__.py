"""The running system: stores, agents, sessions, workers, put together."""
