"""When schedules fire: crons, intervals, days and moments, over zones and both changes of the wall clock."""

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.schedules import (
    MAX_CRON_LENGTH,
    TickCount,
    Timing,
    count_ticks,
    explain_timing,
    find_timing_flaw,
    next_tick_after,
    parse_moment,
)

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
KOLKATA, AUCKLAND, SANTIAGO, APIA = "Asia/Kolkata", "Pacific/Auckland", "America/Santiago", "Pacific/Apia"


def at(text: str) -> int:
    """Read a moment, which says its distance from UTC unless it is 0."""
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * SECOND


def format_moment(moment: int | None) -> str:
    return "" if moment is None else datetime.fromtimestamp(moment / SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def three(timing: Timing, after: str) -> list[str]:
    texts: list[str] = []
    moment: int | None = at(after)
    while moment is not None and len(texts) < 3:
        moment = next_tick_after(timing, moment)
        if moment is not None:
            texts.append(format_moment(moment).removesuffix(":00"))
    return texts


@pytest.mark.parametrize(
    ("cron", "zone", "after", "times"),
    [
        # Usual days.
        ("* * * * *", "UTC", "2026-11-15T10:00", "2026-11-15T10:01 2026-11-15T10:02 2026-11-15T10:03"),
        ("*/15 * * * *", "UTC", "2026-11-15T10:14:59", "2026-11-15T10:15 2026-11-15T10:30 2026-11-15T10:45"),
        ("*/15 * * * *", KOLKATA, "2026-11-15T10:14:59", "2026-11-15T10:15 2026-11-15T10:30 2026-11-15T10:45"),
        ("0 * * * *", KOLKATA, "2026-11-15T10:00", "2026-11-15T10:30 2026-11-15T11:30 2026-11-15T12:30"),
        ("0 9 * * *", "UTC", "2026-11-15T09:00", "2026-11-16T09:00 2026-11-17T09:00 2026-11-18T09:00"),
        ("0 9 * * *", BERLIN, "2026-11-15T09:00", "2026-11-16T08:00 2026-11-17T08:00 2026-11-18T08:00"),
        ("0 9 * * *", KOLKATA, "2026-11-15T09:00", "2026-11-16T03:30 2026-11-17T03:30 2026-11-18T03:30"),
        ("0 9 * * *", AUCKLAND, "2026-11-15T09:00", "2026-11-15T20:00 2026-11-16T20:00 2026-11-17T20:00"),
        ("0 9 * * *", LORD_HOWE, "2026-11-15T09:00", "2026-11-15T22:00 2026-11-16T22:00 2026-11-17T22:00"),
        ("0 9 * * 1-5", "UTC", "2026-11-13T09:00", "2026-11-16T09:00 2026-11-17T09:00 2026-11-18T09:00"),
        ("0 9 * * MON-FRI", "UTC", "2026-11-13T09:00", "2026-11-16T09:00 2026-11-17T09:00 2026-11-18T09:00"),
        ("0 9 * * mon,thu", "UTC", "2026-11-13T09:00", "2026-11-16T09:00 2026-11-19T09:00 2026-11-23T09:00"),
        ("0 9 * * 0", "UTC", "2026-11-15T09:00", "2026-11-22T09:00 2026-11-29T09:00 2026-12-06T09:00"),
        ("0 9 * * 7", "UTC", "2026-11-15T09:00", "2026-11-22T09:00 2026-11-29T09:00 2026-12-06T09:00"),
        ("0 9,17 * * *", "UTC", "2026-11-15T09:00", "2026-11-15T17:00 2026-11-16T09:00 2026-11-16T17:00"),
        ("0 9-11 * * *", "UTC", "2026-11-15T09:30", "2026-11-15T10:00 2026-11-15T11:00 2026-11-16T09:00"),
        ("0 */6 * * *", "UTC", "2026-11-15T12:00", "2026-11-15T18:00 2026-11-16T00:00 2026-11-16T06:00"),
        ("0 9 1 * *", "UTC", "2026-11-15T12:00", "2026-12-01T09:00 2027-01-01T09:00 2027-02-01T09:00"),
        ("0 9 31 * *", "UTC", "2026-11-15T12:00", "2026-12-31T09:00 2027-01-31T09:00 2027-03-31T09:00"),
        ("0 9 L * *", "UTC", "2026-11-15T12:00", "2026-11-30T09:00 2026-12-31T09:00 2027-01-31T09:00"),
        ("0 9 LW * *", "UTC", "2027-01-01T12:00", "2027-01-29T09:00 2027-02-26T09:00 2027-03-31T09:00"),
        ("0 9 * * 1#1", "UTC", "2026-11-15T12:00", "2026-12-07T09:00 2027-01-04T09:00 2027-02-01T09:00"),
        ("0 9 * * 5L", "UTC", "2026-11-15T12:00", "2026-11-27T09:00 2026-12-25T09:00 2027-01-29T09:00"),
        ("0 0 29 2 *", "UTC", "2026-11-15T12:00", "2028-02-29T00:00 2032-02-29T00:00 2036-02-29T00:00"),
        ("0 9 13 * 5", "UTC", "2026-11-14T12:00", "2026-11-20T09:00 2026-11-27T09:00 2026-12-04T09:00"),
        ("0 9 1 1,4,7,10 *", "UTC", "2026-11-15T12:00", "2027-01-01T09:00 2027-04-01T09:00 2027-07-01T09:00"),
        ("0 9 24 DEC *", BERLIN, "2026-11-15T12:00", "2026-12-24T08:00 2027-12-24T08:00 2028-12-24T08:00"),
        # Berlin skips from 02:00 to 03:00 on 2026-03-29, which is 01:00 UTC.
        ("30 2 * * *", BERLIN, "2026-03-28T00:00", "2026-03-28T01:30 2026-03-29T01:00 2026-03-30T00:30"),
        ("0 2 * * *", BERLIN, "2026-03-28T12:00", "2026-03-29T01:00 2026-03-30T00:00 2026-03-31T00:00"),
        ("15,45 2 * * *", BERLIN, "2026-03-28T12:00", "2026-03-29T01:00 2026-03-30T00:15 2026-03-30T00:45"),
        ("0 2,3 * * *", BERLIN, "2026-03-28T12:00", "2026-03-29T01:00 2026-03-30T00:00 2026-03-30T01:00"),
        ("30 2 * * 0", BERLIN, "2026-03-23T12:00", "2026-03-29T01:00 2026-04-05T00:30 2026-04-12T00:30"),
        ("0 9 * * *", BERLIN, "2026-03-28T08:00", "2026-03-29T07:00 2026-03-30T07:00 2026-03-31T07:00"),
        ("*/30 * * * *", BERLIN, "2026-03-29T00:15", "2026-03-29T00:30 2026-03-29T01:00 2026-03-29T01:30"),
        ("0 * * * *", BERLIN, "2026-03-28T23:30", "2026-03-29T00:00 2026-03-29T01:00 2026-03-29T02:00"),
        ("*/30 2 * * *", BERLIN, "2026-03-28T12:00", "2026-03-30T00:00 2026-03-30T00:30 2026-03-31T00:00"),
        # Berlin shows 02:00 to 03:00 twice on 2026-10-25: at 00:00 and at 01:00 UTC.
        ("30 2 * * *", BERLIN, "2026-10-24T12:00", "2026-10-25T00:30 2026-10-26T01:30 2026-10-27T01:30"),
        ("30 2 * * *", BERLIN, "2026-10-25T01:10", "2026-10-26T01:30 2026-10-27T01:30 2026-10-28T01:30"),
        ("30 2 * * *", BERLIN, "2026-10-25T00:30", "2026-10-26T01:30 2026-10-27T01:30 2026-10-28T01:30"),
        ("0 2,3 * * *", BERLIN, "2026-10-24T12:00", "2026-10-25T00:00 2026-10-25T02:00 2026-10-26T01:00"),
        ("0 9 * * *", BERLIN, "2026-10-24T08:00", "2026-10-25T08:00 2026-10-26T08:00 2026-10-27T08:00"),
        ("0 * * * *", BERLIN, "2026-10-24T23:30", "2026-10-25T00:00 2026-10-25T01:00 2026-10-25T02:00"),
        ("*/30 2 * * *", BERLIN, "2026-10-25T00:10", "2026-10-25T00:30 2026-10-25T01:00 2026-10-25T01:30"),
        # New York skips from 02:00 on 2026-03-08 (07:00 UTC) and repeats 01:00 on 2026-11-01 (05:00 and 06:00 UTC).
        ("30 2 * * *", NEW_YORK, "2026-03-07T12:00", "2026-03-08T07:00 2026-03-09T06:30 2026-03-10T06:30"),
        ("30 1 * * *", NEW_YORK, "2026-10-31T12:00", "2026-11-01T05:30 2026-11-02T06:30 2026-11-03T06:30"),
        ("0 */2 * * *", NEW_YORK, "2026-11-01T04:30", "2026-11-01T07:00 2026-11-01T09:00 2026-11-01T11:00"),
        ("*/20 * * * *", NEW_YORK, "2026-11-01T05:30", "2026-11-01T05:40 2026-11-01T06:00 2026-11-01T06:20"),
        # Lord Howe moves by half an hour: 02:00 to 02:30 is skipped on 2026-10-04, 01:30 to 02:00 is repeated in April.
        ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00", "2026-10-03T15:30 2026-10-04T15:15 2026-10-05T15:15"),
        ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00", "2026-04-04T14:45 2026-04-05T15:15 2026-04-06T15:15"),
        ("0 * * * *", LORD_HOWE, "2026-10-03T14:00", "2026-10-03T14:30 2026-10-03T16:00 2026-10-03T17:00"),
        # Auckland skips from 02:00 on 2026-09-27 and repeats 02:00 on 2026-04-05.
        ("30 2 * * *", AUCKLAND, "2026-09-26T12:00", "2026-09-26T14:00 2026-09-27T13:30 2026-09-28T13:30"),
        ("30 2 * * *", AUCKLAND, "2026-04-04T12:00", "2026-04-04T13:30 2026-04-05T14:30 2026-04-06T14:30"),
        # Santiago skips midnight itself.
        ("0 0 * * *", SANTIAGO, "2026-09-05T12:00", "2026-09-06T04:00 2026-09-07T03:00 2026-09-08T03:00"),
    ],
)
def test_a_cron_fires_when_the_wall_clock_says_so(cron: str, zone: str, after: str, times: str) -> None:
    timing = Timing(cron=cron, timezone=zone)
    assert find_timing_flaw(timing) == ""
    assert three(timing, after) == times.split()


@pytest.mark.parametrize(
    ("timing", "after", "times"),
    [
        (Timing(every=15 * MINUTE), "2026-11-15T10:07", "2026-11-15T10:15 2026-11-15T10:30 2026-11-15T10:45"),
        (
            Timing(every=2 * HOUR, anchor=at("2026-11-15T09:10")),
            "2026-11-15T09:10",
            "2026-11-15T11:10 2026-11-15T13:10 2026-11-15T15:10",
        ),
        (
            Timing(every=HOUR, anchor=at("2026-11-15T09:00")),
            "2026-11-14T00:00",
            "2026-11-15T09:00 2026-11-15T10:00 2026-11-15T11:00",
        ),
        (
            Timing(every=HOUR, timezone=BERLIN, anchor=at("2026-03-29T00:30")),
            "2026-03-29T00:30",
            "2026-03-29T01:30 2026-03-29T02:30 2026-03-29T03:30",
        ),
        (
            Timing(days=2, time="09:00", anchor=at("2026-11-15T08:00")),
            "2026-11-15T08:00",
            "2026-11-15T09:00 2026-11-17T09:00 2026-11-19T09:00",
        ),
        (
            Timing(days=2, time="09:00", anchor=at("2026-11-15T10:00")),
            "2026-11-15T10:00",
            "2026-11-17T09:00 2026-11-19T09:00 2026-11-21T09:00",
        ),
        (
            Timing(days=2, time="09:00", timezone=BERLIN, anchor=at("2026-03-27T00:00")),
            "2026-03-27T10:00",
            "2026-03-29T07:00 2026-03-31T07:00 2026-04-02T07:00",
        ),
        (
            Timing(days=2, time="02:30", timezone=BERLIN, anchor=at("2026-03-27T00:00")),
            "2026-03-27T10:00",
            "2026-03-29T01:00 2026-03-31T00:30 2026-04-02T00:30",
        ),
        (
            Timing(days=1, time="02:30", timezone=BERLIN, anchor=at("2026-10-24T00:00")),
            "2026-10-24T10:00",
            "2026-10-25T00:30 2026-10-26T01:30 2026-10-27T01:30",
        ),
        (
            Timing(days=1, time="02:30", timezone=BERLIN, anchor=at("2026-10-24T00:00")),
            "2026-10-25T01:10",
            "2026-10-26T01:30 2026-10-27T01:30 2026-10-28T01:30",
        ),
        (
            # In Auckland the anchor's day has already begun when it is still the day before in UTC.
            Timing(days=7, time="09:00", timezone=AUCKLAND, anchor=at("2026-11-15T12:00")),
            "2026-11-15T12:00",
            "2026-11-15T20:00 2026-11-22T20:00 2026-11-29T20:00",
        ),
        (
            Timing(days=3, time="00:00", timezone=SANTIAGO, anchor=at("2026-09-03T12:00")),
            "2026-09-03T12:00",
            "2026-09-06T04:00 2026-09-09T03:00 2026-09-12T03:00",
        ),
        (Timing(at=at("2026-12-01T09:00")), "2026-11-15T12:00", "2026-12-01T09:00"),
        (Timing(at=at("2026-12-01T09:00")), "2026-12-01T08:59:59", "2026-12-01T09:00"),
        (Timing(at=at("2026-12-01T09:00")), "2026-12-01T09:00", ""),
        (Timing(at=0), "1969-12-31T00:00", "1970-01-01T00:00"),
    ],
)
def test_intervals_days_and_moments_fire_in_their_order(timing: Timing, after: str, times: str) -> None:
    assert find_timing_flaw(timing) == ""
    assert three(timing, after) == times.split()


@pytest.mark.parametrize(
    "cron",
    [
        "0 0 30 2 *",
        "0 0 31 2 *",
        "* * 31 2,4,6 *",
        "0 0 31 4,6,9,11 *",
        "0 0 30-31 2 *",
        "0 0 */31 * 1#5",
        "* * */31 * 1#5",
        "0 0 */31 2 3L",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * 32 * *",
        "* * * 13 *",
        "* * * 0 *",
        "* * * * 8",
        "*/0 * * * *",
        "5-1 * * * *",
        "-1 * * * *",
        "1,,2 * * * *",
        "* * * JANUARY *",
        "* * * * MONDAY",
        "* * * * MOM",
        "* * * FEV *",
        "0 0 9 * * *",
        "0 0 9 * *  *",
        "* * * *",
        " ",
        "@daily",
        "every day",
        "\uff19 * * * *",
        "1." * 90,
        "1," * 100_000 + "1 * * * *",
        "\0 * * * *",
    ],
)
def test_a_cron_that_can_never_fire_is_refused_with_what_to_write(cron: str) -> None:
    timing_flaw = find_timing_flaw(Timing(cron=cron))
    assert timing_flaw.endswith("Write it like `0 9 * * 1-5`, which is 09:00 on weekdays.")
    assert len(timing_flaw) < 2 * MAX_CRON_LENGTH + 300


@pytest.mark.parametrize(
    ("timing", "flaw"),
    [
        (Timing(), "exactly one"),
        (Timing(cron="* * * * *", every=SECOND), "exactly one"),
        (Timing(days=1, time="09:00", at=5), "exactly one"),
        (Timing(every=-5), "at least one second"),
        (Timing(every=999_999), "at least one second"),
        (Timing(every=10_000 * DAY), "at most"),
        (Timing(days=-1, time="09:00"), "`days` must be from 1"),
        (Timing(days=100_000, time="09:00"), "`days` must be from 1"),
        (Timing(days=1), "not a time of day"),
        (Timing(days=1, time="9"), "not a time of day"),
        (Timing(days=1, time="24:00"), "not a time of day"),
        (Timing(days=1, time="09:00", anchor=10**30), "beyond the calendar"),
        (Timing(at=10**30), "beyond the calendar"),
        (Timing(cron="0 9 * * *", timezone="Europe/Berlinn"), "is not known"),
        (Timing(cron="0 9 * * *", timezone="../etc/passwd"), "is not known"),
        (Timing(cron="0 9 * * *", timezone=""), "is not known"),
        (Timing(cron="0 9 * * *", timezone="\0"), "is not known"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(timing: Timing, flaw: str) -> None:
    assert flaw in find_timing_flaw(timing)


def test_a_day_that_a_zone_left_out_fires_at_its_end() -> None:
    # Samoa went from 29 to 31 December 2011.
    assert three(Timing(cron="0 9 * * *", timezone=APIA), "2011-12-29T20:00")[:2] == [
        "2011-12-30T10:00",
        "2011-12-30T19:00",
    ]


@pytest.mark.parametrize(
    ("timing", "after", "until", "found"),
    [
        (Timing(cron="0 9 * * *"), "2026-11-15T09:00", "2026-11-15T23:00", (0, "")),
        (Timing(cron="0 9 * * *"), "2026-11-15T08:00", "2026-11-15T09:00", (1, "2026-11-15T09:00:00")),
        (Timing(cron="0 9 * * *"), "2026-11-01T12:00", "2026-11-15T12:00", (14, "2026-11-15T09:00:00")),
        (Timing(cron="* * * * *"), "2020-01-01T00:00", "2026-11-15T12:00:30", (1000, "2026-11-15T12:00:00")),
        (Timing(cron="* * * 1 *"), "2020-01-01T00:00", "2026-11-15T12:00", (1000, "2026-01-31T23:59:00")),
        (Timing(every=SECOND), "2020-01-01T00:00", "2026-11-15T12:00", (1000, "2026-11-15T12:00:00")),
        (Timing(every=7 * MINUTE), "1970-01-01T00:00", "2026-11-15T11:59", (1000, "2026-11-15T11:53:00")),
        (Timing(at=at("2026-11-15T12:00")), "2020-01-01T00:00", "2026-11-15T12:00", (1, "2026-11-15T12:00:00")),
        (Timing(at=at("2026-11-15T12:00")), "2020-01-01T00:00", "2026-11-15T11:59", (0, "")),
        (Timing(cron="0 9 * * *"), "2026-11-15T09:00", "2020-11-15T09:00", (0, "")),
    ],
)
def test_missed_ticks_are_counted_with_bounded_work(
    timing: Timing, after: str, until: str, found: tuple[int, str]
) -> None:
    missed = count_ticks(timing, at(after), at(until))
    assert (missed.count, format_moment(missed.latest)) == found


def test_no_more_ticks_are_counted_than_asked_for_but_the_latest_is_found() -> None:
    assert count_ticks(Timing(every=MINUTE), 0, DAY, limit=3) == TickCount(3, DAY)
    assert count_ticks(Timing(every=MINUTE), 0, DAY, limit=0) == TickCount(0, None)


@pytest.mark.parametrize(
    ("timing", "words"),
    [
        (Timing(cron="0 9 * * 1-5", timezone=BERLIN), "at 09:00 on weekdays, Europe/Berlin"),
        (Timing(cron="0 9 * * *"), "at 09:00 every day, UTC"),
        (Timing(cron="30 17 * * 1,4"), "at 17:30 on Monday and Thursday, UTC"),
        (Timing(cron="0 9 L * *"), "at 09:00 on the last day of every month, UTC"),
        (Timing(every=15 * MINUTE), "every 15 minutes"),
        (Timing(every=HOUR), "every hour"),
        (Timing(every=90 * MINUTE), "every 1 hour and 30 minutes"),
        (Timing(days=2, time="09:00", timezone=BERLIN), "every 2 days at 09:00, Europe/Berlin"),
        (Timing(days=1, time="09:00"), "every day at 09:00, UTC"),
        (Timing(at=at("2026-12-01T09:00"), timezone=BERLIN), "once, on 2026-12-01 at 10:00, Europe/Berlin"),
    ],
)
def test_a_schedule_is_explained_in_plain_words(timing: Timing, words: str) -> None:
    assert explain_timing(timing) == words


@pytest.mark.parametrize(
    ("text", "zone", "moment"),
    [
        ("2026-12-01 09:00", "UTC", "2026-12-01T09:00"),
        ("2026-12-01 09:00", BERLIN, "2026-12-01T08:00"),
        ("2026-12-01T09:00:30", BERLIN, "2026-12-01T08:00:30"),
        (" 2026-07-01 09:00 ", NEW_YORK, "2026-07-01T13:00"),
        ("2026-12-01T09:00Z", BERLIN, "2026-12-01T09:00"),
        ("2026-12-01 09:00+05:30", BERLIN, "2026-12-01T03:30"),
        ("2026-03-29 02:30", BERLIN, "2026-03-29T01:00"),
        ("2026-10-25 02:30", BERLIN, "2026-10-25T00:30"),
    ],
)
def test_a_moment_is_read_by_the_wall_clock_of_its_zone(text: str, zone: str, moment: str) -> None:
    assert parse_moment(text, zone) == at(moment)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tomorrow",
        "2026-13-01 09:00",
        "2026-02-30 09:00",
        "2026-12-01",
        "2026-12-01 25:00",
        "0001-01-01 00:00",
        "1.12.2026 09:00",
        "2026-12-01 09:00+99:00",
        "\uff12026-12-01 09:00",
        "2026-12-01 9:00",
        "9" * 100_000,
    ],
)
def test_a_moment_that_cannot_be_read_is_answered_with_a_sentence(text: str) -> None:
    moment = parse_moment(text, AUCKLAND)
    assert isinstance(moment, str)
    assert "Write it like 2026-12-01 09:00" in moment


def test_a_moment_in_an_unknown_zone_is_answered_with_a_sentence() -> None:
    assert "Europe/Berlin" in str(parse_moment("2026-12-01 09:00", "Mars/Base"))


CRONS = ["30 2 * * *", "*/20 * * * *", "0 0 * * 0", "0 1-3 * * *", "0 */2 * * *", "15,45 1,2 * * *", "59 23 L * *"]
ZONES = ["UTC", BERLIN, NEW_YORK, LORD_HOWE, KOLKATA, AUCKLAND, SANTIAGO]
MOMENTS = st.integers(at("2026-01-01T00:00"), at("2027-12-31T00:00"))


@given(st.sampled_from(CRONS), st.sampled_from(ZONES), MOMENTS)
def test_a_tick_is_always_later_and_the_next_one_later_still(cron: str, zone: str, after: int) -> None:
    timing = Timing(cron=cron, timezone=zone)
    moments = [after]
    for _ in range(5):
        moments.append(next_tick_after(timing, moments[-1]) or 0)
    assert all(early < late for early, late in pairwise(moments))


@given(st.sampled_from(CRONS), st.sampled_from(ZONES), MOMENTS, st.integers(0, 3 * DAY))
def test_what_was_asked_in_two_parts_is_what_was_asked_at_once(cron: str, zone: str, after: int, more: int) -> None:
    timing = Timing(cron=cron, timezone=zone)
    whole = count_ticks(timing, after, after + 3 * DAY)
    first, second = count_ticks(timing, after, after + more), count_ticks(timing, after + more, after + 3 * DAY)
    assert whole.count == first.count + second.count


@given(st.text(max_size=40))
def test_any_text_for_a_cron_is_answered(text: str) -> None:
    timing = Timing(cron=text, timezone=BERLIN)
    assert find_timing_flaw(timing) != "" or next_tick_after(timing, at("2026-11-15T12:00")) is not None


@given(st.integers(-(2**70), 2**70), st.sampled_from(["cron", "days", "every", "at"]))
def test_no_moment_is_too_far_away_to_ask_about(after: int, kind: str) -> None:
    timings = {
        "cron": Timing(cron="30 2 * * *", timezone=BERLIN),
        "days": Timing(days=2, time="09:00", timezone=AUCKLAND),
        "every": Timing(every=HOUR),
        "at": Timing(at=5),
    }
    number = next_tick_after(timings[kind], after)
    assert number is None or number > after
