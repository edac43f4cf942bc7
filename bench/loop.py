"""The loop, beside other frameworks: the same agent, the same fake model, the same tool, each in its own process.

Every framework gets a virtual environment of its own, made from requirements that are pinned by hash. One that cannot
be installed, or that fails, is said in the table, and the rest goes on.
"""

import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import loop_halter
from bench.measure import Measured
from halter import __version__

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".bench"
REQUIREMENTS = Path(__file__).parent / "peers" / "requirements"
WORKLOADS = ("cpu", "growth", "durable", "crowd", "durable_crowd", "memory", "import")
ONCE = ("durable_crowd",)
"""What others do in the first round alone, since some take minutes for it."""
PATIENCE = 600
IMPORT = (
    "import json, time; cpu, wall = time.process_time(), time.perf_counter(); {}; print(json.dumps({{'values': "
    "{{'cpu_ms': (time.process_time() - cpu) * 1000, 'wall_ms': (time.perf_counter() - wall) * 1000}}}}))"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """A framework: the package whose version is named, its program, and what an agent written with it imports."""

    name: str
    package: str
    program: str
    imports: str

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.program}.txt"

    @property
    def venv(self) -> Path:
        return CACHE / self.program

    def version(self) -> str:
        found = re.search(rf"^{self.package}(?:\[\w+\])?==(\S+)", self.requirements.read_text(), re.MULTILINE)
        return found[1] if found else ""


PEERS = (
    Peer("pydantic-ai", "pydantic-ai-slim", "pydantic_ai", "from pydantic_ai import Agent"),
    Peer("agent-framework", "agent-framework-core", "agent_framework", "from agent_framework import Agent"),
    Peer("agno", "agno", "agno", "from agno.agent import Agent"),
    Peer("openai-agents", "openai-agents", "openai_agents", "from agents import Agent, Runner"),
    Peer("langgraph", "langgraph", "langgraph", "from langchain.agents import create_agent"),
)
HALTER = "halter"


@dataclass(frozen=True)
class Contender:
    """Somebody who is measured: a Python that has it, its program, and its import."""

    name: str
    python: Path
    module: str
    imports: str
    environ: Mapping[str, str]


@dataclass
class Figures:
    """What one contender reached in one workload: medians of all rounds, and how far the rounds lay apart."""

    name: str
    workload: str
    values: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    note: str = ""
    failed: str = ""


def run(rounds: int, say: Say, *, quick: bool = False, only: Sequence[str] = ()) -> Measured:
    """Measure everybody at everything, in a new order each time, and return the figures."""
    contenders, missing = _contenders(only, say)
    heard: dict[tuple[str, str], list[dict[str, Any]]] = {}
    shuffled = random.Random(1)
    for number in range(1, rounds + 1):
        for workload in WORKLOADS:
            for each in shuffled.sample(contenders, len(contenders)):
                if workload in ONCE and number > 1 and each.name != HALTER:
                    continue
                say(f"round {number} of {rounds}: {each.name}, {workload}")
                heard.setdefault((each.name, workload), []).append(_measured(each, workload, quick=quick))
    notes = {
        "measured": datetime.now(UTC).date().isoformat(),
        "rounds": rounds,
        "versions": {HALTER: __version__} | {peer.name: peer.version() for peer in PEERS},
        "missing": missing,
    }
    figures = [
        _figures(each.name, workload, heard[each.name, workload]) for each in contenders for workload in WORKLOADS
    ]
    return figures, notes


def _contenders(only: Sequence[str], say: Say) -> tuple[list[Contender], dict[str, str]]:
    """Find everybody who can be measured, and say why the others cannot."""
    missing: dict[str, str] = {}
    found: list[Contender] = []
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not only or HALTER in only:
        if loop_halter.there():
            found.append(
                Contender(HALTER, Path(sys.executable), "bench.loop_halter", "from halter import Agent", os.environ)
            )
        else:
            missing[HALTER] = "not there yet"
    for peer in PEERS:
        if only and peer.name not in only:
            continue
        try:
            python = install(peer, say)
        except (OSError, subprocess.CalledProcessError):
            missing[peer.name] = "could not be installed"
        else:
            found.append(Contender(peer.name, python, f"bench.peers.{peer.program}", peer.imports, bare))
    return found, missing


def install(peer: Peer, say: Say) -> Path:
    """Make a framework's virtual environment, unless it is there with these very requirements."""
    python, mark = peer.venv / "bin" / "python", peer.venv / ".installed"
    digest = hashlib.sha256(peer.requirements.read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == digest:
        return python
    say(f"installing {peer.name} {peer.version()}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", peer.venv], check=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--system-certs", "--compile-bytecode"]
    subprocess.run([*install, "--python", python, "--require-hashes", "-r", peer.requirements], check=True)
    mark.write_text(digest)
    return python


def _measured(contender: Contender, workload: str, *, quick: bool) -> dict[str, Any]:
    """Take one measurement in a fresh process; one that fails says why."""
    what = ["-c", IMPORT.format(contender.imports)] if workload == "import" else ["-m", contender.module, workload]
    command = [str(contender.python), *what, *(["--quick"] if quick and workload != "import" else [])]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=contender.environ, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {PATIENCE} seconds"}
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["without a word"])[-1]
        return {"failed": last.replace(f"{ROOT}{os.sep}", "")}
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"failed": "said nothing that could be read"}


def _figures(name: str, workload: str, heard: list[dict[str, Any]]) -> Figures:
    failures = [each["failed"] for each in heard if "failed" in each]
    if failures:
        return Figures(name, workload, failed=failures[0])
    values = {key: [each["values"][key] for each in heard] for key in heard[0]["values"]}
    return Figures(
        name,
        workload,
        values={key: statistics.median(each) for key, each in values.items()},
        spread={key: max(each) - min(each) for key, each in values.items()},
        note=heard[0].get("note", ""),
    )
