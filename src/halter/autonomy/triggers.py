"""What a trigger does now: a decision without I/O, looked at again and again.

A schedule's times are dealt with one after the other, and each that starts nothing says why. A document of a watch is
done only when a session about it came to a good end; one that fails too often is left to a person.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from halter.autonomy.hours import Hours, asleep_until
from halter.core.clock import MINUTE, SECOND
from halter.core.money import shown
from halter.core.schedules import Ticks, Timing, next_after, ticks
from halter.core.task_rows import TriggerRow
from halter.core.tasks import Schedule, Watch
from halter.core.triggered import SkipReason
from halter.core.vocabulary import State

LATE: Final = MINUTE
"""A time that was dealt with within so long was not missed."""
SLACK: Final = 5 * SECOND
"""A run may begin so much before its `min_interval` is over: the one before it was never quite punctual."""
RETRY: Final = 5 * SECOND
"""How long a document rests after its first failure; each further rest is four times as long."""


class Run(msgspec.Struct, frozen=True):
    """Start the run of that time."""

    due_at: int


class Skip(msgspec.Struct, frozen=True):
    """Start nothing for these times, the last of them `due_at`."""

    why: SkipReason
    due_at: int
    count: int = 1
    sentence: str = ""


class Queue(msgspec.Struct, frozen=True):
    """Start the run of that time when the one before it is over."""

    due_at: int


class Empty(msgspec.Struct, frozen=True):
    """Why no money is left, and until when."""

    sentence: str
    until: int | None = None


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What a trigger's decision depends on beside itself.

    `on_since` is when its agent was switched on; `halted` and `empty` say what stands against it, if something does.
    """

    now: int
    on_since: int
    halted: str = ""
    empty: Empty | None = None
    running: int = 0


def schedule_now(
    schedule: Schedule, timing: Timing, row: TriggerRow, around: Around, hours: Hours | None = None
) -> Sequence[Run | Skip | Queue]:
    """Decide what becomes of the times that have come since the last look."""
    if row.queued_at is not None and not around.running and not around.halted:
        return [_queued(schedule, row.queued_at, row, around, hours)]
    found = ticks(timing, row.ticked_at, around.now)
    if found.latest is None:
        return []
    while_off = ticks(timing, row.ticked_at, min(around.on_since, around.now))
    skipped = list(_past(found, while_off))
    latest = found.latest
    if latest <= around.on_since or around.now < latest + _jitter(schedule, row.trigger, latest):
        return skipped
    return [*skipped, _latest(schedule, latest, row, around, hours)]


def _queued(schedule: Schedule, due: int, row: TriggerRow, around: Around, hours: Hours | None) -> Run | Skip:
    """Start a run that waited for the one before it, unless there is something against it by now."""
    if due <= around.on_since:
        return Skip("off", due, 1, "The agent was switched off.")
    against = _against(schedule, row, around, hours)
    return Run(due) if against is None else Skip(against[0], due, 1, against[1])


def _past(found: Ticks, while_off: Ticks) -> Iterator[Skip]:
    """Skip what came while the agent was off, and all but the last of what came while nothing looked."""
    if while_off.latest is not None:
        yield Skip("off", while_off.latest, while_off.count, "The agent was switched off.")
    missed = found.count - while_off.count - 1
    if missed > 0 and found.latest is not None:
        yield Skip("missed", found.latest - 1, missed, "Nothing ran then; the last one stands in for all.")


def _latest(schedule: Schedule, due: int, row: TriggerRow, around: Around, hours: Hours | None) -> Run | Skip | Queue:
    late = around.now - due - _jitter(schedule, row.trigger, due)
    if schedule.catch_up == "never" and late > LATE:
        return Skip("missed", due, 1, "Nothing ran then, and it is not made up for.")
    against = _against(schedule, row, around, hours)
    if against is not None:
        return Skip(against[0], due, 1, against[1])
    if not around.running:
        return Run(due)
    if schedule.overlap == "queue" and row.queued_at is None:
        return Queue(due)
    waits = " and another one waits" if row.queued_at is not None else ""
    return Skip("overlap", due, 1, f"{row.session} is still at work{waits}.")


def _against(schedule: Schedule, row: TriggerRow, around: Around, hours: Hours | None) -> tuple[SkipReason, str] | None:
    if around.halted:
        return ("halted", around.halted)
    if hours is not None and asleep_until(hours, around.now) is not None:
        return ("active_hours", "It is outside of the active hours.")
    if row.ran_at and around.now - row.ran_at < schedule.min_interval - SLACK:
        return ("too_soon", "The run before it began less than `min_interval` ago.")
    if around.empty is not None:
        return ("cost_cap_reached", around.empty.sentence)
    return None


def _jitter(schedule: Schedule, trigger: str, due: int) -> int:
    """Delay a run by chance, but by the same every time that it is looked at."""
    if not schedule.jitter:
        return 0
    return int.from_bytes(sha256(f"{trigger} {due}".encode()).digest()[:8]) % (schedule.jitter + 1)


def schedule_next(schedule: Schedule, timing: Timing, row: TriggerRow, now: int) -> int | None:
    """Tell when to look again."""
    due = next_after(timing, row.ticked_at)
    if due is None:
        return None
    return max(now, due + _jitter(schedule, row.trigger, due))


class Item(msgspec.Struct, frozen=True):
    """A document of a watch, and how its newest session stands."""

    item: str
    name: str
    ignored: int
    attempts: int
    session: str
    quarantined_at: int | None
    state: State | None = None
    ended_at: int | None = None
    terminal_reason: str | None = None

    @property
    def done(self) -> bool:
        """Tell whether nothing is left to be done about it."""
        return bool(self.ignored) or self.quarantined_at is not None or self.state == "COMPLETED"

    @property
    def open(self) -> bool:
        """Tell whether a session is at work on it."""
        return self.session != "" and self.ended_at is None

    @property
    def blameless(self) -> bool:
        """Tell whether its last session ended by somebody's word, not by a failure, nor for doing nothing."""
        return self.state == "HALTED" and self.terminal_reason != "idle_timeout"


class Start(msgspec.Struct, frozen=True):
    """Start a session about a document."""

    item: Item
    attempt: int


class Quarantine(msgspec.Struct, frozen=True):
    """Leave a document to a person."""

    item: Item
    sentence: str


class Delay(msgspec.Struct, frozen=True):
    """Let the rest wait."""

    why: SkipReason
    waiting: int
    sentence: str
    until: int | None = None


class Watching(msgspec.Struct, frozen=True):
    """What to do about the documents of a watch, and when to look again by itself."""

    acts: tuple[Start | Quarantine | Delay, ...] = ()
    until: int | None = None


def watch_now(watch: Watch, items: Sequence[Item], around: Around, room: int | None = None) -> Watching:
    """Decide which documents are begun, which are left to a person, and why the rest waits.

    `room` is for how many sessions money is left; None for as many as there may be.
    """
    waiting = [item for item in items if not item.done and not item.open]
    given_up = [item for item in waiting if _hopeless(item, watch)]
    ready = [item for item in waiting if item not in given_up]
    resting = [at for item in ready if (at := _rests_until(item)) > around.now]
    startable = [item for item in ready if _rests_until(item) <= around.now]
    slots = 0 if around.halted or around.empty else max(0, watch.max_parallel - around.running)
    begun = startable[: slots if room is None else min(slots, room)]
    acts: list[Start | Quarantine | Delay] = [Quarantine(item, _failed(item)) for item in given_up]
    acts += [Start(item, item.attempts if item.blameless else item.attempts + 1) for item in begun]
    left = len(startable) - len(begun)
    if left:
        acts.append(_delay(left, around, room))
    return Watching(tuple(acts), min(resting, default=None))


def _hopeless(item: Item, watch: Watch) -> bool:
    if item.state == "CANCELLED":
        return True
    return item.attempts >= watch.max_attempts and not item.blameless


def _failed(item: Item) -> str:
    if item.state == "CANCELLED":
        return f"{item.name}: a person cancelled {item.session}."
    return f"{item.name} was tried {item.attempts} times; the last session, {item.session}, ended {item.state}."


def _rests_until(item: Item) -> int:
    if item.ended_at is None or item.blameless:
        return 0
    return item.ended_at + RETRY * 4 ** max(0, item.attempts - 1)


def _delay(left: int, around: Around, room: int | None) -> Delay:
    if around.halted:
        return Delay("halted", left, around.halted)
    if around.empty is not None:
        return Delay("cost_cap_reached", left, around.empty.sentence, around.empty.until)
    if room == 0:
        return Delay("cost_cap_reached", left, "What is at work now may need all the money that is left.")
    return Delay("overlap", left, f"{around.running or 'As many as may be'} are at work.")


def empty_of(left: int, cap: int, scope: str, until: int | None) -> Empty | None:
    """Say that a cap leaves nothing to begin with."""
    if left > 0:
        return None
    return Empty(f"{shown(cap)}, the cap of {scope}, is spent or held.", until)
