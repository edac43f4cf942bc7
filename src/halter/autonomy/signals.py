"""Signals: scores on the readings of one sensor, by an expression, a small model or a detector.

The detector learns a mean and a variance with exponentially decaying weights; a score is the distance from the mean in
deviations.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import ModelError
from halter.core.text import clean, describe_value, shorten
from halter.core.tools import Reading
from halter.expressions import EvaluationFailure, Expression
from halter.loop.text_calls import MissingPath, NotJson, copy_json_value, cut_text, find_path_value, to_json_line
from halter.spec.sensors import AnySignal, Detector, DetectorSignal, ExpressionSignal, ModelSignal

MAX_SCORE: Final = 1_000_000.0
"""Maximum score, for a step of a number that was constant before."""

_MAX_LEARNED_DISTANCE: Final = 3.0
"""A larger distance, in deviations, is learned as this distance."""
_MAX_NUMBER: Final = 1e150
"""Larger numbers are clamped, so that no square overflows."""
_MIN_RELATIVE_DEVIATION: Final = 1e-9
"""Smallest deviation, relative to the mean or to 1."""


class UnusableSample(msgspec.Struct, frozen=True):
    """The value is not a finite number; the sentence describes it."""

    sentence: str


class DetectorState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a detector: mean, variance, number of readings, and of consecutive outliers."""

    half_life: float = 20
    warmup: int = 20
    reading_count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    outlier_count: int = 0

    @property
    def deviation(self) -> float:
        return max(math.sqrt(self.variance), _MIN_RELATIVE_DEVIATION * max(1.0, abs(self.mean)))

    def observe(self, x: float) -> tuple["DetectorState", float]:
        """Score a number by the state before it, and learn it. A non-finite number is skipped.

        An outlier barely moves the mean. After `warmup` consecutive outliers the detector starts again from the last.
        """
        if not math.isfinite(x):
            return self, 0.0
        x = min(max(x, -_MAX_NUMBER), _MAX_NUMBER)
        distance = x - self.mean
        if self.reading_count < self.warmup:
            return self._with_sample(distance, outlier_count=0), 0.0
        score = min(abs(distance) / self.deviation, MAX_SCORE)
        if score <= _MAX_LEARNED_DISTANCE:
            return self._with_sample(distance, outlier_count=0), score
        if self.outlier_count + 1 >= self.warmup:
            return DetectorState(half_life=self.half_life, warmup=self.warmup, reading_count=1, mean=x), score
        return self._with_sample(
            math.copysign(_MAX_LEARNED_DISTANCE * self.deviation, distance), outlier_count=self.outlier_count + 1
        ), score

    def _with_sample(self, distance: float, *, outlier_count: int) -> "DetectorState":
        """Return the state with a number at this distance from the mean. The first numbers have equal weights."""
        weight = max(1 - 0.5 ** (1 / self.half_life), 1 / (self.reading_count + 1))
        return DetectorState(
            half_life=self.half_life,
            warmup=self.warmup,
            reading_count=self.reading_count + 1,
            mean=self.mean + weight * distance,
            variance=(1 - weight) * (self.variance + weight * distance * distance),
            outlier_count=outlier_count,
        )


def parse_sample(value: Any) -> float | UnusableSample:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return UnusableSample(f"a detector needs a number, not {describe_value(value)}")
    try:
        number = float(value)
    except OverflowError:
        return UnusableSample("a detector needs a finite number; this one is too large")
    return (
        number
        if math.isfinite(number)
        else UnusableSample("a detector needs a finite number; this one is infinite or NaN")
    )


MIN_COOLDOWN: Final = SECOND
"""Minimum cooldown: fired signals are journaled, and a fast source must not fill the journal."""

_MAX_READING_LENGTH: Final = 200
_MAX_REASON_LENGTH: Final = 200


class Score(msgspec.Struct, frozen=True):
    score: float
    reason: str = ""


class ScoringFailure(msgspec.Struct, frozen=True):
    """There is no score; the sentence is for the sensor's health."""

    sentence: str


ScoreByModel = Callable[[ModelSignal, Any], Awaitable[Score | ScoringFailure]]
"""Ask a signal's model to score a value."""


class ScoredSignal(msgspec.Struct, frozen=True):
    """A signal's score of a reading. `is_reported`: it fires outside its cooldown."""

    signal: AnySignal
    score: float | None = None
    fires: bool = False
    is_reported: bool = False
    reason: str = ""


class SignalResults(msgspec.Struct, frozen=True):
    """All signals' scores of a reading. `is_written`: the reading is written into its fields."""

    scored: tuple[ScoredSignal, ...]
    is_written: bool
    sentences: tuple[str, ...] = ()


class Signals:
    """The signals of one sensor, with their detectors and the times when they last fired."""

    def __init__(
        self, signals: Sequence[AnySignal], expressions: Mapping[str, Expression], judge: ScoreByModel
    ) -> None:
        self._signals = tuple(signals)
        self._expressions = expressions
        self._judge = judge
        self._detectors: dict[str, DetectorState] = {}
        self._fired_at: dict[str, int] = {}

    async def score(self, reading: Reading, hot: Mapping[str, Any]) -> SignalResults:
        """Score a reading; `hot` are the hot state's values. A signal without a score does not fire."""
        json_value = copy_json_value(reading.value)
        if isinstance(json_value, NotJson):
            signals_without_score = tuple(ScoredSignal(signal) for signal in self._signals)
            return SignalResults(
                signals_without_score, is_written=False, sentences=(f"The reading is not JSON: {json_value.reason}.",)
            )
        scored_signals: list[ScoredSignal] = []
        sentences: list[str] = []
        for signal in self._signals:
            score = await self._score(signal, json_value.value, hot, reading.at)
            if isinstance(score, ScoringFailure):
                sentences.append(f"The signal `{signal.name}` has no score: {score.sentence}")
            scored_signals.append(self._apply_threshold(signal, score, reading.at))
        return SignalResults(tuple(scored_signals), _is_written(scored_signals), tuple(sentences))

    async def _score(
        self, signal: AnySignal, value: Any, hot: Mapping[str, Any], now: int
    ) -> Score | ScoringFailure | None:
        """Score a value; None if the signal does not apply."""
        match signal:
            case DetectorSignal(detector=detector):
                return self._score_by_detector(signal.name, detector, value)
            case ExpressionSignal():
                return self._score_by_expression(signal.name, value, hot)
            case ModelSignal():
                is_needed = signal.filter or not self._is_quiet(signal, now)
                return await self._score_by_model(signal, value) if is_needed else None

    def _score_by_detector(self, name: str, detector: Detector, value: Any) -> Score | ScoringFailure:
        path_value = find_path_value(value, detector.path)
        if isinstance(path_value, MissingPath):
            return ScoringFailure(path_value.sentence)
        x = parse_sample(path_value.value)
        if isinstance(x, UnusableSample):
            return ScoringFailure(f"{x.sentence}.")
        old_state = self._detectors.get(name) or DetectorState(half_life=detector.half_life, warmup=detector.warmup)
        self._detectors[name], score = old_state.observe(x)
        side = "above" if x >= old_state.mean else "below"
        return Score(score, f"{x:g} is {score:.1f} deviations {side} the usual {old_state.mean:.6g}")

    def _score_by_expression(self, name: str, value: Any, hot: Mapping[str, Any]) -> Score | ScoringFailure:
        expression = self._expressions.get(name)
        if expression is None:
            return ScoringFailure("its expression was not compiled.")
        match expression.value({"value": value, "hot": dict(hot)}):
            case EvaluationFailure(sentence=sentence):
                return ScoringFailure(sentence)
            case bool() as holds:
                return Score(float(holds), f"`{expression.text}` is {'true' if holds else 'false'}")
            case int() | float() as worth if math.isfinite(worth):
                return Score(float(worth), f"`{expression.text}` is {worth:g}")
            case _:
                return ScoringFailure(f"`{expression.text}` is neither true nor false nor a number.")

    async def _score_by_model(self, signal: ModelSignal, value: Any) -> Score | ScoringFailure:
        try:
            score = await self._judge(signal, value)
        except (ModelError, TimeoutError) as error:
            return ScoringFailure(
                f"its model failed: {shorten(clean(str(error)), _MAX_REASON_LENGTH) or 'it took too long'}."
            )
        if isinstance(score, Score) and not math.isfinite(score.score):
            return ScoringFailure("its model returned no finite number.")
        return score

    def _apply_threshold(self, signal: AnySignal, score: Score | ScoringFailure | None, now: int) -> ScoredSignal:
        if not isinstance(score, Score):
            return ScoredSignal(signal)
        fires = score.score >= signal.fires_at
        is_due = fires and not self._is_quiet(signal, now)
        if is_due:
            self._fired_at[signal.name] = now
        return ScoredSignal(signal, score.score, fires, is_due, score.reason)

    def _is_quiet(self, signal: AnySignal, now: int) -> bool:
        """Return True if a signal is in its cooldown. A clock that was set back does not extend the cooldown."""
        fired_at = self._fired_at.get(signal.name)
        return fired_at is not None and 0 <= now - fired_at < max(signal.cooldown, MIN_COOLDOWN)


def _is_written(scored_signals: Sequence[ScoredSignal]) -> bool:
    filters = [each for each in scored_signals if each.signal.filter]
    return not filters or any(each.fires for each in filters)


def describe_signal(sensor: str, scored_signal: ScoredSignal, reading: Reading) -> str:
    """Describe a fired signal for the agent's next turn, with the reading quoted and cut."""
    reason = f": {shorten(clean(scored_signal.reason), _MAX_REASON_LENGTH)}" if scored_signal.reason else ""
    score = "" if scored_signal.score is None else f" with {scored_signal.score:.4g}"
    return (
        f"The signal `{scored_signal.signal.name}` of the sensor `{sensor}` fired{score}{reason}. It read "
        f"{_show_reading(reading)}"
    )


def _show_reading(reading: Reading) -> str:
    json_value = copy_json_value(reading.value)
    return (
        "no JSON" if isinstance(json_value, NotJson) else cut_text(to_json_line(json_value.value), _MAX_READING_LENGTH)
    )
