"""What repeats, as people say it: `every 2 days at 9`, `on mondays`, `every month on the 1st`. One form, one reader."""

import re
from collections.abc import Callable, Sequence
from datetime import time
from fractions import Fraction
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from halter.brain.occasion import NO_TIME
from halter.brain.saidtime import (
    DATE,
    DAY,
    DAYS,
    NUMBER,
    ORDINAL,
    PART,
    PARTS,
    USUAL,
    Spoken,
    clock_of,
    coming,
    cron_of,
    day_of_year,
    days_named,
    local,
    number_of,
)
from halter.core import clock
from halter.core.schedules import Timing, flaw, next_after
from halter.core.wall import first_shown

_EVERY: Final = r"(?:once )?(?:every|each)"
_DAYS: Final = rf"{DAY}s?(?:(?: and| or|,|/| and on)? {DAY}s?)*"
_COUNT: Final = rf"(?P<n>{NUMBER}|\d{{1,6}}\.\d{{1,3}}|other|second|third|fourth|single)"
_SHORT: Final = rf"{_EVERY} (?P<n>\d{{1,9}}) ?(?P<unit>s|secs?|m|mins?|h|hrs?)"
_LONG: Final = rf"{_EVERY} (?:{_COUNT} )?(?P<unit>seconds?|minutes?|mins?|hours?|hrs?)"
_ODD: Final = {
    "hourly": 60,
    "once an hour": 60,
    "every half hour": 30,
    "every half an hour": 30,
    "every half-hour": 30,
    "every quarter hour": 15,
    "every quarter-hour": 15,
    "every quarter of an hour": 15,
    "every hour and a half": 90,
}
_DAILY: Final = rf"(?:daily|(?:once )?(?:a|per) day|{_EVERY} (?:{_COUNT} )?days?|every single day)"
_PARTLY: Final = rf"(?:{_EVERY} (?P<part>{PART})|(?P<nightly>nightly))"
_ITS_PART: Final = r"(?: (?P<part>morning|afternoon|evening|night)s?)?"
_WEEKDAYS: Final = (
    r"(?:(?:every |each |on )?(?:weekdays?|workdays?|working days?|business days?)"
    rf"|(?:every |from |on )?mon(?:days?)?(?: to | through | thru | ?- ?)fri(?:days?)?){_ITS_PART}"
)
_WEEKENDS: Final = rf"(?:(?:every|each) weekend|(?:on |at )?weekends|on the weekend){_ITS_PART}"
_ON_DAYS: Final = rf"(?:(?P<every>(?:on )?(?:every|each) )|on )?(?P<days>{_DAYS}){_ITS_PART}"
_OTHER_DAY: Final = rf"(?:on )?every other (?P<days>{DAY})"
_WEEKS: Final = rf"(?:weekly|once a week|fortnightly|{_EVERY} fortnight|{_EVERY} (?:{_COUNT} )?weeks?)"
_ON_WEEKS: Final = (
    rf"(?:(?P<weeks>{_WEEKS}) on (?P<days>{_DAYS})"
    rf"|(?:on )?(?P<days2>{_DAYS}) (?P<weeks2>{_WEEKS.replace('<n>', '<n2>')}))"
)
_DOM: Final = rf"{ORDINAL}(?:(?: and|,)? (?:the )?{ORDINAL})*|last day|day \d{{1,2}}"
_NTH: Final = rf"(?:(?P<nth>{ORDINAL}|last) (?P<name>{DAY})|(?P<dom>{_DOM}))"
_MONTHS: Final = rf"(?:monthly|once a month|quarterly|{_EVERY} quarter|{_EVERY} (?:{_COUNT} )?months?)"
_ON_MONTHS: Final = rf"(?P<months>{_MONTHS}) (?:on )?(?:the )?{_NTH}"
_OF_MONTH: Final = rf"(?:on )?(?:the )?(?:every |each )?{_NTH} (?:day )?of (?:every|each|the|a) month"
_EACH_NTH: Final = rf"(?:on )?(?:every|each) {_NTH}"
_YEARLY: Final = (
    rf"(?:(?:yearly|annually|{_EVERY} year|once a year) on (?P<date>{DATE})"
    rf"|(?:on )?(?:every|each) (?P<date2>{DATE})|on (?P<date3>{DATE}) (?:every|each) year)"
)
_HOW_OFTEN: Final = (
    r"(?:(?:once|twice|thrice|(?:\S+ ){1,2}times) (?:a|an|per|every|each) (?:second|minute|hour|day|week|month|year)"
    r"|every now and (?:then|again)|every so often|every once in a while|every (?:few|several|some|couple(?: of)?) \S+"
    rf"|every (?:{NUMBER} )?(?:fortnights?|decades?|quarters?|years?|seasons?|semesters?|weekends|fortnight)"
    r"|(?:every|each) (?:spring|summer|autumn|fall|winter|christmas|easter|birthday)|yearly|annually"
    r"|bi-?weekly(?: .*)?|bi-?monthly(?: .*)?|semi-?(?:weekly|monthly)|from time to time|now and then|once in a while)"
)
_ON_ONE_OF: Final = rf"on {DAY} (?:and|or) {DAY}"
_NO_COUNT: Final = r"every (?:-\S+|0|zero) (?:seconds?|minutes?|mins?|hours?|days?|weeks?|months?)"

WHEN_EXACTLY: Final = (
    "That does not say exactly when: say it like every 15 minutes, every weekday at 9 or every month on the 1st."
)
NEVER: Final = "That never comes, or is too far apart: say another day, or how often."
_ONE_CRON: Final = "Times with different minutes need a schedule each: say them one by one."
_WITH_TIME: Final = (
    "Something that repeats within the day has no time of day: say only how often, like every 15 minutes."
)
_SECOND_DAY: Final = (
    "That can mean every two weeks or the second one of each month: say `every other monday`, or `every second monday "
    "of the month`."
)

_Reader = Callable[[re.Match[str], "_Asked"], Timing | str | None]


class _Asked(msgspec.Struct, frozen=True):
    """The phrase, from when it counts, and where its clock hangs."""

    said: Spoken
    now: int
    zone: str

    def clocks(self, part: str = "") -> Sequence[str]:
        part = self.said.part or part
        if self.said.times:
            return [clock_of(each, part) for each in self.said.times]
        return [PARTS.get(part, USUAL)]


def repeated(said: Spoken, now: int, zone: str) -> Timing | str | None:
    """Read a recurrence: a timing, a sentence where one is named that cannot be read exactly, or None."""
    asked = _Asked(said, now, said.zone or zone)
    for form, reader in _FORMS:
        found = form.fullmatch(said.core)
        if found is None:
            continue
        timing = reader(found, asked)
        if isinstance(timing, Timing):
            return NEVER if flaw(timing) else timing
        if timing is not None:
            return timing
    return None


def _often(found: re.Match[str], asked: _Asked) -> Timing | str:
    """Read what repeats within the day: it is counted from now."""
    units = {"s": clock.SECOND, "m": clock.MINUTE, "h": clock.HOUR}
    every = _counted(found["n"]) * units[found["unit"][0]]
    return _interval(int(every), asked) if every.denominator == 1 else WHEN_EXACTLY


def _oddly(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _interval(_ODD[found[0]] * clock.MINUTE, asked)


def _on_the_hour(_found: re.Match[str], asked: _Asked) -> Timing | str:
    if asked.said.times or asked.said.part:
        return _WITH_TIME
    return Timing(cron="0 * * * *", timezone=asked.zone)


def _interval(every: int, asked: _Asked) -> Timing | str:
    if asked.said.times or asked.said.part:
        return _WITH_TIME
    return Timing(every=every, timezone=asked.zone, anchor=asked.now) if every > 0 else WHEN_EXACTLY


def _daily(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _each_days(_counted(found["n"]), asked, asked.clocks(), asked.now)


def _partly(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _cron(asked, asked.clocks(found["part"] or "night"))


def _weekdays(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _cron(asked, asked.clocks(found["part"] or ""), weekday="1-5")


def _weekends(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _cron(asked, asked.clocks(found["part"] or ""), weekday="0,6")


def _on_days(found: re.Match[str], asked: _Asked) -> Timing | str | None:
    """Read days of the week. Without `every`, only their plural says that they repeat."""
    if not found["every"] and not all(word.endswith("s") for word in re.findall(rf"{DAY}s?", found["days"])):
        return None
    if not found["every"] and re.search(r"\b(?:tues|weds|thurs)\b", found["days"]):
        return None
    days = days_named(found["days"])
    return _cron(asked, asked.clocks(found["part"] or ""), weekday=_listed(days)) if days else None


def _on_one_of(_found: re.Match[str], _asked: _Asked) -> str:
    return "It is not clear whether that repeats: say `every monday and thursday`, or say one of the days."


def _other_day(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _each_weeks(Fraction(2), found["days"], asked)


def _on_weeks(found: re.Match[str], asked: _Asked) -> Timing | str:
    weeks = found["weeks"] or found["weeks2"]
    count = Fraction(2) if "fortnight" in weeks else _counted(found["n"] or found["n2"])
    return _each_weeks(count, found["days"] or found["days2"], asked)


def _on_months(found: re.Match[str], asked: _Asked) -> Timing | str:
    quarter = "quarter" in found["months"]
    return _each_months(Fraction(3) if quarter else _counted(found["n"]), found, asked, quarter=quarter)


def _of_month(found: re.Match[str], asked: _Asked) -> Timing | str:
    return _each_months(Fraction(1), found, asked)


def _each_nth(found: re.Match[str], asked: _Asked) -> Timing | str | None:
    """Read `every 1st` and `every last friday`; `every second monday` can mean two things, and a `second` is short."""
    if found["dom"] == "second":
        return None
    if found["nth"] in {"second", "third", "fourth", "2nd", "3rd", "4th"}:
        return _SECOND_DAY
    return _each_months(Fraction(1), found, asked)


def _yearly(found: re.Match[str], asked: _Asked) -> Timing | str:
    read = day_of_year(found["date"] or found["date2"] or found["date3"])
    if read is None or read[0]:
        return WHEN_EXACTLY
    return _cron(asked, asked.clocks(), day=str(read[2]), month=str(read[1]))


def _unsaid(_found: re.Match[str], _asked: _Asked) -> str:
    return WHEN_EXACTLY


def _counted(said: str | None) -> Fraction:
    """Read how many: nothing is one, `other` is two."""
    if said is None or said == "single":
        return Fraction(1)
    if said == "other":
        return Fraction(2)
    return Fraction(said) if "." in said else Fraction(number_of(said))


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in sorted(numbers))


def _cron(
    asked: _Asked, clocks: Sequence[str], *, day: str = "*", month: str = "*", weekday: str = "*"
) -> Timing | str:
    if not all(clocks):
        return NO_TIME
    cron = cron_of(clocks, day, month, weekday)
    return Timing(cron=cron, timezone=asked.zone) if cron else _ONE_CRON


def _each_days(count: Fraction, asked: _Asked, clocks: Sequence[str], anchor: int) -> Timing | str:
    if count == 1:
        return _cron(asked, clocks)
    if count.denominator != 1 or count < 1:
        return WHEN_EXACTLY
    if len(clocks) != 1:
        return _ONE_CRON
    return Timing(days=int(count), time=clocks[0], timezone=asked.zone, anchor=anchor) if clocks[0] else NO_TIME


def _each_weeks(count: Fraction, days: str, asked: _Asked) -> Timing | str:
    """Read weeks: one is a cron; more are counted from the next day of that name."""
    named = days_named(days)
    clocks = asked.clocks()
    if not named or not all(clocks):
        return NO_TIME if named else WHEN_EXACTLY
    if count == 1:
        return _cron(asked, clocks, weekday=_listed(named))
    only, *others = named
    if others:
        return "Several days in every other week need a schedule each: say them one by one."
    first = coming(only, time.fromisoformat(clocks[0]), local(asked.now, asked.zone))
    return _each_days(count * 7, asked, clocks, first_shown(first, time(), ZoneInfo(asked.zone)))


def _each_months(count: Fraction, found: re.Match[str], asked: _Asked, *, quarter: bool = False) -> Timing | str:
    """Read months: their number must go into a year, since a cron knows no other; they are counted from the next."""
    if count.denominator != 1 or count not in {1, 2, 3, 4, 6, 12}:
        return WHEN_EXACTLY
    day, weekday = _nth(found)
    once = _cron(asked, asked.clocks(), day=day, weekday=weekday)
    if count == 1 or isinstance(once, str) or flaw(once):
        return once
    first = 1 if quarter else local(next_after(once, asked.now) or asked.now, asked.zone).month
    months = sorted((first - 1 + step) % 12 + 1 for step in range(0, 12, int(count)))
    return _cron(asked, asked.clocks(), day=day, month=_listed(months), weekday=weekday)


def _nth(found: re.Match[str]) -> tuple[str, str]:
    """Tell the day of the month and the day of the week as a cron writes them."""
    if found["name"]:
        weekday = DAYS[found["name"]]
        return "*", f"{weekday}L" if found["nth"] == "last" else f"{weekday}#{number_of(found['nth'])}"
    if found["dom"] == "last day":
        return "L", "*"
    said = [word for word in found["dom"].split() if word not in {"day", "and", "the"}]
    return _listed([number_of(word) for word in said]), "*"


_FORMS: Final[Sequence[tuple[re.Pattern[str], _Reader]]] = tuple(
    (re.compile(form), reader)
    for form, reader in (
        ("|".join(map(re.escape, _ODD)), _oddly),
        (_NO_COUNT, _unsaid),
        (r"(?:hourly|every hour) on the hour", _on_the_hour),
        (_SHORT, _often),
        (_LONG, _often),
        (_DAILY, _daily),
        (_PARTLY, _partly),
        (_WEEKDAYS, _weekdays),
        (_WEEKENDS, _weekends),
        (_ON_ONE_OF, _on_one_of),
        (_ON_DAYS, _on_days),
        (_OTHER_DAY, _other_day),
        (_ON_WEEKS, _on_weeks),
        (_ON_MONTHS, _on_months),
        (_OF_MONTH, _of_month),
        (_EACH_NTH, _each_nth),
        (_YEARLY, _yearly),
        (_WEEKS, _unsaid),
        (_MONTHS, _unsaid),
        (rf"{_EVERY} year", _unsaid),
        (_HOW_OFTEN, _unsaid),
    )
)
