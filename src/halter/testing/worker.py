"""The smallest worker there can be: it claims what is due and gives it a turn."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost
from halter.core.ids import WorkerId
from halter.core.ports import Lease, Query, Store
from halter.core.rows import FREE, SessionRow

Turn = Callable[[Lease], Awaitable[None]]

HEARTBEAT: Final = 5 * SECOND
CLAIMED: Final = 1000


class Worker:
    """Claims sessions at the very moment they are due, and runs their turns side by side."""

    def __init__(self, store: Store, clock: Clock, worker: WorkerId, turn: Turn) -> None:
        self._store = store
        self._clock = clock
        self._worker = worker
        self._turn = turn
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled. Each claim also renews the leases of the turns that are still running."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            while True:
                self._news.clear()
                for lease in await self._store.claim(self._worker, CLAIMED):
                    tasks.create_task(self._take_turn(lease))
                await self._rest(await self._next_look())

    async def _take_turn(self, lease: Lease) -> None:
        with suppress(LeaseLost):
            await self._turn(lease)

    async def _listen(self) -> None:
        async for _ in self._store.changes():
            self._news.set()

    async def _next_look(self) -> int | None:
        """Tell when to look again: when a session is due, and at each heartbeat while anybody owns one."""
        rows = await self._store.ask(Query("all_sessions", SessionRow))
        now = self._clock.now()
        moments = [row.due_at for row in rows if row.owner == FREE and row.due_at is not None and row.due_at > now]
        if any(row.owner != FREE for row in rows):
            moments.append(now + HEARTBEAT)
        return min(moments, default=None)

    async def _rest(self, until: int | None) -> None:
        """Rest until then, or until something was written."""
        seconds = None if until is None else (until - self._clock.now()) / SECOND
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
