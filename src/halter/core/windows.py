"""The calendar windows that caps and rates are counted in: a minute, an hour, a day, a month.

A window is written so that it can be read back alone: `day/2026-11-15`, `month/2026-11@Europe/Berlin`.
The empty window means "for as long as the scope lives", as a session's own cap does.
"""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Literal, cast
from zoneinfo import ZoneInfo

from halter.core.clock import MINUTE, SECOND

Per = Literal["", "minute", "hour", "day", "month"]

QUARTER: Final = 15 * MINUTE

_FORMATS: dict[str, str] = {"minute": "%Y-%m-%dT%H:%M", "hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m"}


def window_at(per: Per, now: int, zone: str = "UTC") -> str:
    """Name the window of that length which the moment falls into.

    Hours are always counted in UTC: the local hour that a clock change repeats would be one window of two hours.
    """
    if per == "":
        return ""
    if per == "minute":
        return _minute(now // MINUTE)
    return _named(per, now // QUARTER, "UTC" if per == "hour" else zone)


@lru_cache(1024)
def _named(per: Per, quarter: int, zone: str) -> str:
    """Name a window once for every quarter of an hour: in no zone does a day begin between two of them."""
    moment = datetime.fromtimestamp(quarter * QUARTER // SECOND, ZoneInfo(zone))
    name = f"{per}/{moment.strftime(_FORMATS[per])}"
    return name if zone == "UTC" else f"{name}@{zone}"


@lru_cache(16)
def _minute(number: int) -> str:
    """Name a minute. The clocks of all zones begin theirs together, so it has none."""
    return f"minute/{datetime.fromtimestamp(number * MINUTE // SECOND, UTC).strftime(_FORMATS['minute'])}"


def window_after(window: str, now: int) -> str:
    """Name the window of the same length and zone which the moment falls into."""
    return _after(window, now // QUARTER)


@lru_cache(1024)
def _after(window: str, quarter: int) -> str:
    per, _, rest = window.partition("/")
    return window_at(cast("Per", per), quarter * QUARTER, rest.partition("@")[2] or "UTC")


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
