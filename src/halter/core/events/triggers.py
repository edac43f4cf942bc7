"""The events of triggers, their runs, and the documents that a watch found."""

from typing import Literal

from halter.core.vocabulary import RowEvent

TriggerKind = Literal["schedule", "watch", "webhook"]
RunCause = Literal["schedule", "watch", "webhook", "person"]
SkipReason = Literal[
    "overlap", "missed", "off", "halted", "too_soon", "active_hours", "cost_cap_reached", "unusable", "no_progress"
]


class TriggerMade(RowEvent, frozen=True, kw_only=True):
    """A trigger was created or changed; the body is its definition, as JSON.

    `digest` shows whether the definition changed. A trigger that a person confirmed is defined only here; a trigger of
    `agent.yaml` is defined in the file as well.
    """

    KIND = "trigger_made"

    trigger: str
    agent: str
    type: TriggerKind
    by: str
    digest: str


class TriggerEnded(RowEvent, frozen=True, kw_only=True):
    """A trigger was ended; it starts no more sessions."""

    KIND = "trigger_ended"

    trigger: str
    by: str
    reason: str = ""


class RunStarted(RowEvent, frozen=True, kw_only=True):
    """A trigger started a session: at a time, for a document, for a delivery, or on a person's request."""

    KIND = "run_started"

    trigger: str
    session: str
    cause: RunCause
    due_at: int = 0
    item: str = ""
    attempt: int = 1
    by: str = ""


class RunSkipped(RowEvent, frozen=True, kw_only=True):
    """One or more times of a schedule were skipped, the last of them at `due_at`."""

    KIND = "run_skipped"

    trigger: str
    why: SkipReason
    due_at: int
    count: int = 1
    sentence: str = ""


class RunQueued(RowEvent, frozen=True, kw_only=True):
    """A run waits for the previous run."""

    KIND = "run_queued"

    trigger: str
    due_at: int


class RunsDelayed(RowEvent, frozen=True, kw_only=True):
    """The runs of a trigger are delayed, until a moment if it is known; `waiting` is their number."""

    KIND = "runs_delayed"

    trigger: str
    why: SkipReason
    waiting: int
    sentence: str
    until: int | None = None


class ItemSeen(RowEvent, frozen=True, kw_only=True):
    """A watch found a new document; `item` is the digest of its content."""

    KIND = "item_seen"

    trigger: str
    item: str
    name: str
    size: int = 0
    ignored: bool = False


class ItemQuarantined(RowEvent, frozen=True, kw_only=True):
    """A document was quarantined: it is unreadable, or its last attempt failed."""

    KIND = "item_quarantined"

    trigger: str
    item: str
    attempts: int
    sentence: str


class ItemReleased(RowEvent, frozen=True, kw_only=True):
    """A person released a document from quarantine."""

    KIND = "item_released"

    trigger: str
    item: str
    by: str
