"""What the three stores differ in: how rows are loaded, locked, saved and asked for.

An engine is synchronous and knows nothing of asyncio; `JournalStore` runs it in threads, or inline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.library import Chunk, Found
from halter.core.ports import Agents, Beat, Change, Lease, Offered, Put, Stored, Ticket
from halter.core.row import Row, RowKey
from halter.core.rows import TABLES, StreamRow
from halter.journal.apply import Changes
from halter.journal.entries import Entry

PROJECTIONS: Final = tuple(table for table in TABLES if table is not StreamRow)
"""The tables that a rebuild makes anew. Heads are not among them: they are a part of the chain, and evidence."""


class Conflict(Exception):
    """Another process inserted the same row first: look again and decide anew."""


class Busy(Exception):
    """The store would have to be waited for, and the caller said that it will not wait."""


class View(Protocol):
    """A store as it is at one moment: whatever is committed later is not seen."""

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query."""
        ...

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run a named query where there is much to read: plain columns, in the order in which it names them."""
        ...

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        ...

    def flaws(self) -> Sequence[str]:
        """Tell what the database itself finds damaged, such as an index that does not fit its table."""
        ...

    def close(self) -> None:
        """Look no more."""
        ...


class Engine(Protocol):
    """One store's way of keeping rows and events."""

    def begin(self, *, wait: bool = True) -> None:
        """Open a transaction that may write; raise Busy instead of waiting if told not to wait."""
        ...

    def load(self, keys: Sequence[RowKey]) -> Mapping[RowKey, Row | None]:
        """Lock rows, in an order that is the same for everybody, and return them."""
        ...

    def committed(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, ...]]:
        """Return the events of writes that were committed before under these keys."""
        ...

    def now(self) -> int:
        """Tell the store's time."""
        ...

    def save(self, changes: Changes) -> None:
        """Write all changes into the open transaction; Conflict if an inserted row exists by now."""
        ...

    def commit(self) -> None:
        """Make the transaction durable; Conflict as in `save`, whichever finds it."""
        ...

    def rollback(self) -> None:
        """Forget the transaction."""
        ...

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        """Return events of a stream in order."""
        ...

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: Agents | None = None,
    ) -> Sequence[Lease]:
        """Take due and orphaned sessions that this program understands, or one that is named and nobody owns."""
        ...

    def offer(self, limit: int, program_format: int, agents: Agents, put: Put) -> Offered:
        """Hand out tickets for what could be claimed, unless another process is doing so."""
        ...

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> Beat:
        """Renew a worker's leases."""
        ...

    def leave(self, worker: WorkerId) -> None:
        """Let a worker's leases be over."""
        ...

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query."""
        ...

    def put(self, digest: Digest, data: bytes) -> None:
        """Keep a blob."""
        ...

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        ...

    def add_chunks(self, document: str, entries: Sequence[Entry]) -> None:
        """Add some of a document's chunks, which nobody sees yet; those that are there already stay."""
        ...

    def show_document(self, document: str, count: int) -> bool:
        """Let a document be seen if it has so many chunks; tell whether it has."""
        ...

    def drop_chunks(self, document: str, limit: int) -> int:
        """Let a document be seen no more, and drop so many of its chunks at most; tell how many."""
        ...

    def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Tell which of these documents are there."""
        ...

    def chunks(self, document: str) -> Sequence[Chunk]:
        """Return a document's chunks in order."""
        ...

    def search(self, documents: Sequence[str], wanted: Sequence[str], limit: int, *, every: bool) -> Sequence[Found]:
        """Find chunks of these documents in which every word occurs, or any; the best first."""
        ...

    def view(self) -> View:
        """Open a view that stays the same and is in nobody's way until it is closed; any thread may use it."""
        ...

    def replace(self, make: Callable[[View], Iterable[Row]]) -> None:
        """Put new rows in place of all projections, made from what a transaction sees that keeps other writers out."""
        ...

    def scrub(self) -> bool:
        """Overwrite copies of erased bytes that linger outside the tables; tell whether that is done."""
        ...

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Wait, at most so many seconds, for other processes to write; return what they changed."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
