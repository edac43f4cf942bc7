"""AgentDojo's suites with the provenance check, and the cost of its decisions.

AgentDojo has its own environment under `.bench`, created on first use. A process there plays each suite with each brake
(`bench/dojo`).
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Measured
from halter.core.provenance import ArgumentUse, Declaration, Source
from halter.provenance.provenance import Provenance

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".bench" / "agentdojo"
AGENTDOJO = "agentdojo==0.1.35"
SUITES = ("workspace", "travel", "banking", "slack")
BRAKES = ("none", "every-write", "guard", "guessed", "prose")
ADAPTIVE = frozenset(("guard", "guessed", "prose"))
PATIENCE = 3600
PARTS = {"workspace": 3, "travel": 1, "banking": 1, "slack": 1}
"""Number of parts of a suite, each played by its own process."""

MAIL = Declaration(
    reads="nothing",
    reach="others",
    arguments={
        "to": ArgumentUse("destination", "address"),
        "subject": ArgumentUse("content"),
        "body": ArgumentUse("content"),
    },
    asks=("send", "mail"),
)
CALL = {
    "to": "bob3@work.example",
    "subject": "Invoice",
    "body": "Hello, please say hello about the invoice from all of us.",
}
CALLS = 100
RUNS = 20
LENGTHS = (10, 50, 500, 2000)
"""Messages of history."""


@dataclass
class Suite:
    """One suite under one brake."""

    name: str
    group: str
    extra: dict[str, Any]


def run(rounds: int, report: Callable[[str], None], *, quick: bool = False, kept: bool = False) -> Measured:
    """Play the suites; with `kept`, use only results that are cached for this code."""
    python = _installed(report)
    costs = [cost(length, rounds) for length in LENGTHS]
    runs_to_play = [(suite, brake) for suite in SUITES for brake in BRAKES if not kept or _was_played(suite, brake)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        rows = list(pool.map(lambda one: _row(python, *one, report), [("banking", "guard")] if quick else runs_to_play))
    return rows, {"costs": costs}


def _row(python: Path, suite: str, brake: str, report: Callable[[str], None]) -> Suite:
    report(f"{suite} under {brake}")
    return Suite(suite, brake, _play(python, suite, brake))


def _installed(report: Callable[[str], None]) -> Path:
    python = VENV / "bin" / "python"
    if not python.exists():
        report(f"installing {AGENTDOJO}")
        dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], check=True)
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--system-certs"]
        subprocess.run([*install, "--python", python, AGENTDOJO, *dependencies], check=True)
    return python


def _play(python: Path, suite: str, brake: str) -> dict[str, Any]:
    """Play one suite under one brake, part by part."""
    parts = [_play_part(python, suite, brake, part) for part in range(PARTS[suite])]
    totals: dict[str, Any] = {"suite": suite, "brake": brake}
    for key in (key for key in parts[0] if key not in totals):
        totals[key] = (
            [win for part in parts for win in part[key]] if key == "wins" else sum(part[key] for part in parts)
        )
    per_task = {key: round(totals[key] / totals["tasks"], 4) for key in ("staged", "by_call")}
    return totals | per_task


def _was_played(suite: str, brake: str) -> bool:
    return all(_place(suite, brake, part).exists() for part in range(PARTS[suite]))


def _place(suite: str, brake: str, part: int) -> Path:
    return VENV.with_name("played") / f"{digest_code()}-{suite}-{brake}-{part}.json"


def _play_part(python: Path, suite: str, brake: str, part: int) -> dict[str, Any]:
    """Play one part, or load its result if it is cached for the same code."""
    cache_file = _place(suite, brake, part)
    if cache_file.exists():
        return json.loads(cache_file.read_text("utf-8"))
    command = [str(python), "-m", "bench.dojo", suite, brake, "--part", str(part), "--parts", str(PARTS[suite])]
    command += ["--adaptive"] if brake in ADAPTIVE else []
    command += ["--persons"] if brake == "guard" else []
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{suite} under {brake}: {process.stderr.strip().rpartition(chr(10))[2]}")
    cache_file.parent.mkdir(exist_ok=True)
    cache_file.write_text(process.stdout, "utf-8")
    return json.loads(process.stdout)


def digest_code() -> str:
    """Digest the code that determines a suite's result: the guard and the benchmark."""
    files = [*(ROOT / "src/halter/guard").glob("*.py"), ROOT / "src/halter/core/provenance.py"]
    files += (ROOT / "bench/dojo").glob("*.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


def cost(length: int, rounds: int) -> dict[str, float]:
    """Measure the CPU time of a decision with a history of `length` messages, and of an empty loop, in microseconds.

    Each figure is the lowest median of several runs: other load on the machine only increases it.
    """
    brake = Provenance()
    for number in range(length // 2):
        words = f"Please send a mail to bob{number}@work.example about the invoice number {number} and say hello. "
        brake.add_text(words * 3, Source("person", trusted=True))
        brake.add_text("Lorem ipsum dolor sit amet from all of us. " * 25, Source("tool", "fetch"))
    return {
        "messages": length,
        "passes_us": _find_calmest(lambda: brake.judge("mail", MAIL, CALL), rounds),
        "asked_us": _find_calmest(lambda: brake.judge("mail", MAIL, {**CALL, "to": "eve@evil.example"}), rounds),
        "loop_us": _find_calmest(_count_to_a_thousand, rounds),
    }


def _find_calmest(act: Callable[[], object], rounds: int) -> float:
    runs = [statistics.median(_time(act) for _ in range(CALLS)) for _ in range(RUNS * rounds)]
    return min(runs) / 1000


def _time(act: Callable[[], object]) -> int:
    began = time.process_time_ns()
    act()
    return time.process_time_ns() - began


def _count_to_a_thousand() -> None:
    for _ in range(1000):
        pass
