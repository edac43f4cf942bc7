"""Proxies as processes: one that is killed in the middle of a stream, and four on one store."""

import asyncio
import json
import os
import re
import signal
import sqlite3
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.events import RequestSettled, RequestStarted

OPUS = "claude-opus-5-5"
HI: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def program(result: Any, *words: str, url: str = "url") -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    settings, provider = result.settings, result.provider
    environ = {
        **os.environ,
        "HALTER_STORE": settings.store,
        "HALTER_CHECKPOINTS": str(settings.checkpoints),
        "HALTER_SIGNING_KEY": str(settings.signing_key),
        "HALTER_TOKENS": str(settings.tokens),
        "HALTER_PERSON": "ada",
        "ANTHROPIC_API_KEY": "sk-a",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{provider.port}",
        "OPENAI_API_KEY": "sk-o",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{provider.port}/v1",
    }
    command_words = words or ("proxy",)
    command = [sys.executable, "-m", "halter", *command_words, "--listen", "127.0.0.1:0", "--json"]
    subprocess_exec = await asyncio.create_subprocess_exec(
        *command,
        env=environ,
        cwd=Path(settings.store).parent,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert subprocess_exec.stdout is not None
        yield subprocess_exec, json.loads(await asyncio.wait_for(subprocess_exec.stdout.readline(), 60))[url]
    finally:
        if subprocess_exec.returncode is None:
            subprocess_exec.send_signal(signal.SIGTERM)
        await asyncio.wait_for(subprocess_exec.wait(), 30)


async def test_what_a_killed_proxy_held_settles_at_its_maximum(unopened: Any) -> None:
    result, provider = unopened, unopened.provider
    provider.gate = asyncio.Event()
    key = result.key(max_cost_usd_per_day="0.05")
    body = {"model": OPUS, "max_tokens": 500, "stream": True, "messages": HI}
    async with AsyncExitStack() as stack:
        process, url = await stack.enter_async_context(program(result))
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=60))
        asking = http.stream("POST", f"{url}/v1/messages", json=body, headers={"x-api-key": key})
        assert (await stack.enter_async_context(asking)).status_code == 200
        await asyncio.wait_for(provider.reached_gate.wait(), 20)
        process.kill()
        await process.wait()
    provider.gate.set()
    await result.open()
    (held,) = await result.holds()
    amount = max(leg.amount for leg in held.decode_legs() if leg.unit == "usd")
    assert provider.billed <= amount
    # The dead process keeps its lease until it runs out; here it has.
    with sqlite3.connect(result.settings.store) as store:
        store.execute("UPDATE workers SET alive_until = 1 WHERE worker IN (SELECT owner FROM sessions)")
    store.close()
    await result.proxy._sessions.recover()  # noqa: SLF001 Its own round may have begun already.
    await result.settled()
    assert await result.spent() == amount
    (settled,) = await result.events(RequestSettled)
    assert settled.outcome == "unknown"
    async with asyncio.timeout(20):
        while (await result.sessions())[0].state != "ERROR":  # noqa: ASYNC110 Another task ends it.
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("client", "dialect"), [("claude", "/messages"), ("codex", "/responses"), ("llm", "/chat")])
async def test_one_request_shows_that_a_client_works_through_the_proxy(place: Any, client: str, dialect: str) -> None:
    code, text = await check(client, "--url", place.root, "--key", place.key(max_cost_usd_per_day="0.05"))
    assert code == 0, text
    assert re.fullmatch(rf"{client} works: \S+ answered through {place.root}\.\n", text), text
    assert dialect in place.provider.paths[-1]
    assert await place.spent() == place.provider.billed > 0


async def test_a_client_that_does_not_work_is_shown_why(place: Any) -> None:
    code, text = await check("claude", "--url", place.root, "--key", place.key(max_cost_usd_per_day="0.000001"))
    assert code == 1
    assert "The proxy answered 402: Halter: It may cost" in text
    code, text = await check("claude", "--url", place.root, "--key", "sk-other")
    assert (code, "The proxy answered 401: Halter: unknown key" in text) == (1, True), text
    code, text = await check("claude", "--url", "http://127.0.0.1:9", "--key", "sk-other")
    assert (code, "Start it with `halter proxy`" in text) == (1, True), text
    assert (await check("emacs", "--key", "k"))[0] == (await check("claude"))[0] == 2


async def check(*words: str) -> tuple[int, str]:
    """Type `halter proxy check`; return its exit code, and what it prints."""
    result = await asyncio.to_thread(CliRunner().invoke, build_command_tree(), ["proxy", "check", *words])
    return result.exit_code, result.output


async def test_a_server_serves_the_proxy_too(unopened: Any) -> None:
    result, key = unopened, unopened.key(max_cost_usd_per_day="0.05")
    body = {"model": OPUS, "max_tokens": 50, "messages": HI}
    async with (
        program(result, "serve", "--proxy", "127.0.0.1:0", url="proxy_url") as (_, url),
        httpx2.AsyncClient(timeout=60) as http,
    ):
        response = await http.post(f"{url}/v1/messages", json=body, headers={"x-api-key": key})
        unpaid = await http.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "sk-other"})
    assert (response.status_code, unpaid.status_code) == (200, 401)
    await result.open()
    assert not await result.holds()
    assert await result.spent() == result.provider.billed > 0


@pytest.mark.soak
async def test_four_proxies_on_one_store_keep_one_cap(unopened: Any) -> None:
    result, provider = unopened, unopened.provider
    provider.output = 300
    key = result.key(max_cost_usd_per_day="0.05")
    body = {"model": OPUS, "max_tokens": 400, "messages": HI}
    async with AsyncExitStack() as programs, httpx2.AsyncClient(timeout=60) as http:
        urls = [(await programs.enter_async_context(program(result)))[1] for _ in range(4)]
        requests = [
            http.post(f"{urls[number % 4]}/v1/messages", json=body, headers={"x-api-key": key}) for number in range(20)
        ]
        answers = await asyncio.gather(*requests)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 402}, statuses
    await result.open()
    assert not await result.holds()
    assert provider.billed <= await result.spent() <= 50_000
    assert len(await result.events(RequestStarted)) == statuses.count(200) == len(provider.requests)
