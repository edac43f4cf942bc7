"""Retries while the store is unavailable, and what is known of its problem."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable

RETRYING: Final = "Retrying."
"""Added to an error of the store by code that retries, and only there."""

MIN_PAUSE: Final = SECOND // 20
MAX_PAUSE: Final = SECOND

T = TypeVar("T")

ReportProblem = Callable[[str], None]
"""Receives a description of the store's problem, or an empty text when the store is available again."""


def ignore_problem(_: str) -> None: ...


class StoreProblem:
    """The current problem of a store, shared by all retrying handles of a process."""

    def __init__(self, report: ReportProblem = ignore_problem) -> None:
        self.report = report
        self.waiting = 0
        self.problem = ""

    def set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.report(problem)

    def clear(self) -> None:
        """Clear the problem after a success, unless other calls still wait for the store."""
        if not self.waiting:
            self.set_problem("")


class StoreRetry:
    """Retries a call while the store is unavailable, until it succeeds or its task is cancelled.

    This is safe: a write that was committed without an answer is recognized by its key.
    """

    def __init__(self, clock: Clock, trouble: StoreProblem) -> None:
        self._clock = clock
        self.trouble = trouble

    async def repeat(self, operation: Callable[[], Awaitable[T]], error: StoreUnavailable) -> T:
        self.trouble.set_problem(f"{error} {RETRYING}")
        self.trouble.waiting += 1
        try:
            answer = await self._retry(operation)
        finally:
            self.trouble.waiting -= 1
        self.trouble.clear()
        return answer

    async def _retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        pause = MIN_PAUSE
        while True:
            await self._clock.sleep(pause)
            try:
                return await operation()
            except StoreUnavailable as error:
                self.trouble.set_problem(f"{error} {RETRYING}")
            pause = min(2 * pause, MAX_PAUSE)
