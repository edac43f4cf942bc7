"""Listening on an address, and serving there until told to stop. Signals are left to whoever runs it."""

import asyncio
import errno
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from halter.core.clock import SECOND
from halter.core.errors import ConfigError

WAITING: Final = 100
"""So many may wait to be let in."""
UNTAKEN: Final = 60_000
"""After so many milliseconds the system gives up a connection that takes nothing of what was sent."""
GRACE: Final = 2
"""For so many seconds requests that are under way may come to their end."""
LONGEST_MESSAGE: Final = 1024 * 1024
LONGEST_HEAD: Final = 64 * 1024
"""So many bytes an address and the headers may have together."""
HEAD: Final = 10 * SECOND
"""So long somebody may be connected without having asked for anything."""
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


def _protocol(head: int) -> type[asyncio.Protocol]:
    """Make what speaks HTTP, to people who have no token yet: of what they send, little is kept, and not for long."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """Lets go of who is connected, and asks for nothing."""

        late: asyncio.TimerHandle | None = None

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
            self.late = self.loop.call_later(head / SECOND, self._look)

        def _stop_waiting(self) -> None:
            if self.late is not None:
                self.late.cancel()

        def _look(self) -> None:
            # A connection that became a WebSocket is none of these any more.
            asks = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
            if self in self.connections and not asks:
                self.transport.close()

    return Impatient


async def run(
    asgi: Any, listening: socket.socket, closing: Callable[[], None] = lambda: None, head: int = HEAD
) -> None:
    """Serve until cancelled; then `closing` tells those who listen, and who is being answered is answered."""
    import uvicorn

    class Quiet(uvicorn.Server):
        """Leaves signals to whoever runs it."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        asgi,
        http=_protocol(head),
        h11_max_incomplete_event_size=LONGEST_HEAD,
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
