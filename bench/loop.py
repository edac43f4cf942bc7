"""The loop, compared with other frameworks: the same agent, fake model and tool, each in its own process.

Every framework has its own virtual environment, from requirements that are pinned by hash. The table names a framework
that fails or cannot be installed.
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
"""Workloads that other frameworks run only in the first round, because some take minutes."""
PATIENCE = 600
IMPORT = (
    "import json, time; cpu, wall = time.process_time(), time.perf_counter(); {}; print(json.dumps({{'values': "
    "{{'cpu_ms': (time.process_time() - cpu) * 1000, 'wall_ms': (time.perf_counter() - wall) * 1000}}}}))"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """A framework: its package, its benchmark program, and the import statement of an agent."""

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
        match = re.search(rf"^{self.package}(?:\[\w+\])?==(\S+)", self.requirements.read_text(), re.MULTILINE)
        return match[1] if match else ""


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
    """A measured framework: its Python, its program and its import statement."""

    name: str
    python: Path
    module: str
    imports: str
    environ: Mapping[str, str]


@dataclass
class Figures:
    """Figures of one contender in one workload: medians and spread of all rounds."""

    name: str
    workload: str
    values: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    note: str = ""
    failed: str = ""


def run(rounds: int, report: Say, *, quick: bool = False, only: Sequence[str] = ()) -> Measured:
    """Measure all contenders in all workloads, in a new order each round."""
    contenders, missing = _contenders(only, report)
    outputs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    rng = random.Random(1)
    for number in range(1, rounds + 1):
        for workload in WORKLOADS:
            for each in rng.sample(contenders, len(contenders)):
                if workload in ONCE and number > 1 and each.name != HALTER:
                    continue
                report(f"round {number} of {rounds}: {each.name}, {workload}")
                outputs.setdefault((each.name, workload), []).append(_measured(each, workload, quick=quick))
    notes = {
        "measured": datetime.now(UTC).date().isoformat(),
        "rounds": rounds,
        "versions": {HALTER: __version__} | {peer.name: peer.version() for peer in PEERS},
        "missing": missing,
    }
    figures = [
        _figures(each.name, workload, outputs[each.name, workload]) for each in contenders for workload in WORKLOADS
    ]
    return figures, notes


def _contenders(only: Sequence[str], report: Say) -> tuple[list[Contender], dict[str, str]]:
    """Find the contenders that can be measured, and the reasons why others cannot."""
    missing: dict[str, str] = {}
    contenders: list[Contender] = []
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not only or HALTER in only:
        if loop_halter.there():
            contenders.append(
                Contender(HALTER, Path(sys.executable), "bench.loop_halter", "from halter import Agent", os.environ)
            )
        else:
            missing[HALTER] = "not available"
    for peer in PEERS:
        if only and peer.name not in only:
            continue
        try:
            python = install(peer, report)
        except (OSError, subprocess.CalledProcessError):
            missing[peer.name] = "could not be installed"
        else:
            contenders.append(Contender(peer.name, python, f"bench.peers.{peer.program}", peer.imports, bare))
    return contenders, missing


def install(peer: Peer, report: Say) -> Path:
    """Create a framework's virtual environment, unless it exists with these requirements."""
    python, digest_file = peer.venv / "bin" / "python", peer.venv / ".installed"
    digest = hashlib.sha256(peer.requirements.read_bytes()).hexdigest()
    if digest_file.exists() and digest_file.read_text() == digest:
        return python
    report(f"installing {peer.name} {peer.version()}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", peer.venv], check=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--system-certs", "--compile-bytecode"]
    subprocess.run([*install, "--python", python, "--require-hashes", "-r", peer.requirements], check=True)
    digest_file.write_text(digest)
    return python


def _measured(contender: Contender, workload: str, *, quick: bool) -> dict[str, Any]:
    """Run one measurement in a new process; return its result or its failure."""
    arguments = ["-c", IMPORT.format(contender.imports)] if workload == "import" else ["-m", contender.module, workload]
    command = [str(contender.python), *arguments, *(["--quick"] if quick and workload != "import" else [])]
    try:
        process = subprocess.run(
            command, cwd=ROOT, env=contender.environ, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {PATIENCE} seconds"}
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["without a word"])[-1]
        return {"failed": last.replace(f"{ROOT}{os.sep}", "")}
    try:
        return json.loads(process.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"failed": "no readable output"}


def _figures(name: str, workload: str, outputs: list[dict[str, Any]]) -> Figures:
    failures = [each["failed"] for each in outputs if "failed" in each]
    if failures:
        return Figures(name, workload, failed=failures[0])
    values = {key: [each["values"][key] for each in outputs] for key in outputs[0]["values"]}
    return Figures(
        name,
        workload,
        values={key: statistics.median(each) for key, each in values.items()},
        spread={key: max(each) - min(each) for key, each in values.items()},
        note=outputs[0].get("note", ""),
    )
