"""What this process commits, for somebody beside it who looks at one event after the other."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from halter.app.bus import MOST
from halter.core.ids import StreamId
from halter.core.ports import Stored


class Committed:
    """Observes a store. What others commit is theirs to look at: so of many workers, each shows and traces its own."""

    every_seconds = 3600.0

    def __init__(self, loop: asyncio.AbstractEventLoop, wanted: Callable[[StreamId], bool]) -> None:
        self._loop = loop
        self._wanted = wanted
        self._waiting: deque[Stored] = deque(maxlen=MOST)
        self._came = asyncio.Event()

    def saw(self, events: Sequence[Stored]) -> None:
        """Take note, in whatever thread; where nobody keeps up, the oldest are not looked at."""
        self._waiting.extend(stored for stored in events if self._wanted(stored.stream))
        with suppress(RuntimeError):
            # The loop may be gone by now.
            self._loop.call_soon_threadsafe(self._came.set)

    def flush(self) -> None:
        """Put nothing off."""

    async def each(self) -> AsyncGenerator[Stored]:
        """Give one after the other, as they come."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                yield self._waiting.popleft()
