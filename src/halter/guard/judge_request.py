"""The decision about a model request: a pure function of the attempt and of locked rows.

The checks have a fixed order, as for a call:

    halt -> the model is allowed and priced -> hold -> the model's rate limit

The remaining budget is known only under the lock, so the cost is bounded here: the amount checked is the amount held.
The result is a list of drafts to write: the intent with its hold, a refusal, or a wait for the next minute. It is empty
if other holds must settle first.
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
    Reserved,
    Spender,
    assign_legs,
    first_window_end,
    make_legs,
    reserve,
)
from halter.core.ports import Draft, Rows
from halter.core.project.holds import POLICY_KEY, BudgetKey, budget_key, budget_row
from halter.core.rates import RateLimits, RateReached, check_rate_legs, make_rate_legs
from halter.core.rows import FleetPolicyRow, HoldRow
from halter.core.usage import ModelPrices, Unpriced
from halter.core.vocabulary import Outcome, Purpose, RowKey
from halter.guard.budget import NO_RESERVE, Reserve, describe_cap_reached, find_spendable_budgets
from halter.guard.halts import HaltKeys, explain_halt
from halter.policy.store_policy import lower_legs

MIN_OUTPUT_TOKENS: Final = 256


class Estimate(msgspec.Struct, frozen=True, gc=False):
    max_output_tokens: int
    usd: int
    tokens: int


def estimate_request(
    prices: ModelPrices | None,
    input_tokens: int,
    limit: int,
    at: int,
    usd: int | None,
    tokens: int | None = None,
    min_output_tokens: int = MIN_OUTPUT_TOKENS,
) -> Estimate:
    """Bound the cost of a request. Lower the `limit` if an answer of that many tokens does not fit the budget.

    `usd` and `tokens` are the amounts that the tightest caps leave, or None if no cap binds. A request without a price
    holds no dollars. If even the shortest answer is too expensive, its bound is returned, so that the refusal can name
    the cap.
    """
    minimum = min(limit, min_output_tokens)
    if tokens is not None and tokens < input_tokens + limit:
        limit = max(minimum, tokens - input_tokens)
    bound = 0 if prices is None else prices.bound(input_tokens, limit, at)
    if prices is not None and usd is not None and bound > usd:
        limit = max(minimum, prices.max_output_that_fits(input_tokens, usd, at, limit))
        bound = prices.bound(input_tokens, limit, at)
    return Estimate(limit, bound, input_tokens + limit)


MODEL_RATE_GUARDRAIL: Final = "model_rate"


_NOTHING_HIDDEN: Final[Mapping[str, int]] = {}


class ModelAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one attempt that is known before any row is locked.

    The refusal of an `optional` request is recorded, but ends no session. `terms` say where the amount is held; they
    follow from `caps` and `spender`.
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
    reserve: Reserve = NO_RESERVE
    flaw: tuple[Outcome, str] | None = None
    optional: bool = False
    observe: bool = False
    body: bytes | None = None
    blob: Digest | None = None
    anonymized: Mapping[str, int] = msgspec.field(default_factory=lambda: _NOTHING_HIDDEN)
    paces: RateLimits = ()
    terms: "HoldTerms | None" = None
    traceparent: str = ""

    def at(self, now: int) -> "ModelAttempt":
        """Return the attempt at a later time, with the windows of that time."""
        if now // QUARTER == self.now // QUARTER:
            return self
        return msgspec.structs.replace(self, now=now, terms=None)

    @property
    def hold(self) -> "HoldTerms":
        return self.terms or compile_hold_terms(self.caps, self.spender, self.now // QUARTER)


class HoldTerms(msgspec.Struct, frozen=True, gc=False):
    """The legs of a request's hold, and the end of the first of their windows.

    The store's own policy binds a leg of the fleet. `keys` are the accounts' rows, cached after the first request, to
    save memory while a session waits for its first answer.
    """

    legs: tuple[Leg, ...]
    ends_at: int | None
    fleet: bool
    keys: tuple[BudgetKey, ...] = ()

    def for_stream(self, stream: str) -> "HoldTerms":
        """Assign shared terms to the session of a stream."""
        return HoldTerms(assign_legs(self.legs, stream), self.ends_at, self.fleet)


def compile_hold_terms(caps: Caps, spender: Spender, quarter: int) -> HoldTerms:
    """Compile the legs of a session's holds for a quarter of an hour: no window starts or ends within one."""
    # The smallest amount touches every account.
    legs = make_legs(caps, spender, quarter * QUARTER, usd=1, tokens=1)
    return HoldTerms(legs, first_window_end(legs), any(leg.scope == FLEET for leg in legs))


def list_request_rows(attempt: ModelAttempt) -> list[RowKey]:
    """List every row that the decision reads or changes."""
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
    budget_rows = rows.find(hold.keys or [*map(budget_key, legs)])
    budgets, usd, tokens = find_spendable_budgets(legs, budget_rows, attempt.reserve)
    waived_refusals: tuple[Outcome, ...] = ()
    prices = None if isinstance(attempt.rates, Unpriced) else attempt.rates
    if prices is None or attempt.flaw is not None:
        for refusal in _find_refusals(attempt, usd):
            if not attempt.observe:
                return [_make_request_refusal(attempt, *refusal)]
            waived_refusals = (*waived_refusals, refusal[0])
    ends_at = hold.ends_at
    if ends_at is not None and ends_at <= rows.now:
        return []
    input_tokens, limit, min_output_tokens = attempt.input_tokens, attempt.max_output_tokens, attempt.min_output_tokens
    estimate = estimate_request(prices, input_tokens, limit, rows.now, usd, tokens, min_output_tokens)
    verdict = _reserve_budget(budgets, estimate)
    if attempt.observe:
        if isinstance(verdict, CapReached):
            waived_refusals = (*waived_refusals, "cost_cap_reached")
        estimate = estimate_request(prices, input_tokens, limit, rows.now, None)
        verdict = _reserve_budget(budgets, estimate, is_capped=False)
    if not isinstance(verdict, Reserved):
        return _refuse_at_cap(attempt, verdict) if isinstance(verdict, CapReached) else []
    intent = RequestStarted(
        request=attempt.request,
        model=attempt.model,
        purpose=attempt.purpose,
        legs=verdict.legs,
        max_output_tokens=estimate.max_output_tokens,
        observed=waived_refusals,
        anonymized=attempt.anonymized,
        traceparent=attempt.traceparent,
        guess="" if prices is None else prices.guess,
    )
    if attempt.paces:
        return _admit_at_rate(attempt, intent, estimate.tokens, rows)
    return [Draft(intent, attempt.body, attempt.blob)]


def _admit_at_rate(attempt: ModelAttempt, intent: RequestStarted, tokens: int, rows: Rows) -> Sequence[Draft]:
    """Admit a request if it fits the rate limits of this minute, by the store's clock. Otherwise it holds nothing."""
    verdict = check_rate_legs(make_rate_legs(attempt.paces, rows.now, tokens), partial(budget_row, rows))
    match verdict:
        case Reserved(legs=rate_legs):
            rated_intent = msgspec.structs.replace(intent, legs=(*intent.legs, *rate_legs))
            return [Draft(rated_intent, attempt.body, attempt.blob)]
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
    """Yield the refusals of a request, in order. `usd` is the rest of the caps; None if no cap binds."""
    if attempt.flaw is not None:
        yield attempt.flaw
    if isinstance(attempt.rates, Unpriced) and usd is not None:
        yield ("disabled", attempt.rates.sentence)


def _reserve_budget(
    budgets: Sequence[tuple[Leg, BudgetRow]], estimate: Estimate, *, is_capped: bool = True
) -> Reserved | Contended | CapReached:
    """Reserve an estimate on its accounts. A zero amount is not held."""
    holds: list[tuple[Leg, BudgetRow]] = []
    usd, tokens = estimate.usd, estimate.tokens
    for leg, budget in budgets:
        amount = usd if leg.unit == "usd" else tokens
        if amount:
            holds.append((Leg(leg.scope, leg.window, leg.unit, leg.cap if is_capped else None, amount), budget))
    return reserve(holds)


def _refuse_at_cap(attempt: ModelAttempt, verdict: CapReached) -> Sequence[Draft]:
    refusal = _make_request_refusal(attempt, "cost_cap_reached", describe_cap_reached(verdict))
    if attempt.optional:
        return [refusal]
    return [Draft(CostCapReached.refusing(attempt.request, attempt.model, verdict)), refusal]


def _make_request_refusal(attempt: ModelAttempt, outcome: Outcome, sentence: str) -> Draft:
    """Make a refusal. It names the prompt's blob, so that an erasure of the session erases the blob."""
    event = RequestRefused(
        request=attempt.request, model=attempt.model, purpose=attempt.purpose, outcome=outcome, sentence=sentence
    )
    return Draft(event, attempt.body, attempt.blob)
