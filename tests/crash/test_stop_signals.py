"""A playbook that a signal stops in the middle of a step ends, when it is resumed, as one that was not stopped."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.processes import Halter, live_at

AGENT = "name: clerk\nmodel: reflex\nreflex: [{say: Nothing.}]\n"
TOOLS = """
from pathlib import Path

from halter import tool

HERE = Path(__file__).parent.parent


def stop_in(step: int) -> None:
    \"\"\"Report that the step has begun, and wait for ever; once.\"\"\"
    if (HERE / f"stop-{step}").exists():
        (HERE / f"stop-{step}").unlink()
        (HERE / "ready").write_text("")
        (HERE / "never").write_text("")


@tool(level="SAFE", effect="read")
def count(number: int) -> str:
    \"\"\"Count.\"\"\"
    stop_in(number)
    return str(number)


@tool(level="SAFE", effect="read")
async def hold(number: int) -> str:
    \"\"\"Hold up the event loop.\"\"\"
    stop_in(number)
    return str(number)


@tool(level="MONITORED", effect="write")
def pay(number: int) -> str:
    \"\"\"Pay, and note each payment.\"\"\"
    with (HERE / "paid").open("a") as file:
        file.write(f"{number}\\n")
    stop_in(number)
    return "paid"
"""
PLAYBOOK = """
- {call: pay, arguments: {number: 1}}
- {call: count, arguments: {number: 2}}
- {call: pay, arguments: {number: 3}}
"""
HOLDING_PLAYBOOK = """
- {call: hold, arguments: {number: 4}}
- {call: count, arguments: {number: 2}}
- {call: pay, arguments: {number: 1}}
"""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


def halter(home: Path, *words: str) -> Halter:
    return Halter(words, cwd=home, env=live_at(home))


def run(home: Path, *words: str) -> str:
    with halter(home, *words) as process:
        output, error = process.communicate()
    assert process.returncode == 0, (output, error)
    return output.decode()


def lay_out(home: Path, step: int) -> None:
    """Write the agent and its playbook, and let this step wait for ever, once."""
    (home / "clerk").mkdir()
    (home / "clerk" / "agent.yaml").write_text(AGENT)
    (home / "clerk" / "tools.py").write_text(TOOLS)
    (home / "steps.yaml").write_text(PLAYBOOK)
    (home / f"stop-{step}").touch()
    # Opening a pipe waits until its other end is open.
    os.mkfifo(home / "ready")
    os.mkfifo(home / "never")
    run(home, "trust", "clerk")


def stop_in_step(home: Path, step: int, number: int) -> str:
    """Play until a step has begun, and send the signal; return the session."""
    lay_out(home, step)
    with halter(home, "play", "steps.yaml", "--agent", "clerk") as process:
        (home / "ready").read_bytes()
        process.send_signal(number)
        output, _ = process.communicate()
    (session,) = re.findall(r"Session (\S+)", output.decode())
    return session


@SIGNALS
def test_a_read_that_a_signal_stops_is_repeated_and_the_playbook_completes(tmp_path: Path, number: int) -> None:
    session = stop_in_step(tmp_path, 2, number)
    assert "COMPLETED: completed." in run(tmp_path, "play", "steps.yaml", "--agent", "clerk", "--resume", session)
    assert (tmp_path / "paid").read_text() == "1\n3\n"


@SIGNALS
def test_a_payment_that_a_signal_stops_is_put_before_a_person_and_not_repeated(tmp_path: Path, number: int) -> None:
    session = stop_in_step(tmp_path, 3, number)
    with halter(tmp_path, "play", "steps.yaml", "--agent", "clerk", "--resume", session) as process:
        assert process.stderr is not None
        assert any(line.startswith(b"  waits") for line in process.stderr)
        run(tmp_path, "approve", f"{session}.3/unknown")
        assert b"COMPLETED: completed." in process.communicate()[0]
    assert (tmp_path / "paid").read_text() == "1\n3\n"


@SIGNALS
def test_a_playbook_that_a_signal_meets_in_the_middle_of_code_says_how_to_continue(tmp_path: Path, number: int) -> None:
    lay_out(tmp_path, 4)
    options = ["--agent", "clerk", "--store", str(tmp_path / "a store.db")]
    (tmp_path / "its steps.yaml").write_text(HOLDING_PLAYBOOK)
    with halter(tmp_path, "play", "its steps.yaml", *options) as process:
        (tmp_path / "ready").read_bytes()
        process.send_signal(number)
        reader = os.open(tmp_path / "never", os.O_RDONLY | os.O_NONBLOCK)
        _, error = process.communicate()
        os.close(reader)
    assert process.returncode == 130
    (command,) = re.findall(r"Continue with: halter (.+)", error.decode())
    assert "COMPLETED: completed." in run(tmp_path, *shlex.split(command))
    assert (tmp_path / "paid").read_text() == "1\n"
