"""Start-up time of commands: a new process for each figure.

The bare row is the interpreter alone, the lower bound of every program.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.measure import Contender, Measured, Sample, compare

TAB = {"_HALTER_COMPLETE": "complete_bash", "COMP_WORDS": "halter\nshow\n", "COMP_CWORD": "2"}
"""Environment that a shell sets for completion after `halter show`."""


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        store = {"HALTER_STORE": str(Path(folder) / "halter.db"), "HOME": folder}
        _began([sys.executable, "-m", "halter", "run", _agent(folder), "hello"], store)
        rows = {
            "python": (["-c", "pass"], {}),
            "import halter": (["-c", "import halter"], {}),
            "from halter import Agent": (["-c", "from halter import Agent"], {}),
            "halter --help": (["-m", "halter", "--help"], {}),
            "halter sessions": (["-m", "halter", "sessions"], store),
            "Tab after halter show": (["-m", "halter"], {**store, **TAB}),
        }
        contenders = [
            Contender(name, "start", "start", partial(_began, [sys.executable, *words], environ))
            for name, (words, environ) in rows.items()
        ]
        return compare(contenders, rounds * 3, report), {}


def _agent(folder: str) -> str:
    agent = Path(folder) / "clerk"
    agent.mkdir()
    (agent / "agent.yaml").write_text("name: clerk\nmodel: reflex\nreflex: [{say: Hello.}]\n")
    return str(agent)


def _began(command: list[str], environ: dict[str, str]) -> Sample:
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env={**os.environ, **environ}, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Sample(1, time.perf_counter() - wall, cpu)
