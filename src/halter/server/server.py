"""The whole server: API, streams, webhooks, login and dashboard behind one middleware."""

import asyncio
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from halter.core.clock import SECOND, read_monotonic
from halter.core.errors import NotDone
from halter.core.text import to_one_line
from halter.loop.concurrency import run_together
from halter.operations.actor import Principal
from halter.operations.agent_folders import AgentFolders
from halter.operations.doctor.store import check_readiness
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.runtime.telemetry.metrics import MetricTable
from halter.runtime.telemetry.tracer import count_metrics
from halter.runtime.webhooks import WebhookReceiver
from halter.server.api import add_hooks, make_api
from halter.server.auth import (
    API,
    HEALTH,
    METRICS,
    READINESS,
    VERSIONED_API,
    IdentifyByProxy,
    Keyring,
    Logins,
    ServerNames,
    make_server_names,
)
from halter.server.listener import require_server, serve_asgi
from halter.server.login import add_login
from halter.server.middleware import WHO_KEY, AuthState, ServerLimits, ServerMiddleware
from halter.server.oidc import OidcSignOn
from halter.server.responses import HIDDEN_ROUTE, Feed, Site
from halter.server.sign_on import SignOnLog

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
READINESS_TTL: Final = SECOND
"""How long a readiness check is reused: anyone may ask, and each check reads the store."""
PLAIN_PAGE: Final = (
    f"Halter is running. Its API is at {VERSIONED_API}, described in {VERSIONED_API}/openapi.json. "
    "The dashboard is not installed."
)


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
    feed: Feed,
    extras: ServerExtras,
    metrics: MetricTable,
    agents: AgentFolders | None = None,
) -> ServerMiddleware:
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


def _add_rest(api: FastAPI) -> None:
    """Add 404 for unknown API paths."""

    async def respond_not_found(request: Request) -> None:
        if version := re.match(rf"{API}/(v\d+)(/|$)", request.url.path):
            raise NotDone(f"There is no {version[1]} of this API. Use {VERSIONED_API}.", "missing")
        raise HTTPException(404)

    for path in ("/api", "/api/{rest:path}", "/hooks/{rest:path}"):
        api.api_route(path, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"], **HIDDEN_ROUTE)(
            respond_not_found
        )


def _add_health(api: FastAPI, app: Runtime, metrics: MetricTable) -> None:
    """Add the checks of liveness and of readiness, which need no token, and the metrics, which need one."""
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

    api.get(HEALTH, **HIDDEN_ROUTE)(alive)
    api.get(READINESS, **HIDDEN_ROUTE)(ready)
    api.get(METRICS, **HIDDEN_ROUTE)(render_metrics)


def _add_plain(api: FastAPI) -> None:
    """Add a plain page in place of the dashboard."""

    async def respond_plain() -> PlainTextResponse:
        return PlainTextResponse(PLAIN_PAGE)

    api.get("/", **HIDDEN_ROUTE)(respond_plain)


def _mount_dashboard(
    api: FastAPI, app: Runtime, bus: Bus, report: Callable[[str], None], agents: AgentFolders | None
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
                    lambda: count_metrics(app.patient(), app.clock, metrics, extras.report),
                    lambda: serve_asgi(middleware, listener, middleware.closing.set, extras.limits.head),
                ]
            )
