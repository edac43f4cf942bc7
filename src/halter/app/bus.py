"""The news of a fleet, for whoever watches it.

There are two kinds. Events are durable: whoever listens reads them off the journal at their own pace, and goes on by
stream and sequence number. Pulses (words as they come, what a sensor read) are live only.

Nobody who listens is waited for. One that lags is told of a gap, and goes on with the present: the events that it was
not given stand in the journal and can be read again, the pulses are gone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from heapq import merge
from typing import Any, Final

import msgspec

from halter.app.follow import Follower, growing, heads
from halter.core.clock import Clock
from halter.core.events import (
    AnyEvent,
    GuardrailTriggered,
    SensorChanged,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
)
from halter.core.ids import StreamId, session_of
from halter.core.ports import Change, Query, Store, Stored
from halter.core.rows import SessionRow

MOST: Final = 1000
"""So many events, and so many pulses, may lie before somebody who listens."""
KINDS_KEPT: Final = 10_000
PAGE: Final = 1000


class News(msgspec.Struct, frozen=True):
    """An event, under the name by which it is told."""

    name: str
    stored: Stored


class Pulse(msgspec.Struct, frozen=True):
    """Something of this moment, in a session."""

    name: str
    session: str
    at: int
    values: Mapping[str, Any]


class Part(msgspec.Struct, frozen=True):
    """A part of a stream: what follows `after`, up to and with `through`."""

    after: int
    through: int


class Gap(msgspec.Struct, frozen=True):
    """So many events and pulses were not given, because they were not taken. `lost` says where the events stand."""

    events: int = 0
    pulses: int = 0
    lost: Mapping[StreamId, Part] = {}


Item = News | Pulse | Gap


def name_of(event: AnyEvent | Unknown, *, autonomous: bool) -> str:
    """Name an event for those who listen: by its own kind, unless it tells of an agent that runs by itself."""
    kind = event.kind if isinstance(event, Unknown) else event.KIND
    if not autonomous:
        return kind
    match event:
        case TurnStarted():
            return "autonomy:turn_started"
        case TurnEnded():
            return "autonomy:turn_completed"
        case TurnSkipped():
            return "autonomy:precheck_skipped"
        case GuardrailTriggered():
            return "autonomy:guardrail_triggered"
        case SensorChanged(health="failing"):
            return "autonomy:sensor_error"
        case WakePosted(notifies=True):
            return "autonomy:notification_pushed"
        case _:
            return kind


class Bus:
    """Where the news of one store, and the pulses of this process, can be listened to."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._listening: set[_Pulses] = set()
        self._autonomous: dict[str, bool] = {}

    def pulse(self, session: str, name: str, values: Mapping[str, Any]) -> None:
        """Tell everybody who listens at this moment. It never waits, and keeps little."""
        pulse = Pulse(name, session, self._clock.now(), values)
        for pulses in self._listening:
            pulses.put(pulse)

    async def listen(
        self,
        after: Mapping[StreamId, int] | None = None,
        wanted: Callable[[StreamId], bool] = lambda _: True,
        most: int = MOST,
    ) -> AsyncGenerator[Item]:
        """Listen to the streams that somebody wants: from now on, or `after` what they have seen of each.

        Whoever goes on is first given all that has come since, however much that is. A stream that they have seen
        nothing of is read from its beginning.
        """
        follower = Follower(self._store, dict(await heads(self._store)) if after is None else after, wanted=wanted)
        pulses = _Pulses(most)
        self._listening.add(pulses)
        try:
            async with aclosing(follower.new()) as pages:
                async for page in pages:
                    for stored in page:
                        yield await self.named(stored)
            async with aclosing(_woken(growing(self._store, self._clock), pulses)) as wakes:
                async for change in wakes:
                    async with aclosing(self._items(follower, pulses, change, most)) as items:
                        async for item in items:
                            yield item
        finally:
            self._listening.discard(pulses)

    async def _items(
        self, follower: Follower, pulses: "_Pulses", change: Change | None, most: int
    ) -> AsyncGenerator[Item]:
        """Give what has come, or say that it was too much."""
        grown: Mapping[StreamId, int] = {} if change is None else await follower.grown(change)
        live, gone = pulses.take()
        new = {stream: Part(follower.seen.get(stream, 0), head) for stream, head in grown.items()}
        count = sum(part.through - part.after for part in new.values())
        given, lost, events = ({}, new, count) if count > most else (new, {}, 0)
        follower.seen.update(grown if lost else {})
        if lost or gone:
            yield Gap(events, gone, lost)
        streams = [[news async for news in self._read({stream: part})] for stream, part in given.items()]
        for news in merge(*streams, key=_moment):
            follower.seen[news.stored.stream] = news.stored.seq
            yield news
        for pulse in live:
            yield pulse

    def missed(self, gap: Gap) -> AsyncGenerator[News]:
        """Read the events again that were not given."""
        return self._read(gap.lost)

    async def _read(self, parts: Mapping[StreamId, Part]) -> AsyncGenerator[News]:
        for stream, part in parts.items():
            after = part.after
            while after < part.through:
                page = await self._store.read(stream, after, min(PAGE, part.through - after))
                for stored in page:
                    yield await self.named(stored)
                after = page[-1].seq if page else part.through

    async def named(self, stored: Stored) -> News:
        """Give an event its name, which depends on whose it is."""
        session = session_of(stored.stream)
        autonomous = session is not None and await self._is_autonomous(session)
        return News(name_of(stored.event, autonomous=autonomous), stored)

    async def _is_autonomous(self, session: str) -> bool:
        """Tell of what kind a session is. Its inbox may have been written to before it began."""
        if session in self._autonomous:
            return self._autonomous[session]
        rows = await self._store.ask(Query("session", SessionRow, {"session": session}))
        if not rows or not rows[0].started_at:
            return False
        if len(self._autonomous) >= KINDS_KEPT:
            self._autonomous.clear()
        self._autonomous[session] = rows[0].kind == "autonomous"
        return self._autonomous[session]


def _moment(news: News) -> int:
    return news.stored.at


class _Pulses:
    """The pulses that wait for one listener. Where there are too many the oldest go, and are counted."""

    def __init__(self, most: int) -> None:
        self.news = asyncio.Event()
        self._waiting: deque[Pulse] = deque()
        self._most = most
        self._lost = 0

    def put(self, pulse: Pulse) -> None:
        """Add the newest one."""
        self._waiting.append(pulse)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
            self._lost += 1
        self.news.set()

    def take(self) -> tuple[Sequence[Pulse], int]:
        """Take all that wait, and tell how many were lost before them."""
        taken, lost = tuple(self._waiting), self._lost
        self._waiting.clear()
        self._lost = 0
        self.news.clear()
        return taken, lost


async def _woken(changes: AsyncGenerator[Change], pulses: _Pulses) -> AsyncGenerator[Change | None]:
    """Tell what may have grown; and, without a name, that there are pulses."""
    hint = asyncio.ensure_future(anext(changes))
    beat = asyncio.ensure_future(pulses.news.wait())
    try:
        while True:
            await asyncio.wait({hint, beat}, return_when=asyncio.FIRST_COMPLETED)
            if hint.done():
                change = hint.result()
                hint = asyncio.ensure_future(anext(changes))
                yield change
            if beat.done():
                yield None
                beat = asyncio.ensure_future(pulses.news.wait())
    finally:
        for waiting in (hint, beat):
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        await changes.aclose()
