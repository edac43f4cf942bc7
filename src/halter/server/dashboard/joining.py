"""Who may speak for an open page: only the browser that joined it, and only for the very person who opened it.

NiceGUI knows a page by a long random name, and takes whoever knows it for its browser. Here that is not enough: the
connection must have been let in by the door for the same person, and what it says is about the page that it joined.
"""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs

from nicegui import Client, core

from halter.server.entrance import WHO

SPEAKING: Final = ("event", "javascript_response", "ack", "log")


def only_by_the_same() -> None:
    """Put a guard before everything that a browser says over its connection."""
    sio: Any = core.sio
    handlers: dict[str, Callable[..., Any]] = sio.handlers["/"]
    for name in SPEAKING:
        sio.on(name, _speaking(handlers[name], sio))
    sio.on("handshake", _joining(handlers["handshake"], sio))
    sio.on("connect", _connecting(handlers["connect"]))


def _speaking(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    def speak(sid: str, said: dict[str, Any]) -> Any:
        return inner(sid, said) if said.get("client_id") in sio.rooms(sid) else None

    return speak


def _joining(inner: Callable[..., Any], sio: Any) -> Callable[..., Any]:
    async def join(sid: str, said: dict[str, Any]) -> bool:
        return same(said.get("client_id"), sio.get_environ(sid)) and await inner(sid, said)

    return join


def _connecting(inner: Callable[..., Any]) -> Callable[..., Any]:
    async def connect(sid: str, environ: dict[str, Any], auth: Any = None) -> Any:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [None])[0]
        if asked is not None and not same(asked, environ):
            return False
        return await inner(sid, environ, auth)

    return connect


def same(page: Any, environ: Any) -> bool:
    """Tell whether a connection was let in for the person who opened a page."""
    client = Client.instances.get(page)
    if client is None or not environ:
        return False
    who = environ.get("asgi.scope", {}).get(WHO)
    return who is not None and who == client.request.scope.get(WHO)
