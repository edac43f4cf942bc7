"""Time is a parameter: integers of microseconds since 1970, in UTC.

Durations as people write them: `30s`, `15m`, `1h30m`, `90d`.

The calendar windows that caps and rates are counted in: a minute, an hour, a day, a month.

A window is written so that it can be read back alone: `day/2026-11-15`, `month/2026-11@Europe/Berlin`.
The empty window means "for as long as the scope lives", as a session's own cap does.
"""

import asyncio
import re
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Literal, Protocol, cast
from zoneinfo import ZoneInfo

from halter.core.errors import ConfigError

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Clock(Protocol):
    """What tells the time and lets it pass."""

    def now(self) -> int:
        """Return the time in microseconds."""
        ...

    async def sleep(self, duration: int) -> None:
        """Let that many microseconds pass."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> int:
        """Return the machine's time in microseconds."""
        return time.time_ns() // 1000

    async def sleep(self, duration: int) -> None:
        """Sleep for real, or in a loop with virtual time, virtually."""
        await asyncio.sleep(duration / SECOND)


_UNITS: Final = {"d": DAY, "h": HOUR, "m": MINUTE, "s": SECOND, "ms": SECOND // 1000}
LONGEST_DURATION: Final = 36_500 * DAY
"""A hundred years: with any moment added to it, it is still one that a store can keep."""
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[dhms])")


def parse_duration(text: str) -> int:
    """Read a duration into microseconds."""
    written = text.strip().lower()
    parts = _PART.findall(written)
    if not parts or _PART.sub("", written).strip():
        raise ConfigError(f"{text!r} is not a duration: write it like 30s, 15m, 1h30m or 90d.")
    length = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if length > LONGEST_DURATION:
        raise ConfigError(f"{text[:40]!r} is too long for a duration: {LONGEST_DURATION // DAY:,} days are the most.")
    return sum(round(float(number) * _UNITS[unit]) for number, unit in parts)


def format_duration(micros: int) -> str:
    """Write a duration with its two largest units, as in `1h30m`."""
    if micros < SECOND:
        return f"{micros // 1000}ms"
    shown: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, micros = divmod(micros, _UNITS[unit])
        if count:
            shown.append(f"{count}{unit}")
    return "".join(shown[:2])


WindowLength = Literal["", "minute", "hour", "day", "month"]

QUARTER: Final = 15 * MINUTE

_FORMATS: dict[str, str] = {"minute": "%Y-%m-%dT%H:%M", "hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m"}


def window_at(per: WindowLength, now: int, zone: str = "UTC") -> str:
    """Name the window of that length which the moment falls into.

    Hours are always counted in UTC: the local hour that a clock change repeats would be one window of two hours.
    """
    if per == "":
        return ""
    if per == "minute":
        return _name_minute(now // MINUTE)
    return _name_window(per, now // QUARTER, "UTC" if per == "hour" else zone)


@lru_cache(1024)
def _name_window(per: WindowLength, quarter: int, zone: str) -> str:
    """Name a window once for every quarter of an hour: in no zone does a day begin between two of them."""
    moment = datetime.fromtimestamp(quarter * QUARTER // SECOND, ZoneInfo(zone))
    name = f"{per}/{moment.strftime(_FORMATS[per])}"
    return name if zone == "UTC" else f"{name}@{zone}"


@lru_cache(16)
def _name_minute(number: int) -> str:
    """Name a minute. The clocks of all zones begin theirs together, so it has none."""
    return f"minute/{datetime.fromtimestamp(number * MINUTE // SECOND, UTC).strftime(_FORMATS['minute'])}"


def window_after(window: str, now: int) -> str:
    """Name the window of the same length and zone which the moment falls into."""
    return _window_after_quarter(window, now // QUARTER)


@lru_cache(1024)
def _window_after_quarter(window: str, quarter: int) -> str:
    per, _, rest = window.partition("/")
    return window_at(cast("WindowLength", per), quarter * QUARTER, rest.partition("@")[2] or "UTC")


@lru_cache(1024)
def window_end(window: str) -> int | None:
    """Tell the moment at which a window is over, or None for a scope's whole life."""
    if not window:
        return None
    per, _, rest = window.partition("/")
    written, _, zone = rest.partition("@")
    start = datetime.strptime(written, _FORMATS[per]).replace(tzinfo=ZoneInfo(zone) if zone else UTC)
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
