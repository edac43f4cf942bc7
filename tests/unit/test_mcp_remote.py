"""Tools of MCP servers over HTTP, on loopback: an honest server, and answers that are none."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import SECOND
from halter.core.tools import Failed, Permit, ToolServer, Unstoppable, Valid
from halter.testing.fakes import ManualClock
from halter.tools.mcp import McpTerms, McpTool, open_mcp_tools
from tests.gateway.desks import let_server_work

HONEST = Path(__file__).parent / "mcp_servers" / "honest.py"
READ = {"readOnlyHint": True}
GREETING = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "actor", "version": "1"},
}
TOOL = {"name": "act", "inputSchema": {"type": "object"}}
WISH = {"content": [{"type": "text", "text": "as you wish"}]}
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def terms(**more: Any) -> McpTerms:
    return replace(McpTerms(ManualClock(), {}), **more)


async def run_tool(tool: McpTool, **arguments: Any) -> str:
    outcome = tool.validate(json.dumps(arguments).encode())
    assert isinstance(outcome, Valid), outcome
    return (await tool.run(outcome, Permit("call-1", deadline=0, secrets={}))).text


@asynccontextmanager
async def honest() -> AsyncGenerator[str]:
    """Start the honest server on a socket that listens already, so that nobody has to wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor = listening.fileno()
        process = await asyncio.create_subprocess_exec(sys.executable, HONEST, str(descriptor), pass_fds=[descriptor])
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        finally:
            process.kill()
            await process.wait()


async def test_an_honest_server_is_used_over_http() -> None:
    async with honest() as url, open_mcp_tools([ToolServer("web", "http", url=url)], terms()) as offer:
        tools = {tool.spec.name: tool for tool in offer.tools}
        assert offer.omissions == ()
        assert await run_tool(tools["web__add"], a=2, b=3) == "5"
        assert await asyncio.gather(*(run_tool(tools["web__shout"], text=f"x{n}") for n in range(10))) == [
            f"X{n}" for n in range(10)
        ]
        with pytest.raises(Failed, match="no paper left"):
            await run_tool(tools["web__fail"], reason="no paper left")


class Actor:
    """A web server that greets as it should, and answers calls as a test wants."""

    def __init__(self, call: Answer, hints: dict[str, Any]) -> None:
        self._call = call
        self._hints = hints
        self.headers: list[str] = []
        self.greetings = 0

    @asynccontextmanager
    async def playing(self, transport: Any = "http", **more: Any) -> AsyncGenerator[McpTool]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        described = ToolServer("actor", transport, url=url, headers={"authorization": "Bearer ${secret:KEY}"})
        reveal = {"KEY": "hush"}.__getitem__
        async with server, open_mcp_tools([described], terms(reveal=reveal, **more)) as offer:
            assert offer.omissions == ()
            yield offer.tools[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                self.headers.append(head)
                length = next(
                    (line[15:] for line in head.lower().split("\r\n") if line.startswith("content-length")), "0"
                )
                body = await reader.readexactly(int(length))
                await self._answer(head, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        match fields.get("method"):
            case "initialize":
                self.greetings += 1
                send(writer, {"id": fields["id"], "result": GREETING}, **{"mcp-session-id": f"s{self.greetings}"})
            case "tools/list":
                send(writer, {"id": fields["id"], "result": {"tools": [TOOL | {"annotations": self._hints}]}})
            case "tools/call":
                await self._call(fields, writer)
            case _:
                writer.write(
                    b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 0\r\n\r\n"
                    if head.startswith("GET")
                    else b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
                )
        await writer.drain()


def send(writer: asyncio.StreamWriter, message: dict[str, Any], **headers: str) -> None:
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{text}\r\n"
    writer.write(head.encode() + body)


class ModernActor(Actor):
    """Speaks the newer protocol alone, and makes a task of its one call."""

    async def _answer(self, head: str, fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        values = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        task = {"taskId": "task-1", "ttlMs": None, "createdAt": "", "lastUpdatedAt": ""}
        results: dict[str, Any] = {
            "server/discover": {**values, "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}},
            "tools/list": {**values, "tools": [TOOL]},
            "tools/call": {**task, "resultType": "task", "status": "working"},
            "tasks/get": {**task, "resultType": "complete", "status": "completed", "result": WISH},
        }
        refusal = {"error": {"code": -32601, "message": "Method not found"}}
        said = {"result": results[fields["method"]]} if fields.get("method") in results else refusal
        send(writer, {"id": fields.get("id"), **said})
        await writer.drain()


async def test_requests_about_a_task_name_it_in_their_headers() -> None:
    """What routes by headers finds the server that has the task."""
    clock, actor = ManualClock(), ModernActor(make_answer("200 OK"), READ)
    async with actor.playing(clock=clock) as tool:
        call = asyncio.create_task(run_tool(tool))
        await let_server_work(clock, call)
        assert await call == "as you wish"
    (text,) = [head.lower() for head in actor.headers if "tasks/get" in head.lower()]
    assert "mcp-method: tasks/get\r\n" in text
    assert "mcp-name: task-1\r\n" in text


def make_answer(head: str, body: bytes = b"", *, cut: bool = False) -> Answer:
    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        length = len(body) + 100 if cut else len(body)
        writer.write(f"HTTP/1.1 {head}\r\ncontent-length: {length}\r\n\r\n".encode() + body)
        if cut:
            writer.close()

    return answer


async def politely(fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    send(writer, {"id": fields["id"], "result": WISH})


async def hang_up(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.close()


async def without_end(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1073741824\r\n\r\n")
    try:
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
    except ConnectionError:
        pass


async def events_without_end(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
    try:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
    except ConnectionError:
        pass


async def test_secrets_reach_headers_and_nothing_else_is_added() -> None:
    actor = Actor(politely, {})
    async with actor.playing() as tool:
        assert await run_tool(tool) == "as you wish"
    assert all("authorization: Bearer hush" in head for head in actor.headers)


JSON = "content-type: application/json"


@pytest.mark.parametrize(("hints", "error"), [({}, Unstoppable), (READ, Failed)])
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (hang_up, "the connection failed"),
        (without_end, "it answered with more than 1,000,000 bytes"),
        (events_without_end, "SSE stream failed"),
        (make_answer("502 Bad Gateway"), "it answered with HTTP status 502"),
        (make_answer(f"500 Oh No\r\n{JSON}", b'{"error": "no"}'), "it answered with HTTP status 500"),
        (make_answer(f"200 OK\r\n{JSON}", b"<html>"), "Failed to parse JSON response"),
        (make_answer(f"200 OK\r\n{JSON}", b'{"jsonrpc":', cut=True), "the connection failed"),
        (
            make_answer(f"200 OK\r\n{JSON}\r\ncontent-encoding: gzip", b"\x1f\x8b"),
            "it sent a compressed response, which was not requested",
        ),
        (make_answer("200 OK\r\ncontent-type: text/event-stream", b"data: {\n\n"), "Failed to parse SSE message"),
        (make_answer("200 OK\r\ncontent-type: text/event-stream", b""), "SSE stream ended without a response"),
    ],
)
async def test_an_answer_that_got_lost_leaves_a_write_unknown_and_a_read_failed(
    call: Answer, why: str, hints: dict[str, Any], error: type[Exception]
) -> None:
    async with Actor(call, hints).playing(max_message=1_000_000) as tool:
        for _ in range(2):
            with pytest.raises(error, match=why):
                await run_tool(tool)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (make_answer("401 Unauthorized"), "it answered with HTTP status 401"),
        (make_answer("307 Over There\r\nlocation: http://127.0.0.2:9/"), "not followed"),
        (
            make_answer(f"400 Bad\r\n{JSON}", b'{"jsonrpc":"2.0","id":null,"error":{"code":7,"message":"no"}}'),
            "the server actor returned an error: no",
        ),
        (make_answer("200 OK\r\ncontent-type: text/plain", b"hello"), "Unexpected content type"),
    ],
)
async def test_what_a_server_refuses_was_not_done(call: Answer, why: str) -> None:
    async with Actor(call, {}).playing() as tool:
        with pytest.raises(Failed, match=why):
            await run_tool(tool)


async def test_a_server_that_forgot_the_session_is_greeted_again() -> None:
    answers = [make_answer("404 Not Found"), politely]

    async def forget_once(fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(fields, writer)

    actor = Actor(forget_once, {})
    async with actor.playing() as tool:
        with pytest.raises(Failed, match="NotReached: it does not know this session"):
            await run_tool(tool)
        assert await run_tool(tool) == "as you wish"
        assert actor.greetings == 2


async def test_a_server_that_is_not_there_is_omitted_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    for transport in ("http", "sse"):
        async with open_mcp_tools([ToolServer("gone", transport, url=url)], terms()) as offer:
            assert offer.tools == ()
            assert "The server gone is omitted. NotConnected: the server gone cannot be used:" in offer.omissions[0]


async def test_a_server_that_is_gone_did_nothing() -> None:
    async with honest() as url:
        mcp_tools = open_mcp_tools([ToolServer("web", "http", url=url)], terms(grace=0))
        offer = await mcp_tools.__aenter__()
        tool = next(tool for tool in offer.tools if tool.spec.name == "web__shout")
    with pytest.raises(Failed, match="NotReached: cannot connect: "):
        await run_tool(tool, text="x")
    await mcp_tools.__aexit__(None, None, None)


async def test_a_server_that_does_not_answer_in_time_is_given_up() -> None:
    async def never(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await writer.drain()

    for hints, error in (({}, Unstoppable), (READ, TimeoutError)):
        async with Actor(never, hints).playing(timeout=SECOND // 5, grace=0) as tool:
            with pytest.raises(error):
                await run_tool(tool)


class EventActor(Actor):
    """The same, over server-sent events, as older servers do: answers come on a stream of their own."""

    def __init__(self) -> None:
        super().__init__(politely, {})
        self._stream: asyncio.StreamWriter | None = None

    async def _answer(self, head: str, fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET"):
            self._stream = writer
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\nevent: endpoint\ndata: /say\n\n")
            return
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
        results = {"initialize": GREETING, "tools/list": {"tools": [TOOL]}, "tools/call": WISH}
        if self._stream is not None and fields["method"] in results:
            message = {"jsonrpc": "2.0", "id": fields["id"], "result": results[fields["method"]]}
            self._stream.write(f"event: message\ndata: {json.dumps(message)}\n\n".encode())


async def test_an_older_server_is_used_over_events() -> None:
    async with EventActor().playing("sse") as tool:
        assert await run_tool(tool) == "as you wish"
