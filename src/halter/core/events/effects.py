"""The events of requests and calls, of what was held for them, and of what they cost."""

from collections.abc import Mapping
from typing import Self

import msgspec

from halter.core.money import CapReached, Charge, Leg, Overrun, Unit
from halter.core.provenance import Flaw
from halter.core.tools import Effect, Level
from halter.core.usage import Usage
from halter.core.vocabulary import Audit, Event, Note, Outcome, Purpose, RiskLevel, RowEvent


class RequestStarted(Event, frozen=True, kw_only=True):
    """The intent of a request and its hold; the body is the prompt as sent.

    `max_output_tokens` bounds the answer, and may be less than the prompt asked for. `anonymized` counts, by kind, the
    values that were replaced by placeholders. `traceparent` is the span of the client whose request it is. If the
    price of the model is not known, `guess` says what is held and charged instead.
    """

    KIND = "request_started"

    request: str
    model: str
    purpose: Purpose
    legs: tuple[Leg, ...] = ()
    max_output_tokens: int = 0
    observed: tuple[Outcome, ...] = ()
    anonymized: Mapping[str, int] = {}
    traceparent: str = ""
    guess: str = ""


class UnheldCost(msgspec.Struct, frozen=True):
    """The purpose and the accounts of a reported cost for which nothing was held."""

    name: str
    purpose: Purpose
    accounts: tuple[Leg, ...]


class RequestSettled(Event, frozen=True, kw_only=True):
    """The settlement of a request; the body is the answer.

    `may_retry` and `retry_after` say whether and when a failure may be retried. A failure that `needs_person` persists
    until a person changes the configuration or the account.
    """

    KIND = "request_settled"

    request: str
    outcome: Outcome
    usage: Usage | None = None
    charge: Charge | None = None
    unheld: UnheldCost | None = None
    error: str = ""
    may_retry: bool = False
    retry_after: int | None = None
    needs_person: bool = False


class RequestRefused(Note, frozen=True, kw_only=True):
    """The guard refused a request; the body is the prompt that was not sent."""

    KIND = "request_refused"

    request: str
    model: str
    purpose: Purpose
    outcome: Outcome
    sentence: str


class CallStarted(Event, frozen=True, kw_only=True):
    """The intent of a call and its hold; the body is the arguments.

    `decision` names the approval that it used. `rated` is the time slice in which it counts against the tool's rate, if
    the tool has one. `writes` are the digests of the files that it will write. `flaws` name the arguments with
    untrusted values; the values themselves are in the body. `action_slots` are the limits of actions per minute against
    which it counts, each with the slot that it takes for a minute.
    """

    KIND = "call_started"

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
    flaws: tuple[Flaw, ...] = ()
    action_slots: tuple[tuple[str, int], ...] = ()


class SubSessionCost(msgspec.Struct, frozen=True):
    """What a sub-session of a call spent, in micro-dollars. Its own events charge it, also to its parent's cap."""

    session: str
    usd: int = 0


class CallSettled(Event, frozen=True, kw_only=True):
    """The settlement of a call; the body is the result. `sub_session` is the sub-session that the call started."""

    KIND = "call_settled"

    call: str
    outcome: Outcome
    charge: Charge | None = None
    duration_ms: int = 0
    error: str = ""
    audited: bool = False
    unheld: UnheldCost | None = None
    sub_session: SubSessionCost | None = None

    @property
    def cost_micros(self) -> int:
        """What the call cost its session, with what its sub-session spent."""
        return (self.charge.usd if self.charge else 0) + (self.sub_session.usd if self.sub_session else 0)


class FilesGiven(Note, frozen=True, kw_only=True):
    """Files came with the result of a `call`, or else with the message that follows in the inbox.

    The body is parts of a message, as JSON.
    """

    KIND = "files_given"

    call: str = ""


class CallRefused(Event, frozen=True, kw_only=True):
    """The guard refused a call; the body is the arguments.

    A `staged` call is made if a person approves it, before a call that may depend on it or at the end of the turn.
    """

    KIND = "call_refused"

    call: str
    tool: str
    outcome: Outcome
    sentence: str
    level: Level = "CONTROLLED"
    risk: RiskLevel | None = None
    decision: str = ""
    decided_by: str = ""
    phase: str = ""
    flaws: tuple[Flaw, ...] = ()
    staged: bool = False


class HoldMade(RowEvent, frozen=True, kw_only=True):
    """A call that a person is asked about holds its maximum cost while it waits; `hold` is the id of the decision."""

    KIND = "hold_made"

    hold: str
    name: str
    purpose: Purpose = "turn"
    legs: tuple[Leg, ...]


class HoldReleased(RowEvent, frozen=True, kw_only=True):
    """The hold of a question ended: the call was admitted and has its own hold from now on, or it will not be made."""

    KIND = "hold_released"

    hold: str


class CostCapReached(Event, frozen=True, kw_only=True):
    """A call or a request was refused because its maximum cost exceeds the unspent part of a cap."""

    KIND = "cost_cap_reached"

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
    """An incident: an effect cost more than its hold, and the cost exceeded a cap."""

    KIND = "overrun_incurred"

    hold: str
    scope: str
    window: str
    unit: Unit
    amount: int

    @classmethod
    def by(cls, hold: str, overrun: Overrun) -> Self:
        return cls(hold=hold, scope=overrun.scope, window=overrun.window, unit=overrun.unit, amount=overrun.amount)
