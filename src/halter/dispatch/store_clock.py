"""The store's time between two answers, and clocks that a person cannot set."""

import asyncio
import time
from time import clock_gettime_ns
from typing import Final

from halter.core.clock import SECOND, format_duration
from halter.dispatch.heartbeat import MAX_CLOCK_SKEW

_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_steady_clock() -> int:
    """Read a clock that keeps running while the machine sleeps and cannot be set."""
    return clock_gettime_ns(_STEADY_CLOCK) // 1000


def read_wall_clock() -> int:
    return time.time_ns() // 1000


class StoreClock:
    """A clock that follows the store's time: its last answer plus the time since then.

    Until the first answer, it shows this machine's time.
    """

    def __init__(self) -> None:
        self._ahead = read_wall_clock() - read_steady_clock()
        self._unsure = 0

    def now(self) -> int:
        return clock_gettime_ns(_STEADY_CLOCK) // 1000 + self._ahead

    def monotonic(self) -> int:
        return time.monotonic_ns() // 1000

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND)

    def set_time(self, sent_at: int, store_time: int, received_at: int) -> None:
        """Set the store's time, which was read between two moments of the steady clock."""
        self._unsure = (received_at - sent_at) // 2
        self._ahead = store_time - sent_at - self._unsure

    def refusal(self) -> str:
        """Describe a clock skew that is too large; "" if there is none. A slow answer proves no skew."""
        ahead = read_wall_clock() - self.now()
        if abs(ahead) <= MAX_CLOCK_SKEW + self._unsure:
            return ""
        return (
            f"This machine's clock is {format_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "database's; the maximum is 2 s. No session runs here until the clock is correct. Set it, for example with "
            "`timedatectl set-ntp true`, and restart."
        )
