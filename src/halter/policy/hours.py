"""Daily periods in the local time of a zone, over every change of its clocks."""

from collections.abc import Iterator
from datetime import time, timedelta
from zoneinfo import ZoneInfo

import msgspec

from halter.core.clock import find_first_moment, to_local_time
from halter.spec.autonomy import ActiveHours


class Hours(msgspec.Struct, frozen=True):
    """A daily period in a time zone. An end before the start is on the next day."""

    start: time
    end: time
    zone: str


def parse_active_hours(spec: ActiveHours) -> Hours:
    return Hours(time.fromisoformat(spec.start), time.fromisoformat(spec.end), spec.timezone or "UTC")


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
