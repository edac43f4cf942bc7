"""What a session's events fold into, and the table of allowed state transitions."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from halter.core import events as ev
from halter.core.money import Charge, Leg, Unit
from halter.core.ports import Stored
from halter.core.tools import Effect
from halter.core.vocabulary import END_STATES, Origin, Purpose, SessionKind, State

_NO_CHARGE: Final = Charge()
_NOTHING: Final[Mapping[str, Any]] = {}
_NotOfSession: TypeAlias = ev.ArtifactEvent | ev.TriggerEvent | ev.ChannelEvent


class InFlight(msgspec.Struct, frozen=True, gc=False):
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
    def is_repeatable(self) -> bool:
        """Whether repeating it under the same key is harmless."""
        return self.is_call and (self.effect == "read" or self.idempotent)

    def max_charge(self) -> Charge:
        """The charge if the outcome is unknown: all that was held."""
        return Charge(self.held_amount("usd"), self.held_amount("tokens")) if self.legs else _NO_CHARGE

    def held_amount(self, unit: Unit) -> int:
        """The amount that was held of a unit."""
        limit = 0
        for leg in self.legs:
            if leg.unit == unit and leg.amount > limit:
                limit = leg.amount
        return limit


class Session(msgspec.Struct, frozen=True, gc=False):
    """A session after its newest event. `attempts` counts the refused attempts of each call."""

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
    return msgspec.structs.replace(session, head=stored.seq, **_find_changes(session, stored))


def _find_changes(session: Session, stored: Stored) -> Mapping[str, Any]:
    event = stored.event
    if isinstance(event, _NotOfSession):
        return {}
    match event:
        case ev.CallStarted():
            return {"in_flight": {**session.in_flight, event.call: track_call(event, stored)}}
        case ev.RequestStarted():
            return {"in_flight": {**session.in_flight, event.request: track_request(event, stored)}}
        case ev.CallSettled(call=settled, charge=charge) | ev.RequestSettled(request=settled, charge=charge):
            in_flight = {key: value for key, value in session.in_flight.items() if key != settled}
            before, cost = session.spent, charge or _NO_CHARGE
            spent = Charge(usd=before.usd + cost.usd, tokens=before.tokens + cost.tokens)
            return {"in_flight": in_flight, "spent": spent}
        case ev.SessionStarted():
            return {
                "session": event.session,
                "agent": event.agent,
                "kind": event.kind,
                "trigger": event.trigger,
                "parent": event.parent,
                "follows": event.follows,
                "origin": event.origin,
                "started_at": stored.at,
            }
        case ev.SessionWoken():
            return {"state": "RUNNING", "inbox_seen": event.inbox_seen, "wake_at": None}
        case ev.SessionResumed():
            return {"state": "RUNNING", "terminal_reason": "", "ended_at": None}
        case ev.TurnStarted():
            return {"inbox_seen": max(session.inbox_seen, event.inbox_seen)}
        case ev.SessionParked():
            return {"state": event.state, "inbox_seen": event.inbox_seen, "wake_at": event.wake_at}
        case ev.SessionEnded():
            ended = {"state": event.state, "terminal_reason": event.terminal_reason}
            return {**ended, "ended_at": stored.at, "wake_at": None}
        case ev.CostCapReached():
            return {"cost_cap_reached": True}
        case ev.OverrunIncurred():
            return {"overrun": True}
        case ev.CallRefused(call=call) | ev.DecisionAsked(about="approval", subject=call):
            return {"attempts": {**session.attempts, call: session.attempts.get(call, 0) + 1}}
        case ev.PhaseEntered():
            return {"phase": event.phase}
        case ev.Unknown():
            raise make_unknown_event_error(stored)
        case ev.MessageAdded() | ev.ContextCut() | ev.TurnEnded() | ev.TurnSkipped() | ev.RequestRefused():
            return {}
        case ev.WakePosted() | ev.CapChanged() | ev.BodiesErased() | ev.HaltRequested() | ev.HaltLifted():
            return {}
        case ev.DecisionAsked() | ev.DecisionMade() | ev.DecisionWithdrawn() | ev.RuleMade() | ev.RuleEnded():
            return {}
        case ev.ApprovalGiven():
            return {}
        case ev.ToolPinned() | ev.AgentSwitched() | ev.FleetPolicyAdopted() | ev.StoreAccepted() | ev.ContextGiven():
            return {}
        case ev.PersonSignedOn() | ev.SignOnRefused():
            return {}
        case ev.DocumentRead() | ev.JudgesChosen() | ev.MessageRouted() | ev.HotStateSeen() | ev.HistoryGiven():
            return {}
        case ev.GuardrailTriggered() | ev.AttendingFailed() | ev.SensorChanged():
            return {}


def track_request(event: ev.RequestStarted, stored: Stored, accounts: tuple[Leg, ...] = ()) -> InFlight:
    return InFlight(
        id=event.request,
        name=event.model,
        purpose=event.purpose,
        legs=event.legs,
        since=stored.at,
        is_call=False,
        seq=stored.seq,
        accounts=accounts,
    )


def track_call(event: ev.CallStarted, stored: Stored, accounts: tuple[Leg, ...] = ()) -> InFlight:
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
        accounts=accounts,
    )


def replay(events: Iterable[Stored]) -> Session:
    session = Session()
    for stored in events:
        session = fold(session, stored)
    return session


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
