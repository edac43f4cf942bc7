"""When a schedule fires, by the local time of its zone.

A time that a clock change skips fires once, at the first moment after the gap; one that occurs twice fires the first
time. A cron whose minute or hour begins with a star has no fixed hour to miss: it keeps ticking, through a repeated
hour as well.
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from itertools import count, islice
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from halter.core.clock import DAY, HOUR, MINUTE, SECOND

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def find_zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def to_local_time(moment: int, zone: ZoneInfo) -> datetime:
    return (_EPOCH + timedelta(microseconds=moment)).astimezone(zone)


def to_micros(when: datetime) -> int:
    return (when.astimezone(UTC) - _EPOCH) // _MICROSECOND


def find_first_moment(day: date, clock: time, zone: ZoneInfo) -> int:
    """The first moment at which the local clock shows a time on a day, or more if it never does."""
    local = datetime.combine(day, clock, zone)
    found = local.astimezone(UTC)
    if found.astimezone(zone).replace(tzinfo=None) != local.replace(tzinfo=None):
        found = _end_of_gap(local, zone)
    return to_micros(found)


def _end_of_gap(local: datetime, zone: ZoneInfo) -> datetime:
    """The moment at which the local clock jumped over a time.

    Read with the offset from after the jump, the time lies before it; read with the one from before, after it.
    """
    before, after = local.replace(fold=1).astimezone(UTC), local.astimezone(UTC)
    new = after.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = (before + (after - before) / 2).replace(microsecond=0)
        before, after = (before, middle) if middle.astimezone(zone).utcoffset() == new else (middle, after)
    return after


LONGEST: Final = 200
"""Longest cron expression."""
MOST_DAYS: Final = 3660
"""The longest distance between two ticks, in days."""
LATEST_MOMENT: Final = 7_000 * 365 * DAY
"""No tick lies beyond: calendars end there."""
EARLIEST_MOMENT: Final = -1_000 * 365 * DAY

_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])", re.ASCII)
_AT: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_FIELDS: Final = {
    "minute": "the minute goes from 0 to 59",
    "hour": "the hour goes from 0 to 23",
    "day-of-month": "the day of the month goes from 1 to 31, and must exist in one of the months",
    "month": "the month goes from 1 to 12, or JAN to DEC",
    "day-of-week": "the day of the week goes from 0 (Sunday) to 7 (Sunday again), or SUN to SAT",
}
_EXAMPLE: Final = "Write it like `0 9 * * 1-5`, which is 09:00 on weekdays."
_SCHEDULE_UNITS: Final = ((DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"), (SECOND, "second"))


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """When something fires: exactly one of `cron`, `every`, `days` and `at` is set.

    `every` counts microseconds and `days` calendar days, both from `anchor`: it, or its local day, is the first.
    """

    cron: str = ""
    every: int = 0
    days: int = 0
    time: str = ""
    at: int | None = None
    timezone: str = "UTC"
    anchor: int = 0


class TickCount(msgspec.Struct, frozen=True):
    """How many ticks there were, up to a maximum, and the latest of all."""

    count: int
    latest: int | None


def find_timing_flaw(timing: Timing) -> str:
    """Why a schedule cannot be read or never fires, and what to write instead; empty if it is sound."""
    said = [bool(timing.cron), timing.every != 0, timing.days != 0, timing.at is not None]
    if sum(said) != 1:
        return "A schedule says exactly one of `cron`, `every`, `days` and `at`."
    if find_zone(timing.timezone) is None:
        return f"The time zone {timing.timezone[:LONGEST]!r} is not known: write it like Europe/Berlin."
    if timing.cron:
        return _cron_flaw(timing.cron)
    if timing.every:
        return _every_flaw(timing.every)
    if timing.days:
        return _days_flaw(timing)
    return (
        ""
        if EARLIEST_MOMENT < (timing.at or 0) < LATEST_MOMENT
        else "`at` lies beyond all calendars: write it like 2026-12-01 09:00."
    )


def _cron_flaw(cron: str) -> str:
    if len(cron) > LONGEST:
        return f"A cron has at most {LONGEST} characters, and this one has {len(cron)}. {_EXAMPLE}"
    fields = len(cron.split())
    if fields != 5:  # noqa: PLR2004  five fields are what a cron is
        return (
            f"The cron {cron!r} has {fields} fields, and it needs five: minute, hour, day of the month, month and day "
            f"of the week. {_EXAMPLE}"
        )
    try:
        comes = next(CronSim(cron, datetime(2000, 1, 1)), None)  # noqa: DTZ001  no zone decides whether a day exists
    except CronSimError as error:
        rule = _FIELDS.get(str(error).removeprefix("Bad "), str(error))
        return f"The cron {cron!r} cannot be read: {rule}. {_EXAMPLE}"
    return "" if comes else f"The cron {cron!r} never fires: no day fits it. {_EXAMPLE}"


def _every_flaw(interval: int) -> str:
    if interval < SECOND:
        return "`every` must be at least one second: write it like 15m."
    return "" if interval <= MOST_DAYS * DAY else f"`every` must be at most {MOST_DAYS} days: write it like 15m."


def _days_flaw(timing: Timing) -> str:
    if not 0 < timing.days <= MOST_DAYS:
        return f"`days` goes from 1 to {MOST_DAYS}."
    if not EARLIEST_MOMENT < timing.anchor < LATEST_MOMENT:
        return "The day from which `days` counts lies beyond all calendars."
    if _CLOCK.fullmatch(timing.time) is None:
        return f'`time` is {timing.time[:LONGEST]!r}, which is no time of day: write it like "09:00", in quotes.'
    return ""


def next_tick_after(timing: Timing, after: int) -> int | None:
    """The first tick strictly after a moment, or None. The timing has no flaw."""
    return next(_iterate_ticks(timing, after), None)


def count_ticks(timing: Timing, after: int, until: int, limit: int = 1000) -> TickCount:
    """Count the ticks after a moment, up to and including another; the work is bounded."""
    counted, latest = 0, None
    for tick in islice(_iterate_ticks(timing, after), limit):
        if tick > until:
            return TickCount(counted, latest)
        counted, latest = counted + 1, tick
    return TickCount(counted, latest if latest is None else _find_latest_tick(timing, latest, until))


def _find_latest_tick(timing: Timing, known: int, until: int) -> int:
    """The last tick up to a moment, by bisection from a known tick."""
    low, high = known, until
    while high - low > SECOND:
        middle = (low + high) // 2
        found = next_tick_after(timing, middle)
        low, high = (low, middle) if found is None or found > until else (found, high)
    following = next_tick_after(timing, low)
    return low if following is None or following > until else following


def _iterate_ticks(timing: Timing, after: int) -> Iterator[int]:
    if timing.at is not None:
        return iter([timing.at] if timing.at > after else [])
    if timing.every:
        first = max(0, (after - timing.anchor) // timing.every + 1)
        return _cut_at_latest(timing.anchor + k * timing.every for k in count(first))
    return _cut_at_latest(tick for tick in _iterate_wall_ticks(timing, max(after, EARLIEST_MOMENT)) if tick > after)


def _cut_at_latest(moments: Iterator[int]) -> Iterator[int]:
    for moment in moments:
        if moment > LATEST_MOMENT:
            return
        yield moment


def _iterate_wall_ticks(timing: Timing, after: int) -> Iterator[int]:
    """Ticks by the local clock; in a repeated hour, the first ones may lie before `after`."""
    zone = find_zone(timing.timezone)
    if zone is None or after > LATEST_MOMENT:
        return
    if timing.cron:
        # A cron goes by the wall clock, where the second of two equal hours looks like the first.
        yield from (to_micros(when) for when in CronSim(timing.cron, to_local_time(after, zone)))
        return
    clock = time.fromisoformat(timing.time)
    start, today = to_local_time(timing.anchor, zone).date(), to_local_time(after, zone).date()
    for k in count(max(0, (today - start).days // timing.days - 1)):
        yield find_first_moment(start + timedelta(days=k * timing.days), clock, zone)


def explain_timing(timing: Timing) -> str:
    """The timing in plain words, as in `at 09:00 on weekdays, Europe/Berlin`."""
    if timing.at is not None:
        zone = find_zone(timing.timezone)
        shown = "" if zone is None else f"{to_local_time(timing.at, zone):%Y-%m-%d at %H:%M}"
        return f"once, on {shown}, {timing.timezone}"
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
    parts: list[str] = []
    for unit, name in _SCHEDULE_UNITS:
        number, interval = divmod(interval, unit)
        if number:
            parts.append(f"{number} {name}{'' if number == 1 else 's'}")
    sentence = " and ".join(parts)
    return sentence.removeprefix("1 ") if len(parts) == 1 else sentence


def parse_moment(text: str, timezone: str) -> int | str:
    """Read a moment as a file has it, `2026-12-01 09:00`, or say why it cannot be read."""
    wrong = f"`at` is {text[:LONGEST]!r}, which is no moment: write it like 2026-12-01 09:00."
    zone = find_zone(timezone)
    if zone is None:
        return f"The time zone {timezone[:LONGEST]!r} is not known: write it like Europe/Berlin."
    match = _AT.fullmatch(text.strip())
    if match is None:
        return wrong
    try:
        read = datetime.fromisoformat(match[0])
        moment = to_micros(read) if match[1] else find_first_moment(read.date(), read.time(), zone)
    except (ValueError, OverflowError):
        return wrong
    return moment if 0 <= moment < LATEST_MOMENT else wrong
