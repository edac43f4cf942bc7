"""The rows of the store. Each is a projection that can be rebuilt from the events alone.

The exception is the lease of a session (`owner`, `generation`), which names the worker that runs it now.
"""

from functools import lru_cache
from typing import Final

import msgspec

from halter.core.events import SESSION_FORMAT
from halter.core.ids import StreamId, parse_session_id, session_stream
from halter.core.money import BudgetRow, Leg
from halter.core.vocabulary import Purpose, Row, RowKey, SessionKind, ShownState


class TriggerRow(Row, frozen=True):
    """A trigger, projected from its own stream.

    `ticked_at` is the last of its times that was handled, `queued_at` a time that waits for the previous run.
    `session` is its newest session, started at `ran_at`.
    """

    TABLE = "triggers"
    KEY = ("trigger",)

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
    """One document of a watch, identified by its content. The end of its newest session decides whether it is done."""

    TABLE = "items"
    KEY = ("trigger", "item")

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
    """The digest of a file that an agent wrote. The agent's own watches do not treat it as new."""

    TABLE = "outputs"
    KEY = ("agent", "digest")

    agent: str
    digest: str
    at: int


class FindingRow(Row, frozen=True):
    """A finding of a session, with its review and a person's decision."""

    TABLE = "findings"
    KEY = ("finding",)

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
    """A memory that a session proposed, with a person's decision."""

    TABLE = "memories"
    KEY = ("memory",)

    memory: str
    session: str = ""
    agent: str = ""
    proposed_at: int = 0
    proposed_seq: int = 0
    status: str = ""
    by: str = ""
    decided_at: int | None = None


class PrecedentRow(Row, frozen=True):
    """A precedent, the number of its proposals, and a person's decision. Its text is that of the first proposal."""

    TABLE = "precedents"
    KEY = ("precedent",)

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
    """A notification: one stream queues it, another one sends it."""

    TABLE = "notifications"
    KEY = ("notification",)

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

NO_OWNER: Final = ""
"""The owner of a session without a worker."""


class StreamRow(Row, frozen=True):
    """The head of a stream: where the next event links in."""

    TABLE = "streams"
    KEY = ("stream",)

    stream: str
    head: int
    hash: bytes
    at: int

    def key(self) -> RowKey:
        return (StreamRow, self.stream)


class SessionRow(Row, frozen=True):
    """A session, and when it is next due.

    The `inbox_*` columns follow its inbox, the `LEASE` columns its owner, and all others its own stream. Each column
    has one source, so the row does not depend on the order in which streams are read.
    """

    TABLE = "sessions"
    KEY = ("session",)
    LEASE = ("owner", "generation")

    session: str
    agent: str = ""
    kind: SessionKind = "task"
    state: ShownState = "RUNNING"
    trigger: str = ""
    parent: str = ""
    definition: str = ""
    format: int = 0
    started_at: int = 0
    ended_at: int | None = None
    terminal_reason: str = ""
    wake_at: int | None = None
    wake_on: str = ""
    inbox_seen: int = 0
    inbox_head: int = 0
    inbox_wake: int = 0
    inbox_wake_at: int = 0
    due_at: int | None = None
    owner: str = NO_OWNER
    generation: int = 0

    def key(self) -> RowKey:
        # The cached tuple that every write to the stream names, instead of an equal new one.
        return rows_of_stream(session_stream(self.session))[1]

    @property
    def unattended(self) -> bool:
        """True if no person attends the session: it is autonomous, triggered, or a sub-session."""
        return self.kind == "autonomous" or self.trigger != "" or self.parent != ""

    @property
    def shown_state(self) -> ShownState:
        """The state, unless no process runs the session and none will until a person resumes it, as with a new fork."""
        is_attended = self.kind in ("chat", "task") and not self.unattended
        return "NOT_RUNNING" if self.state == "RUNNING" and is_attended and self.owner == NO_OWNER else self.state

    def to_shown(self) -> "SessionRow":
        """Return a copy with the state that is shown, for JSON."""
        return msgspec.structs.replace(self, state=self.shown_state)

    def with_due_at(self) -> "SessionRow":
        """A copy with the time at which the session is due: by its own timer, or by unseen waking messages."""
        due_at = self._due()
        return self if due_at == self.due_at else msgspec.structs.replace(self, due_at=due_at)

    def _due(self) -> int | None:
        if self.started_at == 0 or self.ended_at is not None:
            return None
        if self.inbox_wake <= self.inbox_seen:
            return self.wake_at
        return self.inbox_wake_at if self.wake_at is None else min(self.wake_at, self.inbox_wake_at)


@lru_cache(maxsize=8192)
def rows_of_stream(stream: StreamId) -> tuple[RowKey, ...]:
    """List the rows that every write to a stream locks: its head, and its session if there is one."""
    session = parse_session_id(stream)
    head: RowKey = (StreamRow, stream)
    return (head,) if session is None else (head, (SessionRow, session))


def find_session(stream: StreamId) -> str:
    """Return the session of a stream, or an empty string. A cached form of `parse_session_id`, for hot paths."""
    row_keys = rows_of_stream(stream)
    if len(row_keys) == 1:
        return ""
    _, session = row_keys[1]
    return session


class OutageRow(Row, frozen=True):
    """The newest outage of a session: since when and why no model answers. `ended_at` is when one answered again."""

    TABLE = "outages"
    KEY = ("session",)

    session: str
    agent: str = ""
    trouble: str = ""
    sentence: str = ""
    began_at: int = 0
    ended_at: int | None = None


class HoldRow(Row, frozen=True):
    """Money reserved for one call, request or sub-session until it is settled."""

    TABLE = "holds"
    KEY = ("hold",)

    hold: str
    session: str
    at: int
    purpose: Purpose
    name: str
    legs: bytes

    def key(self) -> RowKey:
        return (HoldRow, self.hold)

    def decode_legs(self) -> tuple[Leg, ...]:
        return decode_legs(self.legs)


decode_legs: Final = msgspec.json.Decoder(tuple[Leg, ...]).decode


class SpendRow(Row, frozen=True):
    """One settled cost, by spender, name and purpose."""

    TABLE = "spends"
    KEY = ("at", "hold")
    APPEND_ONLY = True

    at: int
    hold: str
    agent: str
    session: str
    trigger: str
    name: str
    purpose: Purpose
    usd: int
    held_usd: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int

    def key(self) -> RowKey:
        return (SpendRow, self.at, self.hold)


class HaltRow(Row, frozen=True):
    """The newest halt of a scope, or the time since which its sessions resume."""

    TABLE = "halts"
    KEY = ("scope",)

    scope: str
    halted: int
    at: int
    by: str
    reason: str
    ramp: int
    cancels: int = 0


class RateRow(Row, frozen=True):
    """The attempts of a tool by an agent in one time slice; a sliding hour is a sum over slices.

    A row without a tool is one slot of a session's actions per minute: `agent` is the session's stream, and `attempts`
    the time at which a call took the slot.
    """

    TABLE = "rates"
    KEY = ("agent", "tool", "slice")

    agent: str
    tool: str
    slice: int
    attempts: int


class DecisionRow(Row, frozen=True):
    """One decision. Its question, its answer and its use each have their own columns."""

    TABLE = "decisions"
    KEY = ("decision",)

    decision: str
    about: str = ""
    session: str = ""
    agent: str = ""
    subject: str = ""
    name: str = ""
    digest: str = ""
    level: str = ""
    risk: str = ""
    asked_at: int = 0
    expires_at: int = 0
    verdict: str = ""
    by: str = ""
    decided_digest: str = ""
    decided_at: int | None = None
    used_at: int | None = None
    same: str = ""
    keys: str = ""
    asked_seq: int = 0
    decided_seq: int = 0
    approvers: int = 1
    first_by: str = ""

    @property
    def people(self) -> str:
        """The people who decided: both approvers, if two were required."""
        return f"{self.first_by} and {self.by}" if self.first_by and self.verdict == "approve" else self.by


class RuleRow(Row, frozen=True):
    """A rule: a standing approval by a person, until it expires or is ended."""

    TABLE = "rules"
    KEY = ("rule",)

    rule: str
    tool: str = ""
    scope: str = ""
    owner: str = ""
    matcher: str = ""
    keys: str = ""
    by: str = ""
    made_at: int = 0
    expires_at: int = 0
    ended_at: int | None = None
    ended_by: str = ""

    def live(self, now: int) -> bool:
        return self.ended_at is None and self.made_at <= now < self.expires_at


class PinRow(Row, frozen=True):
    """The pinned digest of a server's tool for an agent; or, without an agent, of the fetched prices of the fleet."""

    TABLE = "pins"
    KEY = ("agent", "tool")

    agent: str
    tool: str
    digest: str
    by: str
    at: int


class AgentRow(Row, frozen=True):
    """The switch that lets an agent run unattended, and the person who set it last."""

    TABLE = "agents"
    KEY = ("agent",)

    agent: str
    switched_on: int
    at: int
    by: str
    reason: str


class FleetPolicyRow(Row, frozen=True):
    """The policy that binds every process on the store, in one row. `number` is the sequence number of its event.

    `day_cap` and `month_cap` are the fleet's caps; a hold reads them under the lock.
    """

    TABLE = "fleet_policy"
    KEY = ("scope",)

    scope: str
    number: int
    policy: str
    digest: str
    at: int
    by: str
    day_cap: int | None = None
    month_cap: int | None = None

    def lower(self, per: str, cap: int | None) -> int | None:
        """Return the lower of a configured fleet cap and this policy's cap for windows of that length."""
        caps = [value for value in (cap, {"day": self.day_cap, "month": self.month_cap}.get(per)) if value is not None]
        return min(caps, default=None)


class AuditRow(Row, frozen=True):
    """One audited call. Without an outcome it is running, or in doubt.

    The text remains in the events, where it can be erased; `asked_seq` and `settled_seq` name them.
    """

    TABLE = "audit"
    KEY = ("call",)

    call: str
    session: str
    agent: str
    tool: str
    capability_level: str
    risk_level: str
    decision: str
    decided_by: str
    outcome: str
    cost_usd: int
    duration_ms: int
    created_at: int
    shows_result: int
    asked_seq: int
    settled_seq: int


class SavedHotState(msgspec.Struct, frozen=True):
    """The last hot-state snapshot of a session. It is not a projection, and nothing is rebuilt from it."""

    at: int
    data: bytes


TABLES: Final[tuple[type[Row], ...]] = (
    StreamRow,
    SessionRow,
    BudgetRow,
    HoldRow,
    SpendRow,
    HaltRow,
    RateRow,
    DecisionRow,
    RuleRow,
    PinRow,
    AgentRow,
    FleetPolicyRow,
    AuditRow,
    OutageRow,
    *TASK_TABLES,
)


def explain_newer_format(row: SessionRow) -> str:
    """Describe why a session cannot be run, if a newer program has run it; empty otherwise."""
    if row.format <= SESSION_FORMAT:
        return ""
    return (
        f"Session {row.session} was run by a newer Halter (it has format {row.format}, and this program supports "
        f"formats up to {SESSION_FORMAT}). Use the newer Halter for it."
    )
