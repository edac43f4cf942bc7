"""A function in a new interpreter, which can be killed. Only JSON crosses the border, in both directions."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.tools import STARTED_BY_AGENT, Output
from halter.tools.done import ANSWER_MORE, read_answer
from halter.tools.group import Program, run_group

_PROGRAM: Final = "halter.tools.isolated_program"


class Job(msgspec.Struct, frozen=True):
    """Which function to run, with which arguments, and where to look for it."""

    module: str
    name: str
    file: str
    path: list[str]
    arguments: str
    key: str
    max_output: int


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
    # Compiled code beside an agent's own would be code that nobody trusted.
    argv = [sys.executable, "-P", "-B", "-m", _PROGRAM]
    stdin = msgspec.json.encode(job) + b"\n"
    environment = {**os.environ, STARTED_BY_AGENT: "tool"}
    program = Program(argv, Path.cwd(), environment, stdin, answers=True, max_output=max_output + ANSWER_MORE)
    return read_answer(await run_group(program))
