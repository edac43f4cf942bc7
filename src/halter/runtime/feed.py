"""The news of a fleet, for whoever watches it.

There are two kinds. Events are durable: whoever listens reads them off the journal at their own pace, and goes on by
stream and sequence number. Pulses (words as they come, what a sensor read) are live only.

Nobody who listens is waited for. One that lags is told of a gap, and goes on with the present: the events that it was
not given stand in the journal and can be read again, the pulses are gone.

Following streams as they grow, in this process and in others.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from heapq import merge
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND, Clock
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
from halter.core.ports import EVERY_STREAM, Change, Query, Store, Stored
from halter.core.rows import SessionRow, StreamRow

POLLING_INTERVAL: Final = 5 * SECOND
"""How often everything is looked at: hints come at once, but may be lost."""

PAGE: Final = 1000

EVERYTHING: Final = Change(EVERY_STREAM, 0)


async def watch_growth(store: Store, clock: Clock) -> AsyncGenerator[Change]:
    """Tell to look at everything, then what may have grown since, and from time to time to look at everything again."""
    hints = store.changes()
    hint = asyncio.ensure_future(anext(hints))
    poll = asyncio.ensure_future(clock.sleep(0))
    try:
        while True:
            await asyncio.wait({hint, poll}, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                poll = asyncio.ensure_future(clock.sleep(POLLING_INTERVAL))
                yield EVERYTHING
            if hint.done():
                change = hint.result()
                hint = asyncio.ensure_future(anext(hints))
                yield change
    finally:
        for waiting in (hint, poll):
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting


class Follower:
    """Reads what is new in the streams that somebody wants. `seen` says how far each was read, and can be kept.

    Where only a few are wanted, by name, nobody has to look through all that there are.
    """

    def __init__(
        self,
        store: Store,
        seen: Mapping[StreamId, int],
        only: Collection[StreamId] | None = None,
        wanted: Callable[[StreamId], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self.seen = dict(seen)
        self._only = only
        self._wanted = wanted

    async def new(self, change: Change = EVERYTHING) -> AsyncGenerator[Sequence[Stored]]:
        """Read on in whatever may have grown, a page at a time, each of one stream."""
        for stream in await self.grown(change):
            while page := await self._store.read(stream, self._so_far(stream), PAGE):
                self.seen[stream] = page[-1].seq
                yield page

    async def all_new(self, change: Change = EVERYTHING) -> list[Stored]:
        """Read on in whatever may have grown, with the newest last."""
        async with aclosing(self.new(change)) as pages:
            found = [stored async for page in pages for stored in page]
        return sorted(found, key=lambda stored: stored.at)

    async def grown(self, change: Change = EVERYTHING) -> Mapping[StreamId, int]:
        """Find the streams that are longer than what was seen of them, and how long they are now."""
        if change.stream != EVERY_STREAM:
            news = self._wants(change.stream) and change.head > self._so_far(change.stream)
            return dict(await self._lengths([change.stream])) if news else {}
        found = {stream: head for stream, head in await self._heads() if self._wants(stream)}
        for stream, head in found.items():
            if head < self._so_far(stream):
                # The store was put back to an earlier state: what is there is read again rather than missed.
                self.seen[stream] = 0
        return {stream: head for stream, head in found.items() if head > self._so_far(stream)}

    def _wants(self, stream: StreamId) -> bool:
        return self._wanted(stream) and (self._only is None or stream in self._only)

    def _so_far(self, stream: StreamId) -> int:
        return self.seen.get(stream, 0)

    async def _heads(self) -> list[tuple[StreamId, int]]:
        return await read_stream_heads(self._store) if self._only is None else await self._lengths(self._only)

    async def _lengths(self, streams: Iterable[StreamId]) -> list[tuple[StreamId, int]]:
        found: list[tuple[StreamId, int]] = []
        for stream in streams:
            rows = await self._store.ask(Query("head", StreamRow, {"stream": stream}))
            found += [(StreamId(row.stream), row.head) for row in rows]
        return found


async def read_stream_heads(store: Store) -> list[tuple[StreamId, int]]:
    """Tell how long every stream is."""
    return [(StreamId(row.stream), row.head) for row in await store.ask(Query("heads", StreamRow))]


MAX_PENDING_ITEMS: Final = 1000
"""So many events, and so many pulses, may lie before somebody who listens."""
KINDS_KEPT: Final = 10_000


class FeedEvent(msgspec.Struct, frozen=True):
    """An event, under the name by which it is told."""

    name: str
    stored: Stored


class LiveUpdate(msgspec.Struct, frozen=True):
    """Something of this moment, in a session."""

    name: str
    session: str
    at: int
    values: Mapping[str, Any]


class StreamSlice(msgspec.Struct, frozen=True):
    """A part of a stream: what follows `after`, up to and with `through`."""

    after: int
    through: int


class FeedGap(msgspec.Struct, frozen=True):
    """So many events and pulses were not given, because they were not taken. `lost` says where the events stand."""

    events: int = 0
    pulses: int = 0
    lost: Mapping[StreamId, StreamSlice] = {}


FeedItem = FeedEvent | LiveUpdate | FeedGap


def name_feed_event(event: AnyEvent | Unknown, *, autonomous: bool) -> str:
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
        pulse = LiveUpdate(name, session, self._clock.now(), values)
        for pulses in self._listening:
            pulses.put(pulse)

    async def listen(
        self,
        after: Mapping[StreamId, int] | None = None,
        wanted: Callable[[StreamId], bool] = lambda _: True,
        most: int = MAX_PENDING_ITEMS,
    ) -> AsyncGenerator[FeedItem]:
        """Listen to the streams that somebody wants: from now on, or `after` what they have seen of each.

        Whoever goes on is first given all that has come since, however much that is. A stream that they have seen
        nothing of is read from its beginning.
        """
        follower = Follower(
            self._store, dict(await read_stream_heads(self._store)) if after is None else after, wanted=wanted
        )
        pulses = _Pulses(most)
        self._listening.add(pulses)
        try:
            async with aclosing(follower.new()) as pages:
                async for page in pages:
                    for stored in page:
                        yield await self.named(stored)
            async with aclosing(_merge_wakeups(watch_growth(self._store, self._clock), pulses)) as wakes:
                async for change in wakes:
                    async with aclosing(self._items(follower, pulses, change, most)) as items:
                        async for item in items:
                            yield item
        finally:
            self._listening.discard(pulses)

    async def _items(
        self, follower: Follower, pulses: "_Pulses", change: Change | None, most: int
    ) -> AsyncGenerator[FeedItem]:
        """Give what has come, or say that it was too much."""
        grown: Mapping[StreamId, int] = {} if change is None else await follower.grown(change)
        live, gone = pulses.take()
        new = {stream: StreamSlice(follower.seen.get(stream, 0), head) for stream, head in grown.items()}
        count = sum(part.through - part.after for part in new.values())
        given, lost, events = ({}, new, count) if count > most else (new, {}, 0)
        follower.seen.update(grown if lost else {})
        if lost or gone:
            yield FeedGap(events, gone, lost)
        streams = [[news async for news in self._read({stream: part})] for stream, part in given.items()]
        for news in merge(*streams, key=_event_time):
            follower.seen[news.stored.stream] = news.stored.seq
            yield news
        for pulse in live:
            yield pulse

    def missed(self, gap: FeedGap) -> AsyncGenerator[FeedEvent]:
        """Read the events again that were not given."""
        return self._read(gap.lost)

    async def _read(self, parts: Mapping[StreamId, StreamSlice]) -> AsyncGenerator[FeedEvent]:
        for stream, part in parts.items():
            after = part.after
            while after < part.through:
                page = await self._store.read(stream, after, min(PAGE, part.through - after))
                for stored in page:
                    yield await self.named(stored)
                after = page[-1].seq if page else part.through

    async def named(self, stored: Stored) -> FeedEvent:
        """Give an event its name, which depends on whose it is."""
        session = session_of(stored.stream)
        autonomous = session is not None and await self._is_autonomous(session)
        return FeedEvent(name_feed_event(stored.event, autonomous=autonomous), stored)

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


def _event_time(news: FeedEvent) -> int:
    return news.stored.at


class _Pulses:
    """The pulses that wait for one listener. Where there are too many the oldest go, and are counted."""

    def __init__(self, most: int) -> None:
        self.news = asyncio.Event()
        self._waiting: deque[LiveUpdate] = deque()
        self._most = most
        self._lost = 0

    def put(self, pulse: LiveUpdate) -> None:
        """Add the newest one."""
        self._waiting.append(pulse)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
            self._lost += 1
        self.news.set()

    def take(self) -> tuple[Sequence[LiveUpdate], int]:
        """Take all that wait, and tell how many were lost before them."""
        taken, lost = tuple(self._waiting), self._lost
        self._waiting.clear()
        self._lost = 0
        self.news.clear()
        return taken, lost


async def _merge_wakeups(changes: AsyncGenerator[Change], pulses: _Pulses) -> AsyncGenerator[Change | None]:
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
