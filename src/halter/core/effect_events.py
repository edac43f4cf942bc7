"""The events of requests, calls and their costs, of a session's findings and proposals, and of triggers."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import msgspec

from halter.core.money import CapReached, Charge, Leg, Overrun, Unit
from halter.core.provenance import Flaw
from halter.core.tools import Effect, Level
from halter.core.usage import Usage
from halter.core.vocabulary import Audit, Event, Outcome, Purpose, RiskLevel


class RequestStarted(Event, frozen=True, kw_only=True):
    """The intent of a request and its hold; the body is the prompt as sent.

    `max_output_tokens` bounds the answer, and may be less than the prompt asked for. `anonymized` counts, by kind, the
    values that were replaced by placeholders. `traceparent` is the span of the client whose request it is. If the
    price of the model is not known, `guess` says what is held and charged instead.
    """

    KIND: ClassVar[str] = "request_started"

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
    """The guard refused a request; the body is the prompt that was not sent."""

    KIND: ClassVar[str] = "request_refused"

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
    action_slots: tuple[tuple[str, int], ...] = ()


class SubSessionCost(msgspec.Struct, frozen=True):
    """What a sub-session of a call spent, in micro-dollars. Its own events charge it, also to its parent's cap."""

    session: str
    usd: int = 0


class CallSettled(Event, frozen=True, kw_only=True):
    """The settlement of a call; the body is the result. `sub_session` is the sub-session that the call started."""

    KIND: ClassVar[str] = "call_settled"

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


class FilesGiven(Event, frozen=True, kw_only=True):
    """Files came with the result of a `call`, or else with the message that follows in the inbox.

    The body is parts of a message, as JSON.
    """

    KIND: ClassVar[str] = "files_given"

    call: str = ""


class CallRefused(Event, frozen=True, kw_only=True):
    """The guard refused a call; the body is the arguments.

    A `staged` call is made if a person approves it, before a call that may depend on it or at the end of the turn.
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


class HoldMade(Event, frozen=True, kw_only=True):
    """A call that a person is asked about holds its maximum cost while it waits; `hold` is the id of the decision."""

    KIND: ClassVar[str] = "hold_made"

    hold: str
    name: str
    purpose: Purpose = "turn"
    legs: tuple[Leg, ...]


class HoldReleased(Event, frozen=True, kw_only=True):
    """The hold of a question ended: the call was admitted and has its own hold from now on, or it will not be made."""

    KIND: ClassVar[str] = "hold_released"

    hold: str


class CostCapReached(Event, frozen=True, kw_only=True):
    """A call or a request was refused because its maximum cost exceeds the unspent part of a cap."""

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
    """An incident: an effect cost more than its hold, and the cost exceeded a cap."""

    KIND: ClassVar[str] = "overrun_incurred"

    hold: str
    scope: str
    window: str
    unit: Unit
    amount: int

    @classmethod
    def by(cls, hold: str, overrun: Overrun) -> Self:
        return cls(hold=hold, scope=overrun.scope, window=overrun.window, unit=overrun.unit, amount=overrun.amount)


Severity = Literal["info", "low", "medium", "high", "critical"]
Support = Literal["supported", "unsupported", "unquoted"]
ReviewOutcome = Literal["released", "withheld", "not_reviewed"]
ProposalKind = Literal["finding", "memory", "precedent"]
ProposalVerdict = Literal["kept", "dismissed", "promoted"]
"""A person's verdict, as events, rows and JSON have it. `describe_verdict` words it for people."""


def describe_verdict(status: str) -> str:
    """Describe a verdict on a finding or a proposal: one that is `kept` was accepted."""
    return "accepted" if status == "kept" else status


class PhaseEntered(Event, frozen=True, kw_only=True):
    """A session entered its next phase after a turn. It never returns to an earlier one."""

    KIND: ClassVar[str] = "phase_entered"

    phase: str
    number: int
    turn: int = 0


class ContextGiven(Event, frozen=True, kw_only=True):
    """A session received accepted memories and precedents; the body is the text, as the model sees it."""

    KIND: ClassVar[str] = "context_given"

    memories: tuple[str, ...] = ()
    precedents: tuple[str, ...] = ()


class HistoryGiven(Event, frozen=True, kw_only=True):
    """A session began with earlier messages; the body is the messages, as JSON.

    A fork has those of `session` up to the event `through`; with no `session`, a program supplied them. With
    `denied`, a person denied a call with untrusted values in that history.
    """

    KIND: ClassVar[str] = "history_given"

    messages: int
    session: str = ""
    through: int = 0
    denied: bool = False


class DocumentRead(Event, frozen=True, kw_only=True):
    """A session read a document; `document` is the digest of its content."""

    KIND: ClassVar[str] = "document_read"

    document: str
    name: str
    collection: str = ""


class FindingEmitted(Event, frozen=True, kw_only=True):
    """A session reported a finding; the body is the finding, as JSON. `support` is the result of the quote check."""

    KIND: ClassVar[str] = "finding_emitted"

    finding: str
    agent: str
    severity: Severity
    support: Support
    document: str = ""
    name: str = ""
    by: str = ""


class JudgesChosen(Event, frozen=True, kw_only=True):
    """The number of judges for a review. It is less than `wanted` if their maximum cost exceeds the cap."""

    KIND: ClassVar[str] = "judges_chosen"

    wanted: int
    chosen: int
    items: int
    usd: int
    cap: int | None = None
    sentence: str = ""


class FindingReviewed(Event, frozen=True, kw_only=True):
    """A finding was reviewed by judges other than its author, or could not be; the body is the review."""

    KIND: ClassVar[str] = "finding_reviewed"

    finding: str
    verdict: ReviewOutcome
    judges: tuple[str, ...] = ()


class MemoryProposed(Event, frozen=True, kw_only=True):
    """A session proposed a memory; the body is its text."""

    KIND: ClassVar[str] = "memory_proposed"

    memory: str
    agent: str


class PrecedentProposed(Event, frozen=True, kw_only=True):
    """A session proposed a precedent; the body is its summary. Equal precedents have the same name."""

    KIND: ClassVar[str] = "precedent_proposed"

    precedent: str
    agent: str
    kind: str


class ProposalDecided(Event, frozen=True, kw_only=True):
    """A person accepted, dismissed or promoted a finding or a proposal."""

    KIND: ClassVar[str] = "proposal_decided"

    proposal: str
    about: ProposalKind
    status: ProposalVerdict
    by: str
    reason: str = ""


class NotificationQueued(Event, frozen=True, kw_only=True):
    """A notification was queued for a channel; the body is its content, as JSON. It is sent after this commit."""

    KIND: ClassVar[str] = "notification_queued"

    notification: str
    channel: str
    agent: str
    about: str = ""


class NotificationSent(Event, frozen=True, kw_only=True):
    """A notification was sent at least once. Duplicates have the same id."""

    KIND: ClassVar[str] = "notification_sent"

    notification: str
    attempts: int


class NotificationFailed(Event, frozen=True, kw_only=True):
    """An attempt to send a notification failed. The next attempt is at `next_at`; None means there is none."""

    KIND: ClassVar[str] = "notification_failed"

    notification: str
    attempts: int
    error: str
    next_at: int | None = None


class MessageRouted(Event, frozen=True, kw_only=True):
    """The route of a message and the reason; the body is the message, with the answer if no model was asked."""

    KIND: ClassVar[str] = "message_routed"

    route: str
    strategy: str = ""
    why: str = ""


TriggerKind = Literal["schedule", "watch", "webhook"]
RunCause = Literal["schedule", "watch", "webhook", "person"]
SkipReason = Literal[
    "overlap", "missed", "off", "halted", "too_soon", "active_hours", "cost_cap_reached", "unusable", "no_progress"
]


class TriggerMade(Event, frozen=True, kw_only=True):
    """A trigger was created or changed; the body is its definition, as JSON.

    `digest` shows whether the definition changed. A trigger that a person confirmed is defined only here; a trigger of
    `agent.yaml` is defined in the file as well.
    """

    KIND: ClassVar[str] = "trigger_made"

    trigger: str
    agent: str
    type: TriggerKind
    by: str
    digest: str


class TriggerEnded(Event, frozen=True, kw_only=True):
    """A trigger was ended; it starts no more sessions."""

    KIND: ClassVar[str] = "trigger_ended"

    trigger: str
    by: str
    reason: str = ""


class RunStarted(Event, frozen=True, kw_only=True):
    """A trigger started a session: at a time, for a document, for a delivery, or on a person's request."""

    KIND: ClassVar[str] = "run_started"

    trigger: str
    session: str
    cause: RunCause
    due_at: int = 0
    item: str = ""
    attempt: int = 1
    by: str = ""


class RunSkipped(Event, frozen=True, kw_only=True):
    """One or more times of a schedule were skipped, the last of them at `due_at`."""

    KIND: ClassVar[str] = "run_skipped"

    trigger: str
    why: SkipReason
    due_at: int
    count: int = 1
    sentence: str = ""


class RunQueued(Event, frozen=True, kw_only=True):
    """A run waits for the previous run."""

    KIND: ClassVar[str] = "run_queued"

    trigger: str
    due_at: int


class RunsDelayed(Event, frozen=True, kw_only=True):
    """The runs of a trigger are delayed, until a moment if it is known; `waiting` is their number."""

    KIND: ClassVar[str] = "runs_delayed"

    trigger: str
    why: SkipReason
    waiting: int
    sentence: str
    until: int | None = None


class ItemSeen(Event, frozen=True, kw_only=True):
    """A watch found a new document; `item` is the digest of its content."""

    KIND: ClassVar[str] = "item_seen"

    trigger: str
    item: str
    name: str
    size: int = 0
    ignored: bool = False


class ItemQuarantined(Event, frozen=True, kw_only=True):
    """A document was quarantined: it is unreadable, or its last attempt failed."""

    KIND: ClassVar[str] = "item_quarantined"

    trigger: str
    item: str
    attempts: int
    sentence: str


class ItemReleased(Event, frozen=True, kw_only=True):
    """A person released a document from quarantine."""

    KIND: ClassVar[str] = "item_released"

    trigger: str
    item: str
    by: str
