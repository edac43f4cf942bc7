"""Repetition within a turn, from a fingerprint of each step.

A person may ask the same thing again, a changed result is progress, and a turn after a chosen sleep is polling.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, Final

import msgspec

from halter.core.messages import ToolCall, ToolResult
from halter.core.text import encode_body

_CANONICAL_ENCODER: Final = msgspec.json.Encoder(order="sorted")
_DECODER: Final = msgspec.json.Decoder[Any]()
MAX_PERIOD: Final = 5
"""Longest cycle that is detected, in steps. Models rarely repeat longer ones by mistake."""


class RepeatedSteps(msgspec.Struct, frozen=True):
    """The last `length` steps of a turn repeat with this `period`."""

    period: int
    length: int

    @property
    def sentence(self) -> str:
        if self.length == 1:
            return "The last step made the same calls."
        if self.period == 1:
            return f"The last {self.length} steps made the same calls and got the same results."
        return (
            f"The last {self.length} steps repeated a cycle of {self.period} steps, "
            "with the same calls and the same results."
        )


StepPrint = tuple[str, ...]
"""The arguments, tool, outcome and result of each call of a step, in one flat tuple."""
MAX_FINGERPRINT_LENGTH: Final = 1000
"""Longest text in a fingerprint, in characters. A longer one is hashed, to keep no tool output in memory."""


def fingerprint_step(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> StepPrint:
    """Make the fingerprint of a step's calls and results, independent of their order, call ids and JSON formatting."""
    fingerprints: list[StepPrint] = []
    for index, call in enumerate(calls):
        result = results[index]
        arguments, text = _canonical(call.arguments), result.text
        if len(arguments) + len(text) > MAX_FINGERPRINT_LENGTH:
            arguments, text = _shorten_print(arguments), _shorten_print(text)
        fingerprints.append((arguments, call.tool, result.outcome, text))
    return fingerprints[0] if len(fingerprints) == 1 else tuple(chain.from_iterable(sorted(fingerprints)))


def is_step_of(calls: Sequence[ToolCall], fingerprint: StepPrint) -> bool:
    """Return whether calls are those of a fingerprint, whatever their results."""
    call_prints = sorted((_shorten_print(_canonical(call.arguments)), call.tool) for call in calls)
    return call_prints == list(zip(fingerprint[::4], fingerprint[1::4], strict=True))


def find_repetition(steps: Sequence[StepPrint | str], max_repeats: int) -> RepeatedSteps | None:
    """Find a repetition in the newest steps of a turn. A `max_repeats` of 0 disables the check.

    A single step is reported when it has occurred `max_repeats` times in a row. A cycle of several steps is reported
    after two rounds, but not before as many steps as for a single one.
    """
    for period in range(1, MAX_PERIOD + 1) if max_repeats > 0 else ():
        repeat_count = max(period, max_repeats - 1)
        if _repeats(steps, period, repeat_count):
            return RepeatedSteps(period, period + repeat_count)
    return None


def _repeats(steps: Sequence[StepPrint | str], period: int, repeat_count: int) -> bool:
    end = len(steps)
    if end < period + repeat_count:
        return False
    return all(steps[index] == steps[index - period] for index in range(end - 1, end - 1 - repeat_count, -1))


def _shorten_print(text: str) -> str:
    """Replace a long text by its beginning and hash. The result is longer than any unhashed text: no collision."""
    return (
        text
        if len(text) <= MAX_FINGERPRINT_LENGTH
        else text[:MAX_FINGERPRINT_LENGTH] + sha256(encode_body(text)).hexdigest()
    )


def _canonical(arguments: str) -> str:
    """Normalise JSON arguments; mark invalid ones with a prefix."""
    try:
        return _CANONICAL_ENCODER.encode(_DECODER.decode(arguments)).decode()
    except (ValueError, RecursionError):
        return f"not JSON: {arguments}"
