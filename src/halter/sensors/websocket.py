"""Messages of a WebSocket, as text."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from halter.core.clock import SECOND
from halter.core.sensing import LARGEST_READING, SensorFailed
from halter.sensors.values import too_large

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed

_TOO_BIG: Final = 1009


async def messages(url: str, headers: Mapping[str, str], patience: int) -> AsyncGenerator[str]:
    """Listen until the other side closes in good order. Raises SensorFailed.

    The patience is for the beginning, and for each of the pings by which a silent connection is known to be alive.
    """
    from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

    async with _connected(url, headers, patience / SECOND) as connection:
        while True:
            try:
                message = await connection.recv()
            except ConnectionClosedOK:
                return
            except ConnectionClosed as error:
                raise SensorFailed(_closed(error)) from None
            if isinstance(message, bytes):
                raise SensorFailed(f"The stream sent {len(message):,} bytes that are no text: only text can be read.")
            yield message


def _closed(error: "ConnectionClosed") -> str:
    """Say why a connection was lost: we ended it ourselves if something too large was on its way."""
    ours, theirs = error.sent, error.rcvd
    if ours and ours.code == _TOO_BIG:
        return too_large("A message of the stream")
    if theirs:
        return f"The stream was closed by the other side with code {theirs.code}."
    if ours:
        return f"The stream was ended: {ours.reason or f'code {ours.code}'}."
    return "The connection of the stream was lost."


@asynccontextmanager
async def _connected(url: str, headers: Mapping[str, str], seconds: float) -> "AsyncGenerator[ClientConnection]":
    connection = await _opened(url, headers, seconds)
    try:
        yield connection
    finally:
        await connection.close()


async def _opened(url: str, headers: Mapping[str, str], seconds: float) -> "ClientConnection":
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

    class Straight(connect):
        """Follows no redirect: the headers are meant for one place."""

        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    limits: dict[str, Any] = {"max_size": LARGEST_READING, "compression": None, "proxy": None}
    times: dict[str, Any] = {
        "open_timeout": seconds,
        "ping_interval": seconds,
        "ping_timeout": seconds,
        "close_timeout": 1,
    }
    try:
        return await Straight(url, additional_headers=headers, **limits, **times)
    except TimeoutError:
        raise SensorFailed(f"The stream did not begin within {seconds:g} s.") from None
    except InvalidStatus as error:
        raise SensorFailed(f"The stream was refused with {error.response.status_code}.") from None
    except InvalidURI:
        raise SensorFailed("The address is none of a WebSocket: it must begin with wss:// or ws://.") from None
    except OSError as error:
        raise SensorFailed(f"The stream cannot be reached: {error.strerror or error}.") from error
    except (WebSocketException, ValueError, EOFError) as error:
        # What the library says may quote a header, and that may hold a key.
        raise SensorFailed(f"The stream did not begin as a WebSocket does ({type(error).__name__}).") from None
