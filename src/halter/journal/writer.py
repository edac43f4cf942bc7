"""The queue before an engine: writes that wait together are committed together."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import cycle
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet

from msgspec.structs import replace

from halter.core.errors import LeaseLost, RowRefused, StoreError, StoreUnavailable, StoreUnusable
from halter.core.ports import ALL_STREAMS, Change, Committed, Stored, Write
from halter.core.text import clean
from halter.journal.apply import Applier, WriteAnswer, list_needs
from halter.journal.engine import AnswerTogether, Busy, Conflict, Engine, Question, StoreView
from halter.journal.store_retry import StoreRetry

MAX_BATCH_WRITES: Final = 256
"""Writes per transaction: enough to share a sync, few enough to keep locks short."""

MAX_PENDING_HINTS: Final = 1024
"""Maximum number of unread hints of a follower; more are dropped."""
WATCH_INTERVAL_SECONDS: Final = 0.05

DONE_BEFORE_YIELD: Final = 16
"""Number of reads and writes in the caller's thread before it yields to other tasks."""
MAX_DECISION_ATTEMPTS: Final = 20
"""Attempts to apply a transaction when other processes insert the same rows."""

T = TypeVar("T")


class Observer(Protocol):
    """Receives committed events on the writer thread. It must not raise or block."""

    @property
    def interval_seconds(self) -> float: ...

    def on_commit(self, events: Sequence[Stored]) -> None: ...

    def flush(self) -> None: ...


class LateReading:
    """Events that are read at the first call, and kept."""

    __slots__ = ("__weakref__", "_events", "_read")

    def __init__(self, read: Callable[[], Sequence[Stored]]) -> None:
        self._read: Callable[[], Sequence[Stored]] | None = read
        self._events: Sequence[Stored] = ()

    def __call__(self) -> Sequence[Stored]:
        if self._read is not None:
            self._events, self._read = self._read(), None
        return self._events

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the events themselves: a copy has no store."""
        return (partial, (list, self()))


class JournalWriter:
    """An engine with its threads and write queue; all handles of one store share it."""

    def __init__(
        self, engine: Engine, *, inline: bool, salts: Iterator[bytes], applier: Applier, observers: Sequence[Observer]
    ) -> None:
        self.engine = engine
        self.inline = inline
        # A server always makes the caller wait, which the thread of the event loop must not.
        self._decides_here = engine.answer_questions is None
        self._salts = salts
        self._applier = applier
        self.observers = observers
        self._waiting: deque[tuple[Write, asyncio.Future[Committed]]] = deque()
        self._busy = False
        self._reading = 0
        self._questions: deque[tuple[Question, asyncio.Future[Sequence[Any]]]] = deque()
        self._is_answering = False
        # Work in this thread never waits, so a loop of it would starve other tasks without a regular yield.
        self._is_others_turn = cycle([False] * (DONE_BEFORE_YIELD - 1) + [True])
        self._last_task: asyncio.Task[Any] | None = None
        self._writing_now = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "halter-journal-writer")
        self._reader = ThreadPoolExecutor(1, "halter-journal-reader")
        # A separate thread: the writer's jobs wait until what was applied in the event loop's thread is durable.
        self._syncer = ThreadPoolExecutor(1, "halter-journal-sync")
        # A separate thread: if all shared ones were stuck, changes of other processes would not be noticed.
        self._watching = ThreadPoolExecutor(1, "halter-journal-watcher")
        self._timers: dict[Observer, asyncio.TimerHandle] = {}
        # A dict keeps the order in which followers are notified, so that a simulation can be replayed.
        self._followers: dict[asyncio.Queue[Sequence[Change]], Callable[[Change], bool]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self.late = WeakSet[LateReading]()
        """Reads that are still referenced are completed before the engine is closed."""
        self._closed = False

    async def commit(self, write: Write, retry: StoreRetry | None = None) -> Committed:
        """Commit a write: in this thread if only one task commits, else queued, to share a transaction with others.

        With `retry`, it is retried while the store is unavailable.
        """
        try:
            is_alone = self.inline
            if not is_alone and self._decides_here:
                task, last_task = asyncio.current_task(), self._last_task
                self._last_task = task
                if task is last_task and not self._busy and (self._timers or not self.observers):
                    is_alone = True
                    if next(self._is_others_turn):
                        await asyncio.sleep(0)
            answers = self.run([write], wait=self.inline) if is_alone else ()
            committed = answers[0] if answers else await self.enqueue(write)
            if isinstance(committed, LeaseLost):
                raise committed
            if answers and self._followers:
                self._hint([committed])
        except StoreUnavailable as error:
            if retry is None:
                raise
            return await retry.repeat(partial(self.commit, write), error)
        if retry is not None and retry.trouble.problem:
            retry.trouble.clear()
        return committed

    def enqueue(self, write: Write) -> asyncio.Future[Committed]:
        """Queue a write. Queued writes share a transaction."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Committed] = loop.create_future()
        if not self._timers:
            for observer in self.observers:
                self._set_timer(observer)
        self._waiting.append((write, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._flush)
        return future

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
        """Run a job that can overlap a transaction: in this thread if it is short and the reader is idle."""
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

    async def answer_question(self, question: Question, *, short: bool) -> Sequence[Any]:
        """Answer a question. Concurrent questions to a server share a round trip."""
        if self.inline or self.engine.answer_questions is None:
            return await self.read(partial(question.ask, self.engine), short=short)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Any]] = loop.create_future()
        self._questions.append((question, future))
        if not self._is_answering:
            self._is_answering = True
            loop.call_soon(self._answer_together, self.engine.answer_questions)
        return await future

    def _answer_together(self, answer_questions: AnswerTogether) -> None:
        batch = [self._questions.popleft() for _ in range(min(MAX_BATCH_WRITES, len(self._questions)))]

        def resolve_all(answers: Sequence[Sequence[Any] | BaseException]) -> None:
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            if self._questions:
                self._answer_together(answer_questions)
            else:
                self._is_answering = False

        questions = [question for question, _ in batch]
        try:
            job = asyncio.get_running_loop().run_in_executor(
                self._reader, _answer_together, answer_questions, questions
            )
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
        queue: asyncio.Queue[Sequence[Change]] = asyncio.Queue(MAX_PENDING_HINTS)
        self._followers[queue] = matters
        if self._watcher is None and not self.inline:
            self._watcher = asyncio.create_task(self._watch(), name="halter-journal-watcher")
        try:
            while True:
                for change in await queue.get():
                    yield change
        finally:
            del self._followers[queue]

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
        # Queued and running reads must not find the engine closed.
        if self._questions:
            await asyncio.wait([future for _, future in self._questions])
        await asyncio.get_running_loop().run_in_executor(self._writer, self._reader.shutdown)
        await self.write(self.engine.close)
        self._writer.shutdown()
        self._syncer.shutdown()

    def run(self, writes: Sequence[Write], *, wait: bool = True) -> list[WriteAnswer]:
        """Commit several writes in one transaction, each as if alone, and notify the observers.

        A lost lease fails only its own write; any other error rolls back all of them. Without `wait`, if the store is
        busy, nothing is done and the result is empty.
        """
        if not self._writing_now.acquire(wait):
            return []
        try:
            try:
                answers, new_events = self._decide(writes, wait=wait)
            except (Conflict, RowRefused) as error:
                answers, new_events = self._decide_again(writes, error, wait=wait)
        except Busy:
            return []
        finally:
            self._writing_now.release()
        if self.observers:
            self._notify_observers(new_events)
        return answers

    def _decide(
        self, writes: Sequence[Write], *, wait: bool, commits: bool = True
    ) -> tuple[list[WriteAnswer], list[Stored]]:
        """Apply the writes in a transaction, and commit it unless another thread will. An error rolls back all."""
        engine = self.engine
        keys, row_keys = list_needs(writes)
        if not (text := "".join(keys)).isascii() or "\x00" in text:
            writes = [clean_write_keys(write) for write in writes]
            keys, row_keys = list_needs(writes)
        try:
            working_set = engine.begin(row_keys, keys, wait=wait)
            answers: list[WriteAnswer] = []
            for write in writes:
                answers.append(self._applier(write, working_set, self._salts))  # noqa: PERF401 It is one frame less.
            if working_set.events:
                engine.save(working_set)
            if commits:
                engine.commit()
        except BaseException:
            engine.rollback()
            raise
        return answers, working_set.events

    def _decide_again(
        self, writes: Sequence[Write], error: Conflict | RowRefused, *, wait: bool
    ) -> tuple[list[WriteAnswer], list[Stored]]:
        """Apply again after an error: a row that another process inserted meanwhile can invalidate a decision."""
        was_refused = isinstance(error, RowRefused)
        for _ in range(MAX_DECISION_ATTEMPTS - 1):
            try:
                return self._decide(writes, wait=wait)
            except Conflict:
                pass
            except RowRefused:
                if was_refused:
                    raise
                was_refused = True
        raise StoreUnavailable(
            f"Could not commit in {MAX_DECISION_ATTEMPTS} attempts: other processes inserted the same rows. Try again."
        )

    def _sync(self, answers: list[WriteAnswer], new_events: list[Stored]) -> list[WriteAnswer]:
        """Commit, in the sync thread, what was applied in the thread of the event loop."""
        try:
            self.engine.commit()
        except BaseException:
            self.engine.rollback()
            raise
        finally:
            self._writing_now.release()
        self._notify_observers(new_events)
        return answers

    def _notify_observers(self, new_events: list[Stored]) -> None:
        for observer in self.observers if new_events else ():
            observer.on_commit(new_events)

    def _set_timer(self, observer: Observer) -> None:
        call_later = asyncio.get_running_loop().call_later
        self._timers[observer] = call_later(observer.interval_seconds, self._time_came, observer)

    def _time_came(self, observer: Observer) -> None:
        self._set_timer(observer)
        asyncio.get_running_loop().run_in_executor(self._writer, observer.flush)

    def _flush(self) -> None:
        """Commit the queued writes: in this thread if possible, which is cheaper than waking the writer, else there."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH_WRITES, len(self._waiting)))]
        writes = [write for write, _ in batch]
        if self._decides_here and self._flush_here(batch, writes):
            return
        attempt = asyncio.get_running_loop().run_in_executor(self._writer, self.run, writes)
        attempt.add_done_callback(lambda done: self._wrote(batch, done))

    def _flush_here(self, batch: list[tuple[Write, asyncio.Future[Committed]]], writes: list[Write]) -> bool:
        """Apply writes in this thread. Returns False, having done nothing, if the store is busy or a batch fails."""
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
        # Two threads that alternate at every statement slow each other down, so only the sync runs in another.
        try:
            outcome = self._decide(writes, wait=False, commits=False)
        except BaseException as error:
            self._writing_now.release()
            if not isinstance(error, Exception):
                raise
            return False
        attempt = asyncio.get_running_loop().run_in_executor(self._syncer, self._sync, *outcome)
        attempt.add_done_callback(lambda done: self._wrote(batch, done))
        return True

    def _wrote(
        self, batch: list[tuple[Write, asyncio.Future[Committed]]], attempt: asyncio.Future[list[WriteAnswer]]
    ) -> None:
        error = attempt.exception()
        if error is None or len(batch) == 1 or isinstance(error, (StoreUnavailable, StoreUnusable)):
            self._answer(batch, _read_answers(attempt, len(batch)))
            self._wait_until_flushed()
        else:
            self._write_one_by_one(batch)

    def _write_one_by_one(self, batch: list[tuple[Write, asyncio.Future[Committed]]]) -> None:
        """Give each write of a failed batch its own transaction, so that only the culprit fails."""
        loop = asyncio.get_running_loop()
        for write, future in batch:
            attempt = loop.run_in_executor(self._writer, self.run, [write])
            single = [(write, future)]
            attempt.add_done_callback(lambda done, single=single: self._answer(single, _read_answers(done)))
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
        """Publish each stream that grew to the followers, with the number of the first new event."""
        if self._followers:
            seq_by_stream = {
                event.stream: event.seq for answer in reversed(answers) for event in reversed(answer.fresh())
            }
            self._publish([Change(*each) for each in reversed(seq_by_stream.items())])

    def _publish(self, changes: Sequence[Change]) -> None:
        for queue, matters in self._followers.items() if changes else ():
            relevant_changes = list(filter(matters, changes))
            if relevant_changes and not queue.full():
                queue.put_nowait(relevant_changes)

    async def _watch(self) -> None:
        while not self._closed:
            try:
                wait = partial(self.engine.wait_for_others, WATCH_INTERVAL_SECONDS)
                self._publish(await asyncio.get_running_loop().run_in_executor(self._watching, wait))
            except Exception:  # noqa: BLE001  without the watcher, no follower would be notified
                self._publish([Change(ALL_STREAMS, 0)])
                await asyncio.sleep(WATCH_INTERVAL_SECONDS)


def _answer_together(
    answer_questions: AnswerTogether, questions: Sequence[Question]
) -> Sequence[Sequence[Any] | BaseException]:
    """Answer the questions together. If one fails, each is asked separately, so that the others are answered."""
    try:
        return answer_questions(questions)
    except StoreUnavailable as unavailable:
        return [unavailable] * len(questions)
    except BaseException as error:  # noqa: BLE001  the task that asked gets its error
        if len(questions) == 1:
            return [error]
        return [answer for question in questions for answer in _answer_together(answer_questions, [question])]


def _read_answers(attempt: asyncio.Future[list[WriteAnswer]], count: int = 1) -> Sequence[WriteAnswer | BaseException]:
    error = attempt.exception()
    return attempt.result() if error is None else [error] * count


def clean_write_keys(write: Write) -> Write:
    """Clean the keys of a write and of its `first` writes for a store."""
    first = None if write.first is None else clean_write_keys(write.first)
    return replace(write, key=clean(write.key), first=first)
