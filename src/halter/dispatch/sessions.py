"""The sessions that are attended in this process, each in a task of its own, and watched over.

Whatever breaks down over a session is that session's own affair: it is tried again, more slowly each time, and then
left to a person.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from halter.autonomy.restarts import Again, after_failure
from halter.brain.together import demand_wanted
from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost
from halter.core.events import AttendingFailed, SessionParked
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import Draft, Lease, Query, Rows, Store, Ticket, Write
from halter.core.rows import SessionRow
from halter.core.text import clean, shorten
from halter.dispatch.due import LOOK
from halter.dispatch.watchdog import ENDLESS, Patience, halted, pause, still_since
from halter.state import life

SEARCH: Final = 60 * SECOND
"""How often it is made sure that nothing is owned here that nobody attends."""
ERROR_KEPT: Final = 300
REST: Final = SECOND // 4
WATCH: Final = 60 * SECOND
"""How often it is looked whether somebody runs and does nothing; and how long one is waited for that is to stop."""

Attend = Callable[[Lease], Awaitable[None]]
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
        attend: Attend,
        redact: Redact = lambda text: text,
    ) -> None:
        self.store = store
        self.clock = clock
        self.worker = worker
        self.news = asyncio.Event()
        """Set when one is no longer attended, and when somebody wants to be looked for at once."""
        self.closing = asyncio.Event()
        """Set when nothing more is to be taken."""
        self.polling_interval = LOOK
        """How often due sessions are looked for without a hint."""
        self.patience: Patience = ENDLESS
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
                    await self.clock.sleep(REST)

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
        if now < self._searched + SEARCH:
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
        if now < self._watched + WATCH:
            return
        self._watched = now
        for lease in [lease for lease in self._awake if lease.session not in self._pausing]:
            (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
            since = await still_since(self.store, row, self.patience, now)
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
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
        if row.state != "RUNNING" or row.generation != lease.generation:
            return
        rest = pause(row, lease, since, self.patience.idle_halt(row.agent), self.clock.now())
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
                demand_wanted()
                now = self.clock.now()
                self._failures[session] = failures = (*self._failures.get(session, ()), now)
                told = self._redact(clean(f"{type(error).__name__}: {error}"))
                match after_failure(failures, now):
                    case Again(after):
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
        return await halted(self.store, self.clock, row, lease)

    async def _left_alone(self, lease: Lease, failures: int, error: str, now: int) -> bool:
        """Leave a session to a person; not where somebody has written to it at this very moment."""
        try:
            return await quarantine(self.store, lease, failures, error, now)
        except LeaseLost:
            return True

    async def _record(self, lease: Lease, failures: int, error: str) -> None:
        event = AttendingFailed(failures=failures, error=shorten(error, ERROR_KEPT))
        key = f"{lease.session}/{lease.generation}/failed/{failures}_{self.clock.now()}"
        with suppress(LeaseLost):
            await self.store.commit(Write(session_stream(lease.session), key, lambda _: [Draft(event)], lease=lease))


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

    return bool((await store.commit(msgspec.structs.replace(rest, decide=decide))).events)
