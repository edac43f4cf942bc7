"""The events of requests, calls and their money, of what a session leaves behind, and of triggers."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import msgspec

from halter.core.money import CapReached, Charge, Leg, Overrun, Unit
from halter.core.provenance import Flaw
from halter.core.tools import Effect, Level
from halter.core.usage import Usage
from halter.core.vocabulary import Audit, Event, Outcome, Purpose, RiskLevel


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


class UnheldCost(msgspec.Struct, frozen=True):
    """A cost that was reported although nothing was held for it: what for, and where it counts."""

    name: str
    purpose: Purpose
    accounts: tuple[Leg, ...]


class RequestSettled(Event, frozen=True, kw_only=True):
    """A model answered, or did not; its body is the answer.

    `may_retry` and `retry_after` say whether and when a failure may be retried; one that `needs_person` passes only
    after a person has changed something.
    """

    KIND: ClassVar[str] = "request_settled"

    request: str
    outcome: Outcome
    usage: Usage | None = None
    charge: Charge | None = None
    unheld: UnheldCost | None = None
    error: str = ""
    may_retry: bool = False
    retry_after: int | None = None
    needs_person: bool = False


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
    against the tool's rate, if it has one. `writes` are the digests of what files will hold by it. `flaws` say which of
    its values no trusted place had said; without the values, which are in the body.
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
    flaws: tuple[Flaw, ...] = ()


class CallSettled(Event, frozen=True, kw_only=True):
    """A tool's call came to its outcome; its body is the result."""

    KIND: ClassVar[str] = "call_settled"

    call: str
    outcome: Outcome
    charge: Charge | None = None
    duration_ms: int = 0
    error: str = ""
    audited: bool = False
    unheld: UnheldCost | None = None


class CallRefused(Event, frozen=True, kw_only=True):
    """A brake refused a call before it acted; its body is the arguments.

    One that is `staged` is made at the end of the turn, if a person agrees to it then.
    """

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
    flaws: tuple[Flaw, ...] = ()
    staged: bool = False


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
        return cls(hold=hold, scope=over.scope, window=over.window, unit=over.unit, amount=over.amount)


Severity = Literal["info", "low", "medium", "high", "critical"]
Support = Literal["supported", "unsupported", "unquoted"]
ReviewOutcome = Literal["released", "withheld", "not_reviewed"]
ProposalKind = Literal["finding", "memory", "precedent"]
ProposalVerdict = Literal["kept", "dismissed", "promoted"]


class PhaseEntered(Event, frozen=True, kw_only=True):
    """A session moved on to its next phase after a turn, never back."""

    KIND: ClassVar[str] = "phase_entered"

    phase: str
    number: int
    turn: int = 0


class ContextGiven(Event, frozen=True, kw_only=True):
    """What people had kept of earlier sessions was given to this one; its body is the text, as the model sees it."""

    KIND: ClassVar[str] = "context_given"

    memories: tuple[str, ...] = ()
    precedents: tuple[str, ...] = ()


class HistoryGiven(Event, frozen=True, kw_only=True):
    """A session began with what was said elsewhere; its body is the messages, as JSON.

    A fork was given those of a `session`, up to the event `through`; without one, a program gave its own. `denied`: a
    person denied a call there whose values others had written.
    """

    KIND: ClassVar[str] = "history_given"

    messages: int
    session: str = ""
    through: int = 0
    denied: bool = False


class DocumentRead(Event, frozen=True, kw_only=True):
    """A session read in a document, whose content has this digest."""

    KIND: ClassVar[str] = "document_read"

    document: str
    name: str
    collection: str = ""


class FindingEmitted(Event, frozen=True, kw_only=True):
    """A session found something; its body is what, as JSON. `support` tells whether its quote stands in its source."""

    KIND: ClassVar[str] = "finding_emitted"

    finding: str
    agent: str
    severity: Severity
    support: Support
    document: str = ""
    name: str = ""
    by: str = ""


class JudgesChosen(Event, frozen=True, kw_only=True):
    """How many judges look at findings: as many as were wanted, or fewer because of what they might cost."""

    KIND: ClassVar[str] = "judges_chosen"

    wanted: int
    chosen: int
    items: int
    usd: int
    cap: int | None = None
    sentence: str = ""


class FindingReviewed(Event, frozen=True, kw_only=True):
    """A finding was reviewed by another than its author, or could not be; its body is the review."""

    KIND: ClassVar[str] = "finding_reviewed"

    finding: str
    verdict: ReviewOutcome
    judges: tuple[str, ...] = ()


class MemoryProposed(Event, frozen=True, kw_only=True):
    """A session wants something remembered; its body is what."""

    KIND: ClassVar[str] = "memory_proposed"

    memory: str
    agent: str


class PrecedentProposed(Event, frozen=True, kw_only=True):
    """A session met a case that may be met again; its body is the summary. Equal ones have the same name."""

    KIND: ClassVar[str] = "precedent_proposed"

    precedent: str
    agent: str
    kind: str


class ProposalDecided(Event, frozen=True, kw_only=True):
    """A person kept, dismissed or promoted what a session left behind."""

    KIND: ClassVar[str] = "proposal_decided"

    proposal: str
    about: ProposalKind
    status: ProposalVerdict
    by: str
    reason: str = ""


class NotificationQueued(Event, frozen=True, kw_only=True):
    """Something is to be told over a channel; its body is what, as JSON. It is sent after this is committed."""

    KIND: ClassVar[str] = "notification_queued"

    notification: str
    channel: str
    agent: str
    about: str = ""


class NotificationSent(Event, frozen=True, kw_only=True):
    """It was told, at least once: who gets it twice knows it by its name."""

    KIND: ClassVar[str] = "notification_sent"

    notification: str
    attempts: int


class NotificationFailed(Event, frozen=True, kw_only=True):
    """It could not be told; it is tried again at `next_at`, or never."""

    KIND: ClassVar[str] = "notification_failed"

    notification: str
    attempts: int
    error: str
    next_at: int | None = None


class MessageRouted(Event, frozen=True, kw_only=True):
    """Which way a message took, and why; its body is the message, with the answer where no model was asked."""

    KIND: ClassVar[str] = "message_routed"

    route: str
    strategy: str = ""
    why: str = ""


TriggerKind = Literal["schedule", "watch", "webhook"]
RunCause = Literal["schedule", "watch", "webhook", "person"]
SkipReason = Literal["overlap", "missed", "off", "halted", "too_soon", "active_hours", "cost_cap_reached", "unusable"]


class TriggerMade(Event, frozen=True, kw_only=True):
    """A trigger came to be, or is another one than before; its body is all that is said of it, as JSON.

    `digest` tells whether it changed. One that a person confirmed stands here alone, one of a file also there.
    """

    KIND: ClassVar[str] = "trigger_made"

    trigger: str
    agent: str
    type: TriggerKind
    by: str
    digest: str


class TriggerEnded(Event, frozen=True, kw_only=True):
    """A trigger starts nothing any more."""

    KIND: ClassVar[str] = "trigger_ended"

    trigger: str
    by: str
    reason: str = ""


class RunStarted(Event, frozen=True, kw_only=True):
    """A trigger started a session: at a time, for a document, for a delivery, or because a person said so."""

    KIND: ClassVar[str] = "run_started"

    trigger: str
    session: str
    cause: RunCause
    due_at: int = 0
    item: str = ""
    attempt: int = 1
    by: str = ""


class RunSkipped(Event, frozen=True, kw_only=True):
    """One or more times of a schedule went by, the last of them at `due_at`, and nothing was started."""

    KIND: ClassVar[str] = "run_skipped"

    trigger: str
    why: SkipReason
    due_at: int
    count: int = 1
    sentence: str = ""


class RunQueued(Event, frozen=True, kw_only=True):
    """A run waits for the one before it."""

    KIND: ClassVar[str] = "run_queued"

    trigger: str
    due_at: int


class RunsDelayed(Event, frozen=True, kw_only=True):
    """What a trigger would start waits, for a reason and perhaps until a moment; `waiting` is how many."""

    KIND: ClassVar[str] = "runs_delayed"

    trigger: str
    why: SkipReason
    waiting: int
    sentence: str
    until: int | None = None


class ItemSeen(Event, frozen=True, kw_only=True):
    """A watch found a document that it had not seen before; `item` is the digest of its content."""

    KIND: ClassVar[str] = "item_seen"

    trigger: str
    item: str
    name: str
    size: int = 0
    ignored: bool = False


class ItemQuarantined(Event, frozen=True, kw_only=True):
    """A document is left to a person: it cannot be read, or was tried too often."""

    KIND: ClassVar[str] = "item_quarantined"

    trigger: str
    item: str
    attempts: int
    sentence: str


class ItemReleased(Event, frozen=True, kw_only=True):
    """A person lets a document be tried anew."""

    KIND: ClassVar[str] = "item_released"

    trigger: str
    item: str
    by: str
