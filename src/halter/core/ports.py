"""The ports of the store and of notification channels, and the values that pass through them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec.structs import force_setattr

from halter.core.events import AnyEvent, Unknown
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, session_stream
from halter.core.vocabulary import R, RowKey

DocumentKind = Literal["text", "markdown", "html", "pdf", "docx", "xlsx", "pptx", "eml"]


class Chunk(msgspec.Struct, frozen=True):
    """A span of a document's text. `document` is the digest of its file."""

    document: str
    number: int
    start: int
    end: int
    text: str


class Extracted(msgspec.Struct, frozen=True, tag="Extracted"):
    """The text of a file. `pages` are the offsets of its pages, if it has any."""

    text: str
    kind: DocumentKind
    pages: tuple[int, ...] = ()


class UnreadableFile(msgspec.Struct, frozen=True, tag="Unreadable"):
    """The reason why a file could not be read, and the fix, as a sentence."""

    sentence: str


class FoundChunk(msgspec.Struct, frozen=True):
    """A chunk that matches a query. A higher rank is a better match; ranks of different stores are not comparable."""

    document: str
    number: int
    start: int
    end: int
    text: str
    rank: float


T = TypeVar("T")

BLOB_THRESHOLD: Final = 32 * 1024
"""Size above which a body is stored as a blob, before the event that names it."""

STREAM_PAGE: Final = 1000


class Draft(msgspec.Struct, frozen=True, gc=False):
    """An event before the store assigns its sequence number and time.

    `body` can be erased. A body too large for the events table is stored as a blob first, and `blob` names it. With no
    `stream`, the event goes to the stream of its write.
    """

    event: AnyEvent
    body: bytes | None = None
    blob: Digest | None = None
    stream: StreamId | None = None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """An event in the journal.

    `digest` is the salted digest of the body. It remains when body and salt are erased, so the hash chain stays valid.
    The garbage collector does not track it, because it cannot be part of a cycle.
    """

    stream: StreamId
    seq: int
    kind: str
    version: int
    at: int
    generation: int
    key: str
    blob: Digest | None
    facts: bytes
    body: bytes | None
    salt: bytes | None
    digest: bytes
    hash: bytes
    event: AnyEvent | Unknown

    @property
    def erased(self) -> bool:
        return self.digest != b"" and self.body is None


class Lease(msgspec.Struct, frozen=True, weakref=True, cache_hash=True):
    """The right to write a session's stream, valid until a later generation is taken."""

    session: SessionId
    worker: WorkerId
    generation: int
    stream: StreamId = StreamId("")

    def __post_init__(self) -> None:
        """Compute the stream once, since every write needs it."""
        force_setattr(self, "stream", session_stream(self.session))


class Ticket(msgspec.Struct, frozen=True):
    """The offer of a due session; void once a later generation is taken."""

    session: SessionId
    agent: str
    generation: int


class Offer(msgspec.Struct, frozen=True):
    """The tickets of one offer. With `has_more`, further sessions may be due: offer again soon."""

    tickets: tuple[Ticket, ...] = ()
    has_more: bool = False


EnqueueTickets = Callable[[Any, Sequence[Ticket]], None]
"""Enqueues tickets in the transaction that offers them. Receives the transaction's connection, if there is one."""

AgentConcurrency = Mapping[str, int | None]
"""The agents of a worker, with the maximum number of awake tasks on all machines; None means no bound."""


class Rows(Protocol):
    @property
    def now(self) -> int: ...

    def get(self, kind: type[R], /, *key: Any) -> R | None:
        """Return a row that the write declared, or None."""
        ...

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        """Return several rows with one read, each as `get` does."""
        ...


Decide = Callable[[Rows], Sequence[Draft]]


class Write(msgspec.Struct, frozen=True):
    """One transaction: read locked rows, decide purely, append the decided events.

    `key` is the idempotency key: a repeated write returns the first result. `decide` may run twice and must be pure.
    `reads` are the rows that it reads or that its events change, in addition to the stream's head and the session's
    row. `first` is another write by the same owner, executed before this one in the same transaction: both or neither.
    A write that starts a session may assign its first owner with `new_lease`.
    """

    stream: StreamId
    key: str
    decide: Decide
    reads: Sequence[RowKey] = ()
    lease: Lease | None = None
    others: Sequence[StreamId] = ()
    first: "Write | None" = None
    new_lease: Lease | None = None


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The result of a write: its durable events. With `is_repeated`, an earlier write with the same key wrote them.

    `first` is the result of the write that was executed before it in the same transaction.
    """

    events: tuple[Stored, ...]
    is_repeated: bool = False
    first: "Committed | None" = None

    def list_events(self) -> tuple[Stored, ...]:
        return self.events if self.first is None else (*self.first.list_events(), *self.events)

    def fresh(self) -> tuple[Stored, ...]:
        """Return the events that this transaction wrote, in order."""
        own_events = () if self.is_repeated else self.events
        return own_events if self.first is None else (*self.first.fresh(), *own_events)


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The answer to a heartbeat. After a lapse, `remaining_leases` are those that the worker still has."""

    now: int
    remaining_leases: frozenset[Lease] | None = None


class Change(msgspec.Struct, frozen=True):
    """A hint that a stream grew; with ALL_STREAMS, any stream may have grown. Hints may be lost."""

    stream: StreamId
    head: int


def matters_always(_: Change) -> bool:
    return True


ALL_STREAMS: Final = StreamId("*")
"""The stream of a hint after a gap in the hints, or if too many streams grew together."""


class Query(msgspec.Struct, Generic[T], frozen=True):
    """A named read-only query. Its SQL is in `journal/sql` under this name."""

    name: str
    row: type[T]
    params: Mapping[str, Any] = {}


class Store(Protocol):
    """The store of the journal. One contract suite tests all implementations."""

    async def commit(self, write: Write) -> Committed:
        """Execute a write atomically; it is durable on return. Raises LeaseLost or StoreUnavailable."""
        ...

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        """Return the events of a stream that follow `after`, in order."""
        ...

    async def read_later(self, stream: StreamId, head: int) -> Callable[[], Sequence[Stored]]:
        """Return a function that reads the events of a stream up to `head`. Call it before the store closes."""
        ...

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        """Take sessions that are due, or whose owner's lease expired; each gets its next generation.

        A session named by `only` is taken even before it is due, unless it has an owner or has ended; with a ticket,
        only if its generation is unchanged. With `agents`, only unattended sessions of these agents are taken.
        """
        ...

    async def offer(self, limit: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        """Enqueue at most `limit` tickets for sessions that could be claimed, each once per lease period.

        Unused tickets count towards `limit`. `enqueue` runs inside the transaction, so a ticket is enqueued if and only
        if it is recorded. If another process is offering at the same time, nothing is offered here.
        """
        ...

    async def beat(
        self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = ""
    ) -> HeartbeatReply:
        """Renew all leases of a worker, and save the hot-state snapshots of its sessions.

        `about` is the worker's report to people and to other workers.
        """
        ...

    async def leave(self, worker: WorkerId) -> None:
        """Release all leases of a worker that shuts down."""
        ...

    async def release(self, lease: Lease) -> None:
        """Release the lease of a session that its worker stopped running, unless a later one was taken."""
        ...

    async def ask(self, query: Query[T]) -> Sequence[T]: ...

    async def put(self, data: bytes) -> Digest:
        """Store a blob and return its digest."""
        ...

    async def get(self, digest: Digest) -> bytes:
        """Return a blob. Raises KeyError if it does not exist, or was erased."""
        ...

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        """Store a document's chunks in order, all or none.

        A document is named by the digest of its content, so an existing document is not written again.
        """
        ...

    async def forget(self, document: str) -> None: ...

    async def find_indexed(self, documents: Sequence[str]) -> frozenset[str]: ...

    async def chunks(self, document: str) -> Sequence[Chunk]: ...

    async def search(self, documents: Sequence[str], query: str, limit: int) -> Sequence[FoundChunk]:
        """Find chunks of these documents, the best first.

        Returns the chunks that contain all words, or if there are none, those that contain any of them. `words` may be
        any text.
        """
        ...

    def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncIterator[Change]:
        """Follow which streams grow, in this process and in others; only changes that `matters` accepts are yielded."""
        ...

    async def close(self) -> None: ...


async def read_body(store: Store, stored: Stored) -> bytes:
    """Read the body of an event, inline or from a blob; empty if there is none, or if it was erased."""
    return await read_content(store, stored.body, stored.blob)


async def read_content(store: Store, body: bytes | None, blob: Digest | None) -> bytes:
    """Read a body that is inline or in a blob; empty if there is none, or if it was erased."""
    if blob is None:
        return body or b""
    try:
        return await store.get(blob)
    except KeyError:
        return b""


async def offload_body(store: Store, body: bytes | None) -> tuple[bytes | None, Digest | None]:
    """Store a large body as a blob; return the inline body and the blob's digest, one of which is None."""
    if body is None or len(body) <= BLOB_THRESHOLD:
        return body, None
    return None, await store.put(body)


async def read_stream(store: Store, stream: StreamId, after: int = 0) -> list[Stored]:
    """Read the events of a stream that follow `after`, page by page."""
    events: list[Stored] = []
    while page := await store.read(stream, after + len(events), STREAM_PAGE):
        events += page
        if len(page) < STREAM_PAGE:
            break
    return events


async def load_body(store: Store, body: bytes | None, blob: Digest | None) -> bytes | None:
    """Return the body of a row, from the row or from its blob; None if it was erased."""
    if blob is None:
        return body
    try:
        return await store.get(blob)
    except KeyError:
        return None
