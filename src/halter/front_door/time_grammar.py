"""The grammar of times in plain English: numbers, durations, times of day, dates, moments and recurrences.

The words of a phrase are first replaced by one form each: `two` is `2`, `tuesday` is `day2`, `march` is `month3`,
`first` is `1th`, `each` is `every` and `weekly` is `every week`. The forms of times are written with these words alone.
Only the listed forms are recognized.
"""

import re
from calendar import monthrange
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import msgspec

from halter.core import clock
from halter.core.clock import find_first_moment, parse_duration, to_local_time
from halter.core.schedules import Timing, find_timing_flaw, next_tick_after


def _number_words(text: str, first: int) -> dict[str, int]:
    """Number words in order; words that are joined by a comma have the same number."""
    return {name: number for number, names in enumerate(text.split(), first) for name in names.split(",")}


NUMBERS: Final[Mapping[str, int]] = MappingProxyType(
    _number_words(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty",
        0,
    )
    | {"thirty": 30, "forty": 40, "forty-five": 45, "fifty": 50, "sixty": 60, "ninety": 90}
)
_DAYS: Final = _number_words(
    "sunday,sun monday,mon tuesday,tue,tues wednesday,wed,weds thursday,thu,thur,thurs friday,fri saturday,sat", 0
)
"""Days of the week as a cron counts them."""
_MONTHS: Final = _number_words(
    "january,jan february,feb march,mar april,apr may june,jun july,jul august,aug september,sep,sept october,oct "
    "november,nov december,dec",
    1,
)
_HOURS: Final = range(1, 13)
_FORMS_BY_WORD: Final[Mapping[str, str]] = MappingProxyType(
    # Three digits, since no time of day is written with them: a clock strikes `five`, but not `fifty`.
    {name: str(number) if number in _HOURS else f"{number:03d}" for name, number in NUMBERS.items()}
    | {f"{name}s": f"day{number}s" for name, number in _DAYS.items()}
    | {name: f"day{number}" for name, number in _DAYS.items()}
    | {name: f"month{number}" for name, number in _MONTHS.items()}
    | {"first": "1th", "third": "3th", "fourth": "4th", "fifth": "5th", "fifteenth": "15th"}
    | {"each": "every", "hourly": "every hour", "daily": "every day", "nightly": "every night", "weekly": "every week"}
    | {"monthly": "every month", "quarterly": "every quarter", "yearly": "every year", "annually": "every year"}
    | {"fortnightly": "every 2 weeks", "fortnight": "2 weeks"}
)
_WORD: Final = re.compile(r"(?<![a-z\d])(?:forty-five|(?:bi|semi)-[a-z]+|[a-z]+)")
_ORDINAL_ENDING: Final = re.compile(r"(?<=\d)(?:st|nd|rd)\b")
_ONCE: Final = re.compile(r"\bonce (?:an?|per) ")

_DAY_PARTS: Final[Mapping[str, str]] = MappingProxyType(
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
_DEFAULT_TIME: Final = "09:00"
"""Time of a day that is given without one."""
_LATE_HOURS: Final[Mapping[str, range]] = MappingProxyType(
    {"afternoon": range(1, 7), "evening": range(4, 12), "night": range(5, 12)}
)
_NOON_HOUR: Final = 12
_DAY_MINUTES: Final = 24 * 60

NOT_EXACT: Final = (
    "The time is not exact. Write it like: every 15 minutes, every weekday at 9, or every month on the 1st."
)
NEVER_COMES: Final = "That time never occurs, or too rarely. Give another day or interval."
NO_SUCH_TIME: Final = "That time of day does not exist. Write it like 09:00, 9am or 17:30."
MOMENT_PASSED: Final = "That time has passed. Give a later one."
_SEVERAL_MINUTES: Final = "Times with different minutes need separate schedules. Send them one by one."
_INTERVAL_WITH_TIME: Final = (
    "An interval within the day cannot have a time of day. Give only the interval, like every 15 minutes."
)
_AMBIGUOUS_DAYS: Final = (
    "It is not clear whether this repeats. Write `every monday and thursday`, or only one of the days."
)
_AMBIGUOUS_SECOND: Final = (
    "This can mean every two weeks or the second one of each month. Write `every other monday`, or "
    "`every second monday of the month`."
)

_PART: Final = "morning|afternoon|evening|night|noon|midday|midnight"
_HALF: Final = r" ?(?:am|pm|a\.m|p\.m)"
_EXACT: Final = (
    rf"(?:noon|midday|midnight|\d{{1,2}}[:.]\d\d(?:{_HALF})?|\d{{1,2}}{_HALF}|\d{{1,2}}h(?:\d\d)?|\d{{1,2}} o'?clock"
    r"|(?:half past|quarter past|quarter to) \d{1,2})"
)
_UNIT: Final = "seconds?|minutes?|mins?|hours?|hrs?|days?|weeks?"
_CLOCK: Final = rf"(?:{_EXACT}|\d{{4}}|\d{{1,2}}(?! (?:{_UNIT})\b))"
_AT: Final = rf"(?:at|@) (?P<times>{_CLOCK}(?:(?: and)? (?:at )?{_CLOCK})*)"
_IN_PART: Final = r"(?: sharp| exactly)?(?P<part> in the (?:morning|afternoon|evening)| at night)?"
_SPLITS: Final = (
    re.compile(rf"(?P<core>.+?) (?:{_AT}|(?P<exact>{_EXACT})){_IN_PART}"),
    re.compile(rf"(?:{_AT}|(?P<exact>{_EXACT})){_IN_PART} (?P<core>.+)"),
    re.compile(rf"{_AT}{_IN_PART}"),
    re.compile(rf"(?P<core>.+?){_IN_PART}"),
)
"""The ways to write a time: after the days, before them, alone, or not at all."""
_ONE_CLOCK: Final = re.compile(_CLOCK)
_CLOCK_TIME: Final = re.compile(
    r"(?:(?P<past>half past|quarter past|quarter to) )?(?P<hour>\d{1,2})(?:[:.h]?(?P<minute>(?<=[:.h\d])\d\d)|h)?"
    r"(?: ?(?P<half>[ap])\.?m)?(?: o'?clock)?"
)
_MINUTES_PAST: Final = {"half past": 30, "quarter past": 15, "quarter to": -15}
_ZONE: Final = re.compile(r"(?P<rest>.+?) (?:in )?(?P<zone>utc|gmt|[a-z]+(?:/[a-z_+-]+)+)(?: time)?")


class _TimePhrase(msgspec.Struct, frozen=True):
    """A phrase in a zone at a moment: its days, its times of day and its part of the day."""

    core: str
    times: tuple[str, ...]
    part: str
    zone: str
    now: int

    @property
    def today(self) -> datetime:
        return to_local_time(self.now, ZoneInfo(self.zone))

    def list_clocks(self, day_part: str = "") -> Sequence[str]:
        """List the times of day; the usual time of the part of the day, or of any day, if there are none."""
        day_part = self.part or day_part
        if self.times:
            return [_parse_clock_time(time_text, day_part) for time_text in self.times]
        return [_DAY_PARTS.get(day_part, _DEFAULT_TIME)]


def _parse_phrase(phrase: str, now: int, zone: str) -> Sequence[_TimePhrase]:
    """Parse a phrase in each possible way: with its time at the end, at the beginning, or without one."""
    if (match := _ZONE.fullmatch(phrase)) and (zone_name := find_named_zone(match["zone"])):
        phrase, zone = match["rest"], zone_name
    phrase = _WORD.sub(lambda word: _FORMS_BY_WORD.get(word[0], word[0]), _ONCE.sub("every ", phrase))
    phrase = _ORDINAL_ENDING.sub("th", phrase)
    matches = [match.groupdict() for split in _SPLITS if (match := split.fullmatch(phrase))]
    return [_make_phrase(groups, now, zone) for groups in matches]


def _make_phrase(groups: Mapping[str, str | None], now: int, zone: str) -> _TimePhrase:
    times = groups.get("times") or groups.get("exact") or ""
    day_part = (groups["part"] or "").rpartition(" ")[2]
    return _TimePhrase(groups.get("core") or "", tuple(_ONE_CLOCK.findall(times)), day_part, zone, now)


@cache
def _index_zones() -> Mapping[str, str]:
    """Index zones by name and by city, in lower case."""
    names = sorted((name for name in available_timezones() if "/" in name), reverse=True)
    zone_by_city = {name.lower().rpartition("/")[2]: name for name in names}
    return {**zone_by_city, **{name.lower(): name for name in names}, "utc": "UTC", "gmt": "UTC"}


def find_named_zone(text: str) -> str:
    """Find a zone by its name or its city. Returns an empty string if none matches."""
    return _index_zones().get(text.strip().replace(" ", "_"), "")


def _parse_clock_time(text: str, day_part: str) -> str:
    """Parse a time of day into `09:00`. Returns an empty string if it is invalid or not in that part of the day."""
    if text in _DAY_PARTS:
        return _DAY_PARTS[text]
    match = _CLOCK_TIME.fullmatch(text)
    if match is None:
        return ""
    hour, minute, half = int(match["hour"]), int(match["minute"] or 0), match["half"]
    if hour >= _DAY_MINUTES // 60 or minute >= 60 or (half and hour not in _HOURS):  # noqa: PLR2004  minutes of an hour
        return ""
    if half:
        hour, day_part = hour % _NOON_HOUR + (_NOON_HOUR if half == "p" else 0), ""
    minutes = (hour * 60 + minute + _MINUTES_PAST.get(match["past"], 0)) % _DAY_MINUTES
    return _format_clock_time(minutes, day_part)


def _format_clock_time(minutes: int, day_part: str) -> str:
    """Format a time, with an evening hour moved to the evening. Returns an empty string if the parts contradict."""
    hour, minute = divmod(minutes, 60)
    if hour in _LATE_HOURS.get(day_part, ()):
        hour += _NOON_HOUR
    if day_part == "night" and hour == _NOON_HOUR:
        hour = 0
    contradiction = {"morning": hour >= _NOON_HOUR, "afternoon": hour < _NOON_HOUR, "evening": hour < _NOON_HOUR}
    return "" if contradiction.get(day_part) else f"{hour:02d}:{minute:02d}"


_NUMBER: Final = r"(?:\d{1,9}|\d{1,6}\.\d{1,3}|an?(?= ))"
_OTHER: Final = "other|second|[234]th|single"
_COUNT: Final = rf"(?P<n>{_NUMBER}|{_OTHER})"
_COUNTS: Final = {"a": 1, "an": 1, "single": 1, "other": 2, "second": 2}
_UNITS: Final = {"s": clock.SECOND, "m": clock.MINUTE, "h": clock.HOUR, "d": clock.DAY, "w": 7 * clock.DAY}
_SPAN: Final = re.compile(rf"(?P<n>{_NUMBER})(?: ?(?P<unit>{_UNIT}|secs?)|(?P<letter>[smhdw]))")
_JOINED_SPAN: Final = re.compile(r"(?:\d{1,4}[hms]){2,3}")
_MINUTES_BY_PHRASE: Final = {
    "half hour": 30,
    "half-hour": 30,
    "half an hour": 30,
    "quarter hour": 15,
    "quarter-hour": 15,
    "quarter of an hour": 15,
    "hour and a half": 90,
    "half a day": 720,
}


def _parse_count(text: str | None) -> Fraction:
    """Parse a number or an ordinal. Without one it is 1; `other` is 2."""
    return Fraction(_COUNTS.get(text, 0) or text.removesuffix("th")) if text else Fraction(1)


def _parse_span(text: str) -> tuple[Fraction, str] | None:
    """Parse a duration into a number and the letter of its unit; None if it is none."""
    if minutes := _MINUTES_BY_PHRASE.get(re.sub(r"^an? ", "", text)):
        return Fraction(minutes), "m"
    if _JOINED_SPAN.fullmatch(text):
        return Fraction(parse_duration(text), clock.SECOND), "s"
    match = _SPAN.fullmatch(text)
    return match and (_parse_count(match["n"]), (match["unit"] or match["letter"])[0])


_MONTH_DAY: Final = r"(?:\d{1,2}(?:th)?|second)"
_DATE: Final = (
    r"(?P<date>\d{4}-\d\d-\d\d|\d{1,2}\.\d{1,2}\.\d{4}"
    rf"|(?:the )?{_MONTH_DAY}(?: of)? month\d+(?: \d{{4}})?|month\d+ (?:the )?{_MONTH_DAY}(?: \d{{4}})?)"
)


def _parse_date(text: str) -> tuple[int, int, int]:
    """Parse a date into year (0 if none), month and day; the day need not exist."""
    if "-" in text or "." in text:
        first, month, last = map(int, re.split("[-.]", text))
        return (first, month, last) if "-" in text else (last, month, first)
    words = [word for word in text.split() if word not in {"the", "of"}]
    month = next(word for word in words if word.startswith("month"))
    day, *year = [int(_parse_count(word)) for word in words if word != month]
    return sum(year), int(month.removeprefix("month")), day


def _list_days(text: str) -> Sequence[int]:
    return tuple(dict.fromkeys(map(int, re.findall(r"day(\d)", text))))


def _find_next_day(day: int, day_time: time, now: datetime) -> date:
    """Return the next such day of the week on which the time of day has not passed."""
    days_ahead = (day - now.isoweekday()) % 7
    if days_ahead == 0 and day_time <= now.time():
        days_ahead = 7
    return now.date() + timedelta(days=days_ahead)


def read_timing(phrase: str, now: int, zone: str, *, allows_bare_day: bool) -> tuple[Timing | str | None, bool]:
    """Return the timing of a phrase, or a sentence if it is not exact, and true if it recurs.

    A day without a time is read only if `allows_bare_day`, since it may be the subject of the sentence.
    """
    time_phrases = _parse_phrase(phrase, now, zone)
    for time_phrase in time_phrases:
        if (result := _read_recurrence(time_phrase)) is not None:
            return result, True
    for time_phrase in time_phrases:
        if (result := _read_moment(time_phrase, allows_bare_day=allows_bare_day)) is not None:
            return result, False
    return None, False


_EVERY: Final = "(?:once )?every"
_ITS_PART: Final = r"(?: (?P<part>morning|afternoon|evening|night)s?)?"
_DAY_LIST: Final = r"(?P<days>day\ds?(?:(?: and| or|,|/| and on)? day\ds?)*)"
_WEEKDAYS: Final = (
    r"(?:(?:every |on )?(?:week|work(?:ing)? ?|business )days?"
    rf"|(?:every |from |on )?day1s?(?: to | through | thru | ?- ?)day5s?){_ITS_PART}"
)
_EVERY_WEEK: Final = rf"{_EVERY} (?:{_COUNT} )?weeks?"
_ORDINAL: Final = r"(?:\d{1,2}th|second)"
_NTH: Final = (
    rf"(?:(?P<nth>{_ORDINAL}|last) day(?P<weekday>\d)"
    rf"|(?P<dom>{_ORDINAL}(?:(?: and|,)? (?:the )?{_ORDINAL})*|last day|day \d{{1,2}}))"
)
_EVERY_MONTH: Final = rf"{_EVERY} (?:(?P<quarter>quarter)|(?:{_COUNT} )?months?)"
_HOW_OFTEN: Final = (
    rf"{_EVERY_MONTH}|{_EVERY} year"
    r"|(?:once|twice|thrice|(?:\S+ ){1,2}times) (?:an?|per|every) (?:second|minute|hour|day|week|month|year)"
    r"|every now and (?:then|again)|every so often|every once in a while|every (?:few|several|some|couple(?: of)?) \S+"
    rf"|every (?:{_NUMBER} )?(?:2 weeks|fortnights|decades?|quarters?|years?|seasons?|semesters?|weekends)"
    r"|every (?:spring|summer|autumn|fall|winter|christmas|easter|birthday)"
    r"|bi-?weekly(?: .*)?|bi-?monthly(?: .*)?|semi-?(?:weekly|monthly)|from time to time|now and then|once in a while"
    r"|every -\S+ (?:seconds?|minutes?|mins?|hours?|days?|weeks?|months?)"
)


def _read_recurrence(phrase: _TimePhrase) -> Timing | str | None:
    """Return the timing of a recurrence, a sentence if it is not exact, or None if the phrase is not a recurrence."""
    for form, reader in _FORMS:
        match = form.fullmatch(phrase.core)
        timing = None if match is None else reader(match, phrase)
        if isinstance(timing, Timing):
            return NEVER_COMES if find_timing_flaw(timing) else timing
        if timing is not None:
            return timing
    return None


def _read_interval(match: re.Match[str], phrase: _TimePhrase) -> Timing | str | None:
    """Read an interval: within the day it counts from now; in days it has a time of day."""
    span = (_parse_count(match["n"]), match["unit"][0]) if match["unit"] else _parse_span(match["span"])
    if span is None or span[1] == "w":
        return span and NOT_EXACT
    count, unit = span
    if unit == "d":
        return _make_day_interval(count, phrase, phrase.now)
    interval = count * _UNITS[unit]
    if phrase.times or phrase.part:
        return _INTERVAL_WITH_TIME
    is_exact = interval > 0 and interval.denominator == 1
    return Timing(every=int(interval), timezone=phrase.zone, anchor=phrase.now) if is_exact else NOT_EXACT


def _read_on_the_hour(_match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    return _INTERVAL_WITH_TIME if phrase.times or phrase.part else Timing(cron="0 * * * *", timezone=phrase.zone)


def _read_daily(match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    return _make_cron_timing(phrase, match["part"])


def _read_weekdays(match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    return _make_cron_timing(phrase, match["part"], weekday="1-5")


def _read_weekends(match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    return _make_cron_timing(phrase, match["part"], weekday="0,6")


def _read_days(match: re.Match[str], phrase: _TimePhrase) -> Timing | str | None:
    """Read days of the week. Without `every`, only their plural is a recurrence."""
    if not match["every"] and re.search(r"day\d(?!s)", match["days"]):
        return None
    return _make_cron_timing(phrase, match["part"], weekday=_join_numbers(_list_days(match["days"])))


def _read_weeks(match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    """Read weeks: every week is a cron; longer intervals count from the next such day."""
    count, days, clocks = _parse_count(match["n"]), _list_days(match["days"]), phrase.list_clocks()
    if count == 1 or not all(clocks):
        return _make_cron_timing(phrase, weekday=_join_numbers(days))
    if len(days) > 1:
        return "Several days in every other week need separate schedules. Send them one by one."
    first_day = _find_next_day(days[0], time.fromisoformat(clocks[0]), phrase.today)
    return _make_day_interval(count * 7, phrase, find_first_moment(first_day, time(), ZoneInfo(phrase.zone)))


def _read_months(match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    """Read months: the interval must divide a year, and counts from the next occurrence."""
    groups = match.groupdict()
    count = Fraction(3) if groups.get("quarter") else _parse_count(groups.get("n"))
    if count not in {1, 2, 3, 4, 6, 12}:
        return NOT_EXACT
    month_day, weekday = _read_nth(match)
    monthly = _make_cron_timing(phrase, day=month_day, weekday=weekday)
    if count == 1 or isinstance(monthly, str) or find_timing_flaw(monthly):
        return monthly
    next_tick = next_tick_after(monthly, phrase.now) or phrase.now
    first_month = 1 if groups.get("quarter") else to_local_time(next_tick, ZoneInfo(phrase.zone)).month
    months = [(first_month - 1 + step) % 12 + 1 for step in range(0, 12, int(count))]
    return _make_cron_timing(phrase, day=month_day, month=_join_numbers(months), weekday=weekday)


def _read_each_nth(match: re.Match[str], phrase: _TimePhrase) -> Timing | str | None:
    """Read `every 1st` and `every last friday`; `every second monday` is ambiguous, `every second` an interval."""
    if match["dom"] == "second":
        return None
    return _AMBIGUOUS_SECOND if match["nth"] in {"second", "2th", "3th", "4th"} else _read_months(match, phrase)


def _read_nth(match: re.Match[str]) -> tuple[str, str]:
    """Return the day of the month and the day of the week, in cron format."""
    if match["nth"]:
        return "*", match["weekday"] + ("L" if match["nth"] == "last" else f"#{_parse_count(match['nth'])}")
    if match["dom"] == "last day":
        return "L", "*"
    return _join_numbers(int(_parse_count(word)) for word in re.findall(r"\d+(?:th)?|second", match["dom"])), "*"


def _read_yearly(match: re.Match[str], phrase: _TimePhrase) -> Timing | str:
    year, month, day = _parse_date(match["date"])
    return NOT_EXACT if year else _make_cron_timing(phrase, day=str(day), month=str(month))


_Reader = Callable[[re.Match[str], _TimePhrase], Timing | str | None]
_READERS: Final[Sequence[tuple[str, _Reader]]] = (
    (rf"{_EVERY} hour on the hour", _read_on_the_hour),
    (rf"{_EVERY} (?:(?:(?P<n>{_OTHER}) )?(?P<unit>{_UNIT})|(?P<span>.+))", _read_interval),
    (rf"{_EVERY} (?P<n>{_NUMBER}) (?P<unit>[smh])", _read_interval),
    (rf"{_EVERY} (?P<part>{_PART})", _read_daily),
    (_WEEKDAYS, _read_weekdays),
    (rf"(?:every weekend|(?:on |at )?weekends|on the weekend){_ITS_PART}", _read_weekends),
    (r"on day\d (?:and|or) day\d", lambda _, __: _AMBIGUOUS_DAYS),
    (rf"(?:(?P<every>(?:on )?every )|on )?{_DAY_LIST}{_ITS_PART}", _read_days),
    (r"(?:on )?every (?P<n>other) (?P<days>day\d)", _read_weeks),
    (rf"{_EVERY_WEEK} on {_DAY_LIST}", _read_weeks),
    (rf"(?:on )?{_DAY_LIST} {_EVERY_WEEK}", _read_weeks),
    (rf"{_EVERY_MONTH} (?:on )?(?:the )?{_NTH}", _read_months),
    (rf"(?:on )?(?:the )?(?:every )?{_NTH} (?:day )?of (?:every|the|a) month", _read_months),
    (rf"(?:on )?every {_NTH}", _read_each_nth),
    (rf"{_EVERY} year on {_DATE}", _read_yearly),
    (rf"(?:on )?every {_DATE}", _read_yearly),
    (rf"on {_DATE} every year", _read_yearly),
    (_HOW_OFTEN, lambda _, __: NOT_EXACT),
)
_FORMS: Final = tuple((re.compile(form), reader) for form, reader in _READERS)


def _join_numbers(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in sorted(numbers))


def _make_cron_timing(
    phrase: _TimePhrase, day_part: str | None = None, *, day: str = "*", month: str = "*", weekday: str = "*"
) -> Timing | str:
    clocks = phrase.list_clocks(day_part or "")
    if not all(clocks):
        return NO_SUCH_TIME
    minutes = {int(day_time[3:]) for day_time in clocks}
    if len(minutes) > 1:
        return _SEVERAL_MINUTES
    hours = _join_numbers({int(day_time[:2]) for day_time in clocks})
    return Timing(cron=f"{minutes.pop()} {hours} {day} {month} {weekday}", timezone=phrase.zone)


def _make_day_interval(count: Fraction, phrase: _TimePhrase, anchor: int) -> Timing | str:
    if count == 1:
        return _make_cron_timing(phrase)
    clocks = phrase.list_clocks()
    if count.denominator != 1 or count < 1:
        return NOT_EXACT
    if len(clocks) != 1:
        return _SEVERAL_MINUTES
    days = int(count)
    return Timing(days=days, time=clocks[0], timezone=phrase.zone, anchor=anchor) if clocks[0] else NO_SUCH_TIME


_FROM_NOW: Final = re.compile(r"in (?P<span>.+)|(?P<later>.+) from now")
_OCCASION: Final = re.compile(
    rf"(?P<day>today|tomorrow|tonight|the day after tomorrow|this (?={_PART})|(?:on |this |on this )?day\d\b)"
    rf"(?: ?(?P<part>{_PART}))?"
)
_ON_DATE: Final = re.compile(rf"(?:on )?{_DATE}")
_NEXT: Final = re.compile(r"(?:on )?next (?:day\d|week|month|year)")
_MAX_AHEAD: Final = 3660 * clock.DAY
_EARLY: Final = "05:00"
"""Tonight ends then: earlier times of tonight are on the next day."""


def _read_moment(phrase: _TimePhrase, *, allows_bare_day: bool) -> Timing | str | None:
    """Return the timing of a moment, a sentence if it is not exact, or None if the phrase is not a moment."""
    core, is_timed = phrase.core, bool(phrase.times or phrase.part)
    match = _FROM_NOW.fullmatch(core)
    if match and (span := _parse_span(match["span"] or match["later"])):
        return _read_span_from_now(*span, phrase)
    if _NEXT.fullmatch(core) and (phrase.times or allows_bare_day):
        return "`next` is ambiguous. Write the date, like 24 December at 9."
    if core in {"", "today"} and phrase.times:
        timing = _make_moment(phrase.today.date(), phrase)
        is_tomorrow = timing == MOMENT_PASSED and not core
        return _make_moment(phrase.today.date() + timedelta(days=1), phrase) if is_tomorrow else timing
    if match := _OCCASION.fullmatch(core):
        day_part = match["part"] or ("night" if match["day"] == "tonight" else "")
        return _read_day(match["day"], day_part, phrase) if is_timed or day_part or allows_bare_day else None
    if (match := _ON_DATE.fullmatch(core)) and (is_timed or allows_bare_day):
        day = _find_date(_parse_date(match["date"]), phrase.today)
        return day if isinstance(day, str) else _make_moment(day, phrase)
    return None


def _read_span_from_now(count: Fraction, unit: str, phrase: _TimePhrase) -> Timing | str:
    """Read a duration from now. Whole days and weeks are days of the calendar, and may have a time of day."""
    span = count * _UNITS[unit]
    if not 0 < span <= _MAX_AHEAD:
        return "That interval is too short or too long. Write it like `in 20 minutes`."
    is_timed = bool(phrase.times or phrase.part)
    if unit in "dw" and count.denominator == 1:
        later = phrase.today + timedelta(days=int(span) // clock.DAY)
        if is_timed:
            return _make_moment(later.date(), phrase)
        moment = find_first_moment(later.date(), later.time(), ZoneInfo(phrase.zone))
        return Timing(at=moment, timezone=phrase.zone)
    return _INTERVAL_WITH_TIME if is_timed else Timing(at=phrase.now + int(span), timezone=phrase.zone)


def _read_day(day_text: str, day_part: str, phrase: _TimePhrase) -> Timing | str:
    clocks, today = phrase.list_clocks(day_part), phrase.today
    days = _list_days(day_text)
    if days and clocks[0]:
        return _make_moment(_find_next_day(days[0], time.fromisoformat(clocks[0]), today), phrase, day_part)
    if day_text == "tonight":
        days_later = int(clocks[0] < _EARLY)
    else:
        days_later = {"the day after tomorrow": 2, "tomorrow": 1}.get(day_text, 0)
    return _make_moment(today.date() + timedelta(days=days_later), phrase, day_part)


def _make_moment(day: date, phrase: _TimePhrase, day_part: str = "") -> Timing | str:
    clocks = phrase.list_clocks(day_part)
    if len(clocks) != 1:
        return "The message contains several times. Send them one by one."
    if not clocks[0]:
        return NO_SUCH_TIME
    moment = find_first_moment(day, time.fromisoformat(clocks[0]), ZoneInfo(phrase.zone))
    return Timing(at=moment, timezone=phrase.zone) if moment > phrase.now else MOMENT_PASSED


def _find_date(date_parts: tuple[int, int, int], today: datetime) -> date | str:
    """Find the next day with a date; a date with a year must be within ten years."""
    year, month, day = date_parts
    if year and not today.year <= year <= today.year + 10:
        return (
            MOMENT_PASSED if year < today.year else "That date is too far ahead. Give a date within the next ten years."
        )
    for candidate_year in [year] if year else range(today.year, today.year + 9):
        is_past = not year and (candidate_year, month, day) < (today.year, today.month, today.day)
        if 1 <= month <= 12 and 1 <= day <= monthrange(candidate_year, month)[1] and not is_past:  # noqa: PLR2004
            return date(candidate_year, month, day)
    return "That month has no such day. Give another one."
