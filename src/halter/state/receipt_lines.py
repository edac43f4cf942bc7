"""The lines of a receipt: one for each call, request, refusal, decision, turn and thing that was heard."""

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from halter.core.money import NOTHING, Amount, Unit, Usd
from halter.core.usage import Usage
from halter.core.vocabulary import Cause, Origin, Outcome, Purpose

BrakeName = Literal["halt", "grants", "budget"]
BRAKES: Final[tuple[BrakeName, ...]] = ("halt", "grants", "budget")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call or request: what was held for it and what it cost. Without an outcome it is in doubt.

    `observed` are the refusals that were only written down. `egress` says that its arguments chose where data goes.
    `anonymized` counts, by kind, the values that its model was not told.
    """

    id: str
    name: str
    purpose: Purpose
    started_at: int
    held_usd: Usd = NOTHING
    cost_usd: Usd = NOTHING
    outcome: Outcome | None = None
    settled_at: int | None = None
    usage: Usage | None = None
    level: str = ""
    risk: str = ""
    effect: str = ""
    egress: bool = False
    phase: str = ""
    parallel_group: str = ""
    observed: tuple[Outcome, ...] = ()
    decision: str = ""
    decided_by: str = ""
    duration_ms: int = 0
    error: str = ""
    anonymized: Mapping[str, int] = {}


class Brake(msgspec.Struct, frozen=True):
    """One time that a brake refused something, and what was said of it."""

    code: str
    at: int
    refused: str
    name: str
    scope: str
    window: str
    brake: BrakeName = "budget"
    sentence: str = ""
    level: str = ""
    risk: str = ""
    phase: str = ""
    decision: str = ""
    decided_by: str = ""


class Decision(msgspec.Struct, frozen=True):
    """Something that a person was asked, what they answered, and whether the answer was used."""

    decision: str
    about: str
    name: str
    subject: str
    asked_at: int
    verdict: str = ""
    by: str = ""
    decided_at: int | None = None
    reason: str = ""
    used: bool = False


class TurnLine(msgspec.Struct, frozen=True):
    """One turn: how many answers of a model it took, and why it ended; without a reason it has not ended."""

    turn: int
    started_at: int
    ended_at: int | None = None
    steps: int = 0
    why: str = ""
    sentence: str = ""


class Heard(msgspec.Struct, frozen=True):
    """Something that reached the session from outside: where it came from, and whether it is trusted."""

    cause: Cause
    origin: Origin
    sender: str
    at: int
    trusted: bool = False


class ModelLine(msgspec.Struct, frozen=True):
    """All requests to one model together. `input_tokens` includes those that were read from or written to a cache."""

    model: str
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    held_usd: Usd = NOTHING
    cost_usd: Usd = NOTHING


class OverrunLine(msgspec.Struct, frozen=True):
    """By how much something passed a cap, in the unit of that cap."""

    hold: str
    scope: str
    window: str
    unit: Unit
    amount: Amount


class ChildLine(msgspec.Struct, frozen=True):
    """A sub-session that told this one of its end."""

    session: str
    ended_at: int


def by_model(requests: Iterable[Line]) -> tuple[ModelLine, ...]:
    """Add up what each model was asked, in the order in which they were first asked. Money was priced per request."""
    models: dict[str, ModelLine] = {}
    for line in requests:
        models[line.name] = _added(models.get(line.name, ModelLine(line.name)), line)
    return tuple(models.values())


def _added(model: ModelLine, line: Line) -> ModelLine:
    usage = line.usage or Usage()
    return ModelLine(
        model=model.model,
        requests=model.requests + 1,
        failed=model.failed + (line.outcome not in {"ok", None}),
        input_tokens=model.input_tokens + usage.input_tokens,
        output_tokens=model.output_tokens + usage.output_tokens,
        cache_read_tokens=model.cache_read_tokens + usage.cache_read_tokens,
        cache_write_tokens=model.cache_write_tokens + usage.cache_write_tokens,
        held_usd=model.held_usd + line.held_usd,
        cost_usd=model.cost_usd + line.cost_usd,
    )
