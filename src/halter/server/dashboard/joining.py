"""Who may speak for an open page: only the browser that joined it, and only for the very person who opened it.

NiceGUI knows a page by a long random name, and takes whoever knows it for its browser. Here that is not enough: the
connection must have been let in by the door for the same person, and what it says is about the page that it joined.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import parse_qs

from nicegui import Client, core

from halter.server.entrance import WHO

SPEAKING: Final = ("event", "javascript_response", "ack")
NONSENSE: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of a message that is not of the form that a page of ours would send: it is not heard."""


def only_by_the_same() -> None:
    """Put a guard before everything that a browser says over its connection."""
    sio: Any = core.sio
    handlers: dict[str, Callable[..., Any]] = sio.handlers["/"]
    for name in SPEAKING:
        sio.on(name, _speaking(handlers[name], sio))
    sio.on("handshake", _joining(handlers["handshake"], sio))
    sio.on("connect", _connecting(handlers["connect"]))
    sio.on("log", _unheard)
    # Each other way to be connected passes by the bounds on how many may be.
    sio.eio.transports = ["websocket"]


def _unheard(*_: Any) -> None:
    """Write nothing that a browser says to where people read what the server says."""


def _speaking(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    def speak(sid: str, *said: Any) -> None:
        with suppress(*NONSENSE):
            (one,) = said
            if one.get("client_id") in sio.rooms(sid):
                inner(sid, one)

    return speak


def _joining(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    async def join(sid: str, *said: Any) -> bool:
        with suppress(*NONSENSE):
            (one,) = said
            return same(one.get("client_id"), sio.get_environ(sid)) and await inner(sid, one)
        return False

    return join


def _connecting(inner: Callable[..., Any]) -> Callable[..., Any]:
    async def connect(sid: str, environ: dict[str, Any], auth: Any = None) -> Any:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [None])[0]
        if asked is not None and not same(asked, environ):
            return False
        with suppress(*NONSENSE):
            return await inner(sid, environ, auth)
        return False

    return connect


def same(page: Any, environ: Any) -> bool:
    """Tell whether a connection was let in for the person who opened a page."""
    client = Client.instances.get(page)
    if client is None or not environ:
        return False
    who = environ.get("asgi.scope", {}).get(WHO)
    return who is not None and who == client.request.scope.get(WHO)
