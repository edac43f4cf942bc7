"""A gateway with its person, its servers as real programs, and clients of both protocols before it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.shared.memory import create_client_server_memory_streams
from mcp_types import CallToolResult, TextContent

from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.ids import session_stream
from halter.core.ports import Query, Stored, read_stream
from halter.core.rows import SessionRow
from halter.core.vocabulary import Verdict
from halter.gateway.serve import make_mcp_terms, read_gateway_agent
from halter.gateway.server import Gateway, open_gateway
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.testing.fakes import ManualClock
from tests.processes import warm_command

SERVERS = Path(__file__).parent / "servers"
LIAR = Path(__file__).parents[1] / "unit" / "mcp_servers" / "liar.py"
PERSON = "ada"
ERAS = ("legacy", "2026-07-28")
START = 1_790_000_000_000_000


def helpful(notes: Path) -> Mapping[str, Any]:
    return _forked("helpful.py", notes)


def modern(notes: Path) -> Mapping[str, Any]:
    return _forked("modern.py", notes)


def _forked(name: str, notes: Path) -> Mapping[str, Any]:
    """A server as a program of its own; what takes long to import is imported once for all."""
    command, *args = warm_command("python", str(SERVERS / name), str(notes), imports=["mcp.server.mcpserver"])
    return {"command": command, "args": args}


def liar(**how: Any) -> Mapping[str, Any]:
    return {"command": sys.executable, "args": ["-I", str(LIAR), json.dumps(how)]}


def write_agent(home: Path, servers: Mapping[str, Any], policy: str = "") -> Path:
    """Write an agent's folder; its servers are named in a file that the person names themselves."""
    folder = home / "desk"
    folder.mkdir(exist_ok=True)
    (folder / "agent.yaml").write_text(f"name: desk\n{policy}")
    (home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return folder


def text_of(result: CallToolResult) -> str:
    return "\n".join(content_block.text for content_block in result.content if isinstance(content_block, TextContent))


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what another process does."""
    while not condition():  # noqa: ASYNC110 No event of this process tells of it.
        await asyncio.sleep(0.01)


async def pass_time(clock: ManualClock, call: "asyncio.Task[Any]", most: int = 2 * MINUTE) -> int:
    """Let time pass until a call is answered; return how much did."""
    passed = 0
    while not call.done() and passed < most:
        clock.advance(SECOND)
        passed += SECOND
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)
    return passed


async def let_server_work(clock: ManualClock, call: "asyncio.Task[Any]") -> None:
    """Let time pass, slowly enough for a server in another process to answer, until a call is answered."""
    while not call.done():
        clock.advance(SECOND // 10)
        await asyncio.sleep(0.02)


class GatewayDesk:
    def __init__(self, app: Runtime, gateway: Gateway, notes: Path) -> None:
        self.app = app
        self.gateway = gateway
        self.notes = notes

    def noted(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def client(self, mode: str = "legacy", **how: Any) -> Client:
        return Client(connect(self.gateway), mode=mode, **how)

    async def waiting(self) -> list[PendingDecision]:
        return list(await list_pending_decisions(self.app.store, self.app.clock.now()))

    async def wait_for_decision(self) -> PendingDecision:
        while not (pending_decisions := await self.waiting()):  # noqa: ASYNC110 As above.
            await asyncio.sleep(0.01)
        return pending_decisions[0]

    async def until_settled(self) -> Any:
        while (await self.kinds())[-1] != "call_settled":  # noqa: ASYNC110 As above.
            await asyncio.sleep(0.01)
        return (await self.events())[-1].event

    async def decide(self, verdict: Verdict, by: str = PERSON) -> None:
        pending_decision = await self.wait_for_decision()
        await self.app.store.commit(answer_decision(pending_decision, verdict, by, self.app.ids.make()))

    async def sessions(self) -> list[SessionRow]:
        params = {"agent": "desk", "kind": "gated", "limit": 100}
        return list(await self.app.store.ask(Query("sessions_of", SessionRow, params)))

    async def events(self) -> list[Stored]:
        return [
            each
            for row in await self.sessions()
            for each in await read_stream(self.app.store, session_stream(row.session))
        ]

    async def kinds(self) -> list[str]:
        return [event.kind for event in await self.events()]


@asynccontextmanager
async def connect(gateway: Gateway) -> AsyncGenerator[Any]:
    """A client's transport to a gateway in this process; every message is JSON-RPC as on a wire."""
    async with create_client_server_memory_streams() as (client, server):
        options = gateway.server.create_initialization_options()
        serving = asyncio.create_task(gateway.server.run(*server, options))
        try:
            yield client
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def open_app(
    home: Path, clock: Clock | None = None, fleet: str = "", store: str = "memory:"
) -> AsyncGenerator[Runtime]:
    environ = {"HALTER_PERSON": PERSON, "PATH": os.environ["PATH"], "HOME": str(home)}
    if fleet:
        (home / "halter.yaml").write_text(fleet)
        environ["HALTER_FLEET"] = str(home / "halter.yaml")
    async with open_runtime(read_settings(environ, home, store), clock, environ) as app:
        yield app


@asynccontextmanager
async def open_at(app: Runtime, home: Path, report: Callable[[str], None] = lambda _: None) -> AsyncGenerator[Gateway]:
    """Open a gateway on a store, again after an earlier one."""
    config = home / "mcp.json"
    owner = read_gateway_agent(app, str(home / "desk"), config)
    async with open_gateway(app, owner, make_mcp_terms(app, owner, config), report=report) as gateway:
        yield gateway


@asynccontextmanager
async def open_desk(
    home: Path, policy: str = "", servers: Mapping[str, Any] | None = None, clock: Clock | None = None, **more: Any
) -> AsyncGenerator[GatewayDesk]:
    notes = home / "notes"
    write_agent(home, {"helpful": helpful(notes)} if servers is None else servers, policy)
    async with (
        open_app(home, clock or ManualClock(START), more.pop("fleet", "mode: FULL\n")) as app,
        open_at(app, home, **more) as it,
    ):
        yield GatewayDesk(app, it, notes)
