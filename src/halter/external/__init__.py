"""Sessions whose loop runs in another program, and the life that they all have in common."""
