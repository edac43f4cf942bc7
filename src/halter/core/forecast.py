"""The cost that past sessions let expect of the next one."""

import math
from collections.abc import Sequence

import msgspec


class CostForecast(msgspec.Struct, frozen=True):
    """The expected cost, and a bound that the cost will rarely exceed."""

    mean: int
    bound: int
    samples: int


MAX_SAMPLES = 100
MIN_SAMPLES = 5
COLD_START_COST = 5_000


def forecast_cost(costs: Sequence[int], cold_start: int = COLD_START_COST) -> CostForecast:
    """Return the mean and the mean + 3σ of the newest costs; a default until there are enough samples."""
    if len(costs) < MIN_SAMPLES:
        return CostForecast(cold_start, cold_start, len(costs))
    newest = costs[:MAX_SAMPLES]
    mean = sum(newest) / len(newest)
    deviation = math.sqrt(sum((cost - mean) ** 2 for cost in newest) / len(newest))
    return CostForecast(math.ceil(mean), math.ceil(mean + 3 * deviation), len(newest))
