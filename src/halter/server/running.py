"""Listening on an address, and serving there until told to stop. Signals are left to whoever runs it."""

import asyncio
import errno
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from halter.core.errors import ConfigError

WAITING: Final = 100
"""So many may wait to be let in."""
UNTAKEN: Final = 60_000
"""After so many milliseconds the system gives up a connection that takes nothing of what was sent."""
GRACE: Final = 2
"""For so many seconds requests that are under way may come to their end."""
LONGEST_MESSAGE: Final = 1024 * 1024
_QUIET: Final[dict[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"nowhere": {"class": "logging.NullHandler"}},
    "loggers": {"uvicorn": {"handlers": ["nowhere"], "propagate": False}},
}
"""The library's own log would put tracebacks between the lines that people read; what they must know they are told."""


def listen(host: str, port: int) -> socket.socket:
    """Take a port, any free one for 0. Raises ConfigError where that cannot be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.create_server(address[:2], family=family, backlog=WAITING)
    except OSError as error:
        raise ConfigError(_why(host, port, error)) from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN)
    return listening


def _why(host: str, port: int, error: OSError) -> str:
    where = f"Nothing can listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: another program does. Take another port with --listen, or 0 for any that is free."
    return f"{where}: {error.strerror or error}."


async def run(asgi: Any, listening: socket.socket, closing: Callable[[], None] = lambda: None) -> None:
    """Serve until cancelled; then `closing` tells those who listen, and who is being answered is answered."""
    import uvicorn

    class Quiet(uvicorn.Server):
        """Leaves signals to whoever runs it."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        asgi,
        log_config=_QUIET,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws_max_size=LONGEST_MESSAGE,
        timeout_graceful_shutdown=GRACE,
    )
    server = Quiet(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        closing()
        server.should_exit = True
        await serving
        raise
    finally:
        listening.close()
    raise ConfigError("The server could not start: look at what it said before.")
