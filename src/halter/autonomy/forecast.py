"""The most that an agent can spend within a span: by the clock alone, and whatever happens. A decision without I/O.

The clock alone causes the agent's own turns, the runs of its schedules, and what is under way. A model chooses how long
it sleeps and how much it does in a turn, so no pace bounds the cost of its turns: the caps do.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from halter.autonomy.triggers import SLACK
from halter.core.clock import SECOND
from halter.core.limits import Cap, Caps
from halter.core.money import BudgetRow
from halter.core.schedules import Timing, ticks
from halter.core.windows import Per, window_at, window_end

COARSEST_FIRST: Final[tuple[Per, ...]] = ("", "month", "day", "hour", "minute")

Balances = Mapping[tuple[str, str], BudgetRow]
"""What stands against caps in dollars, by scope and window. Where no row is known, nothing is spent yet."""
Scoped = tuple[str, Cap]


class ScheduledRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one schedule. `caps` include the schedule's own; `pending` counts runs that are due already."""

    trigger: str
    timing: Timing
    caps: Caps
    min_interval: int = 0
    pending: int = 0


class Clockwork(msgspec.Struct, frozen=True, kw_only=True):
    """What the clock alone makes an agent do.

    `sessions` lists what each session may still spend that is under way or begins by itself; None is any amount. If the
    agent `renews`, a session that has used up its cap is followed by the next. `free` says that nothing it uses has a
    price.
    """

    agent: str
    caps: Caps
    sessions: tuple[int | None, ...] = ()
    renews: bool = False
    schedules: tuple[ScheduledRuns, ...] = ()
    free: bool = False


class Forecast(msgspec.Struct, frozen=True):
    """The most that can be spent within a span, in micro-dollars, by the clock alone and in all. None is any amount."""

    clock: int | None
    most: int | None


def forecast(work: Clockwork, balances: Balances, since: int, until: int) -> Forecast:
    """Bound what an agent spends from `since` until `until` by what the clock causes and by every cap that applies."""
    if work.free:
        return Forecast(0, 0)
    own: list[Scoped] = [(f"agent:{work.agent}", cap) for cap in work.caps.agent]
    fleet: list[Scoped] = [("fleet", cap) for cap in work.caps.fleet]
    most = bound_by_windows([*own, *fleet], work.caps.zone, balances, since, until)
    runs = [_bound_runs(each, balances, since, until, most) for each in work.schedules]
    caused = None if work.renews else _add([*work.sessions, *runs])
    return Forecast(least([caused, most]), most)


def bound_by_windows(caps: Sequence[Scoped], zone: str, balances: Balances, since: int, until: int) -> int | None:
    """Add up what caps leave in all windows that a span touches; None where nothing bounds it.

    In each window the tightest cap counts: its own, or what the finer windows within it leave together. An hour that
    a local day cuts in two counts in both, so that the bound holds.
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
        left = [_left(scope, cap, window, balances) for scope, cap in here]
        tightest = least([*left, bound_by_windows(finer, zone, balances, at, end)])
        if tightest is None:
            return None
        total, at = total + tightest, end
    return total


def _left(scope: str, cap: Cap, window: str, balances: Balances) -> int | None:
    """Tell what a cap leaves in a window. What is held there is about to be spent, so it is part of what is left."""
    row = balances.get((scope, window)) or BudgetRow(scope, window, "usd")
    binding = row.binding(cap.max_cost_usd)
    return None if binding is None else max(0, binding - row.spent)


def _bound_runs(each: ScheduledRuns, balances: Balances, since: int, until: int, most: int | None) -> int | None:
    """Bound the runs of a schedule by their number and their cap, and by the caps of all its runs together."""
    own: list[Scoped] = [(f"trigger:{each.trigger}", cap) for cap in each.caps.trigger]
    together = bound_by_windows(own, each.caps.zone, balances, since, until)
    cap = each.caps.session.max_cost_usd
    runs = _count_runs(each, since, until, _enough(cap, least([together, most])))
    return 0 if not runs else least([None if cap is None else runs * cap, together])


def _enough(cap: int | None, tightest: int | None) -> int | None:
    """Tell how many runs are worth counting: more than reach the tightest cap change nothing."""
    if not cap:
        return 1
    return None if tightest is None else tightest // cap + 1


def _count_runs(each: ScheduledRuns, since: int, until: int, enough: int | None) -> int:
    """Count the runs that begin within a span, up to `enough`. Those that others hold back are counted as well."""
    spaced = (until - since) // max(SECOND, each.min_interval - SLACK) + 1
    counted = spaced if enough is None else min(spaced, enough)
    every, anchor = each.timing.every, each.timing.anchor
    if every:
        times = (until - anchor) // every - (max(since, anchor - 1) - anchor) // every
    else:
        times = ticks(each.timing, since, until, counted).count
    return min(max(0, times), counted) + each.pending


def least(amounts: Sequence[int | None]) -> int | None:
    """Find the tightest bound; None where there is none."""
    return min((amount for amount in amounts if amount is not None), default=None)


def _add(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
