"""The news of a fleet for many at once: read once, written once, and kept for a while for whoever is slower.

Each who listens has a place in one row of news, and nothing else: somebody who stalls costs nothing and slows nobody.
Whoever comes back to find that the row has gone on without them is told of a gap, and goes on with what is there.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from itertools import islice
from typing import Final

import msgspec

from halter.app.bus import Bus, Gap, Item, News, Part, Pulse
from halter.app.follow import heads
from halter.app.objects import item_object
from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreError
from halter.core.ids import Ids, StreamId, session_of
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.journal.store import JournalStore

MOST: Final = 5000
MOST_BYTES: Final = 32 * 1024 * 1024
TRAIL: Final = 20_000
"""Of so many older ones it is still known where they stand in the journal."""
PAGE: Final = 100
PAUSE: Final = SECOND
AGENTS_KEPT: Final = 10_000
OLD: Final = -1
"""The number of what was read again, and has no place in the row."""


class Told(msgspec.Struct, frozen=True):
    """A piece of news, ready to be sent; `seq` is 0 where it is no event; `number` is its place in the row."""

    number: int
    name: str
    kind: str
    stream: str
    seq: int
    session: str
    agent: str
    text: str


Wants = Callable[[Told], bool]


class Feed:
    """The row of news of one process."""

    def __init__(
        self, store: JournalStore, clock: Clock, ids: Ids, bus: Bus, most: int = MOST, trail: int = TRAIL
    ) -> None:
        self.name = ids.new()
        self.bus = bus
        self.store = store.patient(clock)
        self.ready = asyncio.Event()
        self._clock = clock
        self._seen: dict[StreamId, int] = {}
        self._most = most
        self._row: deque[Told] = deque()
        self._bytes = 0
        self._trail: deque[Told] = deque(maxlen=trail)
        self._next = 1
        self._more = asyncio.Event()
        self._agents: dict[str, str] = {}

    @property
    def next(self) -> int:
        """The number that the next piece of news will have."""
        return self._next

    async def run(self) -> None:
        """Read on until cancelled. While the store cannot be used nothing is heard; afterwards nothing was missed."""
        while True:
            try:
                if not self.ready.is_set():
                    self._seen = dict(await heads(self.store))
                    self.ready.set()
                async with aclosing(self.bus.listen(self._seen)) as items:
                    async for item in items:
                        await self._take(item)
            except StoreError:
                await self._clock.sleep(PAUSE)

    async def _take(self, item: Item) -> None:
        """Add a piece of news; what came too fast even for this reader is read again."""
        if not isinstance(item, Gap):
            self._add(await self.told(item))
            return
        async for news in self.bus.missed(item):
            self._add(await self.told(news))

    async def told(self, item: News | Pulse) -> Told:
        """Write a piece of news, with whose it is."""
        match item:
            case News(name, stored):
                kind, stream, seq = stored.kind, stored.stream, stored.seq
                session = session_of(stored.stream) or ""
            case Pulse(name, session):
                kind, stream, seq = name, "", 0
        text = msgspec.json.encode(item_object(item)).decode()
        return Told(OLD, name, kind, stream, seq, session, await self._agent(stream, session), text)

    async def _agent(self, stream: str, session: str) -> str:
        """Tell whose a stream is. An inbox may have been written to before its session began."""
        if stream.startswith("trigger:"):
            return stream.removeprefix("trigger:").partition("/")[0]
        if not session or session in self._agents:
            return self._agents.get(session, "")
        rows = await self.store.ask(Query("session", SessionRow, {"session": session}))
        if not rows or not rows[0].started_at:
            return ""
        if len(self._agents) >= AGENTS_KEPT:
            self._agents.clear()
        self._agents[session] = rows[0].agent
        return self._agents[session]

    def _add(self, told: Told) -> None:
        told = msgspec.structs.replace(told, number=self._next)
        self._next += 1
        self._row.append(told)
        if told.seq:
            self._seen[StreamId(told.stream)] = told.seq
        self._bytes += len(told.text)
        while len(self._row) > self._most or self._bytes > MOST_BYTES:
            gone = self._row.popleft()
            self._bytes -= len(gone.text)
            self._trail.append(msgspec.structs.replace(gone, text=""))
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, number: int, wants: Wants) -> AsyncGenerator[Told | Gap]:
        """Give what is wanted from a place on, as it comes; and say what was passed over."""
        while True:
            first = self._row[0].number if self._row else self._next
            if number < first:
                yield self._gap(number, wants)
                number = first
            # What comes while somebody takes this is looked for anew: the row may have gone on without them.
            for told in self._some(number, first):
                if self._row and told.number < self._row[0].number:
                    break
                number = told.number + 1
                if wants(told):
                    yield told
            else:
                if number >= self._next:
                    await self._more.wait()

    def _some(self, number: int, first: int) -> list[Told]:
        return list(islice(self._row, number - first, number - first + PAGE))

    def _gap(self, number: int, wants: Wants) -> Gap:
        """Say what was passed over, as far as that is still known."""
        gone = [told for told in self._trail if told.number >= number and wants(told)]
        events = [told for told in gone if told.seq]
        return Gap(len(events), len(gone) - len(events), parts(events))


def parts(events: Iterable[Told]) -> Mapping[StreamId, Part]:
    """Say where events stand in the journal: of each stream, what follows a number, up to another."""
    found: dict[StreamId, Part] = {}
    for told in events:
        stream = StreamId(told.stream)
        before = found.get(stream)
        after = told.seq - 1 if before is None else min(before.after, told.seq - 1)
        found[stream] = Part(after, told.seq if before is None else max(before.through, told.seq))
    return found
