"""The hours in which an agent may be awake, by the clock on the wall of its zone.

Each day has one stretch from `start` to `end`. A wall clock that is put forward or back moves the stretch's ends, and
never cuts it in two: what comes twice counts the first time, and what is skipped is the first moment after the skip.
"""

import re
from collections.abc import Iterator
from datetime import time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from halter.core.errors import ConfigError
from halter.core.pacing import ActiveHours
from halter.core.wall import first_shown, shown_at, zone_of

_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")


class Hours(msgspec.Struct, frozen=True):
    """From when to when, and in which zone. An end before the start is on the next day."""

    start: time
    end: time
    zone: str


def hours_of(spec: ActiveHours) -> Hours:
    """Read what the file says, or raise a ConfigError."""
    start, end = _clock("start", spec.start), _clock("end", spec.end)
    if start == end:
        raise ConfigError(
            f"`active_hours` begins and ends at {spec.start}: let `end` differ from `start`, "
            "or leave `active_hours` out for an agent that may always be awake."
        )
    zone = spec.timezone or "UTC"
    if zone_of(zone) is None:
        raise ConfigError(f"`active_hours.timezone` is {zone!r}, which is no known zone: write it like Europe/Berlin.")
    return Hours(start, end, zone)


def _clock(key: str, text: str) -> time:
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise ConfigError(
            f'`active_hours.{key}` is {text!r}, which is no time of day: write it like "08:00", '
            'from "00:00" to "23:59", in quotes.'
        )
    return time(int(found[1]), int(found[2]))


def asleep_until(hours: Hours, now: int) -> int | None:
    """Tell when the next stretch begins, or None if the agent may be awake now."""
    upcoming: list[int] = []
    for begin, end in _stretches(hours, now):
        if begin <= now < end:
            return None
        if now < begin < end:
            upcoming.append(begin)
    return min(upcoming)


def _stretches(hours: Hours, now: int) -> Iterator[tuple[int, int]]:
    """List the stretches around a moment. On a day that skips all of it, a stretch ends where it begins."""
    zone = ZoneInfo(hours.zone)
    today = shown_at(now, zone).date()
    overnight = timedelta(days=1 if hours.end < hours.start else 0)
    for days in range(-2, 5):
        day = today + timedelta(days=days)
        yield first_shown(day, hours.start, zone), first_shown(day + overnight, hours.end, zone)
