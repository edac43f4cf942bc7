"""A receipt is a pure function of a session's events: what it did, what stopped it, who decided, what nobody knows."""

from typing import Any

import pytest

from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionStarted,
    Unknown,
    WakePosted,
)
from halter.core.ids import StreamId, inbox_stream, session_stream
from halter.core.money import Charge, micros_to_usd
from halter.core.ports import Stored
from halter.core.vocabulary import Outcome
from halter.state.receipt import Receipt, brake_of_outcome, make_receipt

START = SessionStarted(session="s", agent="clerk", kind="task", started_by="ada", origin="agent", trusted=False)
ASKED = DecisionAsked(decision="d", about="approval", subject="c1", name="send", digest="x", expires_at=9)


def store_events(*events: AnyEvent | Unknown, stream: StreamId | None = None) -> list[Stored]:
    return [
        Stored(
            stream=stream or session_stream("s"),
            seq=number,
            kind="kind",
            version=1,
            at=number,
            generation=1,
            key=f"key{number}",
            blob=None,
            facts=b"{}",
            body=None,
            salt=None,
            digest=b"",
            hash=bytes([number]),
            event=event,
        )
        for number, event in enumerate(events, 1)
    ]


def make_events_receipt(*events: AnyEvent | Unknown, inbox: tuple[AnyEvent, ...] = ()) -> Receipt:
    return make_receipt(store_events(START, *events), store_events(*inbox, stream=inbox_stream("s")))


def call(name: str = "c1", **facts: Any) -> CallStarted:
    return CallStarted(call=name, tool="send", **facts)


def refusal(outcome: Outcome, **facts: Any) -> CallRefused:
    return CallRefused(call="c1", tool="send", outcome=outcome, sentence="Why not.", **facts)


def test_the_receipt_names_who_started_a_session_and_whether_that_is_trusted() -> None:
    receipt = make_events_receipt()
    assert (receipt.started_by, receipt.origin, receipt.trusted) == ("ada", "agent", False)


def test_the_receipt_of_a_call_contains_all_that_was_known_of_it() -> None:
    event = call(
        level="RESTRICTED",
        risk="HIGH",
        effect="read",
        egress=True,
        phase="work",
        parallel_group="g",
        observed=("disabled",),
    )
    (line,) = make_events_receipt(event, CallSettled(call="c1", outcome="error", duration_ms=5, error="Oops: no")).calls
    assert (line.level, line.risk, line.effect, line.egress) == ("RESTRICTED", "HIGH", "read", True)
    assert (line.phase, line.parallel_group, line.observed) == ("work", "g", ("disabled",))
    assert (line.outcome, line.duration_ms, line.error) == ("error", 5, "Oops: no")


def test_every_check_counts_what_it_allowed_separately() -> None:
    request = RequestStarted(request="r", model="m", purpose="simulation")
    receipt = make_events_receipt(call("c1"), call("c2", observed=("rate_limited",)), request)
    assert receipt.passed == {"halt": 3, "grants": 2, "budget": 3}
    assert make_events_receipt().passed == {}


@pytest.mark.parametrize(
    ("outcome", "brake"),
    [
        ("external_halt", "halt"),
        ("cost_cap_reached", "budget"),
        ("tool_not_granted", "grants"),
        ("approval_denied", "grants"),
    ],
)
def test_a_refused_call_is_a_brake_with_its_sentence(outcome: Outcome, brake: str) -> None:
    (tripped,) = make_events_receipt(refusal(outcome, level="PRIVILEGED", phase="work")).brakes
    assert (tripped.brake, tripped.code, tripped.sentence) == (brake, outcome, "Why not.")
    assert (tripped.level, tripped.phase, tripped.refused) == ("PRIVILEGED", "work", "c1")
    assert brake_of_outcome(outcome) == brake


def test_a_cap_that_refused_something_is_listed_once_with_its_scope_and_its_sentence() -> None:
    cap = CostCapReached(refused="c1", name="send", scope="fleet", window="w", unit="usd", cap=1, spent=1, amount=1)
    (tripped,) = make_events_receipt(cap, refusal("cost_cap_reached")).brakes
    assert (tripped.scope, tripped.window, tripped.sentence) == ("fleet", "w", "Why not.")
    request = RequestRefused(request="c1", model="m", purpose="turn", outcome="cost_cap_reached", sentence="No money.")
    assert [one.sentence for one in make_events_receipt(cap, request, cap, request).brakes] == [
        "No money.",
        "No money.",
    ]
    (alone,) = make_events_receipt(cap).brakes
    assert (alone.brake, alone.sentence) == ("budget", "")


def test_a_decision_is_listed_with_who_made_it_and_whether_it_was_used() -> None:
    answer = DecisionMade(decision="d", verdict="edit", by="ada", digest="x", reason="better so")
    (told,) = make_events_receipt(ASKED, call(decision="d", decided_by="ada"), inbox=(answer,)).decisions
    assert (told.verdict, told.by, told.used, told.reason, told.decided_at) == ("edit", "ada", True, "better so", 1)


def test_without_the_inbox_a_receipt_claims_no_answer_that_it_does_not_know() -> None:
    (used,) = make_events_receipt(ASKED, call(decision="d", decided_by="ada")).decisions
    assert (used.verdict, used.by, used.used) == ("approve", "ada", True)
    (refused,) = make_events_receipt(ASKED, refusal("approval_denied", decision="d", decided_by="ada")).decisions
    assert (refused.verdict, refused.by, refused.used) == ("", "ada", False)
    (unanswered,) = make_events_receipt(ASKED, refusal("approval_expired", decision="d")).decisions
    assert (unanswered.verdict, unanswered.by) == ("", "")


def test_rules_that_answered_are_named_once() -> None:
    by = "ada, always, by rule r1"
    assert make_events_receipt(
        call("c1", decided_by=by), call("c2", decided_by=by), call("c3", decided_by="ada")
    ).rules == ("r1",)


def test_the_cost_of_simulations_is_separate_from_turns() -> None:
    receipt = make_events_receipt(
        RequestStarted(request="r1", model="m", purpose="simulation"),
        RequestSettled(request="r1", outcome="ok", charge=Charge(usd=3)),
        call(),
        CallSettled(call="c1", outcome="ok", charge=Charge(usd=4)),
    )
    assert (receipt.spent_by_purpose_usd, receipt.cost_usd) == (
        {"turn": micros_to_usd(4), "simulation": micros_to_usd(3)},
        micros_to_usd(7),
    )


def test_what_stays_unknown_is_separate_from_what_is_still_in_doubt() -> None:
    receipt = make_events_receipt(
        call("c1"), call("c2"), CallSettled(call="c1", outcome="unknown"), Unknown("dream", 1, b"{}")
    )
    assert (receipt.unknown_calls, receipt.in_doubt, receipt.unknown) == (("c1",), ("c2",), 1)


def test_messages_keep_their_origin_and_trust() -> None:
    wake = WakePosted(cause="message", origin="document", sender="mail", trusted=False)
    (inbound_line,) = make_events_receipt(inbox=(wake,)).heard
    assert (inbound_line.cause, inbound_line.origin, inbound_line.sender, inbound_line.trusted) == (
        "message",
        "document",
        "mail",
        False,
    )
