"""Which state of a session may follow which: the one table, that every write of a session's life is checked against."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from halter.core.vocabulary import ENDS, State

_WAITING: Final[frozenset[State]] = frozenset(
    ("WAITING_FOR_INPUT", "WAITING_FOR_APPROVAL", "WAITING_FOR_BUDGET", "SLEEPING", "PAUSED")
)
_STOPPED: Final[frozenset[State]] = frozenset(("CANCELLED", "HALTED"))

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {
        # Whoever takes a session over from an owner that went away finds it running, and goes on.
        "RUNNING": frozenset[State](("RUNNING", "WAITING_FOR_TOOL")) | _WAITING | ENDS,
        "WAITING_FOR_TOOL": frozenset[State](("RUNNING", "WAITING_FOR_TOOL")) | _WAITING | ENDS,
        # What rests may rest on, for longer or for something else. Only a halt or a cancel makes an end of it; for all
        # other ends it has to be woken first.
        **{state: frozenset[State](("RUNNING",)) | _WAITING | _STOPPED for state in _WAITING},
        # A person may let an end be none; only a cancelled session is over for good.
        **{state: frozenset[State](() if state == "CANCELLED" else ("RUNNING",)) for state in ENDS},
    }
)


class IllegalTransition(Exception):
    """A write would have moved a session to a state that cannot follow its own: a mistake in the program."""

    def __init__(self, session: str, before: State, after: State) -> None:
        super().__init__(f"Session {session} is {before} and cannot become {after}.")


def demand(session: str, before: State, after: State) -> None:
    """Let a transition be, or raise."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(session, before, after)
