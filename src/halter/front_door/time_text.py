"""Times of day, days, numbers and moments in plain English (`tomorrow at 9`).

Each form is listed, others are not read.
"""

import re
from calendar import monthrange
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from types import MappingProxyType
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import msgspec

from halter.core import clock
from halter.core.schedules import Timing, find_first_moment, find_zone, to_local_time


def _number_words(text: str, first: int) -> dict[str, int]:
    """Number words in order; words separated by a comma are equal."""
    return {name: number for number, names in enumerate(text.split(), first) for name in names.split(",")}


NUMBERS: Final[Mapping[str, int]] = MappingProxyType(
    _number_words(
        "zero one,a,an two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty",
        0,
    )
    | {"thirty": 30, "forty": 40, "forty-five": 45, "fifty": 50, "sixty": 60, "ninety": 90}
)
DAYS: Final[Mapping[str, int]] = MappingProxyType(
    _number_words(
        "sunday,sun monday,mon tuesday,tue,tues wednesday,wed,weds thursday,thu,thur,thurs friday,fri saturday,sat", 0
    )
)
"""Days of the week as a cron counts them."""
MONTHS: Final[Mapping[str, int]] = MappingProxyType(
    _number_words(
        "january,jan february,feb march,mar april,apr may june,jun july,jul august,aug september,sep,sept october,oct "
        "november,nov december,dec",
        1,
    )
)
ORDINALS: Final[Mapping[str, int]] = MappingProxyType(
    {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "fifteenth": 15}
)
DAY_PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "morning": "08:00",
        "afternoon": "14:00",
        "evening": "18:00",
        "night": "22:00",
        "noon": "12:00",
        "midday": "12:00",
        "midnight": "00:00",
    }
)
"""The hour of a part of the day; the person sees it before anything is planned."""
DEFAULT_TIME: Final = "09:00"
"""The hour of a day without one."""
DAY_PART_PATTERN: Final = "morning|afternoon|evening|night|noon|midday|midnight"


def _join_alternatives(words: Mapping[str, int]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


NUMBER_PATTERN: Final = rf"(?:\d{{1,9}}|{_join_alternatives(NUMBERS)})"
DAY_PATTERN: Final = rf"(?:{_join_alternatives(DAYS)})"
MONTH_PATTERN: Final = rf"(?:{_join_alternatives(MONTHS)})"
ORDINAL_PATTERN: Final = rf"(?:\d{{1,2}}(?:st|nd|rd|th)|{_join_alternatives(ORDINALS)})"
_DAY: Final = rf"(?:\d{{1,2}}|{ORDINAL_PATTERN})"
_YEAR: Final = r"(?: \d{4})?"
DATE_PATTERN: Final = (
    r"(?:\d{4}-\d\d-\d\d|\d{1,2}\.\d{1,2}\.\d{4}"
    rf"|(?:the )?{_DAY}(?: of)? {MONTH_PATTERN}{_YEAR}|{MONTH_PATTERN} (?:the )?{_DAY}{_YEAR})"
)
_HALF: Final = r" ?(?:am|pm|a\.m|p\.m)"
_PLAIN: Final = r"(?:\d{1,2}|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)"
_EXACT: Final = (
    rf"(?:noon|midday|midnight|\d{{1,2}}[:.]\d\d(?:{_HALF})?|{_PLAIN}{_HALF}|\d{{1,2}}h(?:\d\d)?|{_PLAIN} o'?clock"
    rf"|(?:half past|quarter past|quarter to) {_PLAIN})"
)
_CLOCK: Final = rf"(?:{_EXACT}|\d{{4}}|{_PLAIN})"
_AT: Final = rf"(?:at|@) (?P<times>{_CLOCK}(?:(?: and)? (?:at )?{_CLOCK})*)"
_PART: Final = r"(?: sharp| exactly)?(?P<part> in the (?:morning|afternoon|evening)| at night)?"
_ONLY: Final = re.compile(rf"{_AT}{_PART}")
_BEFORE: Final = re.compile(rf"(?:{_AT}|(?P<exact>{_EXACT})){_PART} (?P<core>.+)")
_AFTER: Final = re.compile(rf"(?P<core>.+?) (?:{_AT}|(?P<exact>{_EXACT})){_PART}")
_NO_TIME: Final = re.compile(rf"(?P<core>.+?){_PART}")
_ONE: Final = re.compile(_CLOCK)
_PAST: Final = re.compile(r"(half past|quarter past|quarter to) (\S+)")
_WRITTEN: Final = re.compile(
    r"(?P<hour>\d{1,2}|[a-z]+)(?:[:.h]?(?P<minute>(?<=[:.h\d])\d\d)|h)?(?: ?(?P<half>[ap])\.?m)?(?: o'?clock)?"
)
MINUTES_PER_HOUR: Final = 60
NOON_HOUR: Final = 12
HOURS_PER_DAY: Final = 24
_ZONE: Final = re.compile(r"(?P<rest>.+?) (?:in )?(?P<zone>utc|gmt|[a-z]+(?:/[a-z_+-]+)+)(?: time)?")
_LATE: Final[Mapping[str, range]] = MappingProxyType(
    {"afternoon": range(1, 7), "evening": range(4, 12), "night": range(5, 12)}
)


class TimePhrase(msgspec.Struct, frozen=True):
    """A parsed phrase: days, times of day, part of the day, and zone."""

    core: str
    times: tuple[str, ...] = ()
    part: str = ""
    zone: str = ""


def parse_time_phrase(phrase: str) -> tuple[TimePhrase, ...]:
    """Parses a phrase in each possible way: with its time at the end, at the beginning, or without."""
    zone = ""
    if (match := _ZONE.fullmatch(phrase)) and (named := _find_written_zone(match["zone"])):
        phrase, zone = match["rest"], named
    ways = [match for form in (_AFTER, _BEFORE, _ONLY, _NO_TIME) if (match := form.fullmatch(phrase))]
    return tuple(_make_time_phrase(match.groupdict(), zone) for match in ways)


def _make_time_phrase(groups: Mapping[str, str | None], zone: str) -> TimePhrase:
    times = groups.get("times") or groups.get("exact") or ""
    part = (groups.get("part") or "").split()
    return TimePhrase(groups.get("core") or "", tuple(_ONE.findall(times)), part[-1] if part else "", zone)


def _find_written_zone(text: str) -> str:
    """Returns a zone by its whole name, without regard to case; empty if there is none."""
    name = re.sub(r"[a-z]+", lambda match: match[0].capitalize(), text)
    return "UTC" if text in {"utc", "gmt"} else name if find_zone(name) is not None else ""


def find_named_zone(text: str) -> str:
    """Returns a zone by its name or its city; empty if there is none."""
    query = text.strip().replace(" ", "_")
    if query in {"utc", "gmt"}:
        return "UTC"
    for name in sorted(available_timezones()):
        if "/" in name and query in {name.lower(), name.lower().rpartition("/")[2]}:
            return name
    return ""


def parse_clock_time(text: str, part: str = "") -> str:
    """Parses a time of day into `09:00`; empty if there is none, or not in that part of the day."""
    if text in DAY_PARTS:
        return DAY_PARTS[text]
    if match := _PAST.fullmatch(text):
        minutes = (
            _parse_number_word(match[2]) * MINUTES_PER_HOUR
            + {"half past": 30, "quarter past": 15, "quarter to": -15}[match[1]]
        )
        return _format_clock_time(minutes % (24 * MINUTES_PER_HOUR), part) if _parse_number_word(match[2]) < 24 else ""  # noqa: PLR2004  hours of a day
    match = _WRITTEN.fullmatch(text)
    if match is None:
        return ""
    hour, minute, half = _parse_number_word(match["hour"]), int(match["minute"] or 0), match["half"]
    if half and not 1 <= hour <= NOON_HOUR:
        return ""
    if half:
        hour, part = hour % NOON_HOUR + (NOON_HOUR if half == "p" else 0), ""
    if not 0 <= hour < HOURS_PER_DAY or minute >= MINUTES_PER_HOUR:
        return ""
    return _format_clock_time(hour * MINUTES_PER_HOUR + minute, part)


def _format_clock_time(minutes: int, part: str) -> str:
    """Moves an evening hour to the evening; empty where hour and part of the day contradict."""
    hour, minute = divmod(minutes, MINUTES_PER_HOUR)
    if hour in _LATE.get(part, ()):
        hour += NOON_HOUR
    if part == "night" and hour == NOON_HOUR:
        hour = 0
    wrong = {"morning": hour >= NOON_HOUR, "afternoon": hour < NOON_HOUR, "evening": hour < NOON_HOUR}
    return "" if wrong.get(part) else f"{hour:02d}:{minute:02d}"


def parse_number(text: str) -> int:
    """Parses a number or an ordinal: `2`, `two`, `2nd`, `second`; -1 if it is neither."""
    digits = re.fullmatch(r"(\d{1,9})(?:st|nd|rd|th)?", text)
    return int(digits[1]) if digits else ORDINALS.get(text, _parse_number_word(text))


def _parse_number_word(text: str) -> int:
    return int(text) if text.isdecimal() else NUMBERS.get(text, -1)


def parse_date(text: str) -> tuple[int, int, int] | None:
    """Parses a date into year (0 if none), month and day; the day need not exist."""
    if match := re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", text):
        return int(match[1]), int(match[2]), int(match[3])
    if match := re.fullmatch(r"(\d{1,2})\.(\d{1,2})\.(\d{4})", text):
        return int(match[3]), int(match[2]), int(match[1])
    words = [word for word in text.split() if word not in {"the", "of"}]
    month = next((MONTHS[word] for word in words if word in MONTHS), 0)
    numbers = [parse_number(word) for word in words if word not in MONTHS]
    if not month or not numbers or len(words) > 3:  # noqa: PLR2004  day, month and year
        return None
    return (numbers[1] if len(numbers) > 1 else 0), month, numbers[0]


def days_in_month(month: int, year: int) -> int:
    """Returns the days of a month; 0 if there is no such month."""
    return monthrange(year, month)[1] if 1 <= month <= 12 else 0  # noqa: PLR2004


def parse_weekdays(text: str) -> tuple[int, ...]:
    """Parses a list of weekdays, singular or plural, as a cron counts them."""
    words = [word for word in re.split(r" and | or |[ ,/]+", text) if word]
    found = [DAYS.get(word, DAYS.get(word.removesuffix("s"), -1)) for word in words]
    return tuple(dict.fromkeys(found)) if found and -1 not in found else ()


def next_weekday(weekday: int, clock: time, now: datetime) -> date:
    """Returns the next day of that name on which the time of day is still ahead."""
    ahead = (weekday - now.isoweekday()) % 7
    if ahead == 0 and clock <= now.time():
        ahead = 7
    return now.date() + timedelta(days=ahead)


def make_cron(clocks: Sequence[str], day: str = "*", month: str = "*", weekday: str = "*") -> str:
    """Writes times of day as one cron; empty if their minutes differ."""
    minutes = {clock[3:] for clock in clocks}
    hours = ",".join(str(hour) for hour in sorted({int(clock[:2]) for clock in clocks}))
    return f"{int(minutes.pop())} {hours} {day} {month} {weekday}" if len(minutes) == 1 else ""


def to_zone_time(moment: int, zone: str) -> datetime:
    return to_local_time(moment, ZoneInfo(zone))


_UNITS: Final = {"s": clock.SECOND, "m": clock.MINUTE, "h": clock.HOUR, "d": clock.DAY, "w": 7 * clock.DAY}
_UNIT: Final = r"(?P<unit>seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?)"
_IN: Final = re.compile(
    rf"(?:in (?P<n>{NUMBER_PATTERN}) {_UNIT}|(?P<m>{NUMBER_PATTERN}) {_UNIT.replace('unit', 'unit2')} from now"
    r"|in (?P<k>\d{1,6})(?P<short>[smhdw]|min|hr))"
)
_ODD: Final = {"in half an hour": 30, "in an hour and a half": 90, "in a quarter of an hour": 15}
_OCCASION_DAY: Final = re.compile(
    rf"(?P<day>today|tomorrow|tonight|the day after tomorrow|this (?={DAY_PART_PATTERN})|(?:on |this |on "
    rf"this )?{DAY_PATTERN}\b)"
    rf"(?: ?(?P<part>{DAY_PART_PATTERN}))?"
)
_DATE: Final = re.compile(rf"(?:on )?(?P<date>{DATE_PATTERN})")
_NEXT: Final = re.compile(rf"(?:on )?next (?:{DAY_PATTERN}|week|month|year)")
_LONGEST: Final = 3660
MOMENT_PASSED: Final = "That moment has passed: say a later one."
NO_SUCH_TIME: Final = "There is no such time of day: say it like 09:00, 9am or 17:30."


def read_moment(phrase: TimePhrase, now: int, zone: str, *, dated: bool) -> Timing | str | None:
    """Returns a timing, a sentence where a moment is not exact, or None.

    A day without a time is read only if `dated`: it may as well be what the sentence is about.
    """
    zone = phrase.zone or zone
    if not phrase.times and not phrase.part:
        after = _read_interval_from_now(phrase.core, now, zone)
        if after is not None:
            return after
    if _NEXT.fullmatch(phrase.core) and (phrase.times or dated):
        return "`next` can mean the coming one or the one after it: say the date, like 24 December at 9."
    today = to_zone_time(now, zone)
    if phrase.core in {"", "today"} and phrase.times:
        return _read_today(phrase, now, zone)
    if match := _OCCASION_DAY.fullmatch(phrase.core):
        return _read_day(match, phrase, now, zone, dated=dated)
    if (match := _DATE.fullmatch(phrase.core)) and (phrase.times or phrase.part or dated):
        day = _read_date(match["date"], today)
        return day if isinstance(day, str) else _make_timing(day, _read_clocks(phrase, phrase.part), now, zone)
    return None


def _read_interval_from_now(core: str, now: int, zone: str) -> Timing | str | None:
    if core in _ODD:
        return Timing(at=now + _ODD[core] * clock.MINUTE, timezone=zone)
    match = _IN.fullmatch(core)
    if match is None:
        return None
    number = parse_number(match["n"] or match["m"] or match["k"])
    unit = (match["unit"] or match["unit2"] or match["short"])[0]
    if not 0 < number * _UNITS[unit] <= _LONGEST * clock.DAY:
        return "That is no time from now that can be waited for: say it like `in 20 minutes`."
    if unit in "dw":
        then = to_zone_time(now, zone) + timedelta(days=number * (7 if unit == "w" else 1))
        return Timing(at=find_first_moment(then.date(), then.time(), ZoneInfo(zone)), timezone=zone)
    return Timing(at=now + number * _UNITS[unit], timezone=zone)


def _read_today(phrase: TimePhrase, now: int, zone: str) -> Timing | str:
    today = to_zone_time(now, zone)
    found = _make_timing(today.date(), _read_clocks(phrase, phrase.part), now, zone)
    if phrase.core or found != MOMENT_PASSED:
        return found
    return _make_timing(today.date() + timedelta(days=1), _read_clocks(phrase, phrase.part), now, zone)


def _read_day(match: re.Match[str], phrase: TimePhrase, now: int, zone: str, *, dated: bool) -> Timing | str | None:
    named = match["day"].split()[-1]
    part = phrase.part or match["part"] or ("night" if named == "tonight" else "")
    if not phrase.times and not part and not dated:
        return None
    clocks = _read_clocks(phrase, part)
    today = to_zone_time(now, zone)
    if named in DAYS and clocks and clocks[0]:
        return _make_timing(next_weekday(DAYS[named], time.fromisoformat(clocks[0]), today), clocks, now, zone)
    later = 2 if match["day"].startswith("the day after") else int(named == "tomorrow")
    # Tonight's midnight is the start of tomorrow.
    later += int(named == "tonight" and clocks[0] < "05:00")
    return _make_timing(today.date() + timedelta(days=later), clocks, now, zone)


def _read_clocks(phrase: TimePhrase, part: str) -> Sequence[str]:
    if phrase.times:
        return [parse_clock_time(each, part) for each in phrase.times]
    return [DAY_PARTS.get(part, DEFAULT_TIME)]


def _make_timing(day: date, clocks: Sequence[str], now: int, zone: str) -> Timing | str:
    if len(clocks) != 1:
        return "That names several moments: say them one by one."
    if not clocks[0]:
        return NO_SUCH_TIME
    moment = find_first_moment(day, time.fromisoformat(clocks[0]), ZoneInfo(zone))
    return Timing(at=moment, timezone=zone) if moment > now else MOMENT_PASSED


def _read_date(text: str, today: datetime) -> date | str:
    read = parse_date(text)
    if read is None:
        return "That is no date: say it like 24 December, or 2026-12-24."
    year, month, day = read
    if year and not today.year <= year <= today.year + 10:
        return MOMENT_PASSED if year < today.year else "That lies too far ahead: say a date of the next ten years."
    for each in [year] if year else range(today.year, today.year + 9):
        if 1 <= day <= days_in_month(month, each) and (
            year or (each, month, day) >= (today.year, today.month, today.day)
        ):
            return date(each, month, day)
    return "There is no such day in that month: say another one."
