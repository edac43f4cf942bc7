"""The whole server: API, streams, webhooks, login and dashboard behind one middleware."""

import asyncio
import errno
import re
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from starlette.responses import Response

from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.errors import ConfigError, NotDone, StoreUnavailable, require_module
from halter.core.text import to_one_line
from halter.loop.session_runtime import run_together
from halter.operations.actor import Principal
from halter.operations.agents import AgentFolders
from halter.operations.health import check_readiness
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.runtime.telemetry import MetricTable, count_metrics
from halter.runtime.webhooks import WebhookReceiver
from halter.server.auth import (
    API,
    HEALTH,
    LOGIN,
    LOGIN_LIFETIME,
    LOGOUT,
    METRICS,
    OIDC_CALLBACK,
    OIDC_LOGIN,
    READINESS,
    VERSIONED_API,
    Allowed,
    AuthRejected,
    IdentifyByProxy,
    Keyring,
    Logins,
    ServerNames,
    Token,
    find_cookies,
    find_token,
    make_server_names,
)
from halter.server.middleware import (
    TOO_MANY_REQUESTS,
    WHO_KEY,
    AuthState,
    ClientOrigin,
    ServerLimits,
    ServerMiddleware,
    locate_scope,
)
from halter.server.oidc import PENDING_LOGIN_LIFETIME, OidcSignOn
from halter.server.sign_on import SignOnLog

if TYPE_CHECKING:
    from halter.server.responses import Feed

LISTEN_BACKLOG: Final = 100
"""Connections that may wait to be accepted."""
TCP_USER_TIMEOUT_MS: Final = 60_000
"""Time after which the system drops a connection whose peer acknowledges nothing."""
SHUTDOWN_GRACE_SECONDS: Final = 2
"""Time that open requests have when the server shuts down."""
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum number of bytes of the URL and headers together."""
HEAD_TIMEOUT: Final = 10 * SECOND
"""Longest time that a connection may be open without a request."""
_QUIET: Final[dict[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"nowhere": {"class": "logging.NullHandler"}},
    "loggers": {"uvicorn": {"handlers": ["nowhere"], "propagate": False}},
}
"""Silences uvicorn's log; Halter reports problems as sentences."""


def listen(host: str, port: int) -> socket.socket:
    """Bind a port, or any free one for 0. Raises ConfigError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(_explain_bind_error(host, port, error)) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    # Connections inherit it. Without it, a body waits 40 ms for the acknowledgement of the headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _explain_bind_error(host: str, port: int, error: OSError) -> str:
    where = f"Cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use. Choose another port with --listen, or 0 for any free one."
    return f"{where}: {error.strerror or error}."


def _protocol(head: int) -> type[asyncio.Protocol]:
    """Make the HTTP protocol class; it bounds the data and the time of unauthenticated clients."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """A protocol that closes connections without a request."""

        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._stop_waiting()
            self.timer = self.loop.call_later(head / SECOND, self._check_progress)

        def _stop_waiting(self) -> None:
            if self.timer is not None:
                self.timer.cancel()

        def _check_progress(self) -> None:
            # A connection that became a WebSocket is not among these.
            has_open_request = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
            if self in self.connections and not has_open_request:
                self.transport.close()

    return Impatient


async def serve_asgi(
    asgi: Any, listener: socket.socket, closing: Callable[[], None] = lambda: None, head: int = HEAD_TIMEOUT
) -> None:
    """Serve until cancelled; then call `closing` and finish open requests."""
    import uvicorn

    class Quiet(uvicorn.Server):
        """A server that leaves signals to the caller."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        asgi,
        http=_protocol(head),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=_QUIET,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
    )
    server = Quiet(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await asyncio.wait([serving])
        serving.result()
    except asyncio.CancelledError:
        closing()
        server.should_exit = True
        await serving
        raise
    finally:
        listener.close()
    raise ConfigError("The server could not start. See its output above.")


HOST: Final = "127.0.0.1"
PORT: Final = 8765
PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
READINESS_TTL: Final = SECOND
"""How long a readiness check is reused: anyone may ask, and each check reads the store."""
PLAIN_PAGE: Final = (
    f"Halter is running. Its API is at {VERSIONED_API}, described in {VERSIONED_API}/openapi.json. "
    "The dashboard is not installed."
)
_ROUTE: Final[Mapping[str, Any]] = {"response_model": None, "include_in_schema": False}


class WebhookEndpoint:
    """The webhooks of the agents that run in this process."""

    def __init__(self) -> None:
        self.hooks = WebhookReceiver({}, {})

    async def serve(self, hooks: WebhookReceiver) -> None:
        """Serve deliveries for these webhooks until cancelled."""
        self.hooks = hooks
        try:
            await asyncio.Event().wait()
        finally:
            self.hooks = WebhookReceiver({}, {})


def require_server() -> None:
    """Raise ConfigError if the extra `server` is not installed."""
    for module in ("fastapi", "uvicorn"):
        require_module(module, "server", "The server")


def bind(host: str = HOST, port: int = PORT, *, beyond: bool = False) -> socket.socket:
    """Bind a port. Raises ConfigError for an address that other machines can reach, unless `beyond`."""
    if not beyond and not _is_loopback(host):
        raise ConfigError(
            f"Other machines can reach {host}, and the connection is not encrypted. Put a proxy with TLS in front of "
            "127.0.0.1, or add --beyond-this-machine."
        )
    return listen(host, port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def format_address(listener: socket.socket) -> str:
    """Return the URL of a server, for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = HOST
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class ServerExtras:
    """Options of a server: host names, webhooks, limits, and a callback for problems.

    Without `pages` it has only the API: the dashboard's library serves one server per process, once.
    """

    names: Sequence[str] = ()
    deliveries: WebhookEndpoint = field(default_factory=WebhookEndpoint)
    limits: ServerLimits = field(default_factory=ServerLimits)
    report: Callable[[str], None] = lambda _: None
    pages: bool = True
    folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """The folders of agents that can be given tasks through the API, by name."""
    by_proxy: IdentifyByProxy = lambda _, __: None
    """Identifies the person of a request, if a trusted proxy names one."""
    oidc: OidcSignOn | None = None
    """The provider that people sign on with."""


def build_server(
    app: Runtime,
    server_names: ServerNames,
    keys: Keyring,
    feed: "Feed",
    extras: ServerExtras,
    metrics: MetricTable,
    agents: AgentFolders | None = None,
) -> ServerMiddleware:
    from halter.server.api import add_hooks, make_api
    from halter.server.responses import Site

    api = make_api()
    api.state.site = Site(app, feed, agents or AgentFolders())
    logins = Logins(keys.logins_file, sign_on="" if extras.oidc is None else extras.oidc.bound_to)
    auth_state = AuthState(keys, logins, extras.limits, extras.by_proxy)
    sign_ons = SignOnLog(app.store, app.ids, app.clock)
    add_login(api, server_names, auth_state, app.clock, sign_ons, extras.oidc)
    add_hooks(api, lambda: extras.deliveries.hooks, app.clock, auth_state.tokens_tried)
    _add_rest(api)
    _add_health(api, app, metrics)

    def report(sentence: str) -> None:
        extras.report(to_one_line(sentence))

    if not extras.pages or not _mount_dashboard(api, app, feed.bus, report, agents):
        _add_plain(api)
    return ServerMiddleware(api, server_names, auth_state, app.clock, extras.limits, report, sign_ons.record_request)


def _add_rest(api: "FastAPI") -> None:
    """Add 404 for unknown API paths."""
    from starlette.exceptions import HTTPException

    async def respond_not_found(request: Request) -> None:
        if version := re.match(rf"{API}/(v\d+)(/|$)", request.url.path):
            raise NotDone(f"There is no {version[1]} of this API. Use {VERSIONED_API}.", "missing")
        raise HTTPException(404)

    for path in ("/api", "/api/{rest:path}", "/hooks/{rest:path}"):
        api.api_route(path, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"], **_ROUTE)(
            respond_not_found
        )


def _add_health(api: "FastAPI", app: Runtime, metrics: MetricTable) -> None:
    """Add the checks of liveness and of readiness, which need no token, and the metrics, which need one."""
    from starlette.responses import PlainTextResponse

    checked: tuple[int, Sequence[str]] = (-READINESS_TTL, ())
    checking = asyncio.Lock()

    async def alive() -> PlainTextResponse:
        return PlainTextResponse("halter is here\n")

    async def ready() -> PlainTextResponse:
        nonlocal checked
        async with checking:
            now = read_monotonic(app.clock)
            if now - checked[0] >= READINESS_TTL:
                checked = now, await check_readiness(app)
        problems = checked[1]
        return PlainTextResponse("\n".join((*problems, "")) if problems else "ready\n", 503 if problems else 200)

    async def render_metrics(request: Request) -> PlainTextResponse:
        principal: Principal = request.scope[WHO_KEY]
        await metrics.read_gauges(app.store)
        await metrics.has_begun.wait()
        return PlainTextResponse(metrics.render(principal.can_see), media_type=PROMETHEUS)

    api.get(HEALTH, **_ROUTE)(alive)
    api.get(READINESS, **_ROUTE)(ready)
    api.get(METRICS, **_ROUTE)(render_metrics)


def _add_plain(api: "FastAPI") -> None:
    """Add a plain page in place of the dashboard."""
    from starlette.responses import PlainTextResponse

    async def respond_plain() -> PlainTextResponse:
        return PlainTextResponse(PLAIN_PAGE)

    api.get("/", **_ROUTE)(respond_plain)


def _mount_dashboard(
    api: "FastAPI", app: Runtime, bus: Bus, report: Callable[[str], None], agents: AgentFolders | None
) -> bool:
    """Mount the dashboard, if its library is installed."""
    from importlib.util import find_spec

    if find_spec("nicegui") is None:
        return False
    from halter.dashboard.app import mount_dashboard

    mount_dashboard(api, app, bus, report, agents)
    return True


async def serve_web(
    app: Runtime, listener: socket.socket, keys: Keyring, bus: Bus, extras: ServerExtras | None = None
) -> None:
    """Serve until cancelled, on a port bound with `bind`."""
    require_server()
    from halter.server.responses import Feed

    extras = extras or ServerExtras()
    host, port = listener.getsockname()[:2]
    feed, metrics = Feed(app.store, app.clock, app.ids, bus), MetricTable(app.clock)
    folders = AgentFolders(extras.folders, lambda sentence: extras.report(to_one_line(sentence)))
    with listener:
        async with folders as agents:
            names = make_server_names(host, port, extras.names)
            middleware = build_server(app, names, keys, feed, extras, metrics, agents)
            await run_together(
                [
                    feed.run,
                    lambda: count_metrics(app, metrics, extras.report),
                    lambda: serve_asgi(middleware, listener, middleware.closing.set, extras.limits.head),
                ]
            )


PAGES: Final = Path(__file__).parent / "pages"
LOGIN_WRONG_TOKEN: Final = "Invalid token: it was removed or never existed."  # noqa: S105 It is a sentence.
HOME: Final = "/"
NO_PROVIDER: Final = "No sign-on provider is configured. Log in with a token."
SIGNED_ON_PAGE: Final = (
    f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={HOME}">'
    f'<title>Halter: logged in</title></head><body><p><a href="{HOME}">You are logged in.</a></p></body></html>'
)
"""A page, since after a redirect from the provider a browser would withhold our `SameSite=Strict` cookie."""
MAX_FORM_BYTES: Final = 1000


def make_login_url(base: str, secret: str) -> str:
    """Make the URL that logs in. The token is in the fragment, which no browser sends and no server logs."""
    return f"{base}{LOGIN}#token={secret}"


def add_login(
    api: FastAPI,
    server_names: ServerNames,
    auth_state: AuthState,
    clock: Clock,
    sign_ons: SignOnLog,
    oidc: OidcSignOn | None,
) -> None:
    """Add the login page, its files, and its routes."""
    page = (PAGES / "login.html").read_text("utf-8").replace("<!--sign-on-->", _link_to_provider(oidc))

    def render_login(problem: str, status: int, wait: int = 0) -> Response:
        headers = {"Retry-After": str(max(1, wait // SECOND))} if wait else None
        return Response(page.replace("<!--problem-->", escape(problem)), status, headers, "text/html")

    async def show() -> Response:
        return render_login("", 200)

    async def enter(request: Request) -> Response:
        now, origin, secret = clock.now(), locate_scope(request.scope), _token_in(await request.body())
        if wait := auth_state.tokens_tried.find_delay(origin, secret, now):
            return render_login(TOO_MANY_REQUESTS, 429, wait)
        token = find_token(auth_state.keys.tokens(), secret)
        if token is None:
            auth_state.tokens_tried.count_failure(origin, secret, now)
            return render_login(auth_state.keys.problem or LOGIN_WRONG_TOKEN, 401)
        auth_state.tokens_tried.right(origin, secret)
        try:
            await end(request)
            key = await auth_state.logins.start_login(token, now)
        except ConfigError as error:
            return render_login(f"Cannot log in: {error}", 503)
        auth_state.cookies_tried.right(origin, key)
        attributes = _attributes(secure=_is_by_tls(request))
        cookie = f"{server_names.cookie}={key}; Max-Age={LOGIN_LIFETIME // SECOND}; {attributes}"
        return Response(status_code=303, headers={"Location": HOME, "Set-Cookie": cookie})

    async def leave(request: Request) -> Response:
        cookie = f"{server_names.cookie}=; Max-Age=0; {_attributes(secure=_is_by_tls(request))}"
        try:
            await end(request)
        except ConfigError as error:
            problem = f"Logged out only until this server restarts, because the logout could not be saved: {error}"
            return Response(problem, 503, {"Set-Cookie": cookie}, "text/plain")
        return Response(status_code=303, headers={"Location": LOGIN, "Set-Cookie": cookie})

    async def end(request: Request) -> None:
        for key in find_cookies(request.headers.getlist("cookie"), server_names.cookie):
            await auth_state.logins.end(key, clock.now())

    options: Mapping[str, Any] = {"response_model": None, "include_in_schema": False}
    api.get(LOGIN, **options)(show)
    api.post(LOGIN, **options)(enter)
    api.post(LOGOUT, **options)(leave)
    for name, kind in (("login.js", "text/javascript"), ("login.css", "text/css"), ("icon.svg", "image/svg+xml")):
        api.get(f"{LOGIN}/{name}", **options)(_file(name, kind))
    _add_oidc(api, server_names, auth_state, clock, sign_ons, oidc, render_login)


def _add_oidc(
    api: FastAPI,
    server_names: ServerNames,
    auth_state: AuthState,
    clock: Clock,
    sign_ons: SignOnLog,
    oidc: OidcSignOn | None,
    render_login: Callable[[str, int, int], Response],
) -> None:
    """Add the routes to a provider and back; without a provider they answer 404."""
    secure = oidc is not None and oidc.is_secure
    # With this prefix, a browser accepts the cookie from this host only.
    cookie_name = f"{'__Host-' if secure else ''}{server_names.cookie}_oidc"
    attributes = _attributes(secure=secure, site="Lax")

    async def begin() -> Response:
        login = AuthRejected(404, NO_PROVIDER) if oidc is None else await oidc.start_login(clock.now())
        if isinstance(login, AuthRejected):
            return render_login(login.sentence, login.status, 0)
        cookie = f"{cookie_name}={login.key}; Max-Age={PENDING_LOGIN_LIFETIME // SECOND}; {attributes}"
        return Response(status_code=303, headers={"Location": login.location, "Set-Cookie": cookie})

    async def finish(request: Request) -> Response:
        if oidc is None:
            return render_login(NO_PROVIDER, 404, 0)
        now, origin, query = clock.now(), locate_scope(request.scope), request.scope.get("query_string", b"")
        credential = query.decode("latin-1")
        if wait := auth_state.tokens_tried.find_delay(origin, credential, now):
            return render_login(TOO_MANY_REQUESTS, 429, wait)
        verdict = await oidc.finish(find_cookies(request.headers.getlist("cookie"), cookie_name), query, now)
        if isinstance(verdict, AuthRejected):
            auth_state.tokens_tried.count_failure(origin, credential, now)
        response = await enter(verdict, origin, oidc)
        response.headers.append("Set-Cookie", f"{cookie_name}=; Max-Age=0; {attributes}")
        return response

    async def enter(verdict: Allowed | AuthRejected, origin: ClientOrigin, oidc: OidcSignOn) -> Response:
        try:
            await sign_ons.record_login(verdict, oidc.provider_name)
            if isinstance(verdict, AuthRejected):
                return render_login(verdict.sentence, verdict.status, 0)
            key = await auth_state.logins.begin_signed_on(cast("Token", verdict.token), clock.now(), oidc.lifetime)
        except (ConfigError, StoreUnavailable) as error:
            return render_login(f"Cannot log in: {error}", 503, 0)
        auth_state.cookies_tried.right(origin, key)
        cookie = f"{server_names.cookie}={key}; Max-Age={oidc.lifetime // SECOND}; {_attributes(secure=secure)}"
        return Response(SIGNED_ON_PAGE, 200, {"Set-Cookie": cookie}, "text/html")

    api.get(OIDC_LOGIN, **_ROUTE)(begin)
    api.get(OIDC_CALLBACK, **_ROUTE)(finish)


def _link_to_provider(oidc: OidcSignOn | None) -> str:
    return "" if oidc is None else f'<p><a href="{OIDC_LOGIN}">Log in with {escape(oidc.provider_name)}</a></p>'


def _file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (PAGES / name).read_bytes()

    async def read() -> Response:
        return Response(content, media_type=kind)

    return read


def _token_in(body: bytes) -> str:
    try:
        fields = parse_qsl(body[:MAX_FORM_BYTES].decode("utf-8", "replace"), max_num_fields=4)
    except ValueError:
        return ""
    return dict(fields).get("token", "").strip()


def _is_by_tls(request: Request) -> bool:
    return request.headers.get("origin", "").startswith("https:")


def _attributes(*, secure: bool, site: Literal["Strict", "Lax"] = "Strict") -> str:
    """Format the cookie's attributes: no access by scripts or other sites, and only TLS if the browser used TLS."""
    return f"Path=/; HttpOnly; SameSite={site}{'; Secure' if secure else ''}"
