"""The bounds of a flood are found where they are passed, and only there."""

from typing import Any

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.usage import Usage
from halter.spec.autonomy import Autonomy
from halter.testing.fakes import ManualClock
from halter_drills.checker import RecordedEvent
from halter_drills.flood import (
    Outside,
    SessionRemains,
    count_peak,
    find_active,
    too_many_actions,
    too_many_tokens,
    too_many_turns,
    wrong_charges,
    wrong_sleeps,
)

LIMITS = Autonomy()


def fact(kind: str, at: int = 0, **facts: Any) -> RecordedEvent:
    return RecordedEvent("session:flood-1", 1, kind, at, 1, facts)


def outside(*asked: tuple[int, int]) -> Outside:
    return Outside(ManualClock(), requests=[(at, Usage(tokens, 0)) for at, tokens in asked])


@pytest.mark.parametrize(
    ("moments", "most"),
    [([], 0), ([5], 1), ([0, 59, 60], 2), ([0, 59, 119], 2), ([0, 60, 120], 1), ([0, 100, 110, 120, 159], 4)],
)
def test_a_span_slides_over_all_moments(moments: list[int], most: int) -> None:
    assert count_peak(moments, 60) == most


def test_more_turns_than_without_a_sleep_are_found_also_across_the_full_hour() -> None:
    turns = [fact("turn_started", HOUR - MINUTE + number * SECOND) for number in range(51)]
    assert list(too_many_turns(turns, LIMITS)) == ["took 51 turns within an hour; the limit without a sleep is 50."]
    assert list(too_many_turns(turns[:50], LIMITS)) == []


def test_tokens_are_counted_hour_by_hour() -> None:
    assert list(too_many_tokens(outside((0, 60_000), (HOUR, 60_000)), 100_000)) == []
    assert len(list(too_many_tokens(outside((0, 60_000), (HOUR - 1, 60_000)), 100_000))) == 1


def test_actions_are_counted_in_any_minute() -> None:
    numbers = [30 * SECOND + number * 5 * SECOND for number in range(11)]
    assert len(list(too_many_actions(numbers, 10))) == 1
    assert list(too_many_actions(numbers, 11)) == []


@pytest.mark.parametrize(("slept", "found"), [(0, 1), (SECOND, 0), (DAY, 0), (DAY + 1, 1)])
def test_sleeps_between_turns_have_bounds_and_those_within_have_not(slept: int, found: int) -> None:
    recorded_event = fact("session_parked", 7, state="SLEEPING", wake_at=7 + slept)
    assert len(list(wrong_sleeps([fact("turn_started"), fact("turn_ended"), recorded_event], LIMITS))) == found
    assert list(wrong_sleeps([fact("turn_started"), recorded_event], LIMITS)) == []


@pytest.mark.parametrize(("charged", "found"), [(19, 1), (20, 0), (21, 1), (40, 1)])
def test_every_answer_is_charged_what_it_cost(charged: int, found: int) -> None:
    events = [
        fact("request_started", request="r"),
        fact("request_settled", request="r", outcome="ok", charge={"usd": charged}),
    ]
    assert len(list(wrong_charges(0.2, events, outside((0, 100))))) == found


@pytest.mark.parametrize(
    ("left", "found"),
    [
        (SessionRemains([fact("session_ended", terminal_reason="idle_timeout")], "COMPLETED", None, True, 0, 0), 0),
        (SessionRemains([], "COMPLETED", None, True, 0, 0), 1),
        (SessionRemains([], "SLEEPING", 20, False, 0, 0), 0),
        (SessionRemains([], "SLEEPING", 5, False, 0, 0), 1),
        (SessionRemains([], "RUNNING", None, False, 0, 0), 1),
    ],
)
def test_at_the_end_a_session_has_ended_for_a_reason_or_will_be_woken(left: SessionRemains, found: int) -> None:
    assert len(list(find_active(left, 10))) == found
