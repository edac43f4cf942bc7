"""Webhooks: a letter as JSON, posted to one address and nowhere else.

Sentences name the host and no more: an address may hold a key, and so may a header.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from halter.channels.secrets import revealed
from halter.core.tasks import Channel
from halter.core.telling import Letter, Undelivered

TIMEOUT: Final = 30
"""Seconds until an answer has begun."""
DELIVERY: Final = "Halter-Delivery"

_OK: Final = range(200, 300)
_LATER: Final = frozenset({408, 425, 429})
_BROKEN: Final = 500
_ELSEWHERE: Final = range(300, 400)


class Hook:
    """An address that letters are posted to. One of this network is as good as any: a person wrote it."""

    def __init__(self, channel: Channel, reveal: Callable[[str], str], tls: ssl.SSLContext | None = None) -> None:
        self._channel = channel
        self._url = channel.url or ""
        self._reveal = reveal
        self._tls = tls

    async def send(self, letter: Letter) -> None:
        """Post a letter."""
        from httpx2 import InvalidURL, LocalProtocolError, TransportError

        headers = self._headers(letter)
        try:
            async with asyncio.timeout(TIMEOUT):
                status = await self._posted(msgspec.json.encode(letter), headers)
        except TimeoutError:
            raise self._undelivered("gave no answer in time", may_retry=True) from None
        except (LocalProtocolError, InvalidURL, UnicodeEncodeError):
            # The library quotes what it refuses, and that may hold a key.
            raise self._undelivered("cannot be asked: look at the address and its headers", may_retry=False) from None
        except TransportError as error:
            raise self._undelivered(f"cannot be reached: {type(error).__name__}", may_retry=True) from None
        if status in _ELSEWHERE:
            sentence = f"sends on to another place ({status}): write that address, if it is right"
            raise self._undelivered(sentence, may_retry=False)
        if status not in _OK:
            raise self._undelivered(f"answered {status}", may_retry=status in _LATER or status >= _BROKEN)

    async def _posted(self, body: bytes, headers: Mapping[str, str]) -> int:
        """Post something, and tell the status of the answer, whose body nobody reads."""
        from httpx2 import AsyncClient, AsyncHTTPTransport

        self._tls = self._tls or await asyncio.to_thread(_trusted)
        transport = AsyncHTTPTransport(verify=self._tls, trust_env=False)
        async with (
            AsyncClient(transport=transport, trust_env=False, timeout=None) as client,
            client.stream("POST", self._url, content=body, headers=headers) as response,
        ):
            return response.status_code

    def _headers(self, letter: Letter) -> Mapping[str, str]:
        """Put our headers over those of the file, whose secrets go to this address alone."""
        theirs: Mapping[str, Any] = revealed(dict(self._channel.headers), self._reveal, self._channel.name)
        ours = {"content-type": "application/json", DELIVERY.lower(): letter.id}
        usual = {"user-agent": f"halter/{version('halter')}"}
        return {**usual, **{name.lower(): value for name, value in theirs.items()}, **ours}

    def _undelivered(self, said: str, *, may_retry: bool) -> Undelivered:
        return Undelivered(f"The webhook at {urlsplit(self._url).hostname} {said}.", may_retry=may_retry)


def _trusted() -> ssl.SSLContext:
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=False)
