"""The gate: the cheap check before a full turn. It can only say that a turn is not worth it; in doubt it is open."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.autonomy.differing import differences
from halter.autonomy.hotstate import FieldChange
from halter.brain.answers import LONGEST_DATA, Worth, answered, asks
from halter.core.expressions import Expression, Unanswered, plain
from halter.core.messages import Prompt, Reply
from halter.core.pacing import Gate
from halter.core.text import clean, shorten
from halter.core.vocabulary import GateStage

MOST_DIFFERENCES: Final = 40
"""So many differences a model is shown, of each field as many as of any other: no field can hide another."""
LONGEST_SIDE: Final = 500
"""So many characters it is shown of what was, and of what is."""

_LONGEST_REASON: Final = 300

_QUESTION: Final = (
    "An agent sleeps. You are shown what has changed in what it knows since it was last awake. Decide whether that is "
    "worth waking it. In doubt, wake it."
)


class Open(msgspec.Struct, frozen=True):
    """Take the turn. The sentence is not empty where the gate failed and was left open."""

    sentence: str = ""


class Skip(msgspec.Struct, frozen=True):
    """Sleep on, and what of the gate said so."""

    stage: GateStage
    sentence: str


class AskModel(msgspec.Struct, frozen=True):
    """Nothing speaks against the turn so far: the gate's model has the last word."""


def open_gate(
    gate: Gate | None,
    *,
    changed: Sequence[FieldChange],
    pending: bool,
    skips: int,
    expression: Expression | None,
    before: Mapping[str, Any] | None,
    hot: Mapping[str, Any],
) -> Open | Skip | AskModel:
    """Decide whether a turn is taken. `before` is what the last full turn saw, or None if there was none yet."""
    if gate is None or pending or before is None or 0 < gate.max_skips <= skips:
        return Open()
    if gate.on == "change" and not changed:
        return Skip("change", "Nothing has changed since the last turn.")
    if expression is not None:
        names = [change.name for change in changed]
        context = {"hot": plain(hot), "before": plain(before), "changed": names, "skips": skips}
        found = _weighed(expression, expression.value(context))
        if found is not None:
            return found
    return AskModel() if gate.model else Open()


def _weighed(expression: Expression, value: Any) -> Open | Skip | None:
    """Tell what an expression's value decides; None if it lets the turn pass."""
    match value:
        case True:
            return None
        case False:
            return Skip("expression", f"`{expression.text}` is false.")
        case Unanswered(sentence=sentence):
            return Open(f"The gate is left open: {sentence}")
        case _:
            return Open(f"The gate is left open: `{expression.text}` is neither true nor false.")


def gate_prompt(gate: Gate, changed: Sequence[FieldChange]) -> Prompt:
    """Ask the gate's model whether a turn is worth it. It is shown what differs, and nothing else."""
    each = max(1, MOST_DIFFERENCES // max(1, len(changed)))
    found = [list(differences(change.name, change.before, change.after)) for change in changed]
    shown = [difference for field in found for difference in field[:each]][:MOST_DIFFERENCES]
    side = min(LONGEST_SIDE, LONGEST_DATA // (4 * max(1, len(shown))))
    data = {"changed": [difference.shown(side) for difference in shown], "more": sum(map(len, found)) - len(shown)}
    return asks(f"{_QUESTION}\n\n{gate.prompt}", data, Worth)


def gate_answer(reply: Reply) -> Open | Skip:
    """Take a model's answer. Whatever is not a clear no opens the gate."""
    match answered(reply, Worth):
        case None:
            return Open("The gate is left open: its model gave no answer in the form that it was asked for.")
        case Worth(open=True):
            return Open()
        case Worth(reason=reason):
            return Skip("model", shorten(clean(reason), _LONGEST_REASON) or "The gate's model finds no turn worth it.")
