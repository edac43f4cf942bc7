"""Time as a parameter: integers of microseconds since 1970, in UTC.

Durations are written `30s`, `15m`, `1h30m`, `90d`. Caps and rates apply to calendar windows: a minute, an hour, a day
or a month. The name of a window is complete, as in `day/2026-11-15` or `month/2026-11@Europe/Berlin`. The empty window
is the whole life of a scope; a session's own cap has it.
"""

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from time import monotonic_ns, time_ns
from typing import Final, Literal, Protocol, cast
from zoneinfo import ZoneInfo

from halter.core.errors import ConfigError

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Clock(Protocol):
    """A wall clock. A moment that another process reads, and a calendar, need it; durations use `read_monotonic`."""

    def now(self) -> int: ...

    async def sleep(self, duration: int) -> None: ...


def read_monotonic(clock: Clock) -> int:
    """Read the time for a duration within this process: the difference of two readings, also if the clock is set.

    A clock of a program without such a reading is one that nobody sets.
    """
    return bind_monotonic(clock)()


def bind_monotonic(clock: Clock) -> Callable[[], int]:
    """Return `read_monotonic` for one clock, for those who read it at each step."""
    return getattr(clock, "monotonic", clock.now)


def start_steady_time(clock: Clock) -> Callable[[], int]:
    """Return a function that reads the time as if the clock had not been set since this call."""
    read = bind_monotonic(clock)
    ahead = clock.now() - read()
    return lambda: read() + ahead


class SystemClock:
    def now(self) -> int:
        return time_ns() // 1000

    def monotonic(self) -> int:
        return monotonic_ns() // 1000

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND)


DAY_TIME_PATTERN: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
"""A time of day, as in `09:00`."""

_UNITS: Final = {"d": DAY, "h": HOUR, "m": MINUTE, "s": SECOND, "ms": SECOND // 1000}
MAX_DURATION: Final = 36_500 * DAY
"""A hundred years, so that a store can represent any moment plus a duration."""
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[dhms])")


@lru_cache(256)
def parse_duration(text: str) -> int:
    stripped_text = text.strip().lower()
    number_units = _PART.findall(stripped_text)
    if not number_units or _PART.sub("", stripped_text).strip():
        raise ConfigError(f"{text[:40]!r} is not a duration. Write it like 30s, 15m, 1h30m or 90d.")
    duration = sum(float(number) * _UNITS[unit] for number, unit in number_units)
    if duration > MAX_DURATION:
        raise ConfigError(f"{text[:40]!r} is too long for a duration: {MAX_DURATION // DAY:,} days is the maximum.")
    return sum(round(float(number) * _UNITS[unit]) for number, unit in number_units)


def format_duration(micros: int) -> str:
    """Format a duration in its two largest units, as in `1h30m`."""
    if micros < SECOND:
        return f"{micros // 1000}ms"
    formatted_units: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, micros = divmod(micros, _UNITS[unit])
        if count:
            formatted_units.append(f"{count}{unit}")
    return "".join(formatted_units[:2])


WindowLength = Literal["", "minute", "hour", "day", "month"]

QUARTER: Final = 15 * MINUTE

_FORMATS: dict[str, str] = {"minute": "%Y-%m-%dT%H:%M", "hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m"}


def window_at(per: WindowLength, now: int, zone: str = "UTC") -> str:
    """Return the window of a length that contains a moment.

    Hours are always in UTC: otherwise a local hour that a clock change repeats would be one window of two hours.
    """
    if per == "":
        return ""
    if per == "minute":
        return _name_minute(now // MINUTE)
    return _name_window(per, now // QUARTER, "UTC" if per == "hour" else zone)


@lru_cache(1024)
def _name_window(per: WindowLength, quarter: int, zone: str) -> str:
    """Format a window; cached per quarter of an hour, because in every zone a day begins on a quarter."""
    moment = datetime.fromtimestamp(quarter * QUARTER // SECOND, ZoneInfo(zone))
    name = f"{per}/{moment.strftime(_FORMATS[per])}"
    return name if zone == "UTC" else f"{name}@{zone}"


@lru_cache(16)
def _name_minute(number: int) -> str:
    """Format a minute. It has no zone, because minutes begin at the same time in all zones."""
    return f"minute/{datetime.fromtimestamp(number * MINUTE // SECOND, UTC).strftime(_FORMATS['minute'])}"


def window_after(window: str, now: int) -> str:
    return _window_after_quarter(window, now // QUARTER)


@lru_cache(1024)
def _window_after_quarter(window: str, quarter: int) -> str:
    per, _, start_and_zone = window.partition("/")
    return window_at(cast("WindowLength", per), quarter * QUARTER, start_and_zone.partition("@")[2] or "UTC")


@lru_cache(1024)
def window_end(window: str) -> int | None:
    """Return the end of a window, or None for a scope's whole life."""
    if not window:
        return None
    per, _, start_and_zone = window.partition("/")
    start_text, _, zone = start_and_zone.partition("@")
    start = datetime.strptime(start_text, _FORMATS[per]).replace(tzinfo=ZoneInfo(zone) if zone else UTC)
    match per:
        case "minute":
            end = start + timedelta(minutes=1)
        case "hour":
            end = start + timedelta(hours=1)
        case "day":
            end = start + timedelta(days=1)
        case _:
            end = (start.replace(day=28) + timedelta(days=4)).replace(day=1)
    return int(end.timestamp()) * SECOND


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
    """Return the first moment at which the local clock shows a time on a day, or the end of the gap that skips it."""
    local = datetime.combine(day, clock, zone)
    moment = local.astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) != local.replace(tzinfo=None):
        moment = _end_of_gap(local, zone)
    return to_micros(moment)


def _end_of_gap(local: datetime, zone: ZoneInfo) -> datetime:
    """Find the moment at which the local clock skips a time, by bisection.

    With the offset after the jump, the time is before the jump; with the offset before the jump, it is after it.
    """
    before_gap, after_gap = local.replace(fold=1).astimezone(UTC), local.astimezone(UTC)
    new_offset = after_gap.astimezone(zone).utcoffset()
    while after_gap - before_gap > timedelta(seconds=1):
        middle = (before_gap + (after_gap - before_gap) / 2).replace(microsecond=0)
        before_gap, after_gap = (
            (before_gap, middle) if middle.astimezone(zone).utcoffset() == new_offset else (middle, after_gap)
        )
    return after_gap
