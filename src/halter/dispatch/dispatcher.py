"""Runs the sessions of this process, each in a task of its own, with one of two dispatchers.

A session that fails is retried, more slowly each time, and then left to a person. A sleeping session without sensors is
only a row. `EmbeddedDispatcher` claims what is due. `DistributedDispatcher` claims what is due, and what a dead worker
left, as far as there is room here; what is left it offers to workers that have room, as tickets in a queue that all
share, and the worker that takes a ticket claims its session. The lease alone decides who runs: a ticket that comes
twice, late or not at all does no harm.

Where workers have several versions of an agent, the newest one is in force: workers with an older one wait, and take
over again when all workers with the newer one are gone.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from halter.autonomy.upkeep import RestartAfter, decide_restart
from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost
from halter.core.events import AttendingFailed, SessionParked
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import (
    EVERY_STREAM,
    AgentConcurrency,
    Change,
    Draft,
    Lease,
    Query,
    Rows,
    Store,
    Ticket,
    Write,
)
from halter.core.rows import SessionRow, WorkerRow
from halter.core.text import clean, shorten
from halter.dispatch.heartbeat import (
    NO_IDLE_LIMITS,
    IdleLimits,
    StoreClock,
    find_idle_since,
    halt_idle_session,
    pause_session,
)
from halter.loop.session_runtime import raise_if_cancelled, run_together, run_until_first, wait_for_news, watch_changes
from halter.state import lifecycle

DUE_POLLING_INTERVAL: Final = 5 * SECOND
"""Polling interval for due sessions: their owner may have died, and hints may be lost."""

CLOCK_UNCERTAINTY: Final = SECOND // 50
"""How far off the store's time may be as it is known here."""


class _NextLook(msgspec.Struct, frozen=True):
    due_at: int | None
    lapses_at: int | None


async def compute_next_look(store: Store, clock: Clock, worker: WorkerId, max_wait: int = DUE_POLLING_INTERVAL) -> int:
    """Returns for how long nothing is due and no lease expires.

    A process that only estimates the store's time may come a little early, so it looks again a little later.
    """
    now, unsure = clock.now(), CLOCK_UNCERTAINTY if isinstance(clock, StoreClock) else 0
    (next_look,) = await store.ask(Query("next_look", _NextLook, {"now": now - unsure, "worker": worker}))
    lapse = None if next_look.lapses_at is None else next_look.lapses_at + 1
    moments = [at for at in (next_look.due_at, lapse) if at is not None]
    return min([max_wait, *(max(unsure // 4, at - now) for at in moments)])


def _may_be_due(change: Change) -> bool:
    """Whether an inbox grew, a session began, or the change is unknown."""
    return change.stream == EVERY_STREAM or change.stream.endswith("/in") or change.head == 1


ORPHAN_SEARCH_INTERVAL: Final = 60 * SECOND
"""Interval of the search for sessions that are owned here but not running."""
MAX_ERROR_LENGTH: Final = 300
SESSION_RETRY_DELAY: Final = SECOND // 4
WATCHDOG_INTERVAL: Final = 60 * SECOND
"""Interval of the search for idle sessions, and how long one may take to stop."""

AttendLease = Callable[[Lease, SessionRow], Awaitable[None]]
"""Runs a session, whose row was read under its lease, until it rests or ends."""
Redact = Callable[[str], str]


class _Owned(msgspec.Struct, frozen=True):
    session: str
    generation: int


class RunningSessions:
    """The sessions that run here. Residents, which stay while they sleep, do not count as busy."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        worker: WorkerId,
        attend: AttendLease,
        redact: Redact = lambda text: text,
    ) -> None:
        self.store = store
        self.clock = clock
        self.worker = worker
        self.changed = asyncio.Event()
        """Set when a session has left, and when something may be due."""
        self.closing = asyncio.Event()
        """Set when nothing more is claimed."""
        self.polling_interval = DUE_POLLING_INTERVAL
        """Polling interval for due sessions."""
        self.remote_capacity = 0
        """How many more sessions other workers could take, by their last heartbeats and what was offered since."""
        self.idle_limits: IdleLimits = NO_IDLE_LIMITS
        """How long a session may be idle."""
        self._attend = attend
        self._redact = redact
        self._tasks: dict[Lease, asyncio.Task[None]] = {}
        self._resident: set[Lease] = set()
        self._coming: Counter[SessionId] = Counter()
        self._claiming = 0
        self._failures: dict[SessionId, tuple[int, ...]] = {}
        self._searched = clock.now()
        self._watched_at = clock.now()
        self._pausing: dict[SessionId, asyncio.Task[None]] = {}

    @property
    def count_running(self) -> int:
        """How many sessions run, without residents."""
        return len(self._tasks) - len(self._resident)

    @property
    def residents(self) -> int:
        return len(self._resident)

    def capacity(self, together: int) -> int:
        """How many more may be claimed; 0 when this process is about to end."""
        return 0 if self.closing.is_set() else together - self.count_running - self._claiming - self._coming.total()

    async def claim(self, limit: int, agents: AgentConcurrency) -> int:
        """Claims so many sessions, if they are due, and runs them; returns how many."""
        self._claiming = limit
        try:
            leases = await self.store.claim(self.worker, limit, agents=agents)
        finally:
            self._claiming = 0
        for lease in leases:
            self.start(lease)
        return len(leases)

    async def fetch(self, only: SessionId | Ticket) -> Lease | None:
        """Claims the named session, if possible, and runs it. A closing process claims nothing."""
        if self.closing.is_set():
            return None
        session = only.session if isinstance(only, Ticket) else only
        self._coming[session] += 1
        try:
            for lease in await self.store.claim(self.worker, 1, only):
                self.start(lease)
                return lease
        finally:
            self._coming[session] -= 1
            if not self._coming[session]:
                del self._coming[session]
        return None

    def start(self, lease: Lease) -> None:
        task = asyncio.create_task(self._run_with_retry(lease), name=f"halter-session {lease.session}")
        self._tasks[lease] = task
        task.add_done_callback(lambda _: self._forget(lease))

    def check(self) -> None:
        self.changed.set()

    def mark_resident(self, session: SessionId) -> None:
        """Marks a session as resident."""
        self._resident |= {lease for lease in self._tasks if lease.session == session}

    def leases(self) -> frozenset[Lease]:
        return frozenset(self._tasks)

    def cancel_lost(self, leases: frozenset[Lease]) -> None:
        """Stops the sessions that another process has now."""
        for lease in leases & self._tasks.keys():
            self._tasks[lease].cancel()

    async def watch(self) -> None:
        """Runs what is owned here but not running, and pauses what is idle."""
        await self._find_forgotten()
        await self._find_idle()

    async def wait_idle(self, max_wait: int) -> None:
        """Waits, at most this long, until no session here is in the middle of a turn."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max_wait / SECOND):
                while await self._is_running():
                    await self.clock.sleep(SESSION_RETRY_DELAY)

    async def _is_running(self) -> bool:
        for lease in self.leases():
            (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
            if row.state == "RUNNING" and row.generation == lease.generation:
                return True
        return False

    async def stop(self) -> None:
        """Cancels all tasks and waits for them."""
        running = (*self._pausing.values(), *self._tasks.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, lease: Lease) -> None:
        """Forgets a session that left. It may already run here again."""
        self._tasks.pop(lease, None)
        self._resident.discard(lease)
        self.changed.set()

    async def _find_forgotten(self) -> None:
        """Runs what is owned here but unknown: the answer to a claim may have been lost."""
        now = self.clock.now()
        if now < self._searched + ORPHAN_SEARCH_INTERVAL:
            return
        self._searched = now
        before = self._list_local()
        owned = await self.store.ask(Query("owned_by", _Owned, {"worker": self.worker}))
        # Sessions that came or went during the query are known.
        known = before | self._list_local()
        for row in owned:
            if SessionId(row.session) not in known:
                self.start(Lease(SessionId(row.session), self.worker, row.generation))

    def _list_local(self) -> set[SessionId]:
        """The sessions that run here, are being paused, or are being claimed."""
        return {lease.session for lease in self._tasks} | self._pausing.keys() | self._coming.keys()

    async def _find_idle(self) -> None:
        now = self.clock.now()
        if now < self._watched_at + WATCHDOG_INTERVAL:
            return
        self._watched_at = now
        for lease in [lease for lease in self._tasks if lease.session not in self._pausing]:
            (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
            since = await find_idle_since(self.store, row, self.idle_limits, now)
            if since is not None and lease in self._tasks:
                task = asyncio.create_task(self._stop_and_park(lease, since), name=f"halter-pause {lease.session}")
                self._pausing[lease.session] = task
                task.add_done_callback(lambda _, session=lease.session: self._pausing.pop(session, None))

    async def _stop_and_park(self, lease: Lease, since: int) -> None:
        """Stops a session, which settles what it holds, and parks it. On failure it is tried again later."""
        working = self._tasks[lease]
        working.cancel()
        await asyncio.wait([working], timeout=WATCHDOG_INTERVAL / SECOND)
        if not working.done():
            return
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
        if row.state != "RUNNING" or row.generation != lease.generation:
            return
        rest = pause_session(row, lease, since, self.idle_limits.idle_halt(row.agent), self.clock.now())
        with suppress(LeaseLost):
            if not (await self.store.commit(rest)).events:
                # A message arrived at this very moment.
                self.start(lease)

    async def _run_with_retry(self, lease: Lease) -> None:
        """Runs a session, again after a failure, until it rests or is quarantined."""
        session = lease.session
        while True:
            try:
                (row,) = await self.store.ask(Query("session", SessionRow, {"session": session}))
                # One that was paused for being idle, and got no message since, is over.
                if not await halt_idle_session(self.store, self.clock, row, lease):
                    await self._attend(lease, row)
            except LeaseLost:
                self._failures.pop(session, None)
                return
            except Exception as error:  # noqa: BLE001  no failure here may stop another session
                raise_if_cancelled()
                now = self.clock.now()
                self._failures[session] = failures = (*self._failures.get(session, ()), now)
                sentence = self._redact(clean(f"{type(error).__name__}: {error}"))
                match decide_restart(failures, now):
                    case RestartAfter(after):
                        await self._record(lease, len(failures), sentence)
                        await self.clock.sleep(after)
                    case _:
                        # A person resumes it: count from zero.
                        self._failures.pop(session, None)
                        if await self._quarantine(lease, len(failures), sentence, now):
                            return
            else:
                self._failures.pop(session, None)
                return

    async def _quarantine(self, lease: Lease, failures: int, error: str, now: int) -> bool:
        """Quarantines a session; returns whether this worker is done with it."""
        try:
            return await quarantine_session(self.store, lease, failures, error, now)
        except LeaseLost:
            return True

    async def poll_due(self, step: Callable[[], Awaitable[int | None]]) -> None:
        """Call `step` whenever something may be due; it returns after how long it must be called again, if it knows."""
        async with watch_changes(self.store, _may_be_due, self.changed):
            while True:
                look = await step()
                await self.watch()
                if look is None:
                    look = await compute_next_look(self.store, self.clock, self.worker, self.polling_interval)
                await wait_for_news(self.changed, look)

    async def _record(self, lease: Lease, failures: int, error: str) -> None:
        event = AttendingFailed(failures=failures, error=shorten(error, MAX_ERROR_LENGTH))
        key = f"{lease.session}/{lease.generation}/failed/{failures}_{self.clock.now()}"
        with suppress(LeaseLost):
            await self.store.commit(Write(lease.stream, key, lambda _: [Draft(event)], lease=lease))


async def quarantine_session(store: Store, lease: Lease, failures: int, error: str, now: int) -> bool:
    """Parks a session that failed too often until a person writes to it.

    Returns whether it rests: not if a message has just arrived.
    """
    (row,) = await store.ask(Query("session", SessionRow, {"session": lease.session}))
    event = AttendingFailed(failures=failures, error=shorten(error, MAX_ERROR_LENGTH), quarantined=True)
    parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_head)
    rest = lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/quarantine/{now}", parked)

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = rest.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return bool((await store.commit(msgspec.structs.replace(rest, decide=decide))).events)


DEFAULT_CONCURRENCY: Final = 200
"""How many sessions are awake at once in one process, without residents."""


class EmbeddedDispatcher:
    """Runs the sessions of some agents in this process."""

    def __init__(
        self, sessions: RunningSessions, agents: Callable[[], AgentConcurrency], together: int = DEFAULT_CONCURRENCY
    ) -> None:
        self._sessions = sessions
        self._agents = agents
        self._together = together

    async def run(self) -> None:
        """Claims what is due until cancelled; then stops what runs."""
        try:
            await self._sessions.poll_due(self._claim)
        finally:
            await self._sessions.stop()

    async def _claim(self) -> None:
        capacity = self._sessions.capacity(self._together)
        if capacity > 0:
            await self._sessions.claim(capacity, self._agents())


CLAIMED_AT_ONCE: Final = 16
"""How many sessions a worker claims in one transaction: workers that claim at the same time share what is due.

As many tickets wait at most: workers that have room claim by themselves, too."""
TICKETS_AT_ONCE: Final = 4
"""How many tickets a worker serves at once; each only until its session is claimed."""
OFFER_RETRY_DELAY: Final = SECOND // 20
"""Delay before the next offer while other workers have room, and of a ticket while there is none here."""

ServeTicket = Callable[[Ticket], Awaitable[None]]


class TicketQueue(Protocol):
    """The queue that all workers share. One contract suite holds for every implementation."""

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        """Puts tickets in within the transaction of a connection: they exist once it commits."""
        ...

    async def serve(self, serve: ServeTicket, concurrency: int) -> None:
        """Serves tickets of this worker's agents, so many at once, until cancelled."""
        ...


class DistributedDispatcher:
    """Runs sessions of some agents in this process, wherever they became due."""

    def __init__(
        self,
        sessions: RunningSessions,
        agents: Callable[[], AgentConcurrency],
        queue: TicketQueue,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> None:
        self._sessions = sessions
        self._agents = agents
        self._queue = queue
        self._concurrency = concurrency

    async def run(self) -> None:
        """Claims what is due, offers the rest and serves tickets until cancelled; then stops what runs."""
        try:
            await run_together([lambda: self._sessions.poll_due(self._claim), self._serve_tickets])
        finally:
            await self._sessions.stop()

    async def _serve_tickets(self) -> None:
        """Serves tickets until the worker is closing."""
        closing = self._sessions.closing
        await run_until_first([self._queue.serve(self._serve, TICKETS_AT_ONCE), _set_event(closing)])

    async def _claim(self) -> int | None:
        """Claims what there is room for here. A worker without room offers what is due to those that have some."""
        sessions, agents = self._sessions, self._agents()
        limit = min(sessions.capacity(self._concurrency), CLAIMED_AT_ONCE)
        claimed = await sessions.claim(limit, agents) if limit > 0 and agents else 0
        if sessions.closing.is_set() or not agents or claimed < limit:
            return None
        if sessions.capacity(self._concurrency) > 0:
            return 0
        if sessions.remote_capacity > 0:
            limit = min(sessions.remote_capacity, CLAIMED_AT_ONCE)
            offer = await sessions.store.offer(limit, agents, self._queue.enqueue)
            sessions.remote_capacity -= len(offer.tickets)
            return OFFER_RETRY_DELAY
        # Nothing can be done before a session leaves, which is news.
        return sessions.polling_interval

    async def _serve(self, ticket: Ticket) -> None:
        """Claims the session of a ticket, if it is free, as soon as there is room."""
        sessions = self._sessions
        while not sessions.closing.is_set() and sessions.capacity(self._concurrency) <= 0:
            await sessions.clock.sleep(OFFER_RETRY_DELAY)
        if sessions.closing.is_set():
            # Claim nothing but use the ticket up, so that it is offered to another worker.
            await sessions.store.claim(sessions.worker, 0, ticket)
            return
        await sessions.fetch(ticket)


async def _set_event(event: asyncio.Event) -> None:
    await event.wait()


def find_version_in_force(workers: Iterable[WorkerRow], agent: str, now: int) -> str:
    """Returns the version of an agent that living workers brought last; "" if none has it.

    A version is as old as the oldest worker that has it: a restarted worker brings nothing new.
    """
    brought: dict[str, int] = {}
    for row in workers:
        about = row.told()
        version = about.agents.get(agent)
        if version is not None and row.alive(now) and not about.closing:
            brought[version] = min(about.started_at, brought.get(version, about.started_at))
    return max(brought, key=lambda version: (brought[version], version), default="")
