"""The HTTP client: redirects, checked addresses, deadlines and size caps, over one of two transports.

An answer is read raw, and none is requested compressed: a small compressed answer can expand to any size.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self
from urllib.parse import urlencode

import msgspec

from halter.net.addresses import AddressCheck
from halter.net.failures import HttpFailure

if TYPE_CHECKING:
    from httpx2 import URL

RawHeaders = Sequence[tuple[bytes, bytes]]
Redirects = Literal["none", "same_origin", "any"]
"""Which redirects are followed. To another origin, only the method and the URL are sent."""

MAX_REDIRECTS: Final = 5
SUCCESS: Final = range(200, 300)
TOO_MANY_REQUESTS: Final = 429
SERVER_ERROR: Final = 500
_REDIRECT_STATUSES: Final = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class WebUrl:
    """A URL of the web, parsed by the library that also requests it."""

    def __init__(self, url: "URL") -> None:
        self._url = url

    def __str__(self) -> str:
        return str(self._url)

    @property
    def host(self) -> str:
        """The name or the address, as it is sent."""
        return self._url.raw_host.decode()

    @property
    def port(self) -> int:
        return self._url.port or _DEFAULT_PORTS[self._url.scheme]

    @property
    def origin(self) -> tuple[str, str, int]:
        return self._url.scheme, self.host, self.port

    def join(self, location: str) -> "WebUrl":
        """Return the target of a redirect. Raises HttpFailure."""
        from httpx2 import InvalidURL

        try:
            target = self._url.join(location)
        except InvalidURL as error:
            reason = f"{self.host} redirects to an invalid URL: {error}"
            raise HttpFailure("BadUrl", reason, is_sent=False) from None
        return _require_web_url(target)


def parse_web_url(text: str) -> WebUrl:
    """Parse a URL. Raises HttpFailure for one that is not of the web, or contains a password."""
    from httpx2 import URL, InvalidURL

    try:
        url = URL(text)
        url.raw_host.decode()
    except (InvalidURL, UnicodeError) as error:
        raise HttpFailure("BadUrl", f"the URL is invalid: {error}", is_sent=False) from None
    return _require_web_url(url)


def _require_web_url(url: "URL") -> WebUrl:
    if url.scheme not in _DEFAULT_PORTS or not url.raw_host:
        raise HttpFailure("BadUrl", "the URL must begin with https:// or http://", is_sent=False)
    if url.userinfo:
        raise HttpFailure(
            "BadUrl", "the URL cannot contain a user name or a password, use a header instead", is_sent=False
        )
    return WebUrl(url)


def ignore_sending() -> None:
    """Do nothing when a request is sent."""


@dataclass(frozen=True)
class HttpRequest:
    """A request. It goes to one of the `addresses` if there are any, otherwise to those of its host.

    `on_sent` is called before the first byte is sent.
    """

    method: str
    url: str
    headers: Mapping[str, str] | RawHeaders = field(default_factory=dict[str, str])
    body: bytes = b""
    addresses: Sequence[str] = ()
    on_sent: Callable[[], None] = ignore_sending


def encode_headers(headers: Mapping[str, str]) -> RawHeaders:
    """Encode headers as UTF-8, in which their values may be any text."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def make_json_request(method: str, url: str, value: Any, headers: Mapping[str, str] | None = None) -> HttpRequest:
    return HttpRequest(method, url, {**(headers or {}), "content-type": "application/json"}, msgspec.json.encode(value))


def make_form_request(url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> HttpRequest:
    form_headers = {**headers, "content-type": "application/x-www-form-urlencoded"}
    return HttpRequest("POST", url, form_headers, urlencode(form).encode())


class HttpResponse:
    """An answer whose body is read piece by piece, as it was sent. `read_piece` returns b"" at its end.

    Reading raises HttpFailure.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        raw_headers: RawHeaders,
        read_piece: Callable[[], Awaitable[bytes]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self.status = status
        self.reason = reason
        self.raw_headers = raw_headers
        self.read_piece = read_piece
        self.aclose = close

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """The headers by their names in lower case."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in self.raw_headers:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return headers

    @property
    def is_success(self) -> bool:
        return self.status in SUCCESS

    @property
    def is_plain(self) -> bool:
        """True unless the body is compressed."""
        return self.headers.get("content-encoding", "identity").strip().lower() in {"", "identity"}

    @property
    def charset(self) -> str | None:
        from email.message import Message

        message = Message()
        message["content-type"] = self.headers.get("content-type", "")
        return message.get_content_charset(failobj=None)

    async def pieces(self) -> AsyncGenerator[bytes]:
        while piece := await self.read_piece():
            yield piece

    async def lines(self, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the lines of the body. Raises HttpFailure for one that is too long."""
        line = bytearray()
        async for piece in self.pieces():
            *complete, rest = piece.split(b"\n")
            for end in complete:
                yield bytes(line + end)
                line.clear()
            line += rest
            if len(line) > max_bytes:
                raise HttpFailure("TooLarge", f"it sent a line of more than {max_bytes:,} bytes")
        if line:
            yield bytes(line)

    async def read(self, max_bytes: int) -> bytes:
        """Read the whole body. Raises HttpFailure if it is compressed or too large."""
        if not self.is_plain:
            raise HttpFailure("Encoded", "it sent a compressed answer, although the request accepts none")
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > max_bytes:
                raise HttpFailure("TooLarge", f"it answered with more than {max_bytes:,} bytes")
        return bytes(body)


@dataclass(frozen=True)
class HttpAnswer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return self.status in SUCCESS


def parse_retry_after(headers: Mapping[str, str]) -> int | None:
    """Return the wait that a server requests, if it is a number of seconds."""
    value = headers.get("retry-after", "").strip()
    is_short_number = value.isascii() and value.isdigit() and len(value) < len("1000000")
    return int(value) if is_short_number else None


class HttpTransport(Protocol):
    """Sends one request over one library, and converts its errors to HttpFailure."""

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Return when the answer's headers have arrived. The caller closes the answer."""
        ...

    async def aclose(self) -> None: ...


class HttpClient:
    """Sends requests, and follows redirects as it is told.

    With `addresses`, each host is resolved here and only its checked addresses are reached. `require_permitted` is
    called with the URL of a request and with that of each redirect, and raises what the caller is to get.
    """

    def __init__(
        self,
        transport: HttpTransport,
        addresses: AddressCheck | None = None,
        require_permitted: Callable[[WebUrl], None] | None = None,
    ) -> None:
        self._transport = transport
        self._addresses = addresses
        self._require_permitted = require_permitted

    async def send(self, request: HttpRequest, redirects: Redirects = "none") -> HttpResponse:
        """Send a request; return when the answer's headers have arrived. The caller closes the answer."""
        if redirects == "none":
            return await self._send_once(request)
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._send_once(request)
            location = response.headers.get("location")
            if response.status not in _REDIRECT_STATUSES or location is None:
                return response
            await response.aclose()
            request = _redirect(request, location, redirects)
        host = parse_web_url(request.url).host
        raise HttpFailure("TooManyRedirects", f"{host} redirects more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def open(self, request: HttpRequest, redirects: Redirects = "none") -> AsyncGenerator[HttpResponse]:
        response = await self.send(request, redirects)
        try:
            yield response
        finally:
            await response.aclose()

    async def fetch(self, request: HttpRequest, *, max_bytes: int, max_wait: float) -> HttpAnswer:
        """Send a request and read its whole answer, within `max_wait` seconds."""
        try:
            async with asyncio.timeout(max_wait), self.open(request) as response:
                return HttpAnswer(response.status, response.headers, await response.read(max_bytes))
        except TimeoutError:
            raise HttpFailure("Timeout", f"no complete answer within {max_wait:g} s") from None

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _send_once(self, request: HttpRequest) -> HttpResponse:
        if self._require_permitted is None and self._addresses is None:
            return await self._transport.send(request)
        url = parse_web_url(request.url)
        if self._require_permitted is not None:
            self._require_permitted(url)
        if self._addresses is not None:
            request = replace(request, addresses=await self._addresses.list_addresses(url.host, url.port))
        return await self._transport.send(request)


def _redirect(request: HttpRequest, location: str, redirects: Redirects) -> HttpRequest:
    url = parse_web_url(request.url)
    target = url.join(location)
    if target.origin == url.origin:
        return replace(request, url=str(target))
    if redirects == "same_origin":
        raise HttpFailure("Redirected", f"{url.host} redirects to {target.host}")
    return HttpRequest(request.method, str(target), on_sent=request.on_sent)
