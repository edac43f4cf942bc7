"""The verdict about a call, and the events that record it."""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.core.events import CallRefused, CallStarted, CostCapReached, DecisionAsked, HoldMade
from halter.core.money import CapReached, Leg
from halter.core.ports import Draft
from halter.core.vocabulary import Outcome
from halter.guard.call_request import CallRequest, RequiredApproval


class GivenApproval(msgspec.Struct, frozen=True, gc=False):
    """The approval of a call: the decision that it uses up, if any, and who approved it."""

    decision: str = ""
    decided_by: str = ""


NOT_NEEDED: Final = GivenApproval()


class Allow(msgspec.Struct, frozen=True, gc=False):
    """The call may run. Its intent holds `legs`, and takes `action_slots` of the limits of actions per minute.

    `waived` are the refusals that observe mode records in place of enforcing them.
    """

    legs: tuple[Leg, ...] = ()
    approval: GivenApproval = NOT_NEEDED
    waived: tuple[Outcome, ...] = ()
    action_slots: tuple[tuple[str, int], ...] = ()


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A person must decide about the call. Until then, the question holds `legs`."""

    approval: RequiredApproval
    legs: tuple[Leg, ...] = ()


class Deny(msgspec.Struct, frozen=True, gc=False):
    """The call is refused: by the person `decided_by`, by a `cap`, or by another check."""

    outcome: Outcome
    sentence: str
    decision: str = ""
    decided_by: str = ""
    cap: CapReached | None = None


class Wait(msgspec.Struct, frozen=True, gc=False):
    """Nothing is written yet: a decision is pending, or other holds must settle first."""


WAIT: Final = Wait()

CallVerdict = Allow | Ask | Deny | Wait


def draft_verdict(request: CallRequest, verdict: CallVerdict, now: int) -> Sequence[Draft]:
    """Draft the events of a verdict; none if the call must wait."""
    match verdict:
        case Allow():
            arguments = None if request.blob else request.arguments
            return [Draft(_make_intent(request, verdict), arguments, request.blob)]
        case Ask(approval, legs):
            question = Draft(_make_question(request, approval, now), approval.display_body)
            if not legs:
                return [question]
            hold = HoldMade(hold=approval.decision, name=request.tool, purpose=request.purpose, legs=legs)
            return [question, Draft(hold)]
        case Deny(cap=cap):
            arguments = None if request.blob else request.arguments
            refusal = Draft(_make_refusal(request, verdict), arguments, request.blob)
            if cap is None:
                return [refusal]
            return [Draft(CostCapReached.refusing(request.call, request.tool, cap)), refusal]
        case Wait():
            return []


def _make_intent(request: CallRequest, verdict: Allow) -> CallStarted:
    intent = CallStarted(
        call=request.call,
        tool=request.tool,
        purpose=request.purpose,
        legs=verdict.legs,
        level=request.level,
        effect=request.effect,
        idempotent=request.idempotent,
        egress=request.egress,
        risk=request.risk,
        rated=request.rate.slice_at(request.now) if request.rate else 0,
        audit=request.audit,
        parallel_group=request.parallel_group,
        phase=request.phase,
        writes=request.writes,
    )
    if verdict.action_slots:
        intent = msgspec.structs.replace(intent, action_slots=verdict.action_slots)
    if request.approval is None and not verdict.waived and not request.flaws:
        return intent
    # Set separately: a Python call with more than fifteen keywords is four times as slow.
    return msgspec.structs.replace(
        intent,
        digest=request.approval.digest if request.approval else "",
        decision=verdict.approval.decision,
        decided_by=verdict.approval.decided_by,
        observed=verdict.waived,
        flaws=request.flaws,
    )


def _make_question(request: CallRequest, approval: RequiredApproval, now: int) -> DecisionAsked:
    return DecisionAsked(
        decision=approval.decision,
        about="approval",
        subject=request.call,
        name=request.tool,
        digest=approval.digest,
        **approval.terms.times_at(now),
        level=request.level,
        risk=request.risk,
        reasons=approval.reasons,
        same=approval.arguments_digest,
        keys=approval.argument_keys,
        flaws=request.flaws,
        approvers=approval.approvers,
        mode=approval.mode,
        always=approval.always,
    )


def _make_refusal(request: CallRequest, verdict: Deny) -> CallRefused:
    return CallRefused(
        call=request.call,
        tool=request.tool,
        outcome=verdict.outcome,
        sentence=verdict.sentence,
        level=request.level,
        risk=request.risk,
        decision=verdict.decision,
        decided_by=verdict.decided_by,
        phase=request.phase,
        flaws=request.flaws,
        staged=request.is_staged and verdict.outcome == "untrusted",
    )
