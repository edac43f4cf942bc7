"""The web, without a way back inside: named hosts only, public addresses only, and the address that was checked.

A name is resolved once, every address it has is checked, and the connection goes to the checked address, so that a name
which changes its mind in between gains nothing. Each redirect starts from the beginning.
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from halter.core.errors import ConfigError
from halter.core.options import demand_known
from halter.core.tools import Failed, Unstoppable
from halter.tools.addresses import Network, Resolve, checked, resolve
from halter.tools.arguments import CallKey
from halter.tools.result import bytes_to_text
from halter.tools.tool import FunctionTool, tool

if TYPE_CHECKING:
    from httpx2 import URL, AsyncClient, Request, Response

_MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OURS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "accept-encoding"}
)


class HttpOptions(TypedDict, total=False):
    """`allow_addresses` are networks that may be reached though they are not public, as in `127.0.0.1/32`."""

    allow_addresses: Sequence[str]
    max_bytes: int
    timeout: float
    resolve: Resolve
    tls: ssl.SSLContext


def http(hosts: Sequence[str], **options: Unpack[HttpOptions]) -> tuple[FunctionTool, ...]:
    """Return tools that get from and post to the named hosts; `*.example.com` stands for all hosts below it."""
    demand_known(options, HttpOptions.__optional_keys__, "the http tools")
    if not hosts:
        raise ConfigError("The http tools have no hosts: name those that may be asked, as in hosts: [api.example.com].")
    web = Web(
        _patterns(hosts),
        tuple(ip_network(each) for each in options.get("allow_addresses", ())),
        options.get("max_bytes", 2_000_000),
        options.get("timeout", 30),
        options.get("resolve", resolve),
        options.get("tls"),
    )

    async def http_get(url: str, headers: dict[str, str] | None = None) -> str:
        """Get a page or a resource. Redirects are followed."""
        return await web.ask(Asked("GET", url, headers or {}))

    async def http_post(url: str, body: str, key: CallKey, headers: dict[str, str] | None = None) -> str:
        """Post a body. Give its content-type in the headers; it is JSON otherwise. Redirects are told, not followed."""
        given = {"content-type": "application/json", "idempotency-key": key, **_lowered(headers or {})}
        return await web.ask(Asked("POST", url, given, body.encode()))

    timeout = 2 * web.timeout
    return (
        tool(http_get, level="MONITORED", effect="read", idempotent=True, egress=True, timeout=timeout),
        tool(http_post, level="CONTROLLED", effect="write", egress=True, timeout=timeout),
    )


@dataclass(frozen=True)
class Asked:
    """One request, before anybody has looked at where it goes."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Web:
    """Where requests may go, and how much may come back."""

    hosts: tuple[str, ...]
    allowed: tuple[Network, ...]
    max_bytes: int
    timeout: float
    resolve: Resolve
    tls: ssl.SSLContext | None

    async def ask(self, asked: Asked) -> str:
        """Send a request and follow where it leads, with a fresh look at each place."""
        from httpx2 import AsyncClient

        async with AsyncClient(verify=self._tls, trust_env=False, timeout=self.timeout) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                answer = await self._ask_once(client, asked)
                if isinstance(answer, str):
                    return answer
                asked = answer
        raise Failed("TooManyRedirects", f"more than {_MAX_REDIRECTS} redirects, the last one to {asked.url}.")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        from httpx2 import create_ssl_context

        return self.tls or create_ssl_context(trust_env=False)

    async def _ask_once(self, client: "AsyncClient", asked: Asked) -> "str | Asked":
        from httpx2 import LocalProtocolError, TransportError

        url = self._permitted(asked.url)
        host = url.raw_host.decode()
        addresses = checked(host, await self.resolve(host, _port(url)), self.allowed)
        try:
            return await self._answered(client, asked, url, addresses)
        except LocalProtocolError as error:
            raise Failed("BadRequest", f"the request cannot be written: {error}") from error
        except TransportError as error:
            if asked.method == "GET":
                raise
            raise Unstoppable(f"{host} may or may not have done it: its answer was lost ({error!r}).") from error

    async def _answered(
        self, client: "AsyncClient", asked: Asked, url: "URL", addresses: Sequence[str]
    ) -> "str | Asked":
        response = await _sent(client, asked, url, addresses)
        try:
            if asked.method == "GET" and response.status_code in _REDIRECTS and "location" in response.headers:
                return _redirected(asked, url, response.headers["location"])
            return await self._told(response)
        finally:
            await response.aclose()

    def _permitted(self, text: str) -> "URL":
        from httpx2 import URL, InvalidURL

        try:
            url = URL(text)
            host = url.raw_host.decode().lower().rstrip(".")
        except (InvalidURL, UnicodeError) as error:
            raise Failed("BadUrl", f"{text[:100]} cannot be read: {error}") from error
        if url.scheme not in {"http", "https"} or not host:
            raise Failed("BadUrl", f"{text[:100]} is no address of the web: it must begin with https:// or http://.")
        if url.userinfo:
            raise Failed("BadUrl", "a URL cannot hold a name or a password: use a header.")
        if not any(is_below(host, pattern) for pattern in self.hosts):
            raise Failed("HostNotAllowed", f"{host} is not among the hosts that may be asked: {', '.join(self.hosts)}.")
        return url

    async def _told(self, response: "Response") -> str:
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self.max_bytes:
                break
        cut = "\n[the answer is longer; the rest was not read]" if len(data) > self.max_bytes else ""
        body = _decoded(bytes(data[: self.max_bytes]), response.charset_encoding, 2 * self.max_bytes)
        told = [
            f"{name}: {response.headers[name]}" for name in ("content-type", "location") if name in response.headers
        ]
        return "\n".join([f"{response.status_code} {response.reason_phrase}", *told, "", body]) + cut


async def _sent(client: "AsyncClient", asked: Asked, url: "URL", addresses: Sequence[str]) -> "Response":
    """Try the addresses in turn; only a connection that was never made leads on to the next."""
    from httpx2 import ConnectError, ConnectTimeout

    reason = ""
    for address in addresses:
        try:
            return await client.send(_pinned(client, asked, url, address), stream=True)
        except (ConnectError, ConnectTimeout) as error:
            reason = str(error)
    raise Failed("ConnectError", f"{url.host} cannot be reached: {reason}")


def is_below(host: str, pattern: str) -> bool:
    """Tell whether a host is the one that a pattern names, or one of all those below it."""
    return pattern in {"*", host} or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _patterns(hosts: Sequence[str]) -> tuple[str, ...]:
    for host in hosts:
        if "*" in host.removeprefix("*.") and host != "*":
            raise ConfigError(f"{host!r} is no pattern of hosts: write a name, *.name for all below it, or * for all.")
    return tuple(host.lower().rstrip(".") for host in hosts)


def _pinned(client: "AsyncClient", asked: Asked, url: "URL", address: str) -> "Request":
    """Address a request to one address, with the name that the other side and its certificate know."""
    headers = _lowered(asked.headers)
    ours = headers.keys() & _OURS
    if ours:
        raise Failed("BadHeader", f"{', '.join(sorted(ours))} cannot be set: the request itself decides it.")
    return client.build_request(
        asked.method,
        url.copy_with(host=address),
        headers={**headers, "host": url.netloc.decode(), "accept-encoding": "identity"},
        content=asked.body or None,
        extensions={"sni_hostname": url.raw_host.decode()},
    )


def _redirected(asked: Asked, url: "URL", location: str) -> Asked:
    """Say what to ask next. Headers that were meant for one place are not carried to another."""
    from httpx2 import InvalidURL

    try:
        target = url.join(location)
    except InvalidURL as error:
        raise Failed("BadUrl", f"{url.host} redirects to what cannot be read: {error}") from error
    same = (target.scheme, target.raw_host, _port(target)) == (url.scheme, url.raw_host, _port(url))
    return replace(asked, url=str(target)) if same else Asked("GET", str(target), {})


def _port(url: "URL") -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _lowered(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _decoded(data: bytes, charset: str | None, limit: int) -> str:
    if charset is None:
        return bytes_to_text(data, limit)
    try:
        return data.decode(charset, "replace")
    except LookupError:
        return bytes_to_text(data, limit)
