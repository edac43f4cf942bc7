"""A session is its events: this is what they fold into."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from halter.core.events import (
    AgentSwitched,
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
    Leaving,
    MessageAdded,
    MessageRouted,
    OfTriggers,
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
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
)
from halter.core.money import Charge, Leg
from halter.core.ports import Stored
from halter.core.tools import Effect
from halter.core.vocabulary import ENDS, Purpose, SessionKind, State

_NOTHING: Final = Charge()


class InFlight(msgspec.Struct, frozen=True):
    """An intent without its outcome: after a crash it is in doubt.

    `seq` is the intent's place in its stream. `accounts` say where a cost counts although nothing was held for it.
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
        """Tell whether doing it again under the same key changes nothing that it has not changed already."""
        return self.is_call and (self.effect == "read" or self.idempotent)

    def most(self) -> Charge:
        """Tell the charge of something unanswerable: all that was held for it."""
        if not self.legs:
            return _NOTHING
        return Charge(
            usd=max((leg.amount for leg in self.legs if leg.unit == "usd"), default=0),
            tokens=max((leg.amount for leg in self.legs if leg.unit == "tokens"), default=0),
        )


class Session(msgspec.Struct, frozen=True):
    """Where a session stands after its newest event.

    `attempts` counts how often each call was asked for without being let through.
    """

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
        """Tell whether the session is over."""
        return self.state in ENDS

    @property
    def stands(self) -> State:
        """Tell the state that a person is shown: a session that runs waits for its tools while calls are in flight."""
        calls = any(flight.is_call for flight in self.in_flight.values())
        return "WAITING_FOR_TOOL" if calls and self.state == "RUNNING" else self.state


class UnknownEvent(Exception):
    """A session has an event that this program does not understand; only a newer program may take it."""


def not_known(stored: Stored) -> UnknownEvent:
    """Say that a session, or its inbox, holds what only a newer program can read."""
    return UnknownEvent(
        f"Event {stored.seq} of {stored.stream} is a {stored.kind} of version {stored.version}, "
        "which this program does not know. Use the newer Halter for this session."
    )


def fold(session: Session, stored: Stored) -> Session:
    """Take one event of the session's own stream into its state."""
    event = stored.event
    if isinstance(event, Leaving | OfTriggers):
        return _next(session, stored)
    match event:
        case CallStarted():
            in_flight = {**session.in_flight, event.call: call_in_flight(event, stored)}
            return _next(session, stored, in_flight=in_flight)
        case RequestStarted():
            flight = request_in_flight(event, stored)
            return _next(session, stored, in_flight={**session.in_flight, event.request: flight})
        case CallSettled():
            return _settled(session, stored, event.call, event.charge)
        case RequestSettled():
            return _settled(session, stored, event.request, event.charge)
        case SessionStarted():
            return _next(
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
            return _next(session, stored, state="RUNNING", inbox_seen=event.inbox_seen, wake_at=None)
        case SessionResumed():
            return _next(session, stored, state="RUNNING", terminal_reason="", ended_at=None)
        case TurnStarted():
            return _next(session, stored, inbox_seen=max(session.inbox_seen, event.inbox_seen))
        case MessageAdded() | ContextCut() | TurnEnded():
            return _next(session, stored)
        case SessionParked():
            return _next(session, stored, state=event.state, inbox_seen=event.inbox_seen, wake_at=event.wake_at)
        case SessionEnded():
            return _next(
                session,
                stored,
                state=event.state,
                terminal_reason=event.terminal_reason,
                ended_at=stored.at,
                wake_at=None,
            )
        case CostCapReached():
            return _next(session, stored, cost_cap_reached=True)
        case OverrunIncurred():
            return _next(session, stored, overrun=True)
        case CallRefused(call=call) | DecisionAsked(about="approval", subject=call):
            return _next(session, stored, attempts={**session.attempts, call: session.attempts.get(call, 0) + 1})
        case RequestRefused() | DecisionAsked():
            return _next(session, stored)
        case WakePosted() | CapChanged() | BodiesErased() | HaltRequested() | HaltLifted() | DecisionMade():
            return _next(session, stored)
        case RuleMade() | RuleEnded() | ToolPinned() | AgentSwitched() | DecisionWithdrawn() | FleetPolicyAdopted():
            return _next(session, stored)
        case StoreAccepted():
            return _next(session, stored)
        case HotStateSeen() | TurnSkipped() | GuardrailTriggered() | SensorChanged() | AttendingFailed():
            return _next(session, stored)
        case PhaseEntered():
            return _next(session, stored, phase=event.phase)
        case ContextGiven() | DocumentRead() | JudgesChosen() | MessageRouted():
            return _next(session, stored)
        case Unknown():
            raise not_known(stored)


def request_in_flight(event: RequestStarted, stored: Stored) -> InFlight:
    """Remember a request that was begun."""
    return InFlight(event.request, event.model, event.purpose, event.legs, stored.at, is_call=False, seq=stored.seq)


def call_in_flight(event: CallStarted, stored: Stored) -> InFlight:
    """Remember a call that was begun."""
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
    """Fold a whole stream from its start."""
    session = Session()
    for stored in events:
        session = fold(session, stored)
    return session


def _next(before: Session, stored: Stored, **changes: Any) -> Session:
    return msgspec.structs.replace(before, head=stored.seq, **changes)


def _settled(session: Session, stored: Stored, flight: str, charge: Charge | None) -> Session:
    in_flight = {key: value for key, value in session.in_flight.items() if key != flight}
    spent = session.spent
    if charge is not None:
        spent = Charge(usd=spent.usd + charge.usd, tokens=spent.tokens + charge.tokens)
    return _next(session, stored, in_flight=in_flight, spent=spent)
