"""The state of a session as a fold of its events, and the table of allowed state transitions."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    OverrunIncurred,
    PhaseEntered,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnStarted,
    Unknown,
)
from halter.core.money import Charge, Leg, Unit
from halter.core.ports import Stored
from halter.core.tools import Effect
from halter.core.vocabulary import END_STATES, Note, Origin, Purpose, RowEvent, SessionKind, ShownState, State

_NO_CHARGE: Final = Charge()
_NOTHING: Final[Mapping[str, Any]] = {}


class InFlight(msgspec.Struct, frozen=True, gc=False):
    """An intent without a settlement; after a crash it is in doubt.

    `seq` is the sequence number of the intent. `accounts` are charged if it has a cost although nothing was held.
    """

    id: str
    name: str
    purpose: Purpose
    legs: tuple[Leg, ...]
    since: int
    is_call: bool
    effect: Effect = "write"
    idempotent: bool = False
    audited: bool = False
    phase: str = ""
    seq: int = 0
    accounts: tuple[Leg, ...] = ()

    @property
    def is_repeatable(self) -> bool:
        """True if a repetition with the same key is harmless."""
        return self.is_call and (self.effect == "read" or self.idempotent)

    @property
    def may_have_sub_session(self) -> bool:
        """True if the call may have asked another agent, which is a repeatable call that may change something."""
        return self.is_call and self.effect == "write" and self.idempotent

    def max_charge(self) -> Charge:
        """Return the charge if the outcome is unknown: the whole hold."""
        return Charge(self.held_amount("usd"), self.held_amount("tokens")) if self.legs else _NO_CHARGE

    def held_amount(self, unit: Unit) -> int:
        """Return the held amount of a unit."""
        amount = 0
        for leg in self.legs:
            if leg.unit == unit and leg.amount > amount:
                amount = leg.amount
        return amount


class Session(msgspec.Struct, frozen=True, gc=False):
    """A session as of its newest event. `attempts` counts the refused attempts of each call."""

    session: str = ""
    agent: str = ""
    kind: SessionKind = "task"
    trigger: str = ""
    parent: str = ""
    follows: str = ""
    origin: Origin = "person"
    state: State = "RUNNING"
    terminal_reason: str = ""
    started_at: int = 0
    ended_at: int | None = None
    wake_at: int | None = None
    inbox_seen: int = 0
    head: int = 0
    in_flight: Mapping[str, InFlight] = msgspec.field(default_factory=lambda: _NOTHING)
    spent: Charge = _NO_CHARGE
    cost_cap_reached: bool = False
    overrun: bool = False
    attempts: Mapping[str, int] = msgspec.field(default_factory=lambda: _NOTHING)
    phase: str = ""

    @property
    def ended(self) -> bool:
        return self.state in END_STATES

    @property
    def stands(self) -> State:
        """The state shown to people: a running session with calls in flight waits for tools."""
        has_calls = any(effect.is_call for effect in self.in_flight.values())
        return "WAITING_FOR_TOOL" if has_calls and self.state == "RUNNING" else self.state


class UnknownEvent(Exception):
    """The session has an event that this program does not know. Only a newer program may run it."""


def make_unknown_event_error(stored_event: Stored) -> UnknownEvent:
    return UnknownEvent(
        f"Event {stored_event.seq} of {stored_event.stream} is a {stored_event.kind} of version "
        f"{stored_event.version}, which this program does not know. Use the newer Halter for this session."
    )


def fold(session: Session, stored_event: Stored) -> Session:
    return msgspec.structs.replace(session, head=stored_event.seq, **_find_changes(session, stored_event))


def _find_changes(session: Session, stored_event: Stored) -> Mapping[str, Any]:
    event = stored_event.event
    match event:
        case CallStarted():
            return {"in_flight": {**session.in_flight, event.call: track_call(event, stored_event)}}
        case RequestStarted():
            return {"in_flight": {**session.in_flight, event.request: track_request(event, stored_event)}}
        case CallSettled(call=settled, charge=charge) | RequestSettled(request=settled, charge=charge):
            in_flight = {key: value for key, value in session.in_flight.items() if key != settled}
            old_spent, cost = session.spent, charge or _NO_CHARGE
            cost_micros = event.cost_micros if isinstance(event, CallSettled) else cost.usd
            new_spent = Charge(usd=old_spent.usd + cost_micros, tokens=old_spent.tokens + cost.tokens)
            return {"in_flight": in_flight, "spent": new_spent}
        case SessionStarted():
            return {
                "session": event.session,
                "agent": event.agent,
                "kind": event.kind,
                "trigger": event.trigger,
                "parent": event.parent,
                "follows": event.follows,
                "origin": event.origin,
                "started_at": stored_event.at,
            }
        case SessionWoken():
            return {"state": "RUNNING", "inbox_seen": event.inbox_seen, "wake_at": None}
        case SessionResumed():
            return {"state": "RUNNING", "terminal_reason": "", "ended_at": None}
        case TurnStarted():
            return {"inbox_seen": max(session.inbox_seen, event.inbox_seen)}
        case SessionParked():
            return {"state": event.state, "inbox_seen": event.inbox_seen, "wake_at": event.wake_at}
        case SessionEnded():
            end = {"state": event.state, "terminal_reason": event.terminal_reason}
            return {**end, "ended_at": stored_event.at, "wake_at": None}
        case CostCapReached():
            return {"cost_cap_reached": True}
        case OverrunIncurred():
            return {"overrun": True}
        case CallRefused(call=call) | DecisionAsked(about="approval", subject=call):
            return {"attempts": {**session.attempts, call: session.attempts.get(call, 0) + 1}}
        case PhaseEntered():
            return {"phase": event.phase}
        case Unknown():
            raise make_unknown_event_error(stored_event)
        case DecisionAsked() | Note() | RowEvent():
            return {}


def track_request(event: RequestStarted, stored_event: Stored, accounts: tuple[Leg, ...] = ()) -> InFlight:
    return InFlight(
        id=event.request,
        name=event.model,
        purpose=event.purpose,
        legs=event.legs,
        since=stored_event.at,
        is_call=False,
        seq=stored_event.seq,
        accounts=accounts,
    )


def track_call(event: CallStarted, stored_event: Stored, accounts: tuple[Leg, ...] = ()) -> InFlight:
    return InFlight(
        id=event.call,
        name=event.tool,
        purpose=event.purpose,
        legs=event.legs,
        since=stored_event.at,
        is_call=True,
        effect=event.effect,
        idempotent=event.idempotent,
        audited=event.audit != "",
        phase=event.phase,
        seq=stored_event.seq,
        accounts=accounts,
    )


def replay(events: Iterable[Stored]) -> Session:
    session = Session()
    for stored_event in events:
        session = fold(session, stored_event)
    return session


_WAITING: Final[frozenset[State]] = frozenset(
    ("WAITING_FOR_INPUT", "WAITING_FOR_APPROVAL", "WAITING_FOR_BUDGET", "SLEEPING", "PAUSED")
)
_STOPPED: Final[frozenset[State]] = frozenset(("CANCELLED", "HALTED"))

TRANSITIONS: Final[Mapping[ShownState, frozenset[State]]] = MappingProxyType(
    {
        # A takeover from a dead owner finds the session running.
        "RUNNING": frozenset[State](("RUNNING", "WAITING_FOR_TOOL")) | _WAITING | END_STATES,
        "WAITING_FOR_TOOL": frozenset[State](("RUNNING", "WAITING_FOR_TOOL")) | _WAITING | END_STATES,
        # A parked session may be parked again, with another state. Only a halt or a cancel ends it directly; for every
        # other end it must be woken first.
        **{state: frozenset[State](("RUNNING",)) | _WAITING | _STOPPED for state in _WAITING},
        # A person may reopen an ended session, except a cancelled one.
        **{state: frozenset[State](() if state == "CANCELLED" else ("RUNNING",)) for state in END_STATES},
    }
)


class IllegalTransition(Exception):
    """A write would make an illegal state transition, which is a bug."""

    def __init__(self, session: str, current: ShownState, target: State) -> None:
        super().__init__(f"Session {session} is {current} and cannot become {target}.")


def check_transition(session: str, current: ShownState, target: State) -> None:
    if target not in TRANSITIONS[current]:
        raise IllegalTransition(session, current, target)
