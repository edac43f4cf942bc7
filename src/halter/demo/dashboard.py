"""The dashboard of the demo: on the first free port of this machine, for whoever has the token of this one start."""

import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from halter.app.bus import Bus
from halter.app.opened import App
from halter.core.errors import ConfigError
from halter.server.tokens import Keyring, name_for, new_secret, token_of
from halter.server.web import HOST, PORT, Extras, address, bind, demand_server, serve_web

TRIED: Final = 20
"""So many ports are tried in order; then any free one is taken."""


class Dashboard(msgspec.Struct, frozen=True):
    """A dashboard that can be served: the address that logs its owner in, and what there is to say of it."""

    url: str
    told: str
    serve: Callable[[], Coroutine[Any, Any, None]]


def dashboard(app: App, bus: Bus, tell: Callable[[str], None], first: int = PORT) -> Dashboard:
    """Take a port, and make a token that is kept nowhere. Raises ConfigError where the server is not installed."""
    demand_server()
    from halter.server.login import login_url

    listening = taken(first)
    port = listening.getsockname()[1]
    secret = new_secret()
    keys = Keyring(extra=[token_of(secret, name_for(app.settings.person), "admin", app.clock.now())])
    elsewhere = f"Port {first} is in use, so the dashboard is at port {port}. " if port != first else ""
    return Dashboard(
        login_url(address(listening), secret),
        f"{elsewhere}Open the dashboard with this address, which is good until the demo ends:",
        lambda: serve_web(app, listening, keys, bus, Extras(tell=tell)),
    )


def taken(first: int) -> socket.socket:
    """Take the first port that is free, from this one on."""
    for port in range(first, first + TRIED):
        try:
            return bind(HOST, port)
        except ConfigError:
            continue
    return bind(HOST, 0)


def has_display(environ: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Tell whether a browser could show itself here."""
    return platform == "darwin" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
