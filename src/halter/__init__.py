"""Halter lets agents work while you sleep: they cannot overspend, overstep or lose what they did."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halter.core.messages import Message, StreamChunk
    from halter.core.tools import Failed, NearBudget, Output, Retry
    from halter.guard.tool_door import Answer
    from halter.models.input_files import File
    from halter.runtime.agent import Agent
    from halter.runtime.guard_api import Guard, GuardedSession, SessionOver, SessionTaken
    from halter.tasks.result import Result, RunFailed
    from halter.tasks.run_events import AnswerDoubted, CallBegan, CallEnded, CapMet, ModelAnswered, PersonAsked
    from halter.tools.function_tool import CallKey, Deps, tool

__version__ = "1.0.0"

__all__ = [
    "Agent",
    "Answer",
    "AnswerDoubted",
    "CallBegan",
    "CallEnded",
    "CallKey",
    "CapMet",
    "Deps",
    "Failed",
    "File",
    "Guard",
    "GuardedSession",
    "Message",
    "ModelAnswered",
    "NearBudget",
    "Output",
    "PersonAsked",
    "Result",
    "Retry",
    "RunFailed",
    "SessionOver",
    "SessionTaken",
    "StreamChunk",
    "__version__",
    "tool",
]

_HOMES = {
    "Agent": "halter.runtime.agent",
    "Answer": "halter.guard.tool_door",
    "AnswerDoubted": "halter.tasks.run_events",
    "CallBegan": "halter.tasks.run_events",
    "CallEnded": "halter.tasks.run_events",
    "CallKey": "halter.tools.function_tool",
    "CapMet": "halter.tasks.run_events",
    "Deps": "halter.tools.function_tool",
    "Failed": "halter.core.tools",
    "File": "halter.models.input_files",
    "Guard": "halter.runtime.guard_api",
    "GuardedSession": "halter.runtime.guard_api",
    "Message": "halter.core.messages",
    "ModelAnswered": "halter.tasks.run_events",
    "NearBudget": "halter.core.tools",
    "Output": "halter.core.tools",
    "PersonAsked": "halter.tasks.run_events",
    "Result": "halter.tasks.result",
    "Retry": "halter.core.tools",
    "RunFailed": "halter.tasks.result",
    "SessionOver": "halter.runtime.guard_api",
    "SessionTaken": "halter.runtime.guard_api",
    "StreamChunk": "halter.core.messages",
    "tool": "halter.tools.function_tool",
}


def __getattr__(name: str) -> Any:
    """Import lazily, so that `import halter` itself is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'halter' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
