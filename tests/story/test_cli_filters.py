"""What a person types to find something: filters, short flags, and a home in which nothing has run yet."""

import asyncio
import json
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from halter.cli.command import make_desk, show_sheet
from halter.cli.commands import SHORT_FLAGS, build_command_tree, load_all_commands
from halter.cli.control.decisions import ask_decisions
from halter.core.clock import DAY
from halter.core.errors import NotDone
from halter.core.events import CallRefused, DecisionAsked, SessionStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.ports import Draft, Query, Write
from halter.core.project import rows_of_event
from halter.core.rows import AuditRow, DecisionRow, SessionRow
from halter.operations.decisions import ApprovalTerms
from halter.present.tables import build_sessions_sheet
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
    return CliRunner().invoke(build_command_tree(), shlex.split(line), env=environment(home))


def list_names(home: Path, line: str) -> list[str]:
    result = types(home, f"{line} --json")
    assert result.exit_code == 0, result.output
    return [row.get("session") or row["call"] for row in json.loads(result.stdout)]


@pytest.mark.parametrize(
    ("typed", "sessions"),
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
def test_sessions_are_found_by_agent_state_age_and_number(home: Path, typed: str, sessions: list[str]) -> None:
    assert list_names(home, f"sessions {typed}") == sessions


def test_an_unknown_state_is_answered_with_the_known_ones(home: Path) -> None:
    result = types(home, "sessions --state asleep")
    assert result.exit_code == 2
    assert "sleeping" in result.output


async def refuse_calls(home: Path) -> None:
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        for agent, outcome in (("clerk", "approval_denied"), ("clerk", "rate_limited"), ("guide", "approval_denied")):
            session = f"{agent}-{outcome}"
            await app.store.commit(
                lifecycle.start_session(SessionStarted(session=session, agent=agent, kind="task", started_by="ada"))
            )
            (lease,) = await app.store.claim(WorkerId(session), 1)
            refusal = CallRefused(call=f"{session}.1", tool="send", outcome=outcome, sentence="No.")
            reads = [(AuditRow, refusal.call), *rows_of_event(refusal)]
            write = Write(session_stream(lease.session), "1", lambda _, it=refusal: [Draft(it)], reads, lease=lease)
            await app.store.commit(write)


def test_audited_calls_are_found_by_agent_outcome_age_and_number(tmp_path: Path) -> None:
    asyncio.run(refuse_calls(tmp_path))
    first, second, third = "clerk-approval_denied.1", "clerk-rate_limited.1", "guide-approval_denied.1"

    def calls(text: str) -> list[str]:
        return [row["call"] for row in json.loads(types(tmp_path, f"audit {text} --json").stdout)]

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
    for text in (line, f"{line} --json"):
        result = types(tmp_path, text)
        assert result.exit_code == 0, result.output
        assert "Nothing has run here yet" in " ".join(result.output.split())
    assert not [*tmp_path.rglob("*.db")], "looking makes no store"


@pytest.mark.parametrize("line", [*LOOKS, "halt fleet", "cancel clerk-1"])
def test_a_store_that_was_named_and_is_not_there_is_a_mistake(tmp_path: Path, line: str) -> None:
    result = CliRunner().invoke(
        build_command_tree(), [*line.split(), "--store", str(tmp_path / "typo.db")], env=environment(tmp_path)
    )
    assert result.exit_code == 3
    values = {**environment(tmp_path), "HALTER_STORE": str(tmp_path / "typo.db")}
    assert CliRunner().invoke(build_command_tree(), line.split(), env=values).exit_code == 3


@pytest.mark.parametrize("line", ["halt fleet", "cancel clerk-1", "deny x", "budget raise fleet 3"])
def test_what_changes_something_says_so_where_there_is_no_store(tmp_path: Path, line: str) -> None:
    assert types(tmp_path, line).exit_code == 3


@pytest.mark.parametrize("line", ["inbox", "doctor", "sessions"])
def test_a_store_that_is_gone_is_not_taken_for_a_beginning(tmp_path: Path, line: str) -> None:
    furnish(tmp_path)
    for file in (tmp_path / "state" / "halter").glob("halter.db*"):
        file.unlink()
    assert types(tmp_path, line).exit_code == 3


class TypedAnswers:
    """A person at a terminal who types these lines, one for each question."""

    is_tty = True

    def __init__(self, *lines: str) -> None:
        self.lines = [*lines]
        self.prompts: list[str] = []

    def has_line(self) -> bool:
        return False

    def drop(self) -> None:
        pass

    def line(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return self.lines.pop(0) if self.lines else None


async def ask_for_calls(home: Path, keyboard: TypedAnswers, number: int = 0) -> dict[str, str]:
    """Have three decisions wait, ask a person about them, and return the verdicts."""
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        await app.store.commit(lifecycle.start_session(SESSION))
        (lease,) = await app.store.claim(WorkerId("w"), 1)
        for name in ("a", "b", "c"):
            event = DecisionAsked(
                decision=f"clerk-1.{name}/approval",
                about="approval",
                subject=f"clerk-1.{name}",
                name="send",
                digest=name,
                expires_at=app.clock.now() + DAY,
                level="RESTRICTED",
            )
            reads = [(DecisionRow, event.decision), *rows_of_event(event)]
            body = f'send {{"to":"{name}"}}'.encode()
            write = Write(
                session_stream("clerk-1"), name, lambda _, it=event, text=body: [Draft(it, text)], reads, lease=lease
            )
            await app.store.commit(write)
        await ask_decisions(make_desk(app), keyboard, ApprovalTerms(), number)
        rows = await app.store.ask(Query("all_decisions", DecisionRow))
        return {row.subject[-1]: row.verdict for row in rows}


SESSION = SessionStarted(session="clerk-1", agent="clerk", kind="task", started_by="ada")


@pytest.mark.parametrize(
    ("lines", "verdicts"),
    [
        (("o", "y", "n", "YES"), {"a": "approve", "b": "deny", "c": "approve"}),
        (("", "", "maybe", "y"), {"a": "", "b": "", "c": "approve"}),
        (("one by one", "y", "q", "y"), {"a": "approve", "b": "", "c": ""}),
        ((), {"a": "", "b": "", "c": ""}),
        (("y",), {"a": "approve", "b": "approve", "c": "approve"}),
        (("no",), {"a": "deny", "b": "deny", "c": "deny"}),
        (("q",), {"a": "", "b": "", "c": ""}),
    ],
)
async def test_calls_of_a_session_are_shown_and_decided_together_or_one_by_one_and_only_a_yes_approves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: tuple[str, ...], verdicts: dict[str, str]
) -> None:
    keyboard = TypedAnswers(*lines)
    assert await ask_for_calls(tmp_path, keyboard) == verdicts
    output = capsys.readouterr().out
    assert [f'"to":"{name}"' in output for name in "abc"] == [True] * 3
    assert "Exactly these 3 calls" in keyboard.prompts[0]
    assert "clerk wants to send to a." in output
    assert "RESTRICTED" in output


async def test_a_decision_chosen_by_number_is_shown_and_confirmed_before_it_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await ask_for_calls(tmp_path / "no", TypedAnswers("s"), 2) == {"a": "", "b": "", "c": ""}
    assert await ask_for_calls(tmp_path / "yes", TypedAnswers("y"), 2) == {"a": "", "b": "approve", "c": ""}
    assert '"to":"a"' not in capsys.readouterr().out
    with pytest.raises(NotDone, match="There is no decision 4"):
        await ask_for_calls(tmp_path / "none", TypedAnswers("y"), 4)


@pytest.mark.parametrize("line", ["approve", "approve 1", "approve --json", "approve 1 --json"])
def test_without_a_terminal_nothing_is_approved_but_by_an_id(home: Path, line: str) -> None:
    result = types(home, line)
    assert result.exit_code == 2
    assert "Not a terminal, so you cannot be asked. Pass a decision id from halter inbox." in result.output
    needs = json.loads(types(home, "inbox --json").stdout)
    assert [need["decision"] for need in needs if need["decision"]] == ["clerk-1.1/approval"]


def test_an_id_is_in_one_piece_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = ["01m7g43mesvqxs0p8cp66m0k6g", "01m7g3ych8fzy54881n1w0t5ys"]
    rows = [
        SessionRow(ids[0], agent="night-watch", state="WAITING_FOR_APPROVAL", started_at=1, due_at=3 * DAY),
        SessionRow(ids[1], agent="clerk", state="BUDGET_EXCEEDED", started_at=1, terminal_reason="cost_cap_reached"),
    ]
    show_sheet(build_sessions_sheet(rows, DAY))
    output = capsys.readouterr().out
    assert output.startswith("Sessions")
    assert "┃" in output, "a table"
    assert [any(text in line for line in output.splitlines()) for text in ids] == [True, True]
    assert max(map(len, output.splitlines())) <= 80
