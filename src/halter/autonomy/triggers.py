"""What a trigger does now, and what an agent can spend within a span: decisions without I/O.

The due times of a schedule are handled in order, and each that starts nothing says why. A document of a watch is done
when a session about it completed; one that fails too often is left to a person.

The clock alone causes autonomous turns, scheduled runs, and what is under way. A model chooses how long it sleeps and
how much it does in a turn, so only caps bound the cost of its turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from halter.autonomy.pace import Hours, find_wake_time
from halter.core.agent_spec import Schedule, Watch
from halter.core.clock import MINUTE, SECOND, WindowLength, window_at, window_end
from halter.core.effect_events import SkipReason
from halter.core.money import BudgetRow, Cap, Caps, ScopedCap, format_micros
from halter.core.rows import TriggerRow
from halter.core.schedules import TickCount, Timing, count_ticks, next_tick_after
from halter.core.vocabulary import State

LATENESS_TOLERANCE: Final = MINUTE
"""A due time handled within this time was not missed."""
MIN_INTERVAL_SLACK: Final = 5 * SECOND
"""A run may start this much before its `min_interval` is over: the one before it was a little late."""
FIRST_RETRY_DELAY: Final = 5 * SECOND
"""Delay after a document's first failure; each further one is four times as long."""


class RunNow(msgspec.Struct, frozen=True):
    """Start the run of that due time."""

    due_at: int


class SkipRuns(msgspec.Struct, frozen=True):
    """Start nothing for these due times; the last is `due_at`."""

    why: SkipReason
    due_at: int
    count: int = 1
    sentence: str = ""


class QueueRun(msgspec.Struct, frozen=True):
    """Start the run of that due time when the one before it ends."""

    due_at: int


class CapExhausted(msgspec.Struct, frozen=True):
    """Which cap leaves nothing, and until when."""

    sentence: str
    until: int | None = None


class TriggerConditions(msgspec.Struct, frozen=True, kw_only=True):
    """What a trigger's decision depends on beside itself.

    `on_since` is when its agent was switched on; `halted` and `empty` say what prevents a run.
    """

    now: int
    on_since: int
    halted: str = ""
    empty: CapExhausted | None = None
    running: int = 0


def decide_schedule(
    schedule: Schedule, timing: Timing, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None = None
) -> Sequence[RunNow | SkipRuns | QueueRun]:
    """Decides about the due times since the last check."""
    if row.queued_at is not None and not conditions.running and not conditions.halted:
        return [_decide_queued(schedule, row.queued_at, row, conditions, hours)]
    found = count_ticks(timing, row.ticked_at, conditions.now)
    if found.latest is None:
        return []
    while_off = count_ticks(timing, row.ticked_at, min(conditions.on_since, conditions.now))
    skipped = list(_skip_past(found, while_off))
    latest = found.latest
    if latest <= conditions.on_since or conditions.now < latest + _jitter(schedule, row.trigger, latest):
        return skipped
    return [*skipped, _decide_latest(schedule, latest, row, conditions, hours)]


def _decide_queued(
    schedule: Schedule, due: int, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None
) -> RunNow | SkipRuns:
    """Starts a queued run, unless something prevents it now."""
    if due <= conditions.on_since:
        return SkipRuns("off", due, 1, "The agent was switched off.")
    against = _find_objection(schedule, row, conditions, hours)
    return RunNow(due) if against is None else SkipRuns(against[0], due, 1, against[1])


def _skip_past(found: TickCount, while_off: TickCount) -> Iterator[SkipRuns]:
    """Skips due times while the agent was off, and all but the last while no process ran."""
    if while_off.latest is not None:
        yield SkipRuns("off", while_off.latest, while_off.count, "The agent was switched off.")
    missed = found.count - while_off.count - 1
    if missed > 0 and found.latest is not None:
        yield SkipRuns("missed", found.latest - 1, missed, "Nothing ran then; the last one stands in for all.")


def _decide_latest(
    schedule: Schedule, due: int, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None
) -> RunNow | SkipRuns | QueueRun:
    late = conditions.now - due - _jitter(schedule, row.trigger, due)
    if schedule.catch_up == "never" and late > LATENESS_TOLERANCE:
        return SkipRuns("missed", due, 1, "Nothing ran then, and it is not made up for.")
    against = _find_objection(schedule, row, conditions, hours)
    if against is not None:
        return SkipRuns(against[0], due, 1, against[1])
    if not conditions.running:
        return RunNow(due)
    if schedule.overlap == "queue" and row.queued_at is None:
        return QueueRun(due)
    waits = " and another one waits" if row.queued_at is not None else ""
    return SkipRuns("overlap", due, 1, f"{row.session} is still at work{waits}.")


def _find_objection(
    schedule: Schedule, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None
) -> tuple[SkipReason, str] | None:
    if conditions.halted:
        return ("halted", conditions.halted)
    if hours is not None and find_wake_time(hours, conditions.now) is not None:
        return ("active_hours", "It is outside of the active hours.")
    if row.ran_at and conditions.now - row.ran_at < schedule.min_interval - MIN_INTERVAL_SLACK:
        return ("too_soon", "The run before it began less than `min_interval` ago.")
    if conditions.empty is not None:
        return ("cost_cap_reached", conditions.empty.sentence)
    return None


def _jitter(schedule: Schedule, trigger: str, due: int) -> int:
    """Delays a run by a random time that is the same at every check."""
    if not schedule.jitter:
        return 0
    return int.from_bytes(sha256(f"{trigger} {due}".encode()).digest()[:8]) % (schedule.jitter + 1)


def find_next_schedule_look(schedule: Schedule, timing: Timing, row: TriggerRow, now: int) -> int | None:
    due = next_tick_after(timing, row.ticked_at)
    if due is None:
        return None
    return max(now, due + _jitter(schedule, row.trigger, due))


class WatchedDocument(msgspec.Struct, frozen=True):
    """A document of a watch, and the state of its newest session."""

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
    def is_done(self) -> bool:
        return bool(self.ignored) or self.quarantined_at is not None or self.state == "COMPLETED"

    @property
    def open(self) -> bool:
        return self.session != "" and self.ended_at is None

    @property
    def blameless(self) -> bool:
        """Whether a person ended its last session, not a failure or idling."""
        return self.state == "HALTED" and self.terminal_reason != "idle_timeout"


class StartRun(msgspec.Struct, frozen=True):
    item: WatchedDocument
    attempt: int


class QuarantineDocument(msgspec.Struct, frozen=True):
    item: WatchedDocument
    sentence: str


class DelayDocuments(msgspec.Struct, frozen=True):
    why: SkipReason
    waiting: int
    sentence: str
    until: int | None = None


class WatchPlan(msgspec.Struct, frozen=True):
    """What to do about the documents of a watch, and when to check again."""

    acts: tuple[StartRun | QuarantineDocument | DelayDocuments, ...] = ()
    until: int | None = None


def decide_watch(
    watch: Watch, items: Sequence[WatchedDocument], conditions: TriggerConditions, capacity: int | None = None
) -> WatchPlan:
    """Decides which documents start, which are left to a person, and why the rest waits.

    `room` is for how many sessions money is left; None is unlimited.
    """
    waiting = [item for item in items if not item.is_done and not item.open]
    given_up = [item for item in waiting if _is_hopeless(item, watch)]
    ready = [item for item in waiting if item not in given_up]
    resting = [at for item in ready if (at := _rests_until(item)) > conditions.now]
    startable = [item for item in ready if _rests_until(item) <= conditions.now]
    slots = 0 if conditions.halted or conditions.empty else max(0, watch.max_parallel - conditions.running)
    begun = startable[: slots if capacity is None else min(slots, capacity)]
    acts: list[StartRun | QuarantineDocument | DelayDocuments] = [
        QuarantineDocument(item, _describe_failure(item)) for item in given_up
    ]
    acts += [StartRun(item, item.attempts if item.blameless else item.attempts + 1) for item in begun]
    remaining = len(startable) - len(begun)
    if remaining:
        acts.append(_make_delay(remaining, conditions, capacity))
    return WatchPlan(tuple(acts), min(resting, default=None))


def _is_hopeless(item: WatchedDocument, watch: Watch) -> bool:
    if item.state == "CANCELLED":
        return True
    return item.attempts >= watch.max_attempts and not item.blameless


def _describe_failure(item: WatchedDocument) -> str:
    if item.state == "CANCELLED":
        return f"{item.name}: a person cancelled {item.session}."
    return f"{item.name} was tried {item.attempts} times; the last session, {item.session}, ended {item.state}."


def _rests_until(item: WatchedDocument) -> int:
    if item.ended_at is None or item.blameless:
        return 0
    return item.ended_at + FIRST_RETRY_DELAY * 4 ** max(0, item.attempts - 1)


def _make_delay(remaining: int, conditions: TriggerConditions, capacity: int | None) -> DelayDocuments:
    if conditions.halted:
        return DelayDocuments("halted", remaining, conditions.halted)
    if conditions.empty is not None:
        return DelayDocuments("cost_cap_reached", remaining, conditions.empty.sentence, conditions.empty.until)
    if capacity == 0:
        return DelayDocuments("cost_cap_reached", remaining, "What is at work now may need all the money that is left.")
    return DelayDocuments("overlap", remaining, f"{conditions.running or 'As many as may be'} are at work.")


def check_cap_exhausted(remaining: int, cap: int, scope: str, until: int | None) -> CapExhausted | None:
    if remaining > 0:
        return None
    return CapExhausted(f"{format_micros(cap)}, the cap of {scope}, is spent or held.", until)


COARSEST_FIRST: Final[tuple[WindowLength, ...]] = ("", "month", "day", "hour", "minute")

Balances = Mapping[tuple[str, str], BudgetRow]
"""Budget rows in dollars by scope and window. Without a row nothing is spent."""


class ScheduledRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one schedule. `caps` include its own; `pending` counts runs that are due already."""

    trigger: str
    timing: Timing
    caps: Caps
    min_interval: int = 0
    pending: int = 0


class Clockwork(msgspec.Struct, frozen=True, kw_only=True):
    """What the clock alone makes an agent do.

    `sessions` is what each open or starting session may still spend; None is unbounded. If the agent `renews`, an
    exhausted session is followed by the next. `free` says that nothing it uses has a price.
    """

    agent: str
    caps: Caps
    sessions: tuple[int | None, ...] = ()
    renews: bool = False
    schedules: tuple[ScheduledRuns, ...] = ()
    free: bool = False


class Forecast(msgspec.Struct, frozen=True):
    """The most that can be spent in a span, in micro-dollars, by the clock alone and in all. None is unbounded."""

    clock: int | None
    most: int | None


def forecast_bounds(work: Clockwork, balances: Balances, since: int, until: int) -> Forecast:
    """Bounds what an agent spends from `since` until `until`, by what the clock causes and by every cap."""
    if work.free:
        return Forecast(0, 0)
    own: list[ScopedCap] = [(f"agent:{work.agent}", cap) for cap in work.caps.agent]
    fleet: list[ScopedCap] = [("fleet", cap) for cap in work.caps.fleet]
    limit = bound_by_windows([*own, *fleet], work.caps.zone, balances, since, until)
    runs = [_bound_runs(each, balances, since, until, limit) for each in work.schedules]
    caused = None if work.renews else _add([*work.sessions, *runs])
    return Forecast(find_tightest([caused, limit]), limit)


def bound_by_windows(caps: Sequence[ScopedCap], zone: str, balances: Balances, since: int, until: int) -> int | None:
    """Sums what caps leave in all windows that a span touches; None where nothing bounds it.

    In each window the tightest cap counts: its own, or what the finer windows in it leave together. An hour that a
    local day cuts in two counts in both, so the bound holds.
    """
    if not caps:
        return None
    per = min((cap for _, cap in caps), key=lambda cap: COARSEST_FIRST.index(cap.per)).per
    here = [(scope, cap) for scope, cap in caps if cap.per == per]
    finer = [(scope, cap) for scope, cap in caps if cap.per != per]
    total, at = 0, since
    while at < until:
        window = window_at(per, at, zone)
        end = min(until, window_end(window) or until)
        left = [_remaining_in_window(scope, cap, window, balances) for scope, cap in here]
        tightest = find_tightest([*left, bound_by_windows(finer, zone, balances, at, end)])
        if tightest is None:
            return None
        total, at = total + tightest, end
    return total


def _remaining_in_window(scope: str, cap: Cap, window: str, balances: Balances) -> int | None:
    """Returns what a cap leaves in a window. Held money counts as left, since it may be spent."""
    row = balances.get((scope, window)) or BudgetRow(scope, window, "usd")
    binding = row.binding(cap.max_cost_usd)
    return None if binding is None else max(0, binding - row.spent)


def _bound_runs(each: ScheduledRuns, balances: Balances, since: int, until: int, limit: int | None) -> int | None:
    """Bounds the runs of a schedule by their number and cap, and by the caps of all its runs together."""
    own: list[ScopedCap] = [(f"trigger:{each.trigger}", cap) for cap in each.caps.trigger]
    together = bound_by_windows(own, each.caps.zone, balances, since, until)
    cap = each.caps.session.max_cost_usd
    runs = _count_runs(each, since, until, _count_enough_runs(cap, find_tightest([together, limit])))
    return 0 if not runs else find_tightest([None if cap is None else runs * cap, together])


def _count_enough_runs(cap: int | None, tightest: int | None) -> int | None:
    """Returns how many runs are worth counting: more than reach the tightest cap change nothing."""
    if not cap:
        return 1
    return None if tightest is None else tightest // cap + 1


def _count_runs(each: ScheduledRuns, since: int, until: int, enough: int | None) -> int:
    """Counts the runs that start within a span, up to `enough`, including delayed ones."""
    spaced = (until - since) // max(SECOND, each.min_interval - MIN_INTERVAL_SLACK) + 1
    counted = spaced if enough is None else min(spaced, enough)
    interval, anchor = each.timing.every, each.timing.anchor
    if interval:
        times = (until - anchor) // interval - (max(since, anchor - 1) - anchor) // interval
    else:
        times = count_ticks(each.timing, since, until, counted).count
    return min(max(0, times), counted) + each.pending


def find_tightest(amounts: Sequence[int | None]) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def _add(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
