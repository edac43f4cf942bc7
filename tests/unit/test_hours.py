"""Active hours: by the clock on the wall, over midnight and over every change of it."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.config.decode import decode_document
from halter.config.yaml_reader import Document, SourceMap
from halter.core.clock import DAY, SECOND
from halter.core.errors import ConfigError
from halter.policy.hours import Hours, find_wake_time, parse_active_hours
from halter.spec.autonomy import ActiveHours

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


def hours(start: str, end: str, zone: str = "UTC") -> Hours:
    return parse_active_hours(ActiveHours(start=start, end=end, timezone=zone))


def at(text: str) -> int:
    """Read a moment, which says its distance from UTC unless it is 0."""
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("start", "end", "now", "until"),
    [
        ("08:00", "23:00", "2026-11-15T08:00", None),
        ("08:00", "23:00", "2026-11-15T22:59:59", None),
        ("08:00", "23:00", "2026-11-15T23:00", "2026-11-16T08:00"),
        ("08:00", "23:00", "2026-11-15T07:59:59", "2026-11-15T08:00"),
        ("08:00", "23:00", "2026-12-31T23:30", "2027-01-01T08:00"),
        ("22:00", "06:00", "2026-11-15T22:00", None),
        ("22:00", "06:00", "2026-11-15T00:00", None),
        ("22:00", "06:00", "2026-11-15T05:59:59", None),
        ("22:00", "06:00", "2026-11-15T06:00", "2026-11-15T22:00"),
        ("22:00", "06:00", "2026-11-15T21:59:59", "2026-11-15T22:00"),
        ("00:00", "06:00", "2026-11-15T23:59", "2026-11-16T00:00"),
        ("08:00", "00:00", "2026-11-15T23:59", None),
        ("08:00", "00:00", "2026-11-15T00:00", "2026-11-15T08:00"),
        ("12:01", "12:00", "2026-11-15T12:00:30", "2026-11-15T12:01"),
    ],
)
def test_an_agent_sleeps_to_the_next_start(start: str, end: str, now: str, until: str | None) -> None:
    assert find_wake_time(hours(start, end), at(now)) == (at(until) if until else None)


@pytest.mark.parametrize(
    ("zone", "start", "end", "now", "until"),
    [
        # Usual days, in winter and in summer.
        (BERLIN, "08:00", "23:00", "2026-01-15T06:59", "2026-01-15T07:00"),
        (BERLIN, "08:00", "23:00", "2026-07-15T05:59", "2026-07-15T06:00"),
        (NEW_YORK, "08:00", "23:00", "2026-01-15T04:00", "2026-01-15T13:00"),
        # A night before a change: one hour less or more of sleep.
        (BERLIN, "08:00", "23:00", "2026-03-28T22:00", "2026-03-29T06:00"),
        (BERLIN, "08:00", "23:00", "2026-10-24T21:00", "2026-10-25T07:00"),
        (NEW_YORK, "08:00", "23:00", "2026-03-08T04:00", "2026-03-08T12:00"),
        (NEW_YORK, "08:00", "23:00", "2026-11-01T03:00", "2026-11-01T13:00"),
        # A start that the clock jumps over is the first moment after the jump, on that day only.
        (BERLIN, "02:30", "06:00", "2026-03-29T00:59:59", "2026-03-29T01:00"),
        (BERLIN, "02:30", "06:00", "2026-03-29T01:00", None),
        (BERLIN, "02:30", "06:00", "2026-03-29T04:00", "2026-03-30T00:30"),
        (NEW_YORK, "02:30", "06:00", "2026-03-08T06:59:59", "2026-03-08T07:00"),
        (NEW_YORK, "02:30", "06:00", "2026-03-08T07:00", None),
        (LORD_HOWE, "02:10", "06:00", "2026-10-03T15:29:59", "2026-10-03T15:30"),
        (LORD_HOWE, "02:10", "06:00", "2026-10-03T15:30", None),
        # An end that the clock jumps over is that moment, too.
        (BERLIN, "22:00", "02:30", "2026-03-29T00:59:59", None),
        (BERLIN, "22:00", "02:30", "2026-03-29T01:00", "2026-03-29T20:00"),
        (NEW_YORK, "22:00", "02:30", "2026-03-08T07:00", "2026-03-09T02:00"),
        (LORD_HOWE, "22:00", "02:10", "2026-10-03T15:30", "2026-10-04T11:00"),
        # A stretch that the clock jumps over as a whole is left out.
        (BERLIN, "02:10", "02:50", "2026-03-29T00:59", "2026-03-30T00:10"),
        (BERLIN, "02:10", "02:50", "2026-03-29T01:00", "2026-03-30T00:10"),
        # An end that comes twice is the first one: the hour that is repeated does not wake the agent again.
        (BERLIN, "22:00", "02:30", "2026-10-25T00:29:59", None),
        (BERLIN, "22:00", "02:30", "2026-10-25T00:30", "2026-10-25T21:00"),
        (BERLIN, "22:00", "02:30", "2026-10-25T01:15", "2026-10-25T21:00"),
        (NEW_YORK, "22:00", "01:30", "2026-11-01T05:29:59", None),
        (NEW_YORK, "22:00", "01:30", "2026-11-01T06:15", "2026-11-02T03:00"),
        (LORD_HOWE, "22:00", "01:45", "2026-04-04T14:44:59", None),
        (LORD_HOWE, "22:00", "01:45", "2026-04-04T14:45", "2026-04-05T11:30"),
        (LORD_HOWE, "22:00", "01:45", "2026-04-04T15:10", "2026-04-05T11:30"),
        # A start that comes twice is the first one, and the stretch goes on through the second.
        (BERLIN, "02:30", "06:00", "2026-10-25T00:29:59", "2026-10-25T00:30"),
        (BERLIN, "02:30", "06:00", "2026-10-25T01:15", None),
        (NEW_YORK, "01:30", "06:00", "2026-11-01T05:29", "2026-11-01T05:30"),
        (NEW_YORK, "01:30", "06:00", "2026-11-01T06:10", None),
        (LORD_HOWE, "01:45", "06:00", "2026-04-04T15:05", None),
        # A stretch around a change is an hour, or half of one, shorter or longer.
        (BERLIN, "00:00", "06:00", "2026-03-29T03:59:59", None),
        (BERLIN, "00:00", "06:00", "2026-03-29T04:00", "2026-03-29T22:00"),
        (BERLIN, "00:00", "06:00", "2026-10-25T04:59:59", None),
        (BERLIN, "00:00", "06:00", "2026-10-25T05:00", "2026-10-25T23:00"),
        # A day that a zone left out.
        ("Pacific/Apia", "08:00", "23:00", "2011-12-30T09:30", "2011-12-30T18:00"),
    ],
)
def test_a_change_of_the_clock_moves_the_ends_and_cuts_nothing_in_two(
    zone: str, start: str, end: str, now: str, until: str | None
) -> None:
    assert find_wake_time(hours(start, end, zone), at(now)) == (at(until) if until else None)


MINUTES = st.integers(0, 24 * 60 - 1)
ZONES = st.sampled_from(
    (
        "UTC",
        BERLIN,
        NEW_YORK,
        LORD_HOWE,
        "Asia/Kathmandu",
        "Africa/Cairo",
        "America/Havana",
        "Pacific/Apia",
        "Africa/Casablanca",
    )
)
CHANGES = st.sampled_from(
    (
        "2026-03-29T01:00",
        "2026-10-25T01:00",
        "2026-03-08T07:00",
        "2026-11-01T06:00",
        "2026-10-03T15:30",
        "2026-04-04T15:00",
        "2011-12-30T10:00",
    )
)
NEAR = st.builds(lambda change, off: at(change) + off, CHANGES, st.integers(-2 * DAY, 2 * DAY))
MOMENTS = NEAR | st.integers(at("2020-01-01"), at("2035-01-01"))


def format_minute(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@given(MINUTES, MINUTES, ZONES, MOMENTS, st.floats(0, 1, exclude_max=True))
def test_the_moment_that_is_named_is_the_first_active_one(
    start: int, end: int, zone: str, now: int, part: float
) -> None:
    if start == end:
        return
    when = hours(format_minute(start), format_minute(end), zone)
    until = find_wake_time(when, now)
    if until is None:
        return
    assert now < until <= now + 2 * DAY + 2 * 3600 * SECOND
    assert find_wake_time(when, until) is None
    assert find_wake_time(when, until - 1) == until
    assert find_wake_time(when, now + int((until - now) * part)) == until


@given(MINUTES, MINUTES, ZONES, MOMENTS)
def test_away_from_a_change_the_wall_clock_alone_decides(start: int, end: int, zone: str, now: int) -> None:
    if start == end:
        return
    local = datetime.fromtimestamp(now / SECOND, UTC).astimezone(ZoneInfo(zone))
    around = {
        (local.astimezone(UTC) + timedelta(hours=off)).astimezone(ZoneInfo(zone)).utcoffset() for off in range(-30, 31)
    }
    if len(around) > 1:
        return
    minute = local.hour * 60 + local.minute
    active = start <= minute < end if start < end else minute >= start or minute < end
    assert (find_wake_time(hours(format_minute(start), format_minute(end), zone), now) is None) == active


def decode_hours(start: str, end: str, zone: str = "UTC") -> ActiveHours:
    document = Document({"start": start, "end": end, "timezone": zone}, SourceMap("agent.yaml"))
    return decode_document(document, ActiveHours)


@pytest.mark.parametrize(
    "written", ["8:00", "08:60", "24:00", "0800", "08:00:00", "", "eight", " 08:00", "08:00\n", "0\u0668:00"]
)
def test_a_time_of_day_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r"`start` is .* but must be a time of day from 00:00 to 23:59"):
        decode_hours(written, "23:00")
    with pytest.raises(ConfigError, match=r"`end` is .* but must be a time of day"):
        decode_hours("08:00", written)


def test_hours_without_length_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"starts and ends at 08:00; change one of them"):
        decode_hours("08:00", "08:00")


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../etc/passwd", "/etc/localtime", "a\x00b", "Europe"])
def test_a_zone_that_does_not_exist_is_refused(zone: str) -> None:
    with pytest.raises(ConfigError, match="but must be a time zone, as in Europe/Berlin"):
        decode_hours("08:00", "23:00", zone)


def test_without_a_zone_the_clock_is_that_of_utc() -> None:
    assert parse_active_hours(ActiveHours(start="08:00", end="23:00")).zone == "UTC"
