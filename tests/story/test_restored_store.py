"""An older copy of a store runs nothing until a person accepts what is missing: real commands on real files."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner, Result

from halter import Guard
from halter.cli.commands import build_command_tree
from halter.core.errors import StoreUnusable

AGENT: Final = "name: clerk\nlimits: {max_cost_usd_per_day: 0.20}\n"
TOOLS: Final = '''
from pathlib import Path

from halter.tools.function_tool import tool


@tool(level="SAFE", cost=0.06)
def pay(order: int) -> str:
    """Pay for something."""
    with (Path(__file__).parents[1] / "ledger").open("a") as ledger:
        ledger.write("paid\\n")
    return "paid"
'''
PAY: Final = "- call: pay\n  arguments: {order: 1}\n"
ACTS: Final = (
    ("play", "clerk/pay.yaml"),
    ("run", "clerk", "hello"),
    ("chat", "clerk"),
    ("up", "clerk"),
    ("serve", "--listen", "127.0.0.1:0"),
    ("serve", "clerk", "--listen", "127.0.0.1:0"),
    ("on", "clerk"),
    ("resume", "fleet"),
    ("approve", "some"),
    ("deny", "some"),
    ("budget", "raise", "fleet", "1"),
    ("rules", "end", "some"),
    ("schedules", "run", "clerk/daily"),
    ("schedules", "cancel", "clerk/daily"),
    ("policy", "apply", "halter.yaml", "--yes"),
    ("erase", "--older-than", "1d", "--yes"),
)
"""Commands that run something, or say what a person decided."""
LOOKS: Final = (
    *(("sessions",), ("report",), ("inbox",), ("budget",), ("audit",), ("rules",), ("schedules",)),
    *(("findings",), ("proposals",), ("policy",)),
)
"""Commands that only look."""
MISSING: Final = "Nothing runs on it until a person decides."


class Place:
    """A home with an agent, its store, and the commands that a person types there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = home / "halter.db"
        self.environ = {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "HALTER_STORE": str(self.store),
            "HALTER_PERSON": "ada",
            "COLUMNS": "80",
        }
        self.checkpoints = home / "state" / "halter" / "checkpoints"
        (home / "clerk").mkdir()
        for name, text in {"agent.yaml": AGENT, "tools.py": TOOLS, "pay.yaml": PAY}.items():
            (home / "clerk" / name).write_text(text)
        (home / "halter.yaml").write_text("limits: {max_cost_usd_per_day: 5}\n")
        self.answer("trust", "clerk")

    def halter(self, *words: str, **environ: str) -> Result:
        return CliRunner().invoke(build_command_tree(), list(words), env={**self.environ, **environ})

    def answer(self, *words: str, **environ: str) -> str:
        result = self.halter(*words, **environ)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.halter(*words, "--json").stdout)

    def pay(self, **environ: str) -> Result:
        return self.halter("play", "clerk/pay.yaml", **environ)

    def count_payments(self) -> int:
        ledger = self.home / "ledger"
        return ledger.read_text().count("paid") if ledger.exists() else 0

    def copy_store(self) -> Path:
        """Copy the store, as SQLite does it."""
        copy = self.home / "copy.db"
        with closing(sqlite3.connect(self.store)) as connection, closing(sqlite3.connect(copy)) as other:
            connection.backup(other)
        return copy

    def put_back(self, copy: Path) -> None:
        for path in self.home.glob("halter.db*"):
            path.unlink()
        shutil.copy(copy, self.store)

    def read_checkpoints(self) -> dict[str, bytes]:
        """Read every file in the folder of checkpoints."""
        return {path.name: path.read_bytes() for path in self.checkpoints.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


@pytest.fixture
def restored(place: Place) -> Place:
    """A copy from before more money was spent and the fleet was halted, put back."""
    assert place.pay().exit_code == 0
    copy = place.copy_store()
    assert place.pay().exit_code == 0
    place.answer("halt", "fleet")
    place.put_back(copy)
    return place


def is_refused(result: Result) -> bool:
    return result.exit_code == 3 and MISSING in result.output.replace("\n", " ")


def test_an_older_copy_of_the_store_runs_nothing_and_says_what_is_missing(restored: Place) -> None:
    before = restored.read_checkpoints()
    for words in ACTS:
        result = restored.halter(*words)
        assert is_refused(result), f"{words}\n{result.output}"
    assert restored.count_payments() == 2
    assert restored.read_checkpoints() == before
    text = " ".join(restored.pay().output.split())
    assert "events until" in text
    assert "1 of fleet" in text
    assert "up to $0.06 of spending, 1 halt." in text
    assert text.endswith("halter store accept")


def test_who_only_looks_at_an_older_copy_is_warned_and_answered(restored: Place) -> None:
    before = restored.read_checkpoints()
    for words in LOOKS:
        result = restored.halter(*words)
        assert result.exit_code == 0, f"{words}\n{result.output}"
        assert MISSING in result.stderr.replace("\n", " "), words
        assert MISSING not in result.stdout.replace("\n", " "), words
    assert restored.halter("verify").exit_code == 1
    assert restored.halter("store").exit_code == 1
    payload = restored.json("store")
    assert (payload["whole"], payload["missing"] > 1) == (False, True)
    checks = {check["name"]: check for check in restored.json("doctor")}
    assert checks["checkpoints"]["verdict"] == "problem"
    assert MISSING in checks["checkpoints"]["finding"]
    assert restored.read_checkpoints() == before


def test_what_stops_agents_works_on_an_older_copy_and_makes_it_no_better(restored: Place) -> None:
    before = restored.read_checkpoints()
    restored.answer("halt", "fleet")
    restored.answer("off", "clerk")
    assert restored.read_checkpoints() == before
    assert is_refused(restored.pay())


def test_after_a_person_accepted_what_is_missing_everything_resumes(restored: Place) -> None:
    assert restored.halter("store", "accept").exit_code == 2, "nobody can be asked here"
    assert restored.halter("store", "accept", "--yes", HALTER_AGENT="clerk").exit_code == 1
    assert is_refused(restored.pay())
    restored.answer("store", "accept", "--yes", "--reason", "the backup of Monday")
    assert restored.pay().exit_code == 0
    assert restored.count_payments() == 3
    assert restored.json("store")["whole"]
    verified = restored.halter("verify")
    assert verified.exit_code == 0, verified.output
    assert "a person accepted the store" in " ".join(verified.stdout.split())
    with closing(sqlite3.connect(restored.store)) as store:
        ((facts,),) = store.execute("SELECT facts FROM events WHERE kind = 'store_accepted'")
    payload = json.loads(facts)
    assert (payload["by"], payload["reason"]) == ("ada", "the backup of Monday")
    assert "1 halt" in payload["lacks"]
    assert "there is nothing to accept" in restored.answer("store", "accept")


def test_the_newer_store_put_back_resumes_without_a_message(restored: Place) -> None:
    older = restored.copy_store()
    assert is_refused(restored.pay())
    restored.answer("store", "accept", "--yes")
    newer = restored.home / "newer.db"
    shutil.copy(restored.store, newer)
    restored.put_back(older)
    assert is_refused(restored.pay())
    restored.put_back(newer)
    assert restored.pay().exit_code == 0


def test_a_store_that_was_deleted_is_not_silently_created_again(place: Place) -> None:
    assert place.pay().exit_code == 0
    for path in place.home.glob("halter.db*"):
        path.unlink()
    result = place.pay()
    assert result.exit_code == 3
    assert "is missing" in " ".join(result.output.split())
    assert not place.store.exists()
    assert place.halter("sessions").exit_code == 3
    place.answer("store", "accept", "--yes")
    assert place.pay().exit_code == 0
    assert place.answer("verify").startswith("Nothing was altered")


def test_a_store_that_another_one_replaced_is_missed(place: Place) -> None:
    path = place.home / "other.db"
    assert place.pay().exit_code == 0
    place.answer("play", "clerk/pay.yaml", HALTER_STORE=str(path))
    place.put_back(path)
    result = place.pay()
    assert result.exit_code == 3
    assert "is not the one that was used here before" in " ".join(result.output.split())
    place.answer("store", "accept", "--yes")
    place.answer("halt", "fleet")


def test_machines_with_checkpoints_of_their_own_doubt_nothing_and_honour_what_another_one_accepted(
    place: Place,
) -> None:
    values, there = ({"XDG_STATE_HOME": str(place.home / name)} for name in ("here", "there"))
    assert place.pay(**values).exit_code == 0
    place.answer("halt", "fleet", **there)
    copy = place.copy_store()
    place.answer("resume", "fleet", **values)
    place.answer("halt", "fleet", **there)
    place.put_back(copy)
    assert is_refused(place.halter("resume", "fleet", **values))
    assert is_refused(place.halter("resume", "fleet", **there))
    place.answer("store", "accept", "--yes", **values)
    place.answer("resume", "fleet", **there)
    place.answer("halt", "fleet", **values)
    for machine in (values, there):
        assert place.halter("verify", **machine).exit_code == 0


def test_an_erasure_is_no_loss(place: Place) -> None:
    assert place.pay().exit_code == 0
    (session,) = place.json("sessions")
    place.answer("erase", "--session", session["session"], "--yes")
    assert place.json("store")["whole"]
    place.answer("halt", "fleet")


@pytest.mark.parametrize("store", sorted((Path(__file__).parents[1] / "golden").glob("*/store.db")), ids=str)
def test_a_store_of_an_earlier_version_is_opened_without_an_alarm(place: Place, store: Path) -> None:
    shutil.copy(store, place.store)
    place.answer("halt", "fleet")
    assert place.json("store")["whole"]
    place.answer("resume", "fleet")


async def test_a_program_runs_nothing_on_an_older_copy(restored: Place) -> None:
    with pytest.raises(StoreUnusable, match="until a person decides"):
        async with Guard(restored.store, environ=restored.environ):
            """Nothing comes to this."""


def open_in_program(place: Place, *, new: bool = False) -> None:
    with Guard(place.home / "runs.db", environ=place.environ, new=new).blocking() as guard, guard.session("work"):
        """A program does its work."""


def test_a_program_begins_its_deleted_store_anew_only_if_it_says_so(place: Place) -> None:
    open_in_program(place)
    place.answer("sessions", HALTER_STORE=str(place.home / "runs.db"))
    (place.home / "runs.db").unlink()
    with pytest.raises(StoreUnusable, match=r"or, in the program that made it: store=\.\.\., new=True"):
        open_in_program(place)
    assert not (place.home / "runs.db").exists()
    open_in_program(place, new=True)
    open_in_program(place)
    lines = place.answer("verify", HALTER_STORE=str(place.home / "runs.db"))
    assert lines.startswith("Nothing was altered")
    with closing(sqlite3.connect(place.home / "runs.db")) as store:
        (facts,) = store.execute("SELECT facts FROM events WHERE kind = 'store_accepted'").fetchone()
    assert "A new store would not have its spending, halts and denials." in json.loads(facts)["lacks"]


def test_a_program_cannot_begin_anew_a_store_on_which_agents_ran_by_command(place: Place) -> None:
    open_in_program(place)
    place.answer("play", "clerk/pay.yaml", HALTER_STORE=str(place.home / "runs.db"))
    (place.home / "runs.db").unlink()
    with pytest.raises(StoreUnusable, match=r"start a new one: halter store accept$"):
        open_in_program(place, new=True)
    assert not (place.home / "runs.db").exists()


async def test_a_program_cannot_take_an_older_copy_for_a_new_store(restored: Place) -> None:
    with pytest.raises(StoreUnusable, match="until a person decides"):
        async with Guard(restored.store, environ=restored.environ, new=True):
            """Nothing comes to this."""
