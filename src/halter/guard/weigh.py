"""The one decision about a request to a model, as a pure function of what is asked and of locked rows.

The order is that of a call: R5 halt, R6 the model may be asked and its price is known, R4 the hold; then the rate of
the model. How much money is left is known only under the lock, so the bound is worked out here: what is checked is what
is held. What it returns is what is written: the intent with its hold, the refusal, the word that it waits for the next
minute, or nothing where other holds must settle first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Final

import msgspec

from halter.core.events import CostCapReached, GuardrailTriggered, RequestRefused, RequestStarted
from halter.core.ids import Digest
from halter.core.limits import Caps, Spender, legs, outdated
from halter.core.money import BudgetRow, CapReached, Leg, MustWait, Reserved, Unit, reserve
from halter.core.ports import Draft, Rows
from halter.core.project import budget_row, rows_of_hold
from halter.core.rates import Paces, RateReached, rate_legs, within_rates
from halter.core.row import RowKey
from halter.core.rows import HaltRow
from halter.core.usage import Rates, Unpriced
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.estimate import Estimate, TooDear, estimate
from halter.guard.judge import NOTHING_KEPT, Kept, budget_for, cap_sentence, halted, uncapped
from halter.guard.policies import caps_within

RATE: Final = "model_rate"
"""The guardrail by which a request waits for the next minute."""


class Asking(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything about one attempt of a request that can be known before any row is locked.

    One that is `optional` can be done without: its refusal is recorded, but no session ends for it. `paces` are the
    rates that its model is asked under.
    """

    request: str
    model: str
    purpose: Purpose
    spender: Spender
    caps: Caps
    now: int
    rates: Rates | Unpriced
    input_tokens: int
    max_output_tokens: int
    min_output_tokens: int
    scopes: tuple[str, ...] = ()
    kept: Kept = NOTHING_KEPT
    flaw: tuple[Outcome, str] | None = None
    optional: bool = False
    observe: bool = False
    body: bytes | None = None
    blob: Digest | None = None
    anonymized: Mapping[str, int] = {}
    paces: Paces = ()

    def at(self, now: int) -> "Asking":
        """Ask the same at a later moment: windows have moved on."""
        return msgspec.structs.replace(self, now=now)

    def legs(self, usd: int, tokens: int) -> tuple[Leg, ...]:
        """Spread an amount over all scopes."""
        return legs(self.caps, self.spender, self.now, usd=usd, tokens=tokens)

    @cached_property
    def everywhere(self) -> tuple[Leg, ...]:
        """Every account that any amount could weigh on: the least amount weighs on all of them."""
        return self.legs(1, 1)

    def least_output(self) -> int:
        """Tell the shortest answer that the request is still made for."""
        return min(self.min_output_tokens, self.max_output_tokens)


def rows_of(asking: Asking) -> list[RowKey]:
    """Name every row that the decision looks at or changes."""
    halts: list[RowKey] = [(HaltRow, (scope,)) for scope in asking.scopes]
    return [*halts, *rows_of_hold(asking.request, (*asking.everywhere, *rate_legs(asking.paces, asking.now, 1)))]


def weigh(asking: Asking, rows: Rows) -> Sequence[Draft]:
    """Decide about a request."""
    asking = _within_policy(asking, rows)
    halt = halted(asking.scopes, asking.spender.session, rows)
    if halt is not None:
        return [_refusal(asking, "external_halt", halt)]
    waived: list[Outcome] = []
    for refusal in _refusals(asking, rows):
        if not asking.observe:
            return [_refusal(asking, *refusal)]
        waived.append(refusal[0])
    if outdated(asking.everywhere, rows.now):
        return []
    fitting = _fitting(asking, rows)
    verdict = _reserve(asking, asking.legs(fitting.usd, fitting.tokens), rows)
    if asking.observe:
        if isinstance(verdict, CapReached):
            waived.append("cost_cap_reached")
        fitting = _bounded(asking, asking.max_output_tokens, rows.now, left=None)
        verdict = _reserve(asking, uncapped(asking.legs(fitting.usd, fitting.tokens)), rows)
    match verdict:
        case Reserved():
            return _at_its_rate(asking, _intent(asking, verdict, fitting, waived), fitting.tokens, rows)
        case CapReached():
            return _cap_reached(asking, verdict)
        case MustWait():
            return []


def _within_policy(asking: Asking, rows: Rows) -> Asking:
    """Ask under the fleet's caps as the store has them by now."""
    caps = caps_within(asking.caps, rows)
    return asking if caps is asking.caps else msgspec.structs.replace(asking, caps=caps)


def _at_its_rate(asking: Asking, intent: RequestStarted, tokens: int, rows: Rows) -> Sequence[Draft]:
    """Let a request through that fits this minute, by the store's clock; any other waits and holds nothing."""
    verdict = within_rates(rate_legs(asking.paces, rows.now, tokens), partial(budget_row, rows))
    match verdict:
        case Reserved(legs=more):
            held = msgspec.structs.replace(intent, legs=(*intent.legs, *more)) if more else intent
            return [Draft(held, asking.body, asking.blob)]
        case RateReached() if asking.optional:
            return [_refusal(asking, "rate_limited", verdict.sentence)]
        case RateReached():
            return [Draft(GuardrailTriggered(guardrail=RATE, sentence=verdict.sentence, until=verdict.until))]
        case MustWait():
            return []


def _refusals(asking: Asking, rows: Rows) -> Iterable[tuple[Outcome, str]]:
    """R6: yield what stands against the request, the first reason first."""
    if asking.flaw is not None:
        yield asking.flaw
    if isinstance(asking.rates, Unpriced) and _left(asking, rows, "usd") is not None:
        yield ("disabled", asking.rates.sentence)


def _left(asking: Asking, rows: Rows, unit: Unit) -> int | None:
    """Tell the least that any cap leaves unspent, or None where no cap binds."""
    unspent = [_unspent(leg, budget_for(rows, asking.kept, leg)) for leg in asking.everywhere if leg.unit == unit]
    return min([amount for amount in unspent if amount is not None], default=None)


def _unspent(leg: Leg, budget: BudgetRow) -> int | None:
    cap = budget.binding(leg.cap)
    return None if cap is None else cap - budget.spent


def _fitting(asking: Asking, rows: Rows) -> Estimate:
    """Lower the most that the model may write to what the token budget and the caps leave."""
    most = asking.max_output_tokens
    tokens = _left(asking, rows, "tokens")
    if tokens is not None:
        most = max(asking.least_output(), min(most, tokens - asking.input_tokens))
    return _bounded(asking, most, rows.now, _left(asking, rows, "usd"))


def _bounded(asking: Asking, most: int, at: int, left: int | None) -> Estimate:
    """Bound a request; one that is too dear is bounded at its least, so that the cap which it meets can be named."""
    if isinstance(asking.rates, Unpriced):
        return Estimate(most, 0, asking.input_tokens + most)
    least = asking.least_output()
    found = estimate(asking.rates, asking.input_tokens, most, at, left=left, min_output_tokens=least)
    if isinstance(found, TooDear):
        return Estimate(least, found.usd, asking.input_tokens + least)
    return found


def _reserve(asking: Asking, held: Sequence[Leg], rows: Rows) -> Reserved | MustWait | CapReached:
    return reserve(held, partial(budget_for, rows, asking.kept))


def _cap_reached(asking: Asking, verdict: CapReached) -> Sequence[Draft]:
    refusal = _refusal(asking, "cost_cap_reached", cap_sentence(verdict))
    if asking.optional:
        return [refusal]
    return [Draft(CostCapReached.refusing(asking.request, asking.model, verdict)), refusal]


def _refusal(asking: Asking, outcome: Outcome, sentence: str) -> Draft:
    """Record a refusal. It names what was to be sent, so that erasing the session erases that too."""
    event = RequestRefused(
        request=asking.request, model=asking.model, purpose=asking.purpose, outcome=outcome, sentence=sentence
    )
    return Draft(event, asking.body, asking.blob)


def _intent(asking: Asking, verdict: Reserved, fitting: Estimate, waived: Sequence[Outcome]) -> RequestStarted:
    return RequestStarted(
        request=asking.request,
        model=asking.model,
        purpose=asking.purpose,
        legs=verdict.legs,
        max_output_tokens=fitting.max_output_tokens,
        observed=tuple(waived),
        anonymized=asking.anonymized,
    )
