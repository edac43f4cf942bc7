"""A sensor that polls, and its request to a fixed URL as a tool behind the guard.

A request uses nothing from the environment, stays on its host, and accepts no compressed body. Error messages name only
the host, since a URL or a header may contain a key. A reading is a JSON value of bounded size.
"""

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.errors import HalterError
from halter.core.tools import (
    MAX_READING_BYTES,
    EffectStatus,
    Failed,
    Invalid,
    Output,
    Permit,
    Reading,
    Sensor,
    SensorFailed,
    ToolSpec,
    Valid,
    add_spec_digest,
    substitute_secrets,
)
from halter.net.client import HttpClient, HttpRequest, HttpResponse, encode_headers, parse_retry_after, parse_web_url
from halter.net.failures import HttpFailure
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.spec.sensors import PollSensor, UrlSource


def parse_json_or_text(text: str) -> tuple[Any, bool]:
    """Parse a text as JSON, and return whether it is JSON; other text is returned unchanged."""
    try:
        return msgspec.json.decode(text.encode()), True
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text, False


def parse_json_value(text: str) -> Any:
    return parse_json_or_text(text)[0]


def make_reading(value: Any, at: int) -> Reading:
    """Make a reading of a value. Raises SensorFailed if the value is not JSON or too large."""
    try:
        size = len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise SensorFailed(f"The reading is not a JSON value: {type(error).__name__}.") from error
    if size > MAX_READING_BYTES:
        raise SensorFailed(explain_too_large("The reading"))
    return Reading(value, at, size)


def explain_too_large(subject: str) -> str:
    return f"{subject} is larger than {MAX_READING_BYTES:,} bytes. Make the source send less."


PollAction = Callable[[], Awaitable[Any]]
"""Reads a JSON value, or raises SensorFailed."""

MIN_POLLING_INTERVAL: Final = SECOND // 10
"""Minimum interval of every sensor."""


def make_poll_sensor(spec: PollSensor, poll: PollAction, clock: Clock, rng: random.Random) -> Sensor:
    """Make a sensor that polls immediately, and then at every interval with a little jitter."""
    return _Poll(spec, poll, clock, rng)


class _Poll:
    def __init__(self, spec: PollSensor, poll: PollAction, clock: Clock, rng: random.Random) -> None:
        self.name = spec.name
        self.retry_after: int | None = None
        self._spec = spec
        self._poll = poll
        self._clock = clock
        self._rng = rng

    async def readings(self) -> AsyncGenerator[Reading]:
        while True:
            started_at = read_monotonic(self._clock)
            value = await self._poll_once()
            now = self._clock.now()
            yield make_reading(value, now)
            await self._clock.sleep(compute_poll_rest(self._period(), read_monotonic(self._clock) - started_at))

    async def _poll_once(self) -> Any:
        try:
            async with asyncio.timeout(self._spec.timeout / SECOND):
                return await self._poll()
        except TimeoutError:
            raise SensorFailed(f"No answer within {self._spec.timeout / SECOND:g} s.") from None

    def _period(self) -> int:
        interval = max(self._spec.interval, MIN_POLLING_INTERVAL)
        return interval + round(self._rng.random() * self._spec.jitter * interval)


def compute_poll_rest(period: int, elapsed: int) -> int:
    """Compute the wait for the next poll from the time since the start of the last one.

    Missed polls are skipped. The wait is positive and at most a period, also after a clock jump.
    """
    return period - elapsed % period


NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_MAX_KEEP_ALIVE_SECONDS: Final = 3600


class NoAnswer(HalterError):
    """A URL has no usable answer: the kind of failure, and a sentence."""

    def __init__(self, kind: str, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.retry_after = retry_after


class Target:
    """A URL to read. `timeout` covers everything before the body of the answer."""

    def __init__(self, url: str, timeout: int, tls: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._timeout = timeout
        # A stream may be silent for hours.
        keep_alive = max(1, min(timeout // SECOND, _MAX_KEEP_ALIVE_SECONDS))
        self._terms = HttpxTerms(tls=tls, keep_alive=keep_alive)
        self.host = ""

    @asynccontextmanager
    async def open(
        self, headers: Mapping[str, str], own_headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncGenerator[HttpResponse]:
        """GET the URL and yield the response with its body unread. Raises NoAnswer, also while the body is read.

        The headers are sent to this host only; `own_headers` override `headers`.
        """
        try:
            self.host = parse_web_url(self._url).host
            request = HttpRequest("GET", self._url, encode_headers({**_lower_names(headers), **own_headers}))
            async with HttpClient(HttpxTransport(self._terms)) as client:
                response = await self._send(client, request)
                try:
                    yield response
                finally:
                    await response.aclose()
        except HttpFailure as failure:
            raise NoAnswer(failure.kind, self._explain(failure)) from failure

    async def _send(self, client: HttpClient, request: HttpRequest) -> HttpResponse:
        try:
            async with asyncio.timeout(self._timeout / SECOND):
                response = await client.send(request, "same_origin")
                return await _require_usable(response, self.host)
        except TimeoutError:
            duration = f"{self._timeout / SECOND:g} s"
            raise NoAnswer("Timeout", f"{self.host} did not answer within {duration}.") from None

    def _explain(self, failure: HttpFailure) -> str:
        match failure.kind:
            case "BadUrl":
                return f"{failure.reason[:1].upper()}{failure.reason[1:]}."
            case "BadRequest":
                return f"The request to {self.host} is invalid. Check its headers."
            case "Redirected":
                return f"{failure.reason}. If that is correct, use its URL."
            case "TooManyRedirects":
                return f"{failure.reason}."
            case _:
                return f"{self.host} cannot be read: {failure.reason}."


async def _require_usable(response: HttpResponse, host: str) -> HttpResponse:
    if response.is_success and response.is_plain:
        return response
    await response.aclose()
    if response.is_success:
        raise NoAnswer("Encoded", f"{host} sent a compressed answer, although the request accepts none.")
    text = f"{response.status} {response.reason}".strip()
    seconds = parse_retry_after(response.headers)
    raise NoAnswer("HttpError", f"{host} answered {text}.", None if seconds is None else seconds * SECOND)


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


_NO_ARGUMENTS: Final = b'{"type":"object","properties":{},"additionalProperties":false}'


class Fetch:
    """A tool without arguments that GETs the fixed URL of a poll sensor.

    The guard sees the URL and the headers as arguments, so that it grants exactly the secrets that they name.
    """

    def __init__(self, name: str, source: UrlSource, timeout: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = Target(source.url, timeout, tls)
        self._headers = dict(source.headers)
        values = {"url": source.url, "headers": self._headers}
        self._valid = Valid(values, msgspec.json.encode(values, order="sorted"))
        self.spec = add_spec_digest(
            ToolSpec(
                name=f"poll_{name}",
                description=f"Get {source.url} for the sensor {name}.",
                schema=_NO_ARGUMENTS,
                level="SAFE",
                effect="read",
                idempotent=True,
                timeout=timeout,
            )
        )

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Accept no arguments, or the canonical ones of an earlier validation."""
        if arguments.strip() in {b"", b"{}", self._valid.canonical}:
            return self._valid
        return Invalid(f"{self.spec.name} takes no arguments: its URL is in agent.yaml.")

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        permit.use()
        headers = cast("Mapping[str, str]", substitute_secrets(self._headers, permit.reveal))
        seconds = self.spec.timeout / SECOND
        try:
            async with asyncio.timeout(seconds), self._target.open(headers) as response:
                return Output(await self._read_text(response))
        except TimeoutError:
            raise Failed("Timeout", f"The answer was not complete within {seconds:g} s.") from None
        except NoAnswer as error:
            raise Failed(error.kind, str(error)) from error

    async def _read_text(self, response: HttpResponse) -> str:
        host = self._target.host
        body = bytearray()
        async for piece in response.pieces():
            body += piece
            if len(body) > MAX_READING_BYTES:
                raise Failed("TooLarge", explain_too_large(f"The answer of {host}"))
        try:
            return bytes(body).decode(response.charset or "utf-8-sig")
        except (LookupError, UnicodeError):
            sentence = f"The answer of {host} is not text in {response.charset or 'UTF-8'}."
            raise Failed("NotText", sentence) from None

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Return `unknown`: a GET changes nothing, so there is nothing to probe."""
        return "unknown"
