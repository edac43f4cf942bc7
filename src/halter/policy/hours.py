"""Daily periods in the local time of a zone, over every change of its clocks."""

import re
from collections.abc import Iterator
from datetime import time, timedelta
from zoneinfo import ZoneInfo

import msgspec

from halter.core.clock import DAY_TIME_PATTERN, find_first_moment, find_zone, to_local_time
from halter.core.errors import ConfigError
from halter.spec.autonomy import ActiveHours


class Hours(msgspec.Struct, frozen=True):
    """A daily period in a time zone. An end before the start is on the next day."""

    start: time
    end: time
    zone: str


def parse_active_hours(spec: ActiveHours) -> Hours:
    start, end = _clock("start", spec.start), _clock("end", spec.end)
    if start == end:
        raise ConfigError(
            f"`active_hours` starts and ends at {spec.start}. Set a different `end`, "
            "or remove `active_hours` for an agent that may always be awake."
        )
    zone = spec.timezone or "UTC"
    if find_zone(zone) is None:
        raise ConfigError(f"`active_hours.timezone` is {zone!r}, which is unknown. Use a name such as Europe/Berlin.")
    return Hours(start, end, zone)


def _clock(key: str, text: str) -> time:
    if re.fullmatch(DAY_TIME_PATTERN, text) is None:
        raise ConfigError(
            f'`active_hours.{key}` is {text!r}, which is not a time of day. Use a quoted time such as "08:00", '
            'from "00:00" to "23:59".'
        )
    return time.fromisoformat(text)


def find_wake_time(hours: Hours, now: int) -> int | None:
    """Return when the next period begins; None if the agent may be awake now."""
    upcoming: list[int] = []
    for begin, end in list_stretches(hours, now):
        if begin <= now < end:
            return None
        if now < begin < end:
            upcoming.append(begin)
    return min(upcoming)


def list_stretches(hours: Hours, now: int) -> Iterator[tuple[int, int]]:
    """Yield the periods around a moment. A period that a day skips entirely has no length."""
    zone = ZoneInfo(hours.zone)
    today = to_local_time(now, zone).date()
    overnight = timedelta(days=1 if hours.end < hours.start else 0)
    for days in range(-2, 5):
        date = today + timedelta(days=days)
        yield find_first_moment(date, hours.start, zone), find_first_moment(date + overnight, hours.end, zone)
