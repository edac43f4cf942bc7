"""Messages to and from an MCP server: over the pipes of a program, or over HTTP.

A server cannot exhaust the memory: a message above the limit ends the connection, and so does the same amount of other
output. Requests of the server are dropped unless they are allowed. A failure says whether anything was sent.
"""

import asyncio
import os
import signal
import ssl
import subprocess
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final, Self

import msgspec

from halter.core.tools import Failed
from halter.net.failures import convert_error, list_sdk_errors
from halter.net.sdk_pool import SendSdkRequest, make_sdk_response, open_handled_client

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from httpx2 import AsyncClient, Request, Response
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage

_CHUNK_SIZE: Final = 1 << 18
_STDERR_TAIL: Final = 2000
_MAX_UNANSWERED: Final = 100
_WRITE_TIMEOUT: Final = 30.0
"""Seconds within which a server must read a message."""

_REAP_TIMEOUT: Final = 1.0
"""Seconds within which a killed program usually exits; the kernel or a busy machine can delay it."""


@dataclass(frozen=True)
class LaunchSpec:
    """A program to start. `grace` is the number of seconds that it has to exit after its input is closed."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    max_message: int
    grace: float


@dataclass
class ConnectionEnding:
    """The end of a connection, its reason, and the last output of the server on standard error."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    words: "deque[int]" = field(default_factory=lambda: deque(maxlen=_STDERR_TAIL))

    def describe(self) -> str:
        return bytes(self.words).decode(errors="replace").strip()


class LineSplitter:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield complete lines. Raises OverflowError if a line is longer than the limit."""
        *complete, rest = data.split(b"\n")
        for line in complete:
            self._buffer_part(line)
            yield bytes(self._buffer)
            self._buffer.clear()
        self._buffer_part(rest)

    def _buffer_part(self, data: bytes) -> None:
        if len(self._buffer) + len(data) > self._limit:
            raise OverflowError
        self._buffer += data


@asynccontextmanager
async def open_stdio_wire(launch: LaunchSpec, ending: ConnectionEnding) -> AsyncGenerator[tuple[Any, Any]]:
    """Start a program in a new process group and connect to its pipes; kill the group on exit."""
    import anyio

    process = _start(launch)
    inbound, read = anyio.create_memory_object_stream[Any](0)
    write, outbound = anyio.create_memory_object_stream[Any](0)
    try:
        async with anyio.create_task_group() as group, inbound, read, write, outbound:
            group.start_soon(_listen, _fd(process.stdout), inbound, launch.max_message, ending)
            group.start_soon(_speak, _fd(process.stdin), outbound, inbound, ending)
            group.start_soon(_collect_stderr, _fd(process.stderr), ending)
            try:
                yield read, write
            finally:
                group.cancel_scope.cancel()
    finally:
        await _stop(process, launch.grace)


@asynccontextmanager
async def open_own_pipes(input_fd: int, output_fd: int, max_message: int) -> AsyncGenerator[tuple[Any, Any]]:
    """Connect to the program that started this one. No thread blocks on its input, so this can always end."""
    import anyio

    ending = ConnectionEnding()
    for fd in (input_fd, output_fd):
        os.set_blocking(fd, False)
    inbound, read = anyio.create_memory_object_stream[Any](0)
    write, outbound = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as group, inbound, read, write, outbound:
        group.start_soon(_listen, input_fd, inbound, max_message, ending)
        group.start_soon(_speak, output_fd, outbound, inbound, ending)
        try:
            yield read, write
        finally:
            group.cancel_scope.cancel()


def _start(launch: LaunchSpec) -> "subprocess.Popen[bytes]":
    try:
        process = subprocess.Popen(
            launch.argv,
            cwd=launch.cwd or None,
            env=launch.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise Failed("NotStarted", f"Cannot start {launch.argv[0]}: {error}") from error
    for pipe in (process.stdin, process.stdout, process.stderr):
        os.set_blocking(_fd(pipe), False)
    return process


async def _listen(fd: int, inbound: "MemoryObjectSendStream[Any]", limit: int, ending: ConnectionEnding) -> None:
    """Pass messages on. Other output is ignored up to a limit."""
    import anyio

    lines = LineSplitter(limit)
    noise = 0
    async with inbound:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            try:
                while data := await _read(fd):
                    noise += len(data)
                    for line in lines.cut(data):
                        if (message := _message(line)) is not None:
                            noise = 0
                            await inbound.send(message)
                    if noise > 2 * limit:
                        raise OverflowError  # noqa: TRY301 Handled like a line that is too long.
                ending.why = ending.why or "it ended"
            except OverflowError:
                ending.why = f"it sent more than {limit:,} bytes without a valid message"


def _message(line: bytes) -> "SessionMessage | None":
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    if not line.strip().startswith(b"{"):
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, RecursionError):
        return None


async def _speak(
    fd: int,
    outbound: "MemoryObjectReceiveStream[SessionMessage]",
    inbound: "MemoryObjectSendStream[Any]",
    ending: ConnectionEnding,
) -> None:
    """Write messages; a program that does not read them counts as ended."""
    import anyio

    try:
        async with outbound:
            async for item in outbound:
                data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                with anyio.fail_after(_WRITE_TIMEOUT):
                    await _write(fd, data)
    except anyio.ClosedResourceError:
        """The connection was closed while this waited for a message."""
    except OSError as error:
        ending.why = ending.why or f"it accepts no messages ({error or 'it does not read them'})"
        await inbound.aclose()


async def _collect_stderr(fd: int, ending: ConnectionEnding) -> None:
    while data := await _read(fd):
        ending.words.extend(data[-_STDERR_TAIL:])


async def _read(fd: int) -> bytes:
    import anyio

    while True:
        await anyio.wait_readable(fd)
        with suppress(BlockingIOError):
            return os.read(fd, _CHUNK_SIZE)


async def _write(fd: int, data: bytes) -> None:
    import anyio

    unwritten = memoryview(data)
    while unwritten:
        try:
            unwritten = unwritten[os.write(fd, unwritten) :]
        except BlockingIOError:
            await anyio.wait_writable(fd)


async def _stop(process: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """Let a program exit, then kill the rest of its group, also if this is cancelled."""
    import anyio

    try:
        _close(process.stdin)
        with anyio.CancelScope(shield=True), anyio.move_on_after(grace_seconds):
            await _wait_for_exit(process.pid)
    finally:
        # The leader is not reaped yet, so the group's number cannot belong to another group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_REAP_TIMEOUT)
        except subprocess.TimeoutExpired:
            # A thread reaps it when it exits, and no task waits for that.
            threading.Thread(target=process.wait, daemon=True).start()
        _close(process.stdout)
        _close(process.stderr)


async def _wait_for_exit(pid: int) -> None:
    """Wait until a program exits, without reaping it: until then its pid cannot be reused."""
    import anyio

    pidfd = os.pidfd_open(pid)
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def _fd(pipe: IO[bytes] | None) -> int:
    return pipe.fileno() if pipe else -1


def _close(pipe: IO[bytes] | None) -> None:
    if pipe:
        with suppress(OSError):
            pipe.close()


ONLY_PINGS: Final = frozenset({"ping"})
ALL_REQUESTS: Final = frozenset({"ping", "elicitation/create", "sampling/createMessage", "roots/list"})
"""Requests that a server may send if the connection serves a client; some are only refused."""


@asynccontextmanager
async def watch_connection(
    transport: "Transport", ending: ConnectionEnding, answered_methods: AbstractSet[str] = ONLY_PINGS
) -> "AsyncGenerator[tuple[ServerOutput, ServerInput]]":
    async with transport as (read, write):
        output = ServerOutput(read, ending, answered_methods)
        yield output, ServerInput(write, output)


class ServerOutput:
    """The output of a server. Sets the end of the connection, and drops all requests but the answered methods.

    The SDK queues answers to requests, so a server that sends requests and never reads could exhaust the memory.
    """

    def __init__(self, inner: Any, ending: ConnectionEnding, answered_methods: AbstractSet[str] = ONLY_PINGS) -> None:
        self._inner = inner
        self._ending = ending
        self._answered_methods = answered_methods
        self.unanswered = 0

    async def receive(self) -> Any:
        import anyio

        while True:
            try:
                item = await self._inner.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                self._ending.ended.set()
                raise
            if self._is_accepted(item):
                return item

    def _is_accepted(self, item: Any) -> bool:
        from mcp_types import JSONRPCRequest

        if isinstance(item, Exception):
            return False
        if not isinstance(item.message, JSONRPCRequest):
            return True
        if item.message.method not in self._answered_methods or self.unanswered >= _MAX_UNANSWERED:
            return False
        self.unanswered += 1
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        import anyio

        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        await self.aclose()


class ServerInput:
    def __init__(self, inner: Any, output: ServerOutput) -> None:
        self._inner = inner
        self._on_line = output

    async def send(self, item: Any, /) -> None:
        from mcp_types import JSONRPCError, JSONRPCResponse

        await self._inner.send(item)
        if isinstance(item.message, JSONRPCResponse | JSONRPCError):
            self._on_line.unanswered -= 1

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        await self.aclose()


NOT_SENT_CODE: Final = -32091
"""The request did not reach the server."""

LOST_CODE: Final = -32092
"""The request was sent; its outcome is unknown."""

FORGOTTEN_CODE: Final = -32093
"""The server does not know the session, and did nothing."""

REFUSED_CODE: Final = -32094
"""The server refused the request."""

_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404
_SERVER_ERROR: Final = 500
_SESSION_HEADER: Final = "mcp-session-id"


@dataclass(frozen=True)
class RemoteServer:
    """A server to connect to. `connect` and `read` are timeouts in seconds; `tls` verifies certificates."""

    url: str
    headers: Mapping[str, str]
    max_message: int
    connect: float = 10.0
    read: float = 300.0
    tls: ssl.SSLContext | None = None


@asynccontextmanager
async def open_http_wire(remote: RemoteServer) -> AsyncGenerator[tuple[Any, Any]]:
    from mcp.client.streamable_http import streamable_http_client

    async with (
        _client(remote) as client,
        streamable_http_client(remote.url, http_client=client, max_sse_event_size=remote.max_message) as streams,
    ):
        yield streams


@asynccontextmanager
async def open_sse_wire(remote: RemoteServer) -> AsyncGenerator[tuple[Any, Any]]:
    from mcp.client.sse import sse_client

    def client(headers: object = None, timeout: object = None, auth: object = None) -> "AsyncClient":  # noqa: ARG001 The library's own choices are ignored.
        return _client(remote)

    async with sse_client(remote.url, httpx_client_factory=client) as streams:
        yield streams


def _client(remote: RemoteServer) -> "AsyncClient":
    return open_handled_client(
        remote.headers,
        partial(_send_bounded, remote.max_message),
        connect_timeout=remote.connect,
        read_timeout=remote.read,
        tls=remote.tls,
    )


async def _send_bounded(limit: int, request: "Request", send: SendSdkRequest) -> "Response":
    """Send a request. The response is bounded, and a failure ends one request instead of the connection."""
    try:
        return await _bound_response(request, await send(request), limit)
    except list_sdk_errors() as error:
        failure = convert_error(error)
        if failure.is_sent:
            return _answer(503, LOST_CODE, f"the connection failed: {failure.reason}")
        return _answer(503, NOT_SENT_CODE, f"cannot connect: {failure.reason}")


async def _bound_response(request: "Request", response: "Response", limit: int) -> "Response":
    """Read a response up to a limit; events are read lazily, each up to the same limit."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        await response.aclose()
        return _answer(503, LOST_CODE, "it sent a compressed response, which was not requested")
    if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return response
    body = bytearray()
    try:
        async for chunk in _chunks(response):
            body += chunk
            if len(body) > limit:
                return _answer(503, LOST_CODE, f"it answered with more than {limit:,} bytes")
    finally:
        await response.aclose()
    if response.status_code >= _BAD_REQUEST and not _is_error(bytes(body)):
        if response.status_code == _NOT_FOUND and _SESSION_HEADER in request.headers:
            return _answer(response.status_code, FORGOTTEN_CODE, "it does not know this session")
        code = LOST_CODE if response.status_code >= _SERVER_ERROR else REFUSED_CODE
        return _answer(response.status_code, code, f"it answered with HTTP status {response.status_code}")
    headers = {name: value for name, value in response.headers.items() if name.lower() != "transfer-encoding"}
    return make_sdk_response(response.status_code, headers, bytes(body))


async def _chunks(response: "Response") -> AsyncGenerator[bytes]:
    stream: Any = response.stream
    async for chunk in stream:
        yield chunk


def _is_error(body: bytes) -> bool:
    from mcp_types import JSONRPCError, jsonrpc_message_adapter

    try:
        return isinstance(jsonrpc_message_adapter.validate_json(body, by_name=False), JSONRPCError)
    except (ValueError, RecursionError):
        return False


def _answer(status: int, code: int, message: str) -> "Response":
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return make_sdk_response(status, {"content-type": "application/json"}, msgspec.json.encode(error))
