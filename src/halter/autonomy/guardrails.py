"""Counting for guardrails: how many calls with side effects any minute has seen."""

import sys
from collections.abc import Sequence
from typing import Final

from halter.core.clock import MINUTE

UNLIMITED: Final = sys.maxsize


def acted(actions: Sequence[int], now: int) -> tuple[int, ...]:
    """Count one more call, made now. What no minute can hold any more is forgotten."""
    return (*(at for at in actions if _counts(at, now)), now)


def allowed(actions: Sequence[int], now: int, most: int) -> int:
    """Tell how many more calls may be made now; 0 as the most is no limit."""
    return max(0, most - _made(actions, now)) if most else UNLIMITED


def free_at(actions: Sequence[int], now: int, most: int) -> int:
    """Tell from when on one more call may be made."""
    if allowed(actions, now, most):
        return now
    counted = sorted(at for at in actions if _counts(at, now))
    return counted[-most] + MINUTE


def _made(actions: Sequence[int], now: int) -> int:
    return sum(1 for at in actions if _counts(at, now))


def _counts(at: int, now: int) -> bool:
    """Tell whether a call is of this minute. What a clock that was set back puts far ahead is not."""
    return abs(now - at) < MINUTE
