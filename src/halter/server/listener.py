"""Listen on a port, and serve an application on it until cancelled."""

import asyncio
import errno
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Final

from halter.core.clock import SECOND
from halter.core.errors import ConfigError, require_module

LISTEN_BACKLOG: Final = 100
"""Connections that may wait to be accepted."""
TCP_USER_TIMEOUT_MS: Final = 60_000
"""Time after which the system drops a connection whose peer acknowledges nothing."""
SHUTDOWN_GRACE_SECONDS: Final = 2
"""Time that open requests have when the server shuts down."""
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum number of bytes of the URL and headers together."""
HEAD_TIMEOUT: Final = 10 * SECOND
"""Longest time that a connection may be open without a request."""
_QUIET: Final[dict[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"nowhere": {"class": "logging.NullHandler"}},
    "loggers": {"uvicorn": {"handlers": ["nowhere"], "propagate": False}},
}
"""Silences uvicorn's log; Halter reports problems as sentences."""


def listen(host: str, port: int) -> socket.socket:
    """Bind a port, or any free one for 0. Raises ConfigError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(_explain_bind_error(host, port, error)) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    # Connections inherit it. Without it, a body waits 40 ms for the acknowledgement of the headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _explain_bind_error(host: str, port: int, error: OSError) -> str:
    where = f"Cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use. Choose another port with --listen, or 0 for any free one."
    return f"{where}: {error.strerror or error}."


def _protocol(head: int) -> type[asyncio.Protocol]:
    """Make the HTTP protocol class; it bounds the data and the time of unauthenticated clients."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """A protocol that closes connections without a request."""

        timer: asyncio.TimerHandle | None = None

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
            self.timer = self.loop.call_later(head / SECOND, self._check_progress)

        def _stop_waiting(self) -> None:
            if self.timer is not None:
                self.timer.cancel()

        def _check_progress(self) -> None:
            # A connection that became a WebSocket is not among these.
            has_open_request = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
            if self in self.connections and not has_open_request:
                self.transport.close()

    return Impatient


async def serve_asgi(
    asgi: Any, listener: socket.socket, closing: Callable[[], None] = lambda: None, head: int = HEAD_TIMEOUT
) -> None:
    """Serve until cancelled; then call `closing` and finish open requests."""
    import uvicorn

    class Quiet(uvicorn.Server):
        """A server that leaves signals to the caller."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        asgi,
        http=_protocol(head),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=_QUIET,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
    )
    server = Quiet(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await asyncio.wait([serving])
        serving.result()
    except asyncio.CancelledError:
        closing()
        server.should_exit = True
        await serving
        raise
    finally:
        listener.close()
    raise ConfigError("The server could not start. See its output above.")


HOST: Final = "127.0.0.1"
PORT: Final = 8765


def require_server() -> None:
    """Raise ConfigError if the extra `server` is not installed."""
    for module in ("fastapi", "uvicorn"):
        require_module(module, "server", "The server")


def bind(host: str = HOST, port: int = PORT, *, beyond: bool = False) -> socket.socket:
    """Bind a port. Raises ConfigError for an address that other machines can reach, unless `beyond`."""
    if not beyond and not _is_loopback(host):
        raise ConfigError(
            f"Other machines can reach {host}, and the connection is not encrypted. Put a proxy with TLS in front of "
            "127.0.0.1, or add --beyond-this-machine."
        )
    return listen(host, port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def format_address(listener: socket.socket) -> str:
    """Return the URL of a server, for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = HOST
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
