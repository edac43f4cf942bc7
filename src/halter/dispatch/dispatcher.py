"""Runs the sessions of this process, each in its own task, with one of two dispatchers.

A session that fails is retried with growing delays and then quarantined. A sleeping session without sensors is only a
row. `EmbeddedDispatcher` claims due sessions. `DistributedDispatcher` claims due sessions, and sessions of dead
workers, up to its capacity. It offers the rest to workers with capacity, as tickets in a shared queue; the worker that
gets a ticket claims its session. Only the lease decides which worker runs a session: a ticket that arrives twice, late
or never does no harm.

If workers have several versions of an agent, the newest one is in force. Workers with an older version wait, and
continue when all workers with the newer one are gone.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from halter.autonomy.upkeep import RestartAfter, decide_restart
from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.errors import LeaseLost
from halter.core.events import AttendingFailed, SessionParked
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import ALL_STREAMS, AgentConcurrency, Change, Draft, Lease, Query, Rows, Store, Ticket, Write
from halter.core.rows import SessionRow
from halter.core.text import clean, shorten
from halter.dispatch.idle import (
    NO_IDLE_LIMITS,
    WATCHDOG_INTERVAL,
    IdleLimits,
    ObservedHeads,
    find_idle_since,
    halt_idle_session,
    pause_session,
)
from halter.dispatch.store_clock import StoreClock
from halter.dispatch.workers import WorkerRow
from halter.guard.halts import Departures
from halter.loop.concurrency import raise_if_cancelled, run_together, run_until_first, wait_for_change, watch_changes
from halter.state import lifecycle

DUE_POLLING_INTERVAL: Final = 5 * SECOND
"""Polling interval for due sessions: their owner may have died, and hints may be lost."""

CLOCK_UNCERTAINTY: Final = SECOND // 50
"""Assumed error of this process's estimate of the store's time."""


class _NextLook(msgspec.Struct, frozen=True):
    due_at: int | None
    lapses_at: int | None


async def compute_time_until_due(
    store: Store, clock: Clock, worker: WorkerId, max_wait: int = DUE_POLLING_INTERVAL
) -> int:
    """Return the time until a session is due or a lease expires, at most `max_wait`.

    A process that only estimates the store's time may check slightly too early, so it then checks again soon.
    """
    now, uncertainty = clock.now(), CLOCK_UNCERTAINTY if isinstance(clock, StoreClock) else 0
    (next_check,) = await store.ask(Query("next_look", _NextLook, {"now": now - uncertainty, "worker": worker}))
    lapses_at = None if next_check.lapses_at is None else next_check.lapses_at + 1
    moments = [at for at in (next_check.due_at, lapses_at) if at is not None]
    return min([max_wait, *(max(uncertainty // 4, at - now) for at in moments)])


def _can_make_due(change: Change) -> bool:
    """Return true if an inbox grew, a session started or the change is unknown."""
    return change.stream == ALL_STREAMS or change.stream.endswith("/in") or change.head == 1


ORPHAN_SEARCH_INTERVAL: Final = 60 * SECOND
"""Interval of the search for sessions that this worker owns but does not run."""
MAX_ERROR_LENGTH: Final = 300
SESSION_RETRY_DELAY: Final = SECOND // 4

AttendLease = Callable[[Lease, SessionRow], Awaitable[None]]
"""Runs a session until it parks or ends. Its row was read under its lease."""
Redact = Callable[[str], str]


class _Owned(msgspec.Struct, frozen=True):
    session: str
    generation: int


class RunningSessions:
    """The sessions that run in this process. Residents, which stay while they sleep, do not count as running."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        worker: WorkerId,
        attend: AttendLease,
        redact: Redact = lambda text: text,
        departures: Departures | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.worker = worker
        self.changed = asyncio.Event()
        """Set when a session ends here and when a session may be due."""
        self.closing = asyncio.Event()
        """Set when this process claims no more sessions."""
        self.polling_interval = DUE_POLLING_INTERVAL
        """Polling interval for due sessions."""
        self.remote_capacity = 0
        """Capacity of the other workers, from their last heartbeats minus the offers since then."""
        self.idle_limits: IdleLimits = NO_IDLE_LIMITS
        """Limits on how long a session may be idle."""
        self.nested: set[SessionId] = set()
        """Sub-sessions that calls of sessions here run themselves, under leases of this worker."""
        self.on_watch_failed: Callable[[str, Exception], None] = lambda _, __: None
        """Called with the agent of a session that could not be checked for being idle."""
        self._attend = attend
        self._redact = redact
        self._departures = departures or Departures()
        self._tasks: dict[Lease, asyncio.Task[None]] = {}
        self._resident: set[Lease] = set()
        self._coming: Counter[SessionId] = Counter()
        self._claiming = 0
        self._failures: dict[SessionId, tuple[int, ...]] = {}
        self._searched = self._watched_at = read_monotonic(clock)
        self._heads = ObservedHeads(clock)
        self._pausing: dict[SessionId, asyncio.Task[None]] = {}

    @property
    def count_running(self) -> int:
        """Number of running sessions, without residents."""
        return len(self._tasks) - len(self._resident)

    @property
    def residents(self) -> int:
        return len(self._resident)

    def capacity(self, concurrency: int) -> int:
        """Return how many more sessions this process may claim; 0 while it is closing."""
        return 0 if self.closing.is_set() else concurrency - self.count_running - self._claiming - self._coming.total()

    async def claim(self, limit: int, agents: AgentConcurrency) -> int:
        """Claim and run up to `limit` due sessions; return their number."""
        self._claiming = limit
        try:
            leases = await self.store.claim(self.worker, limit, agents=agents)
        finally:
            self._claiming = 0
        for lease in leases:
            self.start(lease)
        return len(leases)

    async def fetch(self, only: SessionId | Ticket) -> Lease | None:
        """Claim one session and run it; return None if it is not free or this process is closing."""
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
        """Have the dispatcher look for due sessions now."""
        self.changed.set()

    def mark_resident(self, session: SessionId) -> None:
        """Mark a running session as resident."""
        self._resident |= {lease for lease in self._tasks if lease.session == session}

    def leases(self) -> frozenset[Lease]:
        return frozenset(self._tasks)

    def cancel_lost(self, leases: frozenset[Lease]) -> None:
        """Stop the sessions that another process owns now."""
        lost_leases = leases & self._tasks.keys()
        self._departures.begin(lost_leases)
        for lease in lost_leases:
            self._tasks[lease].cancel()

    async def watch(self) -> None:
        """Run the sessions that this worker owns but does not run, and pause idle ones."""
        await self._find_forgotten()
        await self._find_idle()

    async def wait_idle(self, max_wait: int) -> None:
        """Wait, at most `max_wait`, until no session here is inside a turn."""
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
        """Cancel all tasks and wait for them. What they have in flight stays in flight."""
        self._departures.begin(self._tasks)
        running = (*self._pausing.values(), *self._tasks.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, lease: Lease) -> None:
        """Forget a lease whose session has stopped. The session may already run here under a new lease."""
        self._tasks.pop(lease, None)
        self._resident.discard(lease)
        self._departures.end(lease)
        self.changed.set()

    async def _find_forgotten(self) -> None:
        """Run the sessions that this worker owns but does not run: the reply to a claim may have been lost."""
        now = read_monotonic(self.clock)
        if now < self._searched + ORPHAN_SEARCH_INTERVAL:
            return
        self._searched = now
        local = self._list_local()
        owned_rows = await self.store.ask(Query("owned_by", _Owned, {"worker": self.worker}))
        # Sessions that started or ended during the query are not forgotten ones.
        local_sessions = local | self._list_local()
        for row in owned_rows:
            if SessionId(row.session) not in local_sessions:
                self.start(Lease(SessionId(row.session), self.worker, row.generation))

    def _list_local(self) -> set[SessionId]:
        """Return the sessions that are running, being paused or being claimed here, with the sub-sessions of calls."""
        return {lease.session for lease in self._tasks} | self._pausing.keys() | self._coming.keys() | self.nested

    async def _find_idle(self) -> None:
        elapsed, now = read_monotonic(self.clock), self.clock.now()
        if elapsed < self._watched_at + WATCHDOG_INTERVAL:
            return
        self._watched_at = elapsed
        self._heads.forget_others({lease.session for lease in self._tasks})
        for lease in [lease for lease in self._tasks if lease.session not in self._pausing]:
            (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
            try:
                idle_since = await find_idle_since(self.store, row, self.idle_limits, now, self._heads)
            except Exception as error:  # noqa: BLE001  no failure here may stop another session
                raise_if_cancelled()
                self.on_watch_failed(row.agent, error)
                continue
            if idle_since is not None and lease in self._tasks:
                task = asyncio.create_task(self._stop_and_park(lease, idle_since), name=f"halter-pause {lease.session}")
                self._pausing[lease.session] = task
                task.add_done_callback(lambda _, session=lease.session: self._pausing.pop(session, None))

    async def _stop_and_park(self, lease: Lease, idle_since: int) -> None:
        """Stop a session, which settles its holds, and park it. A failed attempt is repeated later."""
        task = self._tasks[lease]
        task.cancel()
        await asyncio.wait([task], timeout=WATCHDOG_INTERVAL / SECOND)
        if not task.done():
            return
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
        if row.state != "RUNNING" or row.generation != lease.generation:
            return
        write = pause_session(row, lease, idle_since, self.idle_limits.idle_halt(row.agent), self.clock.now())
        with suppress(LeaseLost):
            if not (await self.store.commit(write)).events:
                # A message arrived in the meantime.
                self.start(lease)

    async def _run_with_retry(self, lease: Lease) -> None:
        """Run a session, again after each failure, until it parks, ends or is quarantined."""
        session = lease.session
        while True:
            try:
                (row,) = await self.store.ask(Query("session", SessionRow, {"session": session}))
                # A session that was paused for being idle ends here, unless a message has arrived.
                if not await halt_idle_session(self.store, self.clock, row, lease):
                    await self._attend(lease, row)
            except LeaseLost:
                self._failures.pop(session, None)
                return
            except Exception as error:  # noqa: BLE001  no failure here may stop another session
                raise_if_cancelled()
                elapsed, now = read_monotonic(self.clock), self.clock.now()
                self._failures[session] = failures = (*self._failures.get(session, ()), elapsed)
                sentence = self._redact(clean(f"{type(error).__name__}: {error}"))
                match decide_restart(failures, elapsed):
                    case RestartAfter(delay):
                        await self._record(lease, len(failures), sentence)
                        await self.clock.sleep(delay)
                    case _:
                        # Failures count from zero when a person resumes the session.
                        self._failures.pop(session, None)
                        if await self._quarantine(lease, len(failures), sentence, now):
                            return
            else:
                self._failures.pop(session, None)
                return

    async def _quarantine(self, lease: Lease, failures: int, error: str, now: int) -> bool:
        """Quarantine a session; return true if this worker is done with it."""
        try:
            return await quarantine_session(self.store, lease, failures, error, now)
        except LeaseLost:
            return True

    async def poll_due(self, step: Callable[[], Awaitable[int | None]]) -> None:
        """Call `step` whenever a session may be due. It returns the time until its next call; None is the default."""
        async with watch_changes(self.store, _can_make_due, self.changed):
            while True:
                max_wait = await step()
                await self.watch()
                if max_wait is None:
                    max_wait = await compute_time_until_due(self.store, self.clock, self.worker, self.polling_interval)
                await wait_for_change(self.changed, max_wait)

    async def _record(self, lease: Lease, failures: int, error: str) -> None:
        event = AttendingFailed(failures=failures, error=shorten(error, MAX_ERROR_LENGTH))
        key = f"{lease.session}/{lease.generation}/failed/{failures}_{self.clock.now()}"
        with suppress(LeaseLost):
            await self.store.commit(Write(lease.stream, key, lambda _: [Draft(event)], lease=lease))


async def quarantine_session(store: Store, lease: Lease, failures: int, error: str, now: int) -> bool:
    """Park a session that failed too often, until a person writes to it.

    Returns false if it was not parked because a message has just arrived.
    """
    (row,) = await store.ask(Query("session", SessionRow, {"session": lease.session}))
    event = AttendingFailed(failures=failures, error=shorten(error, MAX_ERROR_LENGTH), quarantined=True)
    park_event = SessionParked(state="PAUSED", inbox_seen=row.inbox_head)
    park_write = lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/quarantine/{now}", park_event)

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = park_write.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return bool((await store.commit(msgspec.structs.replace(park_write, decide=decide))).events)


DEFAULT_CONCURRENCY: Final = 200
"""Maximum number of running sessions in one process, without residents."""


class EmbeddedDispatcher:
    """Runs the sessions of some agents in this process."""

    def __init__(
        self, sessions: RunningSessions, agents: Callable[[], AgentConcurrency], concurrency: int = DEFAULT_CONCURRENCY
    ) -> None:
        self._sessions = sessions
        self._agents = agents
        self._concurrency = concurrency

    async def run(self) -> None:
        """Claim due sessions until cancelled, then stop the running ones."""
        try:
            await self._sessions.poll_due(self._claim)
        finally:
            await self._sessions.stop()

    async def _claim(self) -> None:
        capacity = self._sessions.capacity(self._concurrency)
        if capacity > 0:
            await self._sessions.claim(capacity, self._agents())


CLAIMED_AT_ONCE: Final = 16
"""Maximum number of sessions in one claim: workers that claim at the same time share the due sessions.

It is also the maximum number of waiting tickets: workers with capacity also claim without a ticket."""
MAX_SERVED_TICKETS: Final = 4
"""Number of tickets that a worker serves concurrently, each until its session is claimed."""
OFFER_RETRY_DELAY: Final = SECOND // 20
"""Delay before the next offer while other workers have capacity, and of a ticket while this one has none."""

ServeTicket = Callable[[Ticket], Awaitable[None]]


class TicketQueue(Protocol):
    """The ticket queue that all workers share. Every implementation passes one contract suite."""

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        """Add tickets within the transaction of a connection; they exist once it commits."""
        ...

    async def serve(self, serve: ServeTicket, concurrency: int) -> None:
        """Serve tickets of this worker's agents, up to `concurrency` at a time, until cancelled."""
        ...


class DistributedDispatcher:
    """Runs sessions of some agents in this process and offers the rest to other workers."""

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
        """Claim due sessions, offer the rest and serve tickets until cancelled, then stop the running ones."""
        try:
            await run_together([lambda: self._sessions.poll_due(self._claim), self._serve_tickets])
        finally:
            await self._sessions.stop()

    async def _serve_tickets(self) -> None:
        """Serve tickets until the worker is closing."""
        closing = self._sessions.closing
        await run_until_first([self._queue.serve(self._serve, MAX_SERVED_TICKETS), _set_event(closing)])

    async def _claim(self) -> int | None:
        """Claim sessions up to the capacity here. A worker without capacity offers due sessions to other workers."""
        sessions, agents = self._sessions, self._agents()
        limit = min(sessions.capacity(self._concurrency), CLAIMED_AT_ONCE)
        claimed_count = await sessions.claim(limit, agents) if limit > 0 and agents else 0
        if sessions.closing.is_set() or not agents or claimed_count < limit:
            return None
        if sessions.capacity(self._concurrency) > 0:
            return 0
        if sessions.remote_capacity > 0:
            limit = min(sessions.remote_capacity, CLAIMED_AT_ONCE)
            offer = await sessions.store.offer(limit, agents, self._queue.enqueue)
            sessions.remote_capacity -= len(offer.tickets)
            return OFFER_RETRY_DELAY
        # There is no capacity anywhere. A session that parks or ends here sets `changed`.
        return sessions.polling_interval

    async def _serve(self, ticket: Ticket) -> None:
        """Claim the session of a ticket, if it is free, as soon as there is capacity."""
        sessions = self._sessions
        while not sessions.closing.is_set() and sessions.capacity(self._concurrency) <= 0:
            await sessions.clock.sleep(OFFER_RETRY_DELAY)
        if sessions.closing.is_set():
            # Use up the ticket without a claim, so that the session is offered to another worker.
            await sessions.store.claim(sessions.worker, 0, ticket)
            return
        await sessions.fetch(ticket)


async def _set_event(event: asyncio.Event) -> None:
    await event.wait()


def find_version_in_force(workers: Iterable[WorkerRow], agent: str, now: int) -> str:
    """Return the version of an agent that live workers introduced last; "" if no worker has the agent.

    A version is as old as the oldest worker that has it, so a restarted worker does not make its version newer.
    """
    started_at_by_version: dict[str, int] = {}
    for row in workers:
        info = row.parse_info()
        version = info.agents.get(agent)
        if version is not None and row.alive(now) and not info.closing:
            started_at_by_version[version] = min(info.started_at, started_at_by_version.get(version, info.started_at))
    return max(started_at_by_version, key=lambda version: (started_at_by_version[version], version), default="")
