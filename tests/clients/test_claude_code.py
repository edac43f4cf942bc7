"""Claude Code through the proxy: a task with a tool, a cap that twenty share, and a halt in the middle."""

import asyncio
import json
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
MODEL = "claude-haiku-5-5"


def environ_of(bench: Any, key: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": bench.root,
        "ANTHROPIC_API_KEY": key,
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }


def command_of(find_client: Any, *more: str) -> list[str]:
    program = find_client("claude")
    return [program, "-p", "say hello", "--model", MODEL, "--output-format", "json", *more]


async def test_a_task_with_a_tool_call(bench: Any, find_client: Any) -> None:
    key = await bench.key()
    code, said = await bench.run(command_of(find_client, "--allowedTools", "Bash"), environ_of(bench, key))
    assert code == 0, said
    assert json.loads(said.splitlines()[-1])["result"] == "It is seven."
    assert any("seen-by-a-tool" in json.dumps(asked) for asked in bench.provider.asked)
    assert bench.provider.billed <= bench.spent()
    assert all(header["x-api-key"] == "sk-a" for header in bench.provider.headers)


async def test_at_its_cap_it_ends_after_one_request_with_our_sentence(bench: Any, find_client: Any) -> None:
    key = await bench.key("0.001")
    code, said = await bench.run(command_of(find_client), environ_of(bench, key))
    told = json.loads(said.splitlines()[-1])
    assert (code, told["is_error"], told["api_error_status"]) == (1, True, 402)
    assert "Halter: " in told["result"]
    assert bench.count("request_refused") == 1
    assert not bench.provider.asked


async def test_twenty_at_once_stay_below_one_cap(bench: Any, find_client: Any) -> None:
    key = await bench.key("0.05")
    bench.provider.output = 20_000
    limit = asyncio.Semaphore(5)

    async def one() -> tuple[int, str]:
        async with limit:
            return await bench.run(command_of(find_client), environ_of(bench, key), 400)

    ended = await asyncio.gather(*(one() for _ in range(20)))
    assert bench.provider.billed <= bench.spent() <= 50_000
    losers = [said for code, said in ended if code]
    assert all("Halter: " in said for said in losers)
    assert bench.count("request_refused") == len(losers) > 0


async def test_a_halt_ends_it_in_the_middle_of_a_stream(bench: Any, find_client: Any) -> None:
    key = await bench.key()
    bench.provider.gate = asyncio.Event()
    running = asyncio.ensure_future(bench.run(command_of(find_client), environ_of(bench, key)))
    await asyncio.wait_for(bench.provider.reached_gate.wait(), 60)
    await bench.halter("halt", "fleet")
    code, said = await asyncio.wait_for(running, 30)
    assert code == 1
    assert "fleet was halted" in said
    assert len(bench.provider.asked) == 1
