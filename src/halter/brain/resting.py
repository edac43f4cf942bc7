"""How a session rests, and what it waits for: a person, money, a time, or whatever reaches it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from halter.brain.book import Book
from halter.brain.together import heard, until
from halter.core.clock import SECOND, Clock
from halter.core.events import DecisionMade, SessionParked, WakePosted
from halter.core.ids import FLEET, inbox_stream
from halter.core.ports import EVERY_STREAM, Change, Lease, Store
from halter.core.rows import DecisionRow, HaltRow
from halter.core.vocabulary import Cause, State
from halter.guard.ask import Standing
from halter.guard.chokepoint import NeedsPerson
from halter.guard.gatehouse import Gatehouse
from halter.state import life
from halter.state.session import Session

LOOK: Final = 30 * SECOND
"""How often somebody who waits looks by itself. Whatever it waits for is written, and hints of that come at once;
but hints may be lost."""

Look = Callable[[], Awaitable[bool]]
"""Something that is looked for while resting."""

Waits = Callable[[NeedsPerson, State], None]
"""Somebody who wants to know, once for each decision, that a session rests until a person decides."""


class Resting(Book):
    """A session that can wait. What it waits for is in the journal: another process can go on in the same place."""

    def __init__(
        self, store: Store, clock: Clock, gatehouse: Gatehouse, lease: Lease, standing: Standing, waits: Waits
    ) -> None:
        super().__init__(store, gatehouse, lease)
        self.standing = standing
        self.state = Session()
        self._clock = clock
        self._waits = waits
        self._told: set[str] = set()
        self._seen = 0
        self.rested_at = 0
        """How far the inbox had been read when the session last rested between two turns."""
        self._rests = 0
        self.rested: Callable[[int], None] = lambda _: None
        """Told of each rest how long it was: it counts as nobody's work."""

    async def wake(self) -> None:
        """Go on with a session that rested in these hands."""
        self._rests += 1
        self.rested_at = self._seen
        await self._woken(await self._cause())

    async def _cause(self) -> Cause | None:
        """Tell why the session goes on: what reached it, or its time; or that its owner went away."""
        if self.state.state == "RUNNING":
            return None
        for stored in await self.inbox(self._seen):
            match stored.event:
                case WakePosted(wakes=True, cause=cause):
                    return cause
                case DecisionMade():
                    return "decision"
                case _:
                    pass
        return "timer"

    async def park(
        self,
        state: State,
        inbox_seen: int,
        wake_at: int | None = None,
        wake_on: tuple[str, ...] = (),
        *,
        resident: bool = False,
    ) -> bool:
        """Let the session rest; not where something has reached it that was not looked at.

        One that is resident rests in these hands; any other is let go.
        """
        self._rests += 1
        parked = SessionParked(state=state, inbox_seen=inbox_seen, wake_at=wake_at, wake_on=wake_on, resident=resident)
        key = f"{self.lease.session}/{self.lease.generation}/rest/{self._rests}"
        rests = bool((await self.commit(life.park(self.lease, key, parked))).events)
        if rests:
            self._seen = inbox_seen
            self.state = msgspec.structs.replace(self.state, state=state, wake_at=wake_at, inbox_seen=inbox_seen)
        return rests

    async def _rest(self, state: State, wake_at: int, or_when: Look | None = None) -> None:
        """Rest until something arrives, the time has come, or a halt or something else that is looked for is there."""
        self._rests += 1
        began = self._clock.now()
        parked = SessionParked(state=state, inbox_seen=self._seen, wake_at=wake_at, resident=True)
        key = f"{self.lease.session}/{self.lease.generation}/rest/{self._rests}"
        committed = await self.commit(life.park(self.lease, key, parked))
        due = bool(committed.events) and await self.until_woken(wake_at, or_when)
        await self._woken("timer" if due else "decision")
        self.rested_at = self._seen
        self.rested(self._clock.now() - began)

    async def until_woken(self, wake_at: int | None, or_when: Look | None = None) -> bool:
        """Wait while the session rests: until its time has come, or something else has. Tell whether it was its time.

        What else comes is something in its inbox, a halt, or what is looked for.
        """
        async with heard(self._store, self._matters) as news:
            while wake_at is None or self._clock.now() < wake_at:
                if (await self._row()).inbox_wake > self._seen or (or_when and await or_when()):
                    return False
                if await self._gatehouse.halted(self.standing) is not None:
                    return False
                await until(news, LOOK if wake_at is None else min(LOOK, wake_at - self._clock.now()))
        return True

    def _matters(self, change: Change) -> bool:
        """Tell whether a change can end a rest.

        What people say and decide is in the inbox; halts and caps are in the stream of the fleet. Whoever rests looks
        at nothing else, however many rest and however much happens meanwhile.
        """
        return change.stream in (inbox_stream(self.lease.session), FLEET, EVERY_STREAM)

    async def _woken(self, cause: Cause | None) -> None:
        """Write that the session goes on, with its inbox read as far as it is now."""
        self._seen = (await self._row()).inbox_head
        key = f"{self.lease.session}/{self.lease.generation}/woken/{self._rests}"
        await self.commit(life.wake(self.lease, key, cause, self._seen))
        self.state = msgspec.structs.replace(self.state, state="RUNNING", wake_at=None, inbox_seen=self._seen)

    async def _one_decided(self, asked: Sequence[NeedsPerson]) -> None:
        """Rest until one of several questions is answered, or is too late to be."""
        first, *others = asked

        async def another() -> bool:
            rows = [await self._gatehouse.decision(each.decision) for each in others]
            return any(row is not None and (row.verdict or self._clock.now() >= row.expires_at) for row in rows)

        for each in asked:
            self._tell(each, "WAITING_FOR_APPROVAL")
        await self._decided(first, "WAITING_FOR_APPROVAL", another if others else None)

    async def _decided(self, asked: NeedsPerson, state: State, or_when: Look | None = None) -> DecisionRow:
        """Rest until a person has decided, until it is too late for that, or until a halt comes first."""
        while True:
            row = await self._gatehouse.decision(asked.decision)
            if row is None:
                raise LookupError(f"The decision {asked.decision} is gone from the store.")
            if row.verdict or self._clock.now() >= row.expires_at or (or_when and await or_when()):
                return row
            if await self._gatehouse.halted(self.standing) is not None:
                return row
            self._tell(asked, state)
            await self._rest(state, row.expires_at, or_when)

    def _tell(self, asked: NeedsPerson, state: State) -> None:
        if asked.decision not in self._told:
            self._told.add(asked.decision)
            self._waits(asked, state)

    async def halted(self) -> HaltRow | None:
        """Tell whether, and by whom, the session is halted."""
        return await self._gatehouse.halted(self.standing)

    async def pause(self, duration: int) -> None:
        """Let a while pass, or less if a halt comes first."""
        await self._gatehouse.pause(self.standing, duration)
