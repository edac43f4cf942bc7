"""Keeping the leases of one process alive, for as long as it works on anything."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Beat, Lease, Store
from halter.core.pulse import Pulse

HEARTBEAT: Final = 5 * SECOND
LOOK: Final = SECOND // 4
FAREWELL_SECONDS: Final = 5


class Hands(Protocol):
    """Whoever works on the sessions of a worker."""

    def leases(self) -> frozenset[Lease]:
        """Name what is in these hands."""
        ...

    def lost(self, leases: frozenset[Lease]) -> None:
        """Let go of what somebody else has by now."""
        ...

    def snapshots(self) -> Mapping[SessionId, bytes]:
        """Tell the hot state of the sessions that stay in this process."""
        ...

    def about(self) -> str:
        """Say what others should know of this worker."""
        ...

    async def beaten(self, beat: Beat) -> None:
        """Hear the answer to a heartbeat."""
        ...


@asynccontextmanager
async def tended(
    store: Store,
    clock: Clock,
    worker: WorkerId,
    every: int = HEARTBEAT,
    hands: Hands | None = None,
    pulse: Pulse | None = None,
) -> AsyncGenerator[None]:
    """Send heartbeats while the block runs, and let go of all leases after it.

    A lease that is lost all the same is noticed at the next write, or told by the next beat to the `hands` that have
    it: one that only sleeps here might not write for a day. With each beat goes the hot state that has changed, and
    what there is to say about the worker, if that has changed. A sentinel outside learns the worker's name by the
    `pulse`.
    """
    with (pulse or Pulse()).works_as(worker):
        async with _tended(store, clock, worker, every, hands):
            yield


@asynccontextmanager
async def _tended(
    store: Store, clock: Clock, worker: WorkerId, every: int, hands: Hands | None
) -> AsyncGenerator[None]:
    beating = asyncio.create_task(_beat(store, clock, worker, every, hands), name="halter-heartbeat")
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        with suppress(StoreUnavailable, TimeoutError):
            # Where the store is away, the leases run out by themselves.
            async with asyncio.timeout(FAREWELL_SECONDS):
                await store.leave(worker)


async def _beat(store: Store, clock: Clock, worker: WorkerId, every: int, hands: Hands | None) -> None:
    kept: Mapping[SessionId, bytes] = {}
    said = ""
    while True:
        with suppress(StoreUnavailable):
            if hands is None:
                await store.beat(worker)
            else:
                kept, said = await _beaten(store, worker, hands, kept, said)
        await clock.sleep(every)


async def _beaten(
    store: Store, worker: WorkerId, hands: Hands, kept: Mapping[SessionId, bytes], said: str
) -> tuple[Mapping[SessionId, bytes], str]:
    """Beat once, with whatever has changed since the last time; return what the store knows then."""
    now, about = hands.snapshots(), hands.about()
    # What is claimed while the beat is on its way is not lost.
    leases = hands.leases()
    changed = {session: data for session, data in now.items() if kept.get(session) != data}
    beat = await store.beat(worker, changed, about if about != said else "")
    if beat.held is not None:
        hands.lost(leases - beat.held)
    await hands.beaten(beat)
    return now, about


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
