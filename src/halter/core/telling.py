"""What is told to people over a channel, and the port of whoever sends it."""

from typing import Protocol

import msgspec

from halter.core.errors import HalterError
from halter.core.text import clean, from_body


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be told, as the body of a queued notification holds it.

    `session` is the one that it is about, where the notification does not stand in that session's own stream.
    """

    subject: str = ""
    text: str = ""
    session: str = ""

    def body(self) -> bytes:
        """Write it down."""
        cleaned = Telling(subject=clean(self.subject), text=clean(self.text), session=clean(self.session))
        return msgspec.json.encode(cleaned)


def telling_of(body: bytes) -> Telling:
    """Read what is to be told. What is no JSON is told as it stands."""
    try:
        return msgspec.json.decode(body, type=Telling)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Telling(text=clean(from_body(body)))


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One message on its way to people. `id` stays the same however often it is sent, so that a copy is known as one.

    `about` is what it is about, in the notification's own word, and `at` when it was queued.
    """

    id: str
    subject: str
    text: str
    agent: str
    session: str = ""
    about: str = ""
    at: int = 0


class Undelivered(HalterError):
    """A letter did not get through, as far as can be known: a sentence without any secret.

    `may_retry` tells whether the same letter may get through later.
    """

    def __init__(self, sentence: str, *, may_retry: bool) -> None:
        super().__init__(sentence)
        self.may_retry = may_retry


class Sender(Protocol):
    """One channel, ready to be used."""

    async def send(self, letter: Letter) -> None:
        """Send a letter, or raise Undelivered. Whoever cancels it may find that it was sent all the same."""
        ...
