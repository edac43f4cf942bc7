"""What a person types to find something: filters, short flags, and a home in which nothing has run yet."""

import asyncio
import json
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from halter.cli import build
from halter.cli.commands import SHORT_FLAGS, load_all_commands
from halter.core.events import CallRefused, SessionStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.ports import Draft, Write
from halter.core.project import rows_of_event
from halter.core.rows import AuditRow
from halter.runtime.runtime import open_runtime
from halter.settings import read_settings
from halter.state import lifecycle
from tests.story.clerks import environment, furnish


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("clerk") / "home"
    home.mkdir()
    furnish(home)
    return home


def types(home: Path, line: str) -> Result:
    return CliRunner().invoke(build(), shlex.split(line), env=environment(home))


def names(home: Path, line: str) -> list[str]:
    said = types(home, f"{line} --json")
    assert said.exit_code == 0, said.output
    return [row.get("session") or row["call"] for row in json.loads(said.stdout)]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", ["clerk-1", "clerk-2"]),
        ("-a clerk", ["clerk-1", "clerk-2"]),
        ("--agent other", []),
        ("--state completed", ["clerk-2"]),
        ("-s 'waiting for approval'", ["clerk-1"]),
        ("-s WAITING_FOR_APPROVAL -a clerk", ["clerk-1"]),
        ("-s completed -a clerk -S 1h", ["clerk-2"]),
        ("-s completed -a other", []),
        ("-S 0s", []),
        ("-n 1", ["clerk-1"]),
    ],
)
def test_sessions_are_found_by_agent_state_age_and_number(home: Path, typed: str, found: list[str]) -> None:
    assert names(home, f"sessions {typed}") == found


def test_an_unknown_state_is_answered_with_the_known_ones(home: Path) -> None:
    said = types(home, "sessions --state asleep")
    assert said.exit_code == 2
    assert "sleeping" in said.output


async def refuse_calls(home: Path) -> None:
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        for agent, outcome in (("clerk", "approval_denied"), ("clerk", "rate_limited"), ("guide", "approval_denied")):
            session = f"{agent}-{outcome}"
            await app.store.commit(
                lifecycle.start_session(SessionStarted(session=session, agent=agent, kind="task", started_by="ada"))
            )
            (lease,) = await app.store.claim(WorkerId(session), 1)
            refused = CallRefused(call=f"{session}.1", tool="send", outcome=outcome, sentence="No.")
            reads = [(AuditRow, (refused.call,)), *rows_of_event(refused)]
            write = Write(session_stream(lease.session), "1", lambda _, it=refused: [Draft(it)], reads, lease=lease)
            await app.store.commit(write)


def test_audited_calls_are_found_by_agent_outcome_age_and_number(tmp_path: Path) -> None:
    asyncio.run(refuse_calls(tmp_path))
    first, second, third = "clerk-approval_denied.1", "clerk-rate_limited.1", "guide-approval_denied.1"

    def calls(typed: str) -> list[str]:
        return [row["call"] for row in json.loads(types(tmp_path, f"audit {typed} --json").stdout)]

    assert calls("") == [first, second, third]
    assert calls("-a clerk") == [first, second]
    assert calls("-s approval_denied") == [first, third]
    assert calls("--outcome approval_denied -a guide") == [third]
    assert calls("-n 2") == [second, third], "the newest, the oldest of them first"
    assert calls("-n 1 -a clerk -t send") == [second]
    assert calls("-s ok") == calls("-t look") == calls("-a other") == calls("-S 0s") == []
    assert types(tmp_path, "audit -n 2 --follow").exit_code == 2


def test_a_letter_means_the_same_with_every_command() -> None:
    def check(group: TyperGroup) -> None:
        for command in group.commands.values():
            for param in command.params:
                short = {word for word in param.opts if not word.startswith("--")} & {*SHORT_FLAGS.values()}
                assert short == {SHORT_FLAGS[word] for word in param.opts if word in SHORT_FLAGS}
            if isinstance(command, TyperGroup):
                check(command)

    check(load_all_commands())
    assert len({*SHORT_FLAGS.values()}) == len(SHORT_FLAGS)


LOOKS = ("inbox", "report", "doctor", "sessions", "audit", "budget", "findings", "proposals", "rules", "schedules")


@pytest.mark.parametrize("line", LOOKS)
def test_where_nothing_has_run_yet_nothing_is_wrong(tmp_path: Path, line: str) -> None:
    for typed in (line, f"{line} --json"):
        said = types(tmp_path, typed)
        assert said.exit_code == 0, said.output
        assert "Nothing has run here yet" in " ".join(said.output.split())
    assert not [*tmp_path.rglob("*.db")], "looking makes no store"


@pytest.mark.parametrize("line", [*LOOKS, "halt fleet", "cancel clerk-1"])
def test_a_store_that_was_named_and_is_not_there_is_a_mistake(tmp_path: Path, line: str) -> None:
    named = CliRunner().invoke(
        build(), [*line.split(), "--store", str(tmp_path / "typo.db")], env=environment(tmp_path)
    )
    assert named.exit_code == 3
    typed = {**environment(tmp_path), "HALTER_STORE": str(tmp_path / "typo.db")}
    assert CliRunner().invoke(build(), line.split(), env=typed).exit_code == 3


@pytest.mark.parametrize("line", ["halt fleet", "cancel clerk-1", "deny x", "budget raise fleet 3"])
def test_what_changes_something_says_so_where_there_is_no_store(tmp_path: Path, line: str) -> None:
    assert types(tmp_path, line).exit_code == 3


@pytest.mark.parametrize("line", ["inbox", "doctor", "sessions"])
def test_a_store_that_is_gone_is_not_taken_for_a_beginning(tmp_path: Path, line: str) -> None:
    furnish(tmp_path)
    for file in (tmp_path / "state" / "halter").glob("halter.db*"):
        file.unlink()
    assert types(tmp_path, line).exit_code == 3
