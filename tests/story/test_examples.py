"""Every example does what its page says."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import MINUTE
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.state.receipt import make_receipt
from halter.testing.world import World
from tests.processes import Halter, live_at
from tests.story.autonomous import Fleet, rhythm

EXAMPLES = Path(__file__).parents[2] / "examples"


class Person:
    """Somebody at a terminal, in a home folder of their own."""

    def __init__(self, home: Path) -> None:
        self.environ = {**live_at(home), "HALTER_PERSON": "ada", "COLUMNS": "200"}

    def begins(self, *words: str) -> Halter:
        return Halter(words, env=self.environ, cwd="/", stdin=subprocess.DEVNULL)

    def types(self, *words: str) -> str:
        with self.begins(*words) as program:
            body, complained = program.communicate()
        assert program.wait() == 0, complained.decode()
        return body.decode()

    def looks(self, *words: str) -> Any:
        return json.loads(self.types(*words, "--json"))


@pytest.mark.timeout(180)
def test_the_clerk_welcomes_somebody_and_asks_before_it_deletes(tmp_path: Path) -> None:
    person, clerk = Person(tmp_path), tmp_path / "clerk"
    shutil.copytree(EXAMPLES / "clerk", clerk)
    with person.begins("play", str(clerk / "welcome.yaml"), "--input", "who=Ada") as untrusted:
        _, complained = untrusted.communicate(timeout=60)
    assert untrusted.returncode == 3
    assert f"halter trust {clerk}" in complained.decode()
    person.types("trust", str(clerk))
    with person.begins("play", str(clerk / "welcome.yaml"), "--input", "who=Ada") as playing:
        assert playing.stdout is not None
        while not (clerk / "desk" / "welcome.txt").exists():
            assert playing.poll() is None
            assert playing.stdout.readline()
        assert (clerk / "desk" / "welcome.txt").read_text() == "Welcome, Ada."
        while not (waiting := person.looks("inbox")):
            assert playing.poll() is None
        assert [result["name"] for result in waiting] == ["delete_file"]
        person.types("approve", waiting[0]["decision"])
        body, _ = playing.communicate(timeout=60)
    assert playing.returncode == 0
    assert b"COMPLETED: completed." in body
    assert not (clerk / "desk" / "welcome.txt").exists()
    (session,) = person.looks("sessions")
    assert person.looks("receipt", session["session"])["cost_usd"] == 0.01
    assert person.looks("verify")["ok"]


@pytest.mark.timeout(120)
def test_what_cannot_be_resumed_or_played_is_reported_at_once(tmp_path: Path) -> None:
    person, clerk = Person(tmp_path), tmp_path / "clerk"
    shutil.copytree(EXAMPLES / "clerk", clerk)
    person.types("trust", str(clerk))
    (tmp_path / "look.yaml").write_text("- {call: list_folder}\n")
    look = ("play", str(tmp_path / "look.yaml"), "--agent", str(clerk))
    person.types(*look)
    path = tmp_path / "other"
    (path / "desk").mkdir(parents=True)
    (path / "agent.yaml").write_text("name: other\ntools: {files: {root: desk}}\n")
    (tmp_path / "wrong.yaml").write_text("- {call: lst_folder}\n")
    (session,) = person.looks("sessions")
    for words, code, sentence in (
        ((*look, "--resume", "nosuch"), 2, "No session begins with 'nosuch'"),
        ((*look, "--resume", session["session"]), 1, "has already ended (COMPLETED: completed)."),
        (("play", str(tmp_path / "wrong.yaml"), "--agent", str(path)), 3, "its tools are `delete_file`"),
    ):
        with person.begins(*words) as program:
            _, complained = program.communicate(timeout=60)
        assert (program.returncode, sentence in complained.decode()) == (code, True), complained


@pytest.mark.timeout(120)
def test_the_agent_in_one_minute_works_as_the_pages_say(tmp_path: Path) -> None:
    person, folder = Person(tmp_path), str(tmp_path / "night-watch")
    person.types("init", folder)
    assert person.types("run", folder, "hello") == ("Hello. I answer by rules. Set a model in agent.yaml.\n")
    assert "with night-watch. Ctrl-D or /quit leaves." in person.types("chat", folder)
    assert [session["state"] for session in person.looks("sessions")] == ["COMPLETED"]
    person.types("init", str(tmp_path / "other"), "--model", "anthropic:claude-sonnet-4-5")


@pytest.mark.timeout(120)
def test_the_doorman_sleeps_and_wakes_when_a_letter_comes_as_the_pages_say(tmp_path: Path) -> None:
    person, doorman = Person(tmp_path), tmp_path / "doorman"
    shutil.copytree(EXAMPLES / "doorman", doorman)
    with person.begins("up", str(doorman)) as program:
        assert program.stdout is not None
        bodies = iter(program.stdout.readline, b"")
        assert any(b"sleep 1h (no letter has come)" in line for line in bodies)
        assert any(b"doorman-1 sleeps 1h" in line for line in bodies)
        (doorman / "letters" / "first.txt").write_text("Hello.")
        assert any(b"alert: The signal `letter`" in line for line in bodies)
        assert any(b"sleep 1h (looked through the letters)" in line for line in bodies)
        assert "doorman also runs unattended, in doorman-1" in person.types("chat", str(doorman))
        assert "doorman is off; stopped doorman-1." in person.types("off", "doorman")
        assert any(b"ended: HALTED" in line for line in bodies)
        assert "doorman is on" in person.types("on", "doorman")
        assert any(b"doorman-2 starts." in line for line in bodies)
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=60)
    assert program.returncode == 130
    assert person.types("doctor", str(doorman))


async def test_the_market_desk_sees_something_within_a_minute_and_asks_before_it_trades(
    world: World, tmp_path: Path
) -> None:
    fleet, desk = Fleet(world, tmp_path), tmp_path / "market-desk"
    shutil.copytree(EXAMPLES / "market-desk", desk)
    fleet.trust(desk)
    fleet.start(desk)
    await world.advance(MINUTE)
    assert "turn 2" in " ".join(rhythm(await fleet.events("market-desk-1")))
    for verdict, outcomes in (("approve", ["ok"]), ("deny", ["ok", "approval_denied"])):
        await world.advance(7 * MINUTE)
        assert (await fleet.row("market-desk-1")).state == "WAITING_FOR_APPROVAL"
        (pending_decision,) = await list_pending_decisions(world.journal)
        assert (pending_decision.name, pending_decision.level) == ("place_order", "RESTRICTED")
        await world.store.commit(answer_decision(pending_decision, verdict, "ada", verdict))
        await world.advance(MINUTE)
        assert await orders(fleet) == outcomes
    assert fleet.told[-1] == ("market-desk", "market-desk-1 starts.")
    skipped = [line for line in rhythm(await fleet.events("market-desk-1")) if "skipped by expression" in line]
    assert skipped


async def orders(fleet: Fleet) -> list[str]:
    """What became of the orders: those that were placed, and those that were refused."""
    receipt = make_receipt(await fleet.events("market-desk-1"))
    placed = [str(call.outcome) for call in receipt.calls if call.name == "place_order"]
    return [*placed, *(brake.code for brake in receipt.brakes if brake.name == "place_order")]


def test_the_page_of_the_market_desk_names_its_files_and_how_it_is_started() -> None:
    desk = EXAMPLES / "market-desk"
    page = (desk / "README.md").read_text("utf-8")
    assert {f"({file.name})" for file in desk.iterdir() if file.is_file() and file.name != "README.md"} <= set(
        re.findall(r"\([^)]+\)", page)
    )
    assert all(f"\nhalter {verb} examples/market-desk" in page for verb in ("trust", "up"))
