"""The decision about a call: a pure function of the request and of locked rows.

The checks have a fixed order:

    halt -> tool, arguments, rate -> provenance -> budget -> approval -> hold

The budget comes before the approval, so that no person is asked about a call that the budget would refuse. A question
holds the call's maximum cost, like an intent, until the call is admitted or refused.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from halter.core.clock import HOUR, MINUTE
from halter.core.ids import session_stream
from halter.core.money import (
    BudgetRow,
    CapReached,
    Contended,
    Reserved,
    format_compared_micros,
    has_past_window,
    reserve,
)
from halter.core.ports import Draft, Rows
from halter.core.project.holds import budget_key, budget_row
from halter.core.rows import DecisionRow, HoldRow, RateRow
from halter.core.vocabulary import Outcome, R, RowKey
from halter.guard.approval_check import check_approval
from halter.guard.budget import describe_cap_reached, find_spendable_budgets, remove_caps
from halter.guard.call_request import CallRequest, RequiredApproval
from halter.guard.halts import explain_halt
from halter.guard.verdict import NOT_NEEDED, WAIT, Allow, Ask, CallVerdict, Deny, GivenApproval, Wait, draft_verdict
from halter.policy.levels import AttemptRate
from halter.policy.store_policy import lower_legs_to_policy
from halter.state.lifecycle import draft_releases

NEVER_WAIVED: Final[frozenset[Outcome]] = frozenset(("unknown_tool", "invalid_arguments"))
"""Refusals of calls that cannot run, which observe mode does not waive."""

NOTHING_HELD: Final = Reserved(())


def judge_call(request: CallRequest, rows: Rows) -> Sequence[Draft]:
    """Decide about a call: return the events of its intent, its refusal or its question; none if it must wait."""
    return draft_verdict(request, decide_call(request, rows), rows.now)


def decide_call(request: CallRequest, rows: Rows) -> CallVerdict:
    """Decide about a call by the checks in their order. In observe mode, refusals that can be waived are recorded."""
    halts = rows.find(request.halts)
    if any(halts) and (halt := explain_halt(halts, request.session, rows.now)):
        return Deny("external_halt", halt)
    waived: tuple[Outcome, ...] = ()
    if request.flaw is not None or request.rate is not None or request.action_limits or request.untrusted_reason:
        for refusal in find_refusals(request, rows):
            if not request.observe or refusal.outcome in NEVER_WAIVED:
                return refusal
            waived = (*waived, refusal.outcome)
    reservation: Reserved | Contended | CapReached = NOTHING_HELD
    if request.legs:
        if has_past_window(request.legs, rows.now):
            return WAIT
        reservation = _reserve_maximum(request, rows)
        if isinstance(reservation, CapReached) and request.observe:
            waived = (*waived, "cost_cap_reached")
            reservation = _reserve_without_caps(request, rows)
        if isinstance(reservation, CapReached):
            return Deny("cost_cap_reached", describe_cap_reached(reservation), cap=reservation)
    approval = NOT_NEEDED
    if request.approval is not None:
        answer = check_approval(request, request.approval, rows)
        if isinstance(answer, Ask):
            return WAIT if isinstance(reservation, Contended) else Ask(answer.approval, reservation.legs)
        if not isinstance(answer, GivenApproval):
            return answer
        if _has_unreleased_question(request, request.approval, rows):
            return WAIT
        approval = answer
    if isinstance(reservation, Contended):
        return WAIT
    slots = find_action_slots(request, rows) if request.action_limits else ()
    return Allow(reservation.legs, approval, waived, slots)


def judge_asked_call(request: CallRequest, rows: Rows) -> Sequence[Draft]:
    """Decide about a call whose question holds money: as if that was released, which the same commit then does.

    While the question is pending, nothing is written and the hold stays.
    """
    hold = request.question_hold and rows.get(HoldRow, request.question_hold.hold)
    if hold is None:
        return judge_call(request, rows)
    released_rows = _RowsWithoutHold(rows, hold)
    verdict = decide_call(request, released_rows)
    if isinstance(verdict, Wait):
        verdict = _decide_after_lowered_cap(request, hold, released_rows)
    drafts = draft_verdict(request, verdict, rows.now)
    return [*draft_releases([hold]), *drafts] if drafts else []


def _reserve_maximum(request: CallRequest, rows: Rows) -> Reserved | Contended | CapReached:
    """Reserve the maximum cost of a call in all its accounts."""
    legs = lower_legs_to_policy(request.legs, rows)
    budget_rows = rows.find([budget_key(leg) for leg in legs])
    budgets, _, _ = find_spendable_budgets(legs, budget_rows, request.reserve)
    return reserve(budgets)


def _reserve_without_caps(request: CallRequest, rows: Rows) -> Reserved | Contended | CapReached:
    """Reserve the maximum cost of a call for observe mode, which no configured cap refuses."""
    return reserve([(leg, budget_row(rows, leg)) for leg in remove_caps(request.legs)])


def _has_unreleased_question(request: CallRequest, approval: RequiredApproval, rows: Rows) -> bool:
    """Return whether a question about the call holds money that this request does not know of."""
    if not request.legs or request.question_hold is not None:
        return False
    return rows.get(HoldRow, approval.decision) is not None


class _RowsWithoutHold:
    """The rows as they are after a hold is released."""

    def __init__(self, rows: Rows, hold: HoldRow) -> None:
        self._rows = rows
        self._freed: dict[RowKey, int] = {budget_key(leg): leg.amount for leg in hold.decode_legs()}

    @property
    def now(self) -> int:
        return self._rows.now

    def get(self, kind: type[R], /, *key: Any) -> R | None:
        row = self._rows.get(kind, *key)
        freed_amount = self._freed.get((kind, *key))
        if not isinstance(row, BudgetRow) or not freed_amount:
            return row
        return cast("R", row.with_amounts(held=-freed_amount))

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        return [self.get(*key) for key in keys]


def _decide_after_lowered_cap(request: CallRequest, hold: HoldRow, rows: Rows) -> Deny | Wait:
    """Refuse an answered call that no longer fits where its question held money; else it waits.

    Questions that hold more together than a lowered cap allows would wait for each other.
    """
    decision = rows.get(DecisionRow, hold.hold)
    if decision is None or not decision.verdict or not request.legs or has_past_window(request.legs, rows.now):
        return WAIT
    reservation = _reserve_maximum(request, rows)
    held_accounts = {budget_key(leg) for leg in hold.decode_legs()}
    if not isinstance(reservation, Contended) or budget_key(reservation.leg) not in held_accounts:
        return WAIT
    leg, budget = reservation.leg, reservation.budget
    cap = budget.binding(leg.cap) or 0
    remaining = max(0, cap - budget.spent - budget.held)
    where = f"{leg.scope} {leg.window}".strip()
    cost_text, remaining_text = format_compared_micros(leg.amount, remaining)
    return Deny(
        "cost_cap_reached",
        f"It may cost {cost_text}. Since a person was asked, the cap of {where} was lowered: "
        f"{remaining_text} is left beside what other calls hold.",
    )


def find_refusals(request: CallRequest, rows: Rows) -> Iterator[Deny]:
    """Yield the refusals of a call, in the order of the checks."""
    if request.flaw is not None:
        yield Deny(*request.flaw)
    if request.rate is not None:
        attempts = _count_attempts(request, request.rate, rows)
        if attempts >= request.rate.limit:
            hours = request.rate.period / HOUR
            yield Deny(
                "rate_limited",
                f"{request.tool} was tried {attempts} times in {hours:g} h, and the limit is {request.rate.limit}.",
            )
    for stream, limit in request.action_limits:
        if find_free_slot(rows, stream, limit) is None:
            yield Deny("rate_limited", describe_too_many_actions(request.session, stream, limit))
    if request.untrusted_reason:
        yield Deny("untrusted", request.untrusted_reason)


def _count_attempts(request: CallRequest, rate: AttemptRate, rows: Rows) -> int:
    """Count the attempts of a tool within the sliding period."""
    slices = [rows.get(RateRow, request.agent, request.tool, number) for number in rate.slices(request.now)]
    return sum(row.attempts for row in slices if row is not None)


def find_free_slot(rows: Rows, stream: str, limit: int) -> int | None:
    """Return a slot that no call has taken in the last minute; None if the limit is reached.

    A time far in the future comes from a clock that was set back, and does not count.
    """
    for slot in range(limit):
        row = rows.get(RateRow, stream, "", slot)
        if row is None or abs(rows.now - row.attempts) >= MINUTE:
            return slot
    return None


def find_action_slots(request: CallRequest, rows: Rows) -> tuple[tuple[str, int], ...]:
    """Return the slots that a call takes of the limits of actions per minute."""
    slots = ((stream, find_free_slot(rows, stream, limit)) for stream, limit in request.action_limits)
    return tuple((stream, slot) for stream, slot in slots if slot is not None)


def describe_too_many_actions(session: str, stream: str, limit: int) -> str:
    if stream == session_stream(session):
        return f"You may make {limit} calls per minute that change something. Wait with `yield`, then continue."
    return (
        f"{stream.removeprefix('session:')} and the agents that it asks may make {limit} calls per minute that change "
        "something. Answer without this call."
    )
