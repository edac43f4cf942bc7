"""Heartbeats that renew a process's leases, a clock that follows the store's time, and the limits on idle sessions.

A call has its tool's timeout, and a request has its own. A session that hangs outside of both writes no events. It is
paused after `idle_halt`, and halted after the same time again unless a message arrives.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from time import clock_gettime_ns
from typing import Final, Protocol

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock, format_duration, read_monotonic
from halter.core.errors import StoreError, StoreUnavailable
from halter.core.events import GuardrailTriggered, SessionParked
from halter.core.ids import AGENT_PREFIX, SessionId, WorkerId, session_stream
from halter.core.ports import Draft, HeartbeatReply, Lease, Query, Rows, Store, Stored, Write, read_stream
from halter.core.processes import LivenessWriter
from halter.core.rows import SessionRow, StreamRow, WorkerInfo
from halter.guard.halts import cancel
from halter.guard.ledger import Ledger
from halter.loop.concurrency import cancel_and_wait
from halter.state import lifecycle
from halter.state.session import InFlight, replay

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


_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_steady_clock() -> int:
    """Read a clock that keeps running while the machine sleeps and cannot be set."""
    return clock_gettime_ns(_STEADY_CLOCK) // 1000


def read_wall_clock() -> int:
    return time.time_ns() // 1000


class StoreClock:
    """A clock that follows the store's time: its last answer plus the time since then.

    Until the first answer, it shows this machine's time.
    """

    def __init__(self) -> None:
        self._ahead = read_wall_clock() - read_steady_clock()
        self._unsure = 0

    def now(self) -> int:
        return clock_gettime_ns(_STEADY_CLOCK) // 1000 + self._ahead

    def monotonic(self) -> int:
        return time.monotonic_ns() // 1000

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND)

    def set_time(self, sent_at: int, store_time: int, received_at: int) -> None:
        """Set the store's time, which was read between two moments of the steady clock."""
        self._unsure = (received_at - sent_at) // 2
        self._ahead = store_time - sent_at - self._unsure

    def refusal(self) -> str:
        """Describe a clock skew that is too large; "" if there is none. A slow answer proves no skew."""
        ahead = read_wall_clock() - self.now()
        if abs(ahead) <= MAX_CLOCK_SKEW + self._unsure:
            return ""
        return (
            f"This machine's clock is {format_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "database's; the maximum is 2 s. No session runs here until the clock is correct. Set it, for example with "
            "`timedatectl set-ntp true`, and restart."
        )


SETTLE_GRACE: Final = MINUTE // 2
"""Added to a timeout for stopping and settling the effect."""


class IdleLimits(msgspec.Struct, frozen=True):
    """Functions that return how long an agent's session may be idle and how long its effects may take; 0: no limit."""

    idle_halt: Callable[[str], int]
    find_time_limit: Callable[[str, InFlight], int]


NO_IDLE_LIMITS: Final = IdleLimits(lambda _: 0, lambda _, __: 0)


def is_idle_too_long(idle_since: int, idle_halt: int, now: int) -> bool:
    return 0 < idle_halt <= now - idle_since


def is_under_way(flights: Iterable[InFlight], find_time_limit: Callable[[InFlight], int], now: int) -> bool:
    """Return true if an effect in flight is still within its timeout."""
    return any(now < flight.since + find_time_limit(flight) + SETTLE_GRACE for flight in flights)


def has_pause_expired(row: SessionRow, newest: Sequence[Stored], now: int) -> bool:
    """Return true if a session was paused for being idle, its time has expired and no message has arrived."""
    has_expired = row.inbox_wake <= row.inbox_seen and row.wake_at is not None and row.wake_at <= now
    if row.state != "PAUSED" or not has_expired:
        return False
    match [stored.event for stored in newest[-2:]]:
        case [GuardrailTriggered(guardrail="idle_halt"), SessionParked(state="PAUSED")]:
            return True
        case _:
            return False


def add_guardrail_event(write: Write, event: GuardrailTriggered) -> Write:
    """Return a park write with a guardrail event; neither is written without the other."""

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = write.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return msgspec.structs.replace(write, decide=decide)


def pause_session(row: SessionRow, lease: Lease, idle_since: int, idle_halt: int, now: int) -> Write:
    """Return the write that parks an idle session. Messages that arrive meanwhile are read when it resumes."""
    idle_text, wait_text = format_duration(now - idle_since), format_duration(idle_halt)
    sentence = f"Paused after {idle_text} without activity. It ends in {wait_text} unless a message arrives."
    ends_at = now + idle_halt
    park_event = SessionParked(state="PAUSED", inbox_seen=row.inbox_head, wake_at=ends_at)
    write = lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/idle/{now}", park_event)
    return add_guardrail_event(write, GuardrailTriggered(guardrail="idle_halt", sentence=sentence, until=ends_at))


WATCHDOG_INTERVAL: Final = MINUTE
"""Interval of the search for idle sessions, and time limit for stopping one."""


class ObservedHeads:
    """Measures for how long this process has seen no new event of a session, also if the clock is set meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_at_by_session: dict[str, tuple[int, int]] = {}

    def measure_silence(self, session: str, head: int) -> int:
        now = read_monotonic(self._clock)
        seen_head, seen_at = self._seen_at_by_session.get(session, (0, now))
        if seen_head != head:
            self._seen_at_by_session[session] = (head, now)
            return 0
        return now - seen_at

    def forget_others(self, sessions: Collection[str]) -> None:
        self._seen_at_by_session = {
            session: seen for session, seen in self._seen_at_by_session.items() if session in sessions
        }


async def find_idle_since(
    store: Store, row: SessionRow, limits: IdleLimits, now: int, heads: ObservedHeads
) -> int | None:
    """Return the time since which a running session is idle; None for a session that is active or parked.

    Its newest event may be one interval older than this process's first sight of it.
    """
    idle_halt = limits.idle_halt(row.agent)
    if row.state != "RUNNING" or not idle_halt:
        return None
    (head,) = await store.ask(Query("head", StreamRow, {"stream": session_stream(row.session)}))
    silence = heads.measure_silence(row.session, head.head) + WATCHDOG_INTERVAL
    if silence < idle_halt or not is_idle_too_long(head.at, idle_halt, now):
        return None
    flights = replay(await read_stream(store, session_stream(row.session))).in_flight.values()
    return None if is_under_way(flights, lambda flight: limits.find_time_limit(row.agent, flight), now) else head.at


async def halt_idle_session(store: Store, clock: Clock, row: SessionRow, lease: Lease) -> bool:
    """End a session that was paused for being idle and got no message; return true if it has ended.

    Its open holds are settled at their maximum first, so that no hold keeps a session from ending.
    """
    if row.state != "PAUSED":
        return False
    events = await read_stream(store, session_stream(row.session))
    if not has_pause_expired(row, events, clock.now()):
        return False
    await Ledger(store, clock).settle_in_doubt(lease, tuple(replay(events).in_flight.values()))
    questions = await lifecycle.read_questions(store, row.session, clock.now())
    end_write = lifecycle.end_session(lease, "HALTED", "idle_timeout", row.parent, row.inbox_seen, asked=questions)
    return bool((await store.commit(end_write)).events)
