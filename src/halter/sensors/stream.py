"""A sensor that listens to a stream: server-sent events, or WebSocket messages."""

import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.core.clock import DAY, SECOND, Clock
from halter.core.tools import MAX_READING_BYTES, Reading, Sensor, SensorFailed
from halter.net.client import HttpResponse
from halter.sensors.poll import NoAnswer, Target, explain_too_large, parse_json_or_text, parse_json_value
from halter.spec.sensors import StreamSensor

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed

_BOM: Final = b"\xef\xbb\xbf"
_LINE_ENDS: Final = re.compile(rb"\r\n|\r|\n")
_DIGITS: Final = re.compile(r"0*([0-9]{1,12})")
"""A longer `retry` is ignored."""


class ServerSentEvent(msgspec.Struct, frozen=True):
    data: str
    name: str = "message"
    id: str = ""

    @property
    def value(self) -> Any:
        """The value of the reading. For an unnamed event with JSON data, that is the JSON value."""
        value, is_json = parse_json_or_text(self.data)
        is_plain_json = is_json and self.name == "message"
        return value if is_plain_json else {"event": self.name, "data": value, "id": self.id}


class SseParser:
    """A parser of one stream from its start.

    `last_id` is the id after which the next stream continues, and `retry` the wait before it in milliseconds, as the
    server requests. An incomplete event at the end of a stream is dropped with its id.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self.retry: int | None = None
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._last_id = last_id
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Parse a chunk. Raises SensorFailed for a line or an event that is too large."""
        if self._after_cr and chunk:
            chunk, self._after_cr = chunk.removeprefix(b"\n"), False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        *lines, last_line = _LINE_ENDS.split(chunk)
        events = [event for line in lines if (event := self._end_event(line)) is not None]
        self._continue(last_line)
        return events

    def _continue(self, chunk: bytes) -> None:
        self._line += chunk
        if self._size + len(self._line) > MAX_READING_BYTES:
            raise SensorFailed(explain_too_large("An event of the stream"))

    def _end_event(self, chunk: bytes) -> ServerSentEvent | None:
        self._continue(chunk)
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first, line = False, line.removeprefix(_BOM)
        if not line:
            self.last_id = self._last_id
            event = (
                ServerSentEvent("\n".join(self._data), self._name or "message", self._last_id) if self._data else None
            )
            self._data, self._name, self._size = [], "", 0
            return event
        name, _, value = line.decode("utf-8", "replace").partition(":")
        self._field(name, value.removeprefix(" "))
        return None

    def _field(self, name: str, value: str) -> None:
        """Apply one field. A comment is a field without a name; unknown fields are ignored."""
        if name == "data":
            self._data.append(value)
            self._size += len(value.encode()) + 1
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._last_id = value
        elif name == "retry" and (digits := _DIGITS.fullmatch(value)):
            self.retry = int(digits[1])


_TOO_BIG: Final = 1009


async def receive_messages(url: str, headers: Mapping[str, str], max_wait: int) -> AsyncGenerator[str]:
    """Yield messages until the server closes the connection cleanly. Raises SensorFailed.

    `max_wait` bounds the opening of the connection, and the answer to each ping on a silent connection.
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
                raise SensorFailed(
                    f"The stream sent a binary message of {len(message):,} bytes. Only text is supported."
                )
            yield message


def _explain_closed(error: "ConnectionClosed") -> str:
    """Describe why a connection was closed. This side closes it if a message is too large."""
    own_close, server_close = error.sent, error.rcvd
    if own_close and own_close.code == _TOO_BIG:
        return explain_too_large("A message of the stream")
    if server_close:
        return f"The server closed the stream with code {server_close.code}."
    if own_close:
        return f"The stream was closed: {own_close.reason or f'code {own_close.code}'}."
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
        """A connection that follows no redirect, since the headers are meant for one host."""

        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    limits: dict[str, Any] = {"max_size": MAX_READING_BYTES, "compression": None, "proxy": None}
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
        raise SensorFailed(f"The server refused the stream with {error.response.status_code}.") from None
    except InvalidURI:
        raise SensorFailed("The URL is not a WebSocket URL: it must begin with wss:// or ws://.") from None
    except OSError as error:
        raise SensorFailed(f"The stream cannot be reached: {error.strerror or error}.") from error
    except (WebSocketException, ValueError, EOFError) as error:
        # The library's message may quote a header, which may contain a key.
        raise SensorFailed(f"The WebSocket handshake failed ({type(error).__name__}).") from None


_MILLISECOND: Final = 1000
_NO_CONTENT: Final = 204
_OK: Final = 200
_MAX_ID_BYTES: Final = 4096


def make_stream_sensor(
    spec: StreamSensor, headers: Mapping[str, str], clock: Clock, tls: ssl.SSLContext | None = None
) -> Sensor:
    """Make a sensor that listens to a URL; the secrets in `headers` are already filled in."""
    match spec.source.protocol:
        case "sse":
            return _Events(spec.name, Target(spec.source.url, spec.timeout, tls), headers, clock)
        case "websocket":
            return _Messages(spec, headers, clock)


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
        """Yield the readings of one stream until its end; the next call continues after the last event."""
        self.retry_after = self._retry
        try:
            async with self._target.open(self._headers, self._asking()) as response:
                host = self._target.host
                if response.status == _NO_CONTENT:
                    self.retry_after = DAY
                    raise SensorFailed(f"{host} answered 204: the stream has ended.")
                kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                if response.status != _OK or kind != "text/event-stream":
                    text = f"{response.status} with {kind[:100] or 'no content type'}"
                    raise SensorFailed(f"Expected server-sent events from {host}, but received {text}. Check the URL.")
                async with aclosing(self._events(response)) as events:
                    async for reading in events:
                        yield reading
        except NoAnswer as error:
            self.retry_after = error.retry_after or self._retry
            raise SensorFailed(str(error)) from error

    def _asking(self) -> dict[str, str]:
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        return {**headers, "last-event-id": self._last_id} if is_sendable(self._last_id) else headers

    async def _events(self, response: HttpResponse) -> AsyncGenerator[Reading]:
        parser = SseParser(self._last_id)
        async for chunk in response.pieces():
            events = parser.feed(chunk)
            if parser.retry is not None:
                self._retry = self.retry_after = parser.retry * _MILLISECOND
            for event in events:
                self._last_id = event.id
                yield Reading(event.value, self._clock.now(), len(event.data))
            self._last_id = parser.last_id


def is_sendable(last_id: str) -> bool:
    """Return whether an id can be sent as a header. With any other id, every later request would fail."""
    return last_id.strip() == last_id and last_id.isprintable() and 0 < len(last_id.encode()) <= _MAX_ID_BYTES


class _Messages:
    def __init__(self, spec: StreamSensor, headers: Mapping[str, str], clock: Clock) -> None:
        self.name = spec.name
        self.retry_after: int | None = None
        self._url = spec.source.url
        self._timeout = spec.timeout
        self._headers = headers
        self._clock = clock

    async def readings(self) -> AsyncGenerator[Reading]:
        async with aclosing(receive_messages(self._url, self._headers, self._timeout)) as messages:
            async for message in messages:
                yield Reading(parse_json_value(message), self._clock.now(), len(message))
