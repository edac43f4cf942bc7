"""A sensor that looks again and again."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from halter.core import pacing
from halter.core.clock import SECOND, Clock
from halter.core.sensing import Reading, Sensor, SensorFailed
from halter.sensors.values import reading

Look = Callable[[], Awaitable[Any]]
"""Gives a JSON value, or raises SensorFailed."""

SHORTEST: Final = SECOND // 10
"""Nobody is asked more often than this, whatever a file says."""


def poll(spec: pacing.Sensor, look: Look, clock: Clock, chance: random.Random) -> Sensor:
    """Make a sensor that looks at once and then every interval, with a little chance added."""
    return _Poll(spec, look, clock, chance)


class _Poll:
    def __init__(self, spec: pacing.Sensor, look: Look, clock: Clock, chance: random.Random) -> None:
        self.name = spec.name
        self.retry_after: int | None = None
        self._spec = spec
        self._look = look
        self._clock = clock
        self._chance = chance

    async def readings(self) -> AsyncGenerator[Reading]:
        """Look until cancelled."""
        while True:
            began = self._clock.now()
            value = await self._looked()
            now = self._clock.now()
            yield reading(value, now)
            await self._clock.sleep(rest(self._period(), self._clock.now() - began))

    async def _looked(self) -> Any:
        try:
            async with asyncio.timeout(self._spec.timeout / SECOND):
                return await self._look()
        except TimeoutError:
            raise SensorFailed(f"There was no answer within {self._spec.timeout / SECOND:g} s.") from None

    def _period(self) -> int:
        interval = max(self._spec.interval, SHORTEST)
        return interval + round(self._chance.random() * self._spec.jitter * interval)


def rest(period: int, elapsed: int) -> int:
    """Say how long it is until the next look, so long after the beginning of the last one.

    What was missed meanwhile is not made up for. It is never more than a period, nor nothing, whatever the clock did.
    """
    return period - elapsed % period
