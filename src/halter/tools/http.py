"""HTTP to allowed hosts at public addresses only, pinned to the checked address.

Each redirect passes all checks again.
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Final, TypedDict, Unpack

from halter.core.errors import ConfigError
from halter.core.options import reject_unknown_options
from halter.core.tools import Failed, Unstoppable
from halter.net.addresses import AddressCheck, ResolveHost, resolve_host
from halter.net.client import HttpClient, HttpRequest, HttpResponse, WebUrl
from halter.net.failures import HttpFailure
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.tools.function_tool import CallKey, FunctionTool, tool
from halter.tools.process import bytes_to_text

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
    allowed = tuple(ip_network(network) for network in options.get("allow_addresses", ()))
    web = WebAccess(
        _patterns(hosts),
        AddressCheck(options.get("resolve", resolve_host), allowed),
        options.get("max_bytes", 2_000_000),
        options.get("timeout", 30),
        options.get("tls"),
    )

    async def http_get(url: str, headers: dict[str, str] | None = None) -> str:
        """Fetch a URL with GET. Redirects are followed."""
        return await web.ask("GET", url, headers or {})

    async def http_post(url: str, body: str, key: CallKey, headers: dict[str, str] | None = None) -> str:
        """Send a body with POST, as JSON unless a header sets the content type. Redirects are not followed."""
        request_headers = {"content-type": "application/json", "idempotency-key": key, **_lower_names(headers or {})}
        return await web.ask("POST", url, request_headers, body)

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
class WebAccess:
    """The hosts that requests may reach, and the bounds on their responses."""

    hosts: tuple[str, ...]
    addresses: AddressCheck
    max_bytes: int
    timeout: float
    tls: ssl.SSLContext | None

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: str = "") -> str:
        """Send a request. Redirects of a GET are followed; each is checked again."""
        sent_headers = _lower_names(headers)
        if reserved_names := sent_headers.keys() & _RESERVED_HEADERS:
            raise Failed("BadHeader", f"{', '.join(sorted(reserved_names))} cannot be set by a call.")
        is_read = method == "GET"
        request = HttpRequest(method, url, sent_headers, body.encode())
        terms = HttpxTerms(connect_timeout=self.timeout, read_timeout=self.timeout, tls=self.tls)
        try:
            async with (
                HttpClient(HttpxTransport(terms), self.addresses, self._require_permitted) as client,
                client.open(request, "any" if is_read else "none") as response,
            ):
                return await self._describe_response(response)
        except HttpFailure as failure:
            if failure.is_sent and not is_read and failure.kind != "BadRequest":
                raise Unstoppable(
                    f"The response of {failure.host} was lost ({failure.reason}); it is unknown whether the request "
                    "took effect."
                ) from failure
            raise Failed(failure.kind, _explain(failure)) from failure

    def _require_permitted(self, url: WebUrl) -> None:
        host = url.host.lower().rstrip(".")
        if not any(matches_host(host, pattern) for pattern in self.hosts):
            raise Failed("HostNotAllowed", f"{host} is not an allowed host. Allowed: {', '.join(self.hosts)}.")

    async def _describe_response(self, response: HttpResponse) -> str:
        data = bytearray()
        async for piece in response.pieces():
            data += piece
            if len(data) > self.max_bytes:
                break
        note = "\n[response truncated]" if len(data) > self.max_bytes else ""
        body = _decode_body(bytes(data[: self.max_bytes]), response.charset, 2 * self.max_bytes)
        header_lines = [
            f"{name}: {response.headers[name]}" for name in ("content-type", "location") if name in response.headers
        ]
        return "\n".join([f"{response.status} {response.reason}", *header_lines, "", body]) + note


def _explain(failure: HttpFailure) -> str:
    match failure.kind:
        case "ConnectError" | "ConnectTimeout":
            return f"Cannot connect to {failure.host}: {failure.reason}"
        case "BadUrl" | "BadRequest" | "UnknownHost" | "ForbiddenAddress" | "TooManyRedirects":
            return failure.reason
        case _:
            return f"{failure.host} cannot be read: {failure.reason}"


def matches_host(host: str, pattern: str) -> bool:
    return pattern in {"*", host} or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _patterns(hosts: Sequence[str]) -> tuple[str, ...]:
    for host in hosts:
        if "*" in host.removeprefix("*.") and host != "*":
            raise ConfigError(
                f"Invalid host pattern {host!r}: use a host name, *.NAME for its subdomains, or * for all."
            )
    return tuple(host.lower().rstrip(".") for host in hosts)


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _decode_body(data: bytes, charset: str | None, limit: int) -> str:
    if charset is None:
        return bytes_to_text(data, limit)
    try:
        return data.decode(charset, "replace")
    except LookupError:
        return bytes_to_text(data, limit)
