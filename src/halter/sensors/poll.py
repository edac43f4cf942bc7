"""A sensor that polls, and its request to a fixed URL as a tool behind the guard's door.

A request uses nothing from the environment, stays on its host, and accepts no compressed body. A message names the host
only: a URL may hold a key, and so may a header. A reading is a JSON value of bounded size.
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

from halter.core import agent_spec
from halter.core.agent_spec import SensorSpec
from halter.core.clock import SECOND, Clock
from halter.core.errors import HalterError
from halter.core.tools import (
    LARGEST_READING,
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

if TYPE_CHECKING:
    from httpx2 import URL, AsyncClient, Response


def parse_json_or_text(text: str) -> tuple[Any, bool]:
    """Parse a text as JSON, and say whether it is JSON; other text stays text."""
    try:
        return msgspec.json.decode(text.encode()), True
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text, False


def parse_json_value(text: str) -> Any:
    return parse_json_or_text(text)[0]


def make_reading(value: Any, at: int) -> Reading:
    """Make a reading of any value. Raises SensorFailed for one that cannot be."""
    try:
        size = len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise SensorFailed(f"What was read is no JSON value: {type(error).__name__}.") from error
    if size > LARGEST_READING:
        raise SensorFailed(explain_too_large("What was read"))
    return Reading(value, at, size)


def explain_too_large(what: str) -> str:
    return f"{what} is larger than {LARGEST_READING:,} bytes: have the source send less at once."


PollAction = Callable[[], Awaitable[Any]]
"""Returns a JSON value, or raises SensorFailed."""

MIN_POLLING_INTERVAL: Final = SECOND // 10
"""The shortest interval, for every sensor."""


def make_poll_sensor(spec: agent_spec.SensorSpec, look: PollAction, clock: Clock, rng: random.Random) -> Sensor:
    """A sensor that polls at once and then every interval, with a little jitter."""
    return _Poll(spec, look, clock, rng)


class _Poll:
    def __init__(self, spec: agent_spec.SensorSpec, look: PollAction, clock: Clock, rng: random.Random) -> None:
        self.name = spec.name
        self.retry_after: int | None = None
        self._spec = spec
        self._list_files = look
        self._clock = clock
        self._rng = rng

    async def readings(self) -> AsyncGenerator[Reading]:
        while True:
            began = self._clock.now()
            value = await self._poll_once()
            now = self._clock.now()
            yield make_reading(value, now)
            await self._clock.sleep(compute_poll_rest(self._period(), self._clock.now() - began))

    async def _poll_once(self) -> Any:
        try:
            async with asyncio.timeout(self._spec.timeout / SECOND):
                return await self._list_files()
        except TimeoutError:
            raise SensorFailed(f"There was no answer within {self._spec.timeout / SECOND:g} s.") from None

    def _period(self) -> int:
        interval = max(self._spec.interval, MIN_POLLING_INTERVAL)
        return interval + round(self._rng.random() * self._spec.jitter * interval)


def compute_poll_rest(period: int, elapsed: int) -> int:
    """How long to wait for the next poll, so long after the start of the last one.

    Missed polls are not made up for. The wait is positive and at most a period, also after a clock jump.
    """
    return period - elapsed % period


MOST_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OK: Final = range(200, 300)
NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class NoAnswer(HalterError):
    """A URL gave nothing that can be read: the kind of failure, and a sentence."""

    def __init__(self, kind: str, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.retry_after = retry_after


class Target:
    """A URL. `timeout` covers everything before the body of an answer."""

    def __init__(self, url: str, timeout: int, tls: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._timeout = timeout
        self._tls = tls

    @asynccontextmanager
    async def open(
        self, headers: Mapping[str, str], ours: Mapping[str, bytes] = NO_HEADERS
    ) -> AsyncGenerator["Response"]:
        """GET the URL and yield the answer with its body unread. Raises NoAnswer, also for that body.

        The headers are sent to this host only; `ours` win.
        """
        from httpx2 import AsyncClient, AsyncHTTPTransport, InvalidURL, LocalProtocolError, StreamError, TransportError

        host = "the address"
        try:
            url = parse_web_url(self._url)
            host = url.host
            self._tls = self._tls or await asyncio.to_thread(_make_tls_context)
            transport = AsyncHTTPTransport(verify=self._tls, trust_env=False, socket_options=_keep_alive(self._timeout))
            async with AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
                response = await self._send(client, url, _headers(headers, ours))
                try:
                    yield response
                finally:
                    await response.aclose()
        except LocalProtocolError:
            # The library quotes the header that it refuses, and that may hold a key.
            raise NoAnswer("BadRequest", f"The request to {host} cannot be written: check its headers.") from None
        except InvalidURL as error:
            raise NoAnswer("BadUrl", f"The address cannot be read: {error}.") from None
        except (TransportError, StreamError) as error:
            raise NoAnswer(type(error).__name__, f"{host} cannot be read: {_describe_error(error)}.") from error

    async def _send(self, client: "AsyncClient", url: "URL", headers: list[tuple[bytes, bytes]]) -> "Response":
        try:
            async with asyncio.timeout(self._timeout / SECOND):
                home = url
                for _ in range(MOST_REDIRECTS + 1):
                    response = await client.send(client.build_request("GET", url, headers=headers), stream=True)
                    if response.status_code not in _REDIRECTS or "location" not in response.headers:
                        return await _require_usable(response, home.host)
                    await response.aclose()
                    url = url.join(response.headers["location"])
                    if _origin(url) != _origin(home):
                        raise NoAnswer(
                            "Redirected", f"{home.host} sends on to {url.host}: if that is right, write its address."
                        )
                raise NoAnswer("Redirected", f"{home.host} sends on more than {MOST_REDIRECTS} times.")
        except TimeoutError:
            waited = f"{self._timeout / SECOND:g} s"
            raise NoAnswer("Timeout", f"{url.host} gave no answer within {waited}.") from None


def parse_web_url(text: str) -> "URL":
    """Parse a URL, which must hold no password."""
    from httpx2 import URL

    url = URL(text)
    if url.scheme not in {"http", "https"} or not url.host:
        raise NoAnswer("BadUrl", "The address is not a web address: it must begin with https:// or http://.")
    if url.userinfo:
        raise NoAnswer("BadUrl", f"The address of {url.host} holds a name or a password: use a header.")
    return url


async def _require_usable(response: "Response", host: str) -> "Response":
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if response.status_code in _OK and encoding in {"", "identity"}:
        return response
    await response.aclose()
    if response.status_code in _OK:
        raise NoAnswer("Encoded", f"{host} sends a compressed answer, though it was asked not to.")
    text = f"{response.status_code} {response.reason_phrase}".strip()
    raise NoAnswer("HttpError", f"{host} answered {text}.", _retry_after(response))


def _retry_after(response: "Response") -> int | None:
    question = response.headers.get("retry-after", "").strip()
    return (
        int(question) * SECOND if question.isascii() and question.isdigit() and len(question) < len("1000000") else None
    )


def _headers(given: Mapping[str, str], more: Mapping[str, bytes]) -> list[tuple[bytes, bytes]]:
    ours = {b"accept-encoding": b"identity", **{name.encode(): value for name, value in more.items()}}
    theirs = ((name.lower().encode(), value.encode()) for name, value in given.items())
    return [*((name, value) for name, value in theirs if name not in ours), *ours.items()]


def _origin(url: "URL") -> tuple[str, bytes, int]:
    return url.scheme, url.raw_host, url.port or (443 if url.scheme == "https" else 80)


def _keep_alive(timeout: int) -> list[tuple[int, int, int]]:
    """Let the system notice a host that vanished, on a stream that may be quiet for hours."""
    seconds = max(1, min(timeout // SECOND, 3600))
    tcp = socket.IPPROTO_TCP
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (tcp, socket.TCP_KEEPCNT, 3)]
    return [*options, (tcp, socket.TCP_KEEPIDLE, seconds), (tcp, socket.TCP_KEEPINTVL, seconds)]


@cache
def _make_tls_context() -> ssl.SSLContext:
    """Read the machine's certificates once for all."""
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=False)


def _describe_error(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


_NO_ARGUMENTS: Final = b'{"type":"object","properties":{},"additionalProperties":false}'


class Fetch:
    """GETs the fixed URL of a poll sensor. It implements the port `Tool`, and takes no arguments.

    The guard sees the URL and the headers as arguments, so that it grants exactly the secrets that they name.
    """

    def __init__(self, sensor: SensorSpec, tls: ssl.SSLContext | None = None) -> None:
        source = sensor.source
        url = source.url if isinstance(source.url, str) else ""
        self._target = Target(url, sensor.timeout, tls)
        self._headers = dict(source.headers)
        shown = {"url": url, "headers": self._headers}
        self._valid = Valid(shown, msgspec.json.encode(shown, order="sorted"))
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
        """Accept no arguments, or those that the guard was shown before."""
        if arguments.strip() in {b"", b"{}", self._valid.canonical}:
            return self._valid
        return Invalid(f"{self.spec.name} takes no arguments: its address is written in the agent's file.")

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
        """Nothing outside is changed, so there is nothing to check."""
        return "unknown"


async def _text(response: "Response") -> str:
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > LARGEST_READING:
            raise Failed("TooLarge", explain_too_large(f"The answer of {response.url.host}"))
    return _decode_body(bytes(body), response.charset_encoding, response.url.host)


def _decode_body(body: bytes, charset: str | None, host: str) -> str:
    try:
        return body.decode(charset or "utf-8-sig")
    except (LookupError, UnicodeError):
        raise Failed("NotText", f"The answer of {host} is no text in {charset or 'UTF-8'}.") from None
