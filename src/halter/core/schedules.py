"""The times at which a schedule fires, in the local time of its zone.

A time that a clock change skips fires once, at the first moment after the gap; a time that occurs twice fires the first
time. A cron expression whose minute or hour field begins with a star has no fixed hour to miss: it continues to fire,
also in a repeated hour.
"""

import re
from collections.abc import Iterator
from datetime import datetime, time, timedelta
from itertools import count, islice
from typing import Final

import msgspec
from cronsim import CronSim, CronSimError

from halter.core.clock import (
    DAY,
    DAY_TIME_PATTERN,
    HOUR,
    MINUTE,
    SECOND,
    find_first_moment,
    find_zone,
    to_local_time,
    to_micros,
)

MAX_CRON_LENGTH: Final = 200
"""Maximum length of a cron expression."""
MAX_INTERVAL_DAYS: Final = 3660
"""Maximum distance between two ticks, in days."""
LATEST_MOMENT: Final = 7_000 * 365 * DAY
"""The last moment of a tick: calendars end there."""
EARLIEST_MOMENT: Final = -1_000 * 365 * DAY

_AT: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_FIELDS: Final = {
    "minute": "the minute must be from 0 to 59",
    "hour": "the hour must be from 0 to 23",
    "day-of-month": "the day of the month must be from 1 to 31, and must exist in one of the months",
    "month": "the month must be from 1 to 12, or JAN to DEC",
    "day-of-week": "the day of the week must be from 0 (Sunday) to 7 (Sunday again), or SUN to SAT",
}
_EXAMPLE: Final = "Write it like `0 9 * * 1-5`, which is 09:00 on weekdays."
_SCHEDULE_UNITS: Final = ((DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"), (SECOND, "second"))


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """The times at which a schedule fires: exactly one of `cron`, `every`, `days` and `at` is set.

    `every` counts microseconds and `days` calendar days. Both count from `anchor`: it, or its local day, is the first
    tick.
    """

    cron: str = ""
    every: int = 0
    days: int = 0
    time: str = ""
    at: int | None = None
    timezone: str = "UTC"
    anchor: int = 0


class TickCount(msgspec.Struct, frozen=True):
    """The number of ticks, up to a maximum, and the latest tick of all."""

    count: int
    latest: int | None


def find_timing_flaw(timing: Timing) -> str:
    """Describe why a timing is invalid or never fires, and what to write instead; empty if it is valid."""
    is_set = [bool(timing.cron), timing.every != 0, timing.days != 0, timing.at is not None]
    if sum(is_set) != 1:
        return "A schedule needs exactly one of `cron`, `every`, `days` and `at`."
    if find_zone(timing.timezone) is None:
        return f"The time zone {timing.timezone[:MAX_CRON_LENGTH]!r} is not known. Write it like Europe/Berlin."
    if timing.cron:
        return _find_cron_flaw(timing.cron)
    if timing.every:
        return _find_interval_flaw(timing.every)
    if timing.days:
        return _find_days_flaw(timing)
    return (
        ""
        if EARLIEST_MOMENT < (timing.at or 0) < LATEST_MOMENT
        else "`at` is beyond the calendar. Write it like 2026-12-01 09:00."
    )


def _find_cron_flaw(cron: str) -> str:
    if len(cron) > MAX_CRON_LENGTH:
        return f"The cron expression has {len(cron)} characters; the limit is {MAX_CRON_LENGTH}. {_EXAMPLE}"
    field_count = len(cron.split())
    if field_count != 5:  # noqa: PLR2004  a cron expression has five fields
        return (
            f"The cron expression {cron!r} has {field_count} fields and needs five: minute, hour, day of the month, "
            f"month and day of the week. {_EXAMPLE}"
        )
    try:
        first_tick = next(CronSim(cron, datetime(2000, 1, 1)), None)  # noqa: DTZ001  no zone decides whether a day exists
    except CronSimError as error:
        rule = _FIELDS.get(str(error).removeprefix("Bad "), str(error))
        return f"The cron expression {cron!r} is invalid: {rule}. {_EXAMPLE}"
    return "" if first_tick else f"The cron expression {cron!r} never fires: no day matches. {_EXAMPLE}"


def _find_interval_flaw(interval: int) -> str:
    if interval < SECOND:
        return "`every` must be at least one second. Write it like 15m."
    return (
        ""
        if interval <= MAX_INTERVAL_DAYS * DAY
        else f"`every` must be at most {MAX_INTERVAL_DAYS} days. Write it like 15m."
    )


def _find_days_flaw(timing: Timing) -> str:
    if not 0 < timing.days <= MAX_INTERVAL_DAYS:
        return f"`days` must be from 1 to {MAX_INTERVAL_DAYS}."
    if not EARLIEST_MOMENT < timing.anchor < LATEST_MOMENT:
        return "The day from which `days` counts is beyond the calendar."
    if re.fullmatch(DAY_TIME_PATTERN, timing.time) is None:
        time = timing.time[:MAX_CRON_LENGTH]
        return f'`time` is {time!r}, which is not a time of day. Write it like "09:00", in quotes.'
    return ""


def next_tick_after(timing: Timing, moment: int) -> int | None:
    """Return the first tick strictly after a moment, or None. The timing must have no flaw."""
    return next(_iterate_ticks(timing, moment), None)


def count_ticks(timing: Timing, after: int, until: int, limit: int = 1000) -> TickCount:
    """Count the ticks after a moment, up to and including `until`; the work is bounded by `limit`."""
    tick_count, latest = 0, None
    for tick in islice(_iterate_ticks(timing, after), limit):
        if tick > until:
            return TickCount(tick_count, latest)
        tick_count, latest = tick_count + 1, tick
    return TickCount(tick_count, latest if latest is None else _find_latest_tick(timing, latest, until))


def _find_latest_tick(timing: Timing, tick: int, until: int) -> int:
    """Find the last tick up to a moment, by bisection from a tick before it."""
    low, high = tick, until
    while high - low > SECOND:
        middle = (low + high) // 2
        next_tick = next_tick_after(timing, middle)
        low, high = (low, middle) if next_tick is None or next_tick > until else (next_tick, high)
    following = next_tick_after(timing, low)
    return low if following is None or following > until else following


def _iterate_ticks(timing: Timing, after: int) -> Iterator[int]:
    if timing.at is not None:
        return iter([timing.at] if timing.at > after else [])
    if timing.every:
        first_number = max(0, (after - timing.anchor) // timing.every + 1)
        return _cut_at_latest(timing.anchor + number * timing.every for number in count(first_number))
    return _cut_at_latest(tick for tick in _iterate_wall_ticks(timing, max(after, EARLIEST_MOMENT)) if tick > after)


def _cut_at_latest(moments: Iterator[int]) -> Iterator[int]:
    for moment in moments:
        if moment > LATEST_MOMENT:
            return
        yield moment


def _iterate_wall_ticks(timing: Timing, after: int) -> Iterator[int]:
    """Yield ticks by the local clock; in a repeated hour, the first ones may be before `after`."""
    zone = find_zone(timing.timezone)
    if zone is None or after > LATEST_MOMENT:
        return
    if timing.cron:
        # A cron expression uses the wall clock, on which a repeated hour looks like the first one.
        yield from (to_micros(when) for when in CronSim(timing.cron, to_local_time(after, zone)))
        return
    clock = time.fromisoformat(timing.time)
    start, today = to_local_time(timing.anchor, zone).date(), to_local_time(after, zone).date()
    for number in count(max(0, (today - start).days // timing.days - 1)):
        yield find_first_moment(start + timedelta(days=number * timing.days), clock, zone)


def explain_timing(timing: Timing) -> str:
    """Describe a timing in plain words, as in `at 09:00 on weekdays, Europe/Berlin`."""
    if timing.at is not None:
        zone = find_zone(timing.timezone)
        moment = "" if zone is None else f"{to_local_time(timing.at, zone):%Y-%m-%d at %H:%M}"
        return f"once, on {moment}, {timing.timezone}"
    if timing.every:
        return f"every {_describe_duration(timing.every)}"
    if timing.days:
        return f"{_describe_interval(timing)} at {timing.time}, {timing.timezone}"
    sentence = CronSim(timing.cron, datetime(2000, 1, 1)).explain()  # noqa: DTZ001  no zone changes the words
    sentence = sentence.replace("Monday through Friday", "weekdays")
    return f"{sentence[0].lower()}{sentence[1:]}, {timing.timezone}"


def _describe_interval(timing: Timing) -> str:
    zone = find_zone(timing.timezone)
    if timing.days % 7 == 0 and zone is not None:
        weeks = "every week" if timing.days == 7 else f"every {timing.days // 7} weeks"  # noqa: PLR2004  a week has 7
        return f"{weeks} on {to_local_time(timing.anchor, zone):%A}"
    return "every day" if timing.days == 1 else f"every {timing.days} days"


def _describe_duration(interval: int) -> str:
    phrases: list[str] = []
    for unit, name in _SCHEDULE_UNITS:
        number, interval = divmod(interval, unit)
        if number:
            phrases.append(f"{number} {name}{'' if number == 1 else 's'}")
    sentence = " and ".join(phrases)
    return sentence.removeprefix("1 ") if len(phrases) == 1 else sentence


def parse_moment(text: str, timezone: str) -> int | str:
    """Parse a date and time such as `2026-12-01 09:00`, or return a sentence that says why it is invalid."""
    flaw = f"`at` is {text[:MAX_CRON_LENGTH]!r}, which is not a date and time. Write it like 2026-12-01 09:00."
    zone = find_zone(timezone)
    if zone is None:
        return f"The time zone {timezone[:MAX_CRON_LENGTH]!r} is not known. Write it like Europe/Berlin."
    match = _AT.fullmatch(text.strip())
    if match is None:
        return flaw
    try:
        local_moment = datetime.fromisoformat(match[0])
        moment = (
            to_micros(local_moment) if match[1] else find_first_moment(local_moment.date(), local_moment.time(), zone)
        )
    except (ValueError, OverflowError):
        return flaw
    return moment if 0 <= moment < LATEST_MOMENT else flaw
