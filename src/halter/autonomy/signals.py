"""Signals: scores on the readings of one sensor, by an expression, a small model or a detector."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from halter.autonomy.detector import Detected, Unusable, number
from halter.brain.values import Missing, NotJson, checked, cut, one_line, path_value
from halter.core.clock import SECOND
from halter.core.errors import ModelError
from halter.core.expressions import Expression, Unanswered
from halter.core.pacing import Detector, Signal
from halter.core.sensing import Reading
from halter.core.text import clean, shorten

THRESHOLD: Final = 0.5
DETECTOR_THRESHOLD: Final = 4.0
SHORTEST_COOLDOWN: Final = SECOND
"""What fires is written down: no source, however fast, may fill a journal."""

_LONGEST_READING: Final = 200
_LONGEST_REASON: Final = 200


class Score(msgspec.Struct, frozen=True):
    """A score, and why."""

    score: float
    reason: str = ""


class Unscored(msgspec.Struct, frozen=True):
    """There is no score, and a sentence for whoever looks at the sensor's health."""

    sentence: str


Judge = Callable[[Signal, Any], Awaitable[Score | Unscored]]
"""Asks a signal's model about a value."""


class Scored(msgspec.Struct, frozen=True):
    """What a signal makes of a reading. It is `told` when it fires and has been quiet for long enough."""

    signal: Signal
    score: float | None = None
    fires: bool = False
    told: bool = False
    reason: str = ""


class Looked(msgspec.Struct, frozen=True):
    """What all signals make of a reading, whether it is written into its fields, and what could not be scored."""

    scored: tuple[Scored, ...]
    writes: bool
    sentences: tuple[str, ...] = ()


class Signals:
    """The signals of one sensor, with what they have learned and when they were last told."""

    def __init__(self, signals: Sequence[Signal], expressions: Mapping[str, Expression], judge: Judge) -> None:
        self._signals = tuple(signals)
        self._expressions = expressions
        self._judge = judge
        self._learned: dict[str, Detected] = {}
        self._told: dict[str, int] = {}

    async def look(self, reading: Reading, hot: Mapping[str, Any]) -> Looked:
        """Score a reading; `hot` is hot state's own values. What cannot be scored does not fire, and is said why."""
        read = checked(reading.value)
        if isinstance(read, NotJson):
            unscored = tuple(Scored(signal) for signal in self._signals)
            return Looked(unscored, writes=False, sentences=(f"The reading is no JSON: {read.reason}.",))
        scored: list[Scored] = []
        sentences: list[str] = []
        for signal in self._signals:
            score = await self._score(signal, read.value, hot, reading.at)
            if isinstance(score, Unscored):
                sentences.append(f"The signal `{signal.name}` has no score: {score.sentence}")
            scored.append(self._weighed(signal, score, reading.at))
        return Looked(tuple(scored), _writes(scored), tuple(sentences))

    async def _score(self, signal: Signal, value: Any, hot: Mapping[str, Any], now: int) -> Score | Unscored | None:
        """Score a value; None if it is not looked at."""
        if signal.detector is not UNSET:
            return self._detected(signal.name, signal.detector, value)
        if signal.expression is not UNSET:
            return self._worked_out(signal.name, value, hot)
        if self._is_quiet(signal, now) and not signal.filter:
            return None
        return await self._judged(signal, value)

    def _detected(self, name: str, detector: Detector, value: Any) -> Score | Unscored:
        found = path_value(value, detector.path)
        if isinstance(found, Missing):
            return Unscored(found.sentence)
        x = number(found.value)
        if isinstance(x, Unusable):
            return Unscored(f"{x.sentence}.")
        before = self._learned.get(name) or Detected(half_life=detector.half_life, warmup=detector.warmup)
        self._learned[name], score = before.learn(x)
        side = "above" if x >= before.mean else "below"
        return Score(score, f"{x:g} is {score:.1f} deviations {side} the usual {before.mean:.6g}")

    def _worked_out(self, name: str, value: Any, hot: Mapping[str, Any]) -> Score | Unscored:
        expression = self._expressions.get(name)
        if expression is None:
            return Unscored("its expression was not compiled.")
        match expression.value({"value": value, "hot": dict(hot)}):
            case Unanswered(sentence=sentence):
                return Unscored(sentence)
            case bool() as holds:
                return Score(float(holds), f"`{expression.text}` is {'true' if holds else 'false'}")
            case int() | float() as worth if math.isfinite(worth):
                return Score(float(worth), f"`{expression.text}` is {worth:g}")
            case _:
                return Unscored(f"`{expression.text}` is neither true nor false nor a number.")

    async def _judged(self, signal: Signal, value: Any) -> Score | Unscored:
        try:
            score = await self._judge(signal, value)
        except (ModelError, TimeoutError) as error:
            return Unscored(f"its model failed: {shorten(clean(str(error)), _LONGEST_REASON) or 'it took too long'}.")
        if isinstance(score, Score) and not math.isfinite(score.score):
            return Unscored("its model gave no finite number.")
        return score

    def _weighed(self, signal: Signal, score: Score | Unscored | None, now: int) -> Scored:
        if not isinstance(score, Score):
            return Scored(signal)
        fires = score.score >= threshold(signal)
        told = fires and not self._is_quiet(signal, now)
        if told:
            self._told[signal.name] = now
        return Scored(signal, score.score, fires, told, score.reason)

    def _is_quiet(self, signal: Signal, now: int) -> bool:
        """Tell whether a signal was told a short while ago. A clock that was set back makes nobody quiet."""
        told = self._told.get(signal.name)
        return told is not None and 0 <= now - told < max(signal.cooldown, SHORTEST_COOLDOWN)


def threshold(signal: Signal) -> float:
    """Tell from which score on a signal fires."""
    if signal.threshold is not UNSET:
        return signal.threshold
    return THRESHOLD if signal.detector is UNSET else DETECTOR_THRESHOLD


def _writes(scored: Sequence[Scored]) -> bool:
    filters = [each for each in scored if each.signal.filter]
    return not filters or any(each.fires for each in filters)


def sentence_of(sensor: str, scored: Scored, reading: Reading) -> str:
    """Say that a signal fired, for the agent's next turn. What the sensor read is quoted, and cut."""
    reason = f": {shorten(clean(scored.reason), _LONGEST_REASON)}" if scored.reason else ""
    score = "" if scored.score is None else f" with {scored.score:.4g}"
    return f"The signal `{scored.signal.name}` of the sensor `{sensor}` fired{score}{reason}. It read {_shown(reading)}"


def _shown(reading: Reading) -> str:
    read = checked(reading.value)
    return "no JSON" if isinstance(read, NotJson) else cut(one_line(read.value), _LONGEST_READING)
