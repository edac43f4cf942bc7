"""Time is a parameter: integers of microseconds since 1970, in UTC.

Durations are written `30s`, `15m`, `1h30m`, `90d`. Caps and rates are counted in calendar windows: a minute, an hour, a
day, a month. A window can be read back alone: `day/2026-11-15`, `month/2026-11@Europe/Berlin`. The empty window means
"for as long as the scope lives", as a session's own cap does.
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
    def now(self) -> int: ...

    async def sleep(self, duration: int) -> None: ...


class SystemClock:
    def now(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND)


_UNITS: Final = {"d": DAY, "h": HOUR, "m": MINUTE, "s": SECOND, "ms": SECOND // 1000}
LONGEST_DURATION: Final = 36_500 * DAY
"""A hundred years: added to any moment, a store can still keep it."""
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[dhms])")


@lru_cache(256)
def parse_duration(text: str) -> int:
    written = text.strip().lower()
    parts = _PART.findall(written)
    if not parts or _PART.sub("", written).strip():
        raise ConfigError(f"{text!r} is not a duration: write it like 30s, 15m, 1h30m or 90d.")
    length = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if length > LONGEST_DURATION:
        raise ConfigError(f"{text[:40]!r} is too long for a duration: {LONGEST_DURATION // DAY:,} days are the most.")
    return sum(round(float(number) * _UNITS[unit]) for number, unit in parts)


def format_duration(micros: int) -> str:
    """A duration in its two largest units, as in `1h30m`."""
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
    """The window of that length which contains the moment.

    Hours are always counted in UTC: the local hour that a clock change repeats would be one window of two hours.
    """
    if per == "":
        return ""
    if per == "minute":
        return _name_minute(now // MINUTE)
    return _name_window(per, now // QUARTER, "UTC" if per == "hour" else zone)


@lru_cache(1024)
def _name_window(per: WindowLength, quarter: int, zone: str) -> str:
    """Cached per quarter of an hour: in no zone does a day begin between two of them."""
    moment = datetime.fromtimestamp(quarter * QUARTER // SECOND, ZoneInfo(zone))
    name = f"{per}/{moment.strftime(_FORMATS[per])}"
    return name if zone == "UTC" else f"{name}@{zone}"


@lru_cache(16)
def _name_minute(number: int) -> str:
    """Minutes begin together in all zones, so a minute has none."""
    return f"minute/{datetime.fromtimestamp(number * MINUTE // SECOND, UTC).strftime(_FORMATS['minute'])}"


def window_after(window: str, now: int) -> str:
    return _window_after_quarter(window, now // QUARTER)


@lru_cache(1024)
def _window_after_quarter(window: str, quarter: int) -> str:
    per, _, rest = window.partition("/")
    return window_at(cast("WindowLength", per), quarter * QUARTER, rest.partition("@")[2] or "UTC")


@lru_cache(1024)
def window_end(window: str) -> int | None:
    """The end of a window, or None for a scope's whole life."""
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
