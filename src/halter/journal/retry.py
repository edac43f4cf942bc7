"""Retry for sessions that can wait: while the store is unavailable, what could not be recorded does not run."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable

T = TypeVar("T")

Tell = Callable[[str], None]
"""Hears a sentence about what is wrong with the store, or an empty one when it is available again."""

SHORTEST_PAUSE: Final = SECOND // 20
LONGEST_PAUSE: Final = SECOND


def untold(_: str) -> None:
    """Ignore what is wrong."""


class Trouble:
    """What is wrong with a store. All stores of a process that retry share it."""

    def __init__(self, tell: Tell = untold) -> None:
        self.tell = tell
        self.waiting = 0
        self.problem = ""

    def know(self, problem: str) -> None:
        """Tell of a problem that differs from the last one."""
        if problem != self.problem:
            self.problem = problem
            self.tell(problem)

    def passed(self) -> None:
        """Clear the problem after a success, unless other calls still wait for the store."""
        if not self.waiting:
            self.know("")


class Retry:
    """Repeats a call that failed because the store was unavailable, until it succeeds or its task is cancelled.

    Repeating is harmless: a write that was committed without an answer answers by its key.
    """

    def __init__(self, clock: Clock, trouble: Trouble) -> None:
        self._clock = clock
        self.trouble = trouble

    async def repeat(self, use: Callable[[], Awaitable[T]], away: StoreUnavailable) -> T:
        """Repeat a call that has just failed, with longer and longer pauses."""
        self.trouble.know(str(away))
        self.trouble.waiting += 1
        try:
            answer = await self._repeated(use)
        finally:
            self.trouble.waiting -= 1
        self.trouble.passed()
        return answer

    async def _repeated(self, use: Callable[[], Awaitable[T]]) -> T:
        pause = SHORTEST_PAUSE
        while True:
            await self._clock.sleep(pause)
            try:
                return await use()
            except StoreUnavailable as away:
                self.trouble.know(str(away))
            pause = min(2 * pause, LONGEST_PAUSE)
