"""Sessions that run and do nothing: a while later they are paused, and after as long again, halted.

Nothing of a session may take for ever: a call has its tool's time, a request its own. What hangs outside of both shows
no sign of life in the journal. Whoever writes to a session that was paused lets it go on; it is halted otherwise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from halter.core.clock import MINUTE, Clock
from halter.core.durations import shown_duration
from halter.core.events import GuardrailTriggered, SessionParked
from halter.core.ids import session_stream
from halter.core.ports import Draft, Lease, Query, Rows, Store, Stored, Write
from halter.core.rows import SessionRow, StreamRow
from halter.guard.purse import Purse
from halter.state import life
from halter.state.session import InFlight, replay

GRACE: Final = MINUTE // 2
"""How much longer than it may something takes until it is stopped and settled."""

PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a session of an agent may run without a sign of life, and how long what it has under way may take.

    With no time at all it may run for ever.
    """

    idle_halt: Callable[[str], int]
    allowed: Callable[[str, InFlight], int]


ENDLESS: Final = Patience(lambda _: 0, lambda _, __: 0)


def idles(since: int, idle_halt: int, now: int) -> bool:
    """Tell whether a session was still for too long, if it was for so long."""
    return 0 < idle_halt <= now - since


def under_way(flights: Iterable[InFlight], allowed: Callable[[InFlight], int], now: int) -> bool:
    """Tell whether something that was begun is still within its own time."""
    return any(now < flight.since + allowed(flight) + GRACE for flight in flights)


def outwaited(row: SessionRow, newest: Sequence[Stored], now: int) -> bool:
    """Tell whether a session was paused for being still, and its time is up without anybody having written to it."""
    alone = row.inbox_wake <= row.inbox_seen and row.wake_at is not None and row.wake_at <= now
    if row.state != "PAUSED" or not alone:
        return False
    match [stored.event for stored in newest[-2:]]:
        case [GuardrailTriggered(guardrail="idle_halt"), SessionParked(state="PAUSED")]:
            return True
        case _:
            return False


def with_word(rest: Write, event: GuardrailTriggered) -> Write:
    """Let a session rest and say why, in one commit: without the rest, not a word."""

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = rest.decide(rows)
        return [Draft(event), *drafts] if drafts else []

    return msgspec.structs.replace(rest, decide=decide)


def pause(row: SessionRow, lease: Lease, since: int, idle_halt: int, now: int) -> Write:
    """Let a session rest that ran and did nothing. What came meanwhile woke nobody, and is read when it goes on."""
    still, wait = shown_duration(now - since), shown_duration(idle_halt)
    sentence = f"For {still} it ran and did nothing, so it is paused. Unless somebody writes to it, it ends in {wait}."
    until = now + idle_halt
    parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_head, wake_at=until)
    rest = life.park(lease, f"{lease.session}/{lease.generation}/idle/{now}", parked)
    return with_word(rest, GuardrailTriggered(guardrail="idle_halt", sentence=sentence, until=until))


async def still_since(store: Store, row: SessionRow, patience: Patience, now: int) -> int | None:
    """Tell since when a session that runs does nothing; None for one that works, or rests."""
    idle_halt = patience.idle_halt(row.agent)
    if row.state != "RUNNING" or not idle_halt:
        return None
    (head,) = await store.ask(Query("head", StreamRow, {"stream": session_stream(row.session)}))
    if not idles(head.at, idle_halt, now):
        return None
    flights = replay(await _events(store, row.session)).in_flight.values()
    return None if under_way(flights, lambda flight: patience.allowed(row.agent, flight), now) else head.at


async def halted(store: Store, clock: Clock, row: SessionRow, lease: Lease) -> bool:
    """End a session for good that was paused and that nobody wrote to; tell whether it is over.

    What it still held is settled first, at its most: no hold may keep a session from its end.
    """
    if row.state != "PAUSED":
        return False
    events = await _events(store, row.session)
    if not outwaited(row, events, clock.now()):
        return False
    await Purse(store, clock).settle_in_doubt(lease, tuple(replay(events).in_flight.values()))
    end = life.end(lease, "HALTED", "idle_timeout", row.parent, row.inbox_seen)
    return bool((await store.commit(end)).events)


async def _events(store: Store, session: str) -> list[Stored]:
    found: list[Stored] = []
    while page := await store.read(session_stream(session), len(found), PAGE):
        found += page
    return found
