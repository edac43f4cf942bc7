"""Halter lets agents work while you sleep: they cannot overspend, overstep or lose what they did."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halter.app.agents import Agent
    from halter.app.library import Guard, GuardedSession, SessionOver, SessionTaken
    from halter.app.result import Result, RunFailed
    from halter.core.messages import StreamChunk
    from halter.core.tools import Failed, Output
    from halter.guard.chokepoint import Answer
    from halter.tools.arguments import CallKey, Deps
    from halter.tools.tool import tool

__version__ = "0.7.0"

__all__ = [
    "Agent",
    "Answer",
    "CallKey",
    "Deps",
    "Failed",
    "Guard",
    "GuardedSession",
    "Output",
    "Result",
    "RunFailed",
    "SessionOver",
    "SessionTaken",
    "StreamChunk",
    "__version__",
    "tool",
]

_HOMES = {
    "Agent": "halter.app.agents",
    "Deps": "halter.tools.arguments",
    "Result": "halter.app.result",
    "RunFailed": "halter.app.result",
    "StreamChunk": "halter.core.messages",
    "Answer": "halter.guard.chokepoint",
    "CallKey": "halter.tools.arguments",
    "Failed": "halter.core.tools",
    "Guard": "halter.app.library",
    "GuardedSession": "halter.app.library",
    "Output": "halter.core.tools",
    "SessionOver": "halter.app.library",
    "SessionTaken": "halter.app.library",
    "tool": "halter.tools.tool",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `import halter` itself costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'halter' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
