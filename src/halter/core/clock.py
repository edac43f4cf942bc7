"""Time is a parameter: integers of microseconds since 1970, in UTC."""

import asyncio
import time
from typing import Protocol

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Clock(Protocol):
    """What tells the time and lets it pass."""

    def now(self) -> int:
        """Return the time in microseconds."""
        ...

    async def sleep(self, duration: int) -> None:
        """Let that many microseconds pass."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> int:
        """Return the machine's time in microseconds."""
        return time.time_ns() // 1000

    async def sleep(self, duration: int) -> None:
        """Sleep for real, or in a loop with virtual time, virtually."""
        await asyncio.sleep(duration / SECOND)
