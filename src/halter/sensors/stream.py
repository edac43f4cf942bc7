"""A sensor that listens to a stream: server-sent events, or a WebSocket."""

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from halter.core import pacing
from halter.core.clock import DAY, Clock
from halter.core.sensing import Reading, Sensor, SensorFailed
from halter.sensors.sse import Parser
from halter.sensors.values import as_value
from halter.sensors.web import NoAnswer, Target
from halter.sensors.websocket import messages

if TYPE_CHECKING:
    from httpx2 import Response

_MILLISECOND: Final = 1000
_NO_CONTENT: Final = 204
_OK: Final = 200
_LONGEST_ID: Final = 4096


def stream(spec: pacing.Sensor, headers: Mapping[str, str], clock: Clock, tls: ssl.SSLContext | None = None) -> Sensor:
    """Make a sensor that listens to the address of a spec; in the headers the secrets are filled in."""
    url = spec.source.url if isinstance(spec.source.url, str) else ""
    speaks = spec.source.format if isinstance(spec.source.format, str) else format_of(url)
    match speaks:
        case "sse":
            return _Events(spec.name, Target(url, spec.timeout, tls), headers, clock)
        case "websocket":
            return _Messages(spec, url, headers, clock)


def format_of(url: str) -> pacing.StreamFormat:
    """Tell by an address what is spoken there."""
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
        """Listen to one stream to its end; the next one goes on after the last event of this one."""
        self.retry_after = self._retry
        try:
            async with self._target.opened(self._headers, self._asking()) as response:
                self._check(response)
                async with aclosing(self._events(response)) as events:
                    async for each in events:
                        yield each
        except NoAnswer as error:
            self.retry_after = error.retry_after or self._retry
            raise SensorFailed(str(error)) from error

    def _asking(self) -> dict[str, bytes]:
        asking = {"accept": b"text/event-stream", "cache-control": b"no-store"}
        return {**asking, "last-event-id": self._last_id.encode()} if sendable(self._last_id) else asking

    def _check(self, response: "Response") -> None:
        host = response.url.host
        if response.status_code == _NO_CONTENT:
            self.retry_after = DAY
            raise SensorFailed(f"{host} answered 204: it says that there is nothing to listen to any more.")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code != _OK or kind != "text/event-stream":
            said = f"{response.status_code} with {kind[:100] or 'no content type'}"
            raise SensorFailed(f"{host} sends no server-sent events, but {said}: look at the address.")

    async def _events(self, response: "Response") -> AsyncGenerator[Reading]:
        parser = Parser(self._last_id)
        async for piece in response.aiter_raw():
            events = parser.feed(piece)
            if parser.retry is not None:
                self._retry = self.retry_after = parser.retry * _MILLISECOND
            for event in events:
                self._last_id = event.id
                yield Reading(event.value, self._clock.now(), len(event.data))
            self._last_id = parser.last_id


def sendable(last_id: str) -> bool:
    """Tell whether an id can stand in a header: one that no server could read would be refused for ever."""
    return last_id.strip() == last_id and last_id.isprintable() and 0 < len(last_id.encode()) <= _LONGEST_ID


class _Messages:
    def __init__(self, spec: pacing.Sensor, url: str, headers: Mapping[str, str], clock: Clock) -> None:
        self.name = spec.name
        self.retry_after: int | None = None
        self._url = url
        self._timeout = spec.timeout
        self._headers = headers
        self._clock = clock

    async def readings(self) -> AsyncGenerator[Reading]:
        """Listen until the other side closes."""
        async with aclosing(messages(self._url, self._headers, self._timeout)) as heard:
            async for message in heard:
                yield Reading(as_value(message), self._clock.now(), len(message))
