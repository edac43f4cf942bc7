"""The calendar windows that caps are counted in."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import DAY, HOUR, SECOND, WindowLength, window_at, window_end

ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Havana",
    "Africa/Cairo",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Pacific/Kiritimati",
    "Pacific/Apia",
)
MOMENTS = st.integers(1_577_836_800 * SECOND, 1_893_456_000 * SECOND)


def at(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * SECOND


def utc(moment: int | None) -> str:
    assert moment is not None
    return datetime.fromtimestamp(moment // SECOND, UTC).isoformat()


@pytest.mark.parametrize(
    ("per", "zone", "name"),
    [
        ("", "UTC", ""),
        ("", "Europe/Berlin", ""),
        ("minute", "UTC", "minute/2026-11-14T23:30"),
        ("minute", "Asia/Kathmandu", "minute/2026-11-14T23:30"),
        ("hour", "UTC", "hour/2026-11-14T23"),
        ("day", "UTC", "day/2026-11-14"),
        ("month", "UTC", "month/2026-11"),
        ("day", "Europe/Berlin", "day/2026-11-15@Europe/Berlin"),
        ("month", "Pacific/Kiritimati", "month/2026-11@Pacific/Kiritimati"),
        ("hour", "Asia/Kathmandu", "hour/2026-11-14T23"),
    ],
)
def test_a_window_is_named_so_that_it_can_be_read_back_alone(per: WindowLength, zone: str, name: str) -> None:
    assert window_at(per, at("2026-11-14T23:30:00"), zone) == name


@pytest.mark.parametrize(
    ("window", "end"),
    [
        ("minute/2026-12-31T23:59", "2027-01-01T00:00:00+00:00"),
        ("hour/2026-12-31T23", "2027-01-01T00:00:00+00:00"),
        ("day/2026-02-28", "2026-03-01T00:00:00+00:00"),
        ("day/2028-02-28", "2028-02-29T00:00:00+00:00"),
        ("month/2026-01", "2026-02-01T00:00:00+00:00"),
        ("month/2026-02", "2026-03-01T00:00:00+00:00"),
        ("month/2028-02", "2028-03-01T00:00:00+00:00"),
        ("month/2026-12", "2027-01-01T00:00:00+00:00"),
        ("day/2026-06-30@Europe/Berlin", "2026-06-30T22:00:00+00:00"),
        ("month/2026-03@Europe/Berlin", "2026-03-31T22:00:00+00:00"),
        ("month/2026-10@Europe/Berlin", "2026-10-31T23:00:00+00:00"),
    ],
)
def test_a_window_ends_where_the_next_one_begins(window: str, end: str) -> None:
    assert utc(window_end(window)) == end


def test_the_life_of_a_scope_has_no_end() -> None:
    assert window_end("") is None


@pytest.mark.parametrize(
    ("day", "zone", "hours"),
    [
        ("2026-03-29", "Europe/Berlin", 23),
        ("2026-10-25", "Europe/Berlin", 25),
        ("2026-06-15", "Europe/Berlin", 24),
        ("2026-03-08", "America/New_York", 23),
        ("2026-11-01", "America/Havana", 25),
        ("2026-04-24", "Africa/Cairo", 23),
        ("2026-10-29", "Africa/Cairo", 25),
    ],
)
def test_a_day_on_which_the_clocks_change_has_as_many_hours_as_it_has(day: str, zone: str, hours: int) -> None:
    noon = at(f"{day}T12:00:00", zone)
    window = window_at("day", noon, zone)
    before = window_end(window_at("day", noon - DAY, zone))
    end = window_end(window)
    assert window == f"day/{day}@{zone}"
    assert before is not None
    assert end is not None
    assert (end - before) // HOUR == hours


def test_the_hour_that_a_clock_change_repeats_is_two_windows() -> None:
    first = at("2026-10-25T00:30:00")
    names = {window_at("hour", first + hours * HOUR, "Europe/Berlin") for hours in range(2)}
    assert names == {"hour/2026-10-25T00", "hour/2026-10-25T01"}


@given(MOMENTS, st.sampled_from(("hour", "day", "month")), st.sampled_from(ZONES))
def test_every_moment_lies_in_exactly_one_window_of_each_length(now: int, per: WindowLength, zone: str) -> None:
    window = window_at(per, now, zone)
    end = window_end(window)
    assert end is not None
    assert now < end
    assert window_at(per, end - 1, zone) == window
    assert window_at(per, end, zone) != window


@given(MOMENTS, MOMENTS, st.sampled_from(("hour", "day", "month")), st.sampled_from(ZONES))
def test_later_moments_have_the_same_or_a_later_window(one: int, other: int, per: WindowLength, zone: str) -> None:
    earlier, later = sorted((one, other))
    assert window_at(per, earlier, zone) <= window_at(per, later, zone)
