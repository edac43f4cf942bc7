"""A function in a process of its own, which can be killed. Only JSON crosses the border, in both directions."""

import importlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.text import clean
from halter.core.tools import STARTED_BY_AGENT, Failed, Output
from halter.tools.group import Program, run_group
from halter.tools.result import to_output

_MAIN: Final = "from halter.tools.isolated import main; main()"


class Job(msgspec.Struct, frozen=True):
    """Which function to run, with which arguments, and where to look for it."""

    module: str
    name: str
    file: str
    path: list[str]
    arguments: str
    key: str
    max_output: int


class Done(msgspec.Struct, frozen=True):
    """What came of it: a text and perhaps a cost, or a failure."""

    text: str = ""
    cost: int | None = None
    kind: str = ""
    message: str = ""


def check_findable(tool: str, function: Callable[..., Any]) -> None:
    """Refuse a function that another process could not find again."""
    if "<" in function.__qualname__ or inspect.getsourcefile(function) is None:
        raise ConfigError(
            f"The tool {tool} is to run isolated, but {function.__qualname__} stands inside another function: "
            "write it at the top of a module, so that another process can import it."
        )


async def run_isolated(function: Callable[..., Any], arguments: bytes, key: str, max_output: int) -> Output:
    """Run a function in a new process; its group is killed at the end, or when this is cancelled."""
    file = inspect.getsourcefile(function) or ""
    job = Job(function.__module__, function.__qualname__, file, sys.path, arguments.decode(), key, max_output)
    argv = [sys.executable, "-P", "-c", _MAIN]
    stdin = msgspec.json.encode(job) + b"\n"
    environment = {**os.environ, STARTED_BY_AGENT: "tool"}
    program = Program(argv, Path.cwd(), environment, stdin, answers=True, max_output=max_output + 1000)
    ended = await run_group(program)
    try:
        done = msgspec.json.decode(ended.answer, type=Done)
    except msgspec.DecodeError:
        raise Failed("Crashed", f"the tool's process ended without an answer: {_why(ended.code)}", ended.text) from None
    if done.kind:
        raise Failed(done.kind, done.message, ended.text)
    return Output(done.text, done.cost)


def _why(code: int) -> str:
    return f"signal {signal.Signals(-code).name}." if code < 0 else f"exit code {code}."


def main() -> None:
    """Run one job: read it from standard input, answer on the pipe whose number is the last argument."""
    answer = int(sys.argv[-1])
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(msgspec.json.encode(_do(job)))
    sys.stdout.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """Standard input ends when whoever asked is gone; nobody may act for them then."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def _do(job: Job) -> Done:
    from halter.tools.tool import call_plainly

    sys.path[:] = job.path
    try:
        output = to_output(call_plainly(_found(job), job.arguments.encode(), job.key), job.max_output)
    except Failed as failed:
        kind, _, message = str(failed).partition(": ")
        return Done(kind=kind, message=clean(message))
    return Done(text=clean(output.text), cost=output.cost)


def _found(job: Job) -> Any:
    module = _loaded(job)
    found: Any = module
    for part in job.name.split("."):
        found = getattr(found, part)
    return found


def _loaded(job: Job) -> Any:
    """Import a module by its name, or by its file if no import would find it."""
    if job.module != "__main__":
        try:
            return importlib.import_module(job.module)
        except ModuleNotFoundError as missing:
            if missing.name is None or not job.module.startswith(missing.name):
                raise
    spec = importlib.util.spec_from_file_location("__isolated__", job.file)
    if spec is None or spec.loader is None:
        raise Failed("ModuleNotFoundError", f"no module can be loaded from {job.file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__isolated__"] = module
    spec.loader.exec_module(module)
    return module
