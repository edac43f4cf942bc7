"""Overhead of the proxy per request: until the first byte, per chunk, and in CPU time.

A provider in its own process streams the same answer to a client, directly and through the proxy. The proxy is `halter
proxy` on a SQLite store, with a hold and a settlement in the journal for each request. CPU time is that of the proxy's
process. LiteLLM's proxy, in its own environment, handles the same requests with one worker.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.loop import Peer, install
from bench.measure import Contender, Measured, Sample, compare
from halter.server.listener import bind

ONE_BY_ONE = 50
TOGETHER = 20
CHUNKS = 50
LONG_ANSWERS, LONG_CHUNKS = 3, 10_000
LONG_LIMIT = 60_000
"""`max_tokens` of requests that get the long answer."""
START_SECONDS = 120
LITELLM = Peer("LiteLLM", "litellm", "litellm", "litellm")
LITELLM_KEY = "sk-made-up"
LITELLM_CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: anthropic/{model}
      api_base: {url}
      api_key: made-up
general_settings:
  master_key: sk-made-up
litellm_settings:
  telemetry: false
"""
BODY: dict[str, Any] = {
    "model": "claude-haiku-5-5",
    "max_tokens": 500,
    "stream": True,
    "messages": [{"role": "user", "content": "word " * 2000}],
}


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    python = install(LITELLM, report)
    contenders = [
        Contender("past the proxy", "proxy", "request", lambda: asyncio.run(_measure(is_through=False))),
        Contender("through the proxy", "proxy", "request", lambda: asyncio.run(_measure(is_through=True))),
        Contender("through LiteLLM's proxy", "proxy", "request", lambda: asyncio.run(_measure_litellm(python))),
    ]
    notes = {"requests": ONE_BY_ONE, "together": TOGETHER, "chunks": CHUNKS, "litellm": LITELLM.version()}
    notes |= {"long_chunks": LONG_CHUNKS}
    rows = compare(contenders, rounds, report)
    load = round(os.getloadavg()[0])
    return rows, notes | {"load": load, "long_load": load}


async def _measure(*, is_through: bool) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        async with _program(["-m", "bench.proxy"], {}, Path(folder)) as (_, line):
            url, key, pid = f"http://127.0.0.1:{line}", "made-up", 0
            if not is_through:
                return await _ask_all(url, key, pid)
            environ = _environ(Path(folder), url)
            key = await _make_key(environ)
            async with _program(
                ["-m", "halter", "proxy", "--listen", "127.0.0.1:0", "--json"], environ, Path(folder)
            ) as (
                proxy,
                first_line,
            ):
                return await _ask_all(json.loads(first_line)["url"], key, proxy.pid)


async def _measure_litellm(python: Path) -> Sample:
    """Measure LiteLLM with one worker, one key and no database, so without holds and storage."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with _program(["-m", "bench.proxy"], {}, folder) as (_, line):
            config = LITELLM_CONFIG.format(model=BODY["model"], url=f"http://127.0.0.1:{line}")
            await asyncio.to_thread((folder / "config.yaml").write_text, config)
            with bind(port=0) as free:
                port = free.getsockname()[1]
            words = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
            environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
            process = await asyncio.create_subprocess_exec(
                python.with_name("litellm"), *words, env=environ, cwd=folder, stdout=DEVNULL, stderr=DEVNULL
            )
            try:
                await _wait_until_up(port, process)
                return await _ask_all(f"http://127.0.0.1:{port}", LITELLM_KEY, process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                await process.wait()


async def _wait_until_up(port: int, process: Process) -> None:
    async with asyncio.timeout(START_SECONDS):
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            writer.close()
            return
    raise RuntimeError("LiteLLM's proxy exited before it accepted connections.")


async def _ask_all(url: str, key: str, pid: int) -> Sample:
    """Send requests one by one for the delays, then concurrently for the rate."""
    import httpx2

    first: list[float] = []
    whole: list[float] = []

    async def ask(limit: int = BODY["max_tokens"]) -> int:
        began = time.perf_counter()
        headers, body = {"x-api-key": key}, {**BODY, "max_tokens": limit}
        async with http.stream("POST", f"{url}/v1/messages", json=body, headers=headers) as answer:
            if not answer.is_success:
                raise RuntimeError(f"the answer was {answer.status_code}")
            first_byte_at, size = 0.0, 0
            async for chunk in answer.aiter_bytes():
                first_byte_at = first_byte_at or time.perf_counter() - began
                size += len(chunk)
        first.append(first_byte_at)
        whole.append(time.perf_counter() - began)
        return size

    async with httpx2.AsyncClient(timeout=60) as http:
        for _ in range(5):
            await ask()
        first.clear()
        whole.clear()
        for _ in range(ONE_BY_ONE):
            await ask()
        extra = {
            "first_byte_p50_ms": statistics.median(first) * 1000,
            "first_byte_p95_ms": statistics.quantiles(first, n=20)[-1] * 1000,
            "chunk_p50_us": statistics.median(each - begun for each, begun in zip(whole, first, strict=True))
            / CHUNKS
            * 1e6,
        }
        began, cpu, done_count = time.perf_counter(), _read_cpu(pid), 0
        for _ in range(3):
            await asyncio.gather(*(ask() for _ in range(TOGETHER)))
            done_count += TOGETHER
        wall, used = time.perf_counter() - began, _read_cpu(pid) - cpu
        cpu = _read_cpu(pid)
        size = sum([await ask(LONG_LIMIT) for _ in range(LONG_ANSWERS)])
        extra["cpu_ms_per_mb"] = (_read_cpu(pid) - cpu) * 1000 / (size / 1e6)
        return Sample(done_count, wall, used, extra)


def _read_cpu(pid: int) -> float:
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environ(folder: Path, provider: str) -> dict[str, str]:
    return {
        "HALTER_STORE": str(folder / "store.db"),
        "HALTER_CHECKPOINTS": str(folder / "checkpoints"),
        "HALTER_SIGNING_KEY": str(folder / "signing.key"),
        "HALTER_TOKENS": str(folder / "tokens.json"),
        "HALTER_PERSON": "bench",
        "ANTHROPIC_API_KEY": "made-up",
        "ANTHROPIC_BASE_URL": provider,
    }


async def _make_key(environ: dict[str, str]) -> str:
    words = [sys.executable, "-m", "halter", "keys", "new", "--agent", "bench", "--json"]
    process = await asyncio.create_subprocess_exec(*words, env={**os.environ, **environ}, stdout=PIPE)
    output, _ = await process.communicate()
    return json.loads(output)["key"]


@asynccontextmanager
async def _program(words: list[str], environ: dict[str, str], folder: Path) -> AsyncGenerator[tuple[Process, str]]:
    """Run a Python program; yield the process and its first line of output."""
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, env={**os.environ, **paths, **environ}, cwd=folder, stdout=PIPE
    )
    try:
        if process.stdout is None:
            raise RuntimeError("The program has no output.")
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def _provide() -> None:
    """Serve the same answer, in the measured number of chunks, until killed."""
    from halter_drills.provider import ListedProvider

    class TwoLengths(ListedProvider):
        def _answer(self, path: str, request: Mapping[str, Any], body: bytes) -> tuple[Sequence[bytes], object]:
            self.texts = ("word ",) * (LONG_CHUNKS if request["max_tokens"] >= LONG_LIMIT else CHUNKS)
            return super()._answer(path, request, body)

    async with TwoLengths().serve() as provider:
        print(provider.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_provide())
