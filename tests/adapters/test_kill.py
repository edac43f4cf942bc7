"""What is peculiar to a framework after kill -9: an agent that is a tool, and an asynchronous kickoff."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.conftest import Desk
from tests.external.drivers import DRIVERS, is_installed

pytestmark = pytest.mark.timeout(300)


def run_program(framework: str, folder: Path) -> tuple[int, str]:
    words = [sys.executable, "-m", "tests.adapters.killed_program", framework, str(folder)]
    process = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    return process.returncode, process.stdout.strip() or process.stderr


def require_installed(framework: str) -> None:
    if not is_installed(DRIVERS[framework][0]):
        pytest.skip(f"{framework} is not installed: run make frameworks")


@pytest.mark.parametrize("framework", ["openai_agents"])
async def test_an_agent_that_is_a_tool_continues_after_kill_9_and_is_not_run_again(
    desk: Desk, tmp_path: Path, framework: str
) -> None:
    require_installed(framework)
    code, text = run_program(framework, tmp_path)
    assert code == -signal.SIGKILL, text
    await desk.decide("approve")
    code, text = run_program(framework, tmp_path)
    assert (code, text) == (0, "It said: Done: paid 7 EUR"), text
    assert (tmp_path / "paid.txt").read_text() == "7\n"
    await desk.expect_receipt("COMPLETED", ["ask_desk", "pay"], requests=4)


@pytest.mark.parametrize("framework", ["crewai"])
def test_a_call_of_a_crew_in_a_loop_that_was_made_before_kill_9_is_not_made_again(
    tmp_path: Path, framework: str
) -> None:
    require_installed(framework)
    code, text = run_program(framework, tmp_path)
    assert (code, (tmp_path / "paid.txt").read_text()) == (-signal.SIGKILL, "7\n"), text
    code, text = run_program(framework, tmp_path)
    assert (code, "paid 7" in text) == (0, True), text
    assert (tmp_path / "paid.txt").read_text() == "7\n"
