"""Clients of the HTTP library that are handed to foreign SDKs, which bring their own requests.

What is promised for an answer holds for them too: its size is bounded while it is decompressed, and it is known whether
anything was sent.
"""

import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from halter.core.errors import HalterError
from halter.core.usage import is_local_address
from halter.net.httpx_transport import make_trace
from halter.net.tls import make_tls_context

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport, AsyncClient, BaseTransport, Client, Request, Response

    SdkPool = AsyncClient

_MAX_IDLE_CONNECTIONS: Final = 20


class UnreadableAnswer(HalterError):
    """An answer must not be read further."""


class SdkRequest(Protocol):
    """A request of an SDK, before it is sent."""

    @property
    def method(self) -> str: ...
    @property
    def url(self) -> object: ...
    @property
    def headers(self) -> MutableMapping[str, str]: ...
    @property
    def content(self) -> bytes: ...


class SdkResponse(Protocol):
    """An answer to an SDK, whose body is not read yet."""

    @property
    def is_redirect(self) -> bool: ...
    async def aclose(self) -> None: ...


class AnswerReader(Protocol):
    """Sees the decompressed pieces of one answer before the SDK does. May raise UnreadableAnswer."""

    def read(self, piece: bytes) -> None: ...
    def end(self) -> None: ...


class SdkObserver(Protocol):
    """Sees each request of an SDK and its answer."""

    def on_request(self, request: SdkRequest) -> Callable[[], None]:
        """Complete a request; return what to call before its first byte is sent."""
        ...

    def on_response(self, response: SdkResponse) -> AnswerReader: ...


def open_sdk_pool(url: str, observer: SdkObserver, *, connect_timeout: float, max_bytes: int) -> "AsyncClient":
    """Open the connections of an SDK to one server: no deadline but one to connect.

    The proxies and certificates of the environment are used, except for an address on this machine.
    """
    import httpx2

    async def on_request(request: httpx2.Request) -> None:
        trace = make_trace(observer.on_request(request))
        timeouts = {**request.extensions.get("timeout", {}), "connect": connect_timeout}
        request.extensions = {**request.extensions, "timeout": timeouts, "trace": trace}

    async def on_response(response: httpx2.Response) -> None:
        reader = observer.on_response(response)
        decoder = response._get_content_decoder()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        response._decoder = _BoundedDecoder(decoder, max_bytes, reader)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    uses_environment = not is_local_address(url)
    return httpx2.AsyncClient(
        verify=make_tls_context(uses_environment=uses_environment),
        timeout=None,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=_MAX_IDLE_CONNECTIONS),
        trust_env=uses_environment,
        event_hooks={"request": [on_request], "response": [on_response]},
    )


class _BoundedDecoder:
    """Decompresses an answer up to a limit: a small one can expand to any size."""

    def __init__(self, decoder: Any, max_bytes: int, reader: AnswerReader) -> None:
        self._decoder = decoder
        self._remaining_bytes = max_bytes
        self._reader = reader

    def decode(self, data: bytes) -> Iterator[bytes]:
        for piece in self._decoder.decode(data):
            self._read(piece)
            yield piece

    def flush(self) -> Iterator[bytes]:
        for piece in self._decoder.flush():
            self._read(piece)
            yield piece
        _translate(self._reader.end)

    def _read(self, piece: bytes) -> None:
        import httpx2

        self._remaining_bytes -= len(piece)
        if self._remaining_bytes < 0:
            raise httpx2.DecodingError("The answer is too long.")
        _translate(self._reader.read, piece)


def _translate(read: Callable[..., None], *arguments: bytes) -> None:
    """Raise the library's error for an answer that must not be read further, since SDKs expect it."""
    import httpx2

    try:
        read(*arguments)
    except UnreadableAnswer as error:
        raise httpx2.DecodingError(str(error)) from None


SendSdkRequest = Callable[["Request"], Awaitable["Response"]]
HandleSdkRequest = Callable[["Request", SendSdkRequest], Awaitable["Response"]]


def open_handled_client(
    headers: Mapping[str, str],
    handle: HandleSdkRequest,
    *,
    connect_timeout: float,
    read_timeout: float,
    tls: ssl.SSLContext | None,
) -> "AsyncClient":
    """Open a client whose requests pass through `handle`. It uses nothing of the environment."""
    import httpx2

    inner = httpx2.AsyncHTTPTransport(verify=tls or make_tls_context(uses_environment=False), trust_env=False)

    class Handled(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            return await handle(request, inner.handle_async_request)

        async def aclose(self) -> None:
            await inner.aclose()

    # None is requested compressed: a small compressed answer can expand to any size.
    return httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(connect_timeout, read=read_timeout),
        transport=Handled(),
        trust_env=False,
    )


def make_sdk_response(status: int, headers: Mapping[str, str], content: bytes) -> "Response":
    from httpx2 import Response

    return Response(status, headers=headers, content=content)


def wrap_transport(transport: "AsyncBaseTransport", timeout: Any) -> "AsyncClient":
    from httpx2 import AsyncClient

    return AsyncClient(transport=transport, timeout=timeout)


def wrap_blocking_transport(transport: "BaseTransport", timeout: Any) -> "Client":
    from httpx2 import Client

    return Client(transport=transport, timeout=timeout)


def open_plain_client(timeout: Any) -> "AsyncClient":
    """Open a client that does as the SDKs' own ones do: it follows redirects and uses the environment's proxies."""
    from httpx2 import AsyncClient

    return AsyncClient(timeout=timeout, follow_redirects=True)
