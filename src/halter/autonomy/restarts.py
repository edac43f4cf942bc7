"""How often an agent that breaks down is started again, before a person has to look."""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.core.clock import MINUTE, SECOND

WITHIN: Final = 10 * MINUTE
MOST: Final = 5
"""So many breakdowns within that time are too many."""


class Again(msgspec.Struct, frozen=True):
    """Start again after so many microseconds."""

    after: int


class GiveUp(msgspec.Struct, frozen=True):
    """Leave it to a person."""


def after_failure(failures: Sequence[int], now: int) -> Again | GiveUp:
    """Decide what follows a breakdown; `failures` are the moments of all of them, this one included.

    A moment that a clock set back has put into the future counts if it is near.
    """
    recent = sum(1 for at in failures if abs(now - at) < WITHIN)
    return GiveUp() if recent >= MOST else Again(SECOND << max(0, recent - 1))
