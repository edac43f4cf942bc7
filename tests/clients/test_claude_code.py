"""Claude Code through the proxy: a task with a tool, a cap that twenty share, a killed proxy, and a halt."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from halter_drills.provider import ListedProvider
from tests.clients.conftest import Bench

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
MODEL = "claude-haiku-5-5"


def environ_of(bench: Any, key: str, root: str = "") -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": root or bench.root,
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
    code, result = await bench.run(command_of(find_client, "--allowedTools", "Bash"), environ_of(bench, key))
    assert code == 0, result
    assert json.loads(result.splitlines()[-1])["result"] == "It is seven."
    assert any("seen-by-a-tool" in json.dumps(request) for request in bench.provider.requests)
    assert bench.provider.billed <= bench.spent()
    assert all(header["x-api-key"] == "sk-a" for header in bench.provider.headers)


async def test_at_its_cap_it_ends_after_one_request_with_our_sentence(bench: Any, find_client: Any) -> None:
    key = await bench.key("0.001")
    code, result = await bench.run(command_of(find_client), environ_of(bench, key))
    payload = json.loads(result.splitlines()[-1])
    assert (code, payload["is_error"], payload["api_error_status"]) == (1, True, 402)
    assert "Halter: " in payload["result"]
    assert bench.count("request_refused") == 1
    assert not bench.provider.requests


def check_losers(bench: Any, ended: list[tuple[int, str]]) -> None:
    """Each loser ended after exactly one refused request, with Halter's sentence."""
    losers = [loser for code, loser in ended if code]
    assert all("Halter: " in loser for loser in losers), losers
    assert bench.count("request_refused") == len(losers)
    assert 0 < len(losers) < len(ended)


async def test_twenty_at_once_stay_below_one_cap(bench: Any, find_client: Any) -> None:
    key = await bench.key("0.05")
    bench.provider.output = 20_000
    command, environ = command_of(find_client, "--disallowedTools", "Bash"), environ_of(bench, key)
    results = await asyncio.gather(*(bench.run(command, environ, 400) for _ in range(20)))
    assert bench.provider.billed <= bench.spent() <= 50_000
    check_losers(bench, results)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
async def test_twenty_over_four_proxies_of_which_one_is_killed_stay_below_one_cap(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, find_client: Any
) -> None:
    store = request.getfixturevalue("empty_schema_url") if kind == "postgresql" else ""
    command = command_of(find_client, "--disallowedTools", "Bash")
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(ListedProvider(output=20_000).serve())
        bench = Bench(tmp_path, provider, store)
        key = await bench.key("0.20")
        (killed, first), *others = [await stack.enter_async_context(bench.serving()) for _ in range(4)]
        roots = [first, *(url for _, url in others)]
        provider.gate = asyncio.Event()
        running = [asyncio.ensure_future(bench.run(command, environ_of(bench, key, first), 400))]
        await asyncio.wait_for(provider.reached_gate.wait(), 60)
        killed.kill()
        await killed.wait()
        provider.gate.set()
        (legs,) = (await asyncio.to_thread(bench.found)).holds.values()
        result = max(leg[4] for leg in legs if leg[2] == "usd")
        assert provider.billed <= result
        # One that starts in its place is what the client finds when it tries again.
        await stack.enter_async_context(bench.serving(first.removeprefix("http://")))
        running += [
            asyncio.ensure_future(bench.run(command, environ_of(bench, key, roots[number % 4]), 400))
            for number in range(1, 20)
        ]
        results = await asyncio.gather(*running)
        await bench.settled()
    charges = [event.facts for event in bench.found().events if event.kind == "request_settled"]
    (unknown,) = [facts for facts in charges if facts["outcome"] == "unknown"]
    assert unknown["charge"]["usd"] == result
    assert provider.billed <= bench.spent() <= 200_000
    check_losers(bench, results)


async def test_a_halt_ends_it_in_the_middle_of_a_stream(bench: Any, find_client: Any) -> None:
    key = await bench.key()
    bench.provider.gate = asyncio.Event()
    running = asyncio.ensure_future(bench.run(command_of(find_client), environ_of(bench, key)))
    await asyncio.wait_for(bench.provider.reached_gate.wait(), 60)
    await bench.halter("halt", "fleet")
    code, result = await asyncio.wait_for(running, 30)
    assert code == 1
    assert "fleet was halted" in result
    assert len(bench.provider.requests) == 1
    assert bench.halt_delay() < 1
