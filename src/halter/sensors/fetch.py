"""The look at an address that a poll takes again and again: a tool like any other, behind the guard's door."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

import msgspec

from halter.core.clock import SECOND
from halter.core.pacing import Sensor
from halter.core.sensing import LARGEST_READING
from halter.core.tools import Failed, Happened, Invalid, Output, Permit, ToolSpec, Valid, sealed, with_secrets
from halter.sensors.values import too_large
from halter.sensors.web import NoAnswer, Target

if TYPE_CHECKING:
    from httpx2 import Response

_NO_ARGUMENTS: Final = b'{"type":"object","properties":{},"additionalProperties":false}'


class Fetch:
    """Gets the fixed address of a poll sensor. It fulfils the port `Tool`, and takes no arguments.

    The guard is shown the address and the headers as if they were its arguments, so that it sees which secrets they
    name and gives those and no others.
    """

    def __init__(self, sensor: Sensor, tls: ssl.SSLContext | None = None) -> None:
        source = sensor.source
        url = source.url if isinstance(source.url, str) else ""
        self._target = Target(url, sensor.timeout, tls)
        self._headers = dict(source.headers)
        shown = {"url": url, "headers": self._headers}
        self._valid = Valid(shown, msgspec.json.encode(shown, order="sorted"))
        self._spec = sealed(
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

    @property
    def spec(self) -> ToolSpec:
        """What is known of it."""
        return self._spec

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Accept no arguments, or those that the guard was shown before."""
        if arguments.strip() in {b"", b"{}", self._valid.canonical}:
            return self._valid
        return Invalid(f"{self._spec.name} takes no arguments: its address is written in the agent's file.")

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Get it. Raises Failed."""
        permit.use()
        headers = cast("Mapping[str, str]", with_secrets(self._headers, permit.reveal))
        seconds = self._spec.timeout / SECOND
        try:
            async with asyncio.timeout(seconds), self._target.opened(headers) as response:
                return Output(await _text(response))
        except TimeoutError:
            raise Failed("Timeout", f"The answer did not come to its end within {seconds:g} s.") from None
        except NoAnswer as error:
            raise Failed(error.kind, str(error)) from error

    async def check(self, arguments: Valid, permit: Permit) -> Happened:
        """Nothing outside is changed, so nobody has to know."""
        return "unknown"


async def _text(response: "Response") -> str:
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > LARGEST_READING:
            raise Failed("TooLarge", too_large(f"The answer of {response.url.host}"))
    return _decoded(bytes(body), response.charset_encoding, response.url.host)


def _decoded(body: bytes, charset: str | None, host: str) -> str:
    try:
        return body.decode(charset or "utf-8-sig")
    except (LookupError, UnicodeError):
        raise Failed("NotText", f"The answer of {host} is no text in {charset or 'UTF-8'}.") from None
