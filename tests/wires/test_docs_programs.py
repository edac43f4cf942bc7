"""Every example that asks a model runs as it stands on its page, against a provider on this machine."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import live_at, warm_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "programs.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
FIRST = re.search(r"## In Python\n.*?```python\n(.*?)```", README, re.DOTALL)
BESIDE = re.search(r"```python\n([^`]*halter.adapters.pydantic_ai.*?)```", README, re.DOTALL)
EXAMPLES = dict(re.findall(r"^## ([^\n]+)\n+```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
OWN = re.search(r"## (Tests of your own agents)\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKING = re.search(r"## (A guard without async)\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
NEAR = re.search(r"## (Near a budget)\n.*?```python\n(.*?)```", PAGE, re.DOTALL)


def calls(tool: str, arguments: str) -> Callable[[Any], None]:
    return lambda provider: provider.says("", calls=(("a", tool, (arguments,)),))


def reply_with(*text: str, **more: Any) -> Callable[[Any], None]:
    return lambda provider: provider.says(*text, **more)


SCRIPTS = {
    "Run": ([calls("weather", '{"city":"Oslo"}'), reply_with("Yes, it rains.")], "COMPLETED Yes, it rains.\n"),
    "Answers in a form": ([calls("final_answer", '{"value":{"city":"Oslo","rain_mm":12}}')], "12.0\n"),
    "What tools depend on": ([calls("find", '{"letter":"m"}'), reply_with("Momo.")], "Momo.\n"),
    "Streams": ([reply_with("Once ", "upon a time.")], "Once upon a time.\nWAITING_FOR_INPUT\n"),
    "Going on": ([calls("ask_user", '{"question":"Which one?"}'), reply_with("It is tidy.")], "It is tidy.\n"),
}


def test_every_example_is_run() -> None:
    """Those that ask no provider are run by `tests/docs`."""
    assert OWN is not None
    assert set(EXAMPLES) == set(SCRIPTS)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert (
        sum('"anthropic:' in block for block in blocks) == len(SCRIPTS) + 2
    )  # The own agent at the top, and the back end that `tests/story` runs.


IMPORTS = ("halter", "anthropic", "pydantic_ai.models.anthropic", "pydantic_ai.providers.anthropic")
"""What takes seconds to import, and is imported once for all examples but the first one."""


async def run_program(program: str, folder: Path, address: str = "", *, warm: bool = True) -> str:
    file = folder / "program.py"
    file.write_text(program)
    command = warm_command("python", str(file), imports=IMPORTS) if warm else [sys.executable, str(file)]
    environ = {**live_at(folder), "ANTHROPIC_API_KEY": "made-up", "ANTHROPIC_BASE_URL": address}
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    running = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environ, **pipes)
    body, complained = await running.communicate()
    assert running.returncode == 0, complained.decode()
    return body.decode()


@pytest.mark.parametrize("title", SCRIPTS)
async def test_an_example_does_what_the_page_says(title: str, provider: Any, tmp_path: Path) -> None:
    replies, expected = SCRIPTS[title]
    for reply in replies:
        reply(provider)
        provider.then()
    assert await run_program(EXAMPLES[title], tmp_path, f"http://127.0.0.1:{provider.port}") == expected


async def test_the_first_example_of_all_does_what_it_says(provider: Any, tmp_path: Path) -> None:
    assert FIRST is not None
    for reply in (calls("weather", '{"city":"Oslo"}'), reply_with("Yes, it rains.")):
        reply(provider)
        provider.then()
    text = await run_program(FIRST[1], tmp_path, f"http://127.0.0.1:{provider.port}", warm=False)
    assert text == "Yes, it rains. 0.000648\n", "a model that a server on this machine passes on costs its price"


async def test_the_guard_goes_around_the_tools_of_another_framework(provider: Any, tmp_path: Path) -> None:
    assert BESIDE is not None
    for reply in (calls("send_letter", '{"to":"Ada","text":"Thank you."}'), reply_with("I thanked her.")):
        reply(provider)
        provider.then()
    audit = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'halter', 'audit', '--store', 'runs.db'])"
    address = f"http://127.0.0.1:{provider.port}"
    assert await run_program(BESIDE[1], tmp_path, address) == "I thanked her.\n"
    assert "sent to Ada" in str(provider.asked[-1].body)
    assert "send_letter" in await run_program(audit, tmp_path)


async def test_a_program_that_is_not_async_has_a_guard_too(tmp_path: Path) -> None:
    assert BLOCKING is not None
    assert await run_program(BLOCKING[2], tmp_path) == "sent to ada\n0.02\n"


async def test_a_program_stops_near_its_cap(tmp_path: Path) -> None:
    assert NEAR is not None
    assert await run_program(NEAR[2], tmp_path) == "good morning\ngood night\n"


async def test_an_agent_can_be_tested_without_a_provider(tmp_path: Path) -> None:
    assert OWN is not None
    assert await run_program(OWN[2], tmp_path) == ""
