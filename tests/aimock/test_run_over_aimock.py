"""Whole runs against a server that nobody here wrote, and against its chaos: the money always adds up."""

from pathlib import Path
from typing import Any

import pytest
from library_bench import Bench, finished, shown

from halter import Result, StreamChunk

PATHS = {"openai": "/v1", "anthropic": ""}
PRICE = {"price": {"input": 2, "output": 10}}


@pytest.fixture(params=["openai", "anthropic"])
def wire(request: pytest.FixtureRequest) -> str:
    return request.param


async def run(folder: Path, address: str, wire: Any, text: str) -> tuple[Result[str], str, list[str]]:
    """Run a task as a stream; tell its result, what a screen shows in the end, and what its tool read."""
    bench, read = Bench(folder), list[str]()
    agent = bench.agent(
        model="mine:some-model",
        providers={"mine": {"wire": wire, "base_url": f"{address}{PATHS[wire]}", "api_key": "${secret:MADE_UP}"}},
        secrets={"MADE_UP": "made-up"},
        fleet={"models": {"mine:some-model": PRICE}},
        limits={"max_retries": 1},
        max_cost_usd="none",  # What is left to spend would be said last, and the server knows replies by what is last.
    )

    @agent.tool(level="SAFE", effect="read")
    async def read_file(path: str) -> str:
        """Read a file."""
        read.append(path)
        return ""

    items = [item async for item in agent.stream(text, kind="task")]
    result, chunks = items[-1], [item for item in items if isinstance(item, StreamChunk)]
    assert isinstance(result, Result)
    finished(chunks)
    bench.balanced(result)
    return result, shown(chunks), read


async def test_it_calls_tools_and_answers(aimock: str, wire: str, tmp_path: Path) -> None:
    result, output, read = await run(tmp_path, aimock, wire, "read both logs")
    assert (result.state, result.text, sorted(read)) == ("COMPLETED", "Both are empty.", ["a.log", "b.log"])
    assert output == "I will look.Both are empty."


@pytest.mark.parametrize(
    ("text", "attempts"),
    [
        ("drop it", 2),
        ("garble it", 2),
        ("hang up", 2),
        ("slow down", 2),
        ("be overloaded", 2),
        ("refuse it", 1),
        ("cut it off", 2),
    ],
)
async def test_its_chaos_ends_as_an_error_and_is_paid_for_once(
    aimock: str, wire: str, tmp_path: Path, text: str, attempts: int
) -> None:
    result, _, _ = await run(tmp_path, aimock, wire, text)
    assert (result.ok, result.state, result.terminal_reason) == (False, "ERROR", "model_error")
    assert result.sentence
    assert len(result.receipt.requests) == attempts


async def test_an_answer_that_is_cut_off_is_continued(aimock: str, wire: str, tmp_path: Path) -> None:
    result, output, _ = await run(tmp_path, aimock, wire, "run out of words")
    assert (result.state, result.text, output) == ("COMPLETED", "And then it ends.", "And then it ends.")
