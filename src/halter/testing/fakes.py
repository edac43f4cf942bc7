"""Fakes that keep the promises of the real thing: clock, ids, stores that relay or crash, a ticket queue, a worker.

Each passes the same contract suite as the real one.
"""

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import CallStarted, CostCapReached, RequestStarted
from halter.core.ids import Digest, SessionId, SortableIds, StreamId, WorkerId
from halter.core.money import CapReached, Reserved, has_past_window, reserve, roll_legs
from halter.core.ports import (
    AgentConcurrency,
    Change,
    Chunk,
    Committed,
    Draft,
    EnqueueTickets,
    FoundChunk,
    HeartbeatReply,
    Lease,
    Offer,
    Query,
    Rows,
    Store,
    Stored,
    Ticket,
    Write,
    matters_always,
)
from halter.core.project.holds import budget_row, rows_of_hold
from halter.core.rows import NO_OWNER, HoldRow, SessionRow
from halter.dispatch.dispatcher import ServeTicket
from halter.guard.halts import BudgetBusy
from halter.guard.ledger import Ledger
from halter.journal.store_retry import StoreProblem, StoreRetry
from halter.policy.store_policy import lower_legs_to_policy
from halter.state.session import InFlight, track_call, track_request


class ManualClock:
    """A clock that does not move until it is advanced."""

    def __init__(self, now: int = 0) -> None:
        self._now = now
        self._ahead = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> int:
        return self._now + self._ahead

    def monotonic(self) -> int:
        return self._now

    def set_ahead(self, duration: int) -> None:
        """Set the wall clock ahead by a duration, or back by a negative one. No time passes."""
        self._ahead += duration

    async def sleep(self, duration: int) -> None:
        if duration <= 0:
            await asyncio.sleep(0)
            return
        wake_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + duration, next(self._numbers), wake_future))
        await wake_future

    def advance(self, duration: int) -> None:
        """Advance the clock by microseconds, and wake the sleepers that are due, the earliest first."""
        self._now += duration
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, wake_future = heapq.heappop(self._sleepers)
            if not wake_future.done():
                wake_future.set_result(None)


class SeededIds(SortableIds):
    """Ids that are the same for the same seed and times."""

    def __init__(self, seed: int | str, now: Callable[[], int]) -> None:
        super().__init__(now, random.Random(seed).getrandbits)


def make_seeded_salts(seed: int | str) -> Callable[[int], bytes]:
    """Return a source of salts, the same for the same seed, so that hashes replay."""
    return random.Random(seed).randbytes


T = TypeVar("T")


class StoreProxy:
    """A store that forwards every call to another store: the base of stores that differ in one behaviour."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def patient(self, clock: Clock, trouble: StoreProblem | None = None) -> "RetryingStoreProxy":
        """Return a store that retries while this one is unavailable, as `JournalStore.patient` does."""
        return RetryingStoreProxy(self, StoreRetry(clock, trouble or StoreProblem()))

    async def before_call(self) -> None:
        """Hook that runs before each call of the other store, and again before its answer is returned."""

    async def commit(self, write: Write) -> Committed:
        return await self._pass_through(lambda: self._store.commit(write))

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        return await self._pass_through(lambda: self._store.read(stream, after, limit))

    async def read_later(self, stream: StreamId, head: int) -> Callable[[], Sequence[Stored]]:
        return await self._pass_through(lambda: self._store.read_later(stream, head))

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        return await self._pass_through(lambda: self._store.claim(worker, limit, only, agents))

    async def offer(self, limit: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        return await self._pass_through(lambda: self._store.offer(limit, agents, enqueue))

    async def beat(
        self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = ""
    ) -> HeartbeatReply:
        return await self._pass_through(lambda: self._store.beat(worker, snapshots, about))

    async def leave(self, worker: WorkerId) -> None:
        await self._pass_through(lambda: self._store.leave(worker))

    async def release(self, lease: Lease) -> None:
        await self._pass_through(lambda: self._store.release(lease))

    async def ask(self, query: Query[T]) -> Sequence[T]:
        return await self._pass_through(lambda: self._store.ask(query))

    async def put(self, data: bytes) -> Digest:
        return await self._pass_through(lambda: self._store.put(data))

    async def get(self, digest: Digest) -> bytes:
        return await self._pass_through(lambda: self._store.get(digest))

    async def index(self, document: str, chunks: Sequence[Chunk]) -> None:
        await self._pass_through(lambda: self._store.index(document, chunks))

    async def forget(self, document: str) -> None:
        await self._pass_through(lambda: self._store.forget(document))

    async def find_indexed(self, documents: Sequence[str]) -> frozenset[str]:
        return await self._pass_through(lambda: self._store.find_indexed(documents))

    async def chunks(self, document: str) -> Sequence[Chunk]:
        return await self._pass_through(lambda: self._store.chunks(document))

    async def search(self, documents: Sequence[str], query: str, limit: int) -> Sequence[FoundChunk]:
        return await self._pass_through(lambda: self._store.search(documents, query, limit))

    def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncIterator[Change]:
        return self._store.changes(matters)

    async def close(self) -> None:
        await self._store.close()

    async def _pass_through(self, use: Callable[[], Awaitable[T]]) -> T:
        await self.before_call()
        answer = await use()
        await self.before_call()
        return answer


class RetryingStoreProxy(StoreProxy):
    """Retries while the other store is unavailable."""

    def __init__(self, store: Store, retry: StoreRetry) -> None:
        super().__init__(store)
        self._retry = retry

    async def _pass_through(self, use: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await use()
        except StoreUnavailable as away:
            return await self._retry.repeat(use, away)
        self._retry.trouble.clear()
        return answer


CrashKind = Literal["before", "after", "answer_lost", "stop"]
CRASH_KINDS: Final[tuple[CrashKind, ...]] = ("before", "after", "answer_lost")


@dataclass(frozen=True, slots=True)
class Crash:
    """A fault at the n-th commit of a process; the first is number 1.

    `before`: nothing is written and the process dies. `after`: it is written, and the process dies before the answer.
    `answer_lost`: it is written, and the process gets StoreUnavailable instead of the answer. `stop`, which is not
    among the `CRASH_KINDS`: it is written, and `CrashingStore.stop_requested` is set, so that a program can stop in
    order.
    """

    commit: int
    kind: CrashKind


class Crashed(BaseException):
    """The process is dead. No `except Exception` catches it."""


class CrashingStore(StoreProxy):
    """One process's view of a store: other tasks run during each call, and the process can die.

    The store behind it stays intact, like a disk. Every call of the dead process raises `Crashed`.
    """

    def __init__(self, store: Store, crash: Crash | None = None, on_death: Callable[[], object] = str) -> None:
        super().__init__(store)
        self._crash = crash
        self._on_crash = on_death
        self.dead = False
        self.stop_requested = asyncio.Event()
        self.commits = 0
        self.written: list[Stored] = []
        self.acknowledged: list[Stored] = []

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self._on_crash()

    async def before_call(self) -> None:
        """Let other tasks run. Raises Crashed in a dead process."""
        await asyncio.sleep(0)
        self._require_alive()

    async def commit(self, write: Write) -> Committed:
        await self.before_call()
        self.commits += 1
        crash_kind = self._crash.kind if self._crash and self._crash.commit == self.commits else None
        if crash_kind == "before":
            self.die()
            self._require_alive()
        committed = await self._store.commit(write)
        self.written.extend(committed.fresh())
        if crash_kind == "after":
            self.die()
        if crash_kind == "stop":
            self.stop_requested.set()
        await self.before_call()
        if crash_kind == "answer_lost":
            raise StoreUnavailable("Planned fault: the store's answer was lost. Repeat the write with the same key.")
        self.acknowledged.extend(committed.list_events())
        return committed

    async def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncGenerator[Change]:
        async for change in self._store.changes(matters):
            self._require_alive()
            yield change

    async def close(self) -> None:
        """Do nothing: the store outlives the process."""

    def _require_alive(self) -> None:
        if self.dead:
            raise Crashed


class SharedTickets:
    """The waiting tickets of all workers of a world, each with its agent's version."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, Ticket]] = deque()
        self._subscribers: list[asyncio.Event] = []

    def enqueue(self, tickets: Sequence[tuple[str, Ticket]]) -> None:
        self.waiting.extend(tickets)
        for subscriber in self._subscribers:
            subscriber.set()

    def dequeue(self, versions: Mapping[str, str]) -> Ticket | None:
        """Take the oldest ticket for one of these versions."""
        for index, (version, ticket) in enumerate(self.waiting):
            if versions.get(ticket.agent) == version:
                del self.waiting[index]
                return ticket
        return None

    def subscribe(self) -> asyncio.Event:
        """Return an event that is set when tickets are added."""
        self._subscribers.append(subscriber := asyncio.Event())
        return subscriber


class LocalTicketQueue:
    """One worker's view of the shared tickets."""

    def __init__(self, tickets: SharedTickets, versions: Mapping[str, str]) -> None:
        self._tickets = tickets
        self._versions = versions

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        self._tickets.enqueue([(self._versions[ticket.agent], ticket) for ticket in tickets])

    async def serve(self, serve: ServeTicket, concurrency: int) -> None:
        """Serve tickets as they are added, at most `concurrency` at once, until cancelled."""
        change_event, running = self._tickets.subscribe(), set[asyncio.Task[None]]()

        async def serve_one(ticket: Ticket) -> None:
            await serve(ticket)

        def on_done(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if not task.cancelled():
                task.exception()  # Only retrieved: the server reports its own failures.
            change_event.set()

        try:
            while True:
                change_event.clear()
                while len(running) < concurrency and (ticket := self._tickets.dequeue(self._versions)) is not None:
                    task = asyncio.create_task(serve_one(ticket))
                    running.add(task)
                    task.add_done_callback(on_done)
                await change_event.wait()
        finally:
            for task in running:
                task.cancel()


TakeTurn = Callable[[Lease], Awaitable[None]]

HEARTBEAT: Final = 5 * SECOND
MAX_CLAIMED: Final = 1000


class Worker:
    """Claims sessions when they are due, and runs their turns concurrently."""

    def __init__(self, store: Store, clock: Clock, worker: WorkerId, turn: TakeTurn) -> None:
        self._store = store
        self._clock = clock
        self._worker = worker
        self._turn = turn
        self._change_event = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled. Each claim also renews the leases of running turns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._wait_for_commits())
            while True:
                self._change_event.clear()
                for lease in await self._store.claim(self._worker, MAX_CLAIMED):
                    tasks.create_task(self._run_turn(lease))
                await self._sleep(await self._find_next_check())

    async def _run_turn(self, lease: Lease) -> None:
        with suppress(LeaseLost):
            await self._turn(lease)

    async def _wait_for_commits(self) -> None:
        async for _ in self._store.changes():
            self._change_event.set()

    async def _find_next_check(self) -> int | None:
        """Find the time of the next check: when a session is due, or at the next heartbeat while one is owned."""
        rows = await self._store.ask(Query("all_sessions", SessionRow))
        now = self._clock.now()
        moments = [row.due_at for row in rows if row.owner == NO_OWNER and row.due_at is not None and row.due_at > now]
        if any(row.owner != NO_OWNER for row in rows):
            moments.append(now + HEARTBEAT)
        return min(moments, default=None)

    async def _sleep(self, wake_at: int | None) -> None:
        """Sleep until a time, or until something is written."""
        seconds = None if wake_at is None else (wake_at - self._clock.now()) / SECOND
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change_event.wait()


Intent = CallStarted | RequestStarted


class HoldTaken(msgspec.Struct, frozen=True):
    """The intent is committed and its money is held."""

    flight: InFlight


class HoldRefused(msgspec.Struct, frozen=True):
    """A cap is reached; the refusal is recorded."""

    event: CostCapReached


class _HoldIntent(msgspec.Struct, frozen=True):
    lease: Lease
    intent: Intent
    body: bytes | None
    attempt: int

    def write(self, now: int, deferred: Write | None = None) -> Write:
        intent = msgspec.structs.replace(self.intent, legs=roll_legs(self.intent.legs, now))
        key, rows = f"{intent_id(intent)}/held/{self.attempt}", rows_of_hold(intent_id(intent), intent.legs)
        decide = partial(decide_hold, intent, body=self.body)
        return Write(self.lease.stream, key, decide, rows, self.lease, (), deferred)


async def hold(
    ledger: Ledger, lease: Lease, intent: Intent, body: bytes | None = None, attempt: int = 0
) -> HoldTaken | HoldRefused | BudgetBusy:
    """Commit an intent with its hold, as a door does: wait for other holds if their settlement can free money."""
    committed = await ledger.commit_intent(_HoldIntent(lease, intent, body, attempt), ledger.hold_timeout)
    for stored in () if committed is None else committed.events:
        match stored.event:
            case CostCapReached() as refusal:
                return HoldRefused(refusal)
            case CallStarted() as started:
                return HoldTaken(track_call(started, stored))
            case RequestStarted() as started:
                return HoldTaken(track_request(started, stored))
            case _:
                pass
    return BudgetBusy(intent_id(intent))


def intent_id(intent: Intent) -> str:
    """Return the id of a call or a request, which is also the id of its hold."""
    return intent.call if isinstance(intent, CallStarted) else intent.request


def decide_hold(intent: Intent, rows: Rows, body: bytes | None = None, blob: Digest | None = None) -> Sequence[Draft]:
    """Decide on an intent: the intent with its hold, the refusal, or nothing if it must wait.

    Nothing is held in a past window: the next attempt uses the current window.
    """
    if intent.legs and rows.get(HoldRow, intent_id(intent)) is not None:
        raise ValueError(f"{intent_id(intent)} already has a hold. Settle it, or repeat the attempt that made it.")
    if has_past_window(intent.legs, rows.now):
        return []
    legs = lower_legs_to_policy(intent.legs, rows)
    verdict = reserve([(leg, budget_row(rows, leg)) for leg in legs])
    match verdict:
        case Reserved():
            return [Draft(msgspec.structs.replace(intent, legs=verdict.legs), body, blob)]
        case CapReached():
            name = intent.tool if isinstance(intent, CallStarted) else intent.model
            return [Draft(CostCapReached.refusing(intent_id(intent), name, verdict))]
        case _:
            return []
