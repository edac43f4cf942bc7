"""Keeping the leases of one process alive, for as long as it works on anything.

The store's time: all workers follow it, and one whose own clock tells another time works on nothing.

Sessions that run and do nothing: a while later they are paused, and after as long again, halted.

Nothing of a session may take for ever: a call has its tool's time, a request its own. What hangs outside of both shows
no sign of life in the journal. Whoever writes to a session that was paused lets it go on; it is halted otherwise.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock, format_duration
from halter.core.errors import StoreUnavailable
from halter.core.events import GuardrailTriggered, SessionParked
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import Draft, HeartbeatReply, Lease, Query, Rows, Store, Stored, Write
from halter.core.processes import LivenessWriter
from halter.core.rows import SessionRow, StreamRow
from halter.guard.ledger import Ledger
from halter.state import lifecycle
from halter.state.session import InFlight, replay

HEARTBEAT_INTERVAL: Final = 5 * SECOND
LEASE_POLLING_INTERVAL: Final = SECOND // 4
FAREWELL_SECONDS: Final = 5


class LeaseHolder(Protocol):
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

    async def beaten(self, beat: HeartbeatReply) -> None:
        """Hear the answer to a heartbeat."""
        ...


@asynccontextmanager
async def keep_leases(
    store: Store,
    clock: Clock,
    worker: WorkerId,
    every: int = HEARTBEAT_INTERVAL,
    hands: LeaseHolder | None = None,
    pulse: LivenessWriter | None = None,
) -> AsyncGenerator[None]:
    """Send heartbeats while the block runs, and let go of all leases after it.

    A lease that is lost all the same is noticed at the next write, or told by the next beat to the `hands` that have
    it: one that only sleeps here might not write for a day. With each beat goes the hot state that has changed, and
    what there is to say about the worker, if that has changed. A sentinel outside learns the worker's name by the
    `pulse`.
    """
    with (pulse or LivenessWriter()).works_as(worker):
        async with _keep_leases(store, clock, worker, every, hands):
            yield


@asynccontextmanager
async def _keep_leases(
    store: Store, clock: Clock, worker: WorkerId, every: int, hands: LeaseHolder | None
) -> AsyncGenerator[None]:
    beating = asyncio.create_task(_send_heartbeats(store, clock, worker, every, hands), name="halter-heartbeat")
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


async def _send_heartbeats(store: Store, clock: Clock, worker: WorkerId, every: int, hands: LeaseHolder | None) -> None:
    kept: Mapping[SessionId, bytes] = {}
    said = ""
    while True:
        with suppress(StoreUnavailable):
            if hands is None:
                await store.beat(worker)
            else:
                kept, said = await _send_heartbeat(store, worker, hands, kept, said)
        await clock.sleep(every)


async def _send_heartbeat(
    store: Store, worker: WorkerId, hands: LeaseHolder, kept: Mapping[SessionId, bytes], said: str
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


async def take_lease(store: Store, clock: Clock, worker: WorkerId, session: SessionId, patience: int) -> Lease | None:
    """Take one session, waiting for an owner that may have died: its lease has to run out first."""
    deadline = clock.now() + patience
    while True:
        leases = await store.claim(worker, 1, session)
        if leases:
            return leases[0]
        if clock.now() >= deadline:
            return None
        await clock.sleep(LEASE_POLLING_INTERVAL)


MAX_CLOCK_SKEW = 2 * SECOND
"""How far a machine's clock may be from the store's."""


def read_steady_clock() -> int:
    """Tell a time that goes on while the machine sleeps, and that nobody can set."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1000


def read_wall_clock() -> int:
    """Tell the time that this machine's clock shows."""
    return time.time_ns() // 1000


class StoreClock:
    """A clock that shows the store's time: what it last told, and what has passed since.

    Until it has told anything, this machine's clock is believed.
    """

    def __init__(self) -> None:
        self._ahead = read_wall_clock() - read_steady_clock()
        self._unsure = 0

    def now(self) -> int:
        """Return the store's time in microseconds."""
        return read_steady_clock() + self._ahead

    async def sleep(self, duration: int) -> None:
        """Let that many microseconds pass."""
        await asyncio.sleep(duration / SECOND)

    def heard(self, before: int, at: int, after: int) -> None:
        """Learn the store's time, which it told between two moments of the steady clock."""
        self._unsure = (after - before) // 2
        self._ahead = at - before - self._unsure

    def refusal(self) -> str:
        """Say why nothing may run on this machine, or nothing if all is well. A slow answer proves nothing."""
        ahead = read_wall_clock() - self.now()
        if abs(ahead) <= MAX_CLOCK_SKEW + self._unsure:
            return ""
        return (
            f"This machine's clock is {format_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "database's, and at most 2 s are borne. Nothing runs here until it is right: set it (for example with "
            "`timedatectl set-ntp true`), and start again."
        )


SETTLE_GRACE: Final = MINUTE // 2
"""How much longer than it may something takes until it is stopped and settled."""

PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class IdleLimits:
    """How long a session of an agent may run without a sign of life, and how long what it has under way may take.

    With no time at all it may run for ever.
    """

    idle_halt: Callable[[str], int]
    allowed: Callable[[str, InFlight], int]


NO_IDLE_LIMITS: Final = IdleLimits(lambda _: 0, lambda _, __: 0)


def is_idle_too_long(since: int, idle_halt: int, now: int) -> bool:
    """Tell whether a session was still for too long, if it was for so long."""
    return 0 < idle_halt <= now - since


def is_under_way(flights: Iterable[InFlight], allowed: Callable[[InFlight], int], now: int) -> bool:
    """Tell whether something that was begun is still within its own time."""
    return any(now < flight.since + allowed(flight) + SETTLE_GRACE for flight in flights)


def is_pause_over(row: SessionRow, newest: Sequence[Stored], now: int) -> bool:
    """Tell whether a session was paused for being still, and its time is up without anybody having written to it."""
    alone = row.inbox_wake <= row.inbox_seen and row.wake_at is not None and row.wake_at <= now
    if row.state != "PAUSED" or not alone:
        return False
    match [stored.event for stored in newest[-2:]]:
        case [GuardrailTriggered(guardrail="idle_halt"), SessionParked(state="PAUSED")]:
            return True
        case _:
            return False


def add_guardrail_event(rest: Write, event: GuardrailTriggered) -> Write:
    """Let a session rest and say why, in one commit: without the rest, not a word."""

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = rest.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return msgspec.structs.replace(rest, decide=decide)


def pause_session(row: SessionRow, lease: Lease, since: int, idle_halt: int, now: int) -> Write:
    """Let a session rest that ran and did nothing. What came meanwhile woke nobody, and is read when it goes on."""
    still, wait = format_duration(now - since), format_duration(idle_halt)
    sentence = f"For {still} it ran and did nothing, so it is paused. Unless somebody writes to it, it ends in {wait}."
    until = now + idle_halt
    parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_head, wake_at=until)
    rest = lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/idle/{now}", parked)
    return add_guardrail_event(rest, GuardrailTriggered(guardrail="idle_halt", sentence=sentence, until=until))


async def find_idle_since(store: Store, row: SessionRow, patience: IdleLimits, now: int) -> int | None:
    """Tell since when a session that runs does nothing; None for one that works, or rests."""
    idle_halt = patience.idle_halt(row.agent)
    if row.state != "RUNNING" or not idle_halt:
        return None
    (head,) = await store.ask(Query("head", StreamRow, {"stream": session_stream(row.session)}))
    if not is_idle_too_long(head.at, idle_halt, now):
        return None
    flights = replay(await _events(store, row.session)).in_flight.values()
    return None if is_under_way(flights, lambda flight: patience.allowed(row.agent, flight), now) else head.at


async def halt_idle_session(store: Store, clock: Clock, row: SessionRow, lease: Lease) -> bool:
    """End a session for good that was paused and that nobody wrote to; tell whether it is over.

    What it still held is settled first, at its most: no hold may keep a session from its end.
    """
    if row.state != "PAUSED":
        return False
    events = await _events(store, row.session)
    if not is_pause_over(row, events, clock.now()):
        return False
    await Ledger(store, clock).settle_in_doubt(lease, tuple(replay(events).in_flight.values()))
    end = lifecycle.end_session(lease, "HALTED", "idle_timeout", row.parent, row.inbox_seen)
    return bool((await store.commit(end)).events)


async def _events(store: Store, session: str) -> list[Stored]:
    found: list[Stored] = []
    while page := await store.read(session_stream(session), len(found), PAGE):
        found += page
    return found
