"""How an agent runs by itself: what it knows, what wakes it, whether a turn is worth it, and what holds it back."""
