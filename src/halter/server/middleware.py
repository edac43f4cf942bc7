"""The middleware around the whole server: authorization, rate limits, body limits and response headers.

Wrong tokens are limited by origin: above the limit per minute, requests from an origin are not checked, unless their
token was valid from there before. A user behind the same proxy as an attacker is not locked out, and the attacker
learns nothing.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Final

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.text import clean
from halter.loop.concurrency import cancel_and_wait
from halter.server.auth import (
    API,
    LOGIN,
    METRICS,
    VERSIONED_API,
    Allowed,
    AuthRejected,
    IdentifyByProxy,
    IncomingRequest,
    Keyring,
    Logins,
    ServerNames,
    authorize_request,
    is_free,
    read_authorization,
    read_login_cookie,
)
from halter.state.trace_context import serve_caller

MAX_BUCKETS: Final = 10_000
"""Maximum number of buckets; full ones are dropped first, since a new one is full as well."""


class ServerLimits(msgspec.Struct, frozen=True):
    """The limits of one server."""

    body: int = 1024 * 1024
    requests: int = 1200
    """Requests per minute and token."""
    pages: int = 120
    """Pages and downloads per minute and token; one costs a hundred times as much as an API request."""
    failures: int = 10
    """Wrong tokens per minute and origin, at the login, as bearer token or at a webhook."""
    stale: int = 120
    """Expired cookies per minute and origin; pages that were left open send them."""
    streams: int = 20
    """Open streams and sockets per token."""
    all_streams: int = 500
    upload: int = 30 * SECOND
    """Longest time for a body to arrive."""
    head: int = 10 * SECOND
    """Longest time that a connection may be open without a request."""
    stall: int = 30 * SECOND
    """Longest time that a client may read nothing of a response."""
    check: int = 2 * SECOND
    """Interval between checks of an open stream's authorization."""


class Bucket(msgspec.Struct, frozen=True):
    """A token bucket: the level, and the time of that level."""

    level: float
    at: int


def consume_from_bucket(bucket: Bucket | None, limit: int, now: int) -> tuple[Bucket, int]:
    """Take one from a bucket; return the time to wait if none is left, or 0."""
    level = float(limit) if bucket is None else compute_bucket_level(bucket, limit, now)
    if level < 1:
        return Bucket(level, now), max(1, round((1 - level) * MINUTE / limit))
    return Bucket(level - 1, now), 0


def compute_bucket_level(bucket: Bucket, limit: int, now: int) -> float:
    """Return the current level. A clock that was set back does not lower it."""
    return min(float(limit), bucket.level + max(0, now - bucket.at) * limit / MINUTE)


class RateLimiters:
    """Token buckets by name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: dict[str, Bucket] = {}

    def consume(self, name: str, now: int) -> int:
        """Take one; return the time to wait if none was left, or 0."""
        self._buckets[name], wait = consume_from_bucket(self._buckets.get(name), self._limit, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets = dict(self._list_not_full(now))
        return wait

    def compute_wait(self, name: str, now: int) -> int:
        """Return the time to wait, without taking one."""
        bucket = self._buckets.get(name)
        return 0 if bucket is None else consume_from_bucket(bucket, self._limit, now)[1]

    def count_buckets(self) -> int:
        return len(self._buckets)

    def _list_not_full(self, now: int) -> Mapping[str, Bucket]:
        not_full = {
            name: bucket
            for name, bucket in self._buckets.items()
            if compute_bucket_level(bucket, self._limit, now) < self._limit
        }
        return dict(list(not_full.items())[-MAX_BUCKETS // 2 :])


class OpenStreams:
    """Counts open streams by token."""

    def __init__(self, limit: int, total_limit: int) -> None:
        self._limit = limit
        self._total_limit = total_limit
        self._open_counts: dict[str, int] = {}

    def enter(self, name: str) -> bool:
        """Count one more stream; return whether the limits allow it."""
        if self._open_counts.get(name, 0) >= self._limit or sum(self._open_counts.values()) >= self._total_limit:
            return False
        self._open_counts[name] = self._open_counts.get(name, 0) + 1
        return True

    def leave(self, name: str) -> None:
        self._open_counts[name] -= 1
        if not self._open_counts[name]:
            del self._open_counts[name]

    def count(self) -> int:
        return sum(self._open_counts.values())


MAX_PROVEN_TOKENS: Final = 10_000
PROXY_FACTOR: Final = 10
"""Factor for a proxy on this machine, and for all IPv6 networks of one site."""
IPV6_SITE_BITS: Final = 48
"""The prefix length of an IPv6 site; many providers assign one to a single customer."""
FORWARDED_HEADER: Final = b"x-forwarded-for"


class ClientOrigin(msgspec.Struct, frozen=True):
    """Where a request came from: the connected peer, and the client that a local proxy names."""

    peer: str
    origin: str


def locate_client(peer: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> ClientOrigin:
    """Return the origin. Only the last entry of a local proxy is trusted; an IPv6 network is one origin."""
    address = _address(peer)
    if address is None or not address.is_loopback:
        return ClientOrigin(_network(peer), _network(peer))
    texts = [value.decode("latin-1") for name, value in headers if name.lower() == FORWARDED_HEADER]
    forwarded_address = texts[-1].rpartition(",")[2].strip() if texts else ""
    return ClientOrigin(
        _network(peer), _network(forwarded_address if _address(forwarded_address) is not None else peer)
    )


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def _network(text: str) -> str:
    address = _address(text)
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return str(ip_network((address.packed[:8] + bytes(8), 64)))
    return text if address is None else str(address)


def _find_ipv6_site(origin: str) -> str:
    """Return the site of an IPv6 network; "" for other origins."""
    return str(ip_network(origin).supernet(new_prefix=IPV6_SITE_BITS)) if origin.endswith("/64") else ""


def digest_credential(credential: str) -> str:
    return hashlib.sha256(credential.encode("utf-8", "replace")).hexdigest()


class Attempts:
    """Counts wrong tokens by origin, and remembers valid ones."""

    def __init__(self, limit: int) -> None:
        self._origins = RateLimiters(limit)
        self._peers = RateLimiters(PROXY_FACTOR * limit)
        self._sites = RateLimiters(PROXY_FACTOR * limit)
        self._proven: dict[tuple[str, str], None] = {}

    def find_delay(self, origin: ClientOrigin, credential: str, now: int) -> int:
        """Return the time to wait before a token is checked; 0 for none."""
        if (origin.origin, digest_credential(credential)) in self._proven:
            return 0
        through_proxy = 0 if origin.origin == origin.peer else self._peers.compute_wait(origin.peer, now)
        site = _find_ipv6_site(origin.origin)
        from_site = self._sites.compute_wait(site, now) if site else 0
        return self._origins.compute_wait(origin.origin, now) or through_proxy or from_site

    def count_failure(self, origin: ClientOrigin, credential: str, now: int) -> None:
        """Count a wrong token, also one that was valid before."""
        self._proven.pop((origin.origin, digest_credential(credential)), None)
        self._origins.consume(origin.origin, now)
        if origin.origin != origin.peer:
            self._peers.consume(origin.peer, now)
        if site := _find_ipv6_site(origin.origin):
            self._sites.consume(site, now)

    def right(self, origin: ClientOrigin, credential: str) -> None:
        """Remember a valid token; only the newest are remembered."""
        key = (origin.origin, digest_credential(credential))
        self._proven.pop(key, None)
        self._proven[key] = None
        if len(self._proven) > MAX_PROVEN_TOKENS:
            del self._proven[next(iter(self._proven))]

    def count_origins(self) -> int:
        return sum(each.count_buckets() for each in (self._origins, self._peers, self._sites)) + len(self._proven)


AsgiScope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]

WHO_KEY: Final = "halter.who"
"""The scope key of an authorized request's `Principal`."""
VERSION_KEY: Final = "halter.version"
"""The scope key of a request whose path named the version of the API."""
STREAM_PATH: Final = f"{API}/stream"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
TOO_MANY_REQUESTS: Final = "Too many requests in one minute. Retry later."
INTERNAL_ERROR: Final = "Internal error; see the server's output."
WS_POLICY_VIOLATION: Final = 1008
"""Close code for a WebSocket whose authorization ended; the next one is for the end of the server."""
WS_GOING_AWAY: Final = 1001
MAX_DRAIN_FACTOR: Final = 8
"""A body that exceeds the limit by this factor is not read to its end."""

STRICT_CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGES_CSP: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    "form-action 'self'; base-uri 'self'; frame-ancestors 'none'"
)
"""For the dashboard's pages: its library adds inline scripts and styles. All files come from this server."""
_ALWAYS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not `no-referrer`: with it, a browser sends no Origin with a form.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class AuthState:
    """The tokens, the logins, and the wrong attempts by origin."""

    def __init__(
        self, keys: Keyring, logins: Logins, limits: ServerLimits, by_proxy: IdentifyByProxy = lambda _, __: None
    ) -> None:
        self.keys = keys
        self._by_proxy = by_proxy
        self.logins = logins
        self.tokens_tried = Attempts(limits.failures)
        self.cookies_tried = Attempts(limits.stale)

    def judge(
        self, request: IncomingRequest, server_names: ServerNames, origin: ClientOrigin, now: int
    ) -> Allowed | AuthRejected | int:
        """Decide about a request; return the time to wait if its origin made too many wrong attempts."""
        verdict = authorize_request(
            request, server_names, self.keys.tokens(), self.logins.current(), now, self._by_proxy
        )
        if isinstance(verdict, AuthRejected) and not verdict.wrong:
            return verdict
        credentials = (
            (self.tokens_tried, read_authorization(request)),
            (self.cookies_tried, read_login_cookie(request, server_names)),
        )
        if wait := max((attempts.find_delay(origin, text, now) for attempts, text in credentials if text), default=0):
            return wait
        for (attempts, text), kind in zip(credentials, ("token", "cookie"), strict=True):
            if isinstance(verdict, AuthRejected) and verdict.wrong == kind:
                attempts.count_failure(origin, text, now)
            elif isinstance(verdict, Allowed) and text:
                attempts.right(origin, text)
        return verdict

    def count(self, allowed: Allowed, now: int) -> bool:
        """Return True if an allowed caller would still be allowed now."""
        login = allowed.login
        if allowed.until:
            return now < allowed.until
        logged_in = login is None or (now < login.until and self.logins.current().get(login.digest) == login)
        signed_on = login is not None and login.person is not None
        return logged_in and allowed.token is not None and (signed_on or self.keys.is_valid(allowed.token))


RecordRequest = Callable[[Allowed | AuthRejected, str], Awaitable[None]]
"""Records who was allowed or rejected, and from which address."""


class ServerMiddleware:
    """Middleware around the whole server; puts the caller into the scope."""

    def __init__(
        self,
        app: AsgiApp,
        server_names: ServerNames,
        auth_state: AuthState,
        clock: Clock,
        limits: ServerLimits,
        report: Callable[[str], None] = lambda _: None,
        record: RecordRequest | None = None,
    ) -> None:
        self._app = app
        self._record = record
        self._server_names = server_names
        self._auth_state = auth_state
        self._clock = clock
        self._limits = limits
        self._report = report
        self._rates = RateLimiters(self._limits.requests)
        self._pages = RateLimiters(self._limits.pages)
        self.open = OpenStreams(self._limits.streams, self._limits.all_streams)
        self.closing = asyncio.Event()
        """Set when the server is shutting down, which closes streams."""

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Pass a request on or reject it. A failure in its handler does not stop the server."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        scope = select_api_version(scope)
        request = parse_scope(scope)
        response = ResponseFilter(request, send, self._limits.stall)
        try:
            with serve_caller(request.list_values("traceparent")):
                await self._answer(request, scope, receive, response)
        except Exception as error:  # noqa: BLE001 A failing request must not end the others.
            if response.is_gone:
                return
            self._report(f"{request.method} {clean(request.path)} failed: {type(error).__name__}: {clean(str(error))}")
            if not response.has_started:
                await send_refusal(scope, response, AuthRejected(500, INTERNAL_ERROR))

    async def _answer(self, request: IncomingRequest, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        verdict = self._auth_state.judge(request, self._server_names, locate_scope(scope), self._clock.now())
        if isinstance(verdict, Allowed):
            verdict = self._check_rate(request, verdict)
        if self._record is not None and not isinstance(verdict, int):
            await self._record(verdict, request.client)
        match verdict:
            case AuthRejected():
                await send_refusal(scope, send, verdict)
            case int():
                await send_refusal(scope, send, AuthRejected(429, TOO_MANY_REQUESTS), verdict)
            case Allowed():
                scope[WHO_KEY] = None if verdict.token is None else verdict.token.principal
                await self._serve_allowed(request, verdict, scope, receive, send)

    def _check_rate(self, request: IncomingRequest, allowed: Allowed) -> Allowed | int:
        if allowed.token is None:
            return allowed
        name, now = allowed.token.name, self._clock.now()
        return self._rates.consume(name, now) or (self._pages.consume(name, now) if _is_page(request) else 0) or allowed

    async def _serve_allowed(
        self, request: IncomingRequest, allowed: Allowed, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Pass the request on after its body was read completely. HEAD is GET without the body of its response."""
        if request.method == "HEAD" and request.path == STREAM_PATH:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENT_STREAM)]})
            await send({"type": "http.response.body", "body": b""})
            return
        if request.method == "HEAD":
            scope = {**scope, "method": "GET"}
        if allowed.token is not None and (request.kind == "websocket" or request.path == STREAM_PATH):
            await self._stream(allowed, allowed.token.name, scope, receive, send)
            return
        if _has_body(request) and not request.path.startswith("/hooks/"):
            body = await self._body(receive)
            if isinstance(body, AuthRejected):
                await send_refusal(scope, send, body)
                return
            receive = _replay_body(body, receive)
        await self._app(scope, receive, send)

    async def _stream(
        self, allowed: Allowed, name: str, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        if not self.open.enter(name):
            await send_refusal(scope, send, AuthRejected(429, "Too many open streams. Close one of them."), 10 * SECOND)
            return
        try:
            await self._serve_while_valid(allowed, scope, receive, send)
        finally:
            self.open.leave(name)

    async def _serve_while_valid(
        self, allowed: Allowed, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        task = asyncio.ensure_future(self._app(scope, self._receive_while_valid(allowed, receive), send))
        closing = asyncio.ensure_future(self.closing.wait())
        login_change = asyncio.ensure_future(self._auth_state.logins.changed.wait())
        try:
            while not task.done() and not closing.done() and self._is_valid(allowed):
                if login_change.done():
                    login_change = asyncio.ensure_future(self._auth_state.logins.changed.wait())
                waited_tasks = {task, closing, login_change}
                await asyncio.wait(
                    waited_tasks, timeout=self._limits.check / SECOND, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            is_finished = task.done()
            await cancel_and_wait(task, closing, login_change)
        if not is_finished and scope["type"] == "websocket":
            code, reason = (
                (WS_GOING_AWAY, "The server is shutting down.")
                if self.closing.is_set()
                else (WS_POLICY_VIOLATION, "Your authorization has ended.")
            )
            with suppress(RuntimeError, OSError, TimeoutError):
                # The client may be gone.
                await send({"type": "websocket.close", "code": code, "reason": reason})

    def _receive_while_valid(self, allowed: Allowed, receive: AsgiReceive) -> AsgiReceive:
        """Return a receive function that passes on messages only while the caller is authorized."""

        async def receive_valid() -> AsgiMessage:
            message = await receive()
            ends = message["type"] == "websocket.receive" and not self._is_valid(allowed)
            return {"type": "websocket.disconnect", "code": WS_POLICY_VIOLATION} if ends else message

        return receive_valid

    def _is_valid(self, allowed: Allowed) -> bool:
        return self._auth_state.count(allowed, self._clock.now())

    async def _body(self, receive: AsgiReceive) -> bytes | AuthRejected:
        """Read a body up to the limit."""
        try:
            async with asyncio.timeout(self._limits.upload / SECOND):
                body = await _read_body(receive, self._limits.body)
        except TimeoutError:
            return AuthRejected(408, "The body took too long to arrive.")
        if body is None:
            return AuthRejected(413, f"The body exceeds the limit of {self._limits.body:,} bytes.")
        return body


def select_api_version(scope: AsgiScope) -> AsgiScope:
    """Return a request of the versioned API as one of the API, and note that it named the version."""
    path = scope["path"]
    if path != VERSIONED_API and not path.startswith(f"{VERSIONED_API}/"):
        return scope
    return {**scope, "path": API + path.removeprefix(VERSIONED_API), VERSION_KEY: True}


def locate_scope(scope: AsgiScope) -> ClientOrigin:
    client = scope.get("client")
    return locate_client(client[0] if client else "", scope["headers"])


def parse_scope(scope: AsgiScope) -> IncomingRequest:
    kind = "websocket" if scope["type"] == "websocket" else "http"
    client = (scope.get("client") or ("",))[0]
    return IncomingRequest(
        kind, scope.get("method", "GET"), scope["path"], scope.get("query_string", b""), scope["headers"], client
    )


def _is_page(request: IncomingRequest) -> bool:
    """Return True if a request is for a page of the dashboard, not for one of its files."""
    other_prefixes = (API, LOGIN, METRICS, "/_nicegui")
    return request.kind == "http" and request.method == "GET" and not request.path.startswith(other_prefixes)


def _has_body(request: IncomingRequest) -> bool:
    length = request.find_value("content-length")
    return request.kind == "http" and (length not in {"", "0"} or bool(request.list_values("transfer-encoding")))


async def _read_body(receive: AsgiReceive, limit: int) -> bytes | None:
    """Read a body; None if it is too long.

    A little more than the limit is read, since a client that is still sending reads no response.
    """
    body, length = bytearray(), 0
    while length <= MAX_DRAIN_FACTOR * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        length += len(message.get("body", b""))
        body += message.get("body", b"") if length <= limit else b""
        if not message.get("more_body", False):
            return bytes(body) if length <= limit else None
    return None


def _replay_body(body: bytes, receive: AsgiReceive) -> AsgiReceive:
    """Return a receive function that yields the body again."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> AsgiMessage:
        return waiting.pop() if waiting else await receive()

    return replay


class ResponseFilter:
    """A send function that adds security headers, and drops clients that read nothing."""

    def __init__(self, request: IncomingRequest, send: AsgiSend, stall: int) -> None:
        self.has_started = False
        self.is_gone = False
        self._request = request
        self._send = send
        self._stall = stall

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] in {"http.response.start", "websocket.http.response.start"}:
            message = {**message, "headers": _headers(self._request, message.get("headers", ()))}
        self.has_started = True
        try:
            async with asyncio.timeout(self._stall / SECOND):
                await self._send(message)
        except (TimeoutError, OSError):
            self.is_gone = True
            raise


def _headers(request: IncomingRequest, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Add the security headers, and remove CORS headers."""
    is_api_or_free = is_free(request) or request.path in {API, METRICS} or request.path.startswith(f"{API}/")
    own_headers = [*_ALWAYS, (b"content-security-policy", (STRICT_CSP if is_api_or_free else PAGES_CSP).encode())]
    if is_api_or_free:
        own_headers.append((b"cache-control", b"no-store"))
    names = {name for name, _ in own_headers}
    allowed_headers = [(name, value) for name, value in headers if not name.lower().startswith(b"access-control-")]
    return [*((name, value) for name, value in allowed_headers if name.lower() not in names), *own_headers]


async def send_refusal(scope: AsgiScope, send: AsgiSend, rejected: AuthRejected, wait: int = 0) -> None:
    """Send a rejection: JSON to a program, a redirect to the login to a browser; a WebSocket is not opened."""
    status, headers = rejected.status, [(b"content-type", b"application/json")]
    body = msgspec.json.encode({"error": rejected.sentence})
    if rejected.to_login:
        status, headers, body = 303, [(b"location", LOGIN.encode())], b""
    if wait:
        headers.append((b"retry-after", str(max(1, -(-wait // SECOND))).encode()))
    if status in {408, 413}:
        # The rest of the body is not read.
        headers.append((b"connection", b"close"))
    if status == 401:  # noqa: PLR2004 The status of HTTP for this.
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"content-length", str(len(body)).encode()))
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    if kind.startswith("websocket") and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": WS_POLICY_VIOLATION})
        return
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
