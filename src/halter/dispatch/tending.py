"""Keeping the leases of one process alive, for as long as it works on anything."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Lease, Store

HEARTBEAT: Final = 5 * SECOND
LOOK: Final = SECOND // 4


Snapshots = Callable[[], Mapping[SessionId, bytes]]
"""Tells the hot state of the sessions that stay in this process."""


@asynccontextmanager
async def tended(
    store: Store,
    clock: Clock,
    worker: WorkerId,
    every: int = HEARTBEAT,
    snapshots: Snapshots = dict[SessionId, bytes],
) -> AsyncGenerator[None]:
    """Send heartbeats while the block runs, and let go of all leases after it.

    A lease that is lost all the same is noticed at the next write. With each beat goes the hot state that has changed.
    """
    beating = asyncio.create_task(_beat(store, clock, worker, every, snapshots), name="halter-heartbeat")
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        with suppress(StoreUnavailable):
            await store.leave(worker)


async def _beat(store: Store, clock: Clock, worker: WorkerId, every: int, snapshots: Snapshots) -> None:
    kept: Mapping[SessionId, bytes] = {}
    while True:
        now = snapshots()
        with suppress(StoreUnavailable):
            await store.beat(worker, {session: data for session, data in now.items() if kept.get(session) != data})
            kept = now
        await clock.sleep(every)


async def taken(store: Store, clock: Clock, worker: WorkerId, session: SessionId, patience: int) -> Lease | None:
    """Take one session, waiting for an owner that may have died: its lease has to run out first."""
    deadline = clock.now() + patience
    while True:
        leases = await store.claim(worker, 1, session)
        if leases:
            return leases[0]
        if clock.now() >= deadline:
            return None
        await clock.sleep(LOOK)
