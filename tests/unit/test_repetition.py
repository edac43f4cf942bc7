"""A turn that goes round in circles is noticed, and nothing else is."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halter.core.messages import ToolCall, ToolResult
from halter.loop.repetition import (
    MAX_FINGERPRINT_LENGTH,
    MAX_PERIOD,
    RepeatedSteps,
    StepPrint,
    find_repetition,
    fingerprint_step,
)


def call(arguments: str = "{}", tool: str = "read", name: str = "c") -> ToolCall:
    return ToolCall(name, tool, arguments)


def result(text: str = "same", name: str = "c", outcome: str = "ok") -> ToolResult:
    return ToolResult(name, "read", outcome, text)  # pyright: ignore[reportArgumentType]


def first_stuck(steps: str, most: int = 3) -> int | None:
    """Tell after how many steps a turn is found to be stuck."""
    return next((length for length in range(len(steps) + 1) if find_repetition(steps[:length], most)), None)


@pytest.mark.parametrize(
    ("steps", "most", "expected"),
    [
        ("AA", 3, None),
        ("AAAAA", 3, 3),
        ("AA", 2, 2),
        ("A", 1, None),
        ("AA", 1, 2),
        ("ABAB", 3, 4),
        ("XYABAB", 3, 6),
        ("ABABA", 4, 5),
        ("ABCABC", 3, 6),
        ("AABAAB", 3, 6),
        ("ABCDEABCDE", 3, 10),
        ("ABCDEFABCDEFABCDEF", 3, None),
        ("AABAAC", 3, None),
        ("ABACADAE", 3, None),
        ("AAAAAAAAA", 10, None),
        ("AAAAAAAAAAA", 10, 10),
        ("ABABABABABABAB", 0, None),
        ("AAAAAAAA", 0, None),
        ("", 3, None),
    ],
)
def test_a_loop_is_found_with_the_step_that_completes_it(steps: str, most: int, expected: int | None) -> None:
    assert first_stuck(steps, most) == expected


def test_a_loop_is_described_in_a_sentence() -> None:
    assert find_repetition("AAA", 3) == RepeatedSteps(1, 3)
    assert find_repetition("XABAB", 3) == RepeatedSteps(2, 4)
    assert RepeatedSteps(1, 3).sentence == "The last 3 steps made the same calls and got the same results."
    assert "a cycle of 2 steps" in RepeatedSteps(2, 4).sentence


def test_a_result_that_changes_is_polling_and_no_loop() -> None:
    steps = [fingerprint_step([call()], [result(f"{percent} %")]) for percent in (10, 10, 20, 20, 30)]
    assert find_repetition(steps, 3) is None


def test_writes_with_a_long_common_prefix_are_not_the_same() -> None:
    prefix = "x" * 100_000
    steps = [fingerprint_step([call(f'{{"text":"{prefix}{number}"}}')], [result()]) for number in range(4)]
    assert len(set(steps)) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([call()], [result()]), ([call(tool="write")], [result()])),
        (([call()], [result()]), ([call()], [result("other")])),
        (([call()], [result()]), ([call()], [result(outcome="error")])),
        (([call()], [result()]), ([call(), call(name="d")], [result(), result(name="d")])),
        (([call("{")], [result()]), ([call("{ ")], [result()])),
        (([call('"{"')], [result()]), ([call("{")], [result()])),
        (
            ([call('{"a":100000000000000000001}')], [result()]),
            ([call('{"a":100000000000000000002}')], [result()]),
        ),
        (
            ([call("1"), call("2", name="d")], [result("x"), result("y", "d")]),
            ([call("1"), call("2", name="d")], [result("y"), result("x", "d")]),
        ),
    ],
)
def test_whatever_differs_counts(
    one: tuple[list[ToolCall], list[ToolResult]], other: tuple[list[ToolCall], list[ToolResult]]
) -> None:
    assert fingerprint_step(*one) != fingerprint_step(*other)


def test_ids_order_and_the_way_that_json_is_written_do_not_count() -> None:
    step_print = fingerprint_step(
        [call('{"a": 1, "b": [2]}', name="x"), call('{"c":3}', name="y")], [result("X", "x"), result("Y", "y")]
    )
    other = fingerprint_step(
        [call('{"c": 3}', name="1"), call('{"b":[2],"a":1}', name="2")], [result("Y", "1"), result("X", "2")]
    )
    assert step_print == other


def test_a_fingerprint_keeps_no_long_text_and_yet_counts_all_of_it() -> None:
    long = "x" * 100_000
    prints = [
        fingerprint_step([call(f'"{written}"')], [result(said)])
        for written in (long, f"{long}y", "")
        for said in (long, f"{long}y", "")
    ]
    assert len(set(prints)) == len(prints)
    assert all(len(text) < 2 * MAX_FINGERPRINT_LENGTH for each in prints for text in each)
    hashed = prints[0][-1]
    assert fingerprint_step([call(f'"{long}"')], [result(hashed)]) not in prints


calls_with_results = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=20), st.text(max_size=5)), max_size=6)


@settings(deadline=None)
@given(calls_with_results, st.randoms(use_true_random=False))
def test_any_step_has_one_fingerprint_however_it_is_ordered(
    drawn: list[tuple[str, str, str]], chance: random.Random
) -> None:
    def fingerprint() -> StepPrint:
        calls = [ToolCall(str(place), tool, arguments) for place, (tool, arguments, _) in enumerate(drawn)]
        return fingerprint_step(calls, [ToolResult(each.id, each.tool, "ok", drawn[int(each.id)][2]) for each in calls])

    expected = fingerprint()
    chance.shuffle(drawn)
    assert fingerprint() == expected


@pytest.mark.parametrize("arguments", ["[" * 100_000, "\x00", '"\ud800"', "\ud800", "1e999", "9" * 10_000, ""])
def test_no_arguments_are_too_strange(arguments: str) -> None:
    same = fingerprint_step([call(arguments, name="d")], [result(name="d")])
    assert fingerprint_step([call(arguments)], [result()]) == same


def naively(steps: Sequence[str], most: int) -> bool:
    """Say it from the rule alone: the newest steps are some cycle, written down often enough."""
    for period in range(1, MAX_PERIOD + 1):
        length = period + max(period, most - 1)
        tail = list(steps[-length:])
        if len(tail) == length and tail == (tail[:period] * length)[:length]:
            return True
    return False


@settings(deadline=None)
@given(st.text("ABC", max_size=16), st.integers(1, 6))
def test_loops_are_found_as_the_rule_says(steps: str, most: int) -> None:
    assert (find_repetition(steps, most) is not None) == naively(steps, most)


class Counted(Sequence[str]):
    """Steps that count how often somebody looks at them."""

    def __init__(self, steps: str) -> None:
        self.steps = steps
        self.looked = 0

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.looked += 1
        return self.steps[place]


def test_only_the_end_of_a_long_turn_is_looked_at() -> None:
    steps = Counted("AB" * 50_000 + "ABCDEF" * 3)
    assert find_repetition(steps, 3) is None
    assert steps.looked <= 2 * MAX_PERIOD * MAX_PERIOD
