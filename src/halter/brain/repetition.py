"""Whether a turn goes round in circles: the same calls with the same results, again and again.

Each step that made calls is reduced to a fingerprint. Only the steps of one turn are compared, so that a person may ask
the same thing as often as they like, and what follows a chosen sleep is a look at the world and no loop. A result that
changes is something new, too.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from halter.core.messages import ToolCall, ToolResult
from halter.core.text import to_body

_SORTED: Final = msgspec.json.Encoder(order="sorted")

LONGEST_PERIOD: Final = 5
"""Cycles of more steps than this are not looked for: so much is rarely repeated by mistake."""


class Loop(msgspec.Struct, frozen=True):
    """The last `length` steps of a turn repeat themselves after every `period` of them."""

    period: int
    length: int

    @property
    def sentence(self) -> str:
        """Say what was seen, for the model and for the person who reads why a turn ended."""
        if self.period == 1:
            return f"The last {self.length} steps made the same calls and got the same results."
        return (
            f"The last {self.length} steps went round in a circle of {self.period} steps, "
            "with the same calls and the same results."
        )


def fingerprint(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> str:
    """Reduce a step to what it did and what came of it, in whatever order.

    The ids of calls only tell which result belongs to which call. Every call counts with its whole arguments.
    """
    given: dict[str, list[bytes]] = {}
    for result in results:
        given.setdefault(result.id, []).append(_joined((result.outcome.encode(), to_body(result.text))))
    return hashlib.sha256(_joined(sorted([_call(call, given.get(call.id, ())) for call in calls]))).hexdigest()


def stuck(steps: Sequence[str], max_repeated: int) -> Loop | None:
    """Tell whether the newest steps of a turn are a loop; 0 allows any.

    A single step may come `max_repeated` times in a row. A cycle has to come twice, and no sooner than a single step
    would have been noticed. Only the end of the list is looked at.
    """
    if max_repeated <= 0 or not steps or steps[-1] not in steps[-1 - LONGEST_PERIOD : -1]:
        return None
    for period in range(1, LONGEST_PERIOD + 1):
        repeated = max_repeated if period == 1 else max(period, max_repeated - 1)
        if _repeats(steps, period, repeated):
            return Loop(period, period + repeated)
    return None


def _repeats(steps: Sequence[str], period: int, repeated: int) -> bool:
    """Tell whether each of the last steps equals the one that came a period before it."""
    end = len(steps)
    if end < period + repeated:
        return False
    return all(steps[place] == steps[place - period] for place in range(end - 1, end - 1 - repeated, -1))


def _call(call: ToolCall, results: Iterable[bytes]) -> bytes:
    return _joined((to_body(call.tool), _canonical(call.arguments), *sorted(results)))


def _canonical(arguments: str) -> bytes:
    """Write arguments in the one way that equal ones have in common; what is no JSON stands for itself."""
    body = to_body(arguments)
    try:
        return b"json " + _SORTED.encode(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        return b"text " + body


def _joined(fields: Iterable[bytes]) -> bytes:
    """Join fields so that no two lists of them look the same."""
    return b"".join([b"%d:%b" % (len(field), field) for field in fields])
