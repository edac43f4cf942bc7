"""What takes its time says so to a person at a terminal, and to nobody else; and every screen is wide enough."""

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import Halter
from tests.story.clerks import environment, furnish

STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURED = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
MAIN = [
    *("--help", "approve --help", "budget raise --help", "sessions", "show clerk-1", "receipt clerk-2", "report"),
    *("findings", "proposals", "inbox", "budget", "rules", "schedules", "audit", "verify", "doctor clerk", "nosuch"),
    *("halt flet", "show nosuch", "trust clerk", "route clerk hello", "run clerk hello", "init other"),
    "export clerk-2 --output clerk-2.jsonl",
]
LONG = re.compile(r"\S{38,}")
"""A path or an id that is longer than a line cannot but be broken or stand over."""

SLOW = """
import sys, threading
from halter.cli.terminal import format_progress, progress

with progress("Counting", quiet="--json" in sys.argv, delay_seconds=0) as tell:
    tell(format_progress(2, 5))
    sys.stdout.write("answer\\n")
    sys.stdout.flush()
    # What is shown is started by a timer, which ends once it is shown.
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c")
    furnish(path)
    return path


def run_at_terminal(command: list[str], environ: dict[str, str], home: Path, **pipes: int) -> tuple[int, str, str]:
    """Run a command at a terminal, and return its code, what the terminal showed, and what went elsewhere."""
    keys, screen = pty.openpty()
    streams = {"stdin": screen, "stdout": screen, "stderr": screen, **pipes}
    with subprocess.Popen(command, env={**os.environ, **environ}, cwd=home, **streams) as program:
        os.close(screen)
        text = read_screen(keys)
        elsewhere = program.stdout.read().decode() if program.stdout else ""
    return program.returncode, text, elsewhere


def read_screen(keys: int) -> str:
    """Read what a terminal shows until its program has ended."""
    stream = io.BytesIO()
    while body := _piece(keys):
        stream.write(body)
    os.close(keys)
    return stream.getvalue().decode(errors="replace").replace("\r\n", "\n")


def _piece(keys: int) -> bytes:
    try:
        return os.read(keys, 65_536)
    except OSError:
        return b""


def show_at_terminal(home: Path, line: str, **more: str) -> str:
    environ = {**os.environ, **environment(home), "COLUMNS": "40", "TERM": "xterm", **more}
    keys, screen = pty.openpty()
    with Halter(line.split(), env=environ, cwd=home, terminal=screen) as program:
        os.close(screen)
        text = read_screen(keys)
    assert program.wait() in {0, 1, 2}, text
    assert "Traceback" not in text
    assert "Internal error" not in text
    return text


@pytest.mark.parametrize("line", MAIN)
def test_40_columns_show_no_wider_line_and_no_colour_to_who_wants_none(home: Path, line: str) -> None:
    text = show_at_terminal(home, line, NO_COLOR="1")
    assert not COLOURED.search(text)
    text = STEERING.sub("", text)
    wide = [each for each in text.splitlines() if len(each.rstrip()) > 40 and not LONG.search(each)]
    assert not wide


@pytest.mark.parametrize("line", ["sessions", "inbox", "doctor clerk", "verify", "report"])
def test_a_terminal_that_can_do_little_is_not_wider_than_it_is_and_is_not_steered(home: Path, line: str) -> None:
    text = show_at_terminal(home, line, TERM="dumb")
    assert "\x1b" not in text
    assert not [each for each in text.splitlines() if len(each.rstrip()) > 40 and not LONG.search(each)]


@pytest.mark.parametrize("line", ["--help", "sessions", "show clerk-1", "inbox", "doctor clerk", "nosuch"])
def test_a_pipe_that_knows_no_letters_of_ours_gets_all_of_it_all_the_same(home: Path, line: str) -> None:
    environ = {**os.environ, **environment(home), "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "halter", *line.split()]
    process = subprocess.run(command, env=environ, cwd=home, capture_output=True, check=False)
    assert process.returncode in {0, 1, 2}, process.stderr
    assert b"Traceback" not in process.stderr
    assert b"Internal error" not in process.stderr
    assert (process.stdout + process.stderr).isascii()
    assert b"\x1b" not in process.stdout + process.stderr


def run_slow(home: Path, *words: str, **pipes: int) -> tuple[int, str, str]:
    command = [sys.executable, "-c", SLOW, *words]
    return run_at_terminal(command, {"TERM": "xterm", "COLUMNS": "80"}, home, **pipes)


def test_what_takes_long_says_how_far_it_is_and_leaves_nothing_behind(home: Path) -> None:
    _, text, _ = run_slow(home)
    assert "Counting: 2 of 5 events …" in text
    assert "answer" in text
    assert text.rstrip("\n").endswith(("\x1b[2K", "\x1b[?25h"))


def test_an_answer_that_goes_elsewhere_holds_nothing_of_it(home: Path) -> None:
    _, text, answer = run_slow(home, stdout=subprocess.PIPE)
    assert answer == "answer\n"
    assert "Counting" in text


@pytest.mark.parametrize("how", [lambda: {"stderr": subprocess.DEVNULL}, dict])
def test_programs_and_pipes_are_shown_nothing(home: Path, how: Callable[[], dict[str, int]]) -> None:
    words = () if how() else ("--json",)
    _, text, _ = run_slow(home, *words, **how())
    assert text == "answer\n"


def test_a_terminal_that_can_do_little_gets_one_line(home: Path) -> None:
    command = [sys.executable, "-c", SLOW]
    _, text, _ = run_at_terminal(command, {"TERM": "dumb", "COLUMNS": "80"}, home)
    assert sorted(text.splitlines()) == ["Counting …", "answer"]
