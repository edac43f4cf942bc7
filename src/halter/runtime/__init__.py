"""The running system, assembled: stores, agents, sessions and workers."""
