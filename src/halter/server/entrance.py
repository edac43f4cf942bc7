"""The one way into the server: everything that speaks HTTP or WebSocket passes here, whatever lies behind it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.text import clean
from halter.server.attempts import Attempts, Place, place_of
from halter.server.auth import API, LOGIN, Allowed, Asked, Door, Rejected, is_free, judge, shown_cookie, shown_token
from halter.server.limits import Limits, Open, Rates
from halter.server.logins import Logins
from halter.server.tokens import Keyring

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

WHO: Final = "halter.who"
"""Under this key stands who asks, in the scope of everything that was let in."""
STREAM: Final = f"{API}/stream"
TOO_MUCH: Final = "That was too much for a minute: wait a little."
BROKEN: Final = "Something broke here, which is a mistake of Halter's own: whoever runs it is told more."
REFUSED: Final = 1008
"""With this code a WebSocket is closed to whom it is not open any more; with the next one, to all."""
GOES: Final = 1001
DRAINED: Final = 8
"""A body that is so many times too long is not even read to its end."""

STRICT: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGES: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    "form-action 'self'; base-uri 'self'; frame-ancestors 'none'"
)
"""What the dashboard's pages need: its library puts scripts and styles of its own into them. All comes from here."""
_ALWAYS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not none at all: a browser would then hide from us, too, which page a form was sent from.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Checks:
    """What a request is compared with: the tokens, the logins, and how many wrong ones of each came from where."""

    def __init__(self, keys: Keyring, logins: Logins, limits: Limits) -> None:
        self.keys = keys
        self.logins = logins
        self.tokens_tried = Attempts(limits.failures)
        self.cookies_tried = Attempts(limits.stale)

    def judge(self, asked: Asked, door: Door, place: Place, now: int) -> Allowed | Rejected | int:
        """Decide about a request; return how long to wait where too much that was wrong came from its place."""
        verdict = judge(asked, door, self.keys.tokens(), self.logins.current(), now)
        if isinstance(verdict, Rejected) and not verdict.wrong:
            return verdict
        shown = ((self.tokens_tried, shown_token(asked)), (self.cookies_tried, shown_cookie(asked, door)))
        if wait := max((tried.wait(place, said, now) for tried, said in shown if said), default=0):
            return wait
        for (tried, said), kind in zip(shown, ("token", "cookie"), strict=True):
            if isinstance(verdict, Rejected) and verdict.wrong == kind:
                tried.wrong(place, said, now)
            elif isinstance(verdict, Allowed) and said:
                tried.right(place, said)
        return verdict

    def count(self, who: Allowed, now: int) -> bool:
        """Tell whether somebody who was let in still would be."""
        login = who.login
        logged_in = login is None or (now < login.until and self.logins.current().get(login.digest) == login)
        return logged_in and who.token is not None and self.keys.counts(who.token)


class Entrance:
    """Stands around the whole server. What is behind it finds in the scope who asks."""

    def __init__(
        self,
        inner: Asgi,
        door: Door,
        checks: Checks,
        clock: Clock,
        limits: Limits,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._inner = inner
        self._door = door
        self._checks = checks
        self._clock = clock
        self._limits = limits
        self._tell = tell
        self._rates = Rates(self._limits.requests)
        self._pages = Rates(self._limits.pages)
        self.open = Open(self._limits.streams, self._limits.all_streams)
        self.closing = asyncio.Event()
        """Set when the server is about to end: whoever listens is told."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse. Whatever breaks behind this door, the server goes on."""
        if scope["type"] not in {"http", "websocket"}:
            await self._inner(scope, receive, send)
            return
        asked = asked_of(scope)
        out = Outgoing(asked, send, self._limits.stall)
        try:
            await self._answer(asked, scope, receive, out)
        except Exception as error:  # noqa: BLE001 One request that breaks must not end the others.
            if out.gone:
                return
            self._tell(f"{asked.method} {clean(asked.path)} broke: {type(error).__name__}: {clean(str(error))}")
            if not out.started:
                await refuse(scope, out, Rejected(500, BROKEN))

    async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        verdict = self._checks.judge(asked, self._door, place_in(scope), self._clock.now())
        if isinstance(verdict, Allowed):
            verdict = self._within_rate(asked, verdict)
        match verdict:
            case Rejected():
                await refuse(scope, send, verdict)
            case int():
                await refuse(scope, send, Rejected(429, TOO_MUCH), verdict)
            case Allowed():
                scope[WHO] = None if verdict.token is None else verdict.token.who
                await self._let_in(asked, verdict, scope, receive, send)

    def _within_rate(self, asked: Asked, allowed: Allowed) -> Allowed | int:
        if allowed.token is None:
            return allowed
        name, now = allowed.token.name, self._clock.now()
        return self._rates.wait(name, now) or (self._pages.wait(name, now) if _is_page(asked) else 0) or allowed

    async def _let_in(self, asked: Asked, who: Allowed, scope: Scope, receive: Receive, send: Send) -> None:
        """Give it to what lies behind, with its body, if it has one, read to the end."""
        if who.token is not None and (asked.kind == "websocket" or asked.path == STREAM):
            await self._stream(who, who.token.name, scope, receive, send)
            return
        if _has_body(asked) and not asked.path.startswith("/hooks/"):
            whole = await self._body(receive)
            if isinstance(whole, Rejected):
                await refuse(scope, send, whole)
                return
            receive = _again(whole, receive)
        await self._inner(scope, receive, send)

    async def _stream(self, who: Allowed, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Let somebody listen for as long as they may."""
        if not self.open.enter(name):
            await refuse(scope, send, Rejected(429, "Too many streams are open: close one of them."), 10 * SECOND)
            return
        try:
            await self._while_it_counts(who, scope, receive, send)
        finally:
            self.open.leave(name)

    async def _while_it_counts(self, who: Allowed, scope: Scope, receive: Receive, send: Send) -> None:
        running = asyncio.ensure_future(self._inner(scope, self._heard_while_it_counts(who, receive), send))
        closing = asyncio.ensure_future(self.closing.wait())
        changed = asyncio.ensure_future(self._checks.logins.changed.wait())
        try:
            while not running.done() and not closing.done() and self._counts(who):
                if changed.done():
                    changed = asyncio.ensure_future(self._checks.logins.changed.wait())
                waits = {running, closing, changed}
                await asyncio.wait(waits, timeout=self._limits.check / SECOND, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = running.done()
            for task in (running, closing, changed):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await running
        if not ended and scope["type"] == "websocket":
            code, reason = (GOES, "The server ends.") if self.closing.is_set() else (REFUSED, "Your token has ended.")
            with suppress(RuntimeError, OSError, TimeoutError):
                # Whoever has gone meanwhile cannot be told.
                await send({"type": "websocket.close", "code": code, "reason": reason})

    def _heard_while_it_counts(self, who: Allowed, receive: Receive) -> Receive:
        """Hand on what somebody sends only if they may still send it: what a page was open for may have ended."""

        async def heard() -> Message:
            message = await receive()
            ends = message["type"] == "websocket.receive" and not self._counts(who)
            return {"type": "websocket.disconnect", "code": REFUSED} if ends else message

        return heard

    def _counts(self, who: Allowed) -> bool:
        return self._checks.count(who, self._clock.now())

    async def _body(self, receive: Receive) -> bytes | Rejected:
        """Read a body, of whatever length it says to be, and keep no more of it than is taken."""
        try:
            async with asyncio.timeout(self._limits.upload / SECOND):
                body = await _whole(receive, self._limits.body)
        except TimeoutError:
            return Rejected(408, "The body was too long in coming.")
        if body is None:
            return Rejected(413, f"The body is longer than the {self._limits.body:,} bytes that are taken.")
        return body


def place_in(scope: Scope) -> Place:
    """Take out of a scope where it came from."""
    client = scope.get("client")
    return place_of(client[0] if client else "", scope["headers"])


def asked_of(scope: Scope) -> Asked:
    """Take what is judged out of a scope."""
    kind = "websocket" if scope["type"] == "websocket" else "http"
    return Asked(kind, scope.get("method", "GET"), scope["path"], scope.get("query_string", b""), scope["headers"])


def _is_page(asked: Asked) -> bool:
    """Tell whether somebody wants a page of the dashboard, and not one of the files that it is made of."""
    made_of = (API, LOGIN, "/_nicegui")
    return asked.kind == "http" and asked.method == "GET" and not asked.path.startswith(made_of)


def _has_body(asked: Asked) -> bool:
    length = asked.first("content-length")
    return asked.kind == "http" and (length not in {"", "0"} or bool(asked.all("transfer-encoding")))


async def _whole(receive: Receive, most: int) -> bytes | None:
    """Read a body; of one that is too long a little more, since who is still sending does not hear an answer."""
    body, length = bytearray(), 0
    while length <= DRAINED * most:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        length += len(message.get("body", b""))
        body += message.get("body", b"") if length <= most else b""
        if not message.get("more_body", False):
            return bytes(body) if length <= most else None
    return None


def _again(body: bytes, receive: Receive) -> Receive:
    """Give what was read to whoever reads it next."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


class Outgoing:
    """What goes out: with what keeps browsers from doing more with it, and not to somebody who takes nothing of it."""

    def __init__(self, asked: Asked, send: Send, stall: int) -> None:
        self.started = False
        self.gone = False
        self._asked = asked
        self._send = send
        self._stall = stall

    async def __call__(self, message: Message) -> None:
        """Send something."""
        if message["type"] in {"http.response.start", "websocket.http.response.start"}:
            message = {**message, "headers": _headers(self._asked, message.get("headers", ()))}
        self.started = True
        try:
            async with asyncio.timeout(self._stall / SECOND):
                await self._send(message)
        except (TimeoutError, OSError):
            self.gone = True
            raise


def _headers(asked: Asked, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Add ours, and leave out what would let pages of others read along, whoever put it there."""
    own = is_free(asked) or asked.path == API or asked.path.startswith(f"{API}/")
    ours = [*_ALWAYS, (b"content-security-policy", (STRICT if own else PAGES).encode())]
    if own:
        ours.append((b"cache-control", b"no-store"))
    names = {name for name, _ in ours}
    kept = [(name, value) for name, value in given if not name.lower().startswith(b"access-control-")]
    return [*((name, value) for name, value in kept if name.lower() not in names), *ours]


async def refuse(scope: Scope, send: Send, rejected: Rejected, wait: int = 0) -> None:
    """Say no: to a program in JSON, to a person by showing the way in, to a WebSocket before it is open."""
    status, headers = rejected.status, [(b"content-type", b"application/json")]
    body = msgspec.json.encode({"error": rejected.sentence})
    if rejected.to_login:
        status, headers, body = 303, [(b"location", LOGIN.encode())], b""
    if wait:
        headers.append((b"retry-after", str(max(1, -(-wait // SECOND))).encode()))
    if status in {408, 413}:
        # What is left of the body is not waited for.
        headers.append((b"connection", b"close"))
    if status == 401:  # noqa: PLR2004 The status of HTTP for this.
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"content-length", str(len(body)).encode()))
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    if kind.startswith("websocket") and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": REFUSED})
        return
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
