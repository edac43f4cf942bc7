"""Halter lets agents work while you sleep: they cannot overspend, overstep or lose what they did."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halter.core.messages import Message, StreamChunk
    from halter.core.tools import Failed, NearBudget, Output
    from halter.guard.tool_door import Answer
    from halter.runtime.agent import Agent
    from halter.runtime.guard_api import Guard, GuardedSession, SessionOver, SessionTaken
    from halter.tasks.result import Result, RunFailed
    from halter.tools.function_tool import CallKey, Deps, tool

__version__ = "0.7.0"

__all__ = [
    "Agent",
    "Answer",
    "CallKey",
    "Deps",
    "Failed",
    "Guard",
    "GuardedSession",
    "Message",
    "NearBudget",
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
    "Agent": "halter.runtime.agent",
    "Deps": "halter.tools.function_tool",
    "Result": "halter.tasks.result",
    "RunFailed": "halter.tasks.result",
    "StreamChunk": "halter.core.messages",
    "Answer": "halter.guard.tool_door",
    "CallKey": "halter.tools.function_tool",
    "Failed": "halter.core.tools",
    "Guard": "halter.runtime.guard_api",
    "GuardedSession": "halter.runtime.guard_api",
    "Message": "halter.core.messages",
    "NearBudget": "halter.core.tools",
    "Output": "halter.core.tools",
    "SessionOver": "halter.runtime.guard_api",
    "SessionTaken": "halter.runtime.guard_api",
    "tool": "halter.tools.function_tool",
}


def __getattr__(name: str) -> Any:
    """Import lazily, so that `import halter` itself is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'halter' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
