"""A playbook that a signal stops in the middle of a step ends, when it is resumed, as one that was not stopped."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.processes import Halter, live_at

AGENT = "name: clerk\nmodel: reflex\nreflex: [{say: Nothing.}]\n"
TOOLS = """
import time
from pathlib import Path

from halter import tool

HERE = Path(__file__).parent


@tool(level="SAFE", effect="read")
def count(number: int) -> str:
    \"\"\"Count slowly, the first time.\"\"\"
    if not (HERE.parent / "stopped").exists():
        (HERE.parent / "stopped").write_text("")
        with (HERE.parent / "ready").open("w"):
            pass
        time.sleep(60)
    return str(number)


@tool(level="MONITORED", effect="write")
def pay(number: int) -> str:
    \"\"\"Pay, and note each payment.\"\"\"
    with (HERE.parent / "paid").open("a") as file:
        file.write(f"{number}\\n")
    return "paid"
"""
PLAYBOOK = """
- {call: pay, arguments: {number: 1}}
- {call: count, arguments: {number: 2}}
- {call: pay, arguments: {number: 3}}
"""


def play(home: Path, *words: str) -> Halter:
    return Halter(("play", "steps.yaml", "--agent", "clerk", *words), cwd=home, env=live_at(home))


def trust(home: Path) -> None:
    with Halter(("trust", "clerk"), cwd=home, env=live_at(home)) as process:
        output, error = process.communicate()
    assert process.returncode == 0, (output, error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_playbook_that_a_signal_stops_in_a_step_completes_when_it_is_resumed(tmp_path: Path, number: int) -> None:
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk" / "agent.yaml").write_text(AGENT)
    (tmp_path / "clerk" / "tools.py").write_text(TOOLS)
    (tmp_path / "steps.yaml").write_text(PLAYBOOK)
    os.mkfifo(tmp_path / "ready")
    trust(tmp_path)
    with play(tmp_path) as process:
        assert process.stdout is not None
        # A pipe without a reader holds its writer: the step has begun when this returns.
        (tmp_path / "ready").read_bytes()
        process.send_signal(number)
        output = process.stdout.read().decode()
    (session,) = re.findall(r"Session (\S+)", output)
    with play(tmp_path, "--resume", session) as process:
        assert process.stdout is not None
        output = process.stdout.read().decode()
    assert "COMPLETED: completed." in output
    assert (tmp_path / "paid").read_text() == "1\n3\n"
