"""Decisions of triggers, and bounds on an agent's spending in a span of time. There is no I/O here.

The due times of a schedule are handled in order, and each skipped one has a reason. A document of a watch is done when
a session about it has completed; a document that fails too often is quarantined.

The clock causes autonomous turns, scheduled runs, and the remaining work of open sessions. A model chooses how long
it sleeps and what it does in a turn, so only caps bound the cost of its turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from halter.autonomy.upkeep import Unhealthy
from halter.core.clock import MINUTE, SECOND, WindowLength, window_at, window_end
from halter.core.events.triggers import SkipReason
from halter.core.money import BudgetRow, Cap, Caps, ScopedCap, format_exact_micros
from halter.core.rows import TriggerRow
from halter.core.schedules import TickCount, Timing, count_ticks, next_tick_after
from halter.core.vocabulary import State
from halter.policy.hours import Hours, find_wake_time
from halter.spec.triggers import Schedule, Watch

LATENESS_TOLERANCE: Final = MINUTE
"""A due time handled within this time was not missed."""
MIN_INTERVAL_SLACK: Final = 5 * SECOND
"""A run may start this much before its `min_interval` ends, because the previous run may have been late."""
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
    """Start the run of that due time when the previous run ends."""

    due_at: int


class CapExhausted(msgspec.Struct, frozen=True):
    """A cap has nothing left; `ends_at` is the end of its window."""

    sentence: str
    ends_at: int | None = None


class TriggerConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a trigger's decision.

    `on_since` is the time when its agent was switched on; `halt_reason`, `exhausted_cap` and `unhealthy` describe what
    prevents a run.
    """

    now: int
    on_since: int
    halt_reason: str = ""
    exhausted_cap: CapExhausted | None = None
    unhealthy: Unhealthy | None = None
    running: int = 0

    @property
    def backoff(self) -> Unhealthy | None:
        """The reason for which sessions back off now."""
        return self.unhealthy if self.unhealthy is not None and self.unhealthy.holds_back(self.now) else None


def decide_schedule(
    schedule: Schedule, timing: Timing, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None = None
) -> Sequence[RunNow | SkipRuns | QueueRun]:
    """Decide about the due times since the last check."""
    if row.queued_at is not None and not conditions.running and not conditions.halt_reason:
        return [_decide_queued(schedule, row.queued_at, row, conditions, hours)]
    ticks = count_ticks(timing, row.ticked_at, conditions.now)
    if ticks.latest is None:
        return []
    while_off = count_ticks(timing, row.ticked_at, min(conditions.on_since, conditions.now))
    skips = list(_skip_past(ticks, while_off))
    latest = ticks.latest
    if latest <= conditions.on_since or conditions.now < latest + _jitter(schedule, row.trigger, latest):
        return skips
    return [*skips, _decide_latest(schedule, latest, row, conditions, hours)]


def _decide_queued(
    schedule: Schedule, due_at: int, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None
) -> RunNow | SkipRuns:
    """Start a queued run, unless something prevents it now."""
    if due_at <= conditions.on_since:
        return SkipRuns("off", due_at, 1, "The agent was switched off.")
    objection = _find_objection(schedule, row, conditions, hours)
    return RunNow(due_at) if objection is None else SkipRuns(objection[0], due_at, 1, objection[1])


def _skip_past(ticks: TickCount, while_off: TickCount) -> Iterator[SkipRuns]:
    """Skip due times while the agent was off, and all but the last while no process ran."""
    if while_off.latest is not None:
        yield SkipRuns("off", while_off.latest, while_off.count, "The agent was switched off.")
    missed_count = ticks.count - while_off.count - 1
    if missed_count > 0 and ticks.latest is not None:
        yield SkipRuns(
            "missed", ticks.latest - 1, missed_count, "No process was running; one run replaces all missed ones."
        )


def _decide_latest(
    schedule: Schedule, due_at: int, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None
) -> RunNow | SkipRuns | QueueRun:
    lateness = conditions.now - due_at - _jitter(schedule, row.trigger, due_at)
    if schedule.catch_up == "never" and lateness > LATENESS_TOLERANCE:
        return SkipRuns("missed", due_at, 1, "No process was running, and `catch_up` is `never`.")
    objection = _find_objection(schedule, row, conditions, hours)
    if objection is not None:
        return SkipRuns(objection[0], due_at, 1, objection[1])
    if not conditions.running:
        return RunNow(due_at)
    if schedule.overlap == "queue" and row.queued_at is None:
        return QueueRun(due_at)
    waits = " and another run is queued" if row.queued_at is not None else ""
    return SkipRuns("overlap", due_at, 1, f"{row.session} is still running{waits}.")


def _find_objection(
    schedule: Schedule, row: TriggerRow, conditions: TriggerConditions, hours: Hours | None
) -> tuple[SkipReason, str] | None:
    if conditions.halt_reason:
        return ("halted", conditions.halt_reason)
    if hours is not None and find_wake_time(hours, conditions.now) is not None:
        return ("active_hours", "Outside active hours.")
    if row.ran_at and conditions.now - row.ran_at < schedule.min_interval - MIN_INTERVAL_SLACK:
        return ("too_soon", "The previous run started less than `min_interval` ago.")
    if conditions.exhausted_cap is not None:
        return ("cost_cap_reached", conditions.exhausted_cap.sentence)
    if conditions.backoff is not None:
        return ("no_progress", conditions.backoff.line)
    return None


def _jitter(schedule: Schedule, trigger: str, due_at: int) -> int:
    """Return the random delay of a run, which is the same at every check."""
    if not schedule.jitter:
        return 0
    return int.from_bytes(sha256(f"{trigger} {due_at}".encode()).digest()[:8]) % (schedule.jitter + 1)


def find_next_schedule_check(schedule: Schedule, timing: Timing, row: TriggerRow, now: int) -> int | None:
    due_at = next_tick_after(timing, row.ticked_at)
    if due_at is None:
        return None
    return max(now, due_at + _jitter(schedule, row.trigger, due_at))


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
        """True if a person halted its last session, so that its end does not count as a failure."""
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
    """The actions for the documents of a watch, and the time of the next check."""

    acts: tuple[StartRun | QuarantineDocument | DelayDocuments, ...] = ()
    until: int | None = None


def decide_watch(
    watch: Watch, items: Sequence[WatchedDocument], conditions: TriggerConditions, capacity: int | None = None
) -> WatchPlan:
    """Decide which documents start, which are quarantined, and why the rest waits.

    `capacity` is the number of sessions that the remaining budget covers; None is unlimited.
    """
    waiting = [item for item in items if not item.is_done and not item.open]
    hopeless_items = [item for item in waiting if _is_hopeless(item, watch)]
    retryable = [item for item in waiting if item not in hopeless_items]
    retry_times = [at for item in retryable if (at := _rests_until(item)) > conditions.now]
    # New documents first: one that fails again and again keeps no other one waiting.
    startable = sorted((item for item in retryable if _rests_until(item) <= conditions.now), key=lambda x: x.attempts)
    is_held = conditions.halt_reason or conditions.exhausted_cap or conditions.backoff
    slots = 0 if is_held else max(0, watch.max_parallel - conditions.running)
    starting = startable[: slots if capacity is None else min(slots, capacity)]
    acts: list[StartRun | QuarantineDocument | DelayDocuments] = [
        QuarantineDocument(item, _describe_failure(item)) for item in hopeless_items
    ]
    acts += [StartRun(item, item.attempts if item.blameless else item.attempts + 1) for item in starting]
    remaining = len(startable) - len(starting)
    if remaining:
        acts.append(_make_delay(remaining, conditions, capacity))
    if conditions.backoff is not None and conditions.backoff.until is not None:
        retry_times.append(conditions.backoff.until)
    return WatchPlan(tuple(acts), min(retry_times, default=None))


def _is_hopeless(item: WatchedDocument, watch: Watch) -> bool:
    if item.state == "CANCELLED":
        return True
    return item.attempts >= watch.max_attempts and not item.blameless


def _describe_failure(item: WatchedDocument) -> str:
    if item.state == "CANCELLED":
        return f"{item.name}: a person cancelled {item.session}."
    times = "once" if item.attempts == 1 else f"{item.attempts} times"
    return f"{item.name} was tried {times}; the last session, {item.session}, ended {item.state}."


def _rests_until(item: WatchedDocument) -> int:
    if item.ended_at is None or item.blameless:
        return 0
    return item.ended_at + FIRST_RETRY_DELAY * 4 ** max(0, item.attempts - 1)


def _make_delay(remaining: int, conditions: TriggerConditions, capacity: int | None) -> DelayDocuments:
    if conditions.halt_reason:
        return DelayDocuments("halted", remaining, conditions.halt_reason)
    if conditions.exhausted_cap is not None:
        return DelayDocuments(
            "cost_cap_reached", remaining, conditions.exhausted_cap.sentence, conditions.exhausted_cap.ends_at
        )
    if conditions.backoff is not None:
        return DelayDocuments("no_progress", remaining, conditions.backoff.line, conditions.backoff.until)
    if capacity == 0:
        return DelayDocuments("cost_cap_reached", remaining, "Running sessions may need the rest of the budget.")
    return DelayDocuments(
        "overlap", remaining, f"{conditions.running or 'The maximum number of sessions'} are running."
    )


def check_cap_exhausted(remaining: int, cap: int, scope: str, until: int | None) -> CapExhausted | None:
    if remaining > 0:
        return None
    return CapExhausted(f"The cap of {scope}, {format_exact_micros(cap)}, is spent or held.", until)


COARSEST_FIRST: Final[tuple[WindowLength, ...]] = ("", "month", "day", "hour", "minute")

Balances = Mapping[tuple[str, str], BudgetRow]
"""Budget rows in dollars, by scope and window. Without a row nothing is spent."""


class ScheduledRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one schedule. `caps` include its own; `pending` counts runs that are due already."""

    trigger: str
    timing: Timing
    caps: Caps
    min_interval: int = 0
    pending: int = 0


class OpenRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The open sessions of one trigger. `caps` include its own; `bounds` are what each session may still spend."""

    trigger: str
    caps: Caps
    bounds: tuple[int | None, ...] = ()


class Clockwork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an agent that starts by the clock, without a message or a document.

    `session_bounds` are the amounts that each open or starting session without a trigger may still spend; None is
    unbounded. If the agent `renews`, another session follows an exhausted one. `is_free` is True if nothing that it
    uses has a price.
    """

    agent: str
    caps: Caps
    session_bounds: tuple[int | None, ...] = ()
    renews: bool = False
    schedules: tuple[ScheduledRuns, ...] = ()
    open_runs: tuple[OpenRuns, ...] = ()
    is_free: bool = False


class Forecast(msgspec.Struct, frozen=True):
    """Upper bounds on the spending in a span, in micro-dollars: by the clock alone, and in total. None is unbounded."""

    clock: int | None
    total: int | None


def forecast_bounds(work: Clockwork, balances: Balances, since: int, until: int) -> Forecast:
    """Bound an agent's spending from `since` until `until`, by the work that the clock causes and by every cap."""
    if work.is_free:
        return Forecast(0, 0)
    agent_caps: list[ScopedCap] = [(f"agent:{work.agent}", cap) for cap in work.caps.agent]
    fleet_caps: list[ScopedCap] = [("fleet", cap) for cap in work.caps.fleet]
    limit = bound_by_windows([*agent_caps, *fleet_caps], work.caps.zone, balances, since, until)
    schedules = {each.trigger: each for each in work.schedules}
    open_runs = {each.trigger: each for each in work.open_runs}
    triggers = [
        _bound_trigger(schedules.get(trigger), open_runs.get(trigger), balances, since, until, limit)
        for trigger in sorted({*schedules, *open_runs})
    ]
    clock_bound = None if work.renews else _add([*work.session_bounds, *triggers])
    return Forecast(find_tightest([clock_bound, limit]), limit)


def bound_by_windows(caps: Sequence[ScopedCap], zone: str, balances: Balances, since: int, until: int) -> int | None:
    """Sum the remaining amounts of caps in all windows that a span touches; None if nothing bounds it.

    In each window the tightest bound counts: the window's own cap, or the sum of the finer windows in it. An hour that
    is split between two local days counts in both, so the result is still an upper bound.
    """
    if not caps:
        return None
    per = min((cap for _, cap in caps), key=lambda cap: COARSEST_FIRST.index(cap.per)).per
    window_caps = [(scope, cap) for scope, cap in caps if cap.per == per]
    finer_caps = [(scope, cap) for scope, cap in caps if cap.per != per]
    total, at = 0, since
    while at < until:
        window = window_at(per, at, zone)
        end = min(until, window_end(window) or until)
        remaining = [_remaining_in_window(scope, cap, window, balances) for scope, cap in window_caps]
        tightest = find_tightest([*remaining, bound_by_windows(finer_caps, zone, balances, at, end)])
        if tightest is None:
            return None
        total, at = total + tightest, end
    return total


def _remaining_in_window(scope: str, cap: Cap, window: str, balances: Balances) -> int | None:
    """Return the remaining amount of a cap in a window. Held money counts as remaining, since it may still be spent."""
    row = balances.get((scope, window)) or BudgetRow(scope, window, "usd")
    binding = row.binding(cap.max_cost_usd)
    return None if binding is None else max(0, binding - row.spent)


def _bound_trigger(
    schedule: ScheduledRuns | None,
    open_runs: OpenRuns | None,
    balances: Balances,
    since: int,
    until: int,
    limit: int | None,
) -> int | None:
    """Bound the open and coming runs of a trigger by their number and caps, and by the caps of all of them together."""
    bounds: list[int | None] = []
    sums = [_bound_together(each, balances, since, until) for each in (schedule, open_runs) if each is not None]
    together = find_tightest(sums)
    if schedule is not None:
        cap = schedule.caps.session.max_cost_usd
        run_count = _count_runs(schedule, since, until, _count_enough_runs(cap, find_tightest([together, limit])))
        bounds += [run_count * cap if cap is not None else None] if run_count else []
    if open_runs is not None:
        bounds += open_runs.bounds
    return find_tightest([_add(bounds), together])


def _bound_together(runs: ScheduledRuns | OpenRuns, balances: Balances, since: int, until: int) -> int | None:
    caps: list[ScopedCap] = [(f"trigger:{runs.trigger}", cap) for cap in runs.caps.trigger]
    return bound_by_windows(caps, runs.caps.zone, balances, since, until)


def _count_enough_runs(cap: int | None, tightest: int | None) -> int | None:
    """Return the number of runs that reach the tightest cap. More runs do not change the bound."""
    if not cap:
        return 1
    return None if tightest is None else tightest // cap + 1


def _count_runs(schedule: ScheduledRuns, since: int, until: int, enough_runs: int | None) -> int:
    """Count the runs that start within a span, up to `enough_runs`, including delayed ones."""
    max_runs = (until - since) // max(SECOND, schedule.min_interval - MIN_INTERVAL_SLACK) + 1
    max_count = max_runs if enough_runs is None else min(max_runs, enough_runs)
    interval, anchor = schedule.timing.every, schedule.timing.anchor
    if interval:
        tick_count = (until - anchor) // interval - (max(since, anchor - 1) - anchor) // interval
    else:
        tick_count = count_ticks(schedule.timing, since, until, max_count).count
    return min(max(0, tick_count), max_count) + schedule.pending


def find_tightest(amounts: Sequence[int | None]) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def _add(amounts: Sequence[int | None]) -> int | None:
    bounded_amounts = [amount for amount in amounts if amount is not None]
    return sum(bounded_amounts) if len(bounded_amounts) == len(amounts) else None
