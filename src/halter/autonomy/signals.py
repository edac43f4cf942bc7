"""Signals: scores on the readings of one sensor, by an expression, a small model or a detector.

The detector learns a mean and a variance in which older readings count less and less; a score is the distance from the
mean in deviations.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from halter.core.agent_spec import Detector, Signal
from halter.core.clock import SECOND
from halter.core.errors import ModelError
from halter.core.text import EvaluationFailure, Expression, clean, describe_value, shorten
from halter.core.tools import Reading
from halter.loop.text_calls import MissingPath, NotJson, copy_json_value, cut_text, look_up_path, to_json_line

MAX_SCORE: Final = 1_000_000.0
"""Highest score: for a constant number, any step is far away."""

_LEARNED: Final = 3.0
"""Larger deviations are learned as this many."""
_LARGEST: Final = 1e150
"""Larger numbers are clamped, so that no square overflows."""
_FINEST: Final = 1e-9
"""Smallest deviation, relative to the mean or to 1."""


class UnusableSample(msgspec.Struct, frozen=True):
    """Not a finite number, with a sentence that says what it is."""

    sentence: str


class DetectorState(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned: mean, variance, number of readings; `strange` counts outliers in a row."""

    half_life: float = 20
    warmup: int = 20
    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0
    strange: int = 0

    @property
    def deviation(self) -> float:
        return max(math.sqrt(self.variance), _FINEST * max(1.0, abs(self.mean)))

    def observe(self, x: float) -> tuple["DetectorState", float]:
        """Scores a number by what was learned before, then learns from it; a non-finite one is skipped.

        An outlier barely moves the mean. As many in a row as a warm-up become the new normal.
        """
        if not math.isfinite(x):
            return self, 0.0
        x = min(max(x, -_LARGEST), _LARGEST)
        away = x - self.mean
        if self.seen < self.warmup:
            return self._with_sample(away, strange=0), 0.0
        score = min(abs(away) / self.deviation, MAX_SCORE)
        if score <= _LEARNED:
            return self._with_sample(away, strange=0), score
        if self.strange + 1 >= self.warmup:
            return DetectorState(half_life=self.half_life, warmup=self.warmup, seen=1, mean=x), score
        return self._with_sample(math.copysign(_LEARNED * self.deviation, away), strange=self.strange + 1), score

    def _with_sample(self, away: float, *, strange: int) -> "DetectorState":
        """Learns a number at this distance from the mean. The first ones count equally."""
        weight = max(1 - 0.5 ** (1 / self.half_life), 1 / (self.seen + 1))
        return msgspec.structs.replace(
            self,
            seen=self.seen + 1,
            mean=self.mean + weight * away,
            variance=(1 - weight) * (self.variance + weight * away * away),
            strange=strange,
        )


def parse_sample(value: Any) -> float | UnusableSample:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return UnusableSample(f"a detector takes a number, and this is {describe_value(value)}")
    try:
        found = float(value)
    except OverflowError:
        return UnusableSample("a detector takes a number of usual size, and this one is too large")
    return found if math.isfinite(found) else UnusableSample("a detector takes a finite number, and this one is not")


DEFAULT_THRESHOLD: Final = 0.5
DETECTOR_THRESHOLD: Final = 4.0
SHORTEST_COOLDOWN: Final = SECOND
"""Fired signals are journaled: a fast source must not fill the journal."""

_LONGEST_READING: Final = 200
_LONGEST_REASON: Final = 200


class Score(msgspec.Struct, frozen=True):
    score: float
    reason: str = ""


class ScoringFailure(msgspec.Struct, frozen=True):
    """No score, and a sentence for the sensor's health."""

    sentence: str


ScoreByModel = Callable[[Signal, Any], Awaitable[Score | ScoringFailure]]
"""Asks a signal's model to score a value."""


class ScoredSignal(msgspec.Struct, frozen=True):
    """A signal's score of a reading. It is `told` when it fires and its cooldown is over."""

    signal: Signal
    score: float | None = None
    fires: bool = False
    told: bool = False
    reason: str = ""


class SignalResults(msgspec.Struct, frozen=True):
    """All signals' scores of a reading, whether it is written into its fields, and what could not be scored."""

    scored: tuple[ScoredSignal, ...]
    writes: bool
    sentences: tuple[str, ...] = ()


class Signals:
    """The signals of one sensor, with what they learned and when they last fired."""

    def __init__(self, signals: Sequence[Signal], expressions: Mapping[str, Expression], judge: ScoreByModel) -> None:
        self._signals = tuple(signals)
        self._expressions = expressions
        self._judge = judge
        self._detectors: dict[str, DetectorState] = {}
        self._fired_at: dict[str, int] = {}

    async def score(self, reading: Reading, hot: Mapping[str, Any]) -> SignalResults:
        """Scores a reading; `hot` are the hot state's values. What cannot be scored does not fire."""
        read = copy_json_value(reading.value)
        if isinstance(read, NotJson):
            unscored = tuple(ScoredSignal(signal) for signal in self._signals)
            return SignalResults(unscored, writes=False, sentences=(f"The reading is no JSON: {read.reason}.",))
        scored: list[ScoredSignal] = []
        sentences: list[str] = []
        for signal in self._signals:
            score = await self._score(signal, read.value, hot, reading.at)
            if isinstance(score, ScoringFailure):
                sentences.append(f"The signal `{signal.name}` has no score: {score.sentence}")
            scored.append(self._apply_threshold(signal, score, reading.at))
        return SignalResults(tuple(scored), _is_written(scored), tuple(sentences))

    async def _score(
        self, signal: Signal, value: Any, hot: Mapping[str, Any], now: int
    ) -> Score | ScoringFailure | None:
        """Scores a value; None if the signal does not apply."""
        if signal.detector is not UNSET:
            return self._score_by_detector(signal.name, signal.detector, value)
        if signal.expression is not UNSET:
            return self._score_by_expression(signal.name, value, hot)
        if self._is_quiet(signal, now) and not signal.filter:
            return None
        return await self._score_by_model(signal, value)

    def _score_by_detector(self, name: str, detector: Detector, value: Any) -> Score | ScoringFailure:
        found = look_up_path(value, detector.path)
        if isinstance(found, MissingPath):
            return ScoringFailure(found.sentence)
        x = parse_sample(found.value)
        if isinstance(x, UnusableSample):
            return ScoringFailure(f"{x.sentence}.")
        before = self._detectors.get(name) or DetectorState(half_life=detector.half_life, warmup=detector.warmup)
        self._detectors[name], score = before.observe(x)
        side = "above" if x >= before.mean else "below"
        return Score(score, f"{x:g} is {score:.1f} deviations {side} the usual {before.mean:.6g}")

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

    async def _score_by_model(self, signal: Signal, value: Any) -> Score | ScoringFailure:
        try:
            score = await self._judge(signal, value)
        except (ModelError, TimeoutError) as error:
            return ScoringFailure(
                f"its model failed: {shorten(clean(str(error)), _LONGEST_REASON) or 'it took too long'}."
            )
        if isinstance(score, Score) and not math.isfinite(score.score):
            return ScoringFailure("its model gave no finite number.")
        return score

    def _apply_threshold(self, signal: Signal, score: Score | ScoringFailure | None, now: int) -> ScoredSignal:
        if not isinstance(score, Score):
            return ScoredSignal(signal)
        fires = score.score >= resolve_threshold(signal)
        told = fires and not self._is_quiet(signal, now)
        if told:
            self._fired_at[signal.name] = now
        return ScoredSignal(signal, score.score, fires, told, score.reason)

    def _is_quiet(self, signal: Signal, now: int) -> bool:
        """Whether a signal is in its cooldown. A clock that was set back does not extend it."""
        told = self._fired_at.get(signal.name)
        return told is not None and 0 <= now - told < max(signal.cooldown, SHORTEST_COOLDOWN)


def resolve_threshold(signal: Signal) -> float:
    if signal.threshold is not UNSET:
        return signal.threshold
    return DEFAULT_THRESHOLD if signal.detector is UNSET else DETECTOR_THRESHOLD


def _is_written(scored: Sequence[ScoredSignal]) -> bool:
    filters = [each for each in scored if each.signal.filter]
    return not filters or any(each.fires for each in filters)


def describe_signal(sensor: str, scored: ScoredSignal, reading: Reading) -> str:
    """Describes a fired signal for the agent's next turn, with the reading quoted and cut."""
    reason = f": {shorten(clean(scored.reason), _LONGEST_REASON)}" if scored.reason else ""
    score = "" if scored.score is None else f" with {scored.score:.4g}"
    return (
        f"The signal `{scored.signal.name}` of the sensor `{sensor}` fired{score}{reason}. It read "
        f"{_show_reading(reading)}"
    )


def _show_reading(reading: Reading) -> str:
    read = copy_json_value(reading.value)
    return "no JSON" if isinstance(read, NotJson) else cut_text(to_json_line(read.value), _LONGEST_READING)
