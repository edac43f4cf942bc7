"""The many services that the library apprise knows. Their addresses hold keys, so all of an address is a secret."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from halter.channels.secrets import revealed
from halter.core.errors import needs
from halter.core.tasks import Channel
from halter.core.telling import Letter, Undelivered
from halter.core.text import clean, one_line

TIMEOUT: Final = 60
"""Seconds for one letter."""


class Service:
    """A service, known by its address."""

    def __init__(self, channel: Channel, reveal: Callable[[str], str]) -> None:
        self._channel = channel
        self._reveal = reveal

    async def send(self, letter: Letter) -> None:
        """Send a letter from a thread, since the library waits. One that is left alone ends by its own deadline."""
        address: str = revealed(self._channel.service or "", self._reveal, self._channel.name)
        await asyncio.to_thread(self._sent, address, letter)

    def _sent(self, address: str, letter: Letter) -> None:
        services = self._opened()
        # The library tells what went wrong only in words that may hold the address.
        if not services.add(address):
            sentence = "has an address that apprise does not know: look at its secret"
            raise self._undelivered(sentence, may_retry=False)
        if not services.notify(title=one_line(letter.subject), body=clean(letter.text) or " ", timeout=TIMEOUT):
            raise self._undelivered("could not be told", may_retry=True)

    def _opened(self) -> Any:
        try:
            from apprise import Apprise
        except ImportError:
            raise Undelivered(needs("notify", f"The channel {self._channel.name}"), may_retry=True) from None
        return Apprise()

    def _undelivered(self, said: str, *, may_retry: bool) -> Undelivered:
        return Undelivered(f"The channel {self._channel.name} {said}.", may_retry=may_retry)
