"""The commit of a call's intent: the write that admits or refuses the call, and what the commit says."""

from functools import partial

import msgspec

from halter.core.events import CallRefused, CallStarted, CostCapReached, DecisionAsked, HoldReleased
from halter.core.ports import Committed, Lease, Stored, Write
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_request import CallRequest, list_call_rows
from halter.guard.judge import judge_asked_call, judge_call
from halter.state.session import InFlight, track_call


class CallIntent(msgspec.Struct, gc=False):
    """The intent of a call: makes the write that admits or refuses it. Each attempt is judged at its own time."""

    lease: Lease
    request: CallRequest
    attempt: int

    def write(self, now: int, deferred: Write | None = None) -> Write:
        request = self.request
        if now != request.now:
            request = self.request = request.at(now)
        judge = judge_call if request.question_hold is None else judge_asked_call
        return Write(
            self.lease.stream,
            f"{request.call}/asked/{self.attempt}",
            partial(judge, request),
            list_call_rows(request),
            self.lease,
            first=deferred,
        )


def find_decided(committed: Committed) -> Stored:
    """Return the first event of a decision, after the release of what its question held."""
    first = committed.events[0]
    return committed.events[1] if isinstance(first.event, HoldReleased) else first


def read_call_admission(committed: Committed) -> InFlight | Answer | ApprovalRequired:
    stored = find_decided(committed)
    event = stored.event
    return track_call(event, stored) if isinstance(event, CallStarted) else read_call_refusal(committed)


def read_call_refusal(committed: Committed) -> Answer | ApprovalRequired:
    cap: CostCapReached | None = None
    for stored in committed.events:
        match stored.event:
            case CostCapReached() as reached:
                cap = reached
            case CallRefused() as refused:
                return Answer(refused.call, refused.outcome, refused.sentence, cap=cap, staged=refused.staged)
            case DecisionAsked() as question:
                return ApprovalRequired(question.subject, question.decision, tool=question.name)
            case _:
                pass
    raise AssertionError("The commit that decided a call has no refusal, question or intent.")
