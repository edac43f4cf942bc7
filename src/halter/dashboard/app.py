"""Mounts the dashboard next to the API, and guards its WebSocket.

NiceGUI identifies a page by a random id and trusts every client that knows it. Halter also requires that the connection
was authorized for the person who opened the page, and lets it act only on the page that it joined.

Log records of the dashboard's libraries may contain text from a browser. Each is reported as one sentence, without a
traceback.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from nicegui import Client, core, ui

from halter.core.errors import HalterError, NotDone, StoreError
from halter.dashboard.agent import build_agent_page
from halter.dashboard.budgets_audit import add_downloads, build_audit_page, build_budgets_page
from halter.dashboard.fleet import build_findings_page, build_fleet_page, build_triggers_page
from halter.dashboard.home import build_decision_page, build_home_page
from halter.dashboard.icons import MANIFEST_PATH, TOUCH_ICON_PATH, make_manifest
from halter.dashboard.page import HEAD, THEME_SCRIPT, LiveFeed, OpenPage, RefreshPage, build_frame, read_style_sheet
from halter.dashboard.session import build_receipt_page, build_session_page
from halter.dashboard.sessions import build_sessions_page
from halter.dashboard.widgets import add_box, add_icon, add_link, add_text, make_single_line
from halter.operations.agent_folders import AgentFolders
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.server.login import PAGES
from halter.server.middleware import WHO_KEY

CLIENT_EVENTS: Final = ("event", "javascript_response", "ack")
MALFORMED_ERRORS: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a malformed message, which is dropped."""


def guard_sockets() -> None:
    """Guard every event that a browser sends over its connection."""
    sio: Any = core.sio
    handlers: dict[str, Callable[..., Any]] = sio.handlers["/"]
    for name in CLIENT_EVENTS:
        sio.on(name, _guard_event(handlers[name], sio))
    sio.on("handshake", _guard_join(handlers["handshake"], sio))
    sio.on("connect", _guard_connect(handlers["connect"]))
    sio.on("log", _discard_log)
    # Other transports would bypass the limit on open streams.
    sio.eio.transports = ["websocket"]


def _discard_log(*_: Any) -> None:
    """Keep a browser's text out of the terminal."""


def _guard_event(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    def handle(sid: str, *arguments: Any) -> None:
        with suppress(*MALFORMED_ERRORS):
            (message,) = arguments
            if message.get("client_id") in sio.rooms(sid):
                inner(sid, message)

    return handle


def _guard_join(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    async def join(sid: str, *arguments: Any) -> bool:
        with suppress(*MALFORMED_ERRORS):
            (message,) = arguments
            return is_same_person(message.get("client_id"), sio.get_environ(sid)) and await inner(sid, message)
        return False

    return join


def _guard_connect(inner: Callable[..., Any]) -> Callable[..., Any]:
    async def connect(sid: str, environ: dict[str, Any], auth: Any = None) -> Any:
        client_id = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [None])[0]
        if client_id is not None and not is_same_person(client_id, environ):
            return False
        with suppress(*MALFORMED_ERRORS):
            return await inner(sid, environ, auth)
        return False

    return connect


def is_same_person(client_id: Any, environ: Any) -> bool:
    """Return True if a connection was authorized for the person who opened a page."""
    client = Client.instances.get(client_id)
    if client is None or not environ:
        return False
    principal = environ.get("asgi.scope", {}).get(WHO_KEY)
    return principal is not None and principal == client.request.scope.get(WHO_KEY)


PAGES_LOGGER: Final = "nicegui"
WIRE_LOGGERS: Final = ("engineio.server", "socketio.server")
"""Loggers of errors that a browser's message causes; they are discarded."""


class LogCapture(logging.Handler):
    """Handler that reports errors. Warnings concern a browser's request, which already has its response."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_line = report

    def emit(self, record: logging.LogRecord) -> None:
        """Report the kind of an error."""
        error = record.exc_info[1] if record.exc_info else None
        kind = f"{type(error).__name__}: " if error is not None else ""
        self._on_line(f"Page failed: {kind}{record.getMessage()}")


def capture_logs(report: Callable[[str], None]) -> None:
    """Report errors of the dashboard's libraries instead of writing them to the terminal."""
    _set_only_handler(PAGES_LOGGER, LogCapture(report))
    for name in WIRE_LOGGERS:
        _set_only_handler(name, logging.NullHandler())


def _set_only_handler(name: str, handler: logging.Handler) -> None:
    log = logging.getLogger(name)
    log.handlers[:] = [handler]
    log.propagate = False


RECONNECT_TIMEOUT_SECONDS: Final = 15.0
"""Time after which the page of a disconnected browser is closed."""

AnyPageBuilder = Callable[..., Awaitable[RefreshPage]]


def mount_dashboard(
    api: FastAPI,
    app: Runtime,
    bus: Bus,
    report: Callable[[str], None] = lambda _: None,
    agents: AgentFolders | None = None,
) -> LiveFeed:
    """Mount the dashboard at `/`, behind the middleware, which puts the `Principal` into the scope.

    The returned feed listens to the bus while a page is open. Failures go to `report`. Sessions can be started for
    the agents in `agents`, whose folders the server has.
    """
    capture_logs(report)
    live = LiveFeed(bus, app.clock)
    make_page = partial(OpenPage, app, live=live, agents=agents)
    pages: Any = core.app
    pages.remove_route(ANY_PATH)
    add_downloads(api, app)
    _add_files(api)
    for path, title, current_path, builder in (
        ("/", "Home", "/", build_home_page),
        ("/fleet", "Fleet", "/fleet", build_fleet_page),
        ("/agent/{name}", "", "/fleet", build_agent_page),
        ("/sessions", "Sessions", "/sessions", build_sessions_page),
        ("/session/{name}", "", "/sessions", build_session_page),
        ("/decision/{name:path}", "Decision ", "/", build_decision_page),
        ("/receipt/{name}", "Receipt of ", "/sessions", build_receipt_page),
        ("/audit", "Audit", "/audit", build_audit_page),
        ("/budgets", "Budgets", "/budgets", build_budgets_page),
        ("/triggers", "Triggers", "/triggers", build_triggers_page),
        ("/findings", "Findings", "/findings", build_findings_page),
    ):
        _page(path, title, current_path, builder, make_page)
    _run(api)
    # Registered last: it answers every address that no other route matches.
    _page(ANY_PATH, "Not found", "", build_unknown_page, make_page)
    return live


ANY_PATH: Final = "/{rest:path}"


async def build_unknown_page(_: OpenPage) -> RefreshPage:
    """Reject an unknown address; the frame around the message has the navigation."""
    raise NotDone("No page at this address. Check the spelling; the address may belong to another version.", "missing")


def _page(
    path: str, title: str, current_path: str, builder: AnyPageBuilder, make_page: Callable[..., OpenPage]
) -> None:
    async def render(request: Request, client: Client) -> None:
        name = request.path_params.get("name")
        page = make_page(principal=request.scope[WHO_KEY], client=client)
        full_title = title if name is None else make_single_line(f"{title}{name}", 80)
        ui.page_title(f"{full_title} · Halter")
        build = builder if name is None else partial(_build_named_page, builder, name)
        try:
            await build_frame(page, full_title, current_path, build)
        except HalterError as error:
            client.status_code = find_status(error)
            ui.page_title(f"{name_problem(error)} · Halter")
            build_problem(error, request.url.path)

    ui.page(path, response_timeout=30)(render)


def find_status(error: HalterError) -> int:
    if isinstance(error, StoreError):
        return 503
    return 404 if isinstance(error, NotDone) and error.why == "missing" else 409


def name_problem(error: HalterError) -> str:
    return {503: "Store unavailable", 404: "Not found"}.get(find_status(error), "Cannot show this page")


def build_problem(error: HalterError, path: str) -> None:
    """Show why a page cannot be shown, with links to other pages."""
    is_unavailable = isinstance(error, StoreError)
    with add_box("div", "h-body"), add_box("div", "h-blank h-card", role="alert"):
        add_icon("alert" if is_unavailable else "search")
        add_text(name_problem(error), "h-title")
        add_text(str(error), "h-text h-dim")
        if is_unavailable:
            add_text("Agents wait until the store is available. Nothing is lost.", "h-text")
        else:
            add_text(path, "h-text h-mono h-small")
        with add_box("div", "h-row"):
            if is_unavailable:
                add_link("Retry", path, "h-link h-way")
            for name, to in (("Home", "/"), ("Fleet", "/fleet"), ("Sessions", "/sessions"), ("Audit", "/audit")):
                add_link(name, to, "h-link h-way")


def _add_files(api: FastAPI) -> None:
    """Add the manifest and the icons."""
    touch = Path(__file__).with_name("touch-icon.png").read_bytes()
    logo = (PAGES / "icon.svg").read_bytes()

    async def manifest() -> Response:
        return JSONResponse(make_manifest(), media_type="application/manifest+json")

    async def icon() -> Response:
        return Response(touch, media_type="image/png")

    async def favicon() -> Response:
        return Response(logo, media_type="image/svg+xml")

    api.get("/favicon.ico", include_in_schema=False, response_model=None)(favicon)
    api.get(MANIFEST_PATH, include_in_schema=False, response_model=None)(manifest)
    api.get(TOUCH_ICON_PATH, include_in_schema=False, response_model=None)(icon)


async def _build_named_page(builder: AnyPageBuilder, name: str, page: OpenPage) -> RefreshPage:
    return await builder(page, name)


def _reset_nicegui() -> None:
    """Reset NiceGUI, a singleton of the process, so that it can be served again."""
    pages: Any = core.app
    pages.user_middleware.clear()
    pages.middleware_stack = None


def _run(api: FastAPI) -> None:
    config: Any = core.app.config
    if THEME_SCRIPT not in config.vue_config_script:
        config.vue_config_script += THEME_SCRIPT
        ui.add_css(read_style_sheet(), shared=True)
        ui.add_head_html(HEAD, shared=True)
        guard_sockets()
    config.socket_io_js_transports = ["websocket"]
    _reset_nicegui()
    nicegui: Any = ui
    nicegui.run_with(
        api,
        mount_path="/",
        title="Halter",
        favicon=PAGES / "icon.svg",
        dark=None,
        language="en-US",
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_TIMEOUT_SECONDS,
        show_welcome_message=False,
    )
