"""One request to a fixed address: nothing of the environment, no other place, and nothing packed that could unfold.

What goes wrong is a sentence that names the host and no more: an address may hold a key, and so may a header.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from halter.core.clock import SECOND
from halter.core.errors import HalterError

if TYPE_CHECKING:
    from httpx2 import URL, AsyncClient, Response

MOST_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OK: Final = range(200, 300)
NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})


class NoAnswer(HalterError):
    """An address gave nothing that can be read: what kind of trouble it is, and a sentence."""

    def __init__(self, kind: str, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.retry_after = retry_after


class Target:
    """An address. `timeout` is for all that goes before the body of an answer."""

    def __init__(self, url: str, timeout: int, tls: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._timeout = timeout
        self._tls = tls

    @asynccontextmanager
    async def opened(
        self, headers: Mapping[str, str], ours: Mapping[str, bytes] = NOTHING
    ) -> AsyncGenerator["Response"]:
        """Get it, and hand over the answer with its body still to be read. Raises NoAnswer, also for that body.

        The headers reach this address alone. Where both name one, ours is sent.
        """
        from httpx2 import AsyncClient, AsyncHTTPTransport, InvalidURL, LocalProtocolError, StreamError, TransportError

        host = "the address"
        try:
            url = parsed_url(self._url)
            host = url.host
            self._tls = self._tls or await asyncio.to_thread(_trusted)
            transport = AsyncHTTPTransport(verify=self._tls, trust_env=False, socket_options=_keep_alive(self._timeout))
            async with AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
                response = await self._answered(client, url, _headers(headers, ours))
                try:
                    yield response
                finally:
                    await response.aclose()
        except LocalProtocolError:
            # The library quotes the header that it refuses, and that may hold a key.
            raise NoAnswer("BadRequest", f"The request to {host} cannot be written: look at its headers.") from None
        except InvalidURL as error:
            raise NoAnswer("BadUrl", f"The address cannot be read: {error}.") from None
        except (TransportError, StreamError) as error:
            raise NoAnswer(type(error).__name__, f"{host} cannot be read: {_told(error)}.") from error

    async def _answered(self, client: "AsyncClient", url: "URL", headers: list[tuple[bytes, bytes]]) -> "Response":
        try:
            async with asyncio.timeout(self._timeout / SECOND):
                return await _followed(client, url, headers)
        except TimeoutError:
            waited = f"{self._timeout / SECOND:g} s"
            raise NoAnswer("Timeout", f"{url.host} gave no answer within {waited}.") from None


def parsed_url(text: str) -> "URL":
    """Read an address of the web, which must hold no password."""
    from httpx2 import URL

    url = URL(text)
    if url.scheme not in {"http", "https"} or not url.host:
        raise NoAnswer("BadUrl", "The address is none of the web: it must begin with https:// or http://.")
    if url.userinfo:
        raise NoAnswer("BadUrl", f"The address of {url.host} holds a name or a password: use a header.")
    return url


async def _followed(client: "AsyncClient", url: "URL", headers: list[tuple[bytes, bytes]]) -> "Response":
    """Follow redirects that stay with the same host, so that no header reaches another."""
    home = url
    for _ in range(MOST_REDIRECTS + 1):
        response = await client.send(client.build_request("GET", url, headers=headers), stream=True)
        if response.status_code not in _REDIRECTS or "location" not in response.headers:
            return await _usable(response, home.host)
        await response.aclose()
        url = url.join(response.headers["location"])
        if _origin(url) != _origin(home):
            raise NoAnswer("Redirected", f"{home.host} sends on to {url.host}: if that is right, write its address.")
    raise NoAnswer("Redirected", f"{home.host} sends on more than {MOST_REDIRECTS} times.")


async def _usable(response: "Response", host: str) -> "Response":
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if response.status_code in _OK and encoding in {"", "identity"}:
        return response
    await response.aclose()
    if response.status_code in _OK:
        raise NoAnswer("Encoded", f"{host} sends its answer packed, though it was asked not to.")
    said = f"{response.status_code} {response.reason_phrase}".strip()
    raise NoAnswer("HttpError", f"{host} answered {said}.", _retry_after(response))


def _retry_after(response: "Response") -> int | None:
    asked = response.headers.get("retry-after", "").strip()
    return int(asked) * SECOND if asked.isascii() and asked.isdigit() and len(asked) < len("1000000") else None


def _headers(given: Mapping[str, str], more: Mapping[str, bytes]) -> list[tuple[bytes, bytes]]:
    ours = {b"accept-encoding": b"identity", **{name.encode(): value for name, value in more.items()}}
    theirs = ((name.lower().encode(), value.encode()) for name, value in given.items())
    return [*((name, value) for name, value in theirs if name not in ours), *ours.items()]


def _origin(url: "URL") -> tuple[str, bytes, int]:
    return url.scheme, url.raw_host, url.port or (443 if url.scheme == "https" else 80)


def _keep_alive(timeout: int) -> list[tuple[int, int, int]]:
    """Have the system notice a host that went away without a word, on a stream that may be quiet for hours."""
    seconds = max(1, min(timeout // SECOND, 3600))
    tcp = socket.IPPROTO_TCP
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (tcp, socket.TCP_KEEPCNT, 3)]
    return [*options, (tcp, socket.TCP_KEEPIDLE, seconds), (tcp, socket.TCP_KEEPINTVL, seconds)]


def _trusted() -> ssl.SSLContext:
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=False)


def _told(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
