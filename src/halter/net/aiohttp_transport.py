"""The transport over aiohttp, for the proxy: it takes less CPU time than the other one, and needs an extra."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from halter.net.client import HttpRequest, HttpResponse, RawHeaders
from halter.net.failures import convert_error
from halter.net.proxies import find_proxy

if TYPE_CHECKING:
    from aiohttp import ClientSession

MAX_HEADER_BYTES: Final = 64 * 1024
_ADDED_BY_LIBRARY: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_LARGE_BODY: Final = 1024 * 1024
"""The library accepts a larger body only as a file."""


class AiohttpTransport:
    """A pool of connections to one server, in the running event loop: no retries, no deadline but one to connect.

    No header is added, and an address is sent exactly as it is given.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        self._pool = _open_pool(url, connect_timeout)

    async def send(self, request: HttpRequest) -> HttpResponse:
        from aiohttp import ClientError
        from yarl import URL

        body = request.body
        try:
            response = await self._pool.request(
                request.method,
                URL(request.url, encoded=True),
                headers=[(name.decode("ascii"), _decode_value(value)) for name, value in _list_headers(request)],
                data=body if len(body) <= _LARGE_BODY else io.BytesIO(body),
                allow_redirects=False,
                trace_request_ctx=request,
            )
        except (ClientError, OSError, ValueError) as error:
            raise convert_error(error, request.url) from None
        content = response.content

        async def read_piece() -> bytes:
            try:
                return await content.readany()
            except (ClientError, OSError) as error:
                raise convert_error(error, request.url) from None

        async def close() -> None:
            response.close()

        return HttpResponse(response.status, response.reason or "", response.raw_headers, read_piece, close)

    async def aclose(self) -> None:
        await self._pool.close()


def _open_pool(url: str, connect_timeout: float) -> "ClientSession":
    import aiohttp

    async def on_connection(_session: object, context: Any, _params: object) -> None:
        request: HttpRequest = context.trace_request_ctx
        request.on_sent()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(on_connection)
    trace.on_connection_reuseconn.append(on_connection)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        skip_auto_headers=_ADDED_BY_LIBRARY,
        cookie_jar=aiohttp.DummyCookieJar(),
        proxy=find_proxy(url),
        trace_configs=[trace],
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


def _list_headers(request: HttpRequest) -> RawHeaders:
    headers = request.headers
    if isinstance(headers, Mapping):
        return [(name.encode("ascii"), value.encode()) for name, value in headers.items()]
    return headers


def _decode_value(value: bytes) -> str:
    """Decode the value of a header to text that is sent as the same bytes; a value that is not UTF-8 is Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
