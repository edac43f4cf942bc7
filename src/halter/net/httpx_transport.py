"""The transport over httpx2, which every installation has."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from halter.net.client import HttpClient, HttpRequest, HttpResponse, ignore_sending
from halter.net.failures import convert_error, list_http_errors
from halter.net.tls import make_tls_context

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Request, Response

_SENDING: Final = ".send_request_headers.started"
"""The end of the name of the event before the first byte of a request."""


@dataclass(frozen=True)
class HttpxTerms:
    """Timeouts in seconds, certificates other than the machine's, and whether the environment's proxies are used.

    With `keep_alive`, a lost server is detected about that many seconds later, also on a stream that may be silent for
    hours.
    """

    connect_timeout: float | None = None
    read_timeout: float | None = None
    tls: ssl.SSLContext | None = None
    uses_environment: bool = False
    keep_alive: int = 0


DIRECT: Final = HttpxTerms()


class HttpxTransport:
    """One pool of connections, opened at the first request."""

    def __init__(self, terms: HttpxTerms = DIRECT, pool: "AsyncClient | None" = None) -> None:
        self._terms = terms
        self._pool = pool
        # Its records of requests contain whole addresses, and some of these contain a key.
        logging.getLogger("httpx2").setLevel(logging.WARNING)

    async def send(self, request: HttpRequest) -> HttpResponse:
        pool = self._pool or await self._open_pool()
        try:
            response = await _send_to_addresses(pool, request)
        except list_http_errors() as error:
            raise convert_error(error, request.url) from error
        pieces = response.aiter_raw()
        read_piece = partial(_read_piece, pieces, request.url)
        return HttpResponse(
            response.status_code, response.reason_phrase, response.headers.raw, read_piece, response.aclose
        )

    async def aclose(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    async def _open_pool(self) -> "AsyncClient":
        # In a thread: other tasks must not wait while certificates are read from the disk.
        terms = self._terms
        tls = terms.tls or await asyncio.to_thread(make_tls_context, uses_environment=terms.uses_environment)
        if self._pool is None:
            self._pool = _make_pool(terms, tls)
        return self._pool


def connect_directly() -> HttpClient:
    """Make a client that ignores the proxies of the environment."""
    return HttpClient(HttpxTransport())


def _make_pool(terms: HttpxTerms, tls: ssl.SSLContext) -> "AsyncClient":
    from httpx2 import AsyncClient, AsyncHTTPTransport, Timeout

    read = terms.read_timeout
    timeout = Timeout(connect=terms.connect_timeout, read=read, write=read, pool=None)
    if terms.uses_environment:
        return AsyncClient(verify=tls, timeout=timeout)
    options = _make_keep_alive_options(terms.keep_alive) if terms.keep_alive else None
    transport = AsyncHTTPTransport(verify=tls, trust_env=False, socket_options=options)
    return AsyncClient(transport=transport, trust_env=False, timeout=timeout)


def _make_keep_alive_options(seconds: int) -> list[tuple[int, int, int]]:
    tcp = socket.IPPROTO_TCP
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (tcp, socket.TCP_KEEPCNT, 3)]
    return [*options, (tcp, socket.TCP_KEEPIDLE, seconds), (tcp, socket.TCP_KEEPINTVL, seconds)]


async def _send_to_addresses(pool: "AsyncClient", request: HttpRequest) -> "Response":
    """Send to the host, or try the request's addresses in order; only a failure to connect leads to the next one."""
    from httpx2 import ConnectError, ConnectTimeout

    *first_addresses, last_address = request.addresses or ("",)
    for address in first_addresses:
        try:
            return await pool.send(_build_request(pool, request, address), stream=True)
        except (ConnectError, ConnectTimeout):
            continue
    return await pool.send(_build_request(pool, request, last_address), stream=True)


def _build_request(pool: "AsyncClient", request: HttpRequest, address: str) -> "Request":
    """Build a request; one to an address has the host name for the Host header and the certificate check."""
    from httpx2 import URL, Headers

    url = URL(request.url)
    headers: Any = request.headers
    sent_headers = Headers(headers)
    sent_headers["accept-encoding"] = "identity"
    extensions: dict[str, Any] = {}
    if address:
        sent_headers["host"] = url.netloc.decode()
        extensions["sni_hostname"] = url.raw_host.decode()
        url = url.copy_with(host=address)
    if request.on_sent is not ignore_sending:
        extensions["trace"] = make_trace(request.on_sent)
    return pool.build_request(
        request.method, url, headers=sent_headers, content=request.body or None, extensions=extensions
    )


def make_trace(on_sent: Callable[[], None]) -> Callable[[str, Mapping[str, Any]], Awaitable[None]]:
    """Make the callback of the library that calls `on_sent` before the first byte of a request."""

    async def trace(event: str, details: Mapping[str, Any]) -> None:
        # The CONNECT request to a proxy is not the request itself.
        if event.endswith(_SENDING) and details["request"].method != b"CONNECT":
            on_sent()

    return trace


async def _read_piece(pieces: AsyncIterator[bytes], url: str) -> bytes:
    try:
        return await anext(pieces, b"")
    except list_http_errors() as error:
        raise convert_error(error, url) from error
