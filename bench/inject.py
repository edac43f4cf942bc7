"""AgentDojo's suites over the injection brake, and what a decision costs.

AgentDojo lives in an environment of its own under `.bench`, made when it is first needed. A process there plays each
suite under each brake (`bench/dojo`).
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
from halter.guard.provenance import Provenance

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".bench" / "agentdojo"
AGENTDOJO = "agentdojo==0.1.35"
SUITES = ("workspace", "travel", "banking", "slack")
BRAKES = ("none", "every-write", "said", "guard", "guessed")
ADAPTIVE = frozenset(("said", "guard", "guessed"))
PATIENCE = 3600
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
LENGTHS = (10, 50, 500, 2000)
"""Messages of history."""


@dataclass
class Suite:
    """One suite under one brake."""

    name: str
    group: str
    extra: dict[str, Any]


def run(rounds: int, say: Callable[[str], None], *, quick: bool = False) -> Measured:
    python = _installed(say)
    costs = [cost(length, rounds) for length in LENGTHS]
    played = [(suite, brake) for suite in SUITES for brake in BRAKES]
    with ThreadPoolExecutor(max_workers=2) as pool:
        rows = list(pool.map(lambda one: _row(python, *one, say), [("banking", "guard")] if quick else played))
    return rows, {"costs": costs}


def _row(python: Path, suite: str, brake: str, say: Callable[[str], None]) -> Suite:
    say(f"{suite} under {brake}")
    return Suite(suite, brake, _play(python, suite, brake))


def _installed(say: Callable[[str], None]) -> Path:
    python = VENV / "bin" / "python"
    if not python.exists():
        say(f"installing {AGENTDOJO}")
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], check=True)
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--system-certs"]
        subprocess.run([*install, "--python", python, AGENTDOJO, *needed], check=True)
    return python


def _play(python: Path, suite: str, brake: str) -> dict[str, Any]:
    """Play one suite under one brake; what was played with the same code before is not played again."""
    kept = VENV.with_name("played") / f"{_digest_code()}-{suite}-{brake}.json"
    if kept.exists():
        return json.loads(kept.read_text("utf-8"))
    command = [str(python), "-m", "bench.dojo", suite, brake]
    command += ["--adaptive"] if brake in ADAPTIVE else []
    command += ["--persons"] if brake == "guard" else []
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(ended.stdout, "utf-8")
    return json.loads(ended.stdout)


def _digest_code() -> str:
    """What decides about a suite's rows: the brake, the guard and the bench."""
    files = [*(ROOT / "src/halter/guard").glob("*.py"), ROOT / "src/halter/core/provenance.py"]
    files += (ROOT / "bench/dojo").glob("*.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


def cost(length: int, rounds: int) -> dict[str, float]:
    """CPU time of a decision with so many messages of history, in microseconds, beside a loop of a thousand steps."""
    brake = Provenance()
    for number in range(length // 2):
        words = f"Please send a mail to bob{number}@work.example about the invoice number {number} and say hello. "
        brake.hear(words * 3, Source("person", trusted=True))
        brake.hear("Lorem ipsum dolor sit amet from all of us. " * 25, Source("tool", "fetch"))
    passes, asked = ([] for _ in range(2))
    for call, times in ((CALL, passes), ({**CALL, "to": "eve@evil.example"}, asked)):
        for _ in range(1000 * rounds):
            began = time.process_time_ns()
            brake.judge("mail", MAIL, call)
            times.append(time.process_time_ns() - began)
    began = time.process_time_ns()
    for _ in range(100_000):
        pass
    loop = (time.process_time_ns() - began) / 100
    return {
        "messages": length,
        "passes_us": statistics.median(passes) / 1000,
        "asked_us": statistics.median(asked) / 1000,
        "loop_us": loop / 1000,
    }
