"""The sessions that are attended in this process, each in a task of its own, and watched over.

Whatever breaks down over a session is that session's own affair: it is tried again, more slowly each time, and then
left to a person.

Sessions that this process claims for itself when they are due.

A session that sleeps without sensors is only a row: nothing here knows of it until it is due.

Sessions of many processes on many machines, over one store.

Whoever looks finds what is due and what a dead worker left, and offers it: in one transaction, a ticket for each goes
into a queue that all workers share. Whoever takes a ticket out claims its session with it. The lease alone decides who
runs: a ticket that comes twice, late or not at all does no harm.

When to look for sessions that are due.

Which version of an agent is in force where workers have several: the newest that some worker brought.

While a fleet is brought from one version to the next, both are there for a while. A session goes on under one of them,
not under whichever comes first: those who have the older one wait. If all who have the newer one are gone, it moves
back.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol

import msgspec

from halter.autonomy.upkeep import RestartAfter, decide_restart
from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost
from halter.core.events import AttendingFailed, SessionParked
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import (
    EVERY_STREAM,
    AgentConcurrency,
    Change,
    Draft,
    Lease,
    Offer,
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
"""How often it is looked without a hint: for sessions whose owner died, and because hints may be lost."""

CLOCK_UNCERTAINTY: Final = SECOND // 50
"""How far off the store's time may be as it is told here."""


class _Due(msgspec.Struct, frozen=True):
    due_at: int | None


async def compute_next_look(store: Store, clock: Clock, worker: WorkerId, at_most: int = DUE_POLLING_INTERVAL) -> int:
    """Tell for how long nothing is due, and nobody's lease runs out.

    Whoever only believes to know the store's time may come a little early, and so looks again a little later.
    """
    now, unsure = clock.now(), CLOCK_UNCERTAINTY if isinstance(clock, StoreClock) else 0
    (due,) = await store.ask(Query("next_due", _Due, {"now": now - unsure}))
    (lapse,) = await store.ask(Query("next_lapse", _Due, {"now": now - unsure, "worker": worker}))
    moments = [at for at in (due.due_at, None if lapse.due_at is None else lapse.due_at + 1) if at is not None]
    return min([at_most, *(max(unsure // 4, at - now) for at in moments)])


@asynccontextmanager
async def watch_for_due(store: Store, news: asyncio.Event) -> AsyncGenerator[None]:
    """Set an event whenever somebody writes something by which a session may have become due."""
    async with watch_changes(store, _may_be_due, news):
        yield


def _may_be_due(change: Change) -> bool:
    """An inbox grew, a session began, or nobody knows."""
    return change.stream == EVERY_STREAM or change.stream.endswith("/in") or change.head == 1


ORPHAN_SEARCH_INTERVAL: Final = 60 * SECOND
"""How often it is made sure that nothing is owned here that nobody attends."""
MAX_ERROR_LENGTH: Final = 300
SESSION_RETRY_DELAY: Final = SECOND // 4
WATCHDOG_INTERVAL: Final = 60 * SECOND
"""How often it is looked whether somebody runs and does nothing; and how long one is waited for that is to stop."""

AttendLease = Callable[[Lease], Awaitable[None]]
"""Takes a session from where it stands to its next rest or its end."""
Redact = Callable[[str], str]


class _Owned(msgspec.Struct, frozen=True):
    session: str
    generation: int


class Sessions:
    """What is attended here. Sessions that stay here while they sleep do not count as busy."""

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
        self.news = asyncio.Event()
        """Set when one is no longer attended, and when somebody wants to be looked for at once."""
        self.closing = asyncio.Event()
        """Set when nothing more is to be taken."""
        self.polling_interval = DUE_POLLING_INTERVAL
        """How often due sessions are looked for without a hint."""
        self.patience: IdleLimits = NO_IDLE_LIMITS
        """How long a session may run here and do nothing."""
        self._attend = attend
        self._redact = redact
        self._awake: dict[Lease, asyncio.Task[None]] = {}
        self._placed: dict[Lease, asyncio.Event] = {}
        self._resident: set[Lease] = set()
        self._coming: Counter[SessionId] = Counter()
        self._failures: dict[SessionId, tuple[int, ...]] = {}
        self._searched = clock.now()
        self._watched = clock.now()
        self._pausing: dict[SessionId, asyncio.Task[None]] = {}

    @property
    def awake(self) -> int:
        """How many are attended, but for those that stay."""
        return len(self._awake) - len(self._resident)

    @property
    def residents(self) -> int:
        """How many stay here."""
        return len(self._resident)

    def room(self, together: int) -> int:
        """Tell how many more may be taken; none when this process is about to end."""
        return 0 if self.closing.is_set() else together - self.awake

    async def fetch(self, only: SessionId | Ticket) -> Lease | None:
        """Claim the session that is named, if it is to be had, and attend it; who is about to end takes nothing."""
        if self.closing.is_set():
            return None
        session = only.session if isinstance(only, Ticket) else only
        self._coming[session] += 1
        try:
            for lease in await self.store.claim(self.worker, 1, only):
                self.take(lease)
                return lease
        finally:
            self._coming[session] -= 1
            if not self._coming[session]:
                del self._coming[session]
        return None

    def take(self, lease: Lease) -> None:
        """Attend a session that was claimed."""
        task = asyncio.create_task(self._attended(lease), name=f"halter-session {lease.session}")
        self._awake[lease], self._placed[lease] = task, asyncio.Event()
        task.add_done_callback(lambda _: self._left(lease))

    async def placed(self, lease: Lease) -> None:
        """Wait until a session that was taken rests, is over, or stays here. It goes on whoever waits for it."""
        if lease in self._placed:
            await self._placed[lease].wait()

    def look(self) -> None:
        """Look at once what is due, whatever hints come."""
        self.news.set()

    def stays(self, session: SessionId) -> None:
        """Know that a session stays here while it sleeps."""
        for lease in [lease for lease in self._awake if lease.session == session]:
            self._resident.add(lease)
            self._placed[lease].set()

    def leases(self) -> frozenset[Lease]:
        """Name the sessions that are attended here."""
        return frozenset(self._awake)

    def lost(self, leases: frozenset[Lease]) -> None:
        """Stop attending what another process has by now."""
        for lease in leases & self._awake.keys():
            self._awake[lease].cancel()

    async def watch(self) -> None:
        """Make sure that all that is owned here is attended, and pause what does nothing."""
        await self._find_forgotten()
        await self._find_idle()

    async def rested(self, at_most: int) -> None:
        """Wait until nothing that is attended here is in the middle of a turn, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most / SECOND):
                while await self._running():
                    await self.clock.sleep(SESSION_RETRY_DELAY)

    async def _running(self) -> bool:
        for lease in self.leases():
            (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
            if row.state == "RUNNING" and row.generation == lease.generation:
                return True
        return False

    async def stop(self) -> None:
        """Stop whatever is under way, in good order."""
        running = (*self._pausing.values(), *self._awake.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _left(self, lease: Lease) -> None:
        """Forget one that is no longer attended. The same session may already be attended anew."""
        self._awake.pop(lease, None)
        self._resident.discard(lease)
        self._placed.pop(lease).set()
        self.news.set()

    async def _find_forgotten(self) -> None:
        """Attend what is owned here and was never heard of: the answer to a claim may have been lost on its way."""
        now = self.clock.now()
        if now < self._searched + ORPHAN_SEARCH_INTERVAL:
            return
        self._searched = now
        before = self._at_hand()
        owned = await self.store.ask(Query("owned_by", _Owned, {"worker": self.worker}))
        # Whatever came or went while the question was on its way needs nobody.
        known = before | self._at_hand()
        for row in owned:
            if SessionId(row.session) not in known:
                self.take(Lease(SessionId(row.session), self.worker, row.generation))

    def _at_hand(self) -> set[SessionId]:
        """Name what is attended here, is being paused, or is claimed at this very moment."""
        return {lease.session for lease in self._awake} | self._pausing.keys() | self._coming.keys()

    async def _find_idle(self) -> None:
        """Pause what runs here and does nothing."""
        now = self.clock.now()
        if now < self._watched + WATCHDOG_INTERVAL:
            return
        self._watched = now
        for lease in [lease for lease in self._awake if lease.session not in self._pausing]:
            (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
            since = await find_idle_since(self.store, row, self.patience, now)
            if since is not None and lease in self._awake:
                task = asyncio.create_task(self._paused(lease, since), name=f"halter-pause {lease.session}")
                self._pausing[lease.session] = task
                task.add_done_callback(lambda _, session=lease.session: self._pausing.pop(session, None))

    async def _paused(self, lease: Lease, since: int) -> None:
        """Stop whoever works on a session, which settles what it holds, and let it rest. What cannot is tried again."""
        working = self._awake[lease]
        working.cancel()
        await asyncio.wait([working], timeout=WATCHDOG_INTERVAL / SECOND)
        if not working.done():
            return
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
        if row.state != "RUNNING" or row.generation != lease.generation:
            return
        rest = pause_session(row, lease, since, self.patience.idle_halt(row.agent), self.clock.now())
        with suppress(LeaseLost):
            if not (await self.store.commit(rest)).events:
                # Somebody has written to it at this very moment.
                self.take(lease)

    async def _attended(self, lease: Lease) -> None:
        """Attend a session, again after a breakdown, until it rests or is left to a person."""
        session = lease.session
        while True:
            try:
                if not await self._outwaited(lease):
                    await self._attend(lease)
            except LeaseLost:
                self._failures.pop(session, None)
                return
            except Exception as error:  # noqa: BLE001  whatever it is, no other session may suffer from it
                raise_if_cancelled()
                now = self.clock.now()
                self._failures[session] = failures = (*self._failures.get(session, ()), now)
                told = self._redact(clean(f"{type(error).__name__}: {error}"))
                match decide_restart(failures, now):
                    case RestartAfter(after):
                        await self._record(lease, len(failures), told)
                        await self.clock.sleep(after)
                    case _:
                        # Whoever lets it go on after that has looked at it.
                        self._failures.pop(session, None)
                        if await self._left_alone(lease, len(failures), told, now):
                            return
            else:
                self._failures.pop(session, None)
                return

    async def _outwaited(self, lease: Lease) -> bool:
        """End a session that was paused for doing nothing, if nobody has written to it since."""
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
        return await halt_idle_session(self.store, self.clock, row, lease)

    async def _left_alone(self, lease: Lease, failures: int, error: str, now: int) -> bool:
        """Leave a session to a person; not where somebody has written to it at this very moment."""
        try:
            return await quarantine_session(self.store, lease, failures, error, now)
        except LeaseLost:
            return True

    async def _record(self, lease: Lease, failures: int, error: str) -> None:
        event = AttendingFailed(failures=failures, error=shorten(error, MAX_ERROR_LENGTH))
        key = f"{lease.session}/{lease.generation}/failed/{failures}_{self.clock.now()}"
        with suppress(LeaseLost):
            await self.store.commit(Write(session_stream(lease.session), key, lambda _: [Draft(event)], lease=lease))


async def quarantine_session(store: Store, lease: Lease, failures: int, error: str, now: int) -> bool:
    """Leave a session to a person over which its workers broke down too often: it rests until somebody writes.

    Tell whether it rests: not if somebody has just written.
    """
    (row,) = await store.ask(Query("session", SessionRow, {"session": lease.session}))
    event = AttendingFailed(failures=failures, error=shorten(error, MAX_ERROR_LENGTH), quarantined=True)
    parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_head)
    rest = lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/quarantine/{now}", parked)

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = rest.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return bool((await store.commit(msgspec.structs.replace(rest, decide=decide))).events)


EMBEDDED_CONCURRENCY: Final = 200
"""How many sessions are awake at once. Those that stay here while they sleep are not counted."""


class EmbeddedDispatcher:
    """Runs the sessions of some agents in this process."""

    def __init__(
        self, sessions: Sessions, agents: Callable[[], AgentConcurrency], together: int = EMBEDDED_CONCURRENCY
    ) -> None:
        self._sessions = sessions
        self._agents = agents
        self._together = together

    async def run(self) -> None:
        """Claim what is due until cancelled; whatever is under way is then stopped in good order."""
        sessions = self._sessions
        try:
            async with watch_for_due(sessions.store, sessions.news):
                while True:
                    room, agents = sessions.room(self._together), self._agents()
                    for lease in await sessions.store.claim(sessions.worker, room, agents=agents) if room > 0 else ():
                        sessions.take(lease)
                    await sessions.watch()
                    polling = sessions.polling_interval
                    look = await compute_next_look(sessions.store, sessions.clock, sessions.worker, polling)
                    await wait_for_news(sessions.news, look)
        finally:
            await sessions.stop()


DEFAULT_CONCURRENCY: Final = 100
"""How many sessions are awake at once in one worker. Those that stay there while they sleep are not counted."""
OFFER_RETRY_DELAY: Final = SECOND // 20
"""How soon it is looked again when there may be more to offer, or another process was offering."""

ServeTicket = Callable[[Ticket], Awaitable[None]]


class TicketQueue(Protocol):
    """What all workers share. One contract suite holds for all that implement it."""

    def put(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        """Put tickets in, in the transaction of a connection: they are there if it is committed, and not before."""
        ...

    async def hand_out(self, serve: ServeTicket, concurrency: int) -> None:
        """Serve tickets of this worker's agents as they come, so many at once, until cancelled."""
        ...


class DistributedDispatcher:
    """Runs sessions of some agents in this process, wherever they became due."""

    def __init__(
        self,
        sessions: Sessions,
        agents: Callable[[], AgentConcurrency],
        queue: TicketQueue,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> None:
        self._sessions = sessions
        self._agents = agents
        self._queue = queue
        self._concurrency = concurrency

    async def run(self) -> None:
        """Offer what is due and serve what is offered until cancelled; what is under way is then stopped."""
        try:
            await run_together([self._offer, self._hand_out])
        finally:
            await self._sessions.stop()

    async def _hand_out(self) -> None:
        """Serve tickets until nothing more is to be taken."""
        closing = self._sessions.closing
        await run_until_first([self._queue.hand_out(self._serve, self._concurrency), _set_event(closing)])

    async def _offer(self) -> None:
        """Offer as much as there is room for here. Others may take it, who have offered or will offer as much."""
        sessions = self._sessions
        async with watch_for_due(sessions.store, sessions.news):
            while True:
                room, agents = sessions.room(self._concurrency), self._agents()
                wanted = room > 0 and agents
                offered = await sessions.store.offer(room, agents, self._queue.put) if wanted else Offer()
                await sessions.watch()
                polling = sessions.polling_interval
                look = await compute_next_look(sessions.store, sessions.clock, sessions.worker, polling)
                await wait_for_news(sessions.news, min(look, OFFER_RETRY_DELAY) if offered.more else look)

    async def _serve(self, ticket: Ticket) -> None:
        """Take the session of a ticket, if nobody else has, and wait until there is room for another."""
        sessions = self._sessions
        if sessions.closing.is_set():
            # Nothing is claimed, but the ticket is used up: so it is offered anew, to somebody who stays.
            await sessions.store.claim(sessions.worker, 0, ticket)
            return
        lease = await sessions.fetch(ticket)
        if lease is not None:
            await sessions.placed(lease)


async def _set_event(event: asyncio.Event) -> None:
    await event.wait()


def find_version_in_force(workers: Iterable[WorkerRow], agent: str, now: int) -> str:
    """Name the version of an agent that was brought last, by workers that are alive; nothing where nobody has it.

    A version is as old as the oldest worker that has it: one that is only started again brings nothing new.
    """
    brought: dict[str, int] = {}
    for row in workers:
        about = row.told()
        version = about.agents.get(agent)
        if version is not None and row.alive(now) and not about.closing:
            brought[version] = min(about.started_at, brought.get(version, about.started_at))
    return max(brought, key=lambda version: (brought[version], version), default="")
