"""What a shell receives when somebody presses Tab, over the very protocol that bash, zsh and fish speak."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Halter
from tests.story.clerks import environment, furnish


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clerk")
    furnish(path)
    return path


def complete(home: Path, line: str, shell: str = "bash", **more: str) -> subprocess.CompletedProcess[str]:
    words = line.split(" ")
    environ = {**os.environ, **environment(home), "_HALTER_COMPLETE": f"complete_{shell}", **more}
    environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    environ |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    with Halter((), env=environ, cwd=home) as program:
        body, content = program.communicate()
    return subprocess.CompletedProcess(line, program.wait(), body.decode(), content.decode())


def list_offers(home: Path, line: str, **more: str) -> list[str]:
    process = complete(home, line, **more)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("halter ses", ["sessions"]),
        ("halter show ", ["clerk-1", "clerk-2"]),
        ("halter show clerk-2", ["clerk-2"]),
        ("halter run clerk --resume cl", ["clerk-1", "clerk-2"]),
        ("halter show --follow clerk-1", ["clerk-1"]),
        ("halter approve ", ["clerk-1.1/approval"]),
        ("halter deny clerk", ["clerk-1.1/approval"]),
        ("halter approve x --scope ", ["session", "agent", "fleet"]),
        ("halter on ", ["clerk"]),
        ("halter halt ", ["fleet", "agent:", "trigger:", "session:"]),
        ("halter halt agent:", ["agent:clerk"]),
        ("halter budget raise session:clerk-1", ["session:clerk-1"]),
        ("halter budget ra", ["raise"]),
        ("halter triggers cancel ", ["clerk/letters", "clerk/weekly"]),
        ("halter findings accept ", ["clerk-1.f1"]),
        ("halter proposals accept ", ["clerk-1.m1"]),
        ("halter rules end ", ["r1"]),
        ("halter show --js", ["--json"]),
    ],
)
def test_words_are_completed_by_what_there_is(home: Path, line: str, words: list[str]) -> None:
    assert sorted(list_offers(home, line)) == sorted(words)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_also_get_a_description_of_each_word(home: Path, shell: str) -> None:
    process = complete(home, "halter show clerk-2", shell)
    assert process.returncode == 0
    assert "clerk-2" in process.stdout
    assert "clerk, COMPLETED" in process.stdout


@pytest.mark.parametrize("beginning", ["*", "[", "?", '"x', "%"])
def test_what_looks_like_a_pattern_matches_nothing_but_itself(home: Path, beginning: str) -> None:
    process = complete(home, f"halter show {beginning}")
    assert "clerk-1" not in process.stdout
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    "store",
    ["nowhere/halter.db", "letter.json", "memory:", "postgresql://nobody@127.0.0.1:1/x", "mysql://x", "\x01", "."],
)
def test_where_nothing_can_be_read_nothing_is_offered_and_nothing_is_made(home: Path, store: str) -> None:
    assert list_offers(home, "halter show ", HALTER_STORE=store) == []
    assert not (home / "nowhere").exists()


def test_a_store_that_was_typed_is_the_one_that_is_looked_into(home: Path, tmp_path: Path) -> None:
    assert list_offers(home, f"halter show --store {tmp_path}/none.db ") == []
    assert list_offers(home, f"halter show --store {home}/state/halter/halter.db clerk-1") == ["clerk-1"]


def test_looking_leaves_the_store_as_it_is(home: Path) -> None:
    folder = home / "state" / "halter"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    list_offers(home, "halter show ")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(home: Path, shell: str) -> None:
    environ = {**os.environ, **environment(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "halter", "--show-completion", shell]
    process = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "_HALTER_COMPLETE" in process.stdout
