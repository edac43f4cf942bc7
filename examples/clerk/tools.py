"""The clerk's own tools: plain typed functions. What they may do is decided elsewhere."""

from halter import tool


@tool(level="SAFE", effect="read", cost=0.01)
def greet(who: str) -> str:
    """Word a greeting."""
    return f"Welcome, {who}."
