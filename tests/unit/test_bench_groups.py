"""The groups of measurements work: the short ones are run here, all of them by `make bench-quick`."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import inject

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("group", ["hook", "start"])
def test_a_short_group_is_measured(group: str) -> None:
    command = [sys.executable, "-m", "bench", group, "--quick"]
    measured = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert measured.returncode == 0, measured.stderr
    assert "|" in measured.stdout


def test_a_decision_of_the_provenance_check_is_measured_for_the_code_that_makes_it() -> None:
    """The rest of that group needs AgentDojo in an environment of its own."""
    assert inject.cost(10, 1)["asked_us"] > 0
    assert len(inject.digest_code()) == 16
