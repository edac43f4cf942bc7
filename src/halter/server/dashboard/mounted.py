"""The dashboard in its place: the pages, under the same roof as the API, and who may join an open one."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from nicegui import Client, core, ui

from halter.app import App
from halter.app.bus import Bus
from halter.core.errors import HalterError, NotDone
from halter.server.dashboard import joining
from halter.server.dashboard.audit import audit
from halter.server.dashboard.budgets import budgets
from halter.server.dashboard.downloads import downloads
from halter.server.dashboard.findings import findings
from halter.server.dashboard.fleet import fleet
from halter.server.dashboard.frame import framed
from halter.server.dashboard.home import home
from halter.server.dashboard.legible import one_line
from halter.server.dashboard.live import Live
from halter.server.dashboard.overheard import overhear
from halter.server.dashboard.parts import words
from halter.server.dashboard.receipt import receipt
from halter.server.dashboard.room import Refresh, Room
from halter.server.dashboard.session import session
from halter.server.dashboard.sessions import sessions
from halter.server.dashboard.theme import BEFORE, style
from halter.server.dashboard.triggers import triggers
from halter.server.entrance import WHO
from halter.server.login import PAGES

ATTENTION: Final = 15.0
"""So many seconds a browser may be away before what it had open is let go of."""

Shows = Callable[..., Awaitable[Refresh]]


def mount(api: FastAPI, app: App, bus: Bus, tell: Callable[[str], None] = lambda _: None) -> Live:
    """Put the dashboard under `/`. Whoever comes here was let in by the door, which left a `Who` in the scope.

    What is returned listens to the bus for as long as a page is open. What breaks is told to whoever runs the server.
    """
    overhear(tell)
    live = Live(bus, app.clock)
    downloads(api, app)
    for path, title, here, shows in (
        ("/", "Home", "/", home),
        ("/fleet", "Fleet", "/fleet", fleet),
        ("/sessions", "Sessions", "/sessions", sessions),
        ("/session/{name}", "", "/sessions", session),
        ("/receipt/{name}", "Receipt of ", "/sessions", receipt),
        ("/audit", "Audit", "/audit", audit),
        ("/budgets", "Budgets", "/budgets", budgets),
        ("/triggers", "Triggers", "/triggers", triggers),
        ("/findings", "Findings", "/findings", findings),
    ):
        _page(path, title, here, shows, app, live)
    _run(api)
    return live


def _page(path: str, title: str, here: str, shows: Shows, app: App, live: Live) -> None:
    async def shown(request: Request, client: Client) -> None:
        name = request.path_params.get("name")
        room = Room(app, request.scope[WHO], live, client)
        whole = title if name is None else one_line(f"{title}{name}", 80)
        ui.page_title(f"{whole} · Halter")
        build = shows if name is None else partial(_named, shows, name)
        try:
            await framed(room, whole, here, build)
        except HalterError as error:
            client.status_code = 404 if isinstance(error, NotDone) and error.why == "missing" else 409
            words(str(error), "h-bad h-text h-card")

    ui.page(path, response_timeout=30)(shown)


async def _named(shows: Shows, name: str, room: Room) -> Refresh:
    return await shows(room, name)


def _begin_anew() -> None:
    """Forget what was put around the pages before: there is one NiceGUI in a process, and it may be served again."""
    pages: Any = core.app
    pages.user_middleware.clear()
    pages.middleware_stack = None


def _run(api: FastAPI) -> None:
    config: Any = core.app.config
    if BEFORE not in config.vue_config_script:
        config.vue_config_script += BEFORE
        ui.add_css(style(), shared=True)
        joining.only_by_the_same()
    config.socket_io_js_transports = ["websocket"]
    _begin_anew()
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
        reconnect_timeout=ATTENTION,
        show_welcome_message=False,
    )
