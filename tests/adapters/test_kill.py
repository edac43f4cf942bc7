"""A question outlives the program that asked it: killed with kill -9, started again, and the call is made once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.conftest import Desk
from tests.adapters.killed_program import FRAMEWORKS


def run_program(framework: str, folder: Path) -> tuple[int, str]:
    words = [sys.executable, "-m", "tests.adapters.killed_program", framework, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    return done.returncode, done.stdout.strip() or done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_a_question_outlives_kill_9_and_the_call_is_made_once_after_a_yes(
    desk: Desk, tmp_path: Path, framework: str
) -> None:
    code, _ = run_program(framework, tmp_path)
    assert code == -signal.SIGKILL
    assert not (tmp_path / "paid.txt").exists()
    await desk.decide("approve")
    code, said = run_program(framework, tmp_path)
    assert (code, said[:12]) == (0, "Done: paid 7")
    assert (tmp_path / "paid.txt").read_text() == "7\n"
