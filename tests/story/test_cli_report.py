"""`halter report` as it is typed."""

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.events import SessionStarted
from halter.core.ids import OUTBOX, SessionId, WorkerId
from halter.guard.halts import switch_on
from halter.runtime.runtime import open_runtime
from halter.settings import read_settings
from halter.state import lifecycle

Halter = Callable[..., Result]
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def halter(tmp_path: Path) -> Halter:
    environment = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "200",
    }

    async def fill() -> None:
        async with open_runtime(read_settings(environment, tmp_path)) as app:
            start = SessionStarted(session="s1", agent=HOSTILE, kind="task", started_by="ada")
            await app.store.commit(lifecycle.start_session(start))
            (lease,) = await app.store.claim(WorkerId("w"), 1, SessionId("s1"))
            await app.store.commit(lifecycle.end_session(lease, "ERROR", "model_error"))
            await app.store.commit(switch_on("clerk", "ada", "on"))

    asyncio.run(fill())
    return lambda *words: CliRunner().invoke(build_command_tree(), list(words), env=environment)


def test_a_report_is_shown_to_people_and_to_programs(halter: Halter) -> None:
    result = halter("report")
    assert result.exit_code == 0, result.output
    assert "Nothing needs you." in result.stdout
    assert "s1: ERROR, model_error" in result.stdout
    payload = json.loads(halter("report", "--json").stdout)
    assert [agent["ended"] for agent in payload["agents"]] == [{"ERROR, model_error": 1}]


def test_a_report_is_a_message_too(halter: Halter) -> None:
    result = halter("report", "--message")
    assert result.stdout.startswith("Halter: nothing needs you; 1 session and $0.00 in 1d\n\n")


def test_a_page_of_a_report_holds_nothing_that_a_browser_would_run(halter: Halter, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert halter("report", "--html", str(path), "--since", "30m").exit_code == 0
    assert "&lt;script&gt;" in path.read_text()
    assert "<script" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_report_is_sent_over_a_channel_of_an_agent_that_is_known(halter: Halter, tmp_path: Path) -> None:
    assert halter("report", "--send", "clerk/mail").exit_code == 0
    assert halter("report", "--send", "nobody/mail").exit_code == 2
    assert halter("report", "--send", "mail").exit_code == 2
    settings = read_settings({"XDG_STATE_HOME": str(tmp_path / "state"), "USER": "ada"}, tmp_path)

    async def list_queued() -> list[str]:
        async with open_runtime(settings) as app:
            return [event.kind for event in await app.store.read(OUTBOX)]

    assert asyncio.run(list_queued()) == ["notification_queued"]


@pytest.mark.parametrize("words", [("--since", "soon"), ("--html", "/nowhere/at/all.html")])
def test_wrong_options_are_answered_in_a_sentence(halter: Halter, words: tuple[str, ...]) -> None:
    result = halter("report", *words)
    assert result.exit_code not in (0, 1)
    assert "Traceback" not in result.output
