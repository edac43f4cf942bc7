"""How an agent runs by itself."""
