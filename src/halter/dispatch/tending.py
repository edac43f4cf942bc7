"""Keeping the leases of one process alive, for as long as it works on anything."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Lease, Store

HEARTBEAT: Final = 5 * SECOND
LOOK: Final = SECOND // 4


Snapshots = Callable[[], Mapping[SessionId, bytes]]
"""Tells the hot state of the sessions that stay in this process."""


class Hands(Protocol):
    """Whoever works on the sessions of a worker."""

    def leases(self) -> frozenset[Lease]:
        """Name what is in these hands."""
        ...

    def lost(self, leases: frozenset[Lease]) -> None:
        """Let go of what somebody else has by now."""
        ...


@asynccontextmanager
async def tended(
    store: Store,
    clock: Clock,
    worker: WorkerId,
    every: int = HEARTBEAT,
    snapshots: Snapshots = dict[SessionId, bytes],
    hands: Hands | None = None,
) -> AsyncGenerator[None]:
    """Send heartbeats while the block runs, and let go of all leases after it.

    A lease that is lost all the same is noticed at the next write, or told by the next beat to the `hands` that have
    it: one that only sleeps here might not write for a day. With each beat goes the hot state that has changed.
    """
    beating = asyncio.create_task(_beat(store, clock, worker, every, snapshots, hands), name="halter-heartbeat")
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        with suppress(StoreUnavailable):
            await store.leave(worker)


async def _beat(
    store: Store, clock: Clock, worker: WorkerId, every: int, snapshots: Snapshots, hands: Hands | None
) -> None:
    kept: Mapping[SessionId, bytes] = {}
    while True:
        now = snapshots()
        # What is claimed while the beat is on its way is not lost.
        leases = hands.leases() if hands is not None else frozenset[Lease]()
        with suppress(StoreUnavailable):
            changed = {session: data for session, data in now.items() if kept.get(session) != data}
            held = (await store.beat(worker, changed)).held
            kept = now
            if hands is not None and held is not None:
                hands.lost(leases - held)
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
