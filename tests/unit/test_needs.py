"""Each thing that waits for a person is one sentence that says what is wanted, with the command that answers it."""

from typing import Any

import msgspec
import pytest

from halter.autonomy.upkeep import Unhealthy
from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.messages import Reply, Text, ToolCall
from halter.core.money import BudgetRow
from halter.core.rows import HaltRow, ItemRow, NotificationRow, OutageRow, SessionRow
from halter.dispatch.workers import WorkerInfo, WorkerRow
from halter.guard.approvals import PendingDecision
from halter.operations.decisions import OpenInbox
from halter.operations.report import ReportRows, build_report
from halter.present.sheet import Facts
from halter.present.tables import build_decision_sheet, build_inbox_sheet
from halter.runtime.needs import ProposalCounts, describe_call, describe_decision, list_needs, read_reason

NOW = 30 * DAY


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("refund", {"order": 42, "amount_usd": 19.9}, "refund $19.90 for order 42"),
        ("delete_file", {"path": "leftover.tmp"}, "delete leftover.tmp"),
        ("shop__sendMail", {"to": "bob", "subject": "two words"}, "send mail to bob, subject “two words”"),
        ("shell", {"command": "rm -rf build"}, "run “rm -rf build”"),
        ("write_file", {"path": "a.txt", "content": "long\ntext"}, "write a.txt"),
        ("wipe", {}, "wipe"),
        ("move", {"from": "a", "to": "b", "force": True, "tags": ["x"]}, "move from a, to b"),
        ("pay", {"usd": float("inf"), "to": "b"}, "pay inf to b"),
        ("___", {}, "call a tool"),
    ],
)
def test_a_call_is_put_into_words(tool: str, arguments: dict[str, Any], words: str) -> None:
    assert describe_call(tool, arguments) == words


def decision(text: str = "approval", body: bytes = b'send {"to":"bob"}', **more: Any) -> PendingDecision:
    facts = {"decision": "d1", "session": "s1", "agent": "shop", "subject": "s1.1", "name": "send", "digest": "d"}
    rest = {"level": "RESTRICTED", "risk": "LOW", "same": "", "keys": "", "asked_at": NOW, "expires_at": NOW + HOUR}
    return msgspec.convert({**facts, **rest, "about": text, "body": body, **more}, PendingDecision)


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (decision(), "shop wants to send to bob."),
        (decision("unknown_call"), "shop started to send to bob, and the outcome is unknown."),
        (
            decision("cap_raise", subject="session:s1"),
            "shop needs more money for send than the cap of session:s1 leaves.",
        ),
        (decision("changed_tool"), "shop cannot use send until you approve it: it is new or has changed."),
        (decision("proposal", b"Bob is away."), "shop proposes a send: Bob is away."),
        (decision(body=b""), "shop wants to send."),
        (decision(body=b'send {"text":"Come on Monday."}'), "shop wants to send text “Come on Monday.”"),
    ],
)
def test_a_decision_is_a_sentence(one: PendingDecision, sentence: str) -> None:
    assert describe_decision(one) == sentence


@pytest.mark.parametrize("hidden", ["\u200b", "\u202e", "\u2066", "\u3164", "\ufe0f", "\x1b"])
@pytest.mark.parametrize("about", ["approval", "changed_tool", "proposal"])
def test_an_inbox_hides_no_character_of_what_is_asked(about: str, hidden: str) -> None:
    body = f'send {{"to":"bob{hidden}by"}}' if about == "approval" else f"Keep bob{hidden}by."
    pending_decision = decision(
        about, body.encode(), said=msgspec.json.encode(Reply((Text(f"Say{hidden}so."),), "calls"))
    )
    waiting_decision = msgspec.convert(msgspec.structs.asdict(pending_decision), PendingDecision)
    sheet = [
        *build_decision_sheet(waiting_decision, NOW),
        *build_inbox_sheet(OpenInbox([waiting_decision], [], []), NOW),
    ]
    facts = [fact for part in sheet if isinstance(part, Facts) for fact in part.facts]
    assert not any(hidden in text for _, text in facts)
    assert sum(f"\\u{ord(hidden):04x}" in text for _, text in facts) >= 2


def test_the_models_own_reason_is_shown_with_its_call() -> None:
    body = msgspec.json.encode(Reply((Text("He  asked\nfor it."), ToolCall("1", "send", b"{}"))))
    assert read_reason(decision(said=body)) == "He asked for it."
    assert read_reason(decision(said=b"not json")) == ""
    assert read_reason(decision("unknown_call", said=body)) == ""


def session(state: str, **more: Any) -> SessionRow:
    return SessionRow("shop-1", agent="shop", started_at=1, **{"kind": "autonomous", "state": state, **more})


def process(host: str, alive_until: int, *agents: str, kind: str = "up") -> WorkerRow:
    worker_info = WorkerInfo(kind=kind, host=host, pid=7, agents=dict.fromkeys(agents, "v"))
    return WorkerRow(f"{host}{alive_until}", alive_until, worker_info.encode())


def needs(**rows: Any) -> list[tuple[str, str]]:
    report_rows = ReportRows(since=NOW - DAY, until=NOW, **rows)
    made = [(need.kind, need.line) for need in list_needs(report_rows)]
    assert list(build_report(report_rows).needs_you) == [line for _, line in made]
    return made


ON = frozenset(("shop",))
LOOPS = Unhealthy(agent="shop", session="shop-1", attempts=2, cause="It looped.", until=NOW)
STOPPED = Unhealthy(agent="shop", session="shop-1", cause="shop-1 ended ERROR (model error).")
LOST = NOW - 10 * MINUTE
AWAY = "halter up 7 on box stopped sending heartbeats 10m ago. It ran shop;"


@pytest.mark.parametrize(
    ("rows", "kind", "line"),
    [
        ({"waiting": [decision()]}, "approval", "shop wants to send to bob. halter approve d1"),
        ({"sessions": [session("PAUSED")]}, "paused", "shop is paused in session shop-1. halter on shop"),
        (
            {"sessions": [session("WAITING_FOR_INPUT")]},
            "question",
            "shop waits for an answer in session shop-1. halter tell shop-1 ANSWER",
        ),
        (
            {"unhealthy": [LOOPS]},
            "unhealthy",
            f"{LOOPS.line} halter on shop",
        ),
        (
            {"unhealthy": [STOPPED]},
            "stopped",
            f"{STOPPED.line} halter on shop",
        ),
        (
            {"quarantined_items": [ItemRow("shop/in", "0123456789abcdef00", name="a.txt", sentence="It failed.")]},
            "document",
            "shop/in quarantined a document: a.txt. It failed. halter triggers retry shop/in 0123456789abcdef",
        ),
        (
            {"halts": [HaltRow("agent:shop", 1, 1, "ada", "", 0)]},
            "halt",
            "agent:shop was halted by ada; nothing runs there. halter resume agent:shop",
        ),
        (
            {"undelivered": [NotificationRow("n", channel="mail", agent="shop", gave_up=1, error="No route.")]},
            "undelivered",
            "shop could not send a notification over mail: No route.",
        ),
        (
            {"budgets": [BudgetRow("agent:shop", "", "usd", cap=100, spent=90)]},
            "budget",
            "90 % of the cap of agent:shop (whole life) is spent or held. halter budget raise agent:shop AMOUNT",
        ),
        (
            {"proposals": ProposalCounts(memories=2)},
            "kept",
            "2 memories wait to be accepted or dismissed. halter proposals",
        ),
        (
            {"workers": [process("box", LOST, "shop")], "switched_on": ON},
            "host",
            f"{AWAY} no process runs them now. Start it again on that host.",
        ),
        (
            {"workers": [process("box", LOST, "shop"), process("other", NOW + 1, "shop")], "switched_on": ON},
            "host",
            f"{AWAY} other processes run them now. Start it again on that host.",
        ),
    ],
)
def test_everything_that_waits_is_in_the_one_queue(rows: dict[str, Any], kind: str, line: str) -> None:
    assert needs(**rows) == [(kind, line)]


def test_a_model_that_cannot_be_used_waits_for_a_person_and_a_mere_outage_does_not() -> None:
    (need,) = needs(outages=[OutageRow("shop-1", "shop", "needs_person", "The key is wrong.")])
    assert need[1].startswith("shop-1 cannot use its model: The key is wrong. Fix the API key")
    assert needs(outages=[OutageRow("shop-1", "shop", "unavailable", "It is away.")]) == []


@pytest.mark.parametrize(
    "rows",
    [
        {"workers": [process("box", LOST, "shop"), process("box", NOW + SECOND, "shop")], "switched_on": ON},
        {"workers": [process("box", LOST, "shop")]},
        {"workers": [process("box", NOW - 2 * DAY, "shop")], "switched_on": ON},
        {"workers": [process("box", 0, "shop")], "switched_on": ON},
        {"workers": [process("box", LOST, "shop", kind="")], "switched_on": ON},
        {"waiting": [decision(expires_at=NOW)]},
        {"sessions": [session("WAITING_FOR_INPUT", kind="chat")]},
        {"waiting": [], "proposals": ProposalCounts()},
    ],
)
def test_what_recovered_was_switched_off_or_has_ended_needs_nobody(rows: dict[str, Any]) -> None:
    assert needs(**rows) == []


def test_a_proposal_that_is_asked_about_is_counted_once() -> None:
    pending_decision = decision("proposal", b"Bob is away.", name="memory")
    assert [kind for kind, _ in needs(waiting=[pending_decision], proposals=ProposalCounts(memories=1))] == ["proposal"]
