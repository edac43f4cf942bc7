"""Heartbeats that renew a process's leases, a clock that follows the store's time, and the limits on idle sessions.

A call has its tool's timeout, and a request has its own. A session that hangs outside of both writes no events. It is
paused after `idle_halt`, and halted after the same time again unless a message arrives.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.errors import StoreError, StoreUnavailable
from halter.core.ids import AGENT_PREFIX, SessionId, WorkerId
from halter.core.ports import HeartbeatReply, Lease, Query, Store, read_stream
from halter.core.rows import SessionRow
from halter.dispatch.workers import WorkerInfo
from halter.guard.halts import cancel
from halter.guard.ledger import Ledger
from halter.loop.concurrency import cancel_and_wait
from halter.state import lifecycle
from halter.state.session import InFlight, replay
from halter.system.liveness import LivenessWriter

HEARTBEAT_INTERVAL: Final = 5 * SECOND
LEASE_POLLING_INTERVAL: Final = SECOND // 4
RELEASE_TIMEOUT_SECONDS: Final = 5


class LeaseHolder(Protocol):
    """The sessions of a worker, as its heartbeat sees them."""

    def leases(self) -> frozenset[Lease]: ...

    def cancel_lost(self, leases: frozenset[Lease]) -> None:
        """Stop the sessions that another process has now."""
        ...

    def snapshots(self) -> Mapping[SessionId, bytes]:
        """Return the hot state of the resident sessions."""
        ...

    def describe(self) -> str:
        """Return the worker's description for other workers."""
        ...

    async def on_heartbeat(self, beat: HeartbeatReply) -> None:
        """Handle the store's reply to a heartbeat."""
        ...


@asynccontextmanager
async def renew_leases(
    store: Store,
    clock: Clock,
    worker: WorkerId,
    interval: int = HEARTBEAT_INTERVAL,
    holder: LeaseHolder | None = None,
    liveness: LivenessWriter | None = None,
) -> AsyncGenerator[None]:
    """Send heartbeats while the block runs, and release all leases after it.

    A lost lease is noticed at the next write, or reported to `holder` at the next heartbeat: a sleeping session might
    not write for a day. Each heartbeat carries changed hot state and a changed description. `liveness` shows the
    worker's name to a sentinel.
    """
    with (liveness or LivenessWriter()).works_as(worker):
        async with _renew_leases(store, clock, worker, interval, holder):
            yield


@asynccontextmanager
async def _renew_leases(
    store: Store, clock: Clock, worker: WorkerId, interval: int, holder: LeaseHolder | None
) -> AsyncGenerator[None]:
    heartbeats = asyncio.create_task(_send_heartbeats(store, clock, worker, interval, holder), name="halter-heartbeat")
    try:
        yield
    finally:
        await cancel_and_wait(heartbeats)
        with suppress(StoreUnavailable, TimeoutError):
            # While the store is unavailable, the leases expire.
            async with asyncio.timeout(RELEASE_TIMEOUT_SECONDS):
                await store.leave(worker)


async def _send_heartbeats(
    store: Store, clock: Clock, worker: WorkerId, interval: int, holder: LeaseHolder | None
) -> None:
    snapshots: Mapping[SessionId, bytes] = {}
    description, process = "", WorkerInfo().with_process().encode()
    while True:
        with suppress(StoreUnavailable):
            if holder is None:
                await store.beat(worker, {}, process)
                process = ""
            else:
                snapshots, description = await _send_heartbeat(store, worker, holder, snapshots, description)
        await clock.sleep(interval)


async def _send_heartbeat(
    store: Store, worker: WorkerId, holder: LeaseHolder, previous: Mapping[SessionId, bytes], previous_description: str
) -> tuple[Mapping[SessionId, bytes], str]:
    """Send one heartbeat with everything that has changed; return what the store then has."""
    snapshots, description = holder.snapshots(), holder.describe()
    # Leases claimed during the heartbeat are not lost.
    leases = holder.leases()
    changed_snapshots = {session: data for session, data in snapshots.items() if previous.get(session) != data}
    reply = await store.beat(worker, changed_snapshots, description if description != previous_description else "")
    if reply.remaining_leases is not None:
        holder.cancel_lost(leases - reply.remaining_leases)
    await holder.on_heartbeat(reply)
    return snapshots, description


async def acquire_lease(
    store: Store, clock: Clock, worker: WorkerId, session: SessionId, max_wait: int
) -> Lease | None:
    """Claim one session, waiting for the lease of an owner that may have died. Takes no lease if cancelled."""
    deadline = read_monotonic(clock) + max_wait
    while True:
        claim = asyncio.ensure_future(store.claim(worker, 1, session))
        try:
            leases = await asyncio.shield(claim)
        except asyncio.CancelledError:
            # The claim completes in the store despite the cancellation.
            with suppress(StoreError):
                for lease in await claim:
                    await store.release(lease)
            raise
        if leases:
            return leases[0]
        if read_monotonic(clock) >= deadline:
            return None
        await clock.sleep(LEASE_POLLING_INTERVAL)


async def end_unowned_session(
    store: Store, ledger: Ledger, clock: Clock, lease: Lease, *, wakes_parent: bool = True
) -> Sequence[InFlight]:
    """End a session that no process runs. What is in doubt and holds money keeps it open, and is returned."""
    state = replay(await read_stream(store, lease.stream))
    flights = [*state.in_flight.values()]
    if holding := [flight for flight in flights if flight.max_charge().usd or flight.max_charge().tokens]:
        return holding
    await ledger.settle_in_doubt(lease, flights)
    questions = await lifecycle.read_questions(store, lease.session, clock.now())
    await store.commit(
        lifecycle.end_session(lease, "CANCELLED", "cancelled", state.parent, asked=questions, wakes_parent=wakes_parent)
    )
    return ()


async def end_open_children(store: Store, ledger: Ledger, clock: Clock, worker: WorkerId, parent: SessionRow) -> bool:
    """End the sub-sessions of a session that ends and that no process runs; return whether there were any.

    One that a process runs is cancelled, and ends there.
    """
    has_ended = False
    for row in await store.ask(Query("open_children", SessionRow, {"session": parent.session})):
        key, reason = f"{row.session}/stopped", f"{parent.session} no longer waits for it"
        await store.commit(cancel(row.session, f"{AGENT_PREFIX}{parent.agent}", key, reason))
        lease = await acquire_lease(store, clock, worker, SessionId(row.session), 0)
        if lease is None:
            continue
        await end_open_children(store, ledger, clock, worker, row)
        if await end_unowned_session(store, ledger, clock, lease, wakes_parent=False):
            await store.release(lease)
        else:
            has_ended = True
    return has_ended


MAX_CLOCK_SKEW = 2 * SECOND
"""Maximum difference between a machine's clock and the store's."""
