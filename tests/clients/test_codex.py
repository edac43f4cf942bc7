"""Codex through the proxy: a task with a tool, a cap, and a halt in the middle."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


async def prepare(bench: Any, key: str, model: str = "gpt-4o-mini") -> dict[str, str]:
    """Write the file that `halter proxy env codex` prints."""
    home = Path(bench.folder) / "codex"
    await asyncio.to_thread(home.mkdir, exist_ok=True)
    result = await bench.halter("proxy", "env", "codex", "--key", key, "--url", bench.root, "--model", model)
    await asyncio.to_thread((home / "config.toml").write_text, result)
    return {"CODEX_HOME": str(home), "HALTER_KEY": key}


def command_of(find_client: Any) -> list[str]:
    program = find_client("codex")
    return [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "say hello"]


async def test_a_task_with_a_tool_call(bench: Any, find_client: Any) -> None:
    environ = await prepare(bench, await bench.key())
    code, result = await bench.run(command_of(find_client), environ)
    assert code == 0, result
    assert "It is seven." in result
    assert any("call_output" in str(request) for request in bench.provider.requests)
    assert bench.provider.billed <= bench.spent()


async def test_at_its_cap_it_ends_after_one_request_with_our_sentence(bench: Any, find_client: Any) -> None:
    environ = await prepare(bench, await bench.key("0.0001"))
    code, result = await bench.run(command_of(find_client), environ)
    assert code != 0
    assert "Halter: " in result
    assert bench.count("request_refused") == 1
    assert not bench.provider.requests


async def test_a_halt_ends_it_in_the_middle_of_a_stream(bench: Any, find_client: Any) -> None:
    environ = await prepare(bench, await bench.key())
    bench.provider.gate = asyncio.Event()
    running = asyncio.ensure_future(bench.run(command_of(find_client), environ))
    await asyncio.wait_for(bench.provider.reached_gate.wait(), 60)
    await bench.halter("halt", "fleet")
    _, result = await asyncio.wait_for(running, 30)
    assert "fleet was halted" in result
    assert len(bench.provider.requests) == 1
    assert bench.halt_delay() < 1
