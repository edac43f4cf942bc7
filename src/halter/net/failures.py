"""Why a request got no usable answer: one translation of the errors of the HTTP libraries.

Neither a kind nor a reason quotes an address or a header that was sent, since these can contain a key.
"""

import os
import ssl
from functools import cache
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from halter.core.errors import HalterError

_REASONS: Final = MappingProxyType(
    {
        "ConnectTimeout": "no connection in time",
        "ReadTimeout": "no answer in time",
        "WriteTimeout": "it accepts no data",
        "PoolTimeout": "no free connection",
        "InvalidURL": "the URL is invalid",
        "LocalProtocolError": "the request is invalid",
        "UnicodeEncodeError": "the request is invalid",
        "UnsupportedProtocol": "the URL must begin with https:// or http://",
    }
)
"""The libraries give these errors no text, or one that quotes what was to be sent."""

_KINDS: Final = MappingProxyType(
    {"InvalidURL": "BadUrl", "LocalProtocolError": "BadRequest", "UnicodeEncodeError": "BadRequest"}
)
_UNSENT: Final = frozenset(
    (
        *("ConnectError", "ConnectTimeout", "InvalidURL", "PoolTimeout", "UnicodeEncodeError", "UnsupportedProtocol"),
        *(
            "ClientConnectorCertificateError",
            "ClientConnectorDNSError",
            "ClientConnectorError",
            "ClientConnectorSSLError",
        ),
        *("ClientProxyConnectionError", "ConnectionTimeoutError", "InvalidUrlClientError"),
    )
)
"""Errors of both libraries before anything of a request is sent."""


class HttpFailure(HalterError):
    """A request got no usable answer. `kind` is for programs, `reason` a part of a sentence, `host` may be empty.

    `is_sent` is False only if the server got nothing of the request.
    """

    def __init__(self, kind: str, reason: str, *, url: str = "", is_sent: bool = True) -> None:
        address = describe_address(url)
        super().__init__(f"Cannot reach {address or 'the address'} ({reason}).")
        self.kind = kind
        self.reason = reason
        self.host = _find_host(address)
        self.is_sent = is_sent

    @property
    def is_timeout(self) -> bool:
        return self.kind.endswith("Timeout")


def describe_address(url: str) -> str:
    """Return a URL as it may be shown: its path, its query and its password can each contain a key."""
    try:
        url_parts = urlsplit(url)
    except ValueError:
        return ""
    host = url_parts.netloc.rpartition("@")[2]
    return f"{url_parts.scheme}://{host}" if host else ""


def _find_host(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def convert_error(error: BaseException, url: str = "") -> HttpFailure:
    """Convert an error of a library."""
    name = type(error).__name__
    return HttpFailure(_KINDS.get(name, name), describe_reason(error), url=url, is_sent=name not in _UNSENT)


def describe_reason(error: BaseException) -> str:
    """Describe why a connection or a request failed, in the words of the system if it has any."""
    name = type(error).__name__
    return find_system_reason(error) or _REASONS.get(name) or str(error).rstrip(".") or name


def find_system_reason(error: BaseException) -> str:
    """Find the system's reason among the causes of an error; empty if it gave none."""
    for cause in list_causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not valid: {cause.verify_message}"
        if isinstance(cause, OSError) and cause.strerror:
            return _describe_system_error(cause)
    return ""


def _describe_system_error(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) or not error.errno or error.errno < 0:
        return str(error.strerror)
    return os.strerror(error.errno).lower()


def list_causes(error: BaseException | None) -> list[BaseException]:
    """List an error and its causes; of several attempts to connect, the first."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = _find_cause(error)
    return causes


def _find_cause(error: BaseException) -> BaseException | None:
    match error:
        case BaseExceptionGroup(exceptions=(BaseException() as first, *_)):
            return first
        case _:
            return error.__cause__ or error.__context__


@cache
def list_http_errors() -> tuple[type[Exception], ...]:
    """List the errors that the HTTP library raises for a request that fails."""
    import httpx2

    return (*list_sdk_errors(), httpx2.InvalidURL, UnicodeEncodeError, OSError)


@cache
def list_sdk_errors() -> tuple[type[Exception], ...]:
    """List the errors that the library raises in an SDK, which may pass them on."""
    import httpx2

    return (httpx2.HTTPError, httpx2.StreamError)


def is_unreadable(error: BaseException) -> bool:
    """Return True for the error of an answer that cannot be decompressed, or must not be read further."""
    import httpx2

    return isinstance(error, httpx2.DecodingError)
