"""A store that passes every call on to another: the base of stores that differ in one thing, for tests and drills."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from halter.core.clock import Clock
from halter.core.errors import StoreUnavailable
from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.library import Chunk, Found
from halter.core.ports import Agents, Beat, Change, Committed, Lease, Offered, Put, Query, Store, Stored, Ticket, Write
from halter.journal.retry import Retry, Trouble

T = TypeVar("T")


class Relay:
    """Every use goes the same way to the other store, and the same way back."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def patient(self, clock: Clock, trouble: Trouble | None = None) -> "PatientRelay":
        """Return a store that waits while this one is unavailable, as `JournalStore.patient` does."""
        return PatientRelay(self, Retry(clock, trouble or Trouble()))

    async def way(self) -> None:
        """Pass before the other store is used, and again before its answer is heard."""

    async def commit(self, write: Write) -> Committed:
        """Pass a write on."""
        return await self._passed(lambda: self._store.commit(write))

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        """Pass a reading on."""
        return await self._passed(lambda: self._store.read(stream, after, limit))

    async def claim(
        self, worker: WorkerId, limit: int, only: SessionId | Ticket | None = None, agents: Agents | None = None
    ) -> Sequence[Lease]:
        """Pass a claim on."""
        return await self._passed(lambda: self._store.claim(worker, limit, only, agents))

    async def offer(self, limit: int, agents: Agents, put: Put) -> Offered:
        """Pass an offer on."""
        return await self._passed(lambda: self._store.offer(limit, agents, put))

    async def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = "") -> Beat:
        """Pass a heartbeat on."""
        return await self._passed(lambda: self._store.beat(worker, snapshots, about))

    async def leave(self, worker: WorkerId) -> None:
        """Pass a farewell on."""
        await self._passed(lambda: self._store.leave(worker))

    async def ask(self, query: Query[T]) -> Sequence[T]:
        """Pass a question on."""
        return await self._passed(lambda: self._store.ask(query))

    async def put(self, data: bytes) -> Digest:
        """Pass a blob on."""
        return await self._passed(lambda: self._store.put(data))

    async def get(self, digest: Digest) -> bytes:
        """Fetch a blob."""
        return await self._passed(lambda: self._store.get(digest))

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        """Pass a document on."""
        await self._passed(lambda: self._store.index(document, chunks))

    async def forget(self, document: str) -> None:
        """Pass on that a document is to go."""
        await self._passed(lambda: self._store.forget(document))

    async def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Ask which documents are there."""
        return await self._passed(lambda: self._store.indexed(documents))

    async def chunks(self, document: str) -> Sequence[Chunk]:
        """Fetch a document's chunks."""
        return await self._passed(lambda: self._store.chunks(document))

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[Found]:
        """Pass a search on."""
        return await self._passed(lambda: self._store.search(documents, words, limit))

    def changes(self) -> AsyncIterator[Change]:
        """Follow the other store."""
        return self._store.changes()

    async def close(self) -> None:
        """Close the other store."""
        await self._store.close()

    async def _passed(self, use: Callable[[], Awaitable[T]]) -> T:
        await self.way()
        answer = await use()
        await self.way()
        return answer


class PatientRelay(Relay):
    """Repeats what failed because the other store was unavailable."""

    def __init__(self, store: Store, retry: Retry) -> None:
        super().__init__(store)
        self._retry = retry

    async def _passed(self, use: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await use()
        except StoreUnavailable as away:
            return await self._retry.repeat(use, away)
        self._retry.trouble.passed()
        return answer
