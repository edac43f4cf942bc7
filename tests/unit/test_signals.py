"""Signals: which readings fire, are told and are written."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from halter.autonomy.signals import (
    Score,
    ScoredSignal,
    ScoringFailure,
    SignalResults,
    Signals,
    describe_signal,
)
from halter.core.clock import MINUTE, SECOND
from halter.core.errors import LeaseLost, ModelUnavailable
from halter.core.tools import Reading
from halter.expressions import compile_expression
from halter.spec.sensors import AnySignal, Detector, DetectorSignal, ExpressionSignal, ModelSignal

KNOWS: Mapping[str, Any] = {"value": {}, "hot": {}}
NOW = 1_000 * MINUTE


class Panel:
    """A judge who says what it is told to say, and remembers what it was asked."""

    def __init__(self, answer: Callable[[Any], Score | ScoringFailure] = lambda _: Score(1.0, "odd")) -> None:
        self.says = answer
        self.asked: list[Any] = []

    async def judge(self, signal: ModelSignal, value: Any) -> Score | ScoringFailure:
        self.asked.append(value)
        return self.says(value)


def signals(*configured: AnySignal, panel: Panel | None = None) -> Signals:
    expressions = {
        each.name: compile_expression(each.expression, KNOWS, "agent.yaml")
        for each in configured
        if isinstance(each, ExpressionSignal)
    }
    return Signals(configured, expressions, (panel or Panel()).judge)


async def score_reading(
    watched: Signals, value: Any, after: int = 0, hot: Mapping[str, Any] | None = None
) -> SignalResults:
    return await watched.score(Reading(value, NOW + after), hot or {})


async def score_one(watched: Signals, value: Any, after: int = 0, hot: Mapping[str, Any] | None = None) -> ScoredSignal:
    (scored,) = (await score_reading(watched, value, after, hot)).scored
    return scored


@pytest.mark.parametrize(
    ("expression", "value", "score", "fires"),
    [
        ("value > 5", 6, 1.0, True),
        ("value > 5", 5, 0.0, False),
        ("value.price", {"price": 0.5}, 0.5, True),
        ("value.price", {"price": 0.49}, 0.49, False),
        ("value", 3, 3.0, True),
        ("value", -3, -3.0, False),
        ("value > hot.limit", 11, 1.0, True),
        ("value.exists(v, v == 'down')", ["up", "down"], 1.0, True),
    ],
)
async def test_an_expression_scores_a_reading(expression: str, value: Any, score: float, *, fires: bool) -> None:
    scored = await score_one(signals(ExpressionSignal(name="s", expression=expression)), value, hot={"limit": 10})
    assert (scored.score, scored.fires, scored.is_reported) == (score, fires, fires)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("value.price > 5", {}),
        ("value > 5", "text"),
        ("value", "text"),
        ("value", None),
        ("value", [1]),
        ("value * 10.0", 1e308),
        ("hot.missing > 1", 5),
        ("value / 0", 5),
    ],
)
async def test_an_expression_without_an_answer_scores_nothing_and_says_why(expression: str, value: Any) -> None:
    signal_results = await score_reading(signals(ExpressionSignal(name="s", expression=expression)), value)
    (scored,) = signal_results.scored
    assert (scored.score, scored.fires, scored.is_reported) == (None, False, False)
    assert signal_results.is_written
    (sentence,) = signal_results.sentences
    assert sentence.startswith("The signal `s` has no score: `")


@pytest.mark.parametrize("value", [math.nan, {"a": math.inf}, {1: 2}, object()])
async def test_a_reading_that_is_no_json_scores_nothing(value: Any) -> None:
    signal_results = await score_reading(
        signals(ExpressionSignal(name="s", expression="true"), ModelSignal(name="m", model="a:b", prompt="Look.")),
        value,
    )
    assert [each.fires for each in signal_results.scored] == [False, False]
    assert not signal_results.is_written
    assert signal_results.sentences[0].startswith("The reading is not JSON")


@pytest.mark.parametrize(
    ("signal", "most"),
    [
        (ExpressionSignal(name="s", expression="value"), 0.5),
        (ModelSignal(name="s", model="a:b", prompt="Look."), 0.5),
        (DetectorSignal(name="s", detector=Detector()), 4),
        (DetectorSignal(name="s", detector=Detector(), threshold=6), 6),
        (ModelSignal(name="s", model="a:b", prompt="Look.", threshold=0.0), 0),
    ],
)
def test_a_signal_fires_from_its_threshold_on(signal: AnySignal, most: float) -> None:
    assert signal.fires_at == most


async def test_a_signal_is_reported_once_in_its_cooldown() -> None:
    watched = signals(ExpressionSignal(name="s", expression="value > 5", cooldown=MINUTE))
    results = [(await score_one(watched, 6, after * SECOND)).is_reported for after in (0, 1, 59, 60, 61, 119, 120)]
    assert results == [True, False, False, True, False, False, True]


async def test_a_signal_fires_in_its_cooldown_without_being_reported() -> None:
    watched = signals(ExpressionSignal(name="s", expression="value > 5"))
    await score_one(watched, 6)
    scored = await score_one(watched, 6, SECOND)
    assert (scored.fires, scored.is_reported) == (True, False)


async def test_however_short_its_cooldown_a_signal_is_reported_at_most_once_a_second() -> None:
    watched = signals(ExpressionSignal(name="s", expression="true", cooldown=0))
    results = [(await score_one(watched, 6, at * SECOND // 2)).is_reported for at in range(5)]
    assert results == [True, False, True, False, True]


async def test_a_clock_that_was_set_back_silences_nobody() -> None:
    watched = signals(ExpressionSignal(name="s", expression="true"))
    assert (await score_one(watched, 6)).is_reported
    assert (await score_one(watched, 6, -60 * MINUTE)).is_reported


@pytest.mark.parametrize(
    ("configured", "value", "writes"),
    [
        ((), 1, True),
        ((ExpressionSignal(name="a", expression="value > 5"),), 1, True),
        ((ExpressionSignal(name="a", expression="value > 5", filter=True),), 1, False),
        ((ExpressionSignal(name="a", expression="value > 5", filter=True),), 6, True),
        (
            (
                ExpressionSignal(name="a", expression="value > 5", filter=True),
                ExpressionSignal(name="b", expression="true"),
            ),
            1,
            False,
        ),
        (
            (
                ExpressionSignal(name="a", expression="value > 5", filter=True),
                ExpressionSignal(name="b", expression="value < 2", filter=True),
            ),
            1,
            True,
        ),
        ((ExpressionSignal(name="a", expression="value.x > 5", filter=True),), 1, False),
    ],
)
async def test_a_filter_lets_through_only_what_fires(
    configured: tuple[AnySignal, ...], value: Any, *, writes: bool
) -> None:
    assert (await score_reading(signals(*configured), value)).is_written == writes


async def test_a_filter_in_its_cooldown_still_lets_through_what_fires() -> None:
    panel = Panel()
    watched = signals(ModelSignal(name="m", model="a:b", prompt="Look.", filter=True), panel=panel)
    assert [(await score_reading(watched, value, value)).is_written for value in range(3)] == [True, True, True]
    assert panel.asked == [0, 1, 2]


async def test_a_model_is_not_paid_for_while_its_cooldown_runs() -> None:
    panel = Panel()
    watched = signals(ModelSignal(name="m", model="a:b", prompt="Look.", cooldown=MINUTE), panel=panel)
    results = [(await score_one(watched, after, after * SECOND)).is_reported for after in (0, 1, 30, 59, 60)]
    assert results == [True, False, False, False, True]
    assert panel.asked == [0, 60]


async def test_a_model_that_found_nothing_is_asked_again() -> None:
    panel = Panel(lambda value: Score(0.1 * value, "so"))
    watched = signals(ModelSignal(name="m", model="a:b", prompt="Look.", threshold=0.2), panel=panel)
    assert [(await score_one(watched, value)).fires for value in range(3)] == [False, False, True]


def fails(_: Any) -> Score | ScoringFailure:
    raise ModelUnavailable("Overloaded: try later")


def takes_too_long(_: Any) -> Score | ScoringFailure:
    raise TimeoutError


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda _: ScoringFailure("it gave no form."), "it gave no form."),
        (lambda _: Score(math.nan), "its model returned no finite number."),
        (lambda _: Score(math.inf), "its model returned no finite number."),
        (fails, "its model failed: Overloaded: try later."),
        (takes_too_long, "its model failed: it took too long."),
    ],
)
async def test_a_judge_that_fails_gives_no_score(
    answer: Callable[[Any], Score | ScoringFailure], sentence: str
) -> None:
    signal_results = await score_reading(
        signals(ModelSignal(name="m", model="a:b", prompt="Look."), panel=Panel(answer)), 1
    )
    assert signal_results.sentences == (f"The signal `m` has no score: {sentence}",)
    assert signal_results.scored == (ScoredSignal(ModelSignal(name="m", model="a:b", prompt="Look.")),)


async def test_a_lost_lease_is_raised_to_the_caller() -> None:
    def lost(_: Any) -> Score | ScoringFailure:
        raise LeaseLost("Somebody else owns it.")

    with pytest.raises(LeaseLost):
        await score_reading(signals(ModelSignal(name="m", model="a:b", prompt="Look."), panel=Panel(lost)), 1)


async def test_a_detector_learns_what_is_usual_and_reports_what_is_not() -> None:
    watched = signals(DetectorSignal(name="d", detector=Detector(path="load[0]", warmup=5)))
    for value in (1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0):
        assert not (await score_one(watched, {"load": [value]})).fires
    scored = await score_one(watched, {"load": [50]})
    assert scored.is_reported
    assert scored.reason.startswith("50 is ")
    assert scored.reason.endswith("deviations above the usual 1")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({}, "There is no `load` at `load`."),
        ({"load": "high"}, "a detector needs a number, not the text 'high'."),
        ({"load": True}, "a detector needs a number, not true."),
    ],
)
async def test_a_detector_passes_over_what_is_no_number(value: Any, sentence: str) -> None:
    watched = signals(DetectorSignal(name="d", detector=Detector(path="load", warmup=2)))
    signal_results = await score_reading(watched, value)
    assert signal_results.sentences == (f"The signal `d` has no score: {sentence}",)
    assert signal_results.scored[0].score is None


async def test_each_detector_learns_for_itself() -> None:
    first = DetectorSignal(name="a", detector=Detector(path="a", warmup=2))
    second = DetectorSignal(name="b", detector=Detector(path="b", warmup=2))
    watched = signals(first, second)
    for value in (1, 2, 1, 2):
        await score_reading(watched, {"a": value, "b": value * 1000})
    signal_results = await score_reading(watched, {"a": 1000, "b": 1000})
    assert [each.fires for each in signal_results.scored] == [True, False]


@pytest.mark.parametrize(
    ("scored", "value", "sentence"),
    [
        (
            ScoredSignal(ExpressionSignal(name="odd", expression="true"), 0.91234567, fires=True, reason="it fell"),
            {"price": 5},
            'The signal `odd` of the sensor `prices` fired with 0.9123: it fell. It read {"price":5}',
        ),
        (
            ScoredSignal(ExpressionSignal(name="odd", expression="true")),
            "a\nb",
            'The signal `odd` of the sensor `prices` fired. It read "a\\nb"',
        ),
        (
            ScoredSignal(ExpressionSignal(name="odd", expression="true")),
            math.nan,
            "The signal `odd` of the sensor `prices` fired. It read no JSON",
        ),
    ],
)
def test_a_signal_is_reported_in_a_sentence(scored: ScoredSignal, value: Any, sentence: str) -> None:
    assert describe_signal("prices", scored, Reading(value, NOW)) == sentence


def test_a_sentence_stays_short_whatever_was_read() -> None:
    scored = ScoredSignal(ExpressionSignal(name="odd", expression="true"), 1.0, reason="r" * 10_000)
    assert len(describe_signal("prices", scored, Reading("x" * 1_000_000, NOW))) < 600
