"""HTTP to allowed hosts at public addresses only, pinned to the checked address.

A name is resolved once, all of its addresses are checked, and the connection goes to a checked address, so DNS
rebinding has no effect. Each redirect passes all checks again.
"""

import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from halter.core.errors import ConfigError
from halter.core.text import reject_unknown_options
from halter.core.tools import Failed, Unstoppable
from halter.tools.function_tool import CallKey, FunctionTool, tool
from halter.tools.process import ThreadPerTaskExecutor, bytes_to_text

if TYPE_CHECKING:
    from httpx2 import URL, AsyncClient, Request, Response

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

ResolveHost = Callable[[str, int], Awaitable[Sequence[str]]]

_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# Tunnels and special-purpose networks in the global ranges: they can lead to addresses that are not public. The last
# line is what a cloud answers only to its own machines: Azure's wire server, and the services of IBM Cloud.
_SPECIAL_NETWORKS: Final = tuple(
    map(
        ip_network,
        (
            *("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"),
            *("168.63.129.16/32", "161.26.0.0/16", "166.8.0.0/14"),
        ),
    )
)


def is_public(address: IpAddress) -> bool:
    """Return true if an address belongs to the public internet."""
    inner_address = _unwrap_address(address)
    if isinstance(inner_address, IPv6Address) and inner_address not in _GLOBAL_V6:
        return False
    return inner_address.is_global and not inner_address.is_multicast and not _is_in(inner_address, _SPECIAL_NETWORKS)


def check_addresses(host: str, addresses: Sequence[str], allowed: Sequence[IpNetwork]) -> Sequence[str]:
    """Return the addresses of a host if all of them are allowed; raise Failed otherwise."""
    if not addresses:
        raise Failed("UnknownHost", f"{host} has no address.")
    for address in addresses:
        parsed_address = ip_address(address.partition("%")[0])
        if not is_public(parsed_address) and not _is_in(_unwrap_address(parsed_address), allowed):
            raise Failed("ForbiddenAddress", f"{host} resolves to {address}, which is not a public address.")
    return addresses


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve with the system's resolver, which also reads decimal, octal and hexadecimal addresses."""
    import asyncio

    lookup = asyncio.get_running_loop().run_in_executor(ThreadPerTaskExecutor(), _resolve_addresses, host, port)
    try:
        return await lookup
    except (OSError, UnicodeError) as error:
        raise Failed("UnknownHost", f"Cannot resolve {host}: {error}") from error


def _resolve_addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(socket_address[0]) for *_, socket_address in infos))


def _unwrap_address(address: IpAddress) -> IpAddress:
    """Extract the IPv4 address that an IPv6 address carries."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def _is_in(address: IpAddress, networks: Sequence[IpNetwork]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


_MAX_REDIRECTS: Final = 5
_REDIRECT_STATUSES: Final = frozenset({301, 302, 303, 307, 308})
_RESERVED_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "accept-encoding"}
)


class HttpOptions(TypedDict, total=False):
    """Options of the HTTP tools. `allow_addresses` are non-public networks to allow, such as `127.0.0.1/32`."""

    allow_addresses: Sequence[str]
    max_bytes: int
    timeout: float
    resolve: ResolveHost
    tls: ssl.SSLContext


def make_http_tools(hosts: Sequence[str], **options: Unpack[HttpOptions]) -> tuple[FunctionTool, ...]:
    """Make tools that send GET and POST requests to the given hosts; `*.example.com` matches all its subdomains."""
    reject_unknown_options(options, HttpOptions.__optional_keys__, "the http tools")
    if not hosts:
        raise ConfigError("The http tools have no hosts. List the allowed hosts, as in hosts: [api.example.com].")
    web = WebAccess(
        _patterns(hosts),
        tuple(ip_network(network) for network in options.get("allow_addresses", ())),
        options.get("max_bytes", 2_000_000),
        options.get("timeout", 30),
        options.get("resolve", resolve_host),
        options.get("tls"),
    )

    async def http_get(url: str, headers: dict[str, str] | None = None) -> str:
        """Fetch a URL with GET. Redirects are followed."""
        return await web.ask(OutgoingRequest("GET", url, headers or {}))

    async def http_post(url: str, body: str, key: CallKey, headers: dict[str, str] | None = None) -> str:
        """Send a body with POST, as JSON unless a header sets the content type. Redirects are not followed."""
        request_headers = {"content-type": "application/json", "idempotency-key": key, **_lower_names(headers or {})}
        return await web.ask(OutgoingRequest("POST", url, request_headers, body.encode()))

    timeout = 2 * web.timeout
    return (
        tool(
            http_get,
            level="MONITORED",
            effect="read",
            idempotent=True,
            egress=True,
            timeout=timeout,
            reads="anyone",
            reach="none",
            arguments={"url": "destination:url", "headers": "content"},
        ),
        tool(
            http_post,
            level="CONTROLLED",
            effect="write",
            egress=True,
            timeout=timeout,
            reads="anyone",
            reach="others",
            arguments={"url": "destination:url", "body": "content", "headers": "content"},
        ),
    )


@dataclass(frozen=True)
class OutgoingRequest:
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class WebAccess:
    """The hosts that requests may reach, and the bounds on their responses."""

    hosts: tuple[str, ...]
    allowed: tuple[IpNetwork, ...]
    max_bytes: int
    timeout: float
    resolve: ResolveHost
    tls: ssl.SSLContext | None

    async def ask(self, request: OutgoingRequest) -> str:
        """Send a request and follow redirects; each redirect is checked again."""
        from httpx2 import AsyncClient

        async with AsyncClient(verify=self._tls, trust_env=False, timeout=self.timeout) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                result = await self._ask_once(client, request)
                if isinstance(result, str):
                    return result
                request = result
        raise Failed("TooManyRedirects", f"more than {_MAX_REDIRECTS} redirects, the last one to {request.url}.")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self.tls or make_tls_context()

    async def _ask_once(self, client: "AsyncClient", request: OutgoingRequest) -> "str | OutgoingRequest":
        from httpx2 import LocalProtocolError, TransportError

        url = self._require_permitted(request.url)
        host = url.raw_host.decode()
        addresses = check_addresses(host, await self.resolve(host, _port(url)), self.allowed)
        try:
            return await self._send(client, request, url, addresses)
        except LocalProtocolError as error:
            raise Failed("BadRequest", f"invalid request: {error}") from error
        except TransportError as error:
            if request.method == "GET":
                raise
            raise Unstoppable(
                f"The response of {host} was lost ({error!r}); it is unknown whether the request took effect."
            ) from error

    async def _send(
        self, client: "AsyncClient", request: OutgoingRequest, url: "URL", addresses: Sequence[str]
    ) -> "str | OutgoingRequest":
        response = await _send_request(client, request, url, addresses)
        try:
            if (
                request.method == "GET"
                and response.status_code in _REDIRECT_STATUSES
                and "location" in response.headers
            ):
                location = response.headers["location"]
                from httpx2 import InvalidURL

                try:
                    target = url.join(location)
                except InvalidURL as error:
                    raise Failed("BadUrl", f"{url.host} redirects to an invalid URL: {error}") from error
                is_same_origin = (target.scheme, target.raw_host, _port(target)) == (
                    url.scheme,
                    url.raw_host,
                    _port(url),
                )
                return replace(request, url=str(target)) if is_same_origin else OutgoingRequest("GET", str(target), {})
            return await self._describe_response(response)
        finally:
            await response.aclose()

    def _require_permitted(self, text: str) -> "URL":
        from httpx2 import URL, InvalidURL

        try:
            url = URL(text)
            host = url.raw_host.decode().lower().rstrip(".")
        except (InvalidURL, UnicodeError) as error:
            raise Failed("BadUrl", f"Invalid URL {text[:100]}: {error}") from error
        if url.scheme not in {"http", "https"} or not host:
            raise Failed("BadUrl", f"Invalid URL {text[:100]}: it must begin with https:// or http://.")
        if url.userinfo:
            raise Failed("BadUrl", "a URL cannot contain a user name or password. Use a header.")
        if not any(matches_host(host, pattern) for pattern in self.hosts):
            raise Failed("HostNotAllowed", f"{host} is not an allowed host. Allowed: {', '.join(self.hosts)}.")
        return url

    async def _describe_response(self, response: "Response") -> str:
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self.max_bytes:
                break
        note = "\n[response truncated]" if len(data) > self.max_bytes else ""
        body = _decode_body(bytes(data[: self.max_bytes]), response.charset_encoding, 2 * self.max_bytes)
        header_lines = [
            f"{name}: {response.headers[name]}" for name in ("content-type", "location") if name in response.headers
        ]
        return "\n".join([f"{response.status_code} {response.reason_phrase}", *header_lines, "", body]) + note


async def _send_request(
    client: "AsyncClient", request: OutgoingRequest, url: "URL", addresses: Sequence[str]
) -> "Response":
    """Try the addresses in order; only a failure to connect leads to the next one."""
    from httpx2 import ConnectError, ConnectTimeout

    reason = ""
    for address in addresses:
        try:
            return await client.send(_pin_address(client, request, url, address), stream=True)
        except (ConnectError, ConnectTimeout) as error:
            reason = str(error)
    raise Failed("ConnectError", f"Cannot connect to {url.host}: {reason}")


@cache
def make_tls_context() -> ssl.SSLContext:
    """Load the machine's certificates once per process."""
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=False)


def matches_host(host: str, pattern: str) -> bool:
    return pattern in {"*", host} or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _patterns(hosts: Sequence[str]) -> tuple[str, ...]:
    for host in hosts:
        if "*" in host.removeprefix("*.") and host != "*":
            raise ConfigError(
                f"Invalid host pattern {host!r}: use a host name, *.NAME for its subdomains, or * for all."
            )
    return tuple(host.lower().rstrip(".") for host in hosts)


def _pin_address(client: "AsyncClient", request: OutgoingRequest, url: "URL", address: str) -> "Request":
    """Build a request to one address, with the host name for the Host header and the certificate check."""
    headers = _lower_names(request.headers)
    reserved_names = headers.keys() & _RESERVED_HEADERS
    if reserved_names:
        raise Failed("BadHeader", f"{', '.join(sorted(reserved_names))} cannot be set by a call.")
    return client.build_request(
        request.method,
        url.copy_with(host=address),
        headers={**headers, "host": url.netloc.decode(), "accept-encoding": "identity"},
        content=request.body or None,
        extensions={"sni_hostname": url.raw_host.decode()},
    )


def _port(url: "URL") -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _decode_body(data: bytes, charset: str | None, limit: int) -> str:
    if charset is None:
        return bytes_to_text(data, limit)
    try:
        return data.decode(charset, "replace")
    except LookupError:
        return bytes_to_text(data, limit)
