"""The front door as a person types it: routes, schedules, proposals and findings."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.clock import DAY, SystemClock
from halter.core.events import (
    DecisionAsked,
    FindingEmitted,
    ItemQuarantined,
    ItemSeen,
    MemoryProposed,
    PrecedentProposed,
    SessionStarted,
)
from halter.core.ids import FLEET, SortableIds, session_stream, trigger_stream
from halter.core.ports import Draft, Write
from halter.core.project import rows_of_event
from halter.core.rows import DecisionRow
from halter.journal.open import open_store
from halter.state import lifecycle
from tests.story.test_cli_talk import Person


class Quick(Person):
    """Somebody who types in this very process: many words take little time."""

    def types(self, *words: str, given: bytes = b"") -> tuple[int, str, str]:
        result = CliRunner().invoke(build_command_tree(), list(words), env=self.environ, input=given)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def ada(tmp_path: Path) -> Person:
    person = Quick(tmp_path)
    person.writes("- text: All is well.\n")
    return person


def store_of(ada: Person) -> Path:
    return ada.home / "state" / "halter" / "halter.db"


def commit_writes(ada: Person, *writes: Write) -> None:
    """Commit what an agent would have written."""

    async def job() -> None:
        clock = SystemClock()
        store_of(ada).parent.mkdir(parents=True, exist_ok=True)
        store = open_store(str(store_of(ada)), clock=clock, ids=SortableIds(clock.now))
        for write in writes:
            await store.commit(write)
        await store.close()

    asyncio.run(job())


def test_a_route_is_exactly_three_keys_and_needs_no_store_and_makes_none(ada: Person) -> None:
    code, text, _ = ada.types("route", str(ada.agent), "every weekday at 9 check the mail", "--json")
    answer = json.loads(text)
    assert (code, list(answer)) == (0, ["route", "strategy", "why"])
    assert (answer["route"], answer["strategy"]) == ("strategy", "SCHEDULED_TASK")
    assert ada.looks("route", str(ada.agent), "status") == {
        "route": "status",
        "strategy": None,
        "why": "The whole message matches the fast path status.",
    }
    assert ada.types("route", str(ada.agent), "Look at the mail")[1].startswith("desk: GOAL. ")
    assert not store_of(ada).exists()
    assert ada.types("route", str(ada.home), "status")[0] == 2


def test_a_route_knows_the_schedules_that_people_confirmed_and_writes_nothing(ada: Person) -> None:
    ada.types("run", str(ada.agent), "every day at 9 check the mail")
    (result,) = ada.looks("inbox")
    assert ada.looks("route", str(ada.agent), "cancel check the mail")["route"] == "strategy"
    ada.types("approve", result["decision"])
    before = ada.looks("schedules")
    assert ada.looks("route", str(ada.agent), "cancel schedule check the mail")["route"] == "cancel_schedule"
    assert ada.looks("schedules") == before


def test_run_answers_a_fast_path_without_a_session_unless_routing_is_off(ada: Person) -> None:
    code, text, output = ada.types("run", str(ada.agent), "3 * (4 + 5)")
    assert (code, output) == (0, "")
    assert "27" in text
    assert ada.looks("sessions") == []
    answer = ada.looks("run", str(ada.agent), "status")
    assert (answer["route"], answer["strategy"], answer["ok"], answer["session"]) == ("status", None, True, "")
    assert ada.looks("run", str(ada.agent), "status", "--no-route")["text"] == "All is well."
    assert len(ada.looks("sessions")) == 1


def test_a_chat_answers_at_the_front_door_and_continues_with_the_model(ada: Person) -> None:
    text = b"what time is it\nstatus\nhow are the sheep today, all of them?\nstatus\n"
    code, output, _ = ada.types("chat", str(ada.agent), "--json", given=text)
    assert code == 0
    first, second, third, fourth = map(json.loads, output.splitlines())
    assert (first["route"], second["route"], third["state"], fourth["route"]) == (
        "time",
        "status",
        "WAITING_FOR_INPUT",
        "status",
    )
    assert "0 sessions" in second["text"]
    assert third["session"] in fourth["text"]


def test_a_schedule_from_a_chat_waits_in_the_inbox_and_a_yes_creates_it(ada: Person) -> None:
    ada.types("chat", str(ada.agent), given=b"every day at 9 check the mail\n")
    assert ada.types("schedules")[1].startswith("No triggers.")
    text = ada.types("inbox")[1]
    for words in (
        "desk wants to schedule a task: check the mail.",
        "When: at 09:00 every day, UTC",
        "in thirty days",
    ):
        assert words in text
    assert '"made"' not in text
    output = ada.types("approve", "schedule/desk/check-the-mail")[1]
    assert output.startswith("Created trigger desk/check-the-mail. See `halter triggers desk`.")
    assert "It runs only while `halter up`, `halter serve` or a worker runs desk." in " ".join(output.split())
    assert "Triggers fire only while `halter up`" in ada.types("schedules")[1]
    assert "desk/check-the-mail. Start `halter up FOLDER`" in " ".join(ada.types("doctor")[1].split())
    (plan,) = ada.looks("schedules", "desk")
    assert (plan["trigger"], plan["when"], plan["made_by"]) == ("desk/check-the-mail", "at 09:00 every day, UTC", "ada")
    assert ada.looks("schedules", "other") == []
    assert "desk/check-the-mail" in ada.types("schedules")[1]
    assert ada.types("schedules", "cancel", "desk/check-the-mail")[0] == 0
    assert ada.types("schedules", "cancel", "desk/check-the-mail")[0] == 1
    assert ada.types("schedules", "cancel", "desk/else")[0] == 2
    assert ada.looks("schedules") == []


def test_a_schedule_is_run_now_and_its_run_is_in_the_list(ada: Person) -> None:
    ada.types("run", str(ada.agent), "every day at 9 check the mail")
    ada.types("approve", "schedule/desk/check-the-mail")
    code, text, output = ada.types("schedules", "run", "desk/check-the-mail", "--agent", str(ada.agent))
    assert (code, output) == (0, "")
    assert text.splitlines()[0] == "Session desk.check-the-mail-1"
    assert text.splitlines()[1].startswith("COMPLETED, completed")
    (plan,) = ada.looks("schedules")
    assert (plan["runs"], plan["session"]) == (1, "desk.check-the-mail-1")
    assert ada.types("schedules", "run", "desk/else", "--agent", str(ada.agent))[0] == 3
    assert ada.types("schedules", "run", "desk/check-the-mail", "--agent", str(ada.home))[0] == 2


def test_an_agent_runs_ends_keeps_and_promotes_nothing(ada: Person) -> None:
    ada.types("run", str(ada.agent), "every day at 9 check the mail")
    ada.environ["HALTER_PERSON"] = "agent:desk"
    for words in (
        ("approve", "schedule/desk/check-the-mail"),
        ("schedules", "cancel", "desk/x"),
        ("schedules", "run", "desk/x", "--agent", str(ada.agent)),
        ("schedules", "retry", "desk/x", "y"),
        ("proposals", "keep", "m"),
        ("findings", "dismiss", "f"),
        ("proposals", "promote", "m", str(ada.agent), "--yes"),
    ):
        code, _, text = ada.types(*words)
        assert (code, "Only a person can" in text) == (1, True), (words, text)


def test_a_person_can_retry_a_quarantined_document(ada: Person) -> None:
    from halter.runtime.trigger_runner import make_trigger
    from halter.spec.triggers import Watch

    event = ItemSeen(trigger="desk/in", item="abc123", name="a.txt")
    quarantined = ItemQuarantined(trigger="desk/in", item="abc123", attempts=3, sentence="It failed.")
    rows = rows_of_event(quarantined)
    commit_writes(
        ada,
        make_trigger("desk/in", "desk", Watch(name="in", path="in"), "agent.yaml"),
        Write(trigger_stream("desk/in"), "seen", lambda _: [Draft(event), Draft(quarantined)], rows),
    )
    text = ada.types("schedules")[1]
    assert "1 quarantined" in text
    assert "halter triggers retry desk/in abc123" in text
    assert ada.types("schedules", "cancel", "desk/in")[0] == 1
    assert ada.types("schedules", "retry", "desk/in", "b.txt")[0] == 2
    assert ada.types("schedules", "retry", "desk/in", "abc")[1] == "desk/in retries a.txt.\n"
    (plan,) = ada.looks("schedules")
    assert (plan["quarantined"], plan["waiting"]) == ([], 1)


def write_artifacts(ada: Person) -> None:
    """Write a session that reports a finding and proposes two things."""
    session = session_stream("one")
    finding = {"title": "A hole", "severity": "high", "text": "It leaks."}
    artifacts: list[tuple[Any, bytes]] = [
        (
            FindingEmitted(finding="f-1", agent="desk", severity="high", support="unquoted"),
            json.dumps(finding).encode(),
        ),
        (MemoryProposed(memory="m-1", agent="desk"), b"The door sticks."),
        (PrecedentProposed(precedent="p-1", agent="desk", kind="leak"), b"Pipes leak in frost."),
    ]
    expires = SystemClock().now() + DAY
    question = DecisionAsked(
        decision="proposal/m-1",
        about="proposal",
        subject="m-1",
        name="memory",
        digest="d",
        expires_at=expires,
        agent="desk",
    )
    rows = [row for event, _ in artifacts for row in rows_of_event(event)]
    commit_writes(
        ada,
        lifecycle.start_session(SessionStarted(session="one", agent="desk", kind="task", started_by="ada")),
        Write(session, "left", lambda _: [Draft(event, body) for event, body in artifacts], rows),
        Write(FLEET, "asked", lambda _: [Draft(question, b"desk proposes")], [(DecisionRow, "proposal/m-1")]),
    )


def test_proposals_are_kept_and_dismissed_and_the_question_about_them_is_answered(ada: Person) -> None:
    write_artifacts(ada)
    fields = {result["id"]: result for result in ada.looks("proposals")}
    assert {(result["about"], result["text"], result["status"]) for result in fields.values()} == {
        ("memory", "The door sticks.", ""),
        ("precedent", "leak: Pipes leak in frost.", ""),
    }
    assert "desk proposes a memory: desk proposes" in ada.types("inbox")[1]
    assert ada.types("proposals", "keep", "m")[1] == "m-1 is accepted.\n"
    assert [need["decision"] for need in ada.looks("inbox")] == ["", ""]
    assert ada.looks("proposals", "dismiss", "p-1") == {"subject": "p-1", "done": True, "status": "dismissed"}
    assert {result["id"]: result["status"] for result in ada.looks("proposals")} == {"m-1": "kept", "p-1": "dismissed"}
    assert ada.types("proposals", "keep", "x")[0] == 2
    assert "The door sticks." in ada.types("proposals")[1]


def test_a_yes_in_the_inbox_keeps_a_proposal(ada: Person) -> None:
    write_artifacts(ada)
    assert ada.types("approve", "proposal/m-1")[1] == "Saved. Future sessions of desk will see: memory m-1\n"
    assert {result["id"]: (result["status"], result["by"]) for result in ada.looks("proposals")}["m-1"] == (
        "kept",
        "ada",
    )


def test_a_promotion_is_shown_and_asked_about_and_stands_in_the_context_file_once(ada: Person) -> None:
    write_artifacts(ada)
    context = ada.agent / "AGENTS.md"
    context.write_text("# Desk\n\nBe kind.\n")
    code, text, _ = ada.types("proposals", "promote", "m-1", str(ada.agent), given=b"n\n")
    assert (code, "- The door sticks. (m-1)" in text) == (2, True)
    assert context.read_text() == "# Desk\n\nBe kind.\n"
    for _ in range(2):
        assert ada.types("proposals", "promote", "m-1", str(ada.agent), "--yes")[0] == 0
    ada.types("proposals", "promote", "p-1", str(ada.agent), "--yes")
    assert context.read_text() == (
        "# Desk\n\nBe kind.\n\n## Learned from earlier sessions\n\n- The door sticks. (m-1)\n"
        "- leak: Pipes leak in frost. (p-1)\n"
    )
    assert {result["status"] for result in ada.looks("proposals")} == {"promoted"}
    assert [need["sentence"] for need in ada.looks("inbox")] == ["1 finding waits to be accepted or dismissed."]
    assert [path.name for path in ada.agent.glob(".AGENTS*")] == []


def test_findings_are_listed_by_session_and_kept(ada: Person) -> None:
    write_artifacts(ada)
    (result,) = ada.looks("findings", "one")
    assert (result["id"], result["severity"], result["support"]) == ("f-1", "high", "unquoted")
    assert "It leaks." in ada.types("findings")[1]
    assert ada.types("findings", "keep", "f-1")[1] == "f-1 is accepted.\n"
    assert ada.looks("findings")[0]["status"] == "kept"


def test_switching_on_a_folder_says_first_what_it_may_cost(ada: Person) -> None:
    ada.types("run", str(ada.agent), "every hour check the mail")
    ada.types("approve", "schedule/desk/check-the-mail")
    lines = ada.types("on", str(ada.agent))[1].splitlines()
    assert lines[0].startswith("It may spend at most $1.00 a session")
    assert lines[1].startswith("Unattended, it spends at most ")
    assert lines[1].endswith(" in thirty days: the runs of its schedules, bounded by every cap.")
    assert lines[2] == "Messages, webhooks and watched folders cannot raise that: it is all that its caps leave."
    assert lines[3].startswith("desk is on")
    answer = ada.looks("on", str(ada.agent))
    # After noon, a night has two days; thirty days touch one more, unless they begin at midnight.
    assert answer["idle_night_usd"] == answer["worst_night_usd"]
    assert answer["worst_night_usd"] in (5, 10)
    assert answer["idle_month_usd"] == answer["worst_month_usd"]
    assert answer["worst_month_usd"] in (150, 155)
