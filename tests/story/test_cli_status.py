"""`halter status` as the first command of the morning, and the one queue behind every face."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halter.cli.commands import build_command_tree
from halter.core.clock import MINUTE
from halter.core.ids import WorkerId
from halter.dispatch.workers import WorkerInfo
from halter.guard.halts import switch_on
from halter.operations.actor import Actor, Principal
from halter.operations.queries import read_needs
from halter.operations.registry import show_home as read_home
from halter.operations.status import read_status
from halter.runtime.runtime import open_runtime
from halter.settings import read_settings
from tests.story.clerks import environment, furnish


class Place:
    def __init__(self, home: Path) -> None:
        self.home, self.environ = home, environment(home)

    def types(self, *words: str) -> Result:
        return CliRunner().invoke(build_command_tree(), list(words), env=self.environ)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    furnish(tmp_path)
    return Place(tmp_path)


def test_the_morning_fits_a_small_screen(place: Place) -> None:
    result = place.types("status")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "4 need you · $0.50 of $20.00 spent today · 0 of 1 agent running"
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "halter approve clerk-1.1/approval" in result.stdout


def test_a_home_in_which_nothing_ever_ran_has_a_status(tmp_path: Path) -> None:
    result = Place(tmp_path).types("status")
    assert (result.exit_code, "No agent has run here yet." in result.stdout) == (0, True)
    assert not list(tmp_path.rglob("halter.db"))


def test_commands_name_the_store_that_was_named(place: Place) -> None:
    store = str(place.home / "state" / "halter" / "halter.db")
    place.environ["COLUMNS"] = "300"
    for command in ("status", "inbox"):
        text = " ".join(place.types(command, "--store", store).stdout.split())
        assert f"halter approve clerk-1.1/approval --store {store}" in text
        assert f"halter findings --store {store}" in text
    assert "--store" not in place.types("inbox").stdout


def test_every_face_has_the_same_queue(place: Place) -> None:
    inbox = json.loads(place.types("inbox", "--json").stdout)
    report = json.loads(place.types("report", "--json").stdout)["needs_you"]
    morning = json.loads(place.types("status", "--json").stdout)["needs_you"]
    sentences = [need["sentence"] for need in inbox]
    assert sentences == [need["sentence"] for need in morning]
    assert len(report) == len(sentences)
    assert all(line.startswith(sentence) for line, sentence in zip(report, sentences, strict=True))

    async def look(desk: Actor) -> None:
        assert [need.sentence for need in await read_needs(desk)] == sentences
        assert [need.sentence for need in (await read_home(desk)).needs_you] == sentences

    on_store(place, look)
    assert place.types("inbox", "--check").exit_code == 1


def test_an_agent_is_alive_where_a_process_runs_it(place: Place) -> None:
    async def look(desk: Actor) -> None:
        app, now = desk.app, desk.app.clock.now()
        worker_info = WorkerInfo(kind="up", host="box", pid=42, started_at=now - MINUTE, agents={"shop": "v1"})
        await app.store.commit(switch_on("shop", "ada", "on"))
        (away,) = [agent_status for agent_status in (await read_status(desk)).agents if agent_status.agent == "shop"]
        assert (away.alive, away.waits.startswith("No process runs it. Start `halter up FOLDER`")) == (False, True)
        await app.store.beat(WorkerId("w1"), about=worker_info.encode())
        (shop,) = [agent_status for agent_status in (await read_status(desk)).agents if agent_status.agent == "shop"]
        assert (shop.alive, shop.on, shop.waits) == (True, True, "Idle.")
        assert [(agent_status.kind, agent_status.host, agent_status.pid) for agent_status in shop.places] == [
            ("up", "box", 42)
        ]

    on_store(place, look)


def on_store(place: Place, job: Callable[[Actor], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_runtime(read_settings(place.environ, place.home), environ=place.environ) as app:
            await job(Actor(app, Principal("ada")))

    asyncio.run(main())
