"""What has changed, for pages that show it: one listener for all of them, and nobody who is waited for.

A page is told which streams grew since it last looked, never what happened there: it asks for what it shows. So a
browser that lags costs a set of names, and the agents nothing at all.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager, suppress
from typing import Final

import msgspec

from halter.app.bus import Bus, Gap, News, Pulse
from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreError
from halter.core.ids import StreamId

MOST: Final = 200
"""So many streams are named; where more have grown, everything may have."""
PACE: Final = SECOND // 4
"""A page is told no more often than this."""
AGING: Final = 5 * SECOND
"""A page is told after this time in any case: what it shows has grown older."""
AGAIN: Final = SECOND


class Grown(msgspec.Struct, frozen=True):
    """What has changed since the last time: streams, sessions with something live, or everything there is."""

    streams: frozenset[StreamId] = frozenset()
    pulses: frozenset[str] = frozenset()
    everything: bool = False

    @property
    def anything(self) -> bool:
        """Tell whether there was any news, and not only time that passed."""
        return self.written or bool(self.pulses)

    @property
    def written(self) -> bool:
        """Tell whether anything was written down, and not only read by a sensor or said."""
        return self.everything or bool(self.streams)

    def of(self, stream: StreamId) -> bool:
        """Tell whether a stream may have grown."""
        return self.everything or stream in self.streams


class Ear:
    """The news for one page, until it takes them."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._streams: set[StreamId] = set()
        self._pulses: set[str] = set()
        self._everything = False

    def hear(self, item: News | Pulse | Gap) -> None:
        """Note what an item is about. It never waits, and keeps little."""
        match item:
            case News():
                self._streams.add(item.stored.stream)
            case Pulse():
                self._pulses.add(item.session)
            case Gap():
                self._everything = True
        if self._everything or len(self._streams) + len(self._pulses) > MOST:
            self.hear_everything()
        self.news.set()

    def hear_everything(self) -> None:
        """Note that anything may have changed."""
        self._streams.clear()
        self._pulses.clear()
        self._everything = True
        self.news.set()

    def take(self) -> Grown:
        """Take what there is."""
        grown = Grown(frozenset(self._streams), frozenset(self._pulses), self._everything)
        self._streams.clear()
        self._pulses.clear()
        self._everything = False
        self.news.clear()
        return grown


class Live:
    """Listens to the bus for as long as there is a page that wants to know."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._ears: set[Ear] = set()
        self._listening: asyncio.Task[None] | None = None

    @property
    def pages(self) -> int:
        """How many pages listen."""
        return len(self._ears)

    @contextmanager
    def ear(self) -> Generator[Ear]:
        """Listen for one page. The first one begins to listen to the bus, and the last one ends it."""
        ear = Ear()
        self._ears.add(ear)
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen(), name="halter-dashboard")
        try:
            yield ear
        finally:
            self._ears.discard(ear)
            self._rest()

    def _rest(self) -> None:
        """Stop listening where nobody is left who wants to know."""
        if self._listening is not None and not self._ears:
            self._listening.cancel()
            self._listening = None

    async def grown(self) -> AsyncGenerator[Grown]:
        """Tell a page what changed: at once, then at most every `PACE`, and at least every `AGING`."""
        with self.ear() as ear:
            ear.news.set()
            while True:
                await self._news(ear)
                yield ear.take()
                await self._clock.sleep(PACE)

    async def _news(self, ear: Ear) -> None:
        """Wait for news, or until what is shown has grown old."""
        aging = asyncio.ensure_future(self._clock.sleep(AGING))
        heard = asyncio.ensure_future(ear.news.wait())
        try:
            await asyncio.wait({aging, heard}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (aging, heard):
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting

    async def _listen(self) -> None:
        """Hand on what the bus tells. While the store is away it is tried again, and then anything may be new."""
        while True:
            try:
                async with aclosing(self._bus.listen()) as items:
                    async for item in items:
                        for ear in self._ears:
                            ear.hear(item)
            except StoreError:
                await self._clock.sleep(AGAIN)
            for ear in self._ears:
                ear.hear_everything()
