"""The news of a fleet for a hundred who listen: how late they are, and what one who stalls does to the others.

An agent takes a turn five times a second, in a server of its own process, on SQLite. Lateness is the time from the
moment that the journal gives an event to the moment that a listener has it, over all events and all who read.
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
"""The buffer of one who stalls: what is sent to it soon stands before a full pipe."""
AGENT = f"name: clerk\nmodel: reflex\nreflex: [{{say: {'All is well. ' * 150}}}]\n"


def run(rounds: int, say: Callable[[str], None]) -> Measured:
    rows = {"nobody listens": (0, 0), "100 listen": (LISTENERS, 0), "100 listen, and one stalls": (LISTENERS, 1)}
    contenders = [
        Contender(name, "stream", "news", partial(_once, reading, stalled)) for name, (reading, stalled) in rows.items()
    ]
    return compare(contenders, rounds, say), {"listeners": LISTENERS, "turns": TURNS}


def _once(reading: int, stalled: int) -> Sample:
    return asyncio.run(_listened(reading, stalled))


async def _listened(reading: int, stalled: int) -> Sample:
    late: list[float] = []
    async with _server() as (server, port, token), asyncio.TaskGroup() as listening:
        readers = [await _socket(port, token) for _ in range(reading)]
        stuck = [await _socket(port, token, small=True) for _ in range(stalled)]
        began, cpu = time.perf_counter(), time.process_time()
        tasks = [listening.create_task(_read(reader, late)) for reader in readers]
        told = json.loads(await _asked(server))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        for each in (*readers, *stuck):
            each.transport.abort()
    turns = told["turns"]
    extra = {"turn_p50_ms": _at(turns, 0.5), "turn_p99_ms": _at(turns, 0.99), "server_cpu_s": told["cpu"]}
    if late:
        extra |= {"p50_ms": _at(late, 0.5), "p99_ms": _at(late, 0.99)}
    return Sample(max(1, len(late)), wall, cpu, extra)


def _at(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1] * 1000


async def _asked(server: asyncio.subprocess.Process) -> bytes:
    """Let the agent take its turns, and hear how long each took."""
    _input(server).write(b"go\n")
    return await _output(server).readline()


def _input(server: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    return cast("asyncio.StreamWriter", server.stdin)


def _output(server: asyncio.subprocess.Process) -> asyncio.StreamReader:
    return cast("asyncio.StreamReader", server.stdout)


async def _socket(port: int, token: str, *, small: bool = False) -> Any:
    from websockets.asyncio.client import connect

    plain = socket.socket()
    if small:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    plain.connect(("127.0.0.1", port))
    headers = {"Authorization": f"Bearer {token}"}
    made = await connect(
        f"ws://127.0.0.1:{port}/api/ws", sock=plain, additional_headers=headers, max_queue=1 if small else None
    )
    await made.send("{}")
    await made.recv()
    return made


async def _read(reader: Any, late: list[float]) -> None:
    async for text in reader:
        now = time.time()
        told = json.loads(text)
        if "at" in told:
            late.append(now - told["at"] / 1e6)


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
    """Serve, and let an agent take turns when told to."""
    from halter.runtime.feed import Bus
    from halter.runtime.runtime import open_runtime
    from halter.server.auth import Keyring, describe_token, make_secret
    from halter.server.middleware import ServerLimits
    from halter.server.server import ServerExtras, bind, serve_web
    from halter.settings import read_settings

    secret, listening = make_secret(), bind(port=0)
    async with open_runtime(read_settings({"USER": "bench"}, folder, str(folder / "halter.db"))) as app:
        keys = Keyring(extra=[describe_token(secret, "bench", "viewer", app.clock.now())])
        extras = ServerExtras(limits=ServerLimits(streams=2 * LISTENERS), pages=False)
        serving = asyncio.create_task(serve_web(app, listening, keys, Bus(app.store, app.clock), extras))
        print(listening.getsockname()[1], secret, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        cpu = time.process_time()
        turns = await _turns(app, folder)
        print(json.dumps({"turns": turns, "cpu": time.process_time() - cpu}), flush=True)
        await serving


async def _turns(app: Any, folder: Path) -> list[float]:
    from halter.cli.talk import open_agent_context
    from halter.runtime.sessions import attend_session, begin_session

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
