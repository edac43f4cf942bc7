"""The events of requests and calls, and of the money that they come to."""

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from halter.core.event import Event
from halter.core.money import CapReached, Charge, Leg, Overrun, Unit
from halter.core.tools import Effect, Level
from halter.core.usage import Usage
from halter.core.vocabulary import Audit, Outcome, Purpose, RiskLevel


class RequestStarted(Event, frozen=True, kw_only=True):
    """A model is about to be asked: the intent, and the money held for it; its body is what is sent.

    `max_output_tokens` is the most that it may write, which may be less than what was asked for. `anonymized` counts
    the values of each kind in whose place the model is sent placeholders.
    """

    KIND: ClassVar[str] = "request_started"

    request: str
    model: str
    purpose: Purpose
    legs: tuple[Leg, ...] = ()
    max_output_tokens: int = 0
    observed: tuple[Outcome, ...] = ()
    anonymized: Mapping[str, int] = {}


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
    against the tool's rate, if it has one. `writes` are the digests of what files will hold by it.
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
    writes: tuple[str, ...] = ()


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
