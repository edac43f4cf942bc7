"""The detector of unusual numbers: quiet on noise, quick on a step, and never upset."""

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.autonomy.signals import MAX_SCORE, DetectorState, UnusableSample, parse_sample

SEEDS = range(8)


def learn(numbers: Iterable[float], detected: DetectorState | None = None) -> tuple[DetectorState, list[float]]:
    detected, scores = detected or DetectorState(), []
    for x in numbers:
        detected, score = detected.observe(x)
        scores.append(score)
    return detected, scores


def noise(seed: int, count: int = 10_000) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(100, 5) for _ in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_hardly_ever_alarms(seed: int) -> None:
    _, scores = learn(noise(seed))
    assert sum(score >= 4 for score in scores) < 10
    assert sum(score >= 5 for score in scores) <= 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step", [-40, 40])
def test_a_step_of_eight_deviations_is_found_at_once(seed: int, step: float) -> None:
    detected, _ = learn(noise(seed, 500))
    assert detected.observe(100 + step)[1] >= 5


def test_nothing_alarms_while_it_warms_up() -> None:
    _, scores = learn([0.0] * 10 + [1e9] * 10)
    assert scores == [0.0] * 20


def test_a_number_that_never_moved_and_jumps_scores_high_and_finite() -> None:
    detected, scores = learn([42.0] * 1000)
    assert max(scores) == 0
    assert 1000 < detected.observe(43.0)[1] <= MAX_SCORE
    assert detected.observe(math.nextafter(42, 43))[1] < 1


def test_an_outlier_barely_moves_what_is_usual() -> None:
    before, _ = learn(noise(1, 500))
    after, score = before.observe(1e12)
    assert score == MAX_SCORE
    assert abs(after.mean - before.mean) < 0.2 * before.deviation
    assert after.deviation < 1.2 * before.deviation
    assert after.observe(140)[1] >= 5


def test_what_stays_becomes_the_new_usual() -> None:
    detected, _ = learn([42.0] * 100)
    detected, scores = learn([1000.0] * 100, detected)
    assert all(score >= 4 for score in scores[:20])
    assert max(scores[20:]) == 0
    assert detected.mean == pytest.approx(1000)
    assert detected.observe(42.0)[1] >= 4


def test_a_slow_drift_is_followed_without_an_alarm() -> None:
    chance = random.Random(3)
    _, scores = learn(step * 0.05 + chance.gauss(0, 5) for step in range(5000))
    assert sum(score >= 5 for score in scores) == 0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_passed_over(odd: float) -> None:
    detected, _ = learn(noise(1, 50))
    assert detected.observe(odd) == (detected, 0.0)


@pytest.mark.parametrize("value", [None, True, "5", [], {}, math.nan, math.inf, 10**400, -(10**400)])
def test_what_is_not_a_number_is_described_in_a_sentence(value: Any) -> None:
    answer = parse_sample(value)
    assert isinstance(answer, UnusableSample)
    assert answer.sentence.startswith("a detector needs a")


@given(
    st.lists(st.floats() | st.sampled_from([1e308, -1e308, 5e-324, 0.0, 1e150, -1e150]), max_size=80),
    st.floats(1, 1e308),
    st.integers(2, 40),
)
def test_no_series_upsets_it(numbers: list[float], half_life: float, warmup: int) -> None:
    detected, scores = learn(numbers, DetectorState(half_life=half_life, warmup=warmup))
    assert all(0 <= score <= MAX_SCORE for score in scores)
    assert math.isfinite(detected.mean)
    assert math.isfinite(detected.variance)
    assert detected.variance >= 0
