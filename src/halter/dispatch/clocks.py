"""The store's time: all workers follow it, and one whose own clock tells another time works on nothing."""

import asyncio
import time

from halter.core.clock import SECOND
from halter.core.durations import shown_duration

MOST_APART = 2 * SECOND
"""How far a machine's clock may be from the store's."""


def steady() -> int:
    """Tell a time that goes on while the machine sleeps, and that nobody can set."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1000


def wall() -> int:
    """Tell the time that this machine's clock shows."""
    return time.time_ns() // 1000


class StoreTime:
    """A clock that shows the store's time: what it last told, and what has passed since.

    Until it has told anything, this machine's clock is believed.
    """

    def __init__(self) -> None:
        self._ahead = wall() - steady()
        self._unsure = 0

    def now(self) -> int:
        """Return the store's time in microseconds."""
        return steady() + self._ahead

    async def sleep(self, duration: int) -> None:
        """Let that many microseconds pass."""
        await asyncio.sleep(duration / SECOND)

    def heard(self, before: int, at: int, after: int) -> None:
        """Learn the store's time, which it told between two moments of the steady clock."""
        self._unsure = (after - before) // 2
        self._ahead = at - before - self._unsure

    def refusal(self) -> str:
        """Say why nothing may run on this machine, or nothing if all is well. A slow answer proves nothing."""
        ahead = wall() - self.now()
        if abs(ahead) <= MOST_APART + self._unsure:
            return ""
        return (
            f"This machine's clock is {shown_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "database's, and at most 2 s are borne. Nothing runs here until it is right: set it (for example with "
            "`timedatectl set-ntp true`), and start again."
        )
