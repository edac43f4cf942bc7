"""The one decision about a model request, as a pure function of the request and of locked rows.

The order is that of a call: R5 halt, R6 the model is allowed and priced, R4 the hold; then the model's rate. The money
left is known only under the lock, so the bound is computed here: what is checked is what is held. The result is what
gets written: the intent with its hold, the refusal, a wait for the next minute, or nothing where other holds must
settle first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from halter.core.clock import QUARTER
from halter.core.events import CostCapReached, GuardrailTriggered, RequestRefused, RequestStarted
from halter.core.ids import FLEET, Digest
from halter.core.money import (
    BudgetRow,
    CapReached,
    Caps,
    Contended,
    Leg,
    RateLimits,
    RateReached,
    Reserved,
    Spender,
    assign_legs,
    check_rate_legs,
    first_window_end,
    make_legs,
    make_rate_legs,
    reserve,
)
from halter.core.ports import Draft, Rows
from halter.core.project import POLICY_KEY, BudgetKey, budget_key, budget_row
from halter.core.rows import FleetPolicyRow, HoldRow
from halter.core.usage import ModelPrices, Unpriced
from halter.core.vocabulary import Outcome, Purpose, RowKey
from halter.guard.judge import (
    NO_RESERVE,
    HaltKeys,
    Reserve,
    describe_cap_reached,
    explain_halt,
    find_spendable_budgets,
    lower_legs,
)

MIN_OUTPUT_TOKENS: Final = 256


class Estimate(msgspec.Struct, frozen=True, gc=False):
    max_output_tokens: int
    usd: int
    tokens: int


def estimate_request(
    rates: ModelPrices | None,
    input_tokens: int,
    limit: int,
    at: int,
    usd: int | None,
    tokens: int | None = None,
    min_output_tokens: int = MIN_OUTPUT_TOKENS,
) -> Estimate:
    """Bound a request; if the whole answer, of `most` tokens, does not fit, lower its maximum length.

    `usd` and `tokens` are the least that any cap leaves unspent, or None where no cap binds. Without a price it holds
    no dollars. One too expensive is bounded at its minimum, so that the cap it meets can be named.
    """
    least = min(limit, min_output_tokens)
    if tokens is not None and tokens < input_tokens + limit:
        limit = max(least, tokens - input_tokens)
    bound = 0 if rates is None else rates.bound(input_tokens, limit, at)
    if rates is not None and usd is not None and bound > usd:
        limit = max(least, rates.max_output_that_fits(input_tokens, usd, at, limit))
        bound = rates.bound(input_tokens, limit, at)
    return Estimate(limit, bound, input_tokens + limit)


MODEL_RATE_GUARDRAIL: Final = "model_rate"


_NOTHING_HIDDEN: Final[Mapping[str, int]] = {}


class ModelAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one attempt that is known before any row is locked.

    The refusal of an `optional` one is recorded, but ends no session. `paces` are the rates of its model; `terms` say
    where its amount is held, which follows from `caps` and `spender`.
    """

    request: str
    model: str
    purpose: Purpose = "turn"
    spender: Spender
    caps: Caps
    now: int
    rates: ModelPrices | Unpriced
    input_tokens: int
    max_output_tokens: int
    min_output_tokens: int
    halts: HaltKeys = ()
    kept: Reserve = NO_RESERVE
    flaw: tuple[Outcome, str] | None = None
    optional: bool = False
    observe: bool = False
    body: bytes | None = None
    blob: Digest | None = None
    anonymized: Mapping[str, int] = msgspec.field(default_factory=lambda: _NOTHING_HIDDEN)
    paces: RateLimits = ()
    terms: "HoldTerms | None" = None

    def at(self, now: int) -> "ModelAttempt":
        """The same request at a later time: windows have moved on."""
        if now // QUARTER == self.now // QUARTER:
            return self
        return msgspec.structs.replace(self, now=now, terms=None)

    @property
    def hold(self) -> "HoldTerms":
        return self.terms or compile_hold_terms(self.caps, self.spender, self.now // QUARTER)


class HoldTerms(msgspec.Struct, frozen=True, gc=False):
    """Where a request's amount is held: every account, and when the first of their windows ends.

    What is held for the `fleet` is bound to the store's own policy. `keys` are the rows of the accounts, where they are
    kept: a session that waits for its first answer keeps none.
    """

    legs: tuple[Leg, ...]
    ends_at: int | None
    fleet: bool
    keys: tuple[BudgetKey, ...] = ()

    def for_stream(self, stream: str) -> "HoldTerms":
        """The terms of no session in particular, for the session of a stream."""
        return HoldTerms(assign_legs(self.legs, stream), self.ends_at, self.fleet)


def compile_hold_terms(caps: Caps, spender: Spender, quarter: int) -> HoldTerms:
    """Work out where a session's amounts are held, for a quarter of an hour: no window begins or ends within one."""
    # The smallest amount touches every account.
    legs = make_legs(caps, spender, quarter * QUARTER, usd=1, tokens=1)
    return HoldTerms(legs, first_window_end(legs), any(leg.scope == FLEET for leg in legs))


def list_request_rows(attempt: ModelAttempt) -> list[RowKey]:
    """Every row that the decision reads or changes."""
    hold = attempt.terms or attempt.hold
    keys = hold.keys or map(budget_key, hold.legs)
    rows: list[RowKey] = [*attempt.halts, (HoldRow, attempt.request), *keys]
    if hold.fleet:
        rows.append(POLICY_KEY)
    return [*rows, *map(budget_key, make_rate_legs(attempt.paces, attempt.now, 1))] if attempt.paces else rows


def judge_attempt(attempt: ModelAttempt, rows: Rows) -> Sequence[Draft]:
    halts = rows.find(attempt.halts)
    if any(halts) and (halt := explain_halt(halts, attempt.spender.session, rows.now)):
        return [_make_request_refusal(attempt, "external_halt", halt)]
    hold = attempt.terms or attempt.hold
    policy = rows.get(FleetPolicyRow, FLEET) if hold.fleet else None
    legs = hold.legs if policy is None else lower_legs(hold.legs, policy)
    found = rows.find(hold.keys or [*map(budget_key, legs)])
    budgets, usd, tokens = find_spendable_budgets(legs, found, attempt.kept)
    waived: tuple[Outcome, ...] = ()
    rates = None if isinstance(attempt.rates, Unpriced) else attempt.rates
    if rates is None or attempt.flaw is not None:
        for refusal in _find_refusals(attempt, usd):
            if not attempt.observe:
                return [_make_request_refusal(attempt, *refusal)]
            waived = (*waived, refusal[0])
    ends_at = hold.ends_at
    if ends_at is not None and ends_at <= rows.now:
        return []
    asked, limit, least = attempt.input_tokens, attempt.max_output_tokens, attempt.min_output_tokens
    fitting = estimate_request(rates, asked, limit, rows.now, usd, tokens, least)
    verdict = _reserve_budget(budgets, fitting)
    if attempt.observe:
        if isinstance(verdict, CapReached):
            waived = (*waived, "cost_cap_reached")
        fitting = estimate_request(rates, asked, limit, rows.now, None)
        verdict = _reserve_budget(budgets, fitting, capped=False)
    if not isinstance(verdict, Reserved):
        return _refuse_at_cap(attempt, verdict) if isinstance(verdict, CapReached) else []
    intent = RequestStarted(
        request=attempt.request,
        model=attempt.model,
        purpose=attempt.purpose,
        legs=verdict.legs,
        max_output_tokens=fitting.max_output_tokens,
        observed=waived,
        anonymized=attempt.anonymized,
    )
    if attempt.paces:
        return _admit_at_rate(attempt, intent, fitting.tokens, rows)
    return [Draft(intent, attempt.body, attempt.blob)]


def _admit_at_rate(attempt: ModelAttempt, intent: RequestStarted, tokens: int, rows: Rows) -> Sequence[Draft]:
    """Admit a request that fits this minute by the store's clock; otherwise it waits and holds nothing."""
    verdict = check_rate_legs(make_rate_legs(attempt.paces, rows.now, tokens), partial(budget_row, rows))
    match verdict:
        case Reserved(legs=more):
            held = msgspec.structs.replace(intent, legs=(*intent.legs, *more))
            return [Draft(held, attempt.body, attempt.blob)]
        case RateReached() if attempt.optional:
            return [_make_request_refusal(attempt, "rate_limited", verdict.sentence)]
        case RateReached():
            return [
                Draft(
                    GuardrailTriggered(guardrail=MODEL_RATE_GUARDRAIL, sentence=verdict.sentence, until=verdict.until)
                )
            ]
        case Contended():
            return []


def _find_refusals(attempt: ModelAttempt, usd: int | None) -> Iterable[tuple[Outcome, str]]:
    """R6: the reasons against the request, the first one first. `usd` is what caps leave, if any binds."""
    if attempt.flaw is not None:
        yield attempt.flaw
    if isinstance(attempt.rates, Unpriced) and usd is not None:
        yield ("disabled", attempt.rates.sentence)


def _reserve_budget(
    budgets: Sequence[tuple[Leg, BudgetRow]], fitting: Estimate, *, capped: bool = True
) -> Reserved | Contended | CapReached:
    """Spread an amount over its accounts; nothing is held where there is nothing to hold."""
    held: list[tuple[Leg, BudgetRow]] = []
    usd, tokens = fitting.usd, fitting.tokens
    for leg, budget in budgets:
        amount = usd if leg.unit == "usd" else tokens
        if amount:
            held.append((Leg(leg.scope, leg.window, leg.unit, leg.cap if capped else None, amount), budget))
    return reserve(held)


def _refuse_at_cap(attempt: ModelAttempt, verdict: CapReached) -> Sequence[Draft]:
    refusal = _make_request_refusal(attempt, "cost_cap_reached", describe_cap_reached(verdict))
    if attempt.optional:
        return [refusal]
    return [Draft(CostCapReached.refusing(attempt.request, attempt.model, verdict)), refusal]


def _make_request_refusal(attempt: ModelAttempt, outcome: Outcome, sentence: str) -> Draft:
    """Record a refusal. It names the prompt's blob, so that erasing the session erases that too."""
    event = RequestRefused(
        request=attempt.request, model=attempt.model, purpose=attempt.purpose, outcome=outcome, sentence=sentence
    )
    return Draft(event, attempt.body, attempt.blob)
