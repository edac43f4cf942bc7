"""What a receipt says of a task: where it walked, what it read, found and was given, and what it leaves behind."""

from halter.core.events import (
    AnyEvent,
    ContextGiven,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    GuardrailTriggered,
    JudgesChosen,
    MemoryProposed,
    NotificationQueued,
    PhaseEntered,
    PrecedentProposed,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionResumed,
    SessionStarted,
    WakePosted,
)
from halter.core.ids import StreamId, inbox_stream, session_stream
from halter.core.money import Charge, micros_to_usd
from halter.core.ports import Stored
from halter.core.usage import Usage
from halter.core.vocabulary import Outcome
from halter.state.receipt import Receipt, make_receipt

START = SessionStarted(session="s", agent="clerk", kind="task", started_by="trigger:clerk/in", folder="f" * 64)


def store_events(stream: StreamId, *events: AnyEvent) -> list[Stored]:
    return [
        Stored(
            stream, number, event.KIND, 1, number, 1, f"k{number}", None, b"{}", None, None, b"", b"%d" % number, event
        )
        for number, event in enumerate(events, 1)
    ]


def make_events_receipt(*events: AnyEvent, inbox: tuple[AnyEvent, ...] = ()) -> Receipt:
    return make_receipt(store_events(session_stream("s"), START, *events), store_events(inbox_stream("s"), *inbox))


def start_request(name: str, model: str) -> RequestStarted:
    return RequestStarted(request=name, model=model, purpose="turn")


def settle_request(name: str, usd: int, usage: Usage | None, outcome: Outcome = "ok") -> RequestSettled:
    return RequestSettled(request=name, outcome=outcome, usage=usage, charge=Charge(usd=usd))


def test_phases_are_listed_with_the_times_at_which_they_were_entered_and_left() -> None:
    receipt = make_events_receipt(PhaseEntered(phase="intake", number=0), PhaseEntered(phase="analysis", number=1))
    assert [(phase_line.phase, phase_line.entered_at, phase_line.left_at) for phase_line in receipt.phases] == [
        ("intake", 2, 3),
        ("analysis", 3, None),
    ]


def test_the_last_phase_is_left_at_the_end_and_gone_on_with_when_the_session_is() -> None:
    entered, event = PhaseEntered(phase="work", number=0), SessionEnded(state="COMPLETED", terminal_reason="completed")
    assert make_events_receipt(entered, event).phases[-1].left_at == 3
    assert make_events_receipt(entered, event, SessionResumed(by="ada")).phases[-1].left_at is None


def test_a_document_that_was_read_twice_is_listed_once_with_its_digest() -> None:
    read = DocumentRead(document="d1", name="a.txt", collection="papers")
    (document_line, other) = make_events_receipt(read, DocumentRead(document="d2", name="b.txt"), read).documents
    assert (document_line.document, document_line.name, document_line.collection, document_line.times) == (
        "d1",
        "a.txt",
        "papers",
        2,
    )
    assert (other.document, other.times) == ("d2", 1)


def test_tokens_and_money_are_added_up_for_each_model() -> None:
    receipt = make_events_receipt(
        start_request("r1", "a:large"),
        settle_request("r1", 30, Usage(100, 10, 60, 5)),
        start_request("r2", "b:small"),
        settle_request("r2", 0, None, "error"),
        start_request("r3", "a:large"),
        settle_request("r3", 12, Usage(50, 5)),
        start_request("r4", "b:small"),
    )
    large, small = receipt.models
    assert (large.model, large.requests, large.failed, large.cost_usd) == ("a:large", 2, 0, micros_to_usd(42))
    assert (large.input_tokens, large.output_tokens, large.cache_read_tokens, large.cache_write_tokens) == (
        150,
        15,
        60,
        5,
    )
    # What is still in doubt has not failed.
    assert (small.requests, small.failed) == (2, 1)


def test_a_finding_is_listed_with_its_reviewers_and_their_verdicts() -> None:
    first = FindingEmitted(
        finding="f1", agent="clerk", severity="high", support="supported", document="d", name="a.txt"
    )
    second = FindingEmitted(finding="f2", agent="clerk", severity="low", support="unquoted")
    judged = FindingReviewed(finding="f1", verdict="withheld", judges=("a:large",))
    chosen = JudgesChosen(wanted=3, chosen=1, items=2, usd=5, cap=4, sentence="Three would cost too much.")
    receipt = make_events_receipt(first, second, chosen, judged)
    assert [(finding_line.finding, finding_line.review, finding_line.judges) for finding_line in receipt.findings] == [
        ("f1", "withheld", ("a:large",)),
        ("f2", None, ()),
    ]
    assert [
        (finding_line.wanted, finding_line.chosen, finding_line.most_usd, finding_line.cap_usd)
        for finding_line in receipt.judges
    ] == [(3, 1, micros_to_usd(5), micros_to_usd(4))]


def test_what_was_given_and_what_was_proposed_are_separate() -> None:
    receipt = make_events_receipt(
        ContextGiven(memories=("m1",), precedents=("p1", "p2")),
        MemoryProposed(memory="m2", agent="clerk"),
        PrecedentProposed(precedent="p3", agent="clerk", kind="late"),
    )
    assert (receipt.memories_given, receipt.precedents_given) == (("m1",), ("p1", "p2"))
    assert [proposal_line.proposal for proposal_line in receipt.memories_proposed] == ["m2"]
    assert [(proposal_line.proposal, proposal_line.kind) for proposal_line in receipt.precedents_proposed] == [
        ("p3", "late")
    ]


def test_notifications_guardrails_and_sub_sessions_are_listed() -> None:
    receipt = make_events_receipt(
        NotificationQueued(notification="n1", channel="mail", agent="clerk", about="finding"),
        GuardrailTriggered(guardrail="idle_halt", sentence="It did nothing.", until=9),
        inbox=(WakePosted(cause="child", origin="agent", sender="s.child", name="s.child"),),
    )
    assert [
        (notification_line.notification, notification_line.channel) for notification_line in receipt.notifications
    ] == [("n1", "mail")]
    assert [(notification_line.guardrail, notification_line.until) for notification_line in receipt.guardrails] == [
        ("idle_halt", 9)
    ]
    assert [notification_line.session for notification_line in receipt.children] == ["s.child"]


def test_the_receipt_names_the_folder_and_both_heads_that_it_was_made_from() -> None:
    receipt = make_events_receipt(inbox=(WakePosted(cause="message", origin="person", sender="ada"),))
    assert receipt.folder == "f" * 64
    assert (receipt.hash, receipt.inbox_hash, receipt.inbox_events) == (b"1".hex(), b"1".hex(), 1)
