"""How much may be asked of the server: sizes, rates, and how many may listen at once."""

from collections.abc import Mapping
from typing import Final

import msgspec

from halter.core.clock import MINUTE, SECOND

MOST_NAMES: Final = 10_000
"""So many buckets are kept; full ones are forgotten first, since a new one is full as well."""


class Limits(msgspec.Struct, frozen=True):
    """What one server takes."""

    body: int = 1024 * 1024
    requests: int = 1200
    """So many requests a token may make in a minute."""
    pages: int = 120
    """So many of them may be pages and downloads: each takes a hundred times as long, and agents may wait for it."""
    failures: int = 10
    """So many wrong tokens may be tried in a minute, from one place: to log in, as bearer, at a webhook."""
    stale: int = 120
    """So many cookies that have ended may be shown in a minute, from one place: pages that were left open do that."""
    streams: int = 20
    """So many streams and sockets a token may have open."""
    all_streams: int = 500
    upload: int = 30 * SECOND
    """How long a body may be in coming."""
    head: int = 10 * SECOND
    """How long somebody may be connected without having asked for anything."""
    stall: int = 30 * SECOND
    """How long somebody may take nothing of what they are sent."""
    check: int = 2 * SECOND
    """How often it is looked whether who listens may still do so."""


class Bucket(msgspec.Struct, frozen=True):
    """What is left of an allowance, and when that was."""

    left: float
    at: int


def taken(bucket: Bucket | None, most: int, now: int) -> tuple[Bucket, int]:
    """Take one from what a minute allows; tell how long to wait where nothing is left (0: it was taken)."""
    left = float(most) if bucket is None else filled(bucket, most, now)
    if left < 1:
        return Bucket(left, now), max(1, round((1 - left) * MINUTE / most))
    return Bucket(left - 1, now), 0


def filled(bucket: Bucket, most: int, now: int) -> float:
    """Tell how much is left by now. A clock that was put back takes nothing away."""
    return min(float(most), bucket.left + max(0, now - bucket.at) * most / MINUTE)


class Rates:
    """Allowances by name, each of so many a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buckets: dict[str, Bucket] = {}

    def wait(self, name: str, now: int) -> int:
        """Take one; tell how long to wait if none was left."""
        self._buckets[name], wait = taken(self._buckets.get(name), self._most, now)
        if len(self._buckets) > MOST_NAMES:
            self._buckets = dict(self._kept(now))
        return wait

    def is_spent(self, name: str, now: int) -> int:
        """Tell how long to wait, without taking one."""
        bucket = self._buckets.get(name)
        return 0 if bucket is None else taken(bucket, self._most, now)[1]

    def remembered(self) -> int:
        """Tell how many names are kept."""
        return len(self._buckets)

    def _kept(self, now: int) -> Mapping[str, Bucket]:
        wanting = {name: each for name, each in self._buckets.items() if filled(each, self._most, now) < self._most}
        return dict(list(wanting.items())[-MOST_NAMES // 2 :])


class Open:
    """How many streams are open, by whom."""

    def __init__(self, each: int, together: int) -> None:
        self._each = each
        self._together = together
        self._counts: dict[str, int] = {}

    def enter(self, name: str) -> bool:
        """Count one more, if there may be one."""
        if self._counts.get(name, 0) >= self._each or sum(self._counts.values()) >= self._together:
            return False
        self._counts[name] = self._counts.get(name, 0) + 1
        return True

    def leave(self, name: str) -> None:
        """Count one less."""
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]

    def count(self) -> int:
        """Tell how many there are."""
        return sum(self._counts.values())
