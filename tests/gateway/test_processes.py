"""The gateway as programs see it: started by its command, over pipes and sockets, killed in the middle of a call."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from halter.core.clock import MINUTE, SystemClock
from halter.core.errors import ConfigError
from halter.core.money import BudgetRow
from halter.core.ports import Query
from halter.core.rows import HoldRow
from halter.gateway.serve import make_mcp_terms, read_gateway_agent, serve_http
from halter.gateway.sessions import recover_sessions
from halter.loop.concurrency import cancel_and_wait
from halter.proxy.keys import KeyFile, KeyLimits, KeyRing, make_key_secret, make_virtual_key
from halter.runtime.runtime import open_runtime
from halter.server.listener import bind, format_address
from halter.settings import read_settings
from halter.testing.fakes import ManualClock
from tests.gateway.desks import ERAS, PERSON, GatewayDesk, helpful, open_app, open_at, text_of, write_agent
from tests.processes import warm_command

WAIT_SECONDS = 60


def environ_of(home: Path) -> Mapping[str, str]:
    return {"HALTER_PERSON": PERSON, "PATH": os.environ["PATH"], "HOME": str(home)}


def command_of(home: Path, *, forked: bool = True) -> list[str]:
    """The command of a gateway; a fork would outlive the process that stands for it, so one that is killed is none."""
    write_agent(home, {"helpful": helpful(home / "notes")}, "gateway: {prices: {helpful__slow: 0.1}}\n")
    (home / "halter.yaml").write_text("mode: FULL\n")
    where = ["--agent", str(home / "desk"), "--config", str(home / "mcp.json"), "--store", str(home / "runs.db")]
    return warm_command("halter", "gateway", *where) if forked else [sys.executable, "-m", "halter", "gateway", *where]


@pytest.mark.parametrize("era", ERAS)
async def test_a_program_starts_it_in_place_of_its_servers(tmp_path: Path, era: str) -> None:
    program, *arguments = command_of(tmp_path)
    stdio_server_parameters = StdioServerParameters(
        command=program, args=arguments, env=dict(environ_of(tmp_path)), cwd=tmp_path
    )
    async with Client(stdio_server_parameters, mode=era) as client:
        assert "helpful__act" in [tool.name for tool in (await client.list_tools()).tools]
        assert text_of(await client.call_tool("helpful__act", {"what": "x"})) == "did x"
    settings = read_settings(environ_of(tmp_path), tmp_path, str(tmp_path / "runs.db"))
    async with open_runtime(settings, None, environ_of(tmp_path)) as app:
        (row,) = await GatewayDesk(app, None, tmp_path / "notes").sessions()  # type: ignore[arg-type]
    assert (row.kind, row.state) == ("gated", "COMPLETED")


class Wire:
    """A client's pipes to a gateway, by hand."""

    def __init__(self, home: Path, *, forked: bool = True) -> None:
        pipe = subprocess.PIPE
        command = command_of(home, forked=forked)
        self.program = subprocess.Popen(
            command, env=environ_of(home), cwd=home, stdin=pipe, stdout=pipe, start_new_session=True
        )

    def say(self, **message: Any) -> None:
        assert self.program.stdin is not None
        self.program.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.program.stdin.flush()

    def hear(self) -> Any:
        assert self.program.stdout is not None
        return json.loads(self.program.stdout.readline())

    def greet(self) -> None:
        info = {"name": "by-hand", "version": "1"}
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info}
        self.say(id=1, method="initialize", params=params)
        assert self.hear()["result"]["protocolVersion"] == "2025-06-18"
        self.say(method="notifications/initialized")

    def close(self) -> None:
        for pipe in (self.program.stdin, self.program.stdout):
            assert pipe is not None
            pipe.close()
        self.program.wait(WAIT_SECONDS)


async def test_a_call_that_runs_when_the_gateway_is_killed_is_in_doubt_and_not_lost(tmp_path: Path) -> None:
    wire, notes = Wire(tmp_path, forked=False), tmp_path / "notes"
    wire.greet()
    wire.say(id=2, method="tools/call", params={"name": "helpful__slow", "arguments": {"what": "x"}})
    while not (notes.exists() and "began x" in notes.read_text()):  # noqa: ASYNC110 Another process does it.
        await asyncio.sleep(0.02)
    wire.program.send_signal(signal.SIGKILL)
    wire.close()
    settings = read_settings(environ_of(tmp_path), tmp_path, str(tmp_path / "runs.db"))
    manual_clock = ManualClock(SystemClock().now() + 5 * MINUTE)
    async with open_runtime(settings, manual_clock, environ_of(tmp_path)) as app, open_at(app, tmp_path) as gateway:
        desk = GatewayDesk(app, gateway, notes)
        await recover_sessions(gateway.terms)
        (hold,) = await app.store.ask(Query("holds", HoldRow))
        pending_decision = await desk.wait_for_decision()
        assert (pending_decision.about, pending_decision.name) == ("unknown_call", "helpful__slow")
        (row,) = await desk.sessions()
        assert row.state == "WAITING_FOR_APPROVAL"
        # Another look changes nothing, and a new client gets a session of its own.
        before = len(await desk.events())
        await recover_sessions(gateway.terms)
        assert len(await desk.events()) == before
        await desk.decide("approve")
        await recover_sessions(gateway.terms)
        assert await app.store.ask(Query("holds", HoldRow)) == []
        (row,) = await desk.sessions()
        assert (row.state, hold.hold.startswith(row.session)) == ("ERROR", True)
    assert notes.read_text().count("began x") == 1


async def test_it_ends_when_its_client_closes_the_pipes_and_on_a_signal(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.greet()
    wire.close()
    assert wire.program.returncode == 0
    wire = Wire(tmp_path)
    wire.greet()
    wire.program.send_signal(signal.SIGTERM)
    assert wire.program.wait(WAIT_SECONDS) in (130, 143)
    wire.close()


@pytest.mark.postgres
async def test_two_gateways_on_one_postgresql_share_caps_and_approvals(
    tmp_path: Path, postgres_schema_url: str
) -> None:
    priced = "limits: {max_cost_usd_per_day: 0.5}\ngateway: {prices: {helpful__look: 0.1}, wait: 1s}\n"
    notes, act = tmp_path / "notes", ("helpful__act", {"what": "x"})
    write_agent(tmp_path, {"helpful": helpful(notes)}, priced)
    async with AsyncExitStack() as stack:
        desks: list[GatewayDesk] = []
        for _ in range(2):
            app = await stack.enter_async_context(open_app(tmp_path, None, "mode: SEMI\n", postgres_schema_url))
            desks.append(GatewayDesk(app, await stack.enter_async_context(open_at(app, tmp_path)), notes))
        first, second = desks
        async with first.client() as one, second.client("2026-07-28") as other:
            calls = [client.call_tool("helpful__look", {"what": "y"}) for client in (one, other) for _ in range(10)]
            results = await asyncio.gather(*calls)
            assert sum(not result.is_error for result in results) == 5
            assert first.noted() == ["look y"] * 5
            pending = await one.call_tool(*act)
            assert "pending decision" in text_of(pending)
            await second.decide("approve")
        # The session of the first rests for its question; whoever comes next takes it up.
        await first.gateway.close()
        await second.gateway.close()
        async with open_at(second.app, tmp_path) as later, GatewayDesk(second.app, later, notes).client() as client:
            assert text_of(await client.call_tool(*act)) == "did x"
            assert "pending decision" in text_of(await client.call_tool(*act))
        assert first.noted().count("act x") == 1
        numbers = [row.spent for row in await first.app.store.ask(Query("all_budgets", BudgetRow))]
        assert max(numbers) == 500_000


class HttpDesk:
    def __init__(self, url: str, keys: KeyFile, desk: GatewayDesk) -> None:
        self.url = url
        self.desk = desk
        self._keys = keys

    def make_key(self, name: str, agent: str = "desk", limits: KeyLimits | None = None) -> str:
        secret = make_key_secret()
        self._keys.add(make_virtual_key(secret, name, agent, 1, PERSON, limits or KeyLimits()))
        return secret

    def revoke(self, name: str) -> None:
        self._keys.revoke(name, 2)

    @asynccontextmanager
    async def client(self, key: str, mode: str) -> AsyncGenerator[Client]:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode) as client,
        ):
            yield client


@asynccontextmanager
async def serve(home: Path, policy: str = "", fleet: str = "mode: FULL\n") -> AsyncGenerator[HttpDesk]:
    write_agent(home, {"helpful": helpful(home / "notes")}, policy)
    async with open_app(home, None, fleet) as app:
        config, keys, listening = home / "mcp.json", KeyFile(home / "keys.json"), bind(port=0)
        url = f"{format_address(listening)}/mcp"
        owner = read_gateway_agent(app, str(home / "desk"), config)
        terms = make_mcp_terms(app, owner, config)
        serving = asyncio.create_task(serve_http(app, owner, terms, lambda _: None, listening, KeyRing(keys)))
        try:
            yield HttpDesk(url, keys, GatewayDesk(app, None, home / "notes"))  # type: ignore[arg-type]
        finally:
            await cancel_and_wait(serving)


@pytest.mark.parametrize("era", ERAS)
async def test_over_http_a_key_opens_the_gateway_of_its_agent(tmp_path: Path, era: str) -> None:
    async with serve(tmp_path) as http_desk:
        key = http_desk.make_key("one")
        async with http_desk.client(key, era) as client:
            assert "helpful__act" in [tool.name for tool in (await client.list_tools()).tools]
            assert text_of(await client.call_tool("helpful__act", {"what": "x"})) == "did x"
            (row,) = await http_desk.desk.sessions()
            assert row.kind == "gated"
            result: Any = (await http_desk.desk.events())[0].event
            assert result.started_by == "key:one"
            http_desk.revoke("one")
            with pytest.raises(Exception, match=r"401|revoked"):
                await client.call_tool("helpful__act", {"what": "y"})
    assert http_desk.desk.noted() == ["act x"]


@pytest.mark.parametrize(
    ("limits", "made"),
    [
        (KeyLimits(), 4),
        (KeyLimits(max_cost_usd=Decimal("0.2")), 2),
        (KeyLimits(max_cost_usd_per_hour=Decimal("0.1")), 1),
        (KeyLimits(max_cost_usd_per_day=Decimal("0.3")), 3),
        (KeyLimits(max_cost_usd=Decimal(5), max_cost_usd_per_day=Decimal(50)), 4),
    ],
)
async def test_a_key_lowers_what_its_agent_may_spend_and_never_raises_it(
    tmp_path: Path, limits: KeyLimits, made: int
) -> None:
    policy = "limits: {max_cost_usd: 0.4}\ngateway: {prices: {helpful__act: 0.1}, wait: 0s}\n"
    async with (
        serve(tmp_path, policy) as http_desk,
        http_desk.client(http_desk.make_key("one", limits=limits), ERAS[1]) as client,
    ):
        results = [await client.call_tool("helpful__act", {"what": "x"}) for _ in range(6)]
        assert [result.is_error for result in results] == [False] * made + [True] * (6 - made)
        assert http_desk.desk.noted() == ["act x"] * made


async def test_what_one_key_left_open_is_unknown_to_another_key(tmp_path: Path) -> None:
    meta: Any = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {
            "elicitation": {"form": {}},
            "extensions": {"io.modelcontextprotocol/tasks": {}},
        },
    }
    async with serve(tmp_path, fleet="mode: SEMI\n") as http_desk, httpx2.AsyncClient(timeout=30) as http:
        mine, theirs = http_desk.make_key("mine"), http_desk.make_key("theirs")

        async def send(key: str, method: str, name: str = "", **params: Any) -> Any:
            headers = {
                "Authorization": f"Bearer {key}",
                "Accept": "application/json, text/event-stream",
                "MCP-Protocol-Version": "2026-07-28",
                "Mcp-Method": method,
                **({"Mcp-Name": name} if name else {}),
            }
            values = {"name": name} if name else {}
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**values, **params, "_meta": meta}}
            output = (await http.post(http_desk.url, json=body, headers=headers)).text
            return json.loads(output[output.index("{") :])

        ask = ("tools/call", "helpful__ask")
        result: Any = {"question": "Which?"}
        first = (await send(mine, *ask, arguments=result))["result"]
        red: Any = {"inputResponses": {"halter-1": {"action": "accept", "content": {"colour": "red"}}}}
        back: Any = {"arguments": result, "requestState": first["requestState"], **red}
        assert "Nothing was done" in (await send(theirs, *ask, **back))["error"]["message"]
        task = (await send(mine, "tools/call", "helpful__act", arguments={"what": "x"}))["result"]
        assert task["resultType"] == "task"
        for method in ("tasks/get", "tasks/cancel"):
            assert "no such task" in (await send(theirs, method, taskId=task["taskId"]))["error"]["message"]
        assert (await send(mine, "tasks/get", taskId=task["taskId"]))["result"]["status"] == "working"
        assert http_desk.desk.noted() == []
        assert (await send(mine, *ask, **back))["result"]["content"][0]["text"] == "they like red"


def initialize() -> dict[str, Any]:
    info = {"name": "by-hand", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


async def test_a_session_is_good_only_with_the_key_that_began_it(tmp_path: Path) -> None:
    call = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "tools/call",
        "params": {"name": "helpful__act", "arguments": {"what": "stolen"}},
    }
    accepts = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}
    async with serve(tmp_path) as http_desk, httpx2.AsyncClient(headers=accepts, timeout=30) as http:
        mine, theirs, foreign = (
            http_desk.make_key("mine"),
            http_desk.make_key("theirs"),
            http_desk.make_key("other", "clerk"),
        )

        async def send(body: Any, key: str, **headers: str) -> httpx2.Response:
            return await http.post(http_desk.url, json=body, headers={"Authorization": f"Bearer {key or 0}", **headers})

        for wrong in ("", "sk-halter-" + "a" * 43, foreign):
            assert (await send(initialize(), wrong)).status_code == 401
        session = (await send(initialize(), mine)).headers["mcp-session-id"]
        labelled = {"Mcp-Session-Id": session}
        await send({"jsonrpc": "2.0", "method": "notifications/initialized"}, mine, **labelled)
        assert (await send(call, theirs, **labelled)).status_code == 404
        assert (await send(call, mine, **{"Mcp-Session-Id": "0" * 32})).status_code == 404
        assert (await send(call, "", **labelled)).status_code == 401
        assert http_desk.desk.noted() == []
        assert (await send(call, mine, **labelled)).status_code == 200
        assert http_desk.desk.noted() == ["act stolen"]


async def test_servers_may_ask_a_model_only_where_the_agent_has_one(tmp_path: Path) -> None:
    folder = write_agent(tmp_path, {"helpful": helpful(tmp_path / "notes")}, "gateway: {sampling: true}\n")
    async with open_app(tmp_path) as app:
        with pytest.raises(ConfigError, match="needs a model"):
            read_gateway_agent(app, str(folder), tmp_path / "mcp.json")


async def test_a_list_of_servers_that_is_missing_is_distinguished_from_an_empty_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"mcpServers": {}}')
    async with open_app(tmp_path) as app:
        with pytest.raises(ConfigError, match=r"gone\.json does not exist"):
            read_gateway_agent(app, "desk", tmp_path / "gone.json")
        with pytest.raises(ConfigError, match=r"empty\.json names no MCP server"):
            read_gateway_agent(app, "desk", empty)
