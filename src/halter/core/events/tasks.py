"""The events of tasks: phases, context, documents, findings, proposals, and the notifications about them."""

from typing import Literal

from halter.core.vocabulary import Event, Note, RowEvent

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

    KIND = "phase_entered"

    phase: str
    number: int
    turn: int = 0


class ContextGiven(Note, frozen=True, kw_only=True):
    """A session received accepted memories and precedents; the body is the text, as the model sees it."""

    KIND = "context_given"

    memories: tuple[str, ...] = ()
    precedents: tuple[str, ...] = ()


class HistoryGiven(Note, frozen=True, kw_only=True):
    """A session began with earlier messages; the body is the messages, as JSON.

    A fork has those of `session` up to the event `through`; with no `session`, a program supplied them. With
    `denied`, a person denied a call with untrusted values in that history.
    """

    KIND = "history_given"

    messages: int
    session: str = ""
    through: int = 0
    denied: bool = False


class DocumentRead(Note, frozen=True, kw_only=True):
    """A session read a document; `document` is the digest of its content."""

    KIND = "document_read"

    document: str
    name: str
    collection: str = ""


class FindingEmitted(RowEvent, frozen=True, kw_only=True):
    """A session reported a finding; the body is the finding, as JSON. `support` is the result of the quote check."""

    KIND = "finding_emitted"

    finding: str
    agent: str
    severity: Severity
    support: Support
    document: str = ""
    name: str = ""
    by: str = ""


class JudgesChosen(Note, frozen=True, kw_only=True):
    """The number of judges for a review. It is less than `wanted` if their maximum cost exceeds the cap."""

    KIND = "judges_chosen"

    wanted: int
    chosen: int
    items: int
    usd: int
    cap: int | None = None
    sentence: str = ""


class FindingReviewed(RowEvent, frozen=True, kw_only=True):
    """A finding was reviewed by judges other than its author, or could not be; the body is the review."""

    KIND = "finding_reviewed"

    finding: str
    verdict: ReviewOutcome
    judges: tuple[str, ...] = ()


class MemoryProposed(RowEvent, frozen=True, kw_only=True):
    """A session proposed a memory; the body is its text."""

    KIND = "memory_proposed"

    memory: str
    agent: str


class PrecedentProposed(RowEvent, frozen=True, kw_only=True):
    """A session proposed a precedent; the body is its summary. Equal precedents have the same name."""

    KIND = "precedent_proposed"

    precedent: str
    agent: str
    kind: str


class ProposalDecided(RowEvent, frozen=True, kw_only=True):
    """A person accepted, dismissed or promoted a finding or a proposal."""

    KIND = "proposal_decided"

    proposal: str
    about: ProposalKind
    status: ProposalVerdict
    by: str
    reason: str = ""


class NotificationQueued(RowEvent, frozen=True, kw_only=True):
    """A notification was queued for a channel; the body is its content, as JSON. It is sent after this commit."""

    KIND = "notification_queued"

    notification: str
    channel: str
    agent: str
    about: str = ""


class NotificationSent(RowEvent, frozen=True, kw_only=True):
    """A notification was sent at least once. Duplicates have the same id."""

    KIND = "notification_sent"

    notification: str
    attempts: int


class NotificationFailed(RowEvent, frozen=True, kw_only=True):
    """An attempt to send a notification failed. The next attempt is at `next_at`; None means there is none."""

    KIND = "notification_failed"

    notification: str
    attempts: int
    error: str
    next_at: int | None = None


class MessageRouted(Note, frozen=True, kw_only=True):
    """The route of a message and the reason; the body is the message, with the answer if no model was asked."""

    KIND = "message_routed"

    route: str
    strategy: str = ""
    why: str = ""
