"""Try each adapter beside the newest version of its framework, as a user's own pip installs them.

    python scripts/frameworks.py [ADAPTER…]

Each adapter has an environment of its own below `.frameworks`, which is kept. Halter is built from this folder and
installed by plain pip, without overrides or constraints. A row fails if pip cannot install the two together or takes an
older framework because of Halter, and says which requirements conflict; and if a test of the adapter fails.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
ENVIRONMENTS: Final = ROOT / ".frameworks"
FRAMEWORKS: Final[Mapping[str, Sequence[str]]] = {
    "agent_framework": ["agent-framework-core"],
    "claude_sdk": ["claude-agent-sdk"],
    "crewai": ["crewai"],
    "google_adk": ["google-adk"],
    "langchain": ["langchain", "langgraph"],
    "openai_agents": ["openai-agents"],
    "pydantic_ai": ["pydantic-ai-slim"],
    "sdk_clients": ["openai", "anthropic"],
}
"""The adapters, and what a program that uses them installs. The first package is the framework itself."""
TESTS: Final = (
    "tests/external/test_promises.py",
    "tests/adapters/test_kill.py",
    "tests/docs/test_framework_pages.py",
)
"""The tests that are parametrized by the framework, beside those of the adapter itself."""
DEPENDS: Final = re.compile(r"^ +(\S+ \S+ depends on .+)$", re.MULTILINE)
REQUESTED: Final = re.compile(r"^ +(The user requested .+)$", re.MULTILINE)
COUNT: Final = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


class Failed(Exception):
    """The sentence for the row of an adapter that does not work with the newest version of its framework."""


class Row(NamedTuple):
    adapter: str
    version: str
    tests: str
    seconds: float
    megabytes: float
    note: str
    has_failed: bool


class Environment:
    """A virtual environment with plain pip, a framework and Halter."""

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        self.packages = FRAMEWORKS[adapter]
        self.folder = ENVIRONMENTS / adapter
        self.log = ENVIRONMENTS / f"{adapter}.log"
        self._python = self.folder / "bin" / "python"

    def create(self) -> None:
        if not self._python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
            self._pip("install", "--quiet", "--upgrade", "pip")

    def install(self) -> str:
        """Install Halter, the framework and the test tools, and return the framework's version."""
        self._require(self._pip("install", "--upgrade", str(ROOT), *self.packages))
        self._require(self._pip("install", "--group", f"{ROOT / 'pyproject.toml'}:tests"))
        self._require(self._pip("check"), "pip check")
        return self._read_version()

    def test(self) -> str:
        """Run the tests of the adapter, and return their counts."""
        tests = [f"tests/adapters/test_{self.adapter}.py", *TESTS]
        options = ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=900", "-k", self.adapter]
        result = self._run("-m", "pytest", *options, *tests, cwd=ROOT)
        summary = (result.stdout.strip().splitlines() or [""])[-1]
        counts = {kind: int(count) for count, kind in COUNT.findall(summary)}
        if result.returncode or not counts.get("passed"):
            raise self._fail(f"its tests: {summary or 'they cannot be collected'}", result)
        return ", ".join(f"{count} {kind}" for kind, count in counts.items())

    def measure(self) -> float:
        files = (Path(folder) / name for folder, _, names in os.walk(self.folder) for name in names)
        return sum(each.lstat().st_size for each in files) / 1e6

    def _read_version(self) -> str:
        result = self._pip("list", "--format", "json")
        versions = {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(result.stdout)}
        return versions[self.packages[0]]

    def explain_older(self, version: str) -> str:
        """Return a note if pip cannot install the newest version alone. Raise Failed if only Halter prevents it."""
        framework = self.packages[0]
        newest = self._find_newest(framework)
        if newest == version:
            return ""
        pinned = f"{framework}=={newest}"
        alone = self._dry_run(pinned)
        if alone.returncode:
            return f"{newest} cannot be installed alone either: {find_conflict(alone)}."
        together = self._dry_run(str(ROOT), pinned)
        if together.returncode:
            conflict = find_conflict(together)
            raise self._fail(f"beside Halter pip takes {framework} {version}, not {newest}: {conflict}", together)
        raise Failed(f"pip keeps {framework} {version} although {newest} can be installed: delete {self.folder}.")

    def _find_newest(self, framework: str) -> str:
        result = self._dry_run("--no-deps", "--quiet", "--report", "-", framework)
        return json.loads(result.stdout)["install"][0]["metadata"]["version"]

    def _dry_run(self, *requirements: str) -> subprocess.CompletedProcess[str]:
        return self._pip("install", "--dry-run", "--ignore-installed", *requirements)

    def _require(self, result: subprocess.CompletedProcess[str], step: str = "pip") -> None:
        if result.returncode:
            raise self._fail(f"{step}: {find_conflict(result)}", result)

    def _fail(self, problem: str, result: subprocess.CompletedProcess[str]) -> Failed:
        self.log.write_text(result.stdout + result.stderr)
        return Failed(f"{problem}. See {self.log.relative_to(ROOT)}.")

    def _pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run("-m", "pip", "--disable-pip-version-check", *words)

    def _run(self, *words: str, cwd: Path = ENVIRONMENTS) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self._python), *words], cwd=cwd, capture_output=True, text=True, check=False)


def find_conflict(result: subprocess.CompletedProcess[str]) -> str:
    """Return the requirements that pip found to conflict, or the last error, as one sentence."""
    output = result.stdout + result.stderr
    requirements = list(dict.fromkeys(REQUESTED.findall(output) + DEPENDS.findall(output)))
    if requirements:
        return ", and ".join(requirements)
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if not line.startswith("WARNING")]
    return errors[-1].rstrip(".") if errors else "pip printed nothing"


def try_adapter(adapter: str) -> Row:
    started_at = time.monotonic()
    environment = Environment(adapter)
    version, tests, note, has_failed = "", "", "", False
    try:
        environment.create()
        version = environment.install()
        note = environment.explain_older(version)
        tests = environment.test()
    except Failed as failed:
        note, has_failed = str(failed), True
    seconds = time.monotonic() - started_at
    return Row(adapter, version, tests, seconds, environment.measure(), note, has_failed)


def format_row(row: Row) -> str:
    name = FRAMEWORKS[row.adapter][0]
    figures = f"{name:22} {row.version:12} {row.tests or 'FAILED':22} {row.seconds:8.0f} {row.megabytes:8.0f}"
    return f"{figures}\n  {row.note}" if row.note else figures


def main(adapters: Sequence[str]) -> int:
    unknown = sorted({*adapters} - {*FRAMEWORKS})
    if unknown:
        print(f"Unknown: {', '.join(unknown)}. The adapters are {', '.join(FRAMEWORKS)}.")
        return 2
    ENVIRONMENTS.mkdir(exist_ok=True)
    print(f"{'framework':22} {'version':12} {'tests':22} {'seconds':>8} {'MB':>8}", flush=True)
    has_failed = False
    for adapter in adapters or FRAMEWORKS:
        row = try_adapter(adapter)
        has_failed |= row.has_failed
        print(format_row(row), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
