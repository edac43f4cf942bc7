"""The store that every layer above sees: one writer that commits what waits together.

Also: blobs, searches, and retries while the store is unavailable.
"""

import asyncio
import copy
import os
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from itertools import chain, cycle
from types import CoroutineType
from typing import Any, Final, Protocol, Self, TypeVar
from weakref import WeakSet

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost, RowRefused, StoreError, StoreUnavailable, StoreUnusable
from halter.core.events import SESSION_FORMAT
from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.ports import (
    EVERY_STREAM,
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
    split_query_words,
)
from halter.core.text import clean
from halter.core.vocabulary import Row
from halter.journal.apply import SALT_BYTES, Applier, WriteAnswer, apply_write, list_needs
from halter.journal.engine import (
    AnswerTogether,
    Busy,
    Conflict,
    Engine,
    NamedQuery,
    Question,
    StoreView,
    StreamPage,
    index_chunks,
)

T = TypeVar("T")

ReportProblem = Callable[[str], None]
"""Receives a sentence about what is wrong with the store, or an empty one when it is available again."""

SHORTEST_PAUSE: Final = SECOND // 20
LONGEST_PAUSE: Final = SECOND


def ignore_problem(_: str) -> None: ...


class StoreProblem:
    """What is wrong with a store, shared by all retrying handles of a process."""

    def __init__(self, tell: ReportProblem = ignore_problem) -> None:
        self.tell = tell
        self.waiting = 0
        self.problem = ""

    def set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.tell(problem)

    def clear(self) -> None:
        """Clear the problem after a success, unless other calls still wait for the store."""
        if not self.waiting:
            self.set_problem("")


class StoreRetry:
    """Repeats a call that failed because the store was unavailable, until it succeeds or its task is cancelled.

    Repeating is harmless: a write that was committed without an answer is recognised by its key.
    """

    def __init__(self, clock: Clock, trouble: StoreProblem) -> None:
        self._clock = clock
        self.trouble = trouble

    async def repeat(self, use: Callable[[], Awaitable[T]], away: StoreUnavailable) -> T:
        self.trouble.set_problem(str(away))
        self.trouble.waiting += 1
        try:
            answer = await self._retry(use)
        finally:
            self.trouble.waiting -= 1
        self.trouble.clear()
        return answer

    async def _retry(self, use: Callable[[], Awaitable[T]]) -> T:
        pause = SHORTEST_PAUSE
        while True:
            await self._clock.sleep(pause)
            try:
                return await use()
            except StoreUnavailable as away:
                self.trouble.set_problem(str(away))
            pause = min(2 * pause, LONGEST_PAUSE)


LARGEST_BATCH: Final = 256
"""Writes per transaction: enough to share a sync, few enough to keep locks short."""

MOST_PENDING_HINTS: Final = 1024
"""Commits of which a reader that lags has not heard yet."""
WATCH_INTERVAL_SECONDS: Final = 0.05
MOST_CHUNKS_FOUND: Final = 1000

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
"""Queries of one row, of a short table, or of what a prompt has room for: they take less time than waking a thread."""

SALTS_DRAWN: Final = 256
"""How many salts are drawn at once: one alone takes a system call."""
_SALTS: Final = struct.Struct(f"{SALT_BYTES}s" * SALTS_DRAWN)

DONE_BEFORE_YIELD: Final = 16
"""How many reads and writes in the caller's thread come before other tasks get a turn."""

INDEX_ATTEMPTS: Final = 25
"""Attempts to write a document while others, who index it as well, drop what was there before."""
MOST_DECISION_ATTEMPTS: Final = 20
"""How often a transaction is decided again because another process had just inserted one of its rows."""


class _SaltPool:
    """Random salts, drawn from the system many at a time; a copy of the process begins with none. For one writer."""

    def __init__(self) -> None:
        self.drawn: list[bytes] = []
        _POOLS.add(self)

    def take(self) -> list[bytes]:
        self.drawn[:] = _SALTS.unpack(os.urandom(_SALTS.size))
        return self.drawn


_POOLS: Final = WeakSet[_SaltPool]()
os.register_at_fork(after_in_child=lambda: [pool.drawn.clear() for pool in _POOLS])


def draw_salts() -> Iterator[bytes]:
    """Salts without end. A list that was emptied is at its end for its iterator, too: then new ones are drawn."""
    return chain.from_iterable(iter(_SaltPool().take, None))


class Observer(Protocol):
    """Runs on the writer thread after commit; must not raise or block."""

    @property
    def every_seconds(self) -> float: ...

    def on_commit(self, events: Sequence[Stored]) -> None: ...

    def flush(self) -> None: ...


class LateReading:
    """Events that are read when they are asked for, once."""

    __slots__ = ("__weakref__", "_found", "_read")

    def __init__(self, read: Callable[[], Sequence[Stored]]) -> None:
        self._read: Callable[[], Sequence[Stored]] | None = read
        self._found: Sequence[Stored] = ()

    def __call__(self) -> Sequence[Stored]:
        if self._read is not None:
            self._found, self._read = self._read(), None
        return self._found

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy needs no store."""
        return (partial, (list, self()))


class _Journal:
    """An engine with its threads and write queue; all handles of one store share it."""

    def __init__(
        self, engine: Engine, *, inline: bool, salts: Iterator[bytes], applier: Applier, observers: Sequence[Observer]
    ) -> None:
        self.engine = engine
        self.inline = inline
        # A server is always waited for, which the thread of the event loop never does.
        self._decides_here = engine.look is None
        self._salts = salts
        self._applier = applier
        self.observers = observers
        self._waiting: deque[tuple[Write, asyncio.Future[Committed]]] = deque()
        self._busy = False
        self._reading = 0
        self._asked: deque[tuple[Question, asyncio.Future[Sequence[Any]]]] = deque()
        self._looking = False
        # Now and then, since what is done in this thread does not wait: a loop of it would let no other task run.
        self._is_others_turn = cycle([False] * (DONE_BEFORE_YIELD - 1) + [True])
        self._last_task: asyncio.Task[Any] | None = None
        self._writing_now = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "halter-journal-writer")
        self._reader = ThreadPoolExecutor(1, "halter-journal-reader")
        # A thread of its own: jobs of the writer wait until what was decided here is durable.
        self._syncer = ThreadPoolExecutor(1, "halter-journal-sync")
        # A thread of its own: the shared ones may all be stuck, and the writes of other processes would go unheard.
        self._watching = ThreadPoolExecutor(1, "halter-journal-watcher")
        self._timers: dict[Observer, asyncio.TimerHandle] = {}
        # Not a set: followers are told in one order, so that a run can be replayed.
        self._followers: dict[asyncio.Queue[Sequence[Change]], Callable[[Change], bool]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self.late = WeakSet[LateReading]()
        """Read before the engine is closed, if they are still wanted."""
        self._closed = False

    async def commit(self, write: Write, retry: StoreRetry | None = None) -> Committed:
        """Commit at once for a task that commits alone; what several tasks write together shares a transaction.

        With a `retry` it is repeated while the store is unavailable.
        """
        try:
            alone = self.inline
            if not alone and self._decides_here:
                task, last = asyncio.current_task(), self._last_task
                self._last_task = task
                if task is last and not self._busy and (self._timers or not self.observers):
                    alone = True
                    if next(self._is_others_turn):
                        await asyncio.sleep(0)
            answers = self.run([write], wait=self.inline) if alone else ()
            committed = answers[0] if answers else await self.enqueue(write)
            if isinstance(committed, LeaseLost):
                raise committed
            if answers and self._followers:
                self._hint([committed])
        except StoreUnavailable as away:
            if retry is None:
                raise
            return await retry.repeat(partial(self.commit, write), away)
        if retry is not None and retry.trouble.problem:
            retry.trouble.clear()
        return committed

    def enqueue(self, write: Write) -> asyncio.Future[Committed]:
        """Queue a write: what waits together shares a transaction."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Committed] = loop.create_future()
        if not self._timers:
            for observer in self.observers:
                self._set_timer(observer)
        self._waiting.append((write, answer))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._flush)
        return answer

    async def write(self, job: Callable[[], T]) -> T:
        """Run a job that must not overlap a transaction."""

        def write_alone() -> T:
            with self._writing_now:
                return job()

        return (
            write_alone()
            if self.inline
            else await asyncio.get_running_loop().run_in_executor(self._writer, write_alone)
        )

    async def read(self, job: Callable[[], T], *, short: bool = False) -> T:
        """Run a job that may overlap a transaction; a short one in this thread, unless the reader is at work."""
        if self.inline:
            return job()
        if short and self._decides_here and not self._reading:
            if next(self._is_others_turn):
                await asyncio.sleep(0)
            return job()
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, job)
        finally:
            self._reading -= 1

    async def look(self, question: Question, *, short: bool) -> Sequence[Any]:
        """Answer a question; what several tasks ask of a server at the same time shares a round trip."""
        if self.inline or self.engine.look is None:
            return await self.read(partial(question.ask, self.engine), short=short)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Any]] = loop.create_future()
        self._asked.append((question, answer))
        if not self._looking:
            self._looking = True
            loop.call_soon(self._answer_together, self.engine.look)
        return await answer

    def _answer_together(self, look: AnswerTogether) -> None:
        batch = [self._asked.popleft() for _ in range(min(LARGEST_BATCH, len(self._asked)))]

        def resolve_all(answers: Sequence[Sequence[Any] | BaseException]) -> None:
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            if self._asked:
                self._answer_together(look)
            else:
                self._looking = False

        questions = [question for question, _ in batch]
        try:
            job = asyncio.get_running_loop().run_in_executor(self._reader, _answer_together, look, questions)
        except RuntimeError as closed:
            resolve_all([closed] * len(batch))
        else:
            job.add_done_callback(lambda done: resolve_all(done.result()))

    async def study(self, job: Callable[[StoreView], T]) -> T:

        def study_alone() -> T:
            with self._writing_now:
                view = self.engine.view()
            with closing(view):
                return job(view)

        return study_alone() if self.inline else await asyncio.to_thread(study_alone)

    async def changes(self, matters: Callable[[Change], bool]) -> AsyncIterator[Change]:
        hints: asyncio.Queue[Sequence[Change]] = asyncio.Queue(MOST_PENDING_HINTS)
        self._followers[hints] = matters
        if self._watcher is None and not self.inline:
            self._watcher = asyncio.create_task(self._watch(), name="halter-journal-watcher")
        try:
            while True:
                for change in await hints.get():
                    yield change
        finally:
            del self._followers[hints]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            await asyncio.wait([self._watcher])
        self._watching.shutdown()
        for timer in self._timers.values():
            timer.cancel()
        for observer in self.observers:
            await self.write(observer.flush)
        for reading in [*self.late]:
            with suppress(StoreError):
                await self.read(reading)
        # A read that is asked for or under way must not find the engine closed.
        if self._asked:
            await asyncio.wait([answer for _, answer in self._asked])
        await asyncio.get_running_loop().run_in_executor(self._writer, self._reader.shutdown)
        await self.write(self.engine.close)
        self._writer.shutdown()
        self._syncer.shutdown()

    def run(self, writes: Sequence[Write], *, wait: bool = True) -> list[WriteAnswer]:
        """Commit several writes in one transaction, each as if alone, and notify the observers.

        A lost lease fails only its own write; any other error undoes all of them. Where it would have to wait and must
        not, nothing is done, and there are no answers.
        """
        if not self._writing_now.acquire(wait):
            return []
        try:
            try:
                answers, fresh = self._decide(writes, wait=wait)
            except (Conflict, RowRefused) as error:
                answers, fresh = self._decide_again(writes, error, wait=wait)
        except Busy:
            return []
        finally:
            self._writing_now.release()
        if self.observers:
            self._notify_observers(fresh)
        return answers

    def _decide(
        self, writes: Sequence[Write], *, wait: bool, commits: bool = True
    ) -> tuple[list[WriteAnswer], list[Stored]]:
        """Do the writes in a transaction, and commit it unless another thread will; on an error all are undone."""
        engine = self.engine
        keys, needed = list_needs(writes)
        if not (text := "".join(keys)).isascii() or "\x00" in text:
            writes = [_clean_write_keys(write) for write in writes]
            keys, needed = list_needs(writes)
        try:
            rows = engine.begin(needed, keys, wait=wait)
            answers: list[WriteAnswer] = []
            for write in writes:
                answers.append(self._applier(write, rows, self._salts))  # noqa: PERF401 It is one frame less.
            if rows.events:
                engine.save(rows)
            if commits:
                engine.commit()
        except BaseException:
            engine.rollback()
            raise
        return answers, rows.events

    def _decide_again(
        self, writes: Sequence[Write], error: Conflict | RowRefused, *, wait: bool
    ) -> tuple[list[WriteAnswer], list[Stored]]:
        """A row that another process inserted meanwhile can make a decision that fits no row: look again."""
        refused = isinstance(error, RowRefused)
        for _ in range(MOST_DECISION_ATTEMPTS - 1):
            try:
                return self._decide(writes, wait=wait)
            except Conflict:
                pass
            except RowRefused:
                if refused:
                    raise
                refused = True
        raise StoreUnavailable(
            f"{MOST_DECISION_ATTEMPTS} attempts to commit met rows that others had just inserted; try it again."
        )

    def _sync(self, answers: list[WriteAnswer], fresh: list[Stored]) -> list[WriteAnswer]:
        """Make durable, in a thread of its own, what was decided in the thread of the event loop."""
        try:
            self.engine.commit()
        except BaseException:
            self.engine.rollback()
            raise
        finally:
            self._writing_now.release()
        self._notify_observers(fresh)
        return answers

    def _notify_observers(self, fresh: list[Stored]) -> None:
        for observer in self.observers if fresh else ():
            observer.on_commit(fresh)

    def _set_timer(self, observer: Observer) -> None:
        later = asyncio.get_running_loop().call_later
        self._timers[observer] = later(observer.every_seconds, self._time_came, observer)

    def _time_came(self, observer: Observer) -> None:
        self._set_timer(observer)
        asyncio.get_running_loop().run_in_executor(self._writer, observer.flush)

    def _flush(self) -> None:
        """Commit what waits. This thread decides, which is cheaper than waking another; what fails is tried there."""
        batch = [self._waiting.popleft() for _ in range(min(LARGEST_BATCH, len(self._waiting)))]
        writes = [write for write, _ in batch]
        if self._decides_here and self._flush_here(batch, writes):
            return
        attempt = asyncio.get_running_loop().run_in_executor(self._writer, self.run, writes)
        attempt.add_done_callback(lambda done: self._wrote(batch, done))

    def _flush_here(self, batch: list[tuple[Write, asyncio.Future[Committed]]], writes: list[Write]) -> bool:
        """Decide in this thread, unless another is at work; return whether that was done."""
        if len(batch) == 1:
            answers: Sequence[WriteAnswer | Exception]
            try:
                answers = self.run(writes, wait=False)
            except Exception as error:  # noqa: BLE001  the caller of this write gets its error
                answers = [error]
            if not answers:
                return False
            self._answer(batch, answers)
            self._wait_until_flushed()
            return True
        if not self._writing_now.acquire(blocking=False):
            return False
        # Two threads that take turns at every statement are in each other's way: only the sync is another's.
        try:
            decided = self._decide(writes, wait=False, commits=False)
        except BaseException as error:
            self._writing_now.release()
            if not isinstance(error, Exception):
                raise
            return False
        attempt = asyncio.get_running_loop().run_in_executor(self._syncer, self._sync, *decided)
        attempt.add_done_callback(lambda done: self._wrote(batch, done))
        return True

    def _wrote(
        self, batch: list[tuple[Write, asyncio.Future[Committed]]], done: asyncio.Future[list[WriteAnswer]]
    ) -> None:
        error = done.exception()
        if error is None or len(batch) == 1 or isinstance(error, (StoreUnavailable, StoreUnusable)):
            self._answer(batch, _read_answers(done, len(batch)))
            self._wait_until_flushed()
        else:
            self._write_one_by_one(batch)

    def _write_one_by_one(self, batch: list[tuple[Write, asyncio.Future[Committed]]]) -> None:
        """Give each write of a failed batch its own transaction, so that only the culprit fails."""
        loop = asyncio.get_running_loop()
        for write, answer in batch:
            attempt = loop.run_in_executor(self._writer, self.run, [write])
            alone = [(write, answer)]
            attempt.add_done_callback(lambda done, alone=alone: self._answer(alone, _read_answers(done)))
        self._wait_until_flushed()

    def _answer(
        self, batch: list[tuple[Write, asyncio.Future[Committed]]], answers: Sequence[WriteAnswer | BaseException]
    ) -> None:
        self._hint([answer for answer in answers if isinstance(answer, Committed)])
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Committed):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    def _wait_until_flushed(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        else:
            self._busy = False

    def _hint(self, answers: Sequence[Committed]) -> None:
        """Tell the followers, all at once, of each stream that grew, with the first of its new events."""
        if self._followers:
            grown = {event.stream: event.seq for answer in reversed(answers) for event in reversed(answer.fresh())}
            self._publish([Change(*each) for each in reversed(grown.items())])

    def _publish(self, changes: Sequence[Change]) -> None:
        for follower, matters in self._followers.items() if changes else ():
            told = list(filter(matters, changes))
            if told and not follower.full():
                follower.put_nowait(told)

    async def _watch(self) -> None:
        while not self._closed:
            try:
                look = partial(self.engine.wait_for_others, WATCH_INTERVAL_SECONDS)
                self._publish(await asyncio.get_running_loop().run_in_executor(self._watching, look))
            except Exception:  # noqa: BLE001  a watcher that ends leaves every follower deaf
                self._publish([Change(EVERY_STREAM, 0)])
                await asyncio.sleep(WATCH_INTERVAL_SECONDS)


class JournalStore:
    """A store over an engine.

    With `inline`, everything runs in the caller's thread, as simulation wants it. Otherwise one thread writes: what
    arrives while it is busy shares its next transaction, and a lone write skips the thread altogether.
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
        self._journal = _Journal(engine, inline=inline, salts=salts, applier=applier, observers=observers)
        self.retry: StoreRetry | None = None
        self._patient: tuple[Clock, StoreProblem, Self] | None = None

    def patient(self, clock: Clock, trouble: StoreProblem | None = None) -> Self:
        """A handle on the same store that waits while the store is unavailable, instead of raising."""
        known = self._patient
        if known is not None and known[0] is clock and known[1] is trouble:
            return known[2]
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
        return await self._patiently(partial(self._journal.look, question, short=True))

    async def read_later(self, stream: StreamId, head: int) -> Callable[[], Sequence[Stored]]:
        if self._engine.look is not None:
            found = await self.read(stream, 0, head)
            return LateReading(lambda: found)
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
        # Nobody may wait any more for a write that is queued and takes this lease: it comes first.
        await self.commit(Write(lease.stream, "", lambda _: ()))
        await self._write(lambda: self._engine.release(lease))

    async def ask(self, query: Query[T]) -> Sequence[T]:
        params = {name: clean(given) if isinstance(given, str) else given for name, given in query.params.items()}
        look = partial(self._journal.look, NamedQuery(query.name, params), short=query.name in SHORT_QUERIES)
        found = await self._patiently(look)
        return [msgspec.convert(row, query.row, strict=False) for row in found] if found else []

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
        """Keep a document's chunks, written in portions so that other writers do not wait long."""
        await self._patiently(lambda: self._index(clean(document), chunks))

    async def _index(self, name: str, chunks: Sequence[Chunk]) -> None:
        if name in await self._journal.read(lambda: self._engine.indexed([name])):
            return
        made = (
            index_chunks(name, chunks) if self._journal.inline else await asyncio.to_thread(index_chunks, name, chunks)
        )
        await self._forget(name)
        for _ in range(INDEX_ATTEMPTS):
            for start in range(0, len(made), CHUNKS_PER_WRITE):
                portion = made[start : start + CHUNKS_PER_WRITE]
                await self._journal.write(partial(self._engine.add_chunks, name, portion))
            if await self._journal.write(partial(self._engine.show_document, name, len(made))):
                return
        raise StoreUnavailable(f"The document {name} was forgotten whenever it was written; it may be tried again.")

    async def forget(self, document: str) -> None:
        """Drop a document's chunks; it is hidden from the first moment on."""
        await self._patiently(lambda: self._forget(clean(document)))

    async def _forget(self, name: str) -> None:
        drop = partial(self._engine.drop_chunks, name, CHUNKS_PER_WRITE)
        while await self._journal.write(drop) == CHUNKS_PER_WRITE:
            pass

    async def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        return await self._read(lambda: self._engine.indexed([clean(document) for document in documents]))

    async def chunks(self, document: str) -> Sequence[Chunk]:
        return await self._read(lambda: self._engine.chunks(clean(document)))

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[FoundChunk]:
        """Chunks with all of the words, or if there are none, with any."""
        named = [clean(document) for document in documents]
        most = max(0, min(limit, MOST_CHUNKS_FOUND))

        def run_search() -> Sequence[FoundChunk]:
            wanted = split_query_words(words)
            if not wanted:
                return []
            search = self._engine.search
            return search(named, wanted, most, every=True) or search(named, wanted, most, every=False)

        return await self._read(run_search)

    async def study(self, job: Callable[[StoreView], T]) -> T:
        """Run a job on a snapshot of the store; it delays no writer."""
        return await self._journal.study(job)

    async def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        await self._journal.write(lambda: self._engine.replace(make))

    async def scrub(self) -> bool:
        """Overwrite what lingers of erased bodies; False if a reader prevented it."""
        return await self._journal.write(self._engine.scrub)

    def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncIterator[Change]:
        """Follow which streams grow, as far as it matters. A reader that lags loses hints, never events."""
        return self._journal.changes(matters)

    async def close(self) -> None:
        await self._journal.close()

    async def _write(self, job: Callable[[], T]) -> T:
        return await self._patiently(partial(self._journal.write, job))

    async def _read(self, job: Callable[[], T]) -> T:
        return await self._patiently(partial(self._journal.read, job))

    async def _patiently(self, use: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await use()
        except StoreUnavailable as away:
            if self.retry is None:
                raise
            return await self.retry.repeat(use, away)
        if self.retry is not None and self.retry.trouble.problem:
            self.retry.trouble.clear()
        return answer


def _answer_together(look: AnswerTogether, questions: Sequence[Question]) -> Sequence[Sequence[Any] | BaseException]:
    """Answer each question; where one cannot be answered, the others are asked without it."""
    try:
        return look(questions)
    except StoreUnavailable as away:
        return [away] * len(questions)
    except BaseException as error:  # noqa: BLE001  the task that asked gets its error
        if len(questions) == 1:
            return [error]
        return [answer for question in questions for answer in _answer_together(look, [question])]


def _read_answers(done: asyncio.Future[list[WriteAnswer]], count: int = 1) -> Sequence[WriteAnswer | BaseException]:
    error = done.exception()
    return done.result() if error is None else [error] * count


def _clean_write_keys(write: Write) -> Write:
    """Make the keys of a write and of those before it fit for a store."""
    first = None if write.first is None else _clean_write_keys(write.first)
    return msgspec.structs.replace(write, key=clean(write.key), first=first)
