"""The commit of a settlement that waits for a session's next commit, if that does not come soon."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost

MAX_DEFERRAL: Final = SECOND // 20
"""The time after which a deferred settlement is committed if the session makes no other commit."""


class FlushTimer:
    """Flushes a session's deferred settlements a short time after it was started last."""

    def __init__(self, flush: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self._flush = flush
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Start anew: another commit may take the settlements along until then."""
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(MAX_DEFERRAL / SECOND, self._start_flush)

    def cancel(self) -> None:
        """Cancel what was started. A commit that has begun is finished."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start_flush(self) -> None:
        self._task = asyncio.ensure_future(self._flush_until_committed())

    async def _flush_until_committed(self) -> None:
        """Repeat what fails until the session's next commit takes it along."""
        pause = MAX_DEFERRAL
        with suppress(LeaseLost):
            while not await self._try_flush():
                await self._clock.sleep(pause)
                pause = min(2 * pause, SECOND)

    async def _try_flush(self) -> bool:
        try:
            await self._flush()
        except LeaseLost:
            raise
        except Exception:  # noqa: BLE001  The session's next commit, at the latest its end, raises what persists.
            return False
        return True
