"""What happened lately is told the same by every store: a fold of its rows."""

from collections.abc import Sequence

import msgspec

from halter.core.clock import DAY, HOUR
from halter.core.events import (
    AnyEvent,
    CallStarted,
    FindingEmitted,
    FindingReviewed,
    ItemQuarantined,
    ItemSeen,
    MemoryProposed,
    NotificationFailed,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    SessionStarted,
    TriggerMade,
)
from halter.core.ids import OUTBOX, SessionId, StreamId, WorkerId, session_stream, trigger_stream
from halter.core.money import Caps, Spender, make_legs, micros_to_usd
from halter.core.ports import Draft, Lease, Query, Write
from halter.core.project import rows_of_event
from halter.core.rows import NotificationRow
from halter.guard.approvals import Question, answer_decision, ask_question, list_pending_decisions
from halter.guard.halts import halt
from halter.guard.ledger import ActualResult, Ledger
from halter.journal.store import JournalStore
from halter.operations.report import (
    Report,
    ReportMessage,
    build_report,
    queue_report,
    read_night,
    read_report_rows,
    render_report_message,
)
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, ManualClock, hold

TRIGGER = "clerk/papers"


async def record_events(
    store: JournalStore, stream: StreamId, key: str, *events: AnyEvent, lease: Lease | None = None
) -> None:
    rows = [row for event in events for row in rows_of_event(event)]
    drafts: Sequence[Draft] = [Draft(event) for event in events]
    await store.commit(Write(stream, key, lambda _: drafts, rows, lease))


async def start_session(store: JournalStore, session: str, agent: str, trigger: str = "") -> Lease:
    await store.commit(
        lifecycle.start_session(
            SessionStarted(session=session, agent=agent, kind="task", started_by="ada", trigger=trigger)
        )
    )
    (lease,) = await store.claim(WorkerId(session), 1, SessionId(session))
    return lease


async def spend_amount(store: JournalStore, lease: Lease, agent: str, usd: int) -> None:
    now = await store.now()
    ledger = Ledger(store, ManualClock(now))
    held = make_legs(Caps(), Spender(lease.session, agent), now, usd=usd)
    answer = await hold(ledger, lease, CallStarted(call=f"{lease.session}.1", tool="look", legs=held), b"")
    assert isinstance(answer, HoldTaken)
    await ledger.settle(lease, answer.flight, ActualResult("ok", usd=usd))


async def a_night(store: JournalStore) -> None:
    """Let some things happen."""
    done = await start_session(store, "clerk.papers-1", "clerk", TRIGGER)
    await spend_amount(store, done, "clerk", 900_000)
    results = [
        FindingEmitted(finding="f1", agent="clerk", severity="high", support="supported"),
        FindingEmitted(finding="f2", agent="clerk", severity="high", support="unquoted"),
        FindingReviewed(finding="f1", verdict="withheld"),
        MemoryProposed(memory="m1", agent="clerk"),
    ]
    await record_events(store, session_stream(done.session), "found", *results, lease=done)
    await store.commit(lifecycle.end_session(done, "COMPLETED", "completed"))
    halted = await start_session(store, "clerk.papers-2", "clerk", TRIGGER)
    await store.commit(lifecycle.end_session(halted, "HALTED", "idle_timeout"))
    asks = await start_session(store, "desk-1", "desk")
    for name in ("d1", "d2"):
        question = Question(
            decision=name,
            about="unknown_call",
            subject="c",
            name="send",
            digest="x",
            expires_in=DAY,
            display_text="Was it?",
        )
        assert (await store.commit(ask_question(question, asks))).events
    (second,) = (
        pending_decision
        for pending_decision in await list_pending_decisions(store)
        if pending_decision.decision == "d2"
    )
    assert (await store.commit(answer_decision(second, "approve", "ada", "said"))).events
    await record_events(
        store,
        trigger_stream(TRIGGER),
        "ran",
        TriggerMade(trigger=TRIGGER, agent="clerk", type="watch", by="agent.yaml", digest="d"),
        ItemSeen(trigger=TRIGGER, item="i1", name="<b>a.txt</b>"),
        RunStarted(trigger=TRIGGER, session="clerk.papers-1", cause="watch", item="i1"),
        RunSkipped(trigger=TRIGGER, why="overlap", due_at=1, count=3),
        RunSkipped(trigger=TRIGGER, why="overlap", due_at=2),
        RunsDelayed(trigger=TRIGGER, why="cost_cap_reached", waiting=2, sentence="Its money is spent."),
        ItemQuarantined(trigger=TRIGGER, item="i1", attempts=3, sentence="It failed three times."),
    )
    await store.commit(halt("agent:desk", "ada", "halt", "lunch"))
    await store.commit(queue_report("clerk", "mail", ReportMessage("subject", "text"), "k"))
    (queued,) = await store.ask(Query("all_notifications", NotificationRow))
    failed = NotificationFailed(notification=queued.notification, attempts=5, error="No route.", next_at=None)
    await record_events(store, OUTBOX, "failed", failed)


async def build_last_report(store: JournalStore, later: int = 0) -> Report:
    """Tell of the last hour, now or later."""
    now = await store.now() + later
    return build_report(await read_report_rows(store, now - HOUR, now))


async def test_a_night_is_reported_by_agent(store: JournalStore) -> None:
    await a_night(store)
    clerk, desk = (await build_last_report(store)).agents
    assert (clerk.agent, clerk.began, clerk.runs, clerk.quarantined) == ("clerk", 2, 1, 1)
    assert clerk.ended == {"COMPLETED, completed": 1, "HALTED, idle_timeout": 1}
    assert clerk.skipped == {"overlap": 4}
    assert clerk.delayed == ("clerk/papers (cost_cap_reached): Its money is spent.",)
    assert clerk.findings == {"high": {"withheld": 1, "not reviewed": 1}}
    assert clerk.spent_usd == micros_to_usd(900_000)
    assert (desk.agent, desk.under_way) == ("desk", {"RUNNING": 1})


async def test_money_is_reported_by_purpose_and_against_caps(store: JournalStore) -> None:
    await a_night(store)
    report = await build_last_report(store)
    assert (report.spent_usd, report.spent_by_purpose_usd) == (micros_to_usd(900_000), {"turn": micros_to_usd(900_000)})
    caps = {cap.scope: (cap.spent_usd, cap.cap_usd) for cap in report.caps}
    assert caps == {"agent:clerk": (micros_to_usd(900_000), 5), "fleet": (micros_to_usd(900_000), 20)}


async def test_what_was_decided_and_what_waits_are_separate(store: JournalStore) -> None:
    await a_night(store)
    report = await build_last_report(store)
    assert [(decision_row.decision, decision_row.by) for decision_row in report.decided] == [("d2", "ada")]
    assert [decision_row.decision for decision_row in report.waiting] == ["d1"]


RETRY = "halter triggers retry clerk/papers i1"


async def test_all_that_needs_somebody_is_named_with_what_to_do(store: JournalStore) -> None:
    await a_night(store)
    report = await build_last_report(store)
    assert report.needs_you == (
        "desk started to send, and the outcome is unknown. halter approve d1",
        "clerk/papers quarantined a document: <b>a.txt</b>. It failed three times. " + RETRY,
        "agent:desk was halted by ada; nothing runs there. lunch halter resume agent:desk",
        "clerk could not send a notification over mail: No route.",
        "1 finding waits to be accepted or dismissed. halter findings",
        "1 memory waits to be accepted or dismissed. halter proposals",
    )
    assert report.ended_badly == ("clerk.papers-2: HALTED, idle_timeout",)


async def test_what_happened_before_is_not_reported_again(store: JournalStore) -> None:
    await a_night(store)
    report = await build_last_report(store, 2 * HOUR)
    assert (report.spent_usd, report.decided, report.ended_badly) == (0, (), ())
    assert [agent.agent for agent in report.agents] == []
    # What waits still waits.
    assert len(report.needs_you) >= 3


async def test_an_empty_store_has_nothing_to_tell(store: JournalStore) -> None:
    report = await build_last_report(store)
    assert (report.agents, report.needs_you, report.spent_usd) == ((), (), 0)
    assert render_report_message(report).text.startswith("Nothing needs you.")


async def test_a_report_that_is_sent_waits_in_the_outbox(store: JournalStore) -> None:
    await a_night(store)
    message = render_report_message(await build_last_report(store))
    await store.commit(queue_report("clerk", "chat", message, "k2"))
    rows = await store.ask(Query("notifications_due", _Due, {"now": await store.now(), "limit": 10}))
    (due,) = (row for row in rows if row.channel == "chat")
    assert msgspec.json.decode(due.body or b"")["text"] == message.text
    assert (due.agent, due.about, due.stream) == ("clerk", "report", OUTBOX)


class _Due(NotificationRow, frozen=True, kw_only=True):
    body: bytes | None


async def test_a_night_is_summed_up_by_what_happened_alike(store: JournalStore) -> None:
    await a_night(store)
    for name in ("clerk.papers-8", "clerk.papers-9"):
        await store.commit(lifecycle.end_session(await start_session(store, name, "clerk"), "COMPLETED", "completed"))
    night = await read_night(store, since=1, limit=5)
    ends = {(row.agent, row.state, row.terminal_reason, row.count, row.session) for row in night.ends}
    assert ends == {
        ("clerk", "COMPLETED", "completed", 3, "clerk.papers-9"),
        ("clerk", "HALTED", "idle_timeout", 1, "clerk.papers-2"),
    }
    (answer,) = night.answers
    assert (answer.by, answer.agent, answer.name, answer.denied, answer.count, answer.session) == (
        "ada", "desk", "send", 0, 1, "desk-1",
    )  # fmt: skip
    assert [row.scope for row in night.halts] == ["agent:desk"]
    assert ([row.item for row in night.quarantined_items], len(night.undelivered)) == (["i1"], 1)
    night_summary = await read_night(store, since=await store.now() + HOUR, limit=5)
    assert (night_summary.ends, night_summary.answers, night_summary.quarantined_items) == ([], [], [])
    assert [row.scope for row in night_summary.halts] == ["agent:desk"]
