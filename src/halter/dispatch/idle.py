"""Sessions that do nothing for too long: they are paused, and then halted."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import msgspec

from halter.core.clock import MINUTE, Clock, format_duration, read_monotonic
from halter.core.events import GuardrailTriggered, SessionParked
from halter.core.ids import session_stream
from halter.core.ports import Draft, Lease, Query, Rows, Store, Stored, Write, read_stream
from halter.core.rows import SessionRow, StreamRow
from halter.guard.ledger import Ledger
from halter.state import lifecycle
from halter.state.session import InFlight, replay

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
