"""The middleware around the whole server: authorization, rate limits, body limits and response headers.

Wrong tokens are limited by origin: after so many in a minute, requests from there are not checked, unless their token
was valid there before. So a user behind the same proxy as an attacker is not locked out, and the attacker learns
nothing.
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
from halter.loop.session_runtime import cancel_and_wait
from halter.server.auth import (
    API,
    LOGIN,
    Allowed,
    AuthRejected,
    IdentifyByProxy,
    IncomingRequest,
    Keyring,
    Logins,
    ServerNames,
    authorize_request,
    find_shown_cookie,
    find_shown_token,
    is_free,
)

MAX_BUCKETS: Final = 10_000
"""Most buckets kept; full ones are dropped first, since a new one is full as well."""


class ServerLimits(msgspec.Struct, frozen=True):
    """The limits of one server."""

    body: int = 1024 * 1024
    requests: int = 1200
    """Requests per minute and token."""
    pages: int = 120
    """Pages and downloads per minute and token: each costs a hundred times as much as an API request."""
    failures: int = 10
    """Wrong tokens per minute and origin: at the login, as bearer, at a webhook."""
    stale: int = 120
    """Expired cookies per minute and origin: pages that were left open send them."""
    streams: int = 20
    """Open streams and sockets per token."""
    all_streams: int = 500
    upload: int = 30 * SECOND
    """How long a body may take to arrive."""
    head: int = 10 * SECOND
    """How long a connection may be open without a request."""
    stall: int = 30 * SECOND
    """How long a client may read nothing of a response."""
    check: int = 2 * SECOND
    """How often the authorization of an open stream is checked."""


class Bucket(msgspec.Struct, frozen=True):
    """A token bucket: what is left, and when that was."""

    left: float
    at: int


def take_from_bucket(bucket: Bucket | None, limit: int, now: int) -> tuple[Bucket, int]:
    """Takes one from a bucket; returns how long to wait where none is left, or 0."""
    left = float(limit) if bucket is None else compute_bucket_level(bucket, limit, now)
    if left < 1:
        return Bucket(left, now), max(1, round((1 - left) * MINUTE / limit))
    return Bucket(left - 1, now), 0


def compute_bucket_level(bucket: Bucket, limit: int, now: int) -> float:
    """Returns how much is left by now. A clock that was set back takes nothing away."""
    return min(float(limit), bucket.left + max(0, now - bucket.at) * limit / MINUTE)


class RateLimiters:
    """Token buckets by name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: dict[str, Bucket] = {}

    def take(self, name: str, now: int) -> int:
        """Takes one; returns how long to wait if none was left."""
        self._buckets[name], wait = take_from_bucket(self._buckets.get(name), self._limit, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets = dict(self._list_not_full(now))
        return wait

    def is_spent(self, name: str, now: int) -> int:
        """Returns how long to wait, without taking one."""
        bucket = self._buckets.get(name)
        return 0 if bucket is None else take_from_bucket(bucket, self._limit, now)[1]

    def count_buckets(self) -> int:
        return len(self._buckets)

    def _list_not_full(self, now: int) -> Mapping[str, Bucket]:
        wanting = {
            name: each
            for name, each in self._buckets.items()
            if compute_bucket_level(each, self._limit, now) < self._limit
        }
        return dict(list(wanting.items())[-MAX_BUCKETS // 2 :])


class OpenStreams:
    """Counts open streams by token."""

    def __init__(self, each: int, together: int) -> None:
        self._each = each
        self._together = together
        self._open_counts: dict[str, int] = {}

    def enter(self, name: str) -> bool:
        """Counts one more, if the limits allow it."""
        if self._open_counts.get(name, 0) >= self._each or sum(self._open_counts.values()) >= self._together:
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
"""The prefix of an IPv6 site: many providers assign one to a single customer."""
FORWARDED_HEADER: Final = b"x-forwarded-for"


class ClientOrigin(msgspec.Struct, frozen=True):
    """Where a request came from: the connected peer, and the client that a local proxy names."""

    peer: str
    origin: str


def locate_client(peer: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> ClientOrigin:
    """Returns the origin. Only the last entry of a local proxy is trusted; an IPv6 network is one origin."""
    address = _address(peer)
    if address is None or not address.is_loopback:
        return ClientOrigin(_network(peer), _network(peer))
    texts = [value.decode("latin-1") for name, value in headers if name.lower() == FORWARDED_HEADER]
    last = texts[-1].rpartition(",")[2].strip() if texts else ""
    return ClientOrigin(_network(peer), _network(last if _address(last) is not None else peer))


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def _network(text: str) -> str:
    address = _address(text)
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return str(ip_network((address.packed[:8] + bytes(8), 64)))
    return text if address is None else str(address)


def _find_ipv6_site(origin: str) -> str:
    """Returns the site of an IPv6 network; "" for other origins."""
    return str(ip_network(origin).supernet(new_prefix=IPV6_SITE_BITS)) if origin.endswith("/64") else ""


def digest_shown(shown: str) -> str:
    return hashlib.sha256(shown.encode("utf-8", "replace")).hexdigest()


class Attempts:
    """Counts wrong tokens by origin, and remembers valid ones."""

    def __init__(self, limit: int) -> None:
        self._origins = RateLimiters(limit)
        self._peers = RateLimiters(PROXY_FACTOR * limit)
        self._sites = RateLimiters(PROXY_FACTOR * limit)
        self._proven: dict[tuple[str, str], None] = {}

    def find_delay(self, origin: ClientOrigin, shown: str, now: int) -> int:
        """Returns how long until a token is checked; 0 is now."""
        if (origin.origin, digest_shown(shown)) in self._proven:
            return 0
        through_proxy = 0 if origin.origin == origin.peer else self._peers.is_spent(origin.peer, now)
        site = _find_ipv6_site(origin.origin)
        from_site = self._sites.is_spent(site, now) if site else 0
        return self._origins.is_spent(origin.origin, now) or through_proxy or from_site

    def count_failure(self, origin: ClientOrigin, shown: str, now: int) -> None:
        """Counts a wrong token, also where it was valid before."""
        self._proven.pop((origin.origin, digest_shown(shown)), None)
        self._origins.take(origin.origin, now)
        if origin.origin != origin.peer:
            self._peers.take(origin.peer, now)
        if site := _find_ipv6_site(origin.origin):
            self._sites.take(site, now)

    def right(self, origin: ClientOrigin, shown: str) -> None:
        """Remembers a valid token; the newest are kept."""
        key = (origin.origin, digest_shown(shown))
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
"""The key of the caller in the scope of an authorized request."""
STREAM_PATH: Final = f"{API}/stream"
TOO_MANY_REQUESTS: Final = "That was too much for a minute: wait a little."
INTERNAL_ERROR: Final = "Internal error; see the server's output."
WS_POLICY_VIOLATION: Final = 1008
"""Closes a WebSocket whose authorization ended; the next code says that the server ends."""
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
"""For the dashboard's pages: its library adds inline scripts and styles. Everything is served from here."""
_ALWAYS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not `no-referrer`: then a browser would not send us the Origin of a form.
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
        self, request: IncomingRequest, door: ServerNames, origin: ClientOrigin, now: int
    ) -> Allowed | AuthRejected | int:
        """Decides about a request; returns how long to wait where its origin made too many wrong attempts."""
        verdict = authorize_request(request, door, self.keys.tokens(), self.logins.current(), now, self._by_proxy)
        if isinstance(verdict, AuthRejected) and not verdict.wrong:
            return verdict
        shown = ((self.tokens_tried, find_shown_token(request)), (self.cookies_tried, find_shown_cookie(request, door)))
        if wait := max((tried.find_delay(origin, text, now) for tried, text in shown if text), default=0):
            return wait
        for (tried, text), kind in zip(shown, ("token", "cookie"), strict=True):
            if isinstance(verdict, AuthRejected) and verdict.wrong == kind:
                tried.count_failure(origin, text, now)
            elif isinstance(verdict, Allowed) and text:
                tried.right(origin, text)
        return verdict

    def count(self, principal: Allowed, now: int) -> bool:
        """Whether an authorized caller would still be let in."""
        login = principal.login
        if principal.until:
            return now < principal.until
        logged_in = login is None or (now < login.until and self.logins.current().get(login.digest) == login)
        signed_on = login is not None and login.person is not None
        return logged_in and principal.token is not None and (signed_on or self.keys.is_valid(principal.token))


RecordRequest = Callable[[Allowed | AuthRejected, str], Awaitable[None]]
"""Keeps who was let in and who was not, and from which address."""


class ServerMiddleware:
    """Wraps the whole server. Puts the caller into the scope."""

    def __init__(
        self,
        inner: AsgiApp,
        door: ServerNames,
        checks: AuthState,
        clock: Clock,
        limits: ServerLimits,
        report: Callable[[str], None] = lambda _: None,
        record: RecordRequest | None = None,
    ) -> None:
        self._inner = inner
        self._record = record
        self._auth = door
        self._checks = checks
        self._clock = clock
        self._limits = limits
        self._report = report
        self._rates = RateLimiters(self._limits.requests)
        self._pages = RateLimiters(self._limits.pages)
        self.open = OpenStreams(self._limits.streams, self._limits.all_streams)
        self.closing = asyncio.Event()
        """Set when the server is about to end: streams are closed."""

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Lets a request in or rejects it. A failure behind it does not stop the server."""
        if scope["type"] not in {"http", "websocket"}:
            await self._inner(scope, receive, send)
            return
        request = parse_scope(scope)
        out = ResponseFilter(request, send, self._limits.stall)
        try:
            await self._answer(request, scope, receive, out)
        except Exception as error:  # noqa: BLE001 One request that breaks must not end the others.
            if out.is_gone:
                return
            self._report(f"{request.method} {clean(request.path)} broke: {type(error).__name__}: {clean(str(error))}")
            if not out.has_started:
                await send_refusal(scope, out, AuthRejected(500, INTERNAL_ERROR))

    async def _answer(self, request: IncomingRequest, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        verdict = self._checks.judge(request, self._auth, locate_scope(scope), self._clock.now())
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
        return self._rates.take(name, now) or (self._pages.take(name, now) if _is_page(request) else 0) or allowed

    async def _serve_allowed(
        self, request: IncomingRequest, principal: Allowed, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Passes the request on, its body read to the end."""
        if principal.token is not None and (request.kind == "websocket" or request.path == STREAM_PATH):
            await self._stream(principal, principal.token.name, scope, receive, send)
            return
        if _has_body(request) and not request.path.startswith("/hooks/"):
            whole = await self._body(receive)
            if isinstance(whole, AuthRejected):
                await send_refusal(scope, send, whole)
                return
            receive = _replay_body(whole, receive)
        await self._inner(scope, receive, send)

    async def _stream(
        self, principal: Allowed, name: str, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        if not self.open.enter(name):
            await send_refusal(
                scope, send, AuthRejected(429, "Too many streams are open: close one of them."), 10 * SECOND
            )
            return
        try:
            await self._serve_while_valid(principal, scope, receive, send)
        finally:
            self.open.leave(name)

    async def _serve_while_valid(
        self, principal: Allowed, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        task = asyncio.ensure_future(self._inner(scope, self._receive_while_valid(principal, receive), send))
        closing = asyncio.ensure_future(self.closing.wait())
        changed = asyncio.ensure_future(self._checks.logins.changed.wait())
        try:
            while not task.done() and not closing.done() and self._is_valid(principal):
                if changed.done():
                    changed = asyncio.ensure_future(self._checks.logins.changed.wait())
                waits = {task, closing, changed}
                await asyncio.wait(waits, timeout=self._limits.check / SECOND, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = task.done()
            await cancel_and_wait(task, closing, changed)
        if not ended and scope["type"] == "websocket":
            code, reason = (
                (WS_GOING_AWAY, "The server ends.")
                if self.closing.is_set()
                else (WS_POLICY_VIOLATION, "Your token has ended.")
            )
            with suppress(RuntimeError, OSError, TimeoutError):
                # The client may be gone.
                await send({"type": "websocket.close", "code": code, "reason": reason})

    def _receive_while_valid(self, principal: Allowed, receive: AsgiReceive) -> AsgiReceive:
        """Passes on messages only while the caller is authorized."""

        async def receive_valid() -> AsgiMessage:
            message = await receive()
            ends = message["type"] == "websocket.receive" and not self._is_valid(principal)
            return {"type": "websocket.disconnect", "code": WS_POLICY_VIOLATION} if ends else message

        return receive_valid

    def _is_valid(self, principal: Allowed) -> bool:
        return self._checks.count(principal, self._clock.now())

    async def _body(self, receive: AsgiReceive) -> bytes | AuthRejected:
        """Reads a body up to the limit."""
        try:
            async with asyncio.timeout(self._limits.upload / SECOND):
                body = await _read_body(receive, self._limits.body)
        except TimeoutError:
            return AuthRejected(408, "The body was too long in coming.")
        if body is None:
            return AuthRejected(413, f"The body is longer than the {self._limits.body:,} bytes that are taken.")
        return body


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
    """Whether a request is for a page of the dashboard, not for one of its files."""
    made_of = (API, LOGIN, "/_nicegui")
    return request.kind == "http" and request.method == "GET" and not request.path.startswith(made_of)


def _has_body(request: IncomingRequest) -> bool:
    length = request.first("content-length")
    return request.kind == "http" and (length not in {"", "0"} or bool(request.all("transfer-encoding")))


async def _read_body(receive: AsgiReceive, limit: int) -> bytes | None:
    """Reads a body; of one that is too long a little more, since a client that still sends reads no response."""
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
    """Returns a receive function that yields the body again."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> AsgiMessage:
        return waiting.pop() if waiting else await receive()

    return replay


class ResponseFilter:
    """Adds security headers to responses, and drops clients that read nothing."""

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


def _headers(request: IncomingRequest, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Adds our headers, and removes CORS headers."""
    own = is_free(request) or request.path == API or request.path.startswith(f"{API}/")
    ours = [*_ALWAYS, (b"content-security-policy", (STRICT_CSP if own else PAGES_CSP).encode())]
    if own:
        ours.append((b"cache-control", b"no-store"))
    names = {name for name, _ in ours}
    kept = [(name, value) for name, value in given if not name.lower().startswith(b"access-control-")]
    return [*((name, value) for name, value in kept if name.lower() not in names), *ours]


async def send_refusal(scope: AsgiScope, send: AsgiSend, rejected: AuthRejected, wait: int = 0) -> None:
    """Rejects: a program gets JSON, a browser a redirect to the login, a WebSocket is not opened."""
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
