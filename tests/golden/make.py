"""Writes the golden journal of a version: `python -m tests.golden.make 0.7.0`.

It is run once, when a version is finished, and its files are committed. They are never written again: whatever
comes later must be able to read them.
"""

import asyncio
import base64
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from halter.core.clock import DAY, SECOND
from halter.core.events import (
    SESSION_FORMAT,
    AnyEvent,
    AttendingFailed,
    CallRefused,
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    DecisionAsked,
    DecisionMade,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HotStateSeen,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageAdded,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RuleEnded,
    RuleMade,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    SensorChanged,
    SessionParked,
    SessionStarted,
    SessionWoken,
    ToolPinned,
    TriggerEnded,
    TriggerMade,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.core.events.effects import UnheldCost
from halter.core.events.sessions import YieldRequest
from halter.core.ids import FLEET, OUTBOX, SessionId, StreamId, WorkerId, inbox_stream, session_stream, trigger_stream
from halter.core.messages import Reply, Text, ToolCall, make_user_message
from halter.core.money import Caps, Charge, Leg, Spender, list_accounts
from halter.core.ports import Draft, Stored, Write, read_body
from halter.core.project import rows_of_event
from halter.core.project.holds import rows_of_hold
from halter.core.rows import AuditRow, DecisionRow, HaltRow, OutputRow, PinRow, RateRow, RuleRow
from halter.core.usage import Usage
from halter.core.vocabulary import RowKey
from halter.guard.halts import switch_off, switch_on
from halter.journal.rebuild import compute_projections
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.loop.history import SessionHistory
from halter.runtime.proof import encode_receipt
from halter.state import lifecycle
from halter.state.session import replay
from halter.testing.fakes import Crash, Crashed, CrashingStore, ManualClock, SeededIds, make_seeded_salts
from halter_drills.workload import AckedEvent, Workload, plan
from tests.golden.midway import at_rest, left_midway

START = 1_767_225_600 * SECOND
BLOB_BYTES = 500
DEATHS = {"finished": None, "in-doubt": 6, "delegating": 71}
"""At which commit the owner of each session dies: never, with two calls in flight, with a sub-session at work."""


async def fill(path: Path) -> JournalStore:
    """Run the sessions of the drills with fixed times, ids and salts; some of their owners die."""
    clock = ManualClock(START)
    engine = SqliteEngine(str(path), now=clock.now, new_id=SeededIds("golden", clock.now).make, lease=DAY)
    store = JournalStore(engine, inline=True, salt=make_seeded_salts("golden"))

    def tick(_: Sequence[AckedEvent]) -> None:
        clock.advance(SECOND)

    for session, commit in DEATHS.items():
        mortal = CrashingStore(store, Crash(commit, "after") if commit else None)
        try:
            await Workload(mortal, clock, f"worker of {session}", session, tick).run(plan(session, BLOB_BYTES))
        except Crashed:
            clock.advance(SECOND)
    await run_guarded_session(store, clock)
    await run_chat(store, clock)
    await run_unattended(store, clock)
    await run_triggers(store, clock)
    await left_midway(store, clock)
    return store


async def run_guarded_session(store: JournalStore, clock: ManualClock) -> None:
    """Let the guard, and people through it, say everything that they can say."""
    session, stream = SessionId("guarded"), session_stream("guarded")
    event = SessionStarted(session=session, agent="watcher", kind="task", started_by="ada", origin="person")
    await store.commit(lifecycle.start_session(event, b"the task"))
    (lease,) = await store.claim(WorkerId("worker of guarded"), 1, session)
    spender, now = Spender(session, "watcher"), clock.now()
    bare = list_accounts(Caps(), spender, now)
    for stream_of, happened in (
        (
            stream,
            DecisionAsked(decision="d", about="approval", subject="c1", name="wipe", digest="x", expires_at=now + DAY),
        ),
        (inbox_stream(session), DecisionMade(decision="d", verdict="approve", by="ada", digest="x")),
        (
            stream,
            CallStarted(call="c1", tool="wipe", decision="d", decided_by="ada", rated=7, audit="full", phase="work"),
        ),
        (
            stream,
            CallSettled(
                call="c1", outcome="ok", audited=True, charge=Charge(usd=5), unheld=UnheldCost("wipe", "turn", bare)
            ),
        ),
        (stream, CallRefused(call="c2", tool="wipe", outcome="tool_not_granted", sentence="Not in this phase.")),
        (stream, RequestRefused(request="r1", model="m", purpose="turn", outcome="disabled", sentence="Not allowed.")),
        (FLEET, HaltRequested(scope="agent:watcher", by="ada", reason="lunch")),
        (FLEET, HaltLifted(scope="agent:watcher", by="ada", ramp=SECOND)),
        (
            FLEET,
            RuleMade(
                rule="r", tool="wipe", scope="fleet", owner="", matcher="{}", keys=("path",), by="ada", expires_at=1
            ),
        ),
        (FLEET, RuleEnded(rule="r", by="ada")),
        (FLEET, ToolPinned(agent="watcher", tool="web__get", digest="x", by="ada")),
    ):
        clock.advance(SECOND)
        owner = lease if stream_of == stream else None
        drafts = [Draft(happened, b"what was said")]
        write = Write(stream_of, happened.KIND, lambda _, drafts=drafts: drafts, rows_of_guard(bare), owner)
        await store.commit(write)
    await store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))


async def run_chat(store: JournalStore, clock: ManualClock) -> None:
    """Let a session have turns: with calls, words of the runtime, a cut, an end and another beginning."""
    session, stream = SessionId("talking"), session_stream("talking")
    event = SessionStarted(session=session, agent="desk", kind="chat", started_by="ada")
    await store.commit(lifecycle.start_session(event, b"Look at the door."))
    (lease,) = await store.claim(WorkerId("worker of talking"), 1, session)
    for number, (event, body) in enumerate(TURNS):
        clock.advance(SECOND)
        draft = Draft(event, body if body is None or isinstance(body, bytes) else msgspec.json.encode(body))
        await store.commit(Write(stream, f"{number}", lambda _, draft=draft: [draft], (), lease))
    await store.commit(lifecycle.end_session(lease, "HALTED", "external_halt"))
    clock.advance(SECOND)
    await store.commit(lifecycle.reopen_session(session, "reopened", "ada"))


async def run_unattended(store: JournalStore, clock: ManualClock) -> None:
    """Let an agent run by itself: with alerts, a skip, guardrails, a sensor that fails, and a breakdown.

    It is left asleep, with an alert that no turn has shown.
    """
    session, stream = SessionId("watch-1"), session_stream("watch-1")
    await store.commit(switch_on("watch", "ada", "on"))
    event = SessionStarted(session=session, agent="watch", kind="autonomous", started_by="ada")
    await store.commit(lifecycle.start_session(event))
    (lease,) = await store.claim(WorkerId("worker of watch-1"), 1, session)
    for number, (event, body) in enumerate(PACED):
        clock.advance(SECOND)
        if isinstance(event, WakePosted):
            await store.commit(lifecycle.post_wake(session, f"{number}", event, body))
            continue
        outcome = event if not isinstance(event, SessionParked) else at_rest(event, clock.now())
        draft = Draft(outcome, body if body is None or isinstance(body, bytes) else msgspec.json.encode(body))
        await store.commit(Write(stream, f"{number}", lambda _, draft=draft: [draft], (), lease))
    clock.advance(SECOND)
    await store.commit(switch_off("watch", [], "ada", "off", "lunch"))


async def run_triggers(store: JournalStore, clock: ManualClock) -> None:
    """Let triggers start sessions, skip and give up, and let a session leave everything behind that it can."""
    session, trigger = SessionId("desk.inbox-1"), "desk/inbox"
    event = SessionStarted(
        session=session, agent="desk", kind="task", started_by="trigger:desk/inbox", origin="config", trigger=trigger,
        folder="x",
    )  # fmt: skip
    for number, happened in enumerate(TRIGGERED):
        clock.advance(SECOND)
        rows, draft = rows_of_event(happened), Draft(happened, b"{}" if isinstance(happened, TriggerMade) else None)
        await store.commit(Write(trigger_stream(trigger), f"t{number}", lambda _, draft=draft: [draft], rows))
    await store.commit(
        lifecycle.start_session(event, b"Review it.", None, [Draft(PhaseEntered(phase="intake", number=0))])
    )
    (lease,) = await store.claim(WorkerId("worker of desk.inbox-1"), 1, session)
    for number, (left, body) in enumerate(LEFT):
        clock.advance(SECOND)
        draft, rows = Draft(left, body), [*rows_of_event(left), (OutputRow, "desk", "d9")]
        await store.commit(Write(session_stream(session), f"l{number}", lambda _, draft=draft: [draft], rows, lease))
    await store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))
    for number, (stream, said_later) in enumerate(LATER):
        clock.advance(SECOND)
        draft, rows = Draft(said_later), rows_of_event(said_later)
        await store.commit(Write(stream, f"later{number}", lambda _, draft=draft: [draft], rows))


TRIGGERED: list[AnyEvent] = [
    TriggerMade(trigger="desk/inbox", agent="desk", type="watch", by="agent.yaml", digest="x"),
    ItemSeen(trigger="desk/inbox", item="a1", name="a.md", size=7),
    ItemSeen(trigger="desk/inbox", item="b1", name="b.md", ignored=True),
    RunStarted(trigger="desk/inbox", session="desk.inbox-1", cause="watch", item="a1"),
    RunSkipped(trigger="desk/inbox", why="overlap", due_at=START, count=2, sentence="Still at work."),
    RunQueued(trigger="desk/inbox", due_at=START + SECOND),
    RunsDelayed(trigger="desk/inbox", why="cost_cap_reached", waiting=3, sentence="Spent.", until=START + DAY),
    ItemQuarantined(trigger="desk/inbox", item="a1", attempts=3, sentence="It failed three times."),
    ItemReleased(trigger="desk/inbox", item="a1", by="ada"),
    TriggerEnded(trigger="desk/inbox", by="ada", reason="enough"),
]
LEFT: list[tuple[AnyEvent, bytes | None]] = [
    (ContextGiven(memories=("m-0",), precedents=("p-0",)), b"What people want you to remember:"),
    (DocumentRead(document="a1", name="a.md", collection="inbox"), None),
    (FindingEmitted(finding="f-1", agent="desk", severity="high", support="supported", document="a1", name="a.md"),
     b'{"title":"No cap","severity":"high"}'),
    (PhaseEntered(phase="ethics_review", number=3, turn=1), None),
    (JudgesChosen(wanted=3, chosen=1, items=1, usd=5, cap=10, sentence="One judges."), None),
    (FindingReviewed(finding="f-1", verdict="released", judges=("m",)), b"m: released"),
    (MemoryProposed(memory="m-1", agent="desk"), b"The office is closed on mondays."),
    (PrecedentProposed(precedent="p-1", agent="desk", kind="liability"), b"No cap was agreed."),
    (PrecedentProposed(precedent="p-1", agent="desk", kind="liability"), b"No cap was agreed, again."),
    (NotificationQueued(notification="n-1", channel="in_app", agent="desk", about="session:desk.inbox-1"),
     b'{"subject":"No cap"}'),
    (RequestStarted(request="r9", model="m", purpose="judge", anonymized={"email": 2}), None),
    (RequestSettled(request="r9", outcome="ok", usage=Usage(10, 2)), None),
    (CallStarted(call="c9", tool="write_file", writes=("d9",)), b"{}"),
    (CallSettled(call="c9", outcome="ok"), b"done"),
    (GuardrailTriggered(guardrail="idle_halt", sentence="It did nothing for 5m."), None),
]  # fmt: skip
LATER: list[tuple[StreamId, AnyEvent]] = [
    (OUTBOX, NotificationFailed(notification="n-1", attempts=1, error="no", next_at=START + DAY)),
    (OUTBOX, NotificationSent(notification="n-1", attempts=2)),
    (FLEET, ProposalDecided(proposal="m-1", about="memory", status="kept", by="ada")),
    (FLEET, ProposalDecided(proposal="p-1", about="precedent", status="dismissed", by="ada")),
    (FLEET, ProposalDecided(proposal="f-1", about="finding", status="kept", by="ada")),
    (FLEET, MessageRouted(route="strategy", strategy="GOAL", why="The agent has tools.")),
]


LOOK = ToolCall("m1", "look", '{"at":"door"}')
ASSISTANT = Reply((Text("Let me see.", "model", trusted=False), LOOK), "calls", Usage(100, 20))
TURNS: list[tuple[AnyEvent, Any]] = [
    (TurnStarted(turn=1), make_user_message("Look at the door.")),
    (RequestStarted(request="talking.t1_0/0", model="m", purpose="turn"), {"volatile": "Left to spend: $0.90."}),
    (RequestSettled(request="talking.t1_0/0", outcome="error", error="Overloaded: no", may_retry=True), None),
    (RequestStarted(request="talking.t1_0/1", model="m", purpose="turn"), {}),
    (RequestSettled(request="talking.t1_0/1", outcome="ok", usage=Usage(100, 20)), ASSISTANT),
    (CallStarted(call="talking.c1_0_0", tool="look"), b'{"at":"door"}'),
    (CallSettled(call="talking.c1_0_0", outcome="ok"), b"nothing there"),
    (MessageAdded(turn=1, reason="near_budget"), b"The budget is almost used up."),
    (RequestStarted(request="talking.t1_1/0", model="m", purpose="turn"), {}),
    (RequestSettled(request="talking.t1_1/0", outcome="ok"), Reply((Text("Nothing.", "model", trusted=False),))),
    (TurnEnded(turn=1, why="ended"), None),
    (TurnStarted(turn=2), make_user_message("And the window?")),
    (ContextCut(turn=2, through=4, pinned=(0,), strategy="compact"), Text("[3 are left out.]", "config")),
    (RequestRefused(request="talking.t2_0/0", model="m", purpose="turn", outcome="external_halt", sentence="No."), {}),
    (TurnEnded(turn=2, why="external_halt", sentence="No."), None),
]
"""What happens in the turns of a session, each with what is said."""


SLEEPS = YieldRequest("sleep", 300 * SECOND, ("jump",), "nothing to do")
SLEEP = ToolCall("m2", "yield", '{"mode":"sleep","sleep":300,"wake_early_if":["jump"]}')
YIELDS = Reply((SLEEP,), "calls", Usage(100, 20))
JUMP = WakePosted(cause="signal", origin="sensor", sender="ticker", name="jump", notifies=True)
RESTS = SessionParked(state="SLEEPING", inbox_seen=1, wake_at=300 * SECOND, wake_on=("jump",), resident=True)
PACED: list[tuple[AnyEvent, Any]] = [
    (JUMP, b"The signal `jump` fired."),
    (TurnStarted(turn=1, inbox_seen=1), make_user_message("It is your turn.", "config", reason="observe")),
    (HotStateSeen(turn=1, digest="x"), {"price": 100}),
    (RequestStarted(request="watch-1.t1_0/0", model="m", purpose="turn"), {"volatile": "price: 100 (0s ago)"}),
    (RequestSettled(request="watch-1.t1_0/0", outcome="ok", usage=Usage(100, 20)), YIELDS),
    (CallStarted(call="watch-1.c1_0_0", tool="yield"), b"{}"),
    (CallSettled(call="watch-1.c1_0_0", outcome="ok"), b"Your turn ends here."),
    (TurnEnded(turn=1, why="yielded", yielded=SLEEPS), None),
    (RESTS, None),
    (SensorChanged(sensor="ticker", health="failing", failures=3, sentence="There was no answer."), None),
    (SessionWoken(cause="timer", inbox_seen=1, format=SESSION_FORMAT), None),
    (TurnSkipped(stage="change", skips=1, sentence="Nothing has changed since the last turn."), None),
    (RESTS, None),
    (SensorChanged(sensor="ticker", health="ok"), None),
    (SessionWoken(cause="timer", inbox_seen=1, format=SESSION_FORMAT), None),
    (AttendingFailed(failures=1, error="ValueError: no"), None),
    (TurnStarted(turn=2, inbox_seen=1, quiet=True), make_user_message("It is your turn.", "config", reason="observe")),
    (GuardrailTriggered(guardrail="max_actions_per_minute", turn=2, sentence="Too brisk."), None),
    (RequestStarted(request="watch-1.t2_0/0", model="m", purpose="turn"), {}),
    (RequestSettled(request="watch-1.t2_0/0", outcome="ok"), Reply((Text("Hm.", "model", trusted=False),))),
    (TurnEnded(turn=2, why="ended"), None),
    (GuardrailTriggered(guardrail="max_consecutive_turns", turn=2, sentence="No sleep.", until=START + DAY), None),
    (RESTS, None),
    (JUMP, b"The signal `jump` fired again."),
]
"""What happens in a session that runs by itself, each with what is said."""


def rows_of_guard(legs: Sequence[Leg]) -> list[RowKey]:
    """Name every row that the guard's events touch."""
    return [
        (DecisionRow, "d"),
        (AuditRow, "c1"),
        (AuditRow, "c2"),
        (RateRow, "watcher", "wipe", 7),
        (HaltRow, "agent:watcher"),
        (RuleRow, "r"),
        (PinRow, "watcher", "web__get"),
        *rows_of_hold("c1", legs),
    ]


async def expected(store: JournalStore) -> dict[str, Any]:
    """Say what this version makes of the journal: states, receipts and rows."""
    fields: dict[str, Any] = {"format": SESSION_FORMAT, "states": {}, "receipts": {}, "turns": {}, "rows": {}}
    for row in await store.study(lambda view: view.ask("all_sessions", {})):
        events = await store.read(StreamId(f"session:{row['session']}"))
        fields["states"][row["session"]] = msgspec.to_builtins(replay(events))
        fields["receipts"][row["session"]] = msgspec.json.decode(encode_receipt(events, ()))
        if any(isinstance(stored.event, TurnStarted) for stored in events):
            fields["turns"][row["session"]] = await turns(store, events)
    for row in (await compute_projections(store)).values():
        fields["rows"].setdefault(row.TABLE, []).append(msgspec.to_builtins(row))
    return fields


async def turns(store: JournalStore, events: Sequence[Stored]) -> dict[str, Any]:
    """Say what the loop makes of a session: where its turn stands, what was said, and what is sent of it."""
    recalled = SessionHistory(str(events[0].stream).removeprefix("session:"))
    await recalled.apply(events, lambda stored: read_body(store, stored))
    values = {"turn": recalled.turn, "said": recalled.transcript.messages, "sent": recalled.transcript.sent}
    return msgspec.to_builtins(values)


def export_events(path: Path) -> str:
    """Write every event as one line of JSON, with its columns as they are kept and bytes as base64."""
    with closing(sqlite3.connect(path)) as connection:
        cursor = connection.execute("SELECT * FROM events ORDER BY position")
        names = [column[0] for column in cursor.description]
        return "".join(f"{_line(dict(zip(names, row, strict=True)))}\n" for row in cursor)


def _line(columns: dict[str, Any]) -> str:
    plain = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in columns.items()
    }
    return msgspec.json.encode(plain).decode()


async def write(folder: Path) -> None:
    """Fill the store of a version, and say what that version makes of it."""
    store = await fill(folder / "store.db")
    body = msgspec.json.format(msgspec.json.encode(await expected(store)), indent=1)
    await store.close()
    (folder / "expected.json").write_bytes(body)
    (folder / "journal.jsonl").write_text(export_events(folder / "store.db"), "utf-8")


def main(version: str) -> None:
    """Write the files of a version that has none yet."""
    folder = Path(__file__).parent / version
    if folder.exists():
        sys.exit(f"{folder} exists already. A golden journal is never written again: give the next version.")
    folder.mkdir()
    asyncio.run(write(folder))


if __name__ == "__main__":
    main(sys.argv[1])
