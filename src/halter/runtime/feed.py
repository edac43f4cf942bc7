"""The feed of a fleet: durable events and live updates.

Events are read from the journal at the listener's own pace, and resumed by stream and sequence number. Live updates
(streamed text, sensor readings) are not stored. The feed does not wait for a slow listener: the listener gets a gap and
continues with the newest items. It can read missed events again, but not missed live updates.
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
from halter.core.ids import StreamId, parse_session_id
from halter.core.ports import ALL_STREAMS, Change, Query, Store, Stored
from halter.core.rows import SessionRow, StreamRow
from halter.core.text import clean, decode_body
from halter.loop.concurrency import cancel_and_wait

POLLING_INTERVAL: Final = 5 * SECOND
"""Polling interval for all streams: hints arrive immediately but may be lost."""

PAGE: Final = 1000

EVERYTHING: Final = Change(ALL_STREAMS, 0)


async def watch_growth(store: Store, clock: Clock) -> AsyncGenerator[Change]:
    """Yield EVERYTHING, then a hint for each stream that grows, and EVERYTHING again at intervals."""
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
    """The number of streams, their total length and the time of the newest event."""

    streams: int
    length: int
    at: int


class Follower:
    """Reads the new events of some streams. `positions` is the sequence number up to which each was read.

    With `only`, it looks up those streams by name instead of listing all streams.
    """

    def __init__(
        self,
        store: Store,
        positions: Mapping[StreamId, int],
        only: Collection[StreamId] | None = None,
        includes_stream: Callable[[StreamId], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self.positions = dict(positions)
        self._only = only
        self._includes_stream = includes_stream
        self._quiet_at: _Extent | None = None

    async def follow_change(self, change: Change = EVERYTHING) -> AsyncGenerator[Sequence[Stored]]:
        """Yield new events in pages of one stream each. A page counts as read when the caller asks for the next one."""
        for stream in await self.find_grown(change):
            while page := await self._store.read(stream, self._get_position(stream), PAGE):
                yield page
                self.positions[stream] = page[-1].seq

    async def read_new(self, change: Change = EVERYTHING) -> list[Stored]:
        """Return new events, oldest first."""
        async with aclosing(self.follow_change(change)) as pages:
            events = [stored async for page in pages for stored in page]
        return sorted(events, key=lambda stored: stored.at)

    async def find_grown(self, change: Change = EVERYTHING) -> Mapping[StreamId, int]:
        """Return the streams that have grown beyond their position, with their length."""
        if change.stream != ALL_STREAMS:
            has_grown = self._is_followed(change.stream) and change.head > self._get_position(change.stream)
            return dict(await self._lengths([change.stream])) if has_grown else {}
        extent = await self._measure()
        if extent is not None and extent == self._quiet_at:
            return {}
        heads = {stream: head for stream, head in await self._heads() if self._is_followed(stream)}
        for stream, head in heads.items():
            if head < self._get_position(stream):
                # The store was restored to an earlier state: reading again is better than missing events.
                self.positions[stream] = 0
        growth = {stream: head for stream, head in heads.items() if head > self._get_position(stream)}
        self._quiet_at = None if growth else extent
        return growth

    async def _measure(self) -> "_Extent | None":
        """Measure all streams in one query: while the result stays the same, nothing is new. None with `only`."""
        if self._only is not None:
            return None
        return next(iter(await self._store.ask(Query("extent", _Extent))), None)

    def _is_followed(self, stream: StreamId) -> bool:
        return self._includes_stream(stream) and (self._only is None or stream in self._only)

    def _get_position(self, stream: StreamId) -> int:
        return self.positions.get(stream, 0)

    async def _heads(self) -> list[tuple[StreamId, int]]:
        return await read_stream_heads(self._store) if self._only is None else await self._lengths(self._only)

    async def _lengths(self, streams: Iterable[StreamId]) -> list[tuple[StreamId, int]]:
        heads: list[tuple[StreamId, int]] = []
        for stream in streams:
            rows = await self._store.ask(Query("head", StreamRow, {"stream": stream}))
            heads += [(StreamId(row.stream), row.head) for row in rows]
        return heads


async def read_stream_heads(store: Store) -> list[tuple[StreamId, int]]:
    return [(StreamId(row.stream), row.head) for row in await store.ask(Query("heads", StreamRow))]


MAX_PENDING_ITEMS: Final = 1000
"""Maximum number of events, and of live updates, that wait for a listener."""
MAX_BATCH: Final = 64
"""Maximum number of its own events that a process reads in one batch."""
MAX_REMEMBERED_KINDS: Final = 10_000


class FeedEvent(msgspec.Struct, frozen=True):
    """An event under its name in the feed."""

    name: str
    stored: Stored


class LiveUpdate(msgspec.Struct, frozen=True):
    """Something that happens in a session now and is not stored."""

    name: str
    session: str
    at: int
    values: Mapping[str, Any]


class StreamSlice(msgspec.Struct, frozen=True):
    """The part of a stream after `after`, up to and including `through`."""

    after: int
    through: int


class FeedGap(msgspec.Struct, frozen=True):
    """A count of the events and live updates that a slow listener missed. `lost` says where the events are."""

    events: int = 0
    pulses: int = 0
    lost: Mapping[StreamId, StreamSlice] = {}


FeedItem = FeedEvent | LiveUpdate | FeedGap


_RENAMED: Final = frozenset((TurnStarted, TurnEnded, TurnSkipped, GuardrailTriggered, SensorChanged, WakePosted))
"""Events that may have another name in an autonomous session."""


def name_feed_event(event: AnyEvent | Unknown, *, autonomous: bool) -> str:
    """Return the name of an event: its kind, or a special name in an autonomous session."""
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
        """Send a live update to all listeners. Never blocks."""
        update = LiveUpdate(name, session, self._clock.now(), values)
        for listener in self._listening:
            listener.add(update)

    async def listen(
        self,
        positions: Mapping[StreamId, int] | None = None,
        includes_stream: Callable[[StreamId], bool] = lambda _: True,
        limit: int = MAX_PENDING_ITEMS,
    ) -> AsyncGenerator[FeedItem]:
        """Yield the items of the wanted streams: from now on, or from the given positions.

        With `positions`, all events since then come first. A stream without a position is read from its beginning.
        """
        follower = Follower(
            self._store,
            dict(await read_stream_heads(self._store)) if positions is None else positions,
            includes_stream=includes_stream,
        )
        updates = _LiveUpdates(limit)
        self._listening.add(updates)
        try:
            async with aclosing(follower.follow_change()) as pages:
                async for page in pages:
                    for stored in page:
                        yield await self.name_event(stored)
            async with aclosing(_merge_wakeups(watch_growth(self._store, self._clock), updates)) as wakes:
                async for change in wakes:
                    async with aclosing(self._items(follower, updates, change, limit)) as items:
                        async for item in items:
                            yield item
        finally:
            self._listening.discard(updates)

    async def _items(
        self, follower: Follower, updates: "_LiveUpdates", change: Change | None, limit: int
    ) -> AsyncGenerator[FeedItem]:
        """Yield the new items, or a gap if there are more than `limit`."""
        growth: Mapping[StreamId, int] = {} if change is None else await follower.find_grown(change)
        updates_to_yield, dropped_update_count = updates.drain()
        new_slices = {stream: StreamSlice(follower.positions.get(stream, 0), head) for stream, head in growth.items()}
        count = sum(stream_slice.through - stream_slice.after for stream_slice in new_slices.values())
        slices, dropped_slices, events = ({}, new_slices, count) if count > limit else (new_slices, {}, 0)
        follower.positions.update(growth if dropped_slices else {})
        if dropped_slices or dropped_update_count:
            yield FeedGap(events, dropped_update_count, dropped_slices)
        streams = [
            [event async for event in self._read_parts({stream: stream_slice})]
            for stream, stream_slice in slices.items()
        ]
        for event in merge(*streams, key=lambda event: event.stored.at):
            follower.positions[event.stored.stream] = event.stored.seq
            yield event
        for update in updates_to_yield:
            yield update

    def read_missed(self, gap: FeedGap) -> AsyncGenerator[FeedEvent]:
        return self._read_parts(gap.lost)

    async def _read_parts(self, slices: Mapping[StreamId, StreamSlice]) -> AsyncGenerator[FeedEvent]:
        for stream, stream_slice in slices.items():
            position = stream_slice.after
            while position < stream_slice.through:
                page = await self._store.read(stream, position, min(PAGE, stream_slice.through - position))
                for stored in page:
                    yield await self.name_event(stored)
                position = page[-1].seq if page else stream_slice.through

    async def name_all(self, events: Sequence[Stored]) -> list[FeedEvent]:
        """Return each event with its name."""
        return [
            await self.name_event(stored) if type(stored.event) in _RENAMED else FeedEvent(stored.kind, stored)
            for stored in events
        ]

    async def name_event(self, stored: Stored) -> FeedEvent:
        """Return an event with its name, which may depend on its session."""
        if type(stored.event) not in _RENAMED:
            return FeedEvent(stored.kind, stored)
        session = parse_session_id(stored.stream)
        autonomous = session is not None and await self._is_autonomous(session)
        return FeedEvent(name_feed_event(stored.event, autonomous=autonomous), stored)

    async def _is_autonomous(self, session: str) -> bool:
        """Return true if a session is autonomous. Its inbox may exist before it starts."""
        if session in self._autonomous:
            return self._autonomous[session]
        rows = await self._store.ask(Query("session", SessionRow, {"session": session}))
        if not rows or not rows[0].started_at:
            return False
        self.remember_session(rows[0])
        return self._autonomous[session]

    def remember_session(self, row: SessionRow) -> None:
        """Remember the kind of a session, which never changes after its start."""
        if row.started_at:
            if len(self._autonomous) >= MAX_REMEMBERED_KINDS:
                self._autonomous.clear()
            self._autonomous[row.session] = row.kind == "autonomous"


class _LiveUpdates:
    """The live updates that wait for one listener. Above the limit, the oldest are dropped and counted."""

    def __init__(self, limit: int) -> None:
        self.has_updates = asyncio.Event()
        self._waiting: deque[LiveUpdate] = deque()
        self._limit = limit
        self._dropped_count = 0

    def add(self, update: LiveUpdate) -> None:
        self._waiting.append(update)
        if len(self._waiting) > self._limit:
            self._waiting.popleft()
            self._dropped_count += 1
        self.has_updates.set()

    def drain(self) -> tuple[Sequence[LiveUpdate], int]:
        """Remove and return all waiting updates, and the number of dropped ones."""
        updates, dropped_count = tuple(self._waiting), self._dropped_count
        self._waiting.clear()
        self._dropped_count = 0
        self.has_updates.clear()
        return updates, dropped_count


async def _merge_wakeups(changes: AsyncGenerator[Change], updates: _LiveUpdates) -> AsyncGenerator[Change | None]:
    """Yield each change, and None when live updates wait."""
    hint = asyncio.ensure_future(anext(changes))
    ready = asyncio.ensure_future(updates.has_updates.wait())
    try:
        while True:
            await asyncio.wait({hint, ready}, return_when=asyncio.FIRST_COMPLETED)
            if hint.done():
                change = hint.result()
                hint = asyncio.ensure_future(anext(changes))
                yield change
            if ready.done():
                yield None
                ready = asyncio.ensure_future(updates.has_updates.wait())
    finally:
        await cancel_and_wait(hint, ready)
        await changes.aclose()


class CommitObserver:
    """Observes the commits of this process. Each worker shows and traces its own events."""

    interval_seconds = 3600.0

    def __init__(self, loop: asyncio.AbstractEventLoop, includes_stream: Callable[[StreamId], bool]) -> None:
        self._loop = loop
        self._includes_stream = includes_stream
        self._waiting: deque[Stored] = deque(maxlen=MAX_PENDING_ITEMS)
        self._came = asyncio.Event()
        self._is_closed = False

    def close(self) -> None:
        """End the reader after it has read everything committed so far."""
        self._is_closed = True
        self._came.set()

    def on_commit(self, events: Sequence[Stored]) -> None:
        """Queue committed events, in any thread. Drops the oldest when the reader is too slow."""
        self._waiting.extend(stored for stored in events if self._includes_stream(stored.stream))
        with suppress(RuntimeError):
            # The loop may already be closed.
            self._loop.call_soon_threadsafe(self._came.set)

    def flush(self) -> None:
        """No-op."""

    async def batches(self) -> AsyncGenerator[Sequence[Stored]]:
        """Yield batches of newly committed events until closed."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                # Another thread may add events at the same time.
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
        "body": None if body is None else clean(decode_body(body)),
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
