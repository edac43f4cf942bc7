"""What a person reads of triggers and tasks while `halter up` runs, and of their events later."""

import pytest

from halter.cli.inspect.show import format_event_line as tail_line
from halter.core.clock import MINUTE, SECOND
from halter.core.events import (
    AnyEvent,
    AttendingFailed,
    ContextGiven,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    SessionParked,
    TriggerEnded,
    TriggerMade,
)
from halter.core.ids import StreamId
from halter.core.ports import Stored
from halter.present.bodies import describe_event
from halter.present.event_lines import EventLines
from halter.present.events import PLAIN, URGENT_STYLE, WARNING_STYLE

NOW = 1_767_225_600 * SECOND
TRIGGER = "clerk/papers"
ITEM = "a" * 64
FINDING = b'{"title": "Late by a week", "severity": "high", "text": "See below.", "quote": "due in May"}'


def stored(event: AnyEvent, body: bytes = b"", stream: str = "session:clerk.papers-1") -> Stored:
    return Stored(StreamId(stream), 1, event.KIND, 1, NOW, 1, "k", None, b"{}", body, b"", b"", b"", event)


def render_event(
    view: EventLines, event: AnyEvent, body: bytes = b"", stream: str = "session:clerk.papers-1"
) -> tuple[str, str]:
    line = view.line(stored(event, body, stream))
    name = stream.partition(":")[2]
    return (line.text.partition(f" {name} ")[2], line.style) if line else ("", "")


TRIGGERED: list[tuple[AnyEvent, str, str]] = [
    (
        TriggerMade(trigger=TRIGGER, agent="clerk", type="watch", by="ada", digest=""),
        "is a new watch, created by ada",
        PLAIN,
    ),
    (
        TriggerMade(trigger=TRIGGER, agent="clerk", type="webhook", by="agent.yaml", digest=""),
        "is a new webhook, defined in agent.yaml",
        PLAIN,
    ),
    (TriggerEnded(trigger=TRIGGER, by="ada", reason="done"), "was ended by ada: done", PLAIN),
    (ItemSeen(trigger=TRIGGER, item=ITEM, name="may.pdf"), "finds may.pdf", PLAIN),
    (ItemSeen(trigger=TRIGGER, item=ITEM, name="may.pdf", ignored=True), "", ""),
    (
        RunStarted(trigger=TRIGGER, session="clerk.papers-1", cause="watch", item=ITEM, attempt=2),
        f"starts clerk.papers-1 for document {ITEM[:12]}, by watch, attempt 2",
        PLAIN,
    ),
    (RunStarted(trigger=TRIGGER, session="c-1", cause="person", by="ada"), "starts c-1, by ada", PLAIN),
    (
        RunSkipped(trigger=TRIGGER, why="overlap", due_at=1, count=3, sentence="The last one still runs."),
        "does not run 3 times (overlap): The last one still runs.",
        WARNING_STYLE,
    ),
    (RunQueued(trigger=TRIGGER, due_at=1), "waits for the previous run", PLAIN),
    (
        RunsDelayed(trigger=TRIGGER, why="cost_cap_reached", waiting=2, sentence="No money."),
        "keeps 2 waiting (cost_cap_reached): No money.",
        WARNING_STYLE,
    ),
    (
        ItemQuarantined(trigger=TRIGGER, item=ITEM, attempts=3, sentence="It failed."),
        f"Needs you: document {ITEM[:12]} is quarantined after 3 attempts: It failed.",
        URGENT_STYLE,
    ),
    (ItemReleased(trigger=TRIGGER, item=ITEM, by="ada"), f"document {ITEM[:12]} is retried for ada", PLAIN),
]


@pytest.mark.parametrize(("event", "text", "style"), TRIGGERED)
def test_what_a_trigger_does_is_one_line_beside_its_name(event: AnyEvent, text: str, style: str) -> None:
    assert render_event(EventLines(), event, stream=f"trigger:{TRIGGER}") == (text, style)


def test_a_document_is_called_by_the_name_under_which_it_was_found() -> None:
    view, stream = EventLines(), f"trigger:{TRIGGER}"
    render_event(view, ItemSeen(trigger=TRIGGER, item=ITEM, name="may.pdf"), stream=stream)
    event = RunStarted(trigger=TRIGGER, session="clerk.papers-1", cause="watch", item=ITEM)
    assert render_event(view, event, stream=stream)[0] == "starts clerk.papers-1 for may.pdf, by watch"
    quarantine_event = ItemQuarantined(trigger=TRIGGER, item=ITEM, attempts=0, sentence="It cannot be read.")
    assert (
        render_event(view, quarantine_event, stream=stream)[0]
        == "Needs you: may.pdf is quarantined: It cannot be read."
    )


WALKED: list[tuple[AnyEvent, bytes, str, str]] = [
    (PhaseEntered(phase="analysis", number=1), b"", "enters analysis", PLAIN),
    (ContextGiven(memories=("m",), precedents=()), b"", "gets 1 memory and 0 precedents", PLAIN),
    (DocumentRead(document="d", name="may.pdf"), b"", "reads may.pdf (d)", PLAIN),
    (JudgesChosen(wanted=2, chosen=2, items=1, usd=0), b"", "2 judges for 1 finding", PLAIN),
    (
        JudgesChosen(wanted=3, chosen=1, items=2, usd=0, sentence="Three cost too much."),
        b"",
        "1 of 3 judges for 2 findings: Three cost too much.",
        WARNING_STYLE,
    ),
    (MessageRouted(route="goal", strategy="GOAL", why="it has tools"), b"", "is routed as GOAL: it has tools", PLAIN),
    (
        FindingEmitted(finding="f1", agent="clerk", severity="high", support="supported", name="may.pdf"),
        FINDING,
        "finds (high) in may.pdf: Late by a week",
        WARNING_STYLE,
    ),
    (
        FindingEmitted(finding="f1", agent="clerk", severity="low", support="unsupported"),
        b"[",
        "finds (low, unsupported): f1",
        PLAIN,
    ),
    (FindingReviewed(finding="f1", verdict="released"), b"", "f1 is released by its review", PLAIN),
    (FindingReviewed(finding="f1", verdict="withheld"), b"", "f1 is withheld by its review", WARNING_STYLE),
    (FindingReviewed(finding="f1", verdict="not_reviewed"), b"", "f1 was not reviewed", WARNING_STYLE),
    (MemoryProposed(memory="m1", agent="clerk"), b"May is short.", "proposes the memory m1: May is short.", PLAIN),
    (
        PrecedentProposed(precedent="p", agent="c", kind="late"),
        b"By a week",
        "proposes the precedent p (late): By a week",
        PLAIN,
    ),
    (
        ProposalDecided(proposal="f1", about="finding", status="kept", by="ada"),
        b"",
        "ada accepted the finding f1",
        PLAIN,
    ),
    (
        NotificationQueued(notification="n1", channel="mail", agent="clerk"),
        b'{"subject": "Late", "text": "x"}',
        "sends n1 over mail: Late",
        PLAIN,
    ),
    (NotificationSent(notification="n1", attempts=1), b"", "sent n1", PLAIN),
    (
        NotificationFailed(notification="n1", attempts=1, error="No route.", next_at=5),
        b"",
        "could not send n1 after 1 attempt, will retry: No route.",
        WARNING_STYLE,
    ),
]


@pytest.mark.parametrize(("event", "body", "text", "style"), WALKED)
def test_where_a_task_is_and_what_it_leaves_is_one_line(event: AnyEvent, body: bytes, text: str, style: str) -> None:
    assert render_event(EventLines(), event, body) == (text, style)


def test_a_session_that_was_paused_says_when_it_ends_and_what_lets_it_go_on() -> None:
    text, style = render_event(EventLines(), SessionParked(state="PAUSED", wake_at=NOW + 5 * MINUTE))
    assert text.startswith("Needs you: paused; ends at ")
    assert text.endswith(" unless you run halter on clerk")
    assert style == URGENT_STYLE


def test_a_task_that_broke_down_names_its_agent_and_not_its_trigger() -> None:
    text, _ = render_event(EventLines(), AttendingFailed(failures=5, error="Boom", quarantined=True))
    assert "halter on clerk:" in text


def test_a_finding_is_shown_in_words_and_not_as_it_is_kept() -> None:
    event = FindingEmitted(finding="f1", agent="clerk", severity="high", support="supported")
    assert describe_event(event, FINDING) == 'Late by a week\nSee below.\n"due in May"'
    assert describe_event(event, b"[[[") == "[[["


def test_a_trigger_is_followed_under_its_own_name() -> None:
    assert " clerk/papers " in tail_line(stored(RunQueued(trigger=TRIGGER, due_at=1), stream=f"trigger:{TRIGGER}"))
