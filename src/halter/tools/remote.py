"""MCP servers that are asked over HTTP: bounded answers, and failures that say whether anything was sent."""

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport, AsyncClient, Request, Response

NOT_SENT: Final = -32091
"""The code of an answer that stands for: nothing of the request has reached the server."""

LOST: Final = -32092
"""The code of an answer that stands for: the request was sent, and nobody knows what became of it."""

FORGOTTEN: Final = -32093
"""The code of an answer that stands for: the server does not know the session any more, and did nothing."""

REFUSED: Final = -32094
"""The code of an answer that stands for: the server refused the request."""

_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404
_SERVER_ERROR: Final = 500
_SESSION: Final = "mcp-session-id"


@dataclass(frozen=True)
class Remote:
    """Where to ask. `connect` and `read` are seconds; `tls` is what certificates are checked with."""

    url: str
    headers: Mapping[str, str]
    max_message: int
    connect: float = 10.0
    read: float = 300.0
    tls: ssl.SSLContext | None = None


@asynccontextmanager
async def http_wire(remote: Remote) -> AsyncGenerator[tuple[Any, Any]]:
    """Talk over streamable HTTP."""
    from mcp.client.streamable_http import streamable_http_client

    async with (
        _client(remote) as client,
        streamable_http_client(remote.url, http_client=client, max_sse_event_size=remote.max_message) as streams,
    ):
        yield streams


@asynccontextmanager
async def sse_wire(remote: Remote) -> AsyncGenerator[tuple[Any, Any]]:
    """Talk over server-sent events, as older servers do."""
    from mcp.client.sse import sse_client

    def client(headers: object = None, timeout: object = None, auth: object = None) -> "AsyncClient":  # noqa: ARG001 What this library would choose is chosen here.
        return _client(remote)

    async with sse_client(remote.url, httpx_client_factory=client) as streams:
        yield streams


def _client(remote: Remote) -> "AsyncClient":
    from httpx2 import AsyncClient, AsyncHTTPTransport, Timeout, create_ssl_context

    tls = remote.tls or create_ssl_context(trust_env=False)
    return AsyncClient(
        # What is packed small can unpack to anything, so nothing packed is asked for.
        headers={**remote.headers, "accept-encoding": "identity"},
        timeout=Timeout(remote.connect, read=remote.read),
        transport=_careful(AsyncHTTPTransport(verify=tls, trust_env=False), remote.max_message),
        trust_env=False,
    )


def _careful(inner: "AsyncBaseTransport", limit: int) -> "AsyncBaseTransport":
    """Wrap a transport so that an answer is bounded, and a failure costs one request instead of the connection."""
    from httpx2 import AsyncBaseTransport, ConnectError, ConnectTimeout, TransportError

    class Careful(AsyncBaseTransport):
        async def handle_async_request(self, request: "Request") -> "Response":
            try:
                response = await inner.handle_async_request(request)
                return await _bounded(request, response, limit)
            except (ConnectError, ConnectTimeout) as error:
                return _answer(503, NOT_SENT, f"it cannot be reached: {error}")
            except TransportError as error:
                return _answer(503, LOST, f"the connection failed: {error or type(error).__name__}")

        async def aclose(self) -> None:
            await inner.aclose()

    return Careful()


async def _bounded(request: "Request", response: "Response", limit: int) -> "Response":
    """Read an answer up to its limit; events are read one by one, each up to the same limit, by whoever wants them."""
    from httpx2 import Response

    if response.headers.get("content-encoding", "identity").lower() != "identity":
        await response.aclose()
        return _answer(503, LOST, "it answered packed, which it was not asked to")
    if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return response
    body = bytearray()
    try:
        async for chunk in _chunks(response):
            body += chunk
            if len(body) > limit:
                return _answer(503, LOST, f"it answered with more than {limit:,} bytes")
    finally:
        await response.aclose()
    if response.status_code >= _BAD_REQUEST and not _is_error(bytes(body)):
        return _status(request, response.status_code)
    headers = {name: value for name, value in response.headers.items() if name.lower() != "transfer-encoding"}
    return Response(response.status_code, headers=headers, content=bytes(body))


async def _chunks(response: "Response") -> AsyncGenerator[bytes]:
    stream: Any = response.stream
    async for chunk in stream:
        yield chunk


def _status(request: "Request", status: int) -> "Response":
    """Say what an answer without words means."""
    if status == _NOT_FOUND and _SESSION in request.headers:
        return _answer(status, FORGOTTEN, "it does not know this session any more")
    code = LOST if status >= _SERVER_ERROR else REFUSED
    return _answer(status, code, f"it answered with HTTP status {status}")


def _is_error(body: bytes) -> bool:
    from mcp_types import JSONRPCError, jsonrpc_message_adapter

    try:
        return isinstance(jsonrpc_message_adapter.validate_json(body, by_name=False), JSONRPCError)
    except (ValueError, RecursionError):
        return False


def _answer(status: int, code: int, message: str) -> "Response":
    from httpx2 import Response

    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return Response(status, headers={"content-type": "application/json"}, content=msgspec.json.encode(error))
