"""What the layers need from the outside world, as Protocols; documents, their chunks and words; notifications."""

import re
import unicodedata
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec.structs import force_setattr

from halter.core.errors import HalterError
from halter.core.events import AnyEvent, Unknown
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, session_stream
from halter.core.text import clean, from_body
from halter.core.vocabulary import R, RowKey

LONGEST_WORD: Final = 40
"""So many letters of a word count."""

MOST_INDEXED_WORDS: Final = 5_000
"""So many words of one text are indexed: far more than a chunk has, and few enough for every database."""

MOST_QUERY_WORDS: Final = 32
"""So many words of a query count."""

DocumentKind = Literal["text", "markdown", "html", "pdf", "docx", "xlsx", "pptx", "eml"]

# Scripts that are written without spaces: each of their characters is a word.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD_PATTERN: Final = f"(?:(?![{_UNSPACED}])[^\\W_])+|(?![\\W_])[{_UNSPACED}]"

_FOREIGN: Final = re.compile("[^\x00-\x7f]+")


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a document, from one offset in its text to another. A document is named by the digest of its file."""

    document: str
    number: int
    start: int
    end: int
    text: str


class Extracted(msgspec.Struct, frozen=True, tag=True):
    """The text of a file. `pages` are the offsets at which its pages begin, where it has pages."""

    text: str
    kind: DocumentKind
    pages: tuple[int, ...] = ()


class UnreadableFile(msgspec.Struct, frozen=True, tag="Unreadable"):
    """Why a file could not be read, and what to do about it."""

    sentence: str


class FoundChunk(msgspec.Struct, frozen=True):
    """A chunk that a query found; a higher rank is a better match. Ranks of different stores do not compare."""

    document: str
    number: int
    start: int
    end: int
    text: str
    rank: float


def fold_text(text: str) -> str:
    """Normalize a text for comparison: case, accents and compatibility forms."""
    if text.isascii():
        return text.lower()
    return _FOREIGN.sub(_strip_marks, unicodedata.normalize("NFKD", text)).casefold()


def _strip_marks(match: re.Match[str]) -> str:
    return "".join(letter for letter in match[0] if unicodedata.category(letter)[0] != "M")


def split_words(text: str) -> tuple[str, ...]:
    """The words of a text as every store indexes and finds them: letters and digits only.

    Stores receive these words rather than the text, so that no tokenizer of theirs decides what is found.
    """
    found: list[str] = []
    for match in re.finditer(WORD_PATTERN, fold_text(text)):
        found.append(match[0][:LONGEST_WORD])
        if len(found) == MOST_INDEXED_WORDS:
            break
    return tuple(found)


def split_query_words(query: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(split_words(query)))[:MOST_QUERY_WORDS]


T = TypeVar("T")


BLOB_THRESHOLD: Final = 32 * 1024
"""Larger bodies are stored as blobs before the event that names them."""


STREAM_PAGE: Final = 1000


class Draft(msgspec.Struct, frozen=True, gc=False):
    """An event before the store gives it its place and time.

    `body` can be erased; one too large for the events table is stored as a blob first and named here. Without a stream
    of its own it goes to the stream of its write.
    """

    event: AnyEvent
    body: bytes | None = None
    blob: Digest | None = None
    stream: StreamId | None = None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """An event in the journal.

    `digest` is the salted digest of the body: it stays when body and salt are erased, so the chain holds. Untracked by
    the collector: it can be no part of a cycle.
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
    """The right to write a session's stream, until a later generation is taken."""

    session: SessionId
    worker: WorkerId
    generation: int
    stream: StreamId = StreamId("")

    def __post_init__(self) -> None:
        """Name the stream: every write asks for it."""
        force_setattr(self, "stream", session_stream(self.session))


class Ticket(msgspec.Struct, frozen=True):
    """An offer to take a session as it stood when it was offered: void once a later generation is taken."""

    session: SessionId
    agent: str
    generation: int


class Offer(msgspec.Struct, frozen=True):
    """What was offered now, and whether more may be due: then offer again soon."""

    tickets: tuple[Ticket, ...] = ()
    more: bool = False


EnqueueTickets = Callable[[Any, Sequence[Ticket]], None]
"""Hands tickets out in the transaction that offers them: it receives the transaction's connection, if there is one."""

AgentConcurrency = Mapping[str, int | None]
"""Whose sessions are wanted, and how many tasks of each agent may be awake at once, everywhere; None is any number."""


class Rows(Protocol):
    @property
    def now(self) -> int: ...

    def get(self, kind: type[R], /, *key: Any) -> R | None:
        """Return a row that the write declared, or None."""
        ...

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        """Return several rows in one look, each as `get` does."""
        ...


Decide = Callable[[Rows], Sequence[Draft]]


class Write(msgspec.Struct, frozen=True):
    """One transaction: read locked rows, decide purely, append what was decided.

    `key` names the write: repeated, it answers as the first time. `decide` may run twice and must be pure. `reads` are
    the rows that it reads or that its events change, beyond the stream's head and the session's own row. `first` is
    another write by the same owner that is done just before, in the same transaction: both or neither. A write that
    begins a session may give it its first owner, whose lease it `takes`.
    """

    stream: StreamId
    key: str
    decide: Decide
    reads: Sequence[RowKey] = ()
    lease: Lease | None = None
    others: Sequence[StreamId] = ()
    first: "Write | None" = None
    takes: Lease | None = None


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The events of a write, durable, and whether they had been there already.

    `first` is the result of the write that was done before it in the same transaction.
    """

    events: tuple[Stored, ...]
    repeated: bool = False
    first: "Committed | None" = None

    def all(self) -> tuple[Stored, ...]:
        return self.events if self.first is None else (*self.first.all(), *self.events)

    def fresh(self) -> tuple[Stored, ...]:
        """The events that this very transaction wrote, in order."""
        own = () if self.repeated else self.events
        return own if self.first is None else (*self.first.fresh(), *own)


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The answer to a heartbeat. `held` is None normally; after a lapse, the leases that are left."""

    now: int
    held: frozenset[Lease] | None = None


class Change(msgspec.Struct, frozen=True):
    """A hint that a stream grew, or EVERY_STREAM may have. Hints may be lost; the journal never is."""

    stream: StreamId
    head: int


def matters_always(_: Change) -> bool:
    return True


EVERY_STREAM: Final = StreamId("*")
"""Named by a hint after a time without hints, and when too many streams grew at once."""


class Query(msgspec.Struct, Generic[T], frozen=True):
    """A named read-only query; its SQL has this name in the journal's queries."""

    name: str
    row: type[T]
    params: Mapping[str, Any] = {}


class Store(Protocol):
    """Where the journal lives. One contract suite holds for all implementations."""

    async def commit(self, write: Write) -> Committed:
        """Do all of it or nothing, durable on return. Raises LeaseLost or StoreUnavailable."""
        ...

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        """The events of a stream that follow `after`, in order."""
        ...

    async def read_later(self, stream: StreamId, head: int) -> Callable[[], Sequence[Stored]]:
        """The first events of a stream, up to `head`, read when they are asked for; at the latest before it closes."""
        ...

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        """Take sessions that are due, or whose owner's lease ran out; each gets its next generation.

        A named session is taken also before it is due, unless it has an owner or is over; by a ticket, only if its
        generation is unchanged. Where agents are named, only their unattended sessions are taken.
        """
        ...

    async def offer(self, limit: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        """Hand out tickets for what could be claimed, each once per lease period, and no more than so many.

        Unused tickets count. `put` takes part in the transaction: either a ticket is handed out and recorded, or
        neither. If another process is offering at this moment, nothing is offered here.
        """
        ...

    async def beat(
        self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = ""
    ) -> HeartbeatReply:
        """Renew all leases of a worker, and keep the hot-state snapshots of its sessions.

        `about` is what a worker reports to people and to other workers.
        """
        ...

    async def leave(self, worker: WorkerId) -> None:
        """Release all leases of a worker that shuts down."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give back a session that nobody works on any more, unless another lease of it was taken."""
        ...

    async def ask(self, query: Query[T]) -> Sequence[T]: ...

    async def put(self, data: bytes) -> Digest:
        """Keep a blob under its digest."""
        ...

    async def get(self, digest: Digest) -> bytes:
        """Return a blob; KeyError if it is not (or no longer) there."""
        ...

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        """Keep a document's chunks, all or none of them, in order.

        It is named by the digest of its content: an existing one stays as it is.
        """
        ...

    async def forget(self, document: str) -> None: ...

    async def indexed(self, documents: Sequence[str]) -> frozenset[str]: ...

    async def chunks(self, document: str) -> Sequence[Chunk]: ...

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[FoundChunk]:
        """Find chunks of these documents and of no others, the best first.

        Those in which all words occur, or if there are none, those with any of them. The words may be any text.
        """
        ...

    def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncIterator[Change]:
        """Follow which streams grow, in this process and in others; only changes that matter are told."""
        ...

    async def close(self) -> None: ...


async def read_body(store: Store, stored: Stored) -> bytes:
    """The body of an event, inline or as a blob; empty if there is none, or it was erased."""
    if stored.blob is None:
        return stored.body or b""
    try:
        return await store.get(stored.blob)
    except KeyError:
        return b""


async def offload_body(store: Store, body: bytes | None) -> tuple[bytes | None, Digest | None]:
    """Store a large body as a blob; return what stays in the event, and the blob's digest."""
    if body is None or len(body) <= BLOB_THRESHOLD:
        return body, None
    return None, await store.put(body)


async def read_stream(store: Store, stream: StreamId, after: int = 0) -> list[Stored]:
    """Read a stream after a place, page by page."""
    events: list[Stored] = []
    while page := await store.read(stream, after + len(events), STREAM_PAGE):
        events += page
        if len(page) < STREAM_PAGE:
            break
    return events


class NotificationContent(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a queued notification.

    `session` is the one that it is about, where the notification is not in that session's own stream.
    """

    subject: str = ""
    text: str = ""
    session: str = ""

    def body(self) -> bytes:
        cleaned = NotificationContent(subject=clean(self.subject), text=clean(self.text), session=clean(self.session))
        return msgspec.json.encode(cleaned)


def parse_notification(body: bytes) -> NotificationContent:
    """Read a notification. A body that is not JSON is its text."""
    try:
        return msgspec.json.decode(body, type=NotificationContent)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NotificationContent(text=clean(from_body(body)))


class OutgoingNotification(msgspec.Struct, frozen=True, kw_only=True):
    """One message on its way to people; `id` stays the same on every attempt, so that duplicates are recognised.

    `about` is its subject, and `at` when it was queued.
    """

    id: str
    subject: str
    text: str
    agent: str
    session: str = ""
    about: str = ""
    at: int = 0


class DeliveryFailed(HalterError):
    """A message was not delivered, as far as known: a sentence without any secret.

    `may_retry`: the same message may succeed later.
    """

    def __init__(self, sentence: str, *, may_retry: bool) -> None:
        super().__init__(sentence)
        self.may_retry = may_retry


class Sender(Protocol):
    """One channel, ready to be used."""

    async def send(self, letter: OutgoingNotification) -> None:
        """Send a message, or raise DeliveryFailed. A cancelled one may have been sent all the same."""
        ...
