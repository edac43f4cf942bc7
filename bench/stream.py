"""Event streams to a hundred listeners: their lateness, and the effect of one stalled listener on the others.

An agent takes five turns per second, in a server in its own process, on SQLite. Lateness is the time from an event's
timestamp in the journal until a listener has it, over all events and all reading listeners.
"""

import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from bench.measure import Contender, Measured, Sample, compare

LISTENERS = 100
TURNS = 40
APART = 0.2
SMALL = 4096
"""Receive buffer of a stalled listener, which fills up quickly."""
AGENT = f"name: clerk\nmodel: reflex\nreflex: [{{say: {'All is well. ' * 150}}}]\n"


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    rows = {"nobody listens": (0, 0), "100 listen": (LISTENERS, 0), "100 listen, and one stalls": (LISTENERS, 1)}
    contenders = [
        Contender(name, "stream", "news", partial(_once, reading, stalled_count))
        for name, (reading, stalled_count) in rows.items()
    ]
    return compare(contenders, rounds, report), {"listeners": LISTENERS, "turns": TURNS}


def _once(reading: int, stalled_count: int) -> Sample:
    return asyncio.run(_listened(reading, stalled_count))


async def _listened(reading: int, stalled_count: int) -> Sample:
    late: list[float] = []
    async with _server() as (server, port, token), asyncio.TaskGroup() as listening:
        readers = [await _socket(port, token) for _ in range(reading)]
        stuck = [await _socket(port, token, small=True) for _ in range(stalled_count)]
        began, cpu = time.perf_counter(), time.process_time()
        tasks = [listening.create_task(_read(reader, late)) for reader in readers]
        server_figures = json.loads(await _asked(server))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        for each in (*readers, *stuck):
            each.transport.abort()
    turns = server_figures["turns"]
    extra = {"turn_p50_ms": _at(turns, 0.5), "turn_p99_ms": _at(turns, 0.99), "server_cpu_s": server_figures["cpu"]}
    if late:
        extra |= {"p50_ms": _at(late, 0.5), "p99_ms": _at(late, 0.99)}
    return Sample(max(1, len(late)), wall, cpu, extra)


def _at(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1] * 1000


async def _asked(server: asyncio.subprocess.Process) -> bytes:
    """Run the agent's turns; return their durations as JSON."""
    _input(server).write(b"go\n")
    return await _output(server).readline()


def _input(server: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    return cast("asyncio.StreamWriter", server.stdin)


def _output(server: asyncio.subprocess.Process) -> asyncio.StreamReader:
    return cast("asyncio.StreamReader", server.stdout)


async def _socket(port: int, token: str, *, small: bool = False) -> Any:
    from websockets.asyncio.client import connect

    raw_socket = socket.socket()
    if small:
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    raw_socket.connect(("127.0.0.1", port))
    headers = {"Authorization": f"Bearer {token}"}
    websocket = await connect(
        f"ws://127.0.0.1:{port}/api/ws", sock=raw_socket, additional_headers=headers, max_queue=1 if small else None
    )
    await websocket.send("{}")
    await websocket.recv()
    return websocket


async def _read(reader: Any, late: list[float]) -> None:
    async for text in reader:
        now = time.time()
        event = json.loads(text)
        if "at" in event:
            late.append(now - event["at"] / 1e6)


@asynccontextmanager
async def _server() -> AsyncGenerator[tuple[asyncio.subprocess.Process, int, str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.stream", folder]
        server = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 20)
        try:
            port, token = (await _output(server).readline()).decode().split()
            yield server, int(port), token
        finally:
            server.kill()
            await server.wait()


async def _serve(folder: Path) -> None:
    """Serve, and run the agent's turns on request."""
    from halter.runtime.feed import Bus
    from halter.runtime.runtime import open_runtime
    from halter.server.auth import Keyring, make_secret, make_token
    from halter.server.listener import bind
    from halter.server.middleware import ServerLimits
    from halter.server.server import ServerExtras, serve_web
    from halter.settings import read_settings

    secret, listening = make_secret(), bind(port=0)
    async with open_runtime(read_settings({"USER": "bench"}, folder, str(folder / "halter.db"))) as app:
        keys = Keyring(extra=[make_token(secret, "bench", "viewer", app.clock.now())])
        extras = ServerExtras(limits=ServerLimits(streams=2 * LISTENERS), pages=False)
        serving = asyncio.create_task(serve_web(app, listening, keys, Bus(app.store, app.clock), extras))
        print(listening.getsockname()[1], secret, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        cpu = time.process_time()
        turns = await _turns(app, folder)
        print(json.dumps({"turns": turns, "cpu": time.process_time() - cpu}), flush=True)
        await serving


async def _turns(app: Any, folder: Path) -> list[float]:
    from halter.cli.run.conversation import open_agent_context
    from halter.runtime.session_runner import attend_session
    from halter.runtime.session_start import begin_session

    agent = folder / "clerk"
    agent.mkdir()
    (agent / "agent.yaml").write_text(AGENT)
    took: list[float] = []
    async with open_agent_context(app, agent) as context:
        for number in range(TURNS + 1):
            began = time.perf_counter()
            await attend_session(context, await begin_session(context, f"How is it, number {number}?", "task"))
            took.append(time.perf_counter() - began)
            await asyncio.sleep(APART)
    return took[1:]


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
