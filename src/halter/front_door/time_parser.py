"""Parses times of day, days, numbers and moments in plain English (`tomorrow at 9`).

Only the listed forms are recognized.
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
    """Number words in order; words that are joined by a comma have the same number."""
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
"""Time of each part of the day; a person sees it before a schedule is created."""
DEFAULT_TIME: Final = "09:00"
"""Time of a day that is given without one."""
DAY_PART_PATTERN: Final = "morning|afternoon|evening|night|noon|midday|midnight"


def _join_alternatives(value_by_word: Mapping[str, int]) -> str:
    return "|".join(sorted(value_by_word, key=len, reverse=True))


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
_ONE_CLOCK: Final = re.compile(_CLOCK)
_PAST: Final = re.compile(r"(half past|quarter past|quarter to) (\S+)")
_WRITTEN: Final = re.compile(
    r"(?P<hour>\d{1,2}|[a-z]+)(?:[:.h]?(?P<minute>(?<=[:.h\d])\d\d)|h)?(?: ?(?P<half>[ap])\.?m)?(?: o'?clock)?"
)
MINUTES_PER_HOUR: Final = 60
NOON_HOUR: Final = 12
HOURS_PER_DAY: Final = 24
_ZONE: Final = re.compile(r"(?P<rest>.+?) (?:in )?(?P<zone>utc|gmt|[a-z]+(?:/[a-z_+-]+)+)(?: time)?")
_LATE_HOURS: Final[Mapping[str, range]] = MappingProxyType(
    {"afternoon": range(1, 7), "evening": range(4, 12), "night": range(5, 12)}
)


class TimePhrase(msgspec.Struct, frozen=True):
    """A parsed phrase: days, times of day, part of the day, and zone."""

    core: str
    times: tuple[str, ...] = ()
    part: str = ""
    zone: str = ""


def parse_time_phrase(phrase: str) -> tuple[TimePhrase, ...]:
    """Parse a phrase in each possible way: with its time at the end, at the beginning, or without one."""
    zone = ""
    if (match := _ZONE.fullmatch(phrase)) and (zone_name := _find_written_zone(match["zone"])):
        phrase, zone = match["rest"], zone_name
    matches = [match for form in (_AFTER, _BEFORE, _ONLY, _NO_TIME) if (match := form.fullmatch(phrase))]
    return tuple(_make_time_phrase(match.groupdict(), zone) for match in matches)


def _make_time_phrase(groups: Mapping[str, str | None], zone: str) -> TimePhrase:
    times = groups.get("times") or groups.get("exact") or ""
    part_words = (groups.get("part") or "").split()
    return TimePhrase(
        groups.get("core") or "", tuple(_ONE_CLOCK.findall(times)), part_words[-1] if part_words else "", zone
    )


def _find_written_zone(text: str) -> str:
    """Find a zone by its whole name, without regard to case. Returns an empty string if none matches."""
    name = re.sub(r"[a-z]+", lambda match: match[0].capitalize(), text)
    return "UTC" if text in {"utc", "gmt"} else name if find_zone(name) is not None else ""


def find_named_zone(text: str) -> str:
    """Find a zone by its name or its city. Returns an empty string if none matches."""
    query = text.strip().replace(" ", "_")
    if query in {"utc", "gmt"}:
        return "UTC"
    for name in sorted(available_timezones()):
        if "/" in name and query in {name.lower(), name.lower().rpartition("/")[2]}:
            return name
    return ""


def parse_clock_time(text: str, day_part: str = "") -> str:
    """Parse a time of day into `09:00`. Returns an empty string if it is invalid or not in that part of the day."""
    if text in DAY_PARTS:
        return DAY_PARTS[text]
    if match := _PAST.fullmatch(text):
        hour = _parse_number_word(match[2])
        minutes = hour * MINUTES_PER_HOUR + {"half past": 30, "quarter past": 15, "quarter to": -15}[match[1]]
        in_day = minutes % (HOURS_PER_DAY * MINUTES_PER_HOUR)
        return _format_clock_time(in_day, day_part) if hour < HOURS_PER_DAY else ""
    match = _WRITTEN.fullmatch(text)
    if match is None:
        return ""
    hour, minute, meridiem = _parse_number_word(match["hour"]), int(match["minute"] or 0), match["half"]
    if meridiem and not 1 <= hour <= NOON_HOUR:
        return ""
    if meridiem:
        hour, day_part = hour % NOON_HOUR + (NOON_HOUR if meridiem == "p" else 0), ""
    if not 0 <= hour < HOURS_PER_DAY or minute >= MINUTES_PER_HOUR:
        return ""
    return _format_clock_time(hour * MINUTES_PER_HOUR + minute, day_part)


def _format_clock_time(minutes: int, day_part: str) -> str:
    """Format a time, with an evening hour moved to the evening. Returns an empty string if the parts contradict."""
    hour, minute = divmod(minutes, MINUTES_PER_HOUR)
    if hour in _LATE_HOURS.get(day_part, ()):
        hour += NOON_HOUR
    if day_part == "night" and hour == NOON_HOUR:
        hour = 0
    contradiction = {"morning": hour >= NOON_HOUR, "afternoon": hour < NOON_HOUR, "evening": hour < NOON_HOUR}
    return "" if contradiction.get(day_part) else f"{hour:02d}:{minute:02d}"


def parse_number(text: str) -> int:
    """Parse a number or an ordinal: `2`, `two`, `2nd`, `second`. Returns -1 if it is neither."""
    digits = re.fullmatch(r"(\d{1,9})(?:st|nd|rd|th)?", text)
    return int(digits[1]) if digits else ORDINALS.get(text, _parse_number_word(text))


def _parse_number_word(text: str) -> int:
    return int(text) if text.isdecimal() else NUMBERS.get(text, -1)


def parse_date(text: str) -> tuple[int, int, int] | None:
    """Parse a date into year (0 if none), month and day; the day need not exist."""
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
    """Return the number of days of a month; 0 if there is no such month."""
    return monthrange(year, month)[1] if 1 <= month <= 12 else 0  # noqa: PLR2004


def parse_weekdays(text: str) -> tuple[int, ...]:
    """Parse a list of weekdays, singular or plural, into the numbers of a cron."""
    words = [word for word in re.split(r" and | or |[ ,/]+", text) if word]
    weekdays = [DAYS.get(word, DAYS.get(word.removesuffix("s"), -1)) for word in words]
    return tuple(dict.fromkeys(weekdays)) if weekdays and -1 not in weekdays else ()


def next_weekday(weekday: int, clock: time, now: datetime) -> date:
    """Return the next such weekday on which the time of day has not passed."""
    days_ahead = (weekday - now.isoweekday()) % 7
    if days_ahead == 0 and clock <= now.time():
        days_ahead = 7
    return now.date() + timedelta(days=days_ahead)


def make_cron(clocks: Sequence[str], day: str = "*", month: str = "*", weekday: str = "*") -> str:
    """Make one cron of times of day. Returns an empty string if their minutes differ."""
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
_MINUTES_BY_PHRASE: Final = {"in half an hour": 30, "in an hour and a half": 90, "in a quarter of an hour": 15}
_OCCASION_DAY: Final = re.compile(
    rf"(?P<day>today|tomorrow|tonight|the day after tomorrow|this (?={DAY_PART_PATTERN})|(?:on |this |on "
    rf"this )?{DAY_PATTERN}\b)"
    rf"(?: ?(?P<part>{DAY_PART_PATTERN}))?"
)
_DATE: Final = re.compile(rf"(?:on )?(?P<date>{DATE_PATTERN})")
_NEXT: Final = re.compile(rf"(?:on )?next (?:{DAY_PATTERN}|week|month|year)")
_MAX_DAYS_AHEAD: Final = 3660
MOMENT_PASSED: Final = "That time has passed. Give a later one."
NO_SUCH_TIME: Final = "That time of day does not exist. Write it like 09:00, 9am or 17:30."


def read_moment(phrase: TimePhrase, now: int, zone: str, *, allows_bare_day: bool) -> Timing | str | None:
    """Return the timing of a moment, a sentence if it is not exact, or None if the phrase is not a moment.

    A day without a time is read only if `allows_bare_day`, since it may be the subject of the sentence.
    """
    zone = phrase.zone or zone
    if not phrase.times and not phrase.part:
        interval_timing = _read_interval_from_now(phrase.core, now, zone)
        if interval_timing is not None:
            return interval_timing
    if _NEXT.fullmatch(phrase.core) and (phrase.times or allows_bare_day):
        return "`next` is ambiguous. Write the date, like 24 December at 9."
    today = to_zone_time(now, zone)
    if phrase.core in {"", "today"} and phrase.times:
        return _read_today(phrase, now, zone)
    if match := _OCCASION_DAY.fullmatch(phrase.core):
        return _read_day(match, phrase, now, zone, dated=allows_bare_day)
    if (match := _DATE.fullmatch(phrase.core)) and (phrase.times or phrase.part or allows_bare_day):
        date_or_sentence = _read_date(match["date"], today)
        return (
            date_or_sentence
            if isinstance(date_or_sentence, str)
            else _make_timing(date_or_sentence, _read_clocks(phrase, phrase.part), now, zone)
        )
    return None


def _read_interval_from_now(core: str, now: int, zone: str) -> Timing | str | None:
    if core in _MINUTES_BY_PHRASE:
        return Timing(at=now + _MINUTES_BY_PHRASE[core] * clock.MINUTE, timezone=zone)
    match = _IN.fullmatch(core)
    if match is None:
        return None
    number = parse_number(match["n"] or match["m"] or match["k"])
    unit = (match["unit"] or match["unit2"] or match["short"])[0]
    if not 0 < number * _UNITS[unit] <= _MAX_DAYS_AHEAD * clock.DAY:
        return "That interval is too short or too long. Write it like `in 20 minutes`."
    if unit in "dw":
        local_moment = to_zone_time(now, zone) + timedelta(days=number * (7 if unit == "w" else 1))
        return Timing(at=find_first_moment(local_moment.date(), local_moment.time(), ZoneInfo(zone)), timezone=zone)
    return Timing(at=now + number * _UNITS[unit], timezone=zone)


def _read_today(phrase: TimePhrase, now: int, zone: str) -> Timing | str:
    today = to_zone_time(now, zone)
    timing = _make_timing(today.date(), _read_clocks(phrase, phrase.part), now, zone)
    if phrase.core or timing != MOMENT_PASSED:
        return timing
    return _make_timing(today.date() + timedelta(days=1), _read_clocks(phrase, phrase.part), now, zone)


def _read_day(match: re.Match[str], phrase: TimePhrase, now: int, zone: str, *, dated: bool) -> Timing | str | None:
    day_name = match["day"].split()[-1]
    day_part = phrase.part or match["part"] or ("night" if day_name == "tonight" else "")
    if not phrase.times and not day_part and not dated:
        return None
    clocks = _read_clocks(phrase, day_part)
    today = to_zone_time(now, zone)
    if day_name in DAYS and clocks and clocks[0]:
        return _make_timing(next_weekday(DAYS[day_name], time.fromisoformat(clocks[0]), today), clocks, now, zone)
    days_later = 2 if match["day"].startswith("the day after") else int(day_name == "tomorrow")
    # Midnight tonight is the start of tomorrow.
    days_later += int(day_name == "tonight" and clocks[0] < "05:00")
    return _make_timing(today.date() + timedelta(days=days_later), clocks, now, zone)


def _read_clocks(phrase: TimePhrase, day_part: str) -> Sequence[str]:
    if phrase.times:
        return [parse_clock_time(time_text, day_part) for time_text in phrase.times]
    return [DAY_PARTS.get(day_part, DEFAULT_TIME)]


def _make_timing(day: date, clocks: Sequence[str], now: int, zone: str) -> Timing | str:
    if len(clocks) != 1:
        return "The message contains several times. Send them one by one."
    if not clocks[0]:
        return NO_SUCH_TIME
    moment = find_first_moment(day, time.fromisoformat(clocks[0]), ZoneInfo(zone))
    return Timing(at=moment, timezone=zone) if moment > now else MOMENT_PASSED


def _read_date(text: str, today: datetime) -> date | str:
    date_parts = parse_date(text)
    if date_parts is None:
        return "That is not a date. Write it like 24 December or 2026-12-24."
    year, month, month_day = date_parts
    if year and not today.year <= year <= today.year + 10:
        return (
            MOMENT_PASSED if year < today.year else "That date is too far ahead. Give a date within the next ten years."
        )
    for candidate_year in [year] if year else range(today.year, today.year + 9):
        if 1 <= month_day <= days_in_month(month, candidate_year) and (
            year or (candidate_year, month, month_day) >= (today.year, today.month, today.day)
        ):
            return date(candidate_year, month, month_day)
    return "That month has no such day. Give another one."
