"""Halter runs agents unattended: they cannot overspend, exceed their policy or lose completed work."""

from typing import TYPE_CHECKING, Any

from halter_agents import VERSION

if TYPE_CHECKING:
    from halter.core.errors import NotDone
    from halter.core.messages import Message, StreamChunk
    from halter.core.tools import Failed, NearBudget, Output, Retry
    from halter.external.guard import Guard, GuardedSession, SessionAlreadyEnded, SessionInUse
    from halter.guard.call_answer import Answer
    from halter.models.input_files import File
    from halter.operations.store_access import Store
    from halter.runtime.agent import Agent
    from halter.tasks.result import CompletedResult, Result, RunFailed, StoppedResult
    from halter.tasks.run_events import (
        CallBegan,
        CallEnded,
        DecisionRequested,
        ModelAnswered,
        PausedAtCap,
        UntrustedLinksFound,
    )
    from halter.tools.function_tool import CallKey, Deps, tool

__version__ = VERSION

__all__ = [
    "Agent",
    "Answer",
    "CallBegan",
    "CallEnded",
    "CallKey",
    "CompletedResult",
    "DecisionRequested",
    "Deps",
    "Failed",
    "File",
    "Guard",
    "GuardedSession",
    "Message",
    "ModelAnswered",
    "NearBudget",
    "NotDone",
    "Output",
    "PausedAtCap",
    "Result",
    "Retry",
    "RunFailed",
    "SessionAlreadyEnded",
    "SessionInUse",
    "StoppedResult",
    "Store",
    "StreamChunk",
    "UntrustedLinksFound",
    "__version__",
    "tool",
]

_HOMES = {
    "Agent": "halter.runtime.agent",
    "Answer": "halter.guard.call_answer",
    "CallBegan": "halter.tasks.run_events",
    "CallEnded": "halter.tasks.run_events",
    "CallKey": "halter.tools.function_tool",
    "CompletedResult": "halter.tasks.result",
    "DecisionRequested": "halter.tasks.run_events",
    "Deps": "halter.tools.function_tool",
    "Failed": "halter.core.tools",
    "File": "halter.models.input_files",
    "Guard": "halter.external.guard",
    "GuardedSession": "halter.external.guard",
    "Message": "halter.core.messages",
    "ModelAnswered": "halter.tasks.run_events",
    "NearBudget": "halter.core.tools",
    "NotDone": "halter.core.errors",
    "Output": "halter.core.tools",
    "PausedAtCap": "halter.tasks.run_events",
    "Result": "halter.tasks.result",
    "Retry": "halter.core.tools",
    "RunFailed": "halter.tasks.result",
    "SessionAlreadyEnded": "halter.external.guard",
    "SessionInUse": "halter.external.guard",
    "StoppedResult": "halter.tasks.result",
    "Store": "halter.operations.store_access",
    "StreamChunk": "halter.core.messages",
    "UntrustedLinksFound": "halter.tasks.run_events",
    "tool": "halter.tools.function_tool",
}


_RENAMED = {
    "AnswerDoubted": "UntrustedLinksFound",
    "CapMet": "PausedAtCap",
    "PersonAsked": "DecisionRequested",
    "SessionOver": "SessionAlreadyEnded",
    "SessionTaken": "SessionInUse",
}
"""The names of 1.0, which work for all of 1.x, and their new ones."""


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `import halter` is fast."""
    new_name = _RENAMED.get(name, name)
    if new_name not in _HOMES:
        raise AttributeError(f"module 'halter' has no attribute {name!r}")
    from importlib import import_module

    if new_name != name:
        from halter.core.renamed import warn_renamed

        warn_renamed(f"halter.{name}", f"halter.{new_name}")
    return getattr(import_module(_HOMES[new_name]), new_name)
