"""What an agent's runs will cost, as far as can be told before: by what its tasks cost so far, and by its caps."""

from collections.abc import Sequence

import msgspec

from halter.core.clock import DAY
from halter.core.money import SAMPLES_KEPT, SAMPLES_NEEDED, forecast, shown
from halter.core.ports import Query, Store
from halter.core.schedules import Timing, ticks

MONTH = 30 * DAY
REMEMBERED = 30 * DAY
"""What is older tells nothing of tomorrow."""
MOST_TICKS = 50_000


class PerRun(msgspec.Struct, frozen=True):
    """What one run will probably cost; without enough earlier ones, the most that it may. None is any amount."""

    usd: int | None
    samples: int = 0

    def told(self) -> str:
        """Say it, and on what grounds."""
        if self.samples:
            return f"{_amount(self.usd)} a run, the mean of {self.samples} tasks"
        return f"at most {_amount(self.usd)} a run, its cap: there are too few earlier tasks to go by"


class _Cost(msgspec.Struct, frozen=True):
    usd: int


async def per_run(store: Store, agent: str, cap: int | None, now: int) -> PerRun:
    """Tell what a task of an agent will cost."""
    params = {"agent": agent, "since": now - REMEMBERED, "limit": SAMPLES_KEPT}
    costs = [row.usd for row in await store.ask(Query("task_costs", _Cost, params))]
    if len(costs) < SAMPLES_NEEDED:
        return PerRun(cap)
    return PerRun(forecast(costs).mean, len(costs))


def in_a_month(timings: Sequence[Timing], run: PerRun, now: int) -> int | None:
    """Tell what all runs of the next thirty days will cost; None is any amount."""
    times = sum(ticks(timing, now, now + MONTH, MOST_TICKS).count for timing in timings)
    if not times:
        return 0
    return None if run.usd is None else times * run.usd


def _amount(usd: int | None) -> str:
    return "any amount" if usd is None else shown(usd)
