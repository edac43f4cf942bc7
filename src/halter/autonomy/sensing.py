"""Keeps one sensor running, whatever its source does, and says how it does.

After a failure it waits, each time longer; what comes faster than it is taken in is dropped, and counted.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec

from msgspec.structs import replace

from halter.brain.together import demand_wanted
from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.errors import HalterError
from halter.core.sensing import LARGEST_READING, Health, HealthReport, Reading, Sensor
from halter.core.text import clean, shorten

FLOOR: Final = SECOND
CAP: Final = 5 * MINUTE
QUIET: Final = 10 * SECOND
"""After a change of health was told, the next is told so much later: one that flaps floods no journal."""
MOST_READINGS: Final = 100
MOST_BYTES: Final = 4 * LARGEST_READING
"""What may wait to be looked at."""
_LONGEST_SENTENCE: Final = 10_000
"""Whoever is told of it shortens it further, once no secret can be cut in two any more."""

P = ParamSpec("P")
Take = Callable[[Reading], Awaitable[None]]
Changed = Callable[[HealthReport], Awaitable[None]]


def back_off(failures: int, chance: random.Random) -> int:
    """Say how long a source is left alone after so many failures in a row; after none, that is the floor."""
    longest = min(CAP, FLOOR << min(failures, 20))
    shortest = max(FLOOR, longest // 2)
    return shortest + round(chance.random() * (longest - shortest))


def pause(failures: int, retry_after: int | None, chance: random.Random) -> int:
    """Say how long to wait, for a source that may itself have asked for some time."""
    return max(back_off(failures, chance), min(retry_after or 0, CAP))


class Buffer:
    """Readings that wait to be looked at. Where there are too many the oldest go, and are counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: deque[Reading] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, reading: Reading) -> None:
        """Add the newest one."""
        self._waiting.append(reading)
        self._bytes += reading.size
        while len(self._waiting) > MOST_READINGS or (self._bytes > MOST_BYTES and len(self._waiting) > 1):
            self._oldest()
            self.dropped += 1
        self._news.set()

    async def get(self) -> Reading:
        """Wait for the oldest one."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._oldest()

    def _oldest(self) -> Reading:
        reading = self._waiting.popleft()
        self._bytes -= reading.size
        return reading


class Sensing:
    """Runs one sensor. `report` says how it does now.

    `take` is given the readings, one after the other; `changed` is told when the health is another than was told last.
    A failure of either, or of the sensor, is waited out.
    """

    def __init__(self, sensor: Sensor, clock: Clock, chance: random.Random, take: Take, changed: Changed) -> None:
        self.report = HealthReport(sensor=sensor.name, since=clock.now())
        self._sensor = sensor
        self._clock = clock
        self._chance = chance
        self._take = take
        self._changed = changed
        self._buffer = Buffer()
        self._turned = asyncio.Event()
        self._not_read = 0
        self._not_taken = 0

    async def run(self) -> None:
        """Run until cancelled; nothing else ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._hand_on())
            tasks.create_task(self._tell())

    async def _read(self) -> None:
        while True:
            trouble = await _trouble(self._read_once)
            if trouble:
                self._not_read += 1
                self._fail(trouble)
            await self._clock.sleep(pause(self._not_read, self._sensor.retry_after, self._chance))

    async def _read_once(self) -> None:
        async with _closing(self._sensor.readings()) as readings:
            async for reading in readings:
                self._buffer.put(reading)
                self.report = replace(self.report, read_at=reading.at, dropped=self._buffer.dropped)
                self._not_read = 0
                self._recover()
                # A source that always has more would let nobody else run.
                await asyncio.sleep(0)

    async def _hand_on(self) -> None:
        while True:
            reading = await self._buffer.get()
            trouble = await _trouble(self._take, reading)
            if trouble:
                self._not_taken += 1
                self._fail(f"What was read was not taken in: {trouble}")
                await self._clock.sleep(back_off(self._not_taken, self._chance))
            else:
                self._not_taken = 0
                self._recover()

    async def _tell(self) -> None:
        told: Health = "starting"
        while True:
            while self.report.health == told:
                self._turned.clear()
                await self._turned.wait()
            report = self.report
            # What could not be told is told when this time is over, if it is still so.
            if not await _trouble(self._changed, report):
                told = report.health
            await self._clock.sleep(QUIET)

    def _fail(self, sentence: str) -> None:
        self._turn("failing", self.report.failures + 1, shorten(clean(sentence), _LONGEST_SENTENCE))

    def _recover(self) -> None:
        """Be well again, once the source is read and its readings are taken in."""
        if self.report.health != "ok" and not self._not_read and not self._not_taken:
            self._turn("ok", 0, "")

    def _turn(self, health: Health, failures: int, sentence: str) -> None:
        since = self.report.since if health == self.report.health else self._clock.now()
        self.report = replace(self.report, health=health, since=since, failures=failures, sentence=sentence)
        self._turned.set()


async def _trouble(act: Callable[P, Awaitable[None]], *args: P.args, **named: P.kwargs) -> str:
    """Do something, and say what went wrong with it. A cancellation that nobody asked for is trouble like any other."""
    trouble = ""
    try:
        await act(*args, **named)
    except asyncio.CancelledError:
        trouble = "It was cancelled from within."
    except HalterError as error:
        trouble = str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001, whatever a source or a taker does, the sensor goes on.
        trouble = f"It failed unexpectedly: {type(error).__name__}: {error}"
    demand_wanted()
    return trouble


@asynccontextmanager
async def _closing(readings: AsyncIterator[Reading]) -> AsyncGenerator[AsyncIterator[Reading]]:
    """Let go of a source at once, and not when somebody gets around to it."""
    try:
        yield readings
    finally:
        if isinstance(readings, AsyncGenerator):
            await readings.aclose()
