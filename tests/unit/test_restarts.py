"""Restart intensity, and how many calls any minute may see."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.autonomy.upkeep import GiveUp, RestartAfter, decide_restart
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.rows import RateRow
from halter.guard.judge import find_free_slot
from tests.unit.test_rates import Rows

NOW = 100 * HOUR


@pytest.mark.parametrize(
    ("ages", "answer"),
    [
        ([], RestartAfter(1 * SECOND)),
        ([0], RestartAfter(1 * SECOND)),
        ([1, 0], RestartAfter(2 * SECOND)),
        ([3, 1, 0], RestartAfter(4 * SECOND)),
        ([7, 3, 1, 0], RestartAfter(8 * SECOND)),
        ([15, 7, 3, 1, 0], GiveUp()),
        ([599, 7, 3, 1, 0], GiveUp()),
        ([600, 7, 3, 1, 0], RestartAfter(8 * SECOND)),
        ([9000, 8000, 7000, 6000, 5000, 4000, 0], RestartAfter(1 * SECOND)),
        ([-5, -4, -3, -2, 0], GiveUp()),
        ([-3600, -3601, -3602, -3603, 0], RestartAfter(1 * SECOND)),
    ],
)
def test_five_breakdowns_in_ten_minutes_are_left_to_a_person(ages: list[int], answer: RestartAfter | GiveUp) -> None:
    assert decide_restart([NOW - age * SECOND for age in ages], NOW) == answer


DESK = "session:desk-1"


def fill_slots(*ages: int) -> Rows:
    return Rows(*[RateRow(DESK, "", slot, NOW - age * SECOND) for slot, age in enumerate(ages)], now=NOW)


@pytest.mark.parametrize(
    ("ages", "most", "free"),
    [
        ([], 10, 0),
        ([0, 1, 2], 10, 3),
        ([0, 59, 60, 61], 10, 2),
        ([0] * 10, 10, None),
        ([0] * 25, 10, None),
        ([-30], 1, None),
        ([-3600], 1, 0),
    ],
)
def test_a_minute_sees_so_many_calls(ages: list[int], most: int, free: int | None) -> None:
    assert find_free_slot(fill_slots(*ages), DESK, most) == free


@given(st.lists(st.integers(0, 20 * SECOND), max_size=80), st.integers(1, 5))
def test_no_minute_ever_sees_more(pauses: list[int], most: int) -> None:
    rows, numbers = Rows(now=NOW), list[int]()
    for pause in pauses:
        rows.now += pause
        slot = find_free_slot(rows, DESK, most)
        if slot is not None:
            rows.save(RateRow(DESK, "", slot, rows.now))
            numbers.append(rows.now)
    assert len(rows.kept) <= most
    assert all(late - early >= MINUTE for early, late in zip(numbers, numbers[most:], strict=False))
