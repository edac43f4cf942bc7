"""Finds numbers that are far from what they usually are, while they come in.

What is usual is a mean and a variance in which older readings count less and less. The score of a reading is how many
deviations it is away from the mean.
"""

import math
from typing import Any, Final

import msgspec

from halter.core.text import told

HIGHEST: Final = 1_000_000.0
"""No score is higher: for a number that never moved, any step is far away."""

_LEARNED: Final = 3.0
"""What is further away than so many deviations is learned as if it were only that far away."""
_LARGEST: Final = 1e150
"""Larger numbers count as this one, so that no square of them overflows."""
_FINEST: Final = 1e-9
"""The part of the mean, or of 1 if that is larger, that counts as a deviation at least."""


class Unusable(msgspec.Struct, frozen=True):
    """Not a number that anything can be learned from, and a sentence that says what it is instead."""

    sentence: str


class Detected(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned so far: a mean, a variance, of how many readings; `strange` counts outliers in a row."""

    half_life: float = 20
    warmup: int = 20
    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0
    strange: int = 0

    @property
    def deviation(self) -> float:
        """How far a reading usually is from the mean."""
        return max(math.sqrt(self.variance), _FINEST * max(1.0, abs(self.mean)))

    def learn(self, x: float) -> tuple["Detected", float]:
        """Score a number by what was learned before it, and learn from it; what is not finite is passed over.

        An outlier barely moves what is usual. When as many as a warm-up has come in a row, they are the new usual.
        """
        if not math.isfinite(x):
            return self, 0.0
        x = min(max(x, -_LARGEST), _LARGEST)
        away = x - self.mean
        if self.seen < self.warmup:
            return self._with(away, strange=0), 0.0
        score = min(abs(away) / self.deviation, HIGHEST)
        if score <= _LEARNED:
            return self._with(away, strange=0), score
        if self.strange + 1 >= self.warmup:
            return Detected(half_life=self.half_life, warmup=self.warmup, seen=1, mean=x), score
        return self._with(math.copysign(_LEARNED * self.deviation, away), strange=self.strange + 1), score

    def _with(self, away: float, *, strange: int) -> "Detected":
        """Learn from a number so far from the mean. The first ones count alike, for nothing is usual yet."""
        weight = max(1 - 0.5 ** (1 / self.half_life), 1 / (self.seen + 1))
        return msgspec.structs.replace(
            self,
            seen=self.seen + 1,
            mean=self.mean + weight * away,
            variance=(1 - weight) * (self.variance + weight * away * away),
            strange=strange,
        )


def number(value: Any) -> float | Unusable:
    """Take a value for a number, if it is one that can be learned from."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Unusable(f"a detector takes a number, and this is {told(value)}")
    try:
        found = float(value)
    except OverflowError:
        return Unusable("a detector takes a number of usual size, and this one is too large")
    return found if math.isfinite(found) else Unusable("a detector takes a finite number, and this one is not")
