"""A question outlives the program that asked it: killed with kill -9, started again, and the call is made once."""

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.adapters.conftest import Desk
from tests.adapters.killed_program import AFTER_A_CALL, FRAMEWORKS, WITHIN_A_TOOL

pytestmark = pytest.mark.timeout(300)
PACKAGES = {"google_adk": "google.adk", "claude_sdk": "claude_agent_sdk", "crewai": "crewai"}
"""Those that only `make frameworks` installs."""


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def demand_installed(framework: str) -> None:
    if framework in PACKAGES and not is_installed(PACKAGES[framework]):
        pytest.skip(f"{framework} is not installed: run make frameworks")


def run_program(framework: str, folder: Path, *more: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "tests.adapters.killed_program", framework, str(folder), *more]
    process = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    return process.returncode, process.stdout.strip() or process.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_a_question_outlives_kill_9_and_the_call_is_made_once_after_a_yes(
    desk: Desk, tmp_path: Path, framework: str
) -> None:
    demand_installed(framework)
    code, text = run_program(framework, tmp_path)
    assert code == -signal.SIGKILL, text
    assert not (tmp_path / "paid.txt").exists()
    await desk.decide("approve")
    code, text = run_program(framework, tmp_path)
    assert (code, "Done: " in text, "paid 7" in text) == (0, True, True), text
    assert (tmp_path / "paid.txt").read_text() == "7\n"


@pytest.mark.parametrize("framework", WITHIN_A_TOOL)
async def test_an_agent_that_is_a_tool_continues_after_kill_9_and_is_not_run_again(
    desk: Desk, tmp_path: Path, framework: str
) -> None:
    code, text = run_program(framework, tmp_path, "--within-a-tool")
    assert code == -signal.SIGKILL, text
    await desk.decide("approve")
    code, text = run_program(framework, tmp_path, "--within-a-tool")
    assert (code, text) == (0, "It said: Done: paid 7 EUR"), text
    assert (tmp_path / "paid.txt").read_text() == "7\n"
    await desk.expect_receipt("COMPLETED", ["ask_desk", "pay"], requests=4)


@pytest.mark.parametrize("way", AFTER_A_CALL)
def test_a_call_of_crewai_that_was_made_before_kill_9_is_not_made_again(tmp_path: Path, way: str) -> None:
    demand_installed("crewai")
    code, text = run_program(way, tmp_path, "--after-a-call")
    assert (code, (tmp_path / "paid.txt").read_text()) == (-signal.SIGKILL, "7\n"), text
    code, text = run_program(way, tmp_path, "--after-a-call")
    assert (code, "paid 7" in text) == (0, True), text
    assert (tmp_path / "paid.txt").read_text() == "7\n"
