"""Stand-ins for time and chance that a test decides over; each keeps the promises of the real one."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable

from halter.core.ids import SortableIds


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, now: int = 0) -> None:
        self._now = now
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> int:
        """Return the time in microseconds."""
        return self._now

    async def sleep(self, duration: int) -> None:
        """Wait until the clock has been put forward by so many microseconds."""
        if duration <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + duration, next(self._numbers), woken))
        await woken

    def advance(self, duration: int) -> None:
        """Put the clock forward; whoever slept until then is woken, the earliest first."""
        self._now += duration
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)


class SeededIds(SortableIds):
    """Identifiers as the real ones, but the same for the same seed and the same times."""

    def __init__(self, seed: int | str, now: Callable[[], int]) -> None:
        super().__init__(now, random.Random(seed).getrandbits)


def seeded_salts(seed: int | str) -> Callable[[int], bytes]:
    """Return a source of salts, the same for the same seed: what is written twice has the same hashes twice."""
    return random.Random(seed).randbytes
