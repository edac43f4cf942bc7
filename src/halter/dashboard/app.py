"""Mounts the dashboard beside the API, and guards its WebSocket.

NiceGUI identifies a page by a random id and trusts every client that knows it. Here the connection must also have been
authorized for the same person who opened the page, and may only act on the page that it joined.

What the dashboard's libraries log may contain text of a browser. It is reported in one sentence, without a traceback.
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
from halter.dashboard.fleet import build_findings_page, build_fleet_page, build_triggers_page
from halter.dashboard.home import build_decision_page, build_home_page
from halter.dashboard.icons import MANIFEST_PATH, TOUCH_ICON_PATH, make_manifest
from halter.dashboard.page import HEAD, THEME_SCRIPT, LiveFeed, OpenPage, RefreshPage, build_frame, read_style_sheet
from halter.dashboard.parts import add_box, add_icon, add_link, add_text, make_single_line
from halter.dashboard.records import add_downloads, build_audit_page, build_budgets_page
from halter.dashboard.session import build_receipt_page, build_session_page
from halter.dashboard.sessions import build_sessions_page
from halter.operations.agents import AgentFolders
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.server.middleware import WHO_KEY
from halter.server.server import PAGES

CLIENT_EVENTS: Final = ("event", "javascript_response", "ack")
MALFORMED_ERRORS: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a malformed message, which is dropped."""


def guard_sockets() -> None:
    """Guards every event that a browser sends over its connection."""
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
    """Keeps a browser's text out of the terminal."""


def _guard_event(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    def speak(sid: str, *said: Any) -> None:
        with suppress(*MALFORMED_ERRORS):
            (one,) = said
            if one.get("client_id") in sio.rooms(sid):
                inner(sid, one)

    return speak


def _guard_join(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    async def join(sid: str, *said: Any) -> bool:
        with suppress(*MALFORMED_ERRORS):
            (one,) = said
            return is_same_person(one.get("client_id"), sio.get_environ(sid)) and await inner(sid, one)
        return False

    return join


def _guard_connect(inner: Callable[..., Any]) -> Callable[..., Any]:
    async def connect(sid: str, environ: dict[str, Any], auth: Any = None) -> Any:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [None])[0]
        if asked is not None and not is_same_person(asked, environ):
            return False
        with suppress(*MALFORMED_ERRORS):
            return await inner(sid, environ, auth)
        return False

    return connect


def is_same_person(page: Any, environ: Any) -> bool:
    """Whether a connection was authorized for the person who opened a page."""
    client = Client.instances.get(page)
    if client is None or not environ:
        return False
    who = environ.get("asgi.scope", {}).get(WHO_KEY)
    return who is not None and who == client.request.scope.get(WHO_KEY)


PAGES_LOGGER: Final = "nicegui"
WIRE_LOGGERS: Final = ("engineio.server", "socketio.server")
"""Errors there come from what a browser sent."""


class LogCapture(logging.Handler):
    """Reports errors. Warnings are about a browser's request, which has its answer."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_line = report

    def emit(self, record: logging.LogRecord) -> None:
        """Reports the kind of an error."""
        error = record.exc_info[1] if record.exc_info else None
        kind = f"{type(error).__name__}: " if error is not None else ""
        self._on_line(f"A page broke: {kind}{record.getMessage()}")


def capture_logs(report: Callable[[str], None]) -> None:
    """Captures what is logged, instead of writing it to the terminal."""
    _set_only_handler(PAGES_LOGGER, LogCapture(report))
    for name in WIRE_LOGGERS:
        _set_only_handler(name, logging.NullHandler())


def _set_only_handler(name: str, handler: logging.Handler) -> None:
    log = logging.getLogger(name)
    log.handlers[:] = [handler]
    log.propagate = False


RECONNECT_TIMEOUT_SECONDS: Final = 15.0
"""How long a browser may be away before its page is closed."""

AnyPageBuilder = Callable[..., Awaitable[RefreshPage]]


def mount_dashboard(
    api: FastAPI,
    app: Runtime,
    bus: Bus,
    report: Callable[[str], None] = lambda _: None,
    agents: AgentFolders | None = None,
) -> LiveFeed:
    """Mounts the dashboard at `/`, behind the middleware, which put a `Who` into the scope.

    The returned feed listens to the bus while a page is open. Failures are reported to `tell`. Sessions can be begun
    with `agents`, whose folders are at hand.
    """
    capture_logs(report)
    live = LiveFeed(bus, app.clock)
    opens = partial(OpenPage, app, live=live, agents=agents)
    pages: Any = core.app
    pages.remove_route(ANY_PATH)
    add_downloads(api, app)
    _add_files(api)
    for path, title, here, shows in (
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
        _page(path, title, here, shows, opens)
    _run(api)
    # The last of all: it answers what nothing else does.
    _page(ANY_PATH, "Not found", "", build_unknown_page, opens)
    return live


ANY_PATH: Final = "/{rest:path}"


async def build_unknown_page(_: OpenPage) -> RefreshPage:
    """Says that an address leads nowhere; the frame around it leads on."""
    raise NotDone(
        "There is no page at this address. It may have been mistyped, or come from another version.", "missing"
    )


def _page(path: str, title: str, here: str, shows: AnyPageBuilder, opens: Callable[..., OpenPage]) -> None:
    async def render(request: Request, client: Client) -> None:
        name = request.path_params.get("name")
        page = opens(who=request.scope[WHO_KEY], client=client)
        whole = title if name is None else make_single_line(f"{title}{name}", 80)
        ui.page_title(f"{whole} · Halter")
        build = shows if name is None else partial(_build_named_page, shows, name)
        try:
            await build_frame(page, whole, here, build)
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
    return {503: "The store is away", 404: "Not found"}.get(find_status(error), "This cannot be shown")


def build_problem(error: HalterError, path: str) -> None:
    """Shows why there is nothing to show, and where to go on."""
    away = isinstance(error, StoreError)
    with add_box("div", "h-body"), add_box("div", "h-blank h-card", role="alert"):
        add_icon("alert" if away else "search")
        add_text(name_problem(error), "h-title")
        add_text(str(error), "h-text h-dim")
        if away:
            add_text("Agents wait until it is back, and nothing is lost.", "h-text")
        else:
            add_text(path, "h-text h-mono h-small")
        with add_box("div", "h-row"):
            if away:
                add_link("Try again", path, "h-link h-way")
            for name, to in (("Home", "/"), ("Fleet", "/fleet"), ("Sessions", "/sessions"), ("Audit", "/audit")):
                add_link(name, to, "h-link h-way")


def _add_files(api: FastAPI) -> None:
    """Adds what a phone reads that installs the dashboard, and the icon that browsers ask for."""
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


async def _build_named_page(shows: AnyPageBuilder, name: str, page: OpenPage) -> RefreshPage:
    return await shows(page, name)


def _reset_nicegui() -> None:
    """Resets NiceGUI: there is one in a process, and it may be served again."""
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
