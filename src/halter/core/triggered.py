"""The events of what starts sessions: each trigger has a stream of its own."""

from typing import ClassVar, Literal

from halter.core.event import Event

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
