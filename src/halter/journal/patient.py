"""A store for sessions that can wait: while the store is away, what could not be recorded does not run."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ports import Store
from halter.journal.relay import Relay

T = TypeVar("T")

SHORTEST_PAUSE: Final = SECOND // 20
LONGEST_PAUSE: Final = 5 * SECOND


class PatientStore(Relay):
    """Repeats whatever failed because the store was away, until it is back; a cancelled task stops waiting.

    Repeating is harmless: a write that was committed without an answer answers by its key. `problem` says what is
    wrong while somebody waits, for the people who look.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        super().__init__(store)
        self._clock = clock
        self.problem = ""

    async def _passed(self, use: Callable[[], Awaitable[T]]) -> T:
        pause = SHORTEST_PAUSE
        while True:
            try:
                answer = await use()
            except StoreUnavailable as away:
                self.problem = str(away)
                await self._clock.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self.problem = ""
                return answer
