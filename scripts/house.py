"""Measure the structure of the package: its size, its names, and the call path of a tool call up to its commit.

    .venv/bin/python -m scripts.house          a table
    .venv/bin/python -m scripts.house --json   the same figures, by name
    .venv/bin/python -m scripts.house --beside v1.0.0   the shape of the sources beside that of another version

Code is found by importing the object, never by the name of its module: a module that moves does not change a figure.
"""

import argparse
import ast
import asyncio
import dis
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from halter import Agent, tool
from halter.core.clock import SystemClock
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.loop.loop import TurnLoop
from halter.models.scripted import Scripted, call, say
from scripts.names import CHECKS
from scripts.shape import Shape, count_code_lines, measure_shape

SOURCE = Path(__file__).parents[1] / "src"
WORDS = re.compile(r"\b(?:whoever|somebody|nobody|whatever)\b", re.IGNORECASE)
RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)
"""Instructions at which a coroutine ends; at any other one it is suspended."""

ACT: CodeType = vars(TurnLoop)["_act"].__code__
FOLLOWED = 2
"""Number of the act that is followed; the first one includes one-time costs."""

RUNS = 3
"""How often a command runs: the least CPU time counts."""


@dataclass(frozen=True)
class Text:
    """What the files say without being run."""

    files: int
    fullest_folder: tuple[str, int]
    names: dict[str, list[str]]
    """What breaks a rule for names, by the rule."""


@dataclass
class Travel:
    """The frames from `Agent.run` to the engine's commit of a tool call, and every function that the act called.

    Lambdas and comprehensions are not counted as functions.
    """

    path: list[CodeType] = field(default_factory=list[CodeType])
    calls: Counter[CodeType] = field(default_factory=Counter[CodeType])

    @property
    def frames(self) -> int:
        """Depth of the call stack at the commit."""
        return len(self.path)

    @property
    def files(self) -> int:
        """Number of files on the call path."""
        return len({code.co_filename for code in self.path})


def modules() -> list[Path]:
    """List the source files."""
    return sorted(SOURCE.rglob("*.py"))


def text() -> Text:
    """Measure the files."""
    files = modules()
    folder, file_count = Counter(path.parent for path in files).most_common(1)[0]
    return Text(
        files=len(files),
        fullest_folder=(folder.relative_to(SOURCE).as_posix(), file_count),
        names=check_names(),
    )


def check_names() -> dict[str, list[str]]:
    """List what breaks a rule for names, by the rule."""
    parsed = {path.relative_to(SOURCE): parse_module(path) for path in modules()}
    return {rule: list(find(parsed)) for rule, find in CHECKS.items()}


@cache
def parse_module(path: Path) -> ast.Module:
    """Parse a file, with a cache."""
    return ast.parse(path.read_text("utf-8"))


def count_text() -> dict[str, int]:
    """Count lines and words."""
    sources = {path: path.read_text("utf-8") for path in modules()}
    return {
        "lines": sum(source.count("\n") for source in sources.values()),
        "net_lines": sum(count_code_lines(source, parse_module(path)) for path, source in sources.items()),
        "words": sum(len(WORDS.findall(source)) for source in sources.values()),
    }


def travel() -> Travel:
    """Run an agent with a scripted model on SQLite, and follow one of its tool calls.

    A commit that runs in a callback of the event loop starts a new stack:
    its frames count as well.
    """
    followed_call = Travel()
    for _ in range(RUNS):
        followed_call = Travel()
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(_run_agent(Path(folder) / "house.db", _Spy(followed_call)))
        if followed_call.path:
            break
        # Another thread made the commit: a profile function sees only its own thread.
    return followed_call


class _Spy:
    """A profile function that records one act of the loop."""

    def __init__(self, travel_record: Travel) -> None:
        self._found = travel_record
        self._acts: list[FrameType] = []
        self._act: FrameType | None = None
        self._asked: list[CodeType] = []
        self._seen: dict[int, FrameType] = {}
        """The counted frames, kept alive: a resumed coroutine is the same call."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Handle one event of the interpreter."""
        code = frame.f_code
        if event == "call" and code is ACT and frame not in self._acts:
            self._acts.append(frame)
            self._act = frame if len(self._acts) == FOLLOWED else None
            self._seen = {id(outer): outer for outer in _frames(frame.f_back)}
        if self._act is None:
            return
        if event == "return" and frame is self._act and code.co_code[frame.f_lasti] in RETURNS:
            self._act = None
        elif event == "call" and code.co_filename.startswith(str(SOURCE)):
            self._count(frame, code)

    def _count(self, frame: FrameType, code: CodeType) -> None:
        if self._seen.get(id(frame)) is not frame and not code.co_name.startswith("<"):
            self._seen[id(frame)] = frame
            self._found.calls[code] += 1
        if code is _code(JournalStore.commit) and not self._asked:
            self._asked = _stack(frame)
        elif code is _code(SqliteEngine.commit) and not self._found.path:
            stack = _stack(frame)
            path = stack if _code(Agent.run) in stack else self._asked + stack
            self._found.path = path[path.index(_code(Agent.run)) :]


def _code(function: Callable[..., Any]) -> CodeType:
    return function.__code__


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stack(frame: FrameType) -> list[CodeType]:
    """List the active functions of the package, the outermost first."""
    codes = [each.f_code for each in _frames(frame) if each.f_code.co_filename.startswith(str(SOURCE))]
    return codes[::-1]


async def _run_agent(store: Path, spy: _Spy | None = None) -> None:
    async def add(first: int, second: int) -> int:
        """Add two numbers."""
        return first + second

    model = Scripted([*(call("add", first=1, second=number) for number in range(3)), say("done")], SystemClock())
    tools = [tool(add, level="SAFE", effect="read")]
    async with Agent("house", model=model, tools=tools, store=str(store)) as agent:
        sys.setprofile(spy)
        try:
            await agent.run("Add the numbers.")
        finally:
            sys.setprofile(None)


def cpu_seconds(command: list[str], folder: Path) -> float:
    """Return the lowest CPU time of a few runs of a command."""
    return min(_cpu_seconds(command, folder) for _ in range(RUNS))


def _cpu_seconds(command: list[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def measure_status() -> dict[str, int]:
    """Count the SQL statements of `halter status` on a small store, and the files whose functions it calls."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "house.db"
        asyncio.run(_run_agent(store))
        command = [sys.executable, "-m", "scripts.status_probe", str(store)]
        result = subprocess.run(command, check=True, capture_output=True, cwd=SOURCE.parent, timeout=60)
        return json.loads(result.stderr.splitlines()[-1])


def start_times() -> dict[str, float]:
    """Measure the CPU time of starting: the import, the help, and a command that reads a store."""
    halter = str(Path(sys.executable).with_name("halter"))
    commands = {
        "import halter": [sys.executable, "-c", "import halter"],
        "halter --help": [halter, "--help"],
        "halter budget": [halter, "budget", "--store", "house.db"],
    }
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run_agent(Path(folder) / "house.db"))
        return {name: cpu_seconds(command, Path(folder)) for name, command in commands.items()}


def figures() -> dict[str, Any]:
    """Measure everything."""
    text_figures, call_travel = text(), travel()
    return {
        **asdict(text_figures),
        **count_text(),
        "frames_of_a_call": call_travel.frames,
        "files_of_a_call": call_travel.files,
        "path_of_a_call": [f"{Path(code.co_filename).stem}.{code.co_qualname}" for code in call_travel.path],
        "calls_of_an_act": call_travel.calls.total(),
        "functions_of_an_act": len(call_travel.calls),
        "status": measure_status(),
        "cpu_seconds": start_times(),
    }


def _table(all_figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    folder, file_count = all_figures["fullest_folder"]
    yield from list_shape(measure_shape(SOURCE))
    yield "lines", f"{all_figures['lines']:,}"
    yield "net code lines", f"{all_figures['net_lines']:,}"
    yield "files in the fullest folder", f"{file_count} ({folder})"
    for rule, breaches in all_figures["names"].items():
        yield rule, f"{len(breaches)}"
    yield "frames from Agent.run to the commit of a call", f"{all_figures['frames_of_a_call']}"
    yield "files on that way", f"{all_figures['files_of_a_call']}"
    yield "calls of one act", f"{all_figures['calls_of_an_act']}"
    yield "functions of one act", f"{all_figures['functions_of_an_act']}"
    yield "SQL statements of `halter status`", f"{all_figures['status']['statements']}"
    yield "files whose functions it calls", f"{all_figures['status']['files']}"
    for name, seconds in all_figures["cpu_seconds"].items():
        yield f"CPU of `{name}`", f"{seconds * 1000:.0f} ms"
    yield "whoever, somebody, nobody, whatever", f"{all_figures['words']:,}"


def measure_version(reference: str) -> Shape:
    """Measure the sources of another version of this repository."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["/usr/bin/env", "git", "archive", reference, "src"]
        archive = subprocess.run(command, cwd=SOURCE.parent, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["/usr/bin/env", "tar", "-x", "-C", folder], input=archive, check=True)
        return measure_shape(Path(folder) / "src")


def list_shape(shape: Shape) -> Iterator[tuple[str, str]]:
    """List the figures of a shape in the order of the table."""
    yield "files", f"{shape.files:,}"
    yield "tokens", f"{shape.tokens:,}"
    yield "tokens per code line", f"{shape.tokens / shape.code_lines:.1f}"
    yield "classes", f"{shape.classes:,}"
    yield "private functions with one caller", f"{shape.helpers:,}"
    yield "own imports inside functions", f"{shape.deferred_imports:,}"
    yield "… outside the command line", f"{shape.deferred_outside_faces:,}"
    yield "circles", f"{len(shape.circles):,}"


def show_beside(reference: str) -> None:
    """Print the shape of the sources, and of every room, beside another version."""
    before, now = measure_version(reference), measure_shape(SOURCE)
    columns = [
        (name, figure, other) for (name, figure), (_, other) in zip(list_shape(now), list_shape(before), strict=True)
    ]
    rooms = sorted({*before.tokens_by_room, *now.tokens_by_room})
    columns += [
        (f"tokens of {room}", f"{now.tokens_by_room.get(room, 0):,}", f"{before.tokens_by_room.get(room, 0):,}")
        for room in rooms
    ]
    width = max(len(name) for name, _, _ in columns)
    print(f"{'':<{width}}  {'now':>10}  {reference:>10}")
    for name, figure, other in columns:
        print(f"{name:<{width}}  {figure:>10}  {other:>10}")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description="Measure the shape of the package.")
    parser.add_argument("--json", action="store_true", help="print every figure, with the names behind the counts")
    parser.add_argument("--beside", metavar="REF", help="print the shape of the sources beside another version")
    options = parser.parse_args()
    if options.beside:
        show_beside(options.beside)
        return
    all_figures = figures()
    if options.json:
        print(json.dumps(all_figures, indent=2))
        return
    rows = list(_table(all_figures))
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"{name:<{width}}  {figure}")


if __name__ == "__main__":
    main()
