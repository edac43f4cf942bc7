"""The store that all layers above use: one writer, which commits concurrent writes in one transaction.

Also: blobs, searches, and retries while the store is unavailable.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from types import CoroutineType
from typing import Any, Final, Self, TypeVar

import msgspec

from halter.core.clock import Clock
from halter.core.errors import StoreUnavailable
from halter.core.events import SESSION_FORMAT
from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.ports import (
    AgentConcurrency,
    Change,
    Chunk,
    Committed,
    EnqueueTickets,
    FoundChunk,
    HeartbeatReply,
    Lease,
    Offer,
    Query,
    Stored,
    Ticket,
    Write,
    matters_always,
)
from halter.core.text import clean
from halter.core.vocabulary import Row
from halter.core.words import split_query_words
from halter.journal.apply import SALT_BYTES, Applier, apply_write
from halter.journal.engine import (
    Engine,
    NamedQuery,
    StoreView,
    StreamPage,
    index_chunks,
)
from halter.journal.salts import draw_salts
from halter.journal.store_retry import StoreProblem, StoreRetry
from halter.journal.writer import JournalWriter, LateReading, Observer

T = TypeVar("T")

MAX_FOUND_CHUNKS: Final = 1000

CHUNKS_PER_WRITE: Final = 200
"""Chunks per transaction: other writers wait for a fraction of a second."""

SHORT_QUERIES: Final = frozenset(
    (
        "session",
        "decision",
        "budget",
        "trigger",
        "snapshot",
        "halts_of",
        "rules_of",
        "all_agents",
        "head",
        "questions_of",
        "kept_context",
    )
)
"""Queries of one row, a short table, or what fits into a prompt: they take less time than waking a thread."""

INDEX_ATTEMPTS: Final = 25
"""Attempts to write a document while other processes that index it too drop its earlier chunks."""


class JournalStore:
    """A store over an engine.

    With `inline`, everything runs in the caller's thread, for simulations. Otherwise one thread writes: writes that
    arrive while it is busy share its next transaction. A write without concurrent ones runs in the caller's thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        inline: bool = False,
        salt: Callable[[int], bytes] | None = None,
        applier: Applier = apply_write,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._engine = engine
        salts = draw_salts() if salt is None else iter(partial(salt, SALT_BYTES), None)
        self._journal = JournalWriter(engine, inline=inline, salts=salts, applier=applier, observers=observers)
        self.retry: StoreRetry | None = None
        self._patient: tuple[Clock, StoreProblem, Self] | None = None

    def patient(self, clock: Clock, trouble: StoreProblem | None = None) -> Self:
        """Return a handle on the same store that waits while the store is unavailable, instead of raising."""
        cached = self._patient
        if cached is not None and cached[0] is clock and cached[1] is trouble:
            return cached[2]
        handle, trouble = copy.copy(self), trouble or StoreProblem()
        handle.retry = StoreRetry(clock, trouble)
        self._patient = (clock, trouble, handle)
        return handle

    def observe(self, observer: Observer) -> None:
        self._journal.observers = (*self._journal.observers, observer)

    def commit(self, write: Write) -> "CoroutineType[Any, Any, Committed]":
        return self._journal.commit(write, self.retry)

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        question = StreamPage(StreamId(clean(stream)), after, limit)
        return await self._patiently(partial(self._journal.answer_question, question, short=True))

    async def read_later(self, stream: StreamId, head: int) -> Callable[[], Sequence[Stored]]:
        if self._engine.answer_questions is not None:
            events = await self.read(stream, 0, head)
            return LateReading(lambda: events)
        reading = LateReading(partial(self._engine.read, StreamId(clean(stream)), 0, head))
        self._journal.late.add(reading)
        return reading

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        return await self._write(lambda: self._engine.claim(worker, limit, SESSION_FORMAT, only, agents))

    async def offer(self, limit: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        return await self._write(lambda: self._engine.offer(limit, SESSION_FORMAT, agents, enqueue))

    async def beat(
        self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = ""
    ) -> HeartbeatReply:
        return await self._write(lambda: self._engine.beat(worker, snapshots, about))

    async def leave(self, worker: WorkerId) -> None:
        await self._write(lambda: self._engine.leave(worker))

    async def release(self, lease: Lease) -> None:
        # The caller of a queued write that takes this lease may have been cancelled: that write must come first.
        await self.commit(Write(lease.stream, "", lambda _: ()))
        await self._write(lambda: self._engine.release(lease))

    async def ask(self, query: Query[T]) -> Sequence[T]:
        params = {name: clean(value) if isinstance(value, str) else value for name, value in query.params.items()}
        read_rows = partial(
            self._journal.answer_question, NamedQuery(query.name, params), short=query.name in SHORT_QUERIES
        )
        rows = await self._patiently(read_rows)
        return [msgspec.convert(row, query.row, strict=False) for row in rows] if rows else []

    async def now(self) -> int:

        def read_time() -> int:
            try:
                return self._engine.begin().now
            finally:
                self._engine.rollback()

        return await self._journal.write(read_time)

    async def put(self, data: bytes) -> Digest:
        digest = Digest(sha256(data).hexdigest())
        await self._write(lambda: self._engine.put(digest, data))
        return digest

    async def get(self, digest: Digest) -> bytes:
        data = await self._read(lambda: self._engine.get(digest))
        if data is None:
            raise KeyError(digest)
        return data

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        """Save a document's chunks, in several transactions so that other writers do not wait long."""
        await self._patiently(lambda: self._index(clean(document), chunks))

    async def _index(self, name: str, chunks: Sequence[Chunk]) -> None:
        if name in await self._journal.read(lambda: self._engine.find_indexed([name])):
            return
        entries = (
            index_chunks(name, chunks) if self._journal.inline else await asyncio.to_thread(index_chunks, name, chunks)
        )
        await self._forget(name)
        for _ in range(INDEX_ATTEMPTS):
            for start in range(0, len(entries), CHUNKS_PER_WRITE):
                portion = entries[start : start + CHUNKS_PER_WRITE]
                await self._journal.write(partial(self._engine.add_chunks, name, portion))
            if await self._journal.write(partial(self._engine.show_document, name, len(entries))):
                return
        raise StoreUnavailable(f"Other processes dropped document {name} whenever it was indexed. Try again.")

    async def forget(self, document: str) -> None:
        """Drop a document's chunks. Searches ignore it from the first transaction on."""
        await self._patiently(lambda: self._forget(clean(document)))

    async def _forget(self, name: str) -> None:
        drop = partial(self._engine.drop_chunks, name, CHUNKS_PER_WRITE)
        while await self._journal.write(drop) == CHUNKS_PER_WRITE:
            pass

    async def find_indexed(self, documents: Sequence[str]) -> frozenset[str]:
        return await self._read(lambda: self._engine.find_indexed([clean(document) for document in documents]))

    async def chunks(self, document: str) -> Sequence[Chunk]:
        return await self._read(lambda: self._engine.chunks(clean(document)))

    async def search(self, documents: Sequence[str], query: str, limit: int) -> Sequence[FoundChunk]:
        """Search for chunks with all of the words, or if there are none, with any."""
        document_names = [clean(document) for document in documents]
        bounded_limit = max(0, min(limit, MAX_FOUND_CHUNKS))

        def run_search() -> Sequence[FoundChunk]:
            query_words = split_query_words(query)
            if not query_words:
                return []
            search = self._engine.search
            return search(document_names, query_words, bounded_limit, match_all=True) or search(
                document_names, query_words, bounded_limit, match_all=False
            )

        return await self._read(run_search)

    async def study(self, job: Callable[[StoreView], T]) -> T:
        """Run a job on a snapshot of the store. It does not delay writers."""
        return await self._journal.study(job)

    async def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        await self._journal.write(lambda: self._engine.replace(make))

    async def scrub(self) -> bool:
        """Overwrite lingering copies of erased bodies. Returns False if a reader prevented it."""
        return await self._journal.write(self._engine.scrub)

    def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncIterator[Change]:
        """Follow the streams that grow, filtered by `matters`. A slow reader loses hints, never events."""
        return self._journal.changes(matters)

    async def close(self) -> None:
        await self._journal.close()

    async def _write(self, job: Callable[[], T]) -> T:
        return await self._patiently(partial(self._journal.write, job))

    async def _read(self, job: Callable[[], T]) -> T:
        return await self._patiently(partial(self._journal.read, job))

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await operation()
        except StoreUnavailable as error:
            if self.retry is None:
                raise
            return await self.retry.repeat(operation, error)
        if self.retry is not None and self.retry.trouble.problem:
            self.retry.trouble.clear()
        return answer
