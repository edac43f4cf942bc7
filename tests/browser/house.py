"""A house with a fleet in it: a real store, agents that run by a script, and the dashboard behind a real port."""

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, Self, TypeVar

import uvicorn
from fastapi import FastAPI

from halter.app import App, open_app
from halter.app.agent import trust_of
from halter.app.bus import Bus
from halter.app.desk import ROLES, Desk, Who, steering
from halter.app.up import Up
from halter.config.trust import folder_digest
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.server.dashboard.live import Live
from halter.server.dashboard.mounted import WHO, mount
from halter.settings import read_settings

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

FLEET = "models: {scripted:script: {price: {input: 10, output: 10}}}\n"

TOOLS = '''
import itertools
from pathlib import Path

from halter import tool

COUNT = itertools.count(20)


@tool(level="SAFE", effect="read")
async def temperature() -> str:
    """Tell how warm it is."""
    return str(20 + next(COUNT) % 7)


@tool(level="RESTRICTED")
async def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    with (Path(__file__).parent / "paid.txt").open("a") as file:
        file.write(f"{to} {amount}\\n")
    return f"paid {amount} to {to}"


@tool(level="SAFE", effect="read")
async def read_page(name: str) -> str:
    """Read a page of somebody else."""
    return (Path(__file__).parent / name).read_text()
'''

DESK = """
name: desk
model: scripted
script: script.yaml
verbs: [emit_finding, notify, propose_memory]
policy: {tools: {pay: {approval: always}}}
sensors:
  - name: thermometer
    type: poll
    interval: 1
    jitter: 0
    source: {tool: temperature}
    updates: [{field: temperature}]
autonomy: {enabled: true, idle_timeout: 0, token_budget_per_hour: 0, max_actions_per_minute: 0}
"""

MISER = """
name: miser
model: scripted
script: script.yaml
limits: {max_cost_usd: 0.01, on_cap: ask, max_output_tokens: 300}
autonomy: {enabled: true, idle_timeout: 0, token_budget_per_hour: 0}
"""

SLEEPS = {"mode": "sleep", "sleep": "1h", "reason": "all quiet"}
USED = {"input_tokens": 100, "output_tokens": 20}

Line = dict[str, Any]


def line(when: str, says: str, tool: str = "", **arguments: Any) -> Line:
    """A line of a script that is said once, when the last message holds these words."""
    calls = [{"tool": tool, "arguments": arguments}] if tool else []
    return {"when": when, "text": says, "usage": USED, "calls": calls}


def script(*lines: Line) -> str:
    """A script, as JSON: that is YAML too, whatever stands in it."""
    last = {"repeat": True, "usage": USED, "calls": [{"tool": "yield", "arguments": SLEEPS}]}
    return json.dumps([*lines, last])


class House:
    """All of it, in a thread with a loop of its own."""

    def __init__(self, home: Path, scripts: dict[str, str]) -> None:
        self.home = home
        self._scripts = scripts
        self._up = asyncio.Event()
        self._ready = threading.Event()
        self._failed: list[BaseException] = []
        self.app: App
        self.live: Live
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="house", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        if self._failed:
            raise self._failed[0]
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def does(self, what: Coroutine[Any, Any, T]) -> T:
        """Do something in the house, from a test."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(30)

    @property
    def desk(self) -> Desk:
        return Desk(self.app, Who("grace"))

    def tell(self, text: str, session: str = "desk-1") -> None:
        """Say something to a session, which wakes it."""
        self.does(steering.tell(self.desk, session, text))

    def row(self, session: str) -> SessionRow:
        (row,) = self.does(self.app.store.ask(Query("session", SessionRow, {"session": session})))
        return row

    def paid(self) -> list[str]:
        file = self.home / "desk" / "paid.txt"
        return file.read_text().splitlines() if file.exists() else []

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._live())
        except BaseException as error:  # noqa: BLE001  the test that waits is told
            self._failed.append(error)
            self._ready.set()
        finally:
            self.loop.close()

    async def _live(self) -> None:
        self._ended = asyncio.Event()
        environ = {
            "HALTER_TRUST": str(self.home / "trust.json"),
            "HALTER_FLEET": str(self.home / "halter.yaml"),
            "USER": "ada",
        }
        (self.home / "halter.yaml").write_text(FLEET)
        settings = read_settings(environ, self.home, str(self.home / "halter.db"))
        folders = [self._agent(name, text) for name, text in (("desk", DESK), ("miser", MISER))]
        for folder in folders:
            trust_of(settings).trust(folder, folder_digest(folder), "ada", 1)
        async with open_app(settings, environ=environ) as app:
            self.app = app
            bus = Bus(app.store, app.clock)
            up = Up(app, lambda *_: None, bus.pulse, random.Random(0))
            running = asyncio.create_task(up.run(folders))
            try:
                await self._serve(app, bus)
            finally:
                running.cancel()
                await asyncio.wait([running])
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    def _agent(self, name: str, text: str) -> Path:
        folder = self.home / name
        folder.mkdir()
        (folder / "agent.yaml").write_text(text)
        (folder / "script.yaml").write_text(self._scripts.get(name, script()))
        if name == "desk":
            (folder / "tools.py").write_text(TOOLS)
            (folder / "page.txt").write_text(self._scripts.get("page.txt", "nothing"))
        return folder

    async def _serve(self, app: App, bus: Bus) -> None:
        api = FastAPI(openapi_url=None)
        self.live = mount(api, app, bus)
        config = uvicorn.Config(Door(api), host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="on")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())  # noqa: SLF001  as `serve`, without catching signals
        while not server.started:
            await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.should_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.close()
        await serving


class Door:
    """Stands in for the real one: whoever has a cookie with a role is let in as that, and nobody else."""

    def __init__(self, inner: Any) -> None:
        self.app = inner

    async def __call__(self, scope: Any, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        cookie = SimpleCookie(headers.get(b"cookie", b"").decode())
        role = cookie["role"].value if "role" in cookie else ""
        if role not in ROLES:
            await send({"type": "websocket.close"} if scope["type"] == "websocket" else REFUSED)
            if scope["type"] == "http":
                await send({"type": "http.response.body", "body": b""})
            return
        scope[WHO] = Who("ada" if role == "admin" else role, role)
        await self.app(scope, receive, send)


REFUSED = {"type": "http.response.start", "status": 401, "headers": []}
