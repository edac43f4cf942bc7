"""Many runs under one cap, through the whole loop: never a cent above it, in one process and in four."""

import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import live_at, warm_command

CROWD = Path(__file__).parent / "programs" / "crowd.py"
DOLLAR = 1_000_000


def budget(file: Path) -> tuple[int, int]:
    """Read with plain SQL what the agent has spent and holds today."""
    query = "SELECT coalesce(sum(spent), 0), coalesce(sum(held), 0) FROM budgets WHERE scope = 'fleet' AND unit = 'usd'"
    with closing(sqlite3.connect(file)) as store:
        result = store.execute("SELECT 1 FROM sqlite_master WHERE name = 'budgets'").fetchone()
        return store.execute(query).fetchone() if result else (0, 0)


def states(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as store:
        return [state for (state,) in store.execute("SELECT state FROM sessions")]


def watched(file: Path, processes: int, *words: str) -> list[tuple[int, int]]:
    """Let a crowd run, and look at its budget all the while."""
    environ = live_at(file.parent)
    command = warm_command("python", str(CROWD), str(file), *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    crowd = [subprocess.Popen(command, env=environ, **pipes) for _ in range(processes)]
    seen: list[tuple[int, int]] = []
    while any(program.poll() is None for program in crowd):
        seen += [budget(file)] if file.exists() else []
        time.sleep(0.01)
    for program in crowd:
        result, complained = program.communicate(timeout=60)
        assert program.returncode == 0, complained.decode()
        assert result.endswith(f" of {words[0]}\n".encode())
    return [*seen, budget(file)]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("processes", "each"), [(1, "20"), (4, "5")])
def test_twenty_runs_at_once_never_pass_a_dollar(tmp_path: Path, processes: int, each: str) -> None:
    seen = watched(tmp_path / "crowd.db", processes, each)
    assert all(spent + held <= DOLLAR for spent, held in seen)
    spent, held = seen[-1]
    assert 0.85 * DOLLAR < spent <= DOLLAR
    assert held == 0
    texts = states(tmp_path / "crowd.db")
    assert (len(texts), texts.count("COMPLETED") + texts.count("BUDGET_EXCEEDED")) == (20, 20)
    assert 9 <= texts.count("COMPLETED") <= 10


@pytest.mark.timeout(90)
def test_the_same_runs_without_a_hold_pass_it(tmp_path: Path) -> None:
    seen = watched(tmp_path / "crowd.db", 1, "20", "broken")
    assert any(spent > DOLLAR for spent, _ in seen)
