"""What the layers ask of the outside world, as Protocols: whoever needs one is given one."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from halter.core.events import AnyEvent, Unknown
from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.library import Chunk, Found
from halter.core.row import R, RowKey

T = TypeVar("T")


BLOB_FROM: Final = 32 * 1024
"""Bodies larger than this are put as blobs before the event that names them."""


PAGE: Final = 1000
"""So many events are read at once."""


class Draft(msgspec.Struct, frozen=True):
    """An event to be, before the store gives it its place and time.

    `body` is what can be erased; a body too large for the events table is put as a blob first and named here.
    Without a stream of its own it goes to the stream of its write.
    """

    event: AnyEvent
    body: bytes | None = None
    blob: Digest | None = None
    stream: StreamId | None = None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """An event as it stands in the journal.

    `digest` is the salted digest of the body: it stays when body and salt are erased, so the chain holds. It can be no
    part of a cycle, so no collector has to look at the many that a process keeps.
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
        """Tell whether there was a body that is gone."""
        return self.digest != b"" and self.body is None


class Lease(msgspec.Struct, frozen=True, weakref=True):
    """The right to write a session's stream, for as long as nobody took a later generation."""

    session: SessionId
    worker: WorkerId
    generation: int


class Ticket(msgspec.Struct, frozen=True):
    """An offer to take a session as it stood when it was offered: void as soon as anybody has a later generation."""

    session: SessionId
    agent: str
    generation: int


class Offered(msgspec.Struct, frozen=True):
    """What was offered now, and whether there may be more that is due: then it is looked again soon."""

    tickets: tuple[Ticket, ...] = ()
    more: bool = False


Put = Callable[[Any, Sequence[Ticket]], None]
"""Hands tickets out, in the transaction that offers them: it is given the transaction's connection, if there is one."""

Agents = Mapping[str, int | None]
"""Whose sessions are wanted, and how many tasks of each agent may be awake at once, everywhere; None is any number."""


class Rows(Protocol):
    """The locked rows that a decision may look at."""

    @property
    def now(self) -> int:
        """The store's time."""
        ...

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a row that the write declared, or None where there is none."""
        ...


Decide = Callable[[Rows], Sequence[Draft]]


class Write(msgspec.Struct, frozen=True):
    """One transaction: look at locked rows, decide purely, append what was decided.

    `key` names the write: repeated, it answers as the first time. `decide` may run twice and must be pure.
    `reads` are the rows that it looks at or that its events change, beyond the stream's head and the session's own row.
    `first` is another one by the same owner that is done just before, in the same transaction: both or neither.
    """

    stream: StreamId
    key: str
    decide: Decide
    reads: Sequence[RowKey] = ()
    lease: Lease | None = None
    others: Sequence[StreamId] = ()
    first: "Write | None" = None


class Committed(msgspec.Struct, frozen=True):
    """What a write came to: its events, durable, and whether they had been there already.

    `first` is what became of the write that was done before it in the same transaction.
    """

    events: tuple[Stored, ...]
    repeated: bool = False
    first: "Committed | None" = None

    def all(self) -> tuple[Stored, ...]:
        """List the events of both, in order."""
        return self.events if self.first is None else (*self.first.all(), *self.events)

    def fresh(self) -> tuple[Stored, ...]:
        """List the events that this very transaction wrote, in order."""
        own = () if self.repeated else self.events
        return own if self.first is None else (*self.first.fresh(), *own)


class Beat(msgspec.Struct, frozen=True):
    """The answer to a heartbeat. `held` is None while all is well; after a lapse, the leases that are left."""

    now: int
    held: frozenset[Lease] | None = None


class Change(msgspec.Struct, frozen=True):
    """A hint that a stream grew, or EVERY_STREAM may have. Hints may be lost; the journal never is."""

    stream: StreamId
    head: int


EVERY_STREAM: Final = StreamId("*")
"""What a hint names after a time in which no hints could be heard, and when too many streams grew at once."""


class Query(msgspec.Struct, Generic[T], frozen=True):
    """A named read-only question; its SQL stands under this name in the journal's queries."""

    name: str
    row: type[T]
    params: Mapping[str, Any] = {}


class Store(Protocol):
    """Where the journal lives. One contract suite holds for all that implement it."""

    async def commit(self, write: Write) -> Committed:
        """Do all of it or nothing, durable on return. Raises LeaseLost or StoreUnavailable."""
        ...

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        """Return the events of a stream that follow `after`, in order."""
        ...

    async def claim(
        self, worker: WorkerId, limit: int, only: SessionId | Ticket | None = None, agents: Agents | None = None
    ) -> Sequence[Lease]:
        """Take sessions that are due, or whose owner's lease ran out; each gets its next generation.

        A session that is named is taken also before it is due, unless somebody owns it or it is over; by a ticket, only
        if nobody has had it since. Where agents are named, only those of their sessions are taken that nobody sits
        before.
        """
        ...

    async def offer(self, limit: int, agents: Agents, put: Put) -> Offered:
        """Hand out tickets for what could be claimed, each once for as long as a lease lasts, and no more than so many.

        Those that still wait to be used count. `put` takes part in the transaction: either a ticket is handed out and
        known to be, or neither. If another process is offering at this very moment, nothing is offered here.
        """
        ...

    async def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = "") -> Beat:
        """Renew all leases of a worker, and keep the hot-state snapshots of its sessions.

        What a worker says `about` itself is kept for people and for other workers.
        """
        ...

    async def leave(self, worker: WorkerId) -> None:
        """Let go of all leases of a worker that ends in good order: nobody has to wait for them to run out."""
        ...

    async def ask(self, query: Query[T]) -> Sequence[T]:
        """Answer a named read-only question."""
        ...

    async def put(self, data: bytes) -> Digest:
        """Keep a blob under its digest."""
        ...

    async def get(self, digest: Digest) -> bytes:
        """Return a blob; KeyError if it is not (or no longer) there."""
        ...

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        """Keep a document's chunks, all or none of them, numbered as they come.

        It is named by the digest of what is in it: one that is there already stays as it is.
        """
        ...

    async def forget(self, document: str) -> None:
        """Drop a document's chunks."""
        ...

    async def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Tell which of these documents are there."""
        ...

    async def chunks(self, document: str) -> Sequence[Chunk]:
        """Return a document's chunks in order."""
        ...

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[Found]:
        """Find chunks of these documents and of no others, the best first.

        Those in which all words occur, or where there are none, those with any of them. The words may be any text.
        """
        ...

    def changes(self) -> AsyncIterator[Change]:
        """Follow which streams grow, in this process and in others."""
        ...

    async def close(self) -> None:
        """Let go of the store."""
        ...


async def said(store: Store, stored: Stored) -> bytes:
    """Return the body of an event, wherever it is kept; nothing where there is none, or none any more."""
    if stored.blob is None:
        return stored.body or b""
    try:
        return await store.get(stored.blob)
    except KeyError:
        return b""


async def kept(store: Store, body: bytes | None) -> tuple[bytes | None, Digest | None]:
    """Put a large body away as a blob; return what stays beside the event, and the blob's name if there is one."""
    if body is None or len(body) <= BLOB_FROM:
        return body, None
    return None, await store.put(body)


async def whole(store: Store, stream: StreamId, after: int = 0) -> list[Stored]:
    """Read all that a stream has after a place: page by page, and none that is known to be empty."""
    found: list[Stored] = []
    while page := await store.read(stream, after + len(found), PAGE):
        found += page
        if len(page) < PAGE:
            break
    return found
