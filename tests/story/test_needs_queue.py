"""Everything that waits for a person stands in one queue, and every face shows that queue."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halter.cli.commands import build_command_tree
from halter.core.clock import DAY, HOUR
from halter.core.events import (
    AnyEvent,
    CallStarted,
    FindingEmitted,
    ItemQuarantined,
    ItemSeen,
    NotificationFailed,
    SessionParked,
    SessionStarted,
    TriggerMade,
)
from halter.core.ids import OUTBOX, SessionId, StreamId, WorkerId, session_stream, trigger_stream
from halter.core.money import Caps, Spender, make_legs
from halter.core.ports import Draft, Lease, Query, Write
from halter.core.project import rows_of_event
from halter.core.rows import NotificationRow, SessionRow
from halter.core.vocabulary import DecisionKind, SessionKind
from halter.dispatch.workers import WorkerInfo, WorkerRow
from halter.guard.approvals import Question, ask_question
from halter.guard.halts import halt, switch_on
from halter.guard.ledger import ActualResult
from halter.operations import decisions
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import ApprovalTerms
from halter.operations.queries import read_needs, report
from halter.operations.registry import show_home as read_home
from halter.operations.report import ReportMessage, queue_report
from halter.operations.status import read_status
from halter.runtime.message_router import describe_needs
from halter.runtime.needs import find_runner, list_resume_commands
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold
from tests.story.clerks import environment

TRIGGER = "shop/papers"


async def record_events(app: Runtime, stream: StreamId, *events: AnyEvent, lease: Lease | None = None) -> None:
    rows = [row for event in events for row in rows_of_event(event)]
    drafts: Sequence[Draft] = [Draft(event) for event in events]
    await app.store.commit(Write(stream, app.ids.make(), lambda _: drafts, rows, lease))


async def start_shop(app: Runtime, kind: SessionKind = "task", **more: Any) -> Lease:
    event = SessionStarted(session="shop-1", agent="shop", kind=kind, started_by="ada", **more)
    await app.store.commit(lifecycle.start_session(event))
    (lease,) = await app.store.claim(WorkerId("w"), 1, SessionId("shop-1"))
    return lease


async def park_shop(app: Runtime, lease: Lease, **how: Any) -> None:
    await app.store.commit(lifecycle.park_session(lease, "parked", SessionParked(**how)))


def decides(
    decision_kind: DecisionKind, kind: SessionKind | None = "task", **more: Any
) -> Callable[[Runtime], Awaitable[None]]:
    """A question of a session of that kind, or of none."""

    async def asks(app: Runtime) -> None:
        lease = None if kind is None else await start_shop(app, kind, **more)
        question = Question(
            decision="d1",
            about=decision_kind,
            subject="c",
            name="send",
            digest="x",
            expires_in=DAY,
            display_text='send {"to":"bob"}',
            agent="shop",
        )
        assert (await app.store.commit(ask_question(question, lease))).events

    return asks


def questions(kind: SessionKind, **more: Any) -> Callable[[Runtime], Awaitable[None]]:
    """A model's own question, after which its session waits."""

    async def asks(app: Runtime) -> None:
        lease = await start_shop(app, kind, **more)
        event = CallStarted(call="shop-1.1", tool="ask_user")
        write = Write(session_stream("shop-1"), "c", lambda _: [Draft(event, b'{"question":"Which?"}')], (), lease)
        await app.store.commit(write)
        await park_shop(app, lease, state="WAITING_FOR_INPUT")

    return asks


async def paused(app: Runtime) -> None:
    await park_shop(app, await start_shop(app, "autonomous"), state="PAUSED")


def answers(kind: SessionKind, **more: Any) -> Callable[[Runtime], Awaitable[None]]:
    """An approval of a call of a session whose process was killed meanwhile."""

    async def approved(app: Runtime) -> None:
        await decides("approval", kind, **more)(app)
        (waiting,) = await decisions.waiting(Actor(app, Principal("ada")))
        result = await decisions.approve(Actor(app, Principal("ada")), waiting.decision, ApprovalTerms())
        assert "No process runs the session. To continue it: halter " in result.sentence

    return approved


async def cannot_think(app: Runtime) -> None:
    lease = await start_shop(app, "autonomous")
    trouble = {"trouble": "needs_person", "sentence": "401: wrong key"}
    await park_shop(app, lease, state="SLEEPING", wake_at=app.clock.now() + HOUR, **trouble)


async def stopped(app: Runtime) -> None:
    await app.store.commit(switch_on("shop", "ada", "on"))
    await app.store.commit(lifecycle.end_session(await start_shop(app, "autonomous"), "ERROR", "model_error"))


async def document(app: Runtime) -> None:
    await record_events(
        app,
        trigger_stream(TRIGGER),
        TriggerMade(trigger=TRIGGER, agent="shop", type="watch", by="agent.yaml", digest="d"),
        ItemSeen(trigger=TRIGGER, item="i1", name="invoice-4.txt"),
        ItemQuarantined(trigger=TRIGGER, item="i1", attempts=3, sentence="It was tried 3 times."),
    )


async def halted(app: Runtime) -> None:
    await app.store.commit(halt("agent:shop", "ada", "halt", "lunch"))


async def host_away(app: Runtime) -> None:
    await app.store.commit(switch_on("shop", "ada", "on"))
    worker_info = WorkerInfo(kind="up", host="box", pid=42, started_at=app.clock.now() - HOUR, agents={"shop": "v1"})
    await app.store.beat(WorkerId("w1"), about=worker_info.encode())


async def undelivered(app: Runtime) -> None:
    await app.store.commit(queue_report("shop", "mail", ReportMessage("subject", "text"), "k"))
    (queued,) = await app.store.ask(Query("all_notifications", NotificationRow))
    failed = NotificationFailed(notification=queued.notification, attempts=5, error="No route.", next_at=None)
    await record_events(app, OUTBOX, failed)


async def near_cap(app: Runtime) -> None:
    lease, usd = await start_shop(app), 4_500_000
    held = make_legs(Caps(), Spender("shop-1", "shop"), app.clock.now(), usd=usd)
    held = tuple(leg for leg in held if not leg.scope.startswith("session:"))
    answer = await hold(app.ledger, lease, CallStarted(call="shop-1.1", tool="look", legs=held), b"")
    assert isinstance(answer, HoldTaken)
    await app.ledger.settle(lease, answer.flight, ActualResult("ok", usd=usd))


async def finding(app: Runtime) -> None:
    event = FindingEmitted(finding="f1", agent="shop", severity="high", support="unquoted")
    await record_events(app, session_stream("shop-1"), event, lease=await start_shop(app))


WAITING: dict[str, tuple[Callable[[Runtime], Awaitable[None]], str]] = {
    "an approval": (decides("approval"), "shop wants to send to bob."),
    "a question of the brake in a hooked session": (decides("approval", "hooked"), "shop wants to send to bob."),
    "a cap of a proxied session": (decides("cap_raise", "proxied"), "shop needs more money for send"),
    "a cap": (decides("cap_raise"), "shop needs more money for send"),
    "an unknown call": (decides("unknown_call"), "shop started to send to bob, and the outcome is unknown."),
    "a changed tool": (decides("changed_tool", None), "shop cannot use send"),
    "a changed server": (decides("changed_server", None), "shop cannot use some tools of the server send"),
    "a schedule": (decides("schedule"), "shop wants to schedule a task"),
    "a proposal": (decides("proposal", None), "shop proposes a send"),
    "a question of an agent": (questions("autonomous"), "shop asks: Which?"),
    "a question of a triggered task": (questions("task", trigger=TRIGGER), "shop asks: Which?"),
    "a question of a task that a program or a person began": (questions("task"), "shop asks: Which?"),
    "an approved call of a task that nothing runs": (answers("task"), "shop was answered in session shop-1, and no"),
    "an approved call of a chat that nothing runs": (answers("chat"), "shop was answered in session shop-1, and no"),
    "an approved call of an agent that nothing runs": (answers("autonomous"), "shop was answered in session shop-1"),
    "an approved call of a schedule that nothing runs": (
        answers("task", trigger=TRIGGER),
        "shop was answered in session shop-1, and no process runs it.",
    ),
    "a paused agent": (paused, "shop is paused in session shop-1."),
    "an agent whose key is wrong": (cannot_think, "shop-1 cannot use its model: 401: wrong key"),
    "an agent that stopped": (
        stopped,
        "shop is unhealthy: the last session of shop brought no new effect, no finding and no answer. shop-1 ended",
    ),
    "a document": (document, "shop/papers quarantined a document: invoice-4.txt."),
    "a halt": (halted, "agent:shop was halted by ada; nothing runs there."),
    "a host that went away": (host_away, "halter up 42 on box stopped sending heartbeats"),
    "a notice that could not be sent": (undelivered, "shop could not send a notification over mail: No route."),
    "a cap that is near": (near_cap, "90 % of the cap of agent:shop"),
    "a finding": (finding, "1 finding waits to be accepted or dismissed."),
}


class Store:
    """One store, at which a person types, looks at pages and asks in a chat."""

    def __init__(self, home: Path) -> None:
        self.home, self.environ = home, {**environment(home), "COLUMNS": "300"}

    def types(self, *words: str) -> Result:
        return CliRunner().invoke(build_command_tree(), list(words), env=self.environ)

    def does(self, job: Callable[[Runtime], Awaitable[Any]], lease: int = 1) -> Any:
        async def main() -> Any:
            async with open_runtime(read_settings(self.environ, self.home), environ=self.environ, lease=lease) as app:
                return await job(app)

        return asyncio.run(main())


async def look(app: Runtime) -> dict[str, list[str]]:
    """What the pages, the API, the status, the report and a chat say that needs a person."""
    desk = Actor(app, Principal("ada"))
    return {
        "api": [need.sentence for need in await read_needs(desk)],
        "home": [need.sentence for need in (await read_home(desk)).needs_you],
        "status": [need.sentence for need in (await read_status(desk)).needs_you],
        "report": list((await report(desk)).needs_you),
        "chat": (await describe_needs(app.store, app.clock.now())).splitlines(),
    }


@pytest.mark.parametrize("kind", WAITING)
def test_what_waits_for_a_person_is_on_every_face(tmp_path: Path, kind: str) -> None:
    happen, sentence = WAITING[kind]
    store = Store(tmp_path)
    assert store.types("inbox", "--check").exit_code == 0
    store.does(happen)
    faces = store.does(look)
    faces["inbox"] = [need["sentence"] for need in json.loads(store.types("inbox", "--json").stdout)]
    missing = [face for face, result in faces.items() if not any(sentence in line for line in result)]
    assert (missing, len(faces["inbox"])) == ([], 1), faces
    assert store.types("inbox", "--check").exit_code == 1


def test_a_chat_that_waits_for_its_next_line_needs_no_person(tmp_path: Path) -> None:
    store = Store(tmp_path)

    async def rests(app: Runtime) -> None:
        await park_shop(app, await start_shop(app, "chat"), state="WAITING_FOR_INPUT")

    store.does(rests)
    faces = store.does(look)
    assert {face: result for face, result in faces.items() if result} == {"chat": ["Nothing needs you."]}
    assert store.types("inbox", "--check").exit_code == 0


def test_a_session_that_was_stopped_by_switching_its_agent_off_needs_no_person(tmp_path: Path) -> None:
    store = Store(tmp_path)

    async def switched_off(app: Runtime) -> None:
        lease = await start_shop(app, "autonomous")
        await app.store.commit(halt("session:shop-1", "ada", "off", "shop is off"))
        assert len(await read_needs(Actor(app, Principal("ada")))) == 1
        await app.store.commit(lifecycle.end_session(lease, "HALTED", "external_halt"))

    store.does(switched_off)
    assert not store.does(look)["api"]
    assert store.types("inbox", "--check").exit_code == 0


@pytest.mark.parametrize(
    ("kind", "more", "command"),
    [
        ("task", {}, "halter run FOLDER --resume shop-1"),
        ("chat", {}, "halter chat FOLDER --resume shop-1"),
        ("autonomous", {}, "halter up FOLDER"),
        ("task", {"trigger": TRIGGER}, "halter up FOLDER"),
    ],
)
def test_an_approval_of_a_session_that_nothing_runs_says_how_to_continue_it(
    tmp_path: Path, kind: SessionKind, more: dict[str, Any], command: str
) -> None:
    store = Store(tmp_path)
    store.does(decides("approval", kind, **more))
    assert command in store.types("approve", "d1").stdout
    assert command in store.types("inbox").stdout
    assert json.loads(store.types("status", "--json").stdout)["needs_you"][0]["commands"][0] == command


@pytest.mark.parametrize("kind", ["hooked", "proxied", "gated"])
def test_an_approval_of_a_call_of_another_program_waits_for_its_next_call(tmp_path: Path, kind: SessionKind) -> None:
    store = Store(tmp_path)
    store.does(decides("approval", kind))
    assert "It takes effect when the program makes the same call again." in store.types("deny", "d1").stdout
    assert store.types("inbox", "--check").exit_code == 0


def test_an_approval_names_the_process_that_continues_the_session(tmp_path: Path) -> None:
    store = Store(tmp_path)

    async def answered_while_it_runs(app: Runtime) -> tuple[str, list[str]]:
        await decides("approval", "autonomous")(app)
        await app.store.leave(WorkerId("w"))
        info = WorkerInfo(kind="up", host="box", pid=42, agents={"shop": "v1"})
        await app.store.beat(WorkerId("up"), about=info.encode())
        actor = Actor(app, Principal("ada"))
        result = await decisions.approve(actor, "d1", ApprovalTerms())
        return result.sentence, [need.sentence for need in await read_needs(actor)]

    sentence, sentences = store.does(answered_while_it_runs, HOUR)
    assert sentence == "Approved: send of shop, session shop-1. halter up 42 on box continues it."
    assert sentences == []


def test_a_worker_that_is_closing_or_waits_for_newer_files_or_runs_other_agents_continues_nothing() -> None:
    row = SessionRow("shop-1", "shop", "autonomous")
    no_runners = [
        WorkerInfo(kind="worker", agents={"shop": "v1"}, closing=True),
        WorkerInfo(kind="worker", agents={"shop": "v1"}, waiting=("shop",)),
        WorkerInfo(kind="worker", agents={"desk": "v1"}),
        WorkerInfo(agents={"shop": "v1"}),
    ]
    for info in no_runners:
        assert find_runner(row, [WorkerRow("w", HOUR, info.encode())], 0) is None
    info = WorkerInfo(kind="worker", agents={"shop": "v1"})
    assert find_runner(row, [WorkerRow("w", HOUR, info.encode())], 0) == info
    assert find_runner(row, [WorkerRow("w", HOUR, info.encode())], DAY) is None
    attended = SessionRow("shop-2", "shop", "task")
    assert find_runner(attended, [WorkerRow("w", HOUR, info.encode())], 0) is None
    owned = SessionRow("shop-2", "shop", "task", owner="w")
    assert find_runner(owned, [WorkerRow("w", HOUR, WorkerInfo().encode())], 0) == WorkerInfo()


def test_a_sub_session_that_nothing_runs_continues_with_the_command_of_the_session_that_asked_for_it() -> None:
    parent = SessionRow("desk-1", "desk", "task")
    child = SessionRow("shop-1", "shop", "task", parent="desk-1")
    grandchild = SessionRow("pack-1", "pack", "task", parent="shop-1")
    sessions = {row.session: row for row in (parent, child, grandchild)}
    assert list_resume_commands(grandchild, sessions)[0] == "halter run FOLDER --resume desk-1"
