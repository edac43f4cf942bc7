"""A sensor that polls, and its request to a fixed URL as a tool behind the guard.

A request uses nothing from the environment, stays on its host, and accepts no compressed body. Error messages name only
the host, since a URL or a header may contain a key. A reading is a JSON value of bounded size.
"""

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

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
from halter.spec import sensors
from halter.spec.sensors import SensorSpec

if TYPE_CHECKING:
    from httpx2 import URL, AsyncClient, Response


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


def make_poll_sensor(spec: sensors.SensorSpec, poll: PollAction, clock: Clock, rng: random.Random) -> Sensor:
    """Make a sensor that polls immediately, and then at every interval with a little jitter."""
    return _Poll(spec, poll, clock, rng)


class _Poll:
    def __init__(self, spec: sensors.SensorSpec, poll: PollAction, clock: Clock, rng: random.Random) -> None:
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


MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OK: Final = range(200, 300)
NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


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
        self._tls = tls

    @asynccontextmanager
    async def open(
        self, headers: Mapping[str, str], own_headers: Mapping[str, bytes] = NO_HEADERS
    ) -> AsyncGenerator["Response"]:
        """GET the URL and yield the response with its body unread. Raises NoAnswer, also while the body is read.

        The headers are sent to this host only; `own_headers` override `headers`.
        """
        from httpx2 import AsyncClient, AsyncHTTPTransport, InvalidURL, LocalProtocolError, StreamError, TransportError

        host = "the address"
        try:
            url = parse_web_url(self._url)
            host = url.host
            self._tls = self._tls or await asyncio.to_thread(_make_tls_context)
            transport = AsyncHTTPTransport(
                verify=self._tls, trust_env=False, socket_options=_make_keep_alive_options(self._timeout)
            )
            async with AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
                response = await self._send(client, url, _headers(headers, own_headers))
                try:
                    yield response
                finally:
                    await response.aclose()
        except LocalProtocolError:
            # The library's message quotes the header, which may contain a key.
            raise NoAnswer("BadRequest", f"The request to {host} is invalid. Check its headers.") from None
        except InvalidURL as error:
            raise NoAnswer("BadUrl", f"The URL is invalid: {error}.") from None
        except (TransportError, StreamError) as error:
            raise NoAnswer(type(error).__name__, f"{host} cannot be read: {_describe_error(error)}.") from error

    async def _send(self, client: "AsyncClient", url: "URL", headers: list[tuple[bytes, bytes]]) -> "Response":
        try:
            async with asyncio.timeout(self._timeout / SECOND):
                first_url = url
                for _ in range(MAX_REDIRECTS + 1):
                    response = await client.send(client.build_request("GET", url, headers=headers), stream=True)
                    if response.status_code not in _REDIRECTS or "location" not in response.headers:
                        return await _require_usable(response, first_url.host)
                    await response.aclose()
                    url = url.join(response.headers["location"])
                    if _origin(url) != _origin(first_url):
                        raise NoAnswer(
                            "Redirected",
                            f"{first_url.host} redirects to {url.host}. If that is correct, use its URL.",
                        )
                raise NoAnswer("Redirected", f"{first_url.host} redirects more than {MAX_REDIRECTS} times.")
        except TimeoutError:
            duration = f"{self._timeout / SECOND:g} s"
            raise NoAnswer("Timeout", f"{url.host} did not answer within {duration}.") from None


def parse_web_url(text: str) -> "URL":
    """Parse a URL, which must not contain a password."""
    from httpx2 import URL

    url = URL(text)
    if url.scheme not in {"http", "https"} or not url.host:
        raise NoAnswer("BadUrl", "The URL is not a web address: it must begin with https:// or http://.")
    if url.userinfo:
        raise NoAnswer("BadUrl", f"The URL of {url.host} contains a user name or a password. Use a header.")
    return url


async def _require_usable(response: "Response", host: str) -> "Response":
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if response.status_code in _OK and encoding in {"", "identity"}:
        return response
    await response.aclose()
    if response.status_code in _OK:
        raise NoAnswer("Encoded", f"{host} sent a compressed answer, although the request accepts none.")
    text = f"{response.status_code} {response.reason_phrase}".strip()
    raise NoAnswer("HttpError", f"{host} answered {text}.", _retry_after(response))


def _retry_after(response: "Response") -> int | None:
    value = response.headers.get("retry-after", "").strip()
    return int(value) * SECOND if value.isascii() and value.isdigit() and len(value) < len("1000000") else None


def _headers(headers: Mapping[str, str], own_headers: Mapping[str, bytes]) -> list[tuple[bytes, bytes]]:
    required_headers = {
        b"accept-encoding": b"identity",
        **{name.encode(): value for name, value in own_headers.items()},
    }
    spec_headers = ((name.lower().encode(), value.encode()) for name, value in headers.items())
    return [*((name, value) for name, value in spec_headers if name not in required_headers), *required_headers.items()]


def _origin(url: "URL") -> tuple[str, bytes, int]:
    return url.scheme, url.raw_host, url.port or (443 if url.scheme == "https" else 80)


def _make_keep_alive_options(timeout: int) -> list[tuple[int, int, int]]:
    """Make socket options that detect a lost host, on a stream that may be silent for hours."""
    seconds = max(1, min(timeout // SECOND, 3600))
    tcp = socket.IPPROTO_TCP
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (tcp, socket.TCP_KEEPCNT, 3)]
    return [*options, (tcp, socket.TCP_KEEPIDLE, seconds), (tcp, socket.TCP_KEEPINTVL, seconds)]


@cache
def _make_tls_context() -> ssl.SSLContext:
    """Make a TLS context with the machine's certificates, once for all requests."""
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=False)


def _describe_error(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


_NO_ARGUMENTS: Final = b'{"type":"object","properties":{},"additionalProperties":false}'


class Fetch:
    """A tool without arguments that GETs the fixed URL of a poll sensor.

    The guard sees the URL and the headers as arguments, so that it grants exactly the secrets that they name.
    """

    def __init__(self, sensor: SensorSpec, tls: ssl.SSLContext | None = None) -> None:
        source = sensor.source
        url = source.url if isinstance(source.url, str) else ""
        self._target = Target(url, sensor.timeout, tls)
        self._headers = dict(source.headers)
        values = {"url": url, "headers": self._headers}
        self._valid = Valid(values, msgspec.json.encode(values, order="sorted"))
        self.spec = add_spec_digest(
            ToolSpec(
                name=f"poll_{sensor.name}",
                description=f"Get {url} for the sensor {sensor.name}.",
                schema=_NO_ARGUMENTS,
                level="SAFE",
                effect="read",
                idempotent=True,
                timeout=sensor.timeout,
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
                return Output(await _text(response))
        except TimeoutError:
            raise Failed("Timeout", f"The answer was not complete within {seconds:g} s.") from None
        except NoAnswer as error:
            raise Failed(error.kind, str(error)) from error

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Return `unknown`: a GET changes nothing, so there is nothing to probe."""
        return "unknown"


async def _text(response: "Response") -> str:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_READING_BYTES:
            raise Failed("TooLarge", explain_too_large(f"The answer of {response.url.host}"))
    return _decode_body(bytes(body), response.charset_encoding, response.url.host)


def _decode_body(body: bytes, charset: str | None, host: str) -> str:
    try:
        return body.decode(charset or "utf-8-sig")
    except (LookupError, UnicodeError):
        raise Failed("NotText", f"The answer of {host} is not text in {charset or 'UTF-8'}.") from None
