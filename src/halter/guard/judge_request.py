"""The one decision about a model request, as a pure function of the request and of locked rows.

The order is that of a call: R5 halt, R6 the model is allowed and priced, R4 the hold; then the model's rate. The money
left is known only under the lock, so the bound is computed here: what is checked is what is held. The result is what
gets written: the intent with its hold, the refusal, a wait for the next minute, or nothing where other holds must
settle first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Final

import msgspec

from halter.core.events import CostCapReached, GuardrailTriggered, RequestRefused, RequestStarted
from halter.core.ids import Digest
from halter.core.money import (
    CapReached,
    Caps,
    Leg,
    MustWait,
    RateLimits,
    RateReached,
    Reserved,
    Spender,
    Unit,
    check_rate_legs,
    has_past_window,
    make_legs,
    make_rate_legs,
    reserve,
)
from halter.core.ports import Draft, Rows
from halter.core.project import budget_row, rows_of_hold
from halter.core.rows import HaltRow
from halter.core.usage import ModelPrices, Unpriced
from halter.core.vocabulary import Outcome, Purpose, RowKey
from halter.guard.judge import (
    NO_RESERVE,
    Reserve,
    describe_cap_reached,
    explain_halt,
    find_spendable_budget,
    lower_caps_to_store,
    remove_caps,
)

MIN_OUTPUT_TOKENS: Final = 256


class Estimate(msgspec.Struct, frozen=True):
    max_output_tokens: int
    usd: int
    tokens: int


class TooExpensive(msgspec.Struct, frozen=True):
    usd: int


def estimate_request(
    rates: ModelPrices,
    input_tokens: int,
    max_output_tokens: int,
    at: int,
    *,
    left: int | None,
    min_output_tokens: int = MIN_OUTPUT_TOKENS,
) -> Estimate | TooExpensive:
    """Bound a request; if the whole answer does not fit, lower its maximum length.

    `left` is the least that any cap leaves unspent, or None where no cap binds.
    """
    usd = rates.bound(input_tokens, max_output_tokens, at)
    if left is None or usd <= left:
        return Estimate(max_output_tokens, usd, input_tokens + max_output_tokens)
    floor = min(min_output_tokens, max_output_tokens)
    fitting = rates.max_output_that_fits(input_tokens, left, at, max_output_tokens)
    if fitting < floor:
        return TooExpensive(rates.bound(input_tokens, floor, at))
    return Estimate(fitting, rates.bound(input_tokens, fitting, at), input_tokens + fitting)


MODEL_RATE_GUARDRAIL: Final = "model_rate"


class RequestAttempt(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything about one attempt that is known before any row is locked.

    The refusal of an `optional` one is recorded, but ends no session. `paces` are the rates of its model.
    """

    request: str
    model: str
    purpose: Purpose
    spender: Spender
    caps: Caps
    now: int
    rates: ModelPrices | Unpriced
    input_tokens: int
    max_output_tokens: int
    min_output_tokens: int
    scopes: tuple[str, ...] = ()
    kept: Reserve = NO_RESERVE
    flaw: tuple[Outcome, str] | None = None
    optional: bool = False
    observe: bool = False
    body: bytes | None = None
    blob: Digest | None = None
    anonymized: Mapping[str, int] = {}
    paces: RateLimits = ()

    def at(self, now: int) -> "RequestAttempt":
        """The same request at a later time: windows have moved on."""
        return msgspec.structs.replace(self, now=now)

    def legs(self, usd: int, tokens: int) -> tuple[Leg, ...]:
        return make_legs(self.caps, self.spender, self.now, usd=usd, tokens=tokens)

    @cached_property
    def everywhere(self) -> tuple[Leg, ...]:
        """Every account that an amount may be held in: the smallest amount touches all of them."""
        return self.legs(1, 1)

    def least_output(self) -> int:
        """The shortest answer worth making the request for."""
        return min(self.min_output_tokens, self.max_output_tokens)


def list_request_rows(asking: RequestAttempt) -> list[RowKey]:
    """Every row that the decision reads or changes."""
    halts: list[RowKey] = [(HaltRow, (scope,)) for scope in asking.scopes]
    return [*halts, *rows_of_hold(asking.request, (*asking.everywhere, *make_rate_legs(asking.paces, asking.now, 1)))]


def judge_attempt(asking: RequestAttempt, rows: Rows) -> Sequence[Draft]:
    caps = lower_caps_to_store(asking.caps, rows)
    asking = asking if caps is asking.caps else msgspec.structs.replace(asking, caps=caps)
    halt = explain_halt(asking.scopes, asking.spender.session, rows)
    if halt is not None:
        return [_make_request_refusal(asking, "external_halt", halt)]
    waived: list[Outcome] = []
    for refusal in _find_refusals(asking, rows):
        if not asking.observe:
            return [_make_request_refusal(asking, *refusal)]
        waived.append(refusal[0])
    if has_past_window(asking.everywhere, rows.now):
        return []
    fitting = _fit_output(asking, rows)
    verdict = _reserve_budget(asking, asking.legs(fitting.usd, fitting.tokens), rows)
    if asking.observe:
        if isinstance(verdict, CapReached):
            waived.append("cost_cap_reached")
        fitting = _bound_attempt(asking, asking.max_output_tokens, rows.now, left=None)
        verdict = _reserve_budget(asking, remove_caps(asking.legs(fitting.usd, fitting.tokens)), rows)
    match verdict:
        case Reserved():
            return _admit_at_rate(asking, _make_request_intent(asking, verdict, fitting, waived), fitting.tokens, rows)
        case CapReached():
            return _refuse_at_cap(asking, verdict)
        case MustWait():
            return []


def _admit_at_rate(asking: RequestAttempt, intent: RequestStarted, tokens: int, rows: Rows) -> Sequence[Draft]:
    """Admit a request that fits this minute by the store's clock; otherwise it waits and holds nothing."""
    verdict = check_rate_legs(make_rate_legs(asking.paces, rows.now, tokens), partial(budget_row, rows))
    match verdict:
        case Reserved(legs=more):
            held = msgspec.structs.replace(intent, legs=(*intent.legs, *more)) if more else intent
            return [Draft(held, asking.body, asking.blob)]
        case RateReached() if asking.optional:
            return [_make_request_refusal(asking, "rate_limited", verdict.sentence)]
        case RateReached():
            return [
                Draft(
                    GuardrailTriggered(guardrail=MODEL_RATE_GUARDRAIL, sentence=verdict.sentence, until=verdict.until)
                )
            ]
        case MustWait():
            return []


def _find_refusals(asking: RequestAttempt, rows: Rows) -> Iterable[tuple[Outcome, str]]:
    """R6: the reasons against the request, the first one first."""
    if asking.flaw is not None:
        yield asking.flaw
    if isinstance(asking.rates, Unpriced) and _least_unspent(asking, rows, "usd") is not None:
        yield ("disabled", asking.rates.sentence)


def _least_unspent(asking: RequestAttempt, rows: Rows, unit: Unit) -> int | None:
    legs = [leg for leg in asking.everywhere if leg.unit == unit]
    budgets = [(leg, find_spendable_budget(rows, asking.kept, leg)) for leg in legs]
    caps = [(budget.binding(leg.cap), budget.spent) for leg, budget in budgets]
    return min([cap - spent for cap, spent in caps if cap is not None], default=None)


def _fit_output(asking: RequestAttempt, rows: Rows) -> Estimate:
    most = asking.max_output_tokens
    tokens = _least_unspent(asking, rows, "tokens")
    if tokens is not None:
        most = max(asking.least_output(), min(most, tokens - asking.input_tokens))
    return _bound_attempt(asking, most, rows.now, _least_unspent(asking, rows, "usd"))


def _bound_attempt(asking: RequestAttempt, most: int, at: int, left: int | None) -> Estimate:
    """Bound a request; one too expensive is bounded at its minimum, so that the cap it meets can be named."""
    if isinstance(asking.rates, Unpriced):
        return Estimate(most, 0, asking.input_tokens + most)
    least = asking.least_output()
    found = estimate_request(asking.rates, asking.input_tokens, most, at, left=left, min_output_tokens=least)
    if isinstance(found, TooExpensive):
        return Estimate(least, found.usd, asking.input_tokens + least)
    return found


def _reserve_budget(asking: RequestAttempt, held: Sequence[Leg], rows: Rows) -> Reserved | MustWait | CapReached:
    return reserve(held, partial(find_spendable_budget, rows, asking.kept))


def _refuse_at_cap(asking: RequestAttempt, verdict: CapReached) -> Sequence[Draft]:
    refusal = _make_request_refusal(asking, "cost_cap_reached", describe_cap_reached(verdict))
    if asking.optional:
        return [refusal]
    return [Draft(CostCapReached.refusing(asking.request, asking.model, verdict)), refusal]


def _make_request_refusal(asking: RequestAttempt, outcome: Outcome, sentence: str) -> Draft:
    """Record a refusal. It names the prompt's blob, so that erasing the session erases that too."""
    event = RequestRefused(
        request=asking.request, model=asking.model, purpose=asking.purpose, outcome=outcome, sentence=sentence
    )
    return Draft(event, asking.body, asking.blob)


def _make_request_intent(
    asking: RequestAttempt, verdict: Reserved, fitting: Estimate, waived: Sequence[Outcome]
) -> RequestStarted:
    return RequestStarted(
        request=asking.request,
        model=asking.model,
        purpose=asking.purpose,
        legs=verdict.legs,
        max_output_tokens=fitting.max_output_tokens,
        observed=tuple(waived),
        anonymized=asking.anonymized,
    )
