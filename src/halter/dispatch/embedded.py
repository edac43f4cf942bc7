"""Sessions that run in this process: claimed when they are due, attended, and watched over.

A session that sleeps without sensors is only a row: nothing here knows of it until it is due. Whatever breaks down over
a session is that session's own affair: it is tried again, more slowly each time, and then left to a person.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec

from halter.autonomy.restarts import Again, after_failure
from halter.brain.together import demand_wanted, heard, until
from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost
from halter.core.events import AttendingFailed, SessionParked
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import EVERY_STREAM, Change, Draft, Lease, Query, Rows, Store, Write
from halter.core.rows import SessionRow
from halter.core.text import clean, shorten
from halter.dispatch.watchdog import ENDLESS, Patience, halted, pause, still_since
from halter.state import life

LOOK: Final = 5 * SECOND
"""How often it looks by itself: for sessions whose owner died, and for hints that were lost."""
SEARCH: Final = 60 * SECOND
"""How often it is made sure that nothing is owned here that nobody attends."""
TOGETHER: Final = 200
"""How many sessions are awake at once. Those that stay here while they sleep are not counted."""
ERROR_KEPT: Final = 300
WATCH: Final = 60 * SECOND
"""How often it is looked whether somebody runs and does nothing; and how long one is waited for that is to stop."""

Attend = Callable[[Lease], Awaitable[None]]
"""Takes a session from where it stands to its next rest or its end."""
Redact = Callable[[str], str]


class _Due(msgspec.Struct, frozen=True):
    due_at: int | None


class _Owned(msgspec.Struct, frozen=True):
    session: str
    generation: int


class Embedded:
    """Runs the sessions of some agents in this process."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        worker: WorkerId,
        attend: Attend,
        agents: Callable[[], Sequence[str]],
        together: int = TOGETHER,
        redact: Redact = lambda text: text,
    ) -> None:
        self._store = store
        self._clock = clock
        self._worker = worker
        self._attend = attend
        self._agents = agents
        self._together = together
        self._redact = redact
        self.patience: Patience = ENDLESS
        """How long a session may run here and do nothing."""
        self._awake: dict[Lease, asyncio.Task[None]] = {}
        self._resident: set[SessionId] = set()
        self._failures: dict[SessionId, tuple[int, ...]] = {}
        self._news = asyncio.Event()
        self._searched = clock.now()
        self._watched = clock.now()
        self._pausing: dict[SessionId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Work until cancelled; whatever is under way is then stopped in good order."""
        try:
            async with heard(self._store, _may_be_due) as self._news:
                while True:
                    room = self._together - len(self._awake) + len(self._resident)
                    for lease in await self._store.claim(self._worker, room, agents=self._agents()) if room > 0 else ():
                        self.take(lease)
                    await self._find_forgotten()
                    await self._find_idle()
                    await until(self._news, await self._next_look())
        finally:
            running = (*self._pausing.values(), *self._awake.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def take(self, lease: Lease) -> None:
        """Attend a session that was claimed."""
        task = asyncio.create_task(self._attended(lease), name=f"halter-session {lease.session}")
        self._awake[lease] = task
        task.add_done_callback(lambda _: self._left(lease))

    def look(self) -> None:
        """Look at once what is due, whatever hints come."""
        self._news.set()

    def stays(self, session: SessionId) -> None:
        """Know that a session stays here while it sleeps."""
        self._resident.add(session)

    def leases(self) -> frozenset[Lease]:
        """Name the sessions that are attended here."""
        return frozenset(self._awake)

    def lost(self, leases: frozenset[Lease]) -> None:
        """Stop attending what another process has by now."""
        for lease in leases & self._awake.keys():
            self._awake[lease].cancel()

    def _left(self, lease: Lease) -> None:
        """Forget one that is no longer attended. The same session may already be attended anew."""
        self._awake.pop(lease, None)
        self._resident.discard(lease.session)
        self._news.set()

    async def _find_forgotten(self) -> None:
        """Attend what is owned here and was never heard of: the answer to a claim may have been lost on its way."""
        now = self._clock.now()
        if now < self._searched + SEARCH:
            return
        self._searched = now
        attended = {lease.session for lease in self._awake} | self._pausing.keys()
        owned = await self._store.ask(Query("owned_by", _Owned, {"worker": self._worker}))
        for row in owned:
            if row.session not in attended:
                self.take(Lease(SessionId(row.session), self._worker, row.generation))

    async def _find_idle(self) -> None:
        """Pause what runs here and does nothing."""
        now = self._clock.now()
        if now < self._watched + WATCH:
            return
        self._watched = now
        for lease in [lease for lease in self._awake if lease.session not in self._pausing]:
            (row,) = await self._store.ask(Query("session", SessionRow, {"session": lease.session}))
            since = await still_since(self._store, row, self.patience, now)
            if since is not None and lease in self._awake:
                task = asyncio.create_task(self._paused(lease, since), name=f"halter-pause {lease.session}")
                self._pausing[lease.session] = task
                task.add_done_callback(lambda _, session=lease.session: self._pausing.pop(session, None))

    async def _paused(self, lease: Lease, since: int) -> None:
        """Stop whoever works on a session, which settles what it holds, and let it rest. What cannot is tried again."""
        working = self._awake[lease]
        working.cancel()
        await asyncio.wait([working], timeout=WATCH / SECOND)
        if not working.done():
            return
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": lease.session}))
        if row.state != "RUNNING" or row.generation != lease.generation:
            return
        rest = pause(row, lease, since, self.patience.idle_halt(row.agent), self._clock.now())
        with suppress(LeaseLost):
            if not (await self._store.commit(rest)).events:
                # Somebody has written to it at this very moment.
                self.take(lease)

    async def _next_look(self) -> int:
        """Tell for how long nothing is due here."""
        now = self._clock.now()
        (found,) = await self._store.ask(Query("next_due", _Due, {"now": now}))
        return LOOK if found.due_at is None else min(LOOK, max(0, found.due_at - now))

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
                demand_wanted()
                now = self._clock.now()
                self._failures[session] = failures = (*self._failures.get(session, ()), now)
                told = self._redact(clean(f"{type(error).__name__}: {error}"))
                match after_failure(failures, now):
                    case Again(after):
                        await self._record(lease, len(failures), told)
                        await self._clock.sleep(after)
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
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": lease.session}))
        return await halted(self._store, self._clock, row, lease)

    async def _left_alone(self, lease: Lease, failures: int, error: str, now: int) -> bool:
        """Leave a session to a person; not where somebody has written to it at this very moment."""
        try:
            return await quarantine(self._store, lease, failures, error, now)
        except LeaseLost:
            return True

    async def _record(self, lease: Lease, failures: int, error: str) -> None:
        event = AttendingFailed(failures=failures, error=shorten(error, ERROR_KEPT))
        key = f"{lease.session}/{lease.generation}/failed/{failures}_{self._clock.now()}"
        with suppress(LeaseLost):
            await self._store.commit(Write(session_stream(lease.session), key, lambda _: [Draft(event)], lease=lease))


def _may_be_due(change: Change) -> bool:
    """An inbox grew, a session began, or nobody knows."""
    return change.stream == EVERY_STREAM or change.stream.endswith("/in") or change.head == 1


async def quarantine(store: Store, lease: Lease, failures: int, error: str, now: int) -> bool:
    """Leave a session to a person over which its workers broke down too often: it rests until somebody writes.

    Tell whether it rests: not if somebody has just written.
    """
    (row,) = await store.ask(Query("session", SessionRow, {"session": lease.session}))
    event = AttendingFailed(failures=failures, error=shorten(error, ERROR_KEPT), quarantined=True)
    parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_head)
    rest = life.park(lease, f"{lease.session}/{lease.generation}/quarantine/{now}", parked)

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = rest.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return bool((await store.commit(replace(rest, decide=decide))).events)
