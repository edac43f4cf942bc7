"""A store for sessions that can wait: while the store is away, what could not be recorded does not run."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ports import Store
from halter.journal.relay import Relay

T = TypeVar("T")

Tell = Callable[[str], None]
"""Hears a sentence about what is wrong with the store, or nothing when it is well again."""

SHORTEST_PAUSE: Final = SECOND // 20
LONGEST_PAUSE: Final = SECOND


def nobody(_: str) -> None:
    """Do not tell."""


class Trouble:
    """What is wrong with a store, for the people who look and for whoever is to tell them. All who wait share it."""

    def __init__(self, tell: Tell = nobody) -> None:
        self.tell = tell
        self.waiting = 0
        self.problem = ""

    def know(self, problem: str) -> None:
        """Tell of something else than before."""
        if problem != self.problem:
            self.problem = problem
            self.tell(problem)

    def passed(self) -> None:
        """Something went well; where others still wait, it is not well yet for all that is asked of the store."""
        if not self.waiting:
            self.know("")


class PatientStore(Relay):
    """Repeats whatever failed because the store was away, until it is back; a cancelled task stops waiting.

    Repeating is harmless: a write that was committed without an answer answers by its key.
    """

    def __init__(self, store: Store, clock: Clock, trouble: Trouble | None = None) -> None:
        super().__init__(store)
        self._clock = clock
        self._trouble = trouble or Trouble()

    @property
    def problem(self) -> str:
        """What is wrong while somebody waits."""
        return self._trouble.problem

    async def _passed(self, use: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await use()
        except StoreUnavailable as away:
            self._trouble.know(str(away))
            answer = await self._waited(use)
        self._trouble.passed()
        return answer

    async def _waited(self, use: Callable[[], Awaitable[T]]) -> T:
        self._trouble.waiting += 1
        try:
            return await self._repeated(use)
        finally:
            self._trouble.waiting -= 1

    async def _repeated(self, use: Callable[[], Awaitable[T]]) -> T:
        pause = SHORTEST_PAUSE
        while True:
            await self._clock.sleep(pause)
            try:
                return await use()
            except StoreUnavailable as away:
                self._trouble.know(str(away))
            pause = min(2 * pause, LONGEST_PAUSE)
