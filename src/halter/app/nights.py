"""What an agent costs in a night at worst, and what it costs if nothing happens: said before it is switched on."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from halter.app.forecasts import PerRun, in_a_month, per_run
from halter.app.runs import FROM_FILE
from halter.app.triggered import read_made
from halter.app.triggers import timing_of
from halter.autonomy.triggers import worst
from halter.config.mind import Read
from halter.core.clock import HOUR
from halter.core.limits import Cap, Spender, accounts
from halter.core.money import BudgetRow, shown
from halter.core.ports import Query, Store
from halter.core.schedules import Timing
from halter.core.spec import Resolved
from halter.core.task_rows import TriggerRow
from halter.core.tasks import AnyTrigger, Schedule, caps_of
from halter.core.windows import window_at, window_end

NIGHT: Final = 12 * HOUR

Triggered = tuple[AnyTrigger, Timing | None]


class Costs(msgspec.Struct, frozen=True):
    """What a night costs at worst, and thirty days if nothing happens. None is any amount."""

    worst_night: int | None
    idle_month: int | None
    run: PerRun
    schedules: int = 0

    def told(self) -> Sequence[str]:
        """Say both."""
        night = "any amount, for no cap bounds it" if self.worst_night is None else shown(self.worst_night)
        said = [f"A night, the next 12 hours, costs at worst {night}."]
        if not self.schedules:
            return [*said, "If nothing happens: $0.00, for it has no schedules."]
        idle = "any amount" if self.idle_month is None else shown(self.idle_month)
        return [*said, f"If nothing happens, its schedules cost {idle} in thirty days ({self.run.told()})."]


async def costs(store: Store, policy: Resolved, read: Read, now: int) -> Costs:
    """Work both out, for what its file names and what people confirmed."""
    found = [*_of_the_file(read, now), *await _confirmed(store, policy.name)]
    timings = [timing for _, timing in found if timing is not None]
    run = await per_run(store, policy.name, policy.caps.session.max_cost_usd, now)
    own = [policy.caps.session.max_cost_usd] if read.pacing.autonomy.enabled else []
    most = added([*(trigger_night(each, timing, policy, now) for each, timing in found), *own])
    bounds = [await _left(store, policy, scope, now) for scope in (f"agent:{policy.name}", "fleet")]
    return Costs(least([most, *bounds]), in_a_month(timings, run, now), run, len(timings))


def _of_the_file(read: Read, now: int) -> Iterable[Triggered]:
    for each in read.tasks.triggers():
        yield each, timing_of(each, now) if isinstance(each, Schedule) else None


async def _confirmed(store: Store, agent: str) -> Sequence[Triggered]:
    rows = await store.ask(Query("triggers_of", TriggerRow, {"agent": agent}))
    made = [await read_made(store, row) for row in rows if row.made_by != FROM_FILE]
    return [(each.trigger(), each.timing) for each in made if each is not None]


def trigger_night(trigger: AnyTrigger, timing: Timing | None, policy: Resolved, now: int) -> int | None:
    """Bound what a trigger's runs cost in a night: by their number if time decides that, and by its own caps."""
    caps = caps_of(policy.caps, trigger)
    runs = None if timing is None else worst([(timing, caps.session.max_cost_usd)], now, now + NIGHT)
    return least([runs, *(_windows(cap, policy.caps.zone, now) for cap in caps.trigger)])


def _windows(cap: Cap, zone: str, now: int) -> int | None:
    """Add up a cap over all windows that a night touches."""
    return None if cap.max_cost_usd is None else cap.max_cost_usd * (1 + later_windows(cap, zone, now))


def later_windows(cap: Cap, zone: str, now: int) -> int:
    """Count the windows that begin within a night."""
    number, end = 0, window_end(window_at(cap.per, now, zone))
    while end is not None and end < now + NIGHT:
        number, end = number + 1, window_end(window_at(cap.per, end, zone))
    return number


async def _left(store: Store, policy: Resolved, scope: str, now: int) -> int | None:
    """Tell what the caps of a scope leave for a night: the rest of this window, and all of those that begin in it."""
    legs = {leg.window: leg for leg in accounts(policy.caps, Spender("", policy.name), now) if leg.scope == scope}
    found: list[int | None] = []
    for cap in policy.caps.fleet if scope == "fleet" else policy.caps.agent:
        leg = legs[window_at(cap.per, now, policy.caps.zone)]
        params = {"scope": scope, "window": leg.window, "unit": "usd"}
        row = next(iter(await store.ask(Query("budget", BudgetRow, params))), None)
        binding = leg.cap if row is None else row.binding(leg.cap)
        if binding is not None and leg.cap is not None:
            spent = 0 if row is None else row.spent
            found.append(max(0, binding - spent) + leg.cap * later_windows(cap, policy.caps.zone, now))
    return least(found)


def least(amounts: Sequence[int | None]) -> int | None:
    """Find the tightest bound; None where there is none."""
    return min((amount for amount in amounts if amount is not None), default=None)


def added(amounts: Sequence[int | None]) -> int | None:
    """Add bounds up; None where one of them is missing."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
