"""Heartbeats keep the leases of a process, clocks follow the store's time, and idle sessions are paused, then halted.

A call has its tool's timeout, a request its own. A session that hangs outside of both writes no events: after a while
it is paused, and halted after as long again, unless a message arrives.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from time import clock_gettime_ns
from typing import Final, Protocol

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock, format_duration
from halter.core.errors import StoreError, StoreUnavailable
from halter.core.events import GuardrailTriggered, SessionParked
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import Draft, HeartbeatReply, Lease, Query, Rows, Store, Stored, Write, read_stream
from halter.core.processes import LivenessWriter
from halter.core.rows import SessionRow, StreamRow
from halter.guard.ledger import Ledger
from halter.loop.session_runtime import cancel_and_wait
from halter.state import lifecycle
from halter.state.session import InFlight, replay

HEARTBEAT_INTERVAL: Final = 5 * SECOND
LEASE_POLLING_INTERVAL: Final = SECOND // 4
FAREWELL_SECONDS: Final = 5


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
        """Return the worker's description for the others."""
        ...

    async def on_heartbeat(self, beat: HeartbeatReply) -> None:
        """Handle the store's reply to a heartbeat."""
        ...


@asynccontextmanager
async def keep_leases(
    store: Store,
    clock: Clock,
    worker: WorkerId,
    interval: int = HEARTBEAT_INTERVAL,
    holder: LeaseHolder | None = None,
    liveness: LivenessWriter | None = None,
) -> AsyncGenerator[None]:
    """Sends heartbeats while the block runs, and releases all leases after it.

    A lost lease is noticed at the next write, or reported to `hands` by the next heartbeat: a sleeping session might
    not write for a day. Each heartbeat carries changed hot state and a changed description. `pulse` shows the worker's
    name to a sentinel.
    """
    with (liveness or LivenessWriter()).works_as(worker):
        async with _keep_leases(store, clock, worker, interval, holder):
            yield


@asynccontextmanager
async def _keep_leases(
    store: Store, clock: Clock, worker: WorkerId, interval: int, holder: LeaseHolder | None
) -> AsyncGenerator[None]:
    beating = asyncio.create_task(_send_heartbeats(store, clock, worker, interval, holder), name="halter-heartbeat")
    try:
        yield
    finally:
        await cancel_and_wait(beating)
        with suppress(StoreUnavailable, TimeoutError):
            # While the store is unavailable, the leases expire.
            async with asyncio.timeout(FAREWELL_SECONDS):
                await store.leave(worker)


async def _send_heartbeats(
    store: Store, clock: Clock, worker: WorkerId, interval: int, holder: LeaseHolder | None
) -> None:
    kept: Mapping[SessionId, bytes] = {}
    text = ""
    while True:
        with suppress(StoreUnavailable):
            if holder is None:
                await store.beat(worker)
            else:
                kept, text = await _send_heartbeat(store, worker, holder, kept, text)
        await clock.sleep(interval)


async def _send_heartbeat(
    store: Store, worker: WorkerId, holder: LeaseHolder, kept: Mapping[SessionId, bytes], text: str
) -> tuple[Mapping[SessionId, bytes], str]:
    """Sends one heartbeat with what has changed; returns what the store knows then."""
    now, about = holder.snapshots(), holder.describe()
    # Leases claimed during the heartbeat are not lost.
    leases = holder.leases()
    changed = {session: data for session, data in now.items() if kept.get(session) != data}
    beat = await store.beat(worker, changed, about if about != text else "")
    if beat.held is not None:
        holder.cancel_lost(leases - beat.held)
    await holder.on_heartbeat(beat)
    return now, about


async def acquire_lease(
    store: Store, clock: Clock, worker: WorkerId, session: SessionId, max_wait: int
) -> Lease | None:
    """Claims one session, waiting for the lease of an owner that may have died. If it is cancelled, it takes none."""
    deadline = clock.now() + max_wait
    while True:
        claim = asyncio.ensure_future(store.claim(worker, 1, session))
        try:
            leases = await asyncio.shield(claim)
        except asyncio.CancelledError:
            # The store does what it was asked for all the same.
            with suppress(StoreError):
                for lease in await claim:
                    await store.release(lease)
            raise
        if leases:
            return leases[0]
        if clock.now() >= deadline:
            return None
        await clock.sleep(LEASE_POLLING_INTERVAL)


MAX_CLOCK_SKEW = 2 * SECOND
"""How far a machine's clock may be from the store's."""


_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_steady_clock() -> int:
    """A clock that runs while the machine sleeps and that cannot be set."""
    return clock_gettime_ns(_STEADY_CLOCK) // 1000


def read_wall_clock() -> int:
    return time.time_ns() // 1000


class StoreClock:
    """Shows the store's time: its last answer, plus what has passed since.

    Until the first answer, it shows this machine's time.
    """

    def __init__(self) -> None:
        self._ahead = read_wall_clock() - read_steady_clock()
        self._unsure = 0

    def now(self) -> int:
        return clock_gettime_ns(_STEADY_CLOCK) // 1000 + self._ahead

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND)

    def set_time(self, before: int, at: int, after: int) -> None:
        """Sets the store's time, which was read between two moments of the steady clock."""
        self._unsure = (after - before) // 2
        self._ahead = at - before - self._unsure

    def refusal(self) -> str:
        """Says why nothing may run on this machine; "" if all is well. A slow answer proves nothing."""
        ahead = read_wall_clock() - self.now()
        if abs(ahead) <= MAX_CLOCK_SKEW + self._unsure:
            return ""
        return (
            f"This machine's clock is {format_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "database's, and at most 2 s are borne. Nothing runs here until it is right: set it (for example with "
            "`timedatectl set-ntp true`), and start again."
        )


SETTLE_GRACE: Final = MINUTE // 2
"""Added to a timeout until the effect is stopped and settled."""


class IdleLimits(msgspec.Struct, frozen=True):
    """How long a session of an agent may be idle, and how long its calls and requests may take; 0 is no limit."""

    idle_halt: Callable[[str], int]
    find_time_limit: Callable[[str, InFlight], int]


NO_IDLE_LIMITS: Final = IdleLimits(lambda _: 0, lambda _, __: 0)


def is_idle_too_long(since: int, idle_halt: int, now: int) -> bool:
    return 0 < idle_halt <= now - since


def is_under_way(flights: Iterable[InFlight], allowed: Callable[[InFlight], int], now: int) -> bool:
    """Whether something in flight is still within its timeout."""
    return any(now < flight.since + allowed(flight) + SETTLE_GRACE for flight in flights)


def is_pause_over(row: SessionRow, newest: Sequence[Stored], now: int) -> bool:
    """Whether a session was paused for being idle, its time is up, and no message came."""
    alone = row.inbox_wake <= row.inbox_seen and row.wake_at is not None and row.wake_at <= now
    if row.state != "PAUSED" or not alone:
        return False
    match [stored.event for stored in newest[-2:]]:
        case [GuardrailTriggered(guardrail="idle_halt"), SessionParked(state="PAUSED")]:
            return True
        case _:
            return False


def add_guardrail_event(rest: Write, event: GuardrailTriggered) -> Write:
    """Adds a guardrail event to a park write; neither is written without the other."""

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = rest.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return msgspec.structs.replace(rest, decide=decide)


def pause_session(row: SessionRow, lease: Lease, since: int, idle_halt: int, now: int) -> Write:
    """Parks an idle session. Messages that came meanwhile are read when it resumes."""
    still, wait = format_duration(now - since), format_duration(idle_halt)
    sentence = f"For {still} it ran and did nothing, so it is paused. Unless a message arrives, it ends in {wait}."
    until = now + idle_halt
    parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_head, wake_at=until)
    rest = lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/idle/{now}", parked)
    return add_guardrail_event(rest, GuardrailTriggered(guardrail="idle_halt", sentence=sentence, until=until))


async def find_idle_since(store: Store, row: SessionRow, patience: IdleLimits, now: int) -> int | None:
    """Returns since when a running session is idle; None for one that works or rests."""
    idle_halt = patience.idle_halt(row.agent)
    if row.state != "RUNNING" or not idle_halt:
        return None
    (head,) = await store.ask(Query("head", StreamRow, {"stream": session_stream(row.session)}))
    if not is_idle_too_long(head.at, idle_halt, now):
        return None
    flights = replay(await read_stream(store, session_stream(row.session))).in_flight.values()
    return None if is_under_way(flights, lambda flight: patience.find_time_limit(row.agent, flight), now) else head.at


async def halt_idle_session(store: Store, clock: Clock, row: SessionRow, lease: Lease) -> bool:
    """Ends a paused session that got no message; returns whether it has ended.

    What it still holds is settled at its maximum first: no hold may keep a session from ending.
    """
    if row.state != "PAUSED":
        return False
    events = await read_stream(store, session_stream(row.session))
    if not is_pause_over(row, events, clock.now()):
        return False
    await Ledger(store, clock).settle_in_doubt(lease, tuple(replay(events).in_flight.values()))
    asked = await lifecycle.read_questions(store, row.session, clock.now())
    end = lifecycle.end_session(lease, "HALTED", "idle_timeout", row.parent, row.inbox_seen, asked=asked)
    return bool((await store.commit(end)).events)
