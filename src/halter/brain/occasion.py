"""One moment as people say it: `tomorrow at 9`, `in 20 minutes`, `on 24 december at 9`."""

import re
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from halter.brain.saidtime import (
    DATE,
    DAY,
    DAYS,
    NUMBER,
    PART,
    PARTS,
    USUAL,
    Spoken,
    clock_of,
    coming,
    day_of_year,
    days_in,
    local,
    number_of,
)
from halter.core import clock
from halter.core.schedules import Timing
from halter.core.wall import first_shown

_UNITS: Final = {"s": clock.SECOND, "m": clock.MINUTE, "h": clock.HOUR, "d": clock.DAY, "w": 7 * clock.DAY}
_UNIT: Final = r"(?P<unit>seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?)"
_IN: Final = re.compile(
    rf"(?:in (?P<n>{NUMBER}) {_UNIT}|(?P<m>{NUMBER}) {_UNIT.replace('unit', 'unit2')} from now"
    r"|in (?P<k>\d{1,6})(?P<short>[smhdw]|min|hr))"
)
_ODD: Final = {"in half an hour": 30, "in an hour and a half": 90, "in a quarter of an hour": 15}
_DAY: Final = re.compile(
    rf"(?P<day>today|tomorrow|tonight|the day after tomorrow|this (?={PART})|(?:on |this |on this )?{DAY}\b)"
    rf"(?: ?(?P<part>{PART}))?"
)
_DATE: Final = re.compile(rf"(?:on )?(?P<date>{DATE})")
_NEXT: Final = re.compile(rf"(?:on )?next (?:{DAY}|week|month|year)")
_LONGEST: Final = 3660
PASSED: Final = "That moment has passed: say a later one."
NO_TIME: Final = "There is no such time of day: say it like 09:00, 9am or 17:30."


def moment_said(said: Spoken, now: int, zone: str, *, dated: bool) -> Timing | str | None:
    """Read one moment: a timing, a sentence where it names one that cannot be read exactly, or None.

    A day without a time is read only where `dated` says so: it may as well be what the sentence is about.
    """
    zone = said.zone or zone
    if not said.times and not said.part:
        after = _after(said.core, now, zone)
        if after is not None:
            return after
    if _NEXT.fullmatch(said.core) and (said.times or dated):
        return "`next` can mean the coming one or the one after it: say the date, like 24 December at 9."
    today = local(now, zone)
    if said.core in {"", "today"} and said.times:
        return _today(said, now, zone)
    if found := _DAY.fullmatch(said.core):
        return _on_a_day(found, said, now, zone, dated=dated)
    if (found := _DATE.fullmatch(said.core)) and (said.times or said.part or dated):
        day = _date(found["date"], today)
        return day if isinstance(day, str) else _at(day, _clocks(said, said.part), now, zone)
    return None


def _after(core: str, now: int, zone: str) -> Timing | str | None:
    if core in _ODD:
        return Timing(at=now + _ODD[core] * clock.MINUTE, timezone=zone)
    found = _IN.fullmatch(core)
    if found is None:
        return None
    number = number_of(found["n"] or found["m"] or found["k"])
    unit = (found["unit"] or found["unit2"] or found["short"])[0]
    if not 0 < number * _UNITS[unit] <= _LONGEST * clock.DAY:
        return "That is no time from now that can be waited for: say it like `in 20 minutes`."
    if unit in "dw":
        then = local(now, zone) + timedelta(days=number * (7 if unit == "w" else 1))
        return Timing(at=first_shown(then.date(), then.time(), ZoneInfo(zone)), timezone=zone)
    return Timing(at=now + number * _UNITS[unit], timezone=zone)


def _today(said: Spoken, now: int, zone: str) -> Timing | str:
    today = local(now, zone)
    found = _at(today.date(), _clocks(said, said.part), now, zone)
    if said.core or found != PASSED:
        return found
    return _at(today.date() + timedelta(days=1), _clocks(said, said.part), now, zone)


def _on_a_day(found: re.Match[str], said: Spoken, now: int, zone: str, *, dated: bool) -> Timing | str | None:
    named = found["day"].split()[-1]
    part = said.part or found["part"] or ("night" if named == "tonight" else "")
    if not said.times and not part and not dated:
        return None
    clocks = _clocks(said, part)
    today = local(now, zone)
    if named in DAYS and clocks and clocks[0]:
        return _at(coming(DAYS[named], time.fromisoformat(clocks[0]), today), clocks, now, zone)
    later = 2 if found["day"].startswith("the day after") else int(named == "tomorrow")
    # Midnight of tonight is when tomorrow begins.
    later += int(named == "tonight" and clocks[0] < "05:00")
    return _at(today.date() + timedelta(days=later), clocks, now, zone)


def _clocks(said: Spoken, part: str) -> Sequence[str]:
    if said.times:
        return [clock_of(each, part) for each in said.times]
    return [PARTS.get(part, USUAL)]


def _at(day: date, clocks: Sequence[str], now: int, zone: str) -> Timing | str:
    if len(clocks) != 1:
        return "That names several moments: say them one by one."
    if not clocks[0]:
        return NO_TIME
    moment = first_shown(day, time.fromisoformat(clocks[0]), ZoneInfo(zone))
    return Timing(at=moment, timezone=zone) if moment > now else PASSED


def _date(said: str, today: datetime) -> date | str:
    read = day_of_year(said)
    if read is None:
        return "That is no date: say it like 24 December, or 2026-12-24."
    year, month, day = read
    if year and not today.year <= year <= today.year + 10:
        return PASSED if year < today.year else "That lies too far ahead: say a date of the next ten years."
    for each in [year] if year else range(today.year, today.year + 9):
        if 1 <= day <= days_in(month, each) and (year or (each, month, day) >= (today.year, today.month, today.day)):
            return date(each, month, day)
    return "There is no such day in that month: say another one."
