"""A sensor that listens to a stream: server-sent events, or the messages of a WebSocket."""

import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.core import agent_spec
from halter.core.clock import DAY, SECOND, Clock
from halter.core.tools import LARGEST_READING, Reading, Sensor, SensorFailed
from halter.sensors.poll import NoAnswer, Target, explain_too_large, parse_json_or_text, parse_json_value

if TYPE_CHECKING:
    from httpx2 import Response
    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed

_BOM: Final = b"\xef\xbb\xbf"
_LINE_ENDS: Final = re.compile(rb"\r\n|\r|\n")
_DIGITS: Final = re.compile(r"0*([0-9]{1,12})")
"""A longer retry time is ignored."""


class ServerSentEvent(msgspec.Struct, frozen=True):
    data: str
    name: str = "message"
    id: str = ""

    @property
    def value(self) -> Any:
        """The reading: a plain message of JSON is that JSON."""
        value, is_json = parse_json_or_text(self.data)
        plain = is_json and self.name == "message"
        return value if plain else {"event": self.name, "data": value, "id": self.id}


class SseParser:
    """Parses one stream from its beginning.

    `last_id` is where a later stream continues, and `retry` the milliseconds that the server asks to wait before. An
    unfinished event at the end of a stream is dropped with its id.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self.retry: int | None = None
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._id = last_id
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """Parse a chunk. Raises SensorFailed for a line or an event that is too large."""
        if self._after_cr and piece:
            piece, self._after_cr = piece.removeprefix(b"\n"), False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        *ended, begun = _LINE_ENDS.split(piece)
        events = [event for line in ended if (event := self._end_event(line)) is not None]
        self._continue(begun)
        return events

    def _continue(self, piece: bytes) -> None:
        self._line += piece
        if self._size + len(self._line) > LARGEST_READING:
            raise SensorFailed(explain_too_large("An event of the stream"))

    def _end_event(self, rest: bytes) -> ServerSentEvent | None:
        self._continue(rest)
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first, line = False, line.removeprefix(_BOM)
        if not line:
            self.last_id = self._id
            event = ServerSentEvent("\n".join(self._data), self._name or "message", self._id) if self._data else None
            self._data, self._name, self._size = [], "", 0
            return event
        name, _, value = line.decode("utf-8", "replace").partition(":")
        self._field(name, value.removeprefix(" "))
        return None

    def _field(self, name: str, value: str) -> None:
        """Take one field. A comment is a field without a name; unknown fields are ignored."""
        if name == "data":
            self._data.append(value)
            self._size += len(value.encode()) + 1
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and (digits := _DIGITS.fullmatch(value)):
            self.retry = int(digits[1])


_TOO_BIG: Final = 1009


async def receive_messages(url: str, headers: Mapping[str, str], max_wait: int) -> AsyncGenerator[str]:
    """Listen until the server closes cleanly. Raises SensorFailed.

    The patience is for the connection, and for each ping that proves a silent connection alive.
    """
    from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

    async with _open_connection(url, headers, max_wait / SECOND) as connection:
        while True:
            try:
                message = await connection.recv()
            except ConnectionClosedOK:
                return
            except ConnectionClosed as error:
                raise SensorFailed(_explain_closed(error)) from None
            if isinstance(message, bytes):
                raise SensorFailed(f"The stream sent {len(message):,} bytes that are no text: only text can be read.")
            yield message


def _explain_closed(error: "ConnectionClosed") -> str:
    """Why a connection was lost: our side closes it if a message is too large."""
    ours, theirs = error.sent, error.rcvd
    if ours and ours.code == _TOO_BIG:
        return explain_too_large("A message of the stream")
    if theirs:
        return f"The stream was closed by the other side with code {theirs.code}."
    if ours:
        return f"The stream was ended: {ours.reason or f'code {ours.code}'}."
    return "The connection of the stream was lost."


@asynccontextmanager
async def _open_connection(url: str, headers: Mapping[str, str], seconds: float) -> "AsyncGenerator[ClientConnection]":
    connection = await _connect(url, headers, seconds)
    try:
        yield connection
    finally:
        await connection.close()


async def _connect(url: str, headers: Mapping[str, str], seconds: float) -> "ClientConnection":
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

    class Straight(connect):
        """Follows no redirect: the headers are meant for one host."""

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
        raise SensorFailed(f"The stream did not open within {seconds:g} s.") from None
    except InvalidStatus as error:
        raise SensorFailed(f"The stream was refused with {error.response.status_code}.") from None
    except InvalidURI:
        raise SensorFailed("The address is not a WebSocket address: it must begin with wss:// or ws://.") from None
    except OSError as error:
        raise SensorFailed(f"The stream cannot be reached: {error.strerror or error}.") from error
    except (WebSocketException, ValueError, EOFError) as error:
        # What the library says may quote a header, and that may hold a key.
        raise SensorFailed(f"The WebSocket handshake failed ({type(error).__name__}).") from None


_MILLISECOND: Final = 1000
_NO_CONTENT: Final = 204
_OK: Final = 200
_LONGEST_ID: Final = 4096


def make_stream_sensor(
    spec: agent_spec.SensorSpec, headers: Mapping[str, str], clock: Clock, tls: ssl.SSLContext | None = None
) -> Sensor:
    """A sensor that listens to a URL; the headers have their secrets filled in."""
    url = spec.source.url if isinstance(spec.source.url, str) else ""
    speaks = spec.source.format if isinstance(spec.source.format, str) else guess_stream_format(url)
    match speaks:
        case "sse":
            return _Events(spec.name, Target(url, spec.timeout, tls), headers, clock)
        case "websocket":
            return _Messages(spec, url, headers, clock)


def guess_stream_format(url: str) -> agent_spec.StreamFormat:
    return "websocket" if url.lower().startswith(("ws://", "wss://")) else "sse"


class _Events:
    def __init__(self, name: str, target: Target, headers: Mapping[str, str], clock: Clock) -> None:
        self.name = name
        self.retry_after: int | None = None
        self._target = target
        self._headers = headers
        self._clock = clock
        self._last_id = ""
        self._retry: int | None = None

    async def readings(self) -> AsyncGenerator[Reading]:
        """Listen to one stream to its end; the next one continues after its last event."""
        self.retry_after = self._retry
        try:
            async with self._target.open(self._headers, self._asking()) as response:
                host = response.url.host
                if response.status_code == _NO_CONTENT:
                    self.retry_after = DAY
                    raise SensorFailed(f"{host} answered 204: it says that there is nothing to listen to any more.")
                kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                if response.status_code != _OK or kind != "text/event-stream":
                    text = f"{response.status_code} with {kind[:100] or 'no content type'}"
                    raise SensorFailed(f"{host} sends no server-sent events, but {text}: look at the address.")
                async with aclosing(self._events(response)) as events:
                    async for each in events:
                        yield each
        except NoAnswer as error:
            self.retry_after = error.retry_after or self._retry
            raise SensorFailed(str(error)) from error

    def _asking(self) -> dict[str, bytes]:
        asking = {"accept": b"text/event-stream", "cache-control": b"no-store"}
        return {**asking, "last-event-id": self._last_id.encode()} if is_sendable(self._last_id) else asking

    async def _events(self, response: "Response") -> AsyncGenerator[Reading]:
        parser = SseParser(self._last_id)
        async for piece in response.aiter_raw():
            events = parser.feed(piece)
            if parser.retry is not None:
                self._retry = self.retry_after = parser.retry * _MILLISECOND
            for event in events:
                self._last_id = event.id
                yield Reading(event.value, self._clock.now(), len(event.data))
            self._last_id = parser.last_id


def is_sendable(last_id: str) -> bool:
    """Whether an id can be a header: an unreadable one would be refused for ever."""
    return last_id.strip() == last_id and last_id.isprintable() and 0 < len(last_id.encode()) <= _LONGEST_ID


class _Messages:
    def __init__(self, spec: agent_spec.SensorSpec, url: str, headers: Mapping[str, str], clock: Clock) -> None:
        self.name = spec.name
        self.retry_after: int | None = None
        self._url = url
        self._timeout = spec.timeout
        self._headers = headers
        self._clock = clock

    async def readings(self) -> AsyncGenerator[Reading]:
        async with aclosing(receive_messages(self._url, self._headers, self._timeout)) as heard:
            async for message in heard:
                yield Reading(parse_json_value(message), self._clock.now(), len(message))
