"""The rows of triggers, and of what sessions leave behind. Each is a projection, as those in `rows` are."""

from typing import ClassVar, Final

from halter.core.row import Row


class TriggerRow(Row, frozen=True):
    """Where a trigger stands: all of it follows from its own stream.

    `ticked_at` is the last of its times that was dealt with, `queued_at` one that waits for the run before it.
    `session` is its newest, begun at `ran_at`.
    """

    TABLE: ClassVar[str] = "triggers"
    KEY: ClassVar[tuple[str, ...]] = ("trigger",)

    trigger: str
    agent: str = ""
    type: str = ""
    digest: str = ""
    made_by: str = ""
    made_at: int = 0
    made_seq: int = 0
    ended_at: int | None = None
    ticked_at: int = 0
    queued_at: int | None = None
    runs: int = 0
    session: str = ""
    ran_at: int = 0
    delayed: str = ""
    delayed_until: int | None = None


class ItemRow(Row, frozen=True):
    """One document of a watch, known by its content. Whether it is done is told by how its newest session ended."""

    TABLE: ClassVar[str] = "items"
    KEY: ClassVar[tuple[str, ...]] = ("trigger", "item")

    trigger: str
    item: str
    name: str = ""
    size: int = 0
    seen_at: int = 0
    ignored: int = 0
    attempts: int = 0
    session: str = ""
    quarantined_at: int | None = None
    sentence: str = ""


class OutputRow(Row, frozen=True):
    """What an agent's calls wrote into files, by the digest of the content: no watch of it takes that for new."""

    TABLE: ClassVar[str] = "outputs"
    KEY: ClassVar[tuple[str, ...]] = ("agent", "digest")

    agent: str
    digest: str
    at: int


class FindingRow(Row, frozen=True):
    """What a session found, what a reviewer said of it, and what a person made of it."""

    TABLE: ClassVar[str] = "findings"
    KEY: ClassVar[tuple[str, ...]] = ("finding",)

    finding: str
    session: str = ""
    agent: str = ""
    severity: str = ""
    support: str = ""
    document: str = ""
    name: str = ""
    emitted_at: int = 0
    emitted_seq: int = 0
    review: str = ""
    reviewed_seq: int = 0
    status: str = ""
    by: str = ""
    decided_at: int | None = None


class MemoryRow(Row, frozen=True):
    """Something that a session wants remembered, and what a person made of it."""

    TABLE: ClassVar[str] = "memories"
    KEY: ClassVar[tuple[str, ...]] = ("memory",)

    memory: str
    session: str = ""
    agent: str = ""
    proposed_at: int = 0
    proposed_seq: int = 0
    status: str = ""
    by: str = ""
    decided_at: int | None = None


class PrecedentRow(Row, frozen=True):
    """A case that was met, how often, and what a person made of it; its words are those of who met it first."""

    TABLE: ClassVar[str] = "precedents"
    KEY: ClassVar[tuple[str, ...]] = ("precedent",)

    precedent: str
    agent: str = ""
    kind: str = ""
    observed_count: int = 0
    first_at: int = 0
    last_at: int = 0
    session: str = ""
    proposed_seq: int = 0
    status: str = ""
    by: str = ""
    decided_at: int | None = None


class NotificationRow(Row, frozen=True):
    """Something to be told over a channel: queued by one stream, sent by another."""

    TABLE: ClassVar[str] = "notifications"
    KEY: ClassVar[tuple[str, ...]] = ("notification",)

    notification: str
    channel: str = ""
    agent: str = ""
    about: str = ""
    stream: str = ""
    queued_at: int = 0
    queued_seq: int = 0
    attempts: int = 0
    sent_at: int | None = None
    next_at: int | None = None
    gave_up: int = 0
    error: str = ""


TASK_TABLES: Final[tuple[type[Row], ...]] = (
    TriggerRow,
    ItemRow,
    OutputRow,
    FindingRow,
    MemoryRow,
    PrecedentRow,
    NotificationRow,
)
