"""Restart intensity, and how many calls any minute may see."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.autonomy.upkeep import GiveUp, RestartAfter, decide_restart
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.loop.decide import MAX_CALLS, count_allowed_calls
from halter.loop.history import SessionHistory

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


@pytest.mark.parametrize(
    ("ages", "most", "more"),
    [
        ([], 10, 10),
        ([0, 1, 2], 10, 7),
        ([0, 59, 60, 61], 10, 8),
        ([0] * 10, 10, 0),
        ([0] * 25, 10, 0),
        ([0] * 25, 0, MAX_CALLS),
        ([-30], 1, 0),
        ([-3600], 1, 1),
    ],
)
def test_a_minute_sees_so_many_calls(ages: list[int], most: int, more: int) -> None:
    assert count_allowed_calls([NOW - age * SECOND for age in ages], NOW, most) == more


@given(st.lists(st.integers(0, 20 * SECOND), max_size=80), st.integers(1, 5))
def test_no_minute_ever_sees_more(pauses: list[int], most: int) -> None:
    now, numbers, recalled = NOW, list[int](), SessionHistory("s")
    for pause in pauses:
        now += pause
        if count_allowed_calls(recalled.actions, now, most):
            recalled.mark_acting(now)
            numbers.append(now)
    assert len(recalled.actions) <= most
    assert all(late - early >= MINUTE for early, late in zip(numbers, numbers[most:], strict=False))
