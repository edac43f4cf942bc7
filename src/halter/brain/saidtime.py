"""Times of day, days and numbers as people say them, each form written out: what is not listed is not read."""

import re
from calendar import monthrange
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from types import MappingProxyType
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import msgspec

from halter.core.wall import shown_at, zone_of


def _numbered(text: str, first: int) -> dict[str, int]:
    """Number words in their order; those with a comma between them are the same."""
    return {name: number for number, names in enumerate(text.split(), first) for name in names.split(",")}


NUMBERS: Final[Mapping[str, int]] = MappingProxyType(
    _numbered(
        "zero one,a,an two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty",
        0,
    )
    | {"thirty": 30, "forty": 40, "forty-five": 45, "fifty": 50, "sixty": 60, "ninety": 90}
)
DAYS: Final[Mapping[str, int]] = MappingProxyType(
    _numbered(
        "sunday,sun monday,mon tuesday,tue,tues wednesday,wed,weds thursday,thu,thur,thurs friday,fri saturday,sat", 0
    )
)
"""The days of a week as a cron counts them."""
MONTHS: Final[Mapping[str, int]] = MappingProxyType(
    _numbered(
        "january,jan february,feb march,mar april,apr may june,jun july,jul august,aug september,sep,sept october,oct "
        "november,nov december,dec",
        1,
    )
)
ORDINALS: Final[Mapping[str, int]] = MappingProxyType(
    {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "fifteenth": 15}
)
PARTS: Final[Mapping[str, str]] = MappingProxyType(
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
"""The hour that is taken for a part of the day, and shown to the person before anything is made of it."""
USUAL: Final = "09:00"
"""The hour that is taken for a day without one."""
PART: Final = "morning|afternoon|evening|night|noon|midday|midnight"


def _any(words: Mapping[str, int]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


NUMBER: Final = rf"(?:\d{{1,9}}|{_any(NUMBERS)})"
DAY: Final = rf"(?:{_any(DAYS)})"
MONTH: Final = rf"(?:{_any(MONTHS)})"
ORDINAL: Final = rf"(?:\d{{1,2}}(?:st|nd|rd|th)|{_any(ORDINALS)})"
_DAY: Final = rf"(?:\d{{1,2}}|{ORDINAL})"
_YEAR: Final = r"(?: \d{4})?"
DATE: Final = (
    r"(?:\d{4}-\d\d-\d\d|\d{1,2}\.\d{1,2}\.\d{4}"
    rf"|(?:the )?{_DAY}(?: of)? {MONTH}{_YEAR}|{MONTH} (?:the )?{_DAY}{_YEAR})"
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
HOUR: Final = 60
NOON: Final = 12
_ZONE: Final = re.compile(r"(?P<rest>.+?) (?:in )?(?P<zone>utc|gmt|[a-z]+(?:/[a-z_+-]+)+)(?: time)?")
_LATE: Final[Mapping[str, range]] = MappingProxyType(
    {"afternoon": range(1, 7), "evening": range(4, 12), "night": range(5, 12)}
)


class Spoken(msgspec.Struct, frozen=True):
    """A phrase taken apart: its days, its times of day (as said), the part of the day, and its zone."""

    core: str
    times: tuple[str, ...] = ()
    part: str = ""
    zone: str = ""


def spoken(phrase: str) -> tuple[Spoken, ...]:
    """Take a phrase apart, in each way in which it can be: with its time at its end, at its beginning, or without."""
    zone = ""
    if (found := _ZONE.fullmatch(phrase)) and (named := _zone_written(found["zone"])):
        phrase, zone = found["rest"], named
    ways = [found for form in (_AFTER, _BEFORE, _ONLY, _NO_TIME) if (found := form.fullmatch(phrase))]
    return tuple(_spoken(found.groupdict(), zone) for found in ways)


def _spoken(groups: Mapping[str, str | None], zone: str) -> Spoken:
    times = groups.get("times") or groups.get("exact") or ""
    part = (groups.get("part") or "").split()
    return Spoken(groups.get("core") or "", tuple(_ONE.findall(times)), part[-1] if part else "", zone)


def _zone_written(said: str) -> str:
    """Find a zone by its whole name, however its letters are written; empty if there is none."""
    name = re.sub(r"[a-z]+", lambda found: found[0].capitalize(), said)
    return "UTC" if said in {"utc", "gmt"} else name if zone_of(name) is not None else ""


def zone_named(said: str) -> str:
    """Find a zone by its name, or by that of its city, however it is written; empty if there is none."""
    wanted = said.strip().replace(" ", "_")
    if wanted in {"utc", "gmt"}:
        return "UTC"
    for name in sorted(available_timezones()):
        if "/" in name and wanted in {name.lower(), name.lower().rpartition("/")[2]}:
            return name
    return ""


def clock_of(said: str, part: str = "") -> str:
    """Read a time of day into `09:00`; empty if there is no such time, or not in that part of the day."""
    if said in PARTS:
        return PARTS[said]
    if found := _PAST.fullmatch(said):
        minutes = _number(found[2]) * HOUR + {"half past": 30, "quarter past": 15, "quarter to": -15}[found[1]]
        return _shown(minutes % (24 * HOUR), part) if _number(found[2]) < 24 else ""  # noqa: PLR2004  hours of a day
    found = _WRITTEN.fullmatch(said)
    if found is None:
        return ""
    hour, minute, half = _number(found["hour"]), int(found["minute"] or 0), found["half"]
    if half and not 1 <= hour <= NOON:
        return ""
    if half:
        hour, part = hour % NOON + (NOON if half == "p" else 0), ""
    return _shown(hour * HOUR + minute, part) if 0 <= hour < 24 and minute < HOUR else ""  # noqa: PLR2004


def _shown(minutes: int, part: str) -> str:
    """Move an hour of the evening to where it belongs; a morning that begins in the afternoon is no time."""
    hour, minute = divmod(minutes, HOUR)
    if hour in _LATE.get(part, ()):
        hour += NOON
    if part == "night" and hour == NOON:
        hour = 0
    wrong = {"morning": hour >= NOON, "afternoon": hour < NOON, "evening": hour < NOON}
    return "" if wrong.get(part) else f"{hour:02d}:{minute:02d}"


def number_of(said: str) -> int:
    """Read a number or a place in a row: `2`, `two`, `2nd`, `second`; -1 if it is neither."""
    digits = re.fullmatch(r"(\d{1,9})(?:st|nd|rd|th)?", said)
    return int(digits[1]) if digits else ORDINALS.get(said, _number(said))


def _number(said: str) -> int:
    return int(said) if said.isdecimal() else NUMBERS.get(said, -1)


def day_of_year(said: str) -> tuple[int, int, int] | None:
    """Read a date into its year (0 if none is said), month and day; the day need not exist."""
    if found := re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", said):
        return int(found[1]), int(found[2]), int(found[3])
    if found := re.fullmatch(r"(\d{1,2})\.(\d{1,2})\.(\d{4})", said):
        return int(found[3]), int(found[2]), int(found[1])
    words = [word for word in said.split() if word not in {"the", "of"}]
    month = next((MONTHS[word] for word in words if word in MONTHS), 0)
    numbers = [number_of(word) for word in words if word not in MONTHS]
    if not month or not numbers or len(words) > 3:  # noqa: PLR2004  day, month and year
        return None
    return (numbers[1] if len(numbers) > 1 else 0), month, numbers[0]


def days_in(month: int, year: int) -> int:
    """Tell how many days a month has; 0 if there is no such month."""
    return monthrange(year, month)[1] if 1 <= month <= 12 else 0  # noqa: PLR2004


def days_named(said: str) -> tuple[int, ...]:
    """Read a list of days of the week, singular or plural, as a cron counts them."""
    words = [word for word in re.split(r" and | or |[ ,/]+", said) if word]
    found = [DAYS.get(word, DAYS.get(word.removesuffix("s"), -1)) for word in words]
    return tuple(dict.fromkeys(found)) if found and -1 not in found else ()


def coming(weekday: int, clock: time, now: datetime) -> date:
    """Tell the next day of that name on which the time of day is still ahead."""
    ahead = (weekday - now.isoweekday()) % 7
    if ahead == 0 and clock <= now.time():
        ahead = 7
    return now.date() + timedelta(days=ahead)


def cron_of(clocks: Sequence[str], day: str = "*", month: str = "*", weekday: str = "*") -> str:
    """Write times of day as one cron; empty if their minutes differ, which one cron cannot say."""
    minutes = {clock[3:] for clock in clocks}
    hours = ",".join(str(hour) for hour in sorted({int(clock[:2]) for clock in clocks}))
    return f"{int(minutes.pop())} {hours} {day} {month} {weekday}" if len(minutes) == 1 else ""


def local(moment: int, zone: str) -> datetime:
    """Tell what the wall clock of a zone shows."""
    return shown_at(moment, ZoneInfo(zone))
