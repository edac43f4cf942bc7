"""The feed of a fleet: durable events and live updates.

Events are read off the journal at the listener's own pace, and resumed by stream and sequence number. Live updates
(text as it streams, sensor readings) are not stored. A slow listener is not waited for: it gets a gap, and goes on with
the present; the missed events can be read again, the live updates cannot.
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
from halter.core.text import clean, from_body
from halter.loop.session_runtime import cancel_and_wait

POLLING_INTERVAL: Final = 5 * SECOND
"""Polling interval for all streams: hints arrive at once, but may be lost."""

PAGE: Final = 1000

EVERYTHING: Final = Change(EVERY_STREAM, 0)


async def watch_growth(store: Store, clock: Clock) -> AsyncGenerator[Change]:
    """Yields EVERYTHING, then each hint of a grown stream, and EVERYTHING again at intervals."""
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
        await cancel_and_wait(hint, poll)


class _Extent(msgspec.Struct, frozen=True):
    """How many streams there are, how long they are together, and when the newest event was."""

    streams: int
    length: int
    at: int


class Follower:
    """Reads what is new in the wanted streams. `seen` is how far each was read.

    With `only`, just those streams are looked up, by name.
    """

    def __init__(
        self,
        store: Store,
        positions: Mapping[StreamId, int],
        only: Collection[StreamId] | None = None,
        wanted: Callable[[StreamId], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self.positions = dict(positions)
        self._only = only
        self._wanted = wanted
        self._quiet_at: _Extent | None = None

    async def follow_change(self, change: Change = EVERYTHING) -> AsyncGenerator[Sequence[Stored]]:
        """Yields what may be new, in pages of one stream each."""
        for stream in await self.find_grown(change):
            while page := await self._store.read(stream, self._seen_length(stream), PAGE):
                self.positions[stream] = page[-1].seq
                yield page

    async def read_new(self, change: Change = EVERYTHING) -> list[Stored]:
        """Returns what may be new, oldest first."""
        async with aclosing(self.follow_change(change)) as pages:
            events = [stored async for page in pages for stored in page]
        return sorted(events, key=lambda stored: stored.at)

    async def find_grown(self, change: Change = EVERYTHING) -> Mapping[StreamId, int]:
        """Returns the streams that are longer than what was seen of them, with their length."""
        if change.stream != EVERY_STREAM:
            news = self._is_wanted(change.stream) and change.head > self._seen_length(change.stream)
            return dict(await self._lengths([change.stream])) if news else {}
        extent = await self._measure()
        if extent is not None and extent == self._quiet_at:
            return {}
        found = {stream: head for stream, head in await self._heads() if self._is_wanted(stream)}
        for stream, head in found.items():
            if head < self._seen_length(stream):
                # The store was restored to an earlier state: read again rather than miss events.
                self.positions[stream] = 0
        grown = {stream: head for stream, head in found.items() if head > self._seen_length(stream)}
        self._quiet_at = None if grown else extent
        return grown

    async def _measure(self) -> "_Extent | None":
        """Measures all streams together: while that is as it was when nothing was new, nothing is new."""
        if self._only is not None:
            return None
        return next(iter(await self._store.ask(Query("extent", _Extent))), None)

    def _is_wanted(self, stream: StreamId) -> bool:
        return self._wanted(stream) and (self._only is None or stream in self._only)

    def _seen_length(self, stream: StreamId) -> int:
        return self.positions.get(stream, 0)

    async def _heads(self) -> list[tuple[StreamId, int]]:
        return await read_stream_heads(self._store) if self._only is None else await self._lengths(self._only)

    async def _lengths(self, streams: Iterable[StreamId]) -> list[tuple[StreamId, int]]:
        found: list[tuple[StreamId, int]] = []
        for stream in streams:
            rows = await self._store.ask(Query("head", StreamRow, {"stream": stream}))
            found += [(StreamId(row.stream), row.head) for row in rows]
        return found


async def read_stream_heads(store: Store) -> list[tuple[StreamId, int]]:
    return [(StreamId(row.stream), row.head) for row in await store.ask(Query("heads", StreamRow))]


MAX_PENDING_ITEMS: Final = 1000
"""Most events, and most live updates, that wait for a listener."""
MAX_BATCH: Final = 64
"""Most events of its own commits that a process takes up at a time."""
KINDS_KEPT: Final = 10_000


class FeedEvent(msgspec.Struct, frozen=True):
    """An event under its name in the feed."""

    name: str
    stored: Stored


class LiveUpdate(msgspec.Struct, frozen=True):
    """Something that happens now in a session; it is not stored."""

    name: str
    session: str
    at: int
    values: Mapping[str, Any]


class StreamSlice(msgspec.Struct, frozen=True):
    """The part of a stream after `after`, up to and including `through`."""

    after: int
    through: int


class FeedGap(msgspec.Struct, frozen=True):
    """Events and live updates that were dropped because the listener was slow. `lost` says where the events are."""

    events: int = 0
    pulses: int = 0
    lost: Mapping[StreamId, StreamSlice] = {}


FeedItem = FeedEvent | LiveUpdate | FeedGap


_RENAMED: Final = frozenset((TurnStarted, TurnEnded, TurnSkipped, GuardrailTriggered, SensorChanged, WakePosted))
"""The events that may have another name in an autonomous session."""


def name_feed_event(event: AnyEvent | Unknown, *, autonomous: bool) -> str:
    """Names an event: by its kind, unless it belongs to an autonomous session."""
    kind = event.kind if isinstance(event, Unknown) else event.KIND
    if not autonomous or type(event) not in _RENAMED:
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
    """The feed of one store, and of this process."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._listening: set[_LiveUpdates] = set()
        self._autonomous: dict[str, bool] = {}

    def publish_live(self, session: str, name: str, values: Mapping[str, Any]) -> None:
        """Sends a live update to all listeners. Never blocks."""
        pulse = LiveUpdate(name, session, self._clock.now(), values)
        for pulses in self._listening:
            pulses.add(pulse)

    async def listen(
        self,
        after: Mapping[StreamId, int] | None = None,
        wanted: Callable[[StreamId], bool] = lambda _: True,
        limit: int = MAX_PENDING_ITEMS,
    ) -> AsyncGenerator[FeedItem]:
        """Yields the wanted streams: from now on, or `after` what was seen of each.

        With `after`, everything since comes first. A stream that is not in it is read from its beginning.
        """
        follower = Follower(
            self._store, dict(await read_stream_heads(self._store)) if after is None else after, wanted=wanted
        )
        pulses = _LiveUpdates(limit)
        self._listening.add(pulses)
        try:
            async with aclosing(follower.follow_change()) as pages:
                async for page in pages:
                    for stored in page:
                        yield await self.name_event(stored)
            async with aclosing(_merge_wakeups(watch_growth(self._store, self._clock), pulses)) as wakes:
                async for change in wakes:
                    async with aclosing(self._items(follower, pulses, change, limit)) as items:
                        async for item in items:
                            yield item
        finally:
            self._listening.discard(pulses)

    async def _items(
        self, follower: Follower, pulses: "_LiveUpdates", change: Change | None, limit: int
    ) -> AsyncGenerator[FeedItem]:
        """Yields what has come, or a gap if it is too much."""
        grown: Mapping[StreamId, int] = {} if change is None else await follower.find_grown(change)
        live, gone = pulses.drain()
        new = {stream: StreamSlice(follower.positions.get(stream, 0), head) for stream, head in grown.items()}
        count = sum(part.through - part.after for part in new.values())
        given, lost, events = ({}, new, count) if count > limit else (new, {}, 0)
        follower.positions.update(grown if lost else {})
        if lost or gone:
            yield FeedGap(events, gone, lost)
        streams = [[news async for news in self._read_parts({stream: part})] for stream, part in given.items()]
        for news in merge(*streams, key=lambda news: news.stored.at):
            follower.positions[news.stored.stream] = news.stored.seq
            yield news
        for pulse in live:
            yield pulse

    def read_missed(self, gap: FeedGap) -> AsyncGenerator[FeedEvent]:
        return self._read_parts(gap.lost)

    async def _read_parts(self, parts: Mapping[StreamId, StreamSlice]) -> AsyncGenerator[FeedEvent]:
        for stream, part in parts.items():
            after = part.after
            while after < part.through:
                page = await self._store.read(stream, after, min(PAGE, part.through - after))
                for stored in page:
                    yield await self.name_event(stored)
                after = page[-1].seq if page else part.through

    async def name_all(self, events: Sequence[Stored]) -> list[FeedEvent]:
        """Names each event; the names of most depend on nothing else."""
        return [
            await self.name_event(stored) if type(stored.event) in _RENAMED else FeedEvent(stored.kind, stored)
            for stored in events
        ]

    async def name_event(self, stored: Stored) -> FeedEvent:
        """Names an event, which may depend on its session."""
        if type(stored.event) not in _RENAMED:
            return FeedEvent(stored.kind, stored)
        session = session_of(stored.stream)
        autonomous = session is not None and await self._is_autonomous(session)
        return FeedEvent(name_feed_event(stored.event, autonomous=autonomous), stored)

    async def _is_autonomous(self, session: str) -> bool:
        """Whether a session is autonomous. Its inbox may exist before it starts."""
        if session in self._autonomous:
            return self._autonomous[session]
        rows = await self._store.ask(Query("session", SessionRow, {"session": session}))
        if not rows or not rows[0].started_at:
            return False
        self.remember_session(rows[0])
        return self._autonomous[session]

    def remember_session(self, row: SessionRow) -> None:
        """Keep of what kind a session is, which never changes once it has started."""
        if row.started_at:
            if len(self._autonomous) >= KINDS_KEPT:
                self._autonomous.clear()
            self._autonomous[row.session] = row.kind == "autonomous"


class _LiveUpdates:
    """The live updates that wait for one listener. When there are too many, the oldest are dropped and counted."""

    def __init__(self, limit: int) -> None:
        self.has_updates = asyncio.Event()
        self._waiting: deque[LiveUpdate] = deque()
        self._limit = limit
        self._dropped_count = 0

    def add(self, pulse: LiveUpdate) -> None:
        self._waiting.append(pulse)
        if len(self._waiting) > self._limit:
            self._waiting.popleft()
            self._dropped_count += 1
        self.has_updates.set()

    def drain(self) -> tuple[Sequence[LiveUpdate], int]:
        """Returns all that wait, and how many were dropped."""
        taken, lost = tuple(self._waiting), self._dropped_count
        self._waiting.clear()
        self._dropped_count = 0
        self.has_updates.clear()
        return taken, lost


async def _merge_wakeups(changes: AsyncGenerator[Change], pulses: _LiveUpdates) -> AsyncGenerator[Change | None]:
    """Yields each change, and None when live updates wait."""
    hint = asyncio.ensure_future(anext(changes))
    beat = asyncio.ensure_future(pulses.has_updates.wait())
    try:
        while True:
            await asyncio.wait({hint, beat}, return_when=asyncio.FIRST_COMPLETED)
            if hint.done():
                change = hint.result()
                hint = asyncio.ensure_future(anext(changes))
                yield change
            if beat.done():
                yield None
                beat = asyncio.ensure_future(pulses.has_updates.wait())
    finally:
        await cancel_and_wait(hint, beat)
        await changes.aclose()


class CommitObserver:
    """Observes what this process commits. Each worker shows and traces its own events."""

    every_seconds = 3600.0

    def __init__(self, loop: asyncio.AbstractEventLoop, wanted: Callable[[StreamId], bool]) -> None:
        self._loop = loop
        self._wanted = wanted
        self._waiting: deque[Stored] = deque(maxlen=MAX_PENDING_ITEMS)
        self._came = asyncio.Event()
        self._is_closed = False

    def close(self) -> None:
        """Ends the reader once it has read what was committed so far."""
        self._is_closed = True
        self._came.set()

    def on_commit(self, events: Sequence[Stored]) -> None:
        """Called in any thread after a commit; drops the oldest when the reader is too slow."""
        self._waiting.extend(stored for stored in events if self._wanted(stored.stream))
        with suppress(RuntimeError):
            # The loop may be gone by now.
            self._loop.call_soon_threadsafe(self._came.set)

    def flush(self) -> None:
        """No-op."""

    async def batches(self) -> AsyncGenerator[Sequence[Stored]]:
        """Yields what was committed since the last time."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                # Another thread may add some meanwhile.
                yield [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            if self._is_closed:
                return


def serialize_event(stored: Stored, **head: Any) -> dict[str, Any]:
    body = stored.body
    return {
        **head,
        "stream": stored.stream,
        "seq": stored.seq,
        "kind": stored.kind,
        "version": stored.version,
        "at": stored.at,
        "generation": stored.generation,
        "facts": msgspec.Raw(stored.facts),
        "body": None if body is None else clean(from_body(body)),
        "blob": stored.blob,
        "erased": stored.erased,
        "hash": stored.hash.hex(),
    }


def serialize_feed_item(item: FeedItem) -> Mapping[str, Any]:
    match item:
        case FeedEvent():
            return serialize_event(item.stored, name=item.name)
        case LiveUpdate():
            return msgspec.structs.asdict(item)
        case FeedGap():
            return {"name": "gap", **msgspec.structs.asdict(item)}
