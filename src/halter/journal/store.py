"""The store that every layer above sees: one writer that commits what waits together."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import sha256
from typing import Final, Protocol, TypeVar

import msgspec

from halter.core.errors import LeaseLost, StoreUnavailable, StoreUnusable
from halter.core.events import FORMAT
from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.library import Chunk, Found, asked_words
from halter.core.ports import (
    EVERY_STREAM,
    Agents,
    Beat,
    Change,
    Committed,
    Lease,
    Offered,
    Put,
    Query,
    Stored,
    Ticket,
    Write,
)
from halter.core.row import Row
from halter.core.text import clean
from halter.journal.apply import Applier, apply
from halter.journal.engine import Answer, Busy, Engine, View, run
from halter.journal.entries import entries

T = TypeVar("T")

BATCH: Final = 256
"""How many writes share one transaction at most: enough to share a sync, few enough to keep locks short."""

HINTS_KEPT: Final = 1024
WATCH_SECONDS: Final = 0.05
MOST_FOUND: Final = 1000

PORTION: Final = 200
"""So many chunks of a document are written in one transaction: a fraction of a second of everybody else's time."""

INDEX_ATTEMPTS: Final = 5


class Observer(Protocol):
    """Somebody who is told what was committed, in the thread that wrote it, and must neither fail nor tarry."""

    @property
    def every_seconds(self) -> float:
        """How often it wants to be flushed."""
        ...

    def saw(self, events: Sequence[Stored]) -> None:
        """Take note of events that are durable."""
        ...

    def flush(self) -> None:
        """Do now what was put off."""
        ...


class JournalStore:
    """A store over an engine.

    With `inline`, everything runs in the caller's thread, as simulation wants it. Otherwise one thread writes:
    what arrives while it is busy shares its next transaction, and a lone write skips the thread altogether.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        inline: bool = False,
        salt: Callable[[int], bytes] = os.urandom,
        applier: Applier = apply,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._engine = engine
        self._inline = inline
        self._salt = salt
        self._applier = applier
        self._observers = observers
        self._waiting: deque[tuple[Write, asyncio.Future[Committed]]] = deque()
        self._busy = False
        self._writing_now = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "halter-journal-writer")
        self._reader = ThreadPoolExecutor(1, "halter-journal-reader")
        # A thread of its own: those that everybody shares may all be stuck, and nobody would hear of others' writes.
        self._watching = ThreadPoolExecutor(1, "halter-journal-watcher")
        self._timers: dict[Observer, asyncio.TimerHandle] = {}
        # Not a set: followers are told in one order, so that a run can be replayed.
        self._followers: dict[asyncio.Queue[Change], None] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    def observe(self, observer: Observer) -> None:
        """Let somebody else see what this process commits, from now on."""
        self._observers = (*self._observers, observer)

    async def commit(self, write: Write) -> Committed:
        """Do all of the write or nothing; it is durable when this returns."""
        write = _with_clean_keys(write)
        if self._inline:
            return self._told(self._run([write])[0])
        answer: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        if not self._timers:
            for observer in self._observers:
                self._set_timer(observer)
        self._waiting.append((write, answer))
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._flush)
        return await answer

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        """Return the events of a stream that follow `after`, in order."""
        return await self._reading(lambda: self._engine.read(StreamId(clean(stream)), after, limit))

    async def claim(
        self, worker: WorkerId, limit: int, only: SessionId | Ticket | None = None, agents: Agents | None = None
    ) -> Sequence[Lease]:
        """Take sessions that are due or orphaned, or the one that is named; each gets its next generation."""
        return await self._writing(lambda: self._engine.claim(worker, limit, FORMAT, only, agents))

    async def offer(self, limit: int, agents: Agents, put: Put) -> Offered:
        """Hand out tickets for what could be claimed, unless another process is doing so."""
        return await self._writing(lambda: self._engine.offer(limit, FORMAT, agents, put))

    async def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = "") -> Beat:
        """Renew all leases of a worker."""
        return await self._writing(lambda: self._engine.beat(worker, snapshots, about))

    async def leave(self, worker: WorkerId) -> None:
        """Let go of all leases of a worker that ends in good order."""
        await self._writing(lambda: self._engine.leave(worker))

    async def ask(self, query: Query[T]) -> Sequence[T]:
        """Answer a named read-only question."""
        params = {name: clean(given) if isinstance(given, str) else given for name, given in query.params.items()}
        found = await self._reading(lambda: self._engine.ask(query.name, params))
        return [msgspec.convert(row, query.row, strict=False) for row in found]

    async def now(self) -> int:
        """Tell the store's time, which timers and leases follow."""

        def look() -> int:
            self._engine.begin()
            try:
                self._engine.load([])
                return self._engine.now()
            finally:
                self._engine.rollback()

        return await self._writing(look)

    async def put(self, data: bytes) -> Digest:
        """Keep a blob under its digest."""
        digest = Digest(sha256(data).hexdigest())
        await self._writing(lambda: self._engine.put(digest, data))
        return digest

    async def get(self, digest: Digest) -> bytes:
        """Return a blob; KeyError if it is not there, or no longer."""
        data = await self._reading(lambda: self._engine.get(digest))
        if data is None:
            raise KeyError(digest)
        return data

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        """Keep a document's chunks. Large ones are written in portions, so that nobody else waits for long."""
        name = clean(document)
        if name in await self.indexed([name]):
            return
        made = entries(name, chunks) if self._inline else await asyncio.to_thread(entries, name, chunks)
        await self.forget(name)
        for _ in range(INDEX_ATTEMPTS):
            for start in range(0, len(made), PORTION):
                portion = made[start : start + PORTION]
                await self._writing(partial(self._engine.add_chunks, name, portion))
            if await self._writing(partial(self._engine.show_document, name, len(made))):
                return
        raise StoreUnavailable(f"The document {name} was forgotten whenever it was written; it may be tried again.")

    async def forget(self, document: str) -> None:
        """Drop a document's chunks, whole or not; it is seen no more from the first moment on."""
        drop = partial(self._engine.drop_chunks, clean(document), PORTION)
        while await self._writing(drop) == PORTION:
            pass

    async def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Tell which of these documents are there."""
        return await self._reading(lambda: self._engine.indexed([clean(document) for document in documents]))

    async def chunks(self, document: str) -> Sequence[Chunk]:
        """Return a document's chunks in order."""
        return await self._reading(lambda: self._engine.chunks(clean(document)))

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[Found]:
        """Find chunks with all of the words, or where there are none, with any of them."""
        named = [clean(document) for document in documents]
        most = max(0, min(limit, MOST_FOUND))

        def look() -> Sequence[Found]:
            wanted = asked_words(words)
            if not wanted:
                return []
            search = self._engine.search
            return search(named, wanted, most, every=True) or search(named, wanted, most, every=False)

        return await self._reading(look)

    async def study(self, job: Callable[[View], T]) -> T:
        """Let a job look at the store as it is at this moment, for as long as it likes and in nobody's way."""

        def alone() -> T:
            with self._writing_now:
                view = self._engine.view()
            with closing(view):
                return job(view)

        return alone() if self._inline else await asyncio.to_thread(alone)

    async def replace(self, make: Callable[[View], Iterable[Row]]) -> None:
        """Put new rows in place of all projections, in one transaction."""
        await self._writing(lambda: self._engine.replace(make))

    async def scrub(self) -> bool:
        """Overwrite what lingers of erased bodies; False if somebody's reading was in the way."""
        return await self._writing(self._engine.scrub)

    async def changes(self) -> AsyncIterator[Change]:
        """Follow which streams grow. A reader that lags loses hints, never events."""
        hints: asyncio.Queue[Change] = asyncio.Queue(HINTS_KEPT)
        self._followers[hints] = None
        if self._watcher is None and not self._inline:
            self._watcher = asyncio.create_task(self._watch(), name="halter-journal-watcher")
        try:
            while True:
                yield await hints.get()
        finally:
            del self._followers[hints]

    async def close(self) -> None:
        """Finish what was begun and let go of the store."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            await asyncio.wait([self._watcher])
        self._watching.shutdown()
        for timer in self._timers.values():
            timer.cancel()
        for observer in self._observers:
            await self._writing(observer.flush)
        # Whoever still reads must not find the store gone under it.
        await asyncio.get_running_loop().run_in_executor(self._writer, self._reader.shutdown)
        await self._writing(self._engine.close)
        self._writer.shutdown()

    def _run(self, writes: Sequence[Write], *, wait: bool = True) -> list[Answer]:
        if not self._writing_now.acquire(blocking=wait):
            raise Busy
        try:
            answers = run(self._engine, writes, self._applier, self._salt, wait=wait)
        finally:
            self._writing_now.release()
        if self._observers:
            fresh = [event for answer in answers if isinstance(answer, Committed) for event in answer.fresh()]
            for observer in self._observers if fresh else ():
                observer.saw(fresh)
        return answers

    def _set_timer(self, observer: Observer) -> None:
        later = asyncio.get_running_loop().call_later
        self._timers[observer] = later(observer.every_seconds, self._time_came, observer)

    def _time_came(self, observer: Observer) -> None:
        self._set_timer(observer)
        asyncio.get_running_loop().run_in_executor(self._writer, observer.flush)

    def _flush(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        if len(batch) == 1 and self._ran_at_once(batch):
            self._flushed()
            return
        attempt = asyncio.get_running_loop().run_in_executor(self._writer, self._run, [write for write, _ in batch])
        attempt.add_done_callback(lambda done: self._wrote(batch, done))

    def _ran_at_once(self, batch: list[tuple[Write, asyncio.Future[Committed]]]) -> bool:
        """Commit a lone write in this thread: cheaper than waking another, unless the store must be waited for."""
        done: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(self._run([batch[0][0]], wait=False))
        except Busy:
            return False
        except Exception as error:  # noqa: BLE001  whoever asked for this write gets its error
            done.set_exception(error)
        self._answered(batch, done)
        return True

    def _wrote(self, batch: list[tuple[Write, asyncio.Future[Committed]]], done: asyncio.Future[list[Answer]]) -> None:
        error = done.exception()
        if error is None or len(batch) == 1 or isinstance(error, (StoreUnavailable, StoreUnusable)):
            self._answered(batch, done)
            self._flushed()
        else:
            self._one_by_one(batch)

    def _one_by_one(self, batch: list[tuple[Write, asyncio.Future[Committed]]]) -> None:
        """Give each write of a failed batch a transaction of its own, so that only the culprit fails."""
        loop = asyncio.get_running_loop()
        for write, answer in batch:
            attempt = loop.run_in_executor(self._writer, self._run, [write])
            alone = [(write, answer)]
            attempt.add_done_callback(lambda done, alone=alone: self._answered(alone, done))
        self._flushed()

    def _answered(
        self, batch: list[tuple[Write, asyncio.Future[Committed]]], done: asyncio.Future[list[Answer]]
    ) -> None:
        error = done.exception()
        answers = [error] * len(batch) if error is not None else done.result()
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Committed):
                future.set_result(self._told(answer))
            else:
                future.set_exception(answer)

    def _flushed(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        else:
            self._busy = False

    def _told(self, answer: Answer) -> Committed:
        if isinstance(answer, LeaseLost):
            raise answer
        if self._followers:
            self._hint([Change(event.stream, event.seq) for event in answer.fresh()])
        return answer

    def _hint(self, changes: Sequence[Change]) -> None:
        for follower in self._followers:
            for change in changes:
                if not follower.full():
                    follower.put_nowait(change)

    async def _watch(self) -> None:
        while not self._closed:
            try:
                look = partial(self._engine.wait_for_others, WATCH_SECONDS)
                self._hint(await asyncio.get_running_loop().run_in_executor(self._watching, look))
            except Exception:  # noqa: BLE001  whatever it was, a watcher that ends leaves everybody deaf
                self._hint([Change(EVERY_STREAM, 0)])
                await asyncio.sleep(WATCH_SECONDS)

    async def _writing(self, job: Callable[[], T]) -> T:
        def alone() -> T:
            with self._writing_now:
                return job()

        return alone() if self._inline else await asyncio.get_running_loop().run_in_executor(self._writer, alone)

    async def _reading(self, job: Callable[[], T]) -> T:
        return job() if self._inline else await asyncio.get_running_loop().run_in_executor(self._reader, job)


def _with_clean_keys(write: Write) -> Write:
    """Make the key of a write, and of what goes before it, fit for a store."""
    key = clean(write.key)
    first = None if write.first is None else _with_clean_keys(write.first)
    return write if key == write.key and first is write.first else msgspec.structs.replace(write, key=key, first=first)
