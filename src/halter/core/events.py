"""Everything that can happen, in the past tense.

An event's fields are its facts: they are never erased, and projections are made of them alone. What people,
models and tools said travels beside the event as its body, which can be erased without breaking the chain.

Kinds and versions are stable for ever. A field is only ever added, with a default; anything else is a new
version with an upcaster. An unknown kind can be shown and verified, never folded.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal, Self, get_args

import msgspec

from halter.core.money import CapReached, Charge, Leg, Overrun, Unit
from halter.core.tools import Effect, Level
from halter.core.usage import Usage
from halter.core.vocabulary import (
    Audit,
    Cause,
    DecisionKind,
    Origin,
    Outcome,
    Purpose,
    RiskLevel,
    RuleScope,
    SessionKind,
    State,
    Verdict,
)

FORMAT: Final = 2
"""What a program must understand to take a session. It rises when a new event changes the meaning of old ones."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1


class SessionStarted(Event, frozen=True, kw_only=True):
    """A session came to be; its body is the task it was given.

    A sub-session that is `bound` has what was carved out of its parent's cap as its own cap.
    """

    KIND: ClassVar[str] = "session_started"

    session: str
    agent: str
    kind: SessionKind
    started_by: str
    origin: Origin = "person"
    trusted: bool = True
    trigger: str = ""
    parent: str = ""
    definition: str = ""
    format: int = 1
    carved: tuple[Leg, ...] = ()
    bound: bool = False


class SessionWoken(Event, frozen=True, kw_only=True):
    """A session was taken up again, with its inbox read as far as `inbox_seen`."""

    KIND: ClassVar[str] = "session_woken"

    cause: Cause | Literal["takeover"]
    inbox_seen: int = 0
    format: int = 1


class SessionParked(Event, frozen=True, kw_only=True):
    """A session rests until a moment, until something in its inbox wakes it, or both.

    A resident session keeps its owner while it rests, because its sensors run there.
    """

    KIND: ClassVar[str] = "session_parked"

    state: State
    inbox_seen: int = 0
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()
    resident: bool = False


class SessionEnded(Event, frozen=True, kw_only=True):
    """A session is over; what was carved out of its parent's cap is settled with what it really spent."""

    KIND: ClassVar[str] = "session_ended"

    state: State
    terminal_reason: str
    charge: Charge | None = None


class WakePosted(Event, frozen=True, kw_only=True):
    """Something arrived in a session's inbox; its body is what was said.

    Whether it wakes the session is decided where it is posted, against the session's locked row.
    """

    KIND: ClassVar[str] = "wake_posted"

    cause: Cause
    origin: Origin
    sender: str
    trusted: bool = False
    wakes: bool = True
    name: str = ""


class RequestStarted(Event, frozen=True, kw_only=True):
    """A model is about to be asked: the intent, and the money held for it; its body is what is sent.

    `max_output_tokens` is the most that it may write, which may be less than what was asked for.
    """

    KIND: ClassVar[str] = "request_started"

    request: str
    model: str
    purpose: Purpose
    legs: tuple[Leg, ...] = ()
    max_output_tokens: int = 0
    observed: tuple[Outcome, ...] = ()


class Unheld(msgspec.Struct, frozen=True):
    """A cost that was reported although nothing was held for it: what for, and where it counts."""

    name: str
    purpose: Purpose
    accounts: tuple[Leg, ...]


class RequestSettled(Event, frozen=True, kw_only=True):
    """A model answered, or did not; its body is the answer.

    `may_retry` and `retry_after` say what a failure leaves to whoever wants to ask again.
    """

    KIND: ClassVar[str] = "request_settled"

    request: str
    outcome: Outcome
    usage: Usage | None = None
    charge: Charge | None = None
    unheld: Unheld | None = None
    error: str = ""
    may_retry: bool = False
    retry_after: int | None = None


class RequestRefused(Event, frozen=True, kw_only=True):
    """A brake refused a request before any model was asked; its body is what would have been sent."""

    KIND: ClassVar[str] = "request_refused"

    request: str
    model: str
    purpose: Purpose
    outcome: Outcome
    sentence: str


class CallStarted(Event, frozen=True, kw_only=True):
    """A tool is about to act: the intent, and the money held for it; its body is the arguments.

    `decision` names the approval that it used up. `rated` is the slice of time in which it counts
    against the tool's rate, if it has one.
    """

    KIND: ClassVar[str] = "call_started"

    call: str
    tool: str
    purpose: Purpose = "turn"
    legs: tuple[Leg, ...] = ()
    level: Level = "CONTROLLED"
    effect: Effect = "write"
    idempotent: bool = False
    egress: bool = False
    risk: RiskLevel | None = None
    digest: str = ""
    decision: str = ""
    decided_by: str = ""
    rated: int = 0
    audit: Audit = ""
    parallel_group: str = ""
    phase: str = ""
    observed: tuple[Outcome, ...] = ()


class CallSettled(Event, frozen=True, kw_only=True):
    """A tool's call came to its outcome; its body is the result."""

    KIND: ClassVar[str] = "call_settled"

    call: str
    outcome: Outcome
    charge: Charge | None = None
    duration_ms: int = 0
    error: str = ""
    audited: bool = False
    unheld: Unheld | None = None


class CallRefused(Event, frozen=True, kw_only=True):
    """A brake refused a call before it acted; its body is the arguments. No exception that anybody could swallow."""

    KIND: ClassVar[str] = "call_refused"

    call: str
    tool: str
    outcome: Outcome
    sentence: str
    level: Level = "CONTROLLED"
    risk: RiskLevel | None = None
    decision: str = ""
    decided_by: str = ""
    phase: str = ""


class HaltRequested(Event, frozen=True, kw_only=True):
    """A person, or a guardrail, stops everything in a scope; one that cancels ends a single session for good."""

    KIND: ClassVar[str] = "halt_requested"

    scope: str
    by: str
    reason: str = ""
    cancels: bool = False


class HaltLifted(Event, frozen=True, kw_only=True):
    """A scope may act again; its sessions are let go one after the other over `ramp` microseconds."""

    KIND: ClassVar[str] = "halt_lifted"

    scope: str
    by: str
    ramp: int = 0
    reason: str = ""


class DecisionAsked(Event, frozen=True, kw_only=True):
    """Something waits for a person; its body is what they are shown.

    `digest` binds the answer to the tool, the arguments, the session and the policy that were asked about. `same` and
    `keys` tell what a rule would have to match to answer the very same call; `agent` is told where no session asks.
    """

    KIND: ClassVar[str] = "decision_asked"

    decision: str
    about: DecisionKind
    subject: str
    name: str
    digest: str
    expires_at: int
    level: Level | None = None
    risk: RiskLevel | None = None
    reasons: tuple[str, ...] = ()
    same: str = ""
    keys: tuple[str, ...] = ()
    agent: str = ""


class DecisionMade(Event, frozen=True, kw_only=True):
    """A person decided; the body of an edit is the arguments that they want instead."""

    KIND: ClassVar[str] = "decision_made"

    decision: str
    verdict: Verdict
    by: str
    digest: str
    reason: str = ""


class RuleMade(Event, frozen=True, kw_only=True):
    """A person said "always": calls of a tool that match are agreed to in their scope, until the rule expires.

    `matcher` is JSON that the guard understands; `keys` are all the arguments that a call may have.
    """

    KIND: ClassVar[str] = "rule_made"

    rule: str
    tool: str
    scope: RuleScope
    owner: str
    matcher: str
    keys: tuple[str, ...]
    by: str
    expires_at: int


class RuleEnded(Event, frozen=True, kw_only=True):
    """A person took an "always" back."""

    KIND: ClassVar[str] = "rule_ended"

    rule: str
    by: str
    reason: str = ""


class ToolPinned(Event, frozen=True, kw_only=True):
    """A server's tool may be used as it is now: when it changes, a person is asked first."""

    KIND: ClassVar[str] = "tool_pinned"

    agent: str
    tool: str
    digest: str
    by: str


class CostCapReached(Event, frozen=True, kw_only=True):
    """A call or a request was refused because its bound exceeds what is unspent below a cap."""

    KIND: ClassVar[str] = "cost_cap_reached"

    refused: str
    name: str
    scope: str
    window: str
    unit: Unit
    cap: int
    spent: int
    amount: int

    @classmethod
    def refusing(cls, refused: str, name: str, verdict: CapReached) -> Self:
        """Record a verdict of the money rules."""
        leg = verdict.leg
        return cls(
            refused=refused,
            name=name,
            scope=leg.scope,
            window=leg.window,
            unit=leg.unit,
            cap=verdict.cap,
            spent=verdict.budget.spent,
            amount=leg.amount,
        )


class OverrunIncurred(Event, frozen=True, kw_only=True):
    """An incident: something cost more than was held for it, and a cap was passed."""

    KIND: ClassVar[str] = "overrun_incurred"

    hold: str
    scope: str
    window: str
    unit: Unit
    amount: int

    @classmethod
    def by(cls, hold: str, over: Overrun) -> Self:
        """Record one overrun of a charge."""
        return cls(hold=hold, scope=over.scope, window=over.window, unit=over.unit, amount=over.amount)


class CapChanged(Event, frozen=True, kw_only=True):
    """A person set the cap of a scope, for one window or for the scope's whole life."""

    KIND: ClassVar[str] = "cap_changed"

    scope: str
    window: str
    unit: Unit
    cap: int | None
    by: str
    overrun: int = 0
    reason: str = ""


class BodiesErased(Event, frozen=True, kw_only=True):
    """The bodies of a stream were erased up to a sequence number; its facts and its chain stand."""

    KIND: ClassVar[str] = "bodies_erased"

    stream: str
    through: int
    by: str
    reason: str = ""


class Unknown(msgspec.Struct, frozen=True):
    """An event of a kind or version that this program does not know: shown and verified, never folded."""

    kind: str
    version: int
    facts: bytes


AnyEvent = (
    SessionStarted
    | SessionWoken
    | SessionParked
    | SessionEnded
    | WakePosted
    | RequestStarted
    | RequestSettled
    | RequestRefused
    | CallStarted
    | CallSettled
    | CallRefused
    | HaltRequested
    | HaltLifted
    | DecisionAsked
    | DecisionMade
    | RuleMade
    | RuleEnded
    | ToolPinned
    | CostCapReached
    | OverrunIncurred
    | CapChanged
    | BodiesErased
)

KINDS: Final[Mapping[str, type[AnyEvent]]] = {event.KIND: event for event in get_args(AnyEvent)}
