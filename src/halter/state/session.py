"""What a session's events fold into, and the table of allowed state transitions."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.events import (
    AgentSwitched,
    ArtifactEvent,
    AttendingFailed,
    BodiesErased,
    CallRefused,
    CallSettled,
    CallStarted,
    CapChanged,
    ContextCut,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    DocumentRead,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HotStateSeen,
    JudgesChosen,
    MessageAdded,
    MessageRouted,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RuleEnded,
    RuleMade,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    StoreAccepted,
    ToolPinned,
    TriggerEvent,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
)
from halter.core.money import Charge, Leg
from halter.core.ports import Stored
from halter.core.tools import Effect
from halter.core.vocabulary import END_STATES, Purpose, SessionKind, State

_NO_CHARGE: Final = Charge()


class InFlight(msgspec.Struct, frozen=True):
    """An intent without its outcome: after a crash it is in doubt.

    `seq` is the intent's place in its stream. `accounts` are charged if it costs something although nothing was held.
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
    def may_repeat(self) -> bool:
        """Whether repeating it under the same key is harmless."""
        return self.is_call and (self.effect == "read" or self.idempotent)

    def most(self) -> Charge:
        """The charge if the outcome is unknown: all that was held."""
        if not self.legs:
            return _NO_CHARGE
        return Charge(
            usd=max((leg.amount for leg in self.legs if leg.unit == "usd"), default=0),
            tokens=max((leg.amount for leg in self.legs if leg.unit == "tokens"), default=0),
        )


class Session(msgspec.Struct, frozen=True):
    """A session after its newest event. `attempts` counts the refused attempts of each call."""

    session: str = ""
    agent: str = ""
    kind: SessionKind = "task"
    trigger: str = ""
    parent: str = ""
    follows: str = ""
    state: State = "RUNNING"
    terminal_reason: str = ""
    started_at: int = 0
    ended_at: int | None = None
    wake_at: int | None = None
    inbox_seen: int = 0
    head: int = 0
    in_flight: dict[str, InFlight] = {}
    spent: Charge = Charge()
    cost_cap_reached: bool = False
    overrun: bool = False
    attempts: dict[str, int] = {}
    phase: str = ""

    @property
    def ended(self) -> bool:
        return self.state in END_STATES

    @property
    def stands(self) -> State:
        """The state shown to people: a running session with calls in flight is waiting for tools."""
        calls = any(flight.is_call for flight in self.in_flight.values())
        return "WAITING_FOR_TOOL" if calls and self.state == "RUNNING" else self.state


class UnknownEvent(Exception):
    """The session has an event this program does not know; only a newer program may take it."""


def make_unknown_event_error(stored: Stored) -> UnknownEvent:
    return UnknownEvent(
        f"Event {stored.seq} of {stored.stream} is a {stored.kind} of version {stored.version}, "
        "which this program does not know. Use the newer Halter for this session."
    )


def fold(session: Session, stored: Stored) -> Session:
    event = stored.event
    if isinstance(event, ArtifactEvent | TriggerEvent):
        return _advance_session(session, stored)
    match event:
        case CallStarted():
            in_flight = {**session.in_flight, event.call: track_call(event, stored)}
            return _advance_session(session, stored, in_flight=in_flight)
        case RequestStarted():
            flight = track_request(event, stored)
            return _advance_session(session, stored, in_flight={**session.in_flight, event.request: flight})
        case CallSettled():
            return _settle_flight(session, stored, event.call, event.charge)
        case RequestSettled():
            return _settle_flight(session, stored, event.request, event.charge)
        case SessionStarted():
            return _advance_session(
                session,
                stored,
                session=event.session,
                agent=event.agent,
                kind=event.kind,
                trigger=event.trigger,
                parent=event.parent,
                follows=event.follows,
                started_at=stored.at,
            )
        case SessionWoken():
            return _advance_session(session, stored, state="RUNNING", inbox_seen=event.inbox_seen, wake_at=None)
        case SessionResumed():
            return _advance_session(session, stored, state="RUNNING", terminal_reason="", ended_at=None)
        case TurnStarted():
            return _advance_session(session, stored, inbox_seen=max(session.inbox_seen, event.inbox_seen))
        case MessageAdded() | ContextCut() | TurnEnded():
            return _advance_session(session, stored)
        case SessionParked():
            return _advance_session(
                session, stored, state=event.state, inbox_seen=event.inbox_seen, wake_at=event.wake_at
            )
        case SessionEnded():
            return _advance_session(
                session,
                stored,
                state=event.state,
                terminal_reason=event.terminal_reason,
                ended_at=stored.at,
                wake_at=None,
            )
        case CostCapReached():
            return _advance_session(session, stored, cost_cap_reached=True)
        case OverrunIncurred():
            return _advance_session(session, stored, overrun=True)
        case CallRefused(call=call) | DecisionAsked(about="approval", subject=call):
            return _advance_session(
                session, stored, attempts={**session.attempts, call: session.attempts.get(call, 0) + 1}
            )
        case RequestRefused() | DecisionAsked():
            return _advance_session(session, stored)
        case WakePosted() | CapChanged() | BodiesErased() | HaltRequested() | HaltLifted() | DecisionMade():
            return _advance_session(session, stored)
        case RuleMade() | RuleEnded() | ToolPinned() | AgentSwitched() | DecisionWithdrawn() | FleetPolicyAdopted():
            return _advance_session(session, stored)
        case StoreAccepted():
            return _advance_session(session, stored)
        case HotStateSeen() | TurnSkipped() | GuardrailTriggered() | SensorChanged() | AttendingFailed():
            return _advance_session(session, stored)
        case PhaseEntered():
            return _advance_session(session, stored, phase=event.phase)
        case ContextGiven() | DocumentRead() | JudgesChosen() | MessageRouted():
            return _advance_session(session, stored)
        case Unknown():
            raise make_unknown_event_error(stored)


def track_request(event: RequestStarted, stored: Stored) -> InFlight:
    return InFlight(event.request, event.model, event.purpose, event.legs, stored.at, is_call=False, seq=stored.seq)


def track_call(event: CallStarted, stored: Stored) -> InFlight:
    return InFlight(
        id=event.call,
        name=event.tool,
        purpose=event.purpose,
        legs=event.legs,
        since=stored.at,
        is_call=True,
        effect=event.effect,
        idempotent=event.idempotent,
        audited=event.audit != "",
        phase=event.phase,
        seq=stored.seq,
    )


def replay(events: Iterable[Stored]) -> Session:
    session = Session()
    for stored in events:
        session = fold(session, stored)
    return session


def _advance_session(before: Session, stored: Stored, **changes: Any) -> Session:
    return msgspec.structs.replace(before, head=stored.seq, **changes)


def _settle_flight(session: Session, stored: Stored, flight: str, charge: Charge | None) -> Session:
    in_flight = {key: value for key, value in session.in_flight.items() if key != flight}
    spent = session.spent
    if charge is not None:
        spent = Charge(usd=spent.usd + charge.usd, tokens=spent.tokens + charge.tokens)
    return _advance_session(session, stored, in_flight=in_flight, spent=spent)


_WAITING: Final[frozenset[State]] = frozenset(
    ("WAITING_FOR_INPUT", "WAITING_FOR_APPROVAL", "WAITING_FOR_BUDGET", "SLEEPING", "PAUSED")
)
_STOPPED: Final[frozenset[State]] = frozenset(("CANCELLED", "HALTED"))

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {
        # A takeover from a dead owner finds the session running.
        "RUNNING": frozenset[State](("RUNNING", "WAITING_FOR_TOOL")) | _WAITING | END_STATES,
        "WAITING_FOR_TOOL": frozenset[State](("RUNNING", "WAITING_FOR_TOOL")) | _WAITING | END_STATES,
        # What rests may rest on, for longer or for something else. Only a halt or a cancel makes an end of it; for all
        # other ends it has to be woken first.
        **{state: frozenset[State](("RUNNING",)) | _WAITING | _STOPPED for state in _WAITING},
        # A person may let an end be none; only a cancelled session is over for good.
        **{state: frozenset[State](() if state == "CANCELLED" else ("RUNNING",)) for state in END_STATES},
    }
)


class IllegalTransition(Exception):
    """A write would have made an illegal state transition: a bug."""

    def __init__(self, session: str, before: State, after: State) -> None:
        super().__init__(f"Session {session} is {before} and cannot become {after}.")


def check_transition(session: str, before: State, after: State) -> None:
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(session, before, after)
