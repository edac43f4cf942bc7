"""The whole server put together: API, streams, webhooks, login and the dashboard, behind one door."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from halter.app import App
from halter.app.bus import Bus
from halter.app.desk.agents import AgentFolders
from halter.app.hooks import Hooks
from halter.brain.together import together
from halter.core.errors import ConfigError, needs
from halter.core.text import one_line
from halter.server.auth import Door, door_of
from halter.server.entrance import Checks, Entrance
from halter.server.limits import Limits
from halter.server.logins import Logins
from halter.server.running import listen, run
from halter.server.tokens import Keyring

if TYPE_CHECKING:
    from fastapi import FastAPI

    from halter.server.feed import Feed

HOST: Final = "127.0.0.1"
PORT: Final = 8765
PLAIN: Final = "Halter is here. Its API is at /api, described in /api/openapi.json; there is no dashboard here."
_ROUTE: Final[Mapping[str, Any]] = {"response_model": None, "include_in_schema": False}


class Deliveries:
    """The webhooks of the agents that run in this process, once there are any."""

    def __init__(self) -> None:
        self.hooks = Hooks({}, {})

    async def serve(self, hooks: Hooks) -> None:
        """Take deliveries for these from now on, until cancelled."""
        self.hooks = hooks
        try:
            await asyncio.Event().wait()
        finally:
            self.hooks = Hooks({}, {})


def demand_server() -> None:
    """Say what is missing where the extra is not installed."""
    try:
        import fastapi
        import uvicorn
    except ImportError:
        raise ConfigError(needs("server")) from None
    del fastapi, uvicorn


def bind(host: str = HOST, port: int = PORT, *, beyond: bool = False) -> socket.socket:
    """Take a port. Who wants to be reached from other machines has to say so. Raises ConfigError."""
    if not beyond and not _stays_here(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and what goes over the wire there is not encrypted: put a "
            "proxy with TLS in front of 127.0.0.1, or add --beyond-this-machine."
        )
    return listen(host, port)


def _stays_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def address(listening: socket.socket) -> str:
    """Write where a server is found, for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = HOST
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _unheard(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What is not said of every server: names it goes by, webhooks, other limits, and who is told what breaks.

    Without `pages` there is only the API: the dashboard's library serves one server in a process, and once.
    """

    names: Sequence[str] = ()
    deliveries: Deliveries = field(default_factory=Deliveries)
    limits: Limits = field(default_factory=Limits)
    tell: Callable[[str], None] = _unheard
    pages: bool = True
    folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """The folders of agents that can be given something to do through the API, by name."""


def web(
    app: App, door: Door, keys: Keyring, feed: "Feed", extras: Extras, agents: AgentFolders | None = None
) -> Entrance:
    """Put it together: all that can be asked for, behind the one door."""
    from halter.server.answers import Site
    from halter.server.api import new_api
    from halter.server.hooks import add_hooks
    from halter.server.login import add_login

    api = new_api()
    api.state.site = Site(app, feed, agents or AgentFolders())
    checks = Checks(keys, Logins(keys.logins_file), extras.limits)
    add_login(api, door, checks, app.clock)
    add_hooks(api, lambda: extras.deliveries.hooks, app.clock, checks.tokens_tried)
    _add_rest(api)

    def tell(sentence: str) -> None:
        extras.tell(one_line(sentence))

    if not extras.pages or not _mount_dashboard(api, app, feed.bus, tell):
        _add_plain(api)
    return Entrance(api, door, checks, app.clock, extras.limits, tell)


def _add_rest(api: "FastAPI") -> None:
    """Add the sign of life, and an end to what is the API's."""
    from starlette.exceptions import HTTPException
    from starlette.responses import PlainTextResponse

    async def alive() -> PlainTextResponse:
        return PlainTextResponse("halter is here\n")

    async def nothing() -> None:
        raise HTTPException(404)

    api.get("/healthz", **_ROUTE)(alive)
    for path in ("/api", "/api/{rest:path}", "/hooks/{rest:path}"):
        api.api_route(path, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"], **_ROUTE)(nothing)


def _add_plain(api: "FastAPI") -> None:
    """Say what is here, where there are no pages."""
    from starlette.responses import PlainTextResponse

    async def plain() -> PlainTextResponse:
        return PlainTextResponse(PLAIN)

    api.get("/", **_ROUTE)(plain)


def _mount_dashboard(api: "FastAPI", app: App, bus: Bus, tell: Callable[[str], None]) -> bool:
    """Put the pages in their place, if they are there."""
    from importlib.util import find_spec

    if find_spec("nicegui") is None or find_spec("halter.server.dashboard") is None:
        return False
    from halter.server.dashboard.mounted import mount

    mount(api, app, bus, tell)
    return True


async def serve_web(app: App, listening: socket.socket, keys: Keyring, bus: Bus, extras: Extras | None = None) -> None:
    """Serve until cancelled, on a port that was taken with `bind`."""
    demand_server()
    from halter.server.feed import Feed

    extras = extras or Extras()
    host, port = listening.getsockname()[:2]
    feed = Feed(app.store, app.clock, app.ids, bus)
    telling = AgentFolders(extras.folders, lambda sentence: extras.tell(one_line(sentence)))
    with listening:
        async with telling as agents:
            entrance = web(app, door_of(host, port, extras.names), keys, feed, extras, agents)
            await together([feed.run, lambda: run(entrance, listening, entrance.closing.set, extras.limits.head)])
