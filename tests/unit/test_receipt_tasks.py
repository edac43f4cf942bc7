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


def stored(stream: StreamId, *events: AnyEvent) -> list[Stored]:
    return [
        Stored(
            stream, number, event.KIND, 1, number, 1, f"k{number}", None, b"{}", None, None, b"", b"%d" % number, event
        )
        for number, event in enumerate(events, 1)
    ]


def made(*events: AnyEvent, inbox: tuple[AnyEvent, ...] = ()) -> Receipt:
    return make_receipt(stored(session_stream("s"), START, *events), stored(inbox_stream("s"), *inbox))


def asked(name: str, model: str) -> RequestStarted:
    return RequestStarted(request=name, model=model, purpose="turn")


def answered(name: str, usd: int, usage: Usage | None, outcome: Outcome = "ok") -> RequestSettled:
    return RequestSettled(request=name, outcome=outcome, usage=usage, charge=Charge(usd=usd))


def test_phases_are_told_with_the_times_at_which_they_were_entered_and_left() -> None:
    told = made(PhaseEntered(phase="intake", number=0), PhaseEntered(phase="analysis", number=1))
    assert [(one.phase, one.entered_at, one.left_at) for one in told.phases] == [
        ("intake", 2, 3),
        ("analysis", 3, None),
    ]


def test_the_last_phase_is_left_at_the_end_and_gone_on_with_when_the_session_is() -> None:
    entered, ended = PhaseEntered(phase="work", number=0), SessionEnded(state="COMPLETED", terminal_reason="completed")
    assert made(entered, ended).phases[-1].left_at == 3
    assert made(entered, ended, SessionResumed(by="ada")).phases[-1].left_at is None


def test_a_document_that_was_read_twice_is_told_once_with_its_digest() -> None:
    read = DocumentRead(document="d1", name="a.txt", collection="papers")
    (one, other) = made(read, DocumentRead(document="d2", name="b.txt"), read).documents
    assert (one.document, one.name, one.collection, one.times) == ("d1", "a.txt", "papers", 2)
    assert (other.document, other.times) == ("d2", 1)


def test_tokens_and_money_are_added_up_for_each_model() -> None:
    told = made(
        asked("r1", "a:large"),
        answered("r1", 30, Usage(100, 10, 60, 5)),
        asked("r2", "b:small"),
        answered("r2", 0, None, "error"),
        asked("r3", "a:large"),
        answered("r3", 12, Usage(50, 5)),
        asked("r4", "b:small"),
    )
    large, small = told.models
    assert (large.model, large.requests, large.failed, large.cost_usd) == ("a:large", 2, 0, micros_to_usd(42))
    assert (large.input_tokens, large.output_tokens, large.cache_read_tokens, large.cache_write_tokens) == (
        150,
        15,
        60,
        5,
    )
    # What is still in doubt has not failed.
    assert (small.requests, small.failed) == (2, 1)


def test_a_finding_is_told_with_what_its_reviewers_said_and_with_who_they_were() -> None:
    first = FindingEmitted(
        finding="f1", agent="clerk", severity="high", support="supported", document="d", name="a.txt"
    )
    second = FindingEmitted(finding="f2", agent="clerk", severity="low", support="unquoted")
    judged = FindingReviewed(finding="f1", verdict="withheld", judges=("a:large",))
    chosen = JudgesChosen(wanted=3, chosen=1, items=2, usd=5, cap=4, sentence="Three would cost too much.")
    told = made(first, second, chosen, judged)
    assert [(one.finding, one.review, one.judges) for one in told.findings] == [
        ("f1", "withheld", ("a:large",)),
        ("f2", None, ()),
    ]
    assert [(one.wanted, one.chosen, one.most_usd, one.cap_usd) for one in told.judges] == [
        (3, 1, micros_to_usd(5), micros_to_usd(4))
    ]


def test_what_was_given_and_what_was_proposed_are_told_apart() -> None:
    told = made(
        ContextGiven(memories=("m1",), precedents=("p1", "p2")),
        MemoryProposed(memory="m2", agent="clerk"),
        PrecedentProposed(precedent="p3", agent="clerk", kind="late"),
    )
    assert (told.memories_given, told.precedents_given) == (("m1",), ("p1", "p2"))
    assert [one.proposal for one in told.memories_proposed] == ["m2"]
    assert [(one.proposal, one.kind) for one in told.precedents_proposed] == [("p3", "late")]


def test_notifications_guardrails_and_sub_sessions_are_told() -> None:
    told = made(
        NotificationQueued(notification="n1", channel="mail", agent="clerk", about="finding"),
        GuardrailTriggered(guardrail="idle_halt", sentence="It did nothing.", until=9),
        inbox=(WakePosted(cause="child", origin="agent", sender="s.child", name="s.child"),),
    )
    assert [(one.notification, one.channel) for one in told.notifications] == [("n1", "mail")]
    assert [(one.guardrail, one.until) for one in told.guardrails] == [("idle_halt", 9)]
    assert [one.session for one in told.children] == ["s.child"]


def test_the_folder_and_both_heads_that_it_was_made_from_are_told() -> None:
    told = made(inbox=(WakePosted(cause="message", origin="person", sender="ada"),))
    assert told.folder == "f" * 64
    assert (told.hash, told.inbox_hash, told.inbox_events) == (b"1".hex(), b"1".hex(), 1)
