"""Following streams as they grow, in this process and in others."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final

from halter.core.clock import SECOND, Clock
from halter.core.ids import StreamId
from halter.core.ports import EVERY_STREAM, Change, Query, Store, Stored
from halter.core.rows import StreamRow

POLL: Final = 5 * SECOND
"""How often everything is looked at: hints come at once, but may be lost."""

PAGE: Final = 1000

EVERYTHING: Final = Change(EVERY_STREAM, 0)


async def growing(store: Store, clock: Clock) -> AsyncGenerator[Change]:
    """Tell to look at everything, then what may have grown since, and from time to time to look at everything again."""
    hints = store.changes()
    hint = asyncio.ensure_future(anext(hints))
    poll = asyncio.ensure_future(clock.sleep(0))
    try:
        while True:
            await asyncio.wait({hint, poll}, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                poll = asyncio.ensure_future(clock.sleep(POLL))
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
        return await heads(self._store) if self._only is None else await self._lengths(self._only)

    async def _lengths(self, streams: Iterable[StreamId]) -> list[tuple[StreamId, int]]:
        found: list[tuple[StreamId, int]] = []
        for stream in streams:
            rows = await self._store.ask(Query("head", StreamRow, {"stream": stream}))
            found += [(StreamId(row.stream), row.head) for row in rows]
        return found


async def heads(store: Store) -> list[tuple[StreamId, int]]:
    """Tell how long every stream is."""
    return [(StreamId(row.stream), row.head) for row in await store.ask(Query("heads", StreamRow))]
