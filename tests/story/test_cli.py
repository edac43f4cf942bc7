"""The commands as an operator types them, on a store with a session that worked and one that ended."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import WorkerId
from halter.core.money import Caps, Spender, make_legs
from halter.guard.ledger import ActualResult
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold

Halter = Callable[..., Result]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "200",
    }


@pytest.fixture
def halter(environment: dict[str, str]) -> Halter:
    runner = CliRunner()
    return lambda *words: runner.invoke(build_command_tree(), list(words), env=environment)


@pytest.fixture
def store_file(environment: dict[str, str], tmp_path: Path) -> Path:
    """A store in which the session `worked` holds something, and `ended` spent half a dollar and ended."""
    settings = read_settings(environment, tmp_path)

    async def fill() -> None:
        async with open_runtime(settings) as app:
            for name in ("worked", "ended"):
                await _spend(app, name, ends=name == "ended")

    asyncio.run(fill())
    return Path(settings.store)


async def _spend(app: Runtime, name: str, *, ends: bool) -> None:
    start = SessionStarted(session=name, agent="watch", kind="task", started_by="ada")
    await app.store.commit(lifecycle.start_session(start, b"look after the canary"))
    (lease,) = await app.store.claim(WorkerId(name), 10)
    held = make_legs(Caps(), Spender(name, "watch"), app.clock.now(), usd=600_000)
    answer = await hold(app.ledger, lease, CallStarted(call=f"{name}.1", tool="look", legs=held), b"canary arguments")
    assert isinstance(answer, HoldTaken)
    if ends:
        await app.ledger.settle(lease, answer.flight, ActualResult("ok", usd=500_000, body=b"canary result"))
        assert (await app.store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))).events


def test_budget_shows_what_is_spent_held_and_left(halter: Halter, store_file: Path) -> None:
    result = halter("budget", "show", "--json")
    assert result.exit_code == 0
    fleet = next(row for row in json.loads(result.stdout)["budgets"] if row["scope"] == "fleet")
    assert (fleet["cap"], fleet["spent"], fleet["held"]) == (20, 0.5, 0.6)
    table = halter("budget")
    assert "$0.50" in table.stdout
    assert "agent:watch" in table.stdout


def test_a_raised_cap_is_in_the_journal_with_the_name_of_the_person(halter: Halter, store_file: Path) -> None:
    raised = halter("budget", "raise", "fleet", "30", "--reason", "launch day", "--json")
    assert raised.exit_code == 0, raised.output
    assert json.loads(raised.stdout)["by"] == "ada"
    fleet = next(
        row for row in json.loads(halter("budget", "show", "--json").stdout)["budgets"] if row["scope"] == "fleet"
    )
    assert (fleet["cap"], fleet["cap_by"]) == (30, "ada")


def test_a_cap_can_be_lowered_below_what_is_spent(halter: Halter, store_file: Path) -> None:
    assert halter("budget", "lower", "agent:watch", "0.10").exit_code == 0
    rows = json.loads(halter("budget", "show", "--json").stdout)["budgets"]
    agent = next(row for row in rows if row["scope"] == "agent:watch")
    assert (agent["cap"], agent["spent"]) == (0.1, 0.5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("raise", "fleet", "10"), "The cap of fleet is $20.00; this amount would not raise it."),
        (("lower", "fleet", "30"), "The cap of fleet is $20.00; this amount would not lower it."),
        (("raise", "fleet", "much"), "Invalid amount 'much'. Use dollars, such as 2.50, or none."),
        (("raise", "fleet", "$-1"), "use an amount from 0 to"),
        (("raise", "fleet", "nan"), "Invalid amount 'nan'"),
        (("raise", "fleet", "1e99"), "use an amount from 0 to"),
        (("raise", "agent:nobody", "10"), "There is no budget for scope 'agent:nobody'."),
        (("raise", "fleet", "30", "--window", "day/1999-01-01"), "Choose one with --window."),
        (("raise", "fleet", "30", "--window", "minute/2026-11-15T10:31"), "Invalid window 'minute/2026-11-15T10:31'"),
    ],
)
def test_a_slip_in_a_cap_is_answered_with_a_sentence(
    halter: Halter, store_file: Path, words: tuple[str, ...], sentence: str
) -> None:
    answer = halter("budget", *words)
    assert answer.exit_code == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.output


def test_verify_of_an_untouched_store_finds_nothing(halter: Halter, store_file: Path) -> None:
    answer = halter("verify", "--json")
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    assert report["ok"]
    assert report["events"] == 6
    assert "Nothing was altered" in halter("verify").stdout


def test_verify_names_an_edited_event_and_leaves_with_1(halter: Halter, store_file: Path) -> None:
    with closing(sqlite3.connect(store_file)) as connection, connection:
        connection.execute("UPDATE events SET body = CAST('forged' AS BLOB) WHERE kind = 'call_settled'")
    answer = halter("verify")
    assert answer.exit_code == 1
    assert "session:ended" in answer.stdout


def test_a_budget_edited_by_hand_is_found_and_can_be_rebuilt(halter: Halter, store_file: Path) -> None:
    with closing(sqlite3.connect(store_file)) as connection, connection:
        connection.execute("UPDATE budgets SET spent = 0 WHERE scope = 'fleet'")
    assert halter("verify").exit_code == 1
    assert halter("verify", "--rebuild").exit_code == 0
    assert halter("verify").exit_code == 0


def test_erased_bodies_are_gone_and_the_chain_still_holds(halter: Halter, store_file: Path) -> None:
    answer = halter("erase", "--session", "ended", "--yes")
    assert answer.exit_code == 0, answer.output
    report = json.loads(halter("verify", "--json").stdout)
    assert (report["ok"], report["erased"]) == (True, 3)


def test_a_session_that_has_not_ended_is_not_erased(halter: Halter, store_file: Path) -> None:
    answer = halter("erase", "--session", "worked", "--yes")
    assert answer.exit_code == 1
    assert "has not ended" in answer.stdout


@pytest.mark.parametrize("words", [("erase",), ("erase", "--session", "x", "--older-than", "3d")])
def test_erase_wants_to_know_what_exactly(halter: Halter, words: tuple[str, ...]) -> None:
    answer = halter(*words)
    assert answer.exit_code == 2
    assert "Pass exactly one of --session ID" in answer.stderr


def test_doctor_says_that_all_is_well(halter: Halter, store_file: Path) -> None:
    answer = halter("doctor", "--json")
    assert answer.exit_code == 0, answer.output
    # Another program may have the port here, and bubblewrap or newer prices may be missing.
    texts = {"port", "sandbox", "prices"}
    assert {check["verdict"] for check in json.loads(answer.stdout) if check["name"] not in texts} == {"ok"}
    assert "PROBLEM" not in halter("doctor").stdout


def test_doctor_names_a_place_for_checkpoints_that_cannot_be_written(
    halter: Halter, store_file: Path, environment: dict[str, str]
) -> None:
    blocked = store_file.parent / "blocked"
    blocked.write_text("a file where a folder should be")
    environment["HALTER_CHECKPOINTS"] = str(blocked / "checkpoints")
    assert halter("budget", "raise", "fleet", "40").exit_code == 0
    answer = halter("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(answer.stdout)}
    assert answer.exit_code == 1
    assert str(blocked) in checks["checkpoints"]["finding"]


@pytest.mark.parametrize("command", ["verify", "budget", "doctor"])
def test_a_store_of_unknown_form_is_a_sentence(halter: Halter, command: str) -> None:
    words = ("budget", "show") if command == "budget" else (command,)
    answer = halter(*words, "--store", "mysql://somewhere")
    assert answer.exit_code == 3
    assert "Unknown form of store" in answer.stderr


def test_sessions_are_listed_the_newest_first(halter: Halter, store_file: Path) -> None:
    payload = json.loads(halter("sessions", "--json").stdout)
    assert [(row["session"], row["state"]) for row in payload] == [("ended", "COMPLETED"), ("worked", "RUNNING")]
    assert "COMPLETED" in halter("sessions").stdout


def test_a_receipt_says_what_was_done_and_spent_and_why_it_ended(halter: Halter, store_file: Path) -> None:
    receipt = json.loads(halter("receipt", "end", "--json").stdout)
    assert (receipt["session"], receipt["terminal_reason"], receipt["cost_usd"]) == ("ended", "completed", 0.5)
    assert "$0.50 (reserved: $0.60)" in halter("receipt", "ended").stdout


def test_show_prints_every_event_with_its_body(halter: Halter, store_file: Path) -> None:
    events = json.loads(halter("show", "ended", "--json").stdout)
    kinds = ["session_started", "call_started", "call_settled", "session_ended"]
    assert [event["kind"] for event in events] == kinds
    assert events[1]["facts"]["tool"] == "look"
    assert events[2]["body"] == "canary result"
    assert "canary result" in halter("show", "ended", "--events").stdout


def test_show_prints_a_conversation_with_each_call_beside_its_outcome(halter: Halter, store_file: Path) -> None:
    text = halter("show", "ended").stdout
    assert re.search(r"call look: .*\n.*→ ok, \$0\.50: canary result", text), text
    assert "4; show all with: halter show ended --events" in text
    assert halter("show", "worked").stdout.count("call ") == halter("show", "worked").stdout.count("→")


def test_a_session_that_nobody_knows_is_a_sentence(halter: Halter, store_file: Path) -> None:
    answer = halter("show", "nosuch")
    assert answer.exit_code == 2
    assert "No session begins with 'nosuch'" in answer.stderr


def test_a_halt_and_its_end_are_in_the_journal_with_a_name(halter: Halter, store_file: Path) -> None:
    assert halter("halt", "agent:watch", "--reason", "too loud").exit_code == 0
    assert halter("resume", "agent:watch").exit_code == 0
    assert halter("resume", "agent:watch").exit_code == 1
    with closing(sqlite3.connect(store_file)) as connection, connection:
        rows = connection.execute("SELECT kind, facts FROM events WHERE stream = 'fleet' ORDER BY seq").fetchall()
    assert [kind for kind, _ in rows] == ["halt_requested", "halt_lifted"]
    assert all(json.loads(facts)["by"] == "ada" for _, facts in rows)


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [
        ("agent:", "Unknown scope"),
        ("robot:7", "Unknown scope"),
        ("", "Unknown scope"),
        ("flet", "There is no agent and no session 'flet'; did you mean `fleet`?"),
        ("agent:wach", "There is no agent 'wach': did you mean `watch`?"),
        ("session:nosuch", "No session begins with 'nosuch'"),
        ("trigger:watch/x", "There is no trigger 'watch/x'"),
        ("watch/x", "There is no trigger 'watch/x'"),
    ],
)
def test_a_mistyped_scope_halts_nothing_and_says_so(
    halter: Halter, store_file: Path, scope: str, sentence: str
) -> None:
    answer = halter("halt", scope)
    assert answer.exit_code == 2
    assert sentence in answer.stderr
    assert halter("inbox", "--check").exit_code == 0


@pytest.mark.parametrize(
    ("typed", "scope"),
    [
        ("fleet", "fleet"),
        ("watch", "agent:watch"),
        ("agent:watch", "agent:watch"),
        ("ended", "session:ended"),
        ("work", "session:worked"),
        ("session:end", "session:ended"),
    ],
)
def test_a_halt_takes_a_name_an_id_or_a_whole_scope(halter: Halter, store_file: Path, typed: str, scope: str) -> None:
    assert json.loads(halter("halt", typed, "--json").stdout) == {"subject": scope, "done": True, "known": True}
    assert halter("resume", typed).exit_code == 0
    assert halter("resume", typed).exit_code == 1


def test_resume_also_switches_an_agent_on(halter: Halter, store_file: Path) -> None:
    assert halter("off", "watch").exit_code == 0
    assert "watch is on" in halter("resume", "watch").stdout
    assert halter("resume", "watch").exit_code == 1


def test_what_is_halted_is_in_the_inbox_and_a_script_can_check_it(halter: Halter, store_file: Path) -> None:
    halter("halt", "watch")
    result = halter("inbox")
    assert result.exit_code == 0
    assert "halter resume agent:watch" in result.stdout
    assert "Nothing needs you." not in result.stdout
    assert halter("inbox", "--check").exit_code == 1
    halter("resume", "watch")
    assert halter("inbox", "--check").exit_code == 0


def test_an_empty_inbox_says_that_nothing_needs_you(halter: Halter, store_file: Path) -> None:
    assert "Nothing needs you." in halter("inbox").stdout
    assert json.loads(halter("inbox", "--json").stdout) == []
    assert halter("inbox", "--check").exit_code == 0
    answer = halter("approve", "abc")
    assert answer.exit_code == 2
    assert "See `halter inbox`" in answer.stderr


@pytest.mark.parametrize("words", [("verify",), ("budget", "show"), ("sessions",), ("doctor",), ("halt", "fleet")])
def test_a_store_that_is_not_there_is_never_made_by_looking_at_it(
    halter: Halter, tmp_path: Path, words: tuple[str, ...]
) -> None:
    missing = tmp_path / "nowhere" / "typo.db"
    answer = halter(*words, "--store", str(missing))
    assert answer.exit_code == 3
    assert "There is no store" in answer.stderr
    assert not missing.parent.exists()


def test_the_journal_is_readable_by_its_owner_alone(store_file: Path) -> None:
    assert store_file.stat().st_mode & 0o077 == 0
    assert store_file.parent.stat().st_mode & 0o077 == 0


def test_a_cap_of_the_fleet_can_be_set_before_anything_was_spent(
    halter: Halter, environment: dict[str, str], tmp_path: Path
) -> None:
    async def make_store() -> None:
        async with open_runtime(read_settings(environment, tmp_path)):
            pass

    asyncio.run(make_store())
    assert halter("budget", "raise", "fleet", "30").exit_code == 0
    (row,) = json.loads(halter("budget", "show", "--json").stdout)["budgets"]
    assert (row["scope"], row["cap"], row["cap_by"]) == ("fleet", 30, "ada")


@pytest.mark.parametrize("words", [("audit", "--since", "5x"), ("resume", "fleet", "--over", "5q")])
def test_a_mistyped_duration_is_a_sentence(halter: Halter, store_file: Path, words: tuple[str, ...]) -> None:
    answer = halter(*words)
    assert answer.exit_code == 2
    assert "is not a duration" in answer.stderr


def test_budget_needs_no_further_word_to_show_the_caps(halter: Halter, store_file: Path) -> None:
    payload = json.loads(halter("budget", "show", "--json").stdout)
    assert json.loads(halter("budget", "--json", "--store", str(store_file)).stdout) == payload
    assert "Pass options after raise" in halter("budget", "--json", "raise", "fleet", "30").stderr


def test_a_cap_that_no_checkpoint_covers_is_warned_of(
    halter: Halter, store_file: Path, environment: dict[str, str]
) -> None:
    blocked = store_file.parent / "blocked"
    blocked.write_text("a file where a folder should be")
    environment["HALTER_CHECKPOINTS"] = str(blocked / "checkpoints")
    answer = halter("budget", "raise", "fleet", "40")
    assert answer.exit_code == 0
    assert str(blocked) in answer.stderr


@pytest.mark.parametrize("columns", ["40", "59", "80"])
def test_no_word_is_broken_on_a_narrow_screen(
    halter: Halter, store_file: Path, environment: dict[str, str], columns: str
) -> None:
    environment["COLUMNS"] = columns
    for words in (("sessions",), ("budget",), ("show", "ended"), ("receipt", "ended"), ("doctor",)):
        text = halter(*words).stdout
        assert max(map(len, text.splitlines())) <= int(columns)
    assert {"COMPLETED", "completed", "RUNNING"} <= set(halter("sessions").stdout.split())
    assert {"session_started", "call_settled"} <= set(halter("show", "ended", "--events").stdout.split())


def test_one_of_a_thing_is_not_called_several(halter: Halter, store_file: Path) -> None:
    assert "Erased the bodies of 1 session." in halter("erase", "--session", "ended", "--yes").stdout


def test_what_an_agent_wrote_cannot_speak_to_the_terminal(
    halter: Halter, environment: dict[str, str], tmp_path: Path
) -> None:
    async def make_store() -> None:
        async with open_runtime(read_settings(environment, tmp_path)) as app:
            event = SessionStarted(session="s", agent="\x1b[2Jwatch", kind="task", started_by="ada")
            await app.store.commit(lifecycle.start_session(event, b"\x1b]0;owned\x07 \x00 \xed\xa0\x80"))

    asyncio.run(make_store())
    for words in (("sessions",), ("show", "s"), ("receipt", "s")):
        result = halter(*words)
        assert (result.exit_code, "\x1b" in result.stdout) == (0, False)
    assert json.loads(halter("show", "s", "--json").stdout)[0]["body"] == "\x1b]0;owned\x07 ␀ \ufffd"
