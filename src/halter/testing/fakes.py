"""Stand-ins for time and chance that a test decides over; each keeps the promises of the real one.

Crashes on demand: a store as a mortal process sees it.

A queue of tickets in memory, for workers of one world: it passes the same contract suite as the real one.

The smallest worker there can be: it claims what is due and gives it a turn.

Money held for an intent that no door asked for: for tests of the ledger, the stores and the projections.

A store that passes every call on to another: the base of stores that differ in one thing, for tests and drills.
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
from halter.core.ids import Digest, SessionId, SortableIds, StreamId, WorkerId, session_stream
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
)
from halter.core.project import budget_row, rows_of_hold
from halter.core.rows import NO_OWNER, HoldRow, SessionRow
from halter.dispatch.dispatcher import ServeTicket
from halter.guard.halts import StillHeld
from halter.guard.judge import lower_legs_to_policy
from halter.guard.ledger import Ledger
from halter.journal.store import Retry, StoreProblem
from halter.state.session import InFlight, track_call, track_request


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, now: int = 0) -> None:
        self._now = now
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> int:
        """Return the time in microseconds."""
        return self._now

    async def sleep(self, duration: int) -> None:
        """Wait until the clock has been put forward by so many microseconds."""
        if duration <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + duration, next(self._numbers), woken))
        await woken

    def advance(self, duration: int) -> None:
        """Put the clock forward; whoever slept until then is woken, the earliest first."""
        self._now += duration
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)


class SeededIds(SortableIds):
    """Identifiers as the real ones, but the same for the same seed and the same times."""

    def __init__(self, seed: int | str, now: Callable[[], int]) -> None:
        super().__init__(now, random.Random(seed).getrandbits)


def make_seeded_salts(seed: int | str) -> Callable[[int], bytes]:
    """Return a source of salts, the same for the same seed: what is written twice has the same hashes twice."""
    return random.Random(seed).randbytes


T = TypeVar("T")


class Relay:
    """Every use goes the same way to the other store, and the same way back."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def patient(self, clock: Clock, trouble: StoreProblem | None = None) -> "PatientRelay":
        """Return a store that waits while this one is unavailable, as `JournalStore.patient` does."""
        return PatientRelay(self, Retry(clock, trouble or StoreProblem()))

    async def way(self) -> None:
        """Pass before the other store is used, and again before its answer is heard."""

    async def commit(self, write: Write) -> Committed:
        """Pass a write on."""
        return await self._passed(lambda: self._store.commit(write))

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Sequence[Stored]:
        """Pass a reading on."""
        return await self._passed(lambda: self._store.read(stream, after, limit))

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        """Pass a claim on."""
        return await self._passed(lambda: self._store.claim(worker, limit, only, agents))

    async def offer(self, limit: int, agents: AgentConcurrency, put: EnqueueTickets) -> Offer:
        """Pass an offer on."""
        return await self._passed(lambda: self._store.offer(limit, agents, put))

    async def beat(
        self, worker: WorkerId, snapshots: Mapping[SessionId, bytes] = {}, about: str = ""
    ) -> HeartbeatReply:
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

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[FoundChunk]:
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


CrashKind = Literal["before", "after", "answer_lost"]
CRASH_KINDS: Final[tuple[CrashKind, ...]] = ("before", "after", "answer_lost")


@dataclass(frozen=True, slots=True)
class Crash:
    """What befalls the n-th commit of a process; the first is number 1.

    `before`: nothing is written and the process is dead. `after`: it is written, and the process is dead before
    it hears of it. `answer_lost`: it is written, the process lives, and is told that the store is unavailable.
    """

    commit: int
    kind: CrashKind


class Crashed(BaseException):
    """The process is dead. No `except Exception` can keep it alive."""


def do_nothing() -> None:
    """Tell nobody."""


class CrashingStore(Relay):
    """A store as one process sees it: others may act while it is on its way there and back, and it can die.

    The store behind it stays whole, as a disk does. Whatever the dead process still tries raises `Crashed`.
    """

    def __init__(self, store: Store, crash: Crash | None = None, on_death: Callable[[], None] = do_nothing) -> None:
        super().__init__(store)
        self._crash = crash
        self._on_death = on_death
        self.dead = False
        self.commits = 0
        self.written: list[Stored] = []
        self.acknowledged: list[Stored] = []

    def die(self) -> None:
        """Let the process be dead from now on."""
        if not self.dead:
            self.dead = True
            self._on_death()

    async def way(self) -> None:
        """Let others act in between, and let nobody pass who is dead."""
        await asyncio.sleep(0)
        self._refuse_if_dead()

    async def commit(self, write: Write) -> Committed:
        """Commit, unless this is the one that a crash was planned for."""
        await self.way()
        self.commits += 1
        planned = self._crash.kind if self._crash and self._crash.commit == self.commits else None
        if planned == "before":
            self.die()
            self._refuse_if_dead()
        committed = await self._store.commit(write)
        self.written.extend(committed.fresh())
        if planned == "after":
            self.die()
        await self.way()
        if planned == "answer_lost":
            raise StoreUnavailable("The answer of the store was lost, as planned: repeat the write with the same key.")
        self.acknowledged.extend(committed.all())
        return committed

    async def changes(self) -> AsyncGenerator[Change]:
        """Follow the store for as long as the process lives."""
        async for change in self._store.changes():
            self._refuse_if_dead()
            yield change

    async def close(self) -> None:
        """Leave the store open: it outlives the process."""

    def _refuse_if_dead(self) -> None:
        if self.dead:
            raise Crashed


class SharedTickets:
    """What all workers of a world share: the tickets of each version of each agent that wait."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, Ticket]] = deque()
        self._ears: list[asyncio.Event] = []

    def put(self, tickets: Sequence[tuple[str, Ticket]]) -> None:
        """Put tickets in, and tell everybody."""
        self.waiting.extend(tickets)
        for ear in self._ears:
            ear.set()

    def take(self, versions: Mapping[str, str]) -> Ticket | None:
        """Take the oldest ticket out that somebody with these versions may have."""
        for place, (version, ticket) in enumerate(self.waiting):
            if versions.get(ticket.agent) == version:
                del self.waiting[place]
                return ticket
        return None

    def ear(self) -> asyncio.Event:
        """Hear of new tickets from now on."""
        self._ears.append(ear := asyncio.Event())
        return ear


class LocalTicketQueue:
    """One worker's hand on them."""

    def __init__(self, tickets: SharedTickets, versions: Mapping[str, str]) -> None:
        self._tickets = tickets
        self._versions = versions

    def put(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        """Put tickets in; memory has no transaction that could still fail after this."""
        self._tickets.put([(self._versions[ticket.agent], ticket) for ticket in tickets])

    async def hand_out(self, serve: ServeTicket, concurrency: int) -> None:
        """Serve tickets as they come, so many at once, until cancelled."""
        ear, running = self._tickets.ear(), set[asyncio.Task[None]]()
        try:
            while True:
                ear.clear()
                while len(running) < concurrency and (ticket := self._tickets.take(self._versions)) is not None:
                    task = asyncio.create_task(_serve_ticket(serve, ticket))
                    running.add(task)
                    task.add_done_callback(_make_done_callback(running, ear))
                await ear.wait()
        finally:
            for task in running:
                task.cancel()


async def _serve_ticket(serve: ServeTicket, ticket: Ticket) -> None:
    await serve(ticket)


def _make_done_callback(running: set[asyncio.Task[None]], ear: asyncio.Event) -> Callable[[asyncio.Task[None]], None]:
    def done(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled():
            # Whoever serves knows what went wrong: here it is nobody's affair.
            task.exception()
        ear.set()

    return done


TakeTurn = Callable[[Lease], Awaitable[None]]

HEARTBEAT: Final = 5 * SECOND
MAX_CLAIMED: Final = 1000


class Worker:
    """Claims sessions at the very moment they are due, and runs their turns side by side."""

    def __init__(self, store: Store, clock: Clock, worker: WorkerId, turn: TakeTurn) -> None:
        self._store = store
        self._clock = clock
        self._worker = worker
        self._turn = turn
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled. Each claim also renews the leases of the turns that are still running."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            while True:
                self._news.clear()
                for lease in await self._store.claim(self._worker, MAX_CLAIMED):
                    tasks.create_task(self._take_turn(lease))
                await self._rest(await self._next_look())

    async def _take_turn(self, lease: Lease) -> None:
        with suppress(LeaseLost):
            await self._turn(lease)

    async def _listen(self) -> None:
        async for _ in self._store.changes():
            self._news.set()

    async def _next_look(self) -> int | None:
        """Tell when to look again: when a session is due, and at each heartbeat while anybody owns one."""
        rows = await self._store.ask(Query("all_sessions", SessionRow))
        now = self._clock.now()
        moments = [row.due_at for row in rows if row.owner == NO_OWNER and row.due_at is not None and row.due_at > now]
        if any(row.owner != NO_OWNER for row in rows):
            moments.append(now + HEARTBEAT)
        return min(moments, default=None)

    async def _rest(self, until: int | None) -> None:
        """Rest until then, or until something was written."""
        seconds = None if until is None else (until - self._clock.now()) / SECOND
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()


Intent = CallStarted | RequestStarted


class HoldTaken(msgspec.Struct, frozen=True):
    """The intent is committed and its money is held."""

    flight: InFlight


class HoldRefused(msgspec.Struct, frozen=True):
    """A cap is reached; the refusal is recorded."""

    event: CostCapReached


async def hold(
    purse: Ledger, lease: Lease, intent: Intent, body: bytes | None = None, attempt: int = 0
) -> HoldTaken | HoldRefused | StillHeld:
    """Commit an intent with its hold, as a door does: it waits for other holds where that can make room."""

    def write(now: int) -> Write:
        asked = msgspec.structs.replace(intent, legs=roll_legs(intent.legs, now))
        key, rows = f"{intent_id(asked)}/held/{attempt}", rows_of_hold(intent_id(asked), asked.legs)
        return Write(session_stream(lease.session), key, partial(decide_hold, asked, body=body), rows, lease)

    committed = await purse.commit_intent(write, purse.patience)
    for stored in () if committed is None else committed.events:
        match stored.event:
            case CostCapReached() as refusal:
                return HoldRefused(refusal)
            case CallStarted() as held:
                return HoldTaken(track_call(held, stored))
            case RequestStarted() as held:
                return HoldTaken(track_request(held, stored))
            case _:
                pass
    return StillHeld(intent_id(intent))


def intent_id(intent: Intent) -> str:
    """Return the id of a call or a request, which is also the id of its hold."""
    return intent.call if isinstance(intent, CallStarted) else intent.request


def decide_hold(intent: Intent, rows: Rows, body: bytes | None = None, blob: Digest | None = None) -> Sequence[Draft]:
    """Decide on an intent: the intent with its hold, the refusal, or nothing where it must wait.

    Money of a window that is over is not held either: the next attempt asks for that of the window after it.
    """
    if intent.legs and rows.get(HoldRow, intent_id(intent)) is not None:
        raise ValueError(f"{intent_id(intent)} is held already: settle it, or repeat the attempt that held it.")
    if has_past_window(intent.legs, rows.now):
        return []
    verdict = reserve(lower_legs_to_policy(intent.legs, rows), lambda leg: budget_row(rows, leg))
    match verdict:
        case Reserved():
            return [Draft(msgspec.structs.replace(intent, legs=verdict.legs), body, blob)]
        case CapReached():
            name = intent.tool if isinstance(intent, CallStarted) else intent.model
            return [Draft(CostCapReached.refusing(intent_id(intent), name, verdict))]
        case _:
            return []
