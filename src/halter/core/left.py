"""The events of what a session leaves behind: phases, findings, proposals, notifications, what it read."""

from typing import ClassVar, Literal

from halter.core.event import Event

Severity = Literal["info", "low", "medium", "high", "critical"]
Support = Literal["supported", "unsupported", "unquoted"]
Reviewed = Literal["released", "withheld", "not_reviewed"]
Proposal = Literal["finding", "memory", "precedent"]
Kept = Literal["kept", "dismissed", "promoted"]


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
    """Somebody else than its author looked at a finding, or nobody could; its body is what was said of it."""

    KIND: ClassVar[str] = "finding_reviewed"

    finding: str
    verdict: Reviewed
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
    about: Proposal
    status: Kept
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
