"""The port of notification channels, and what they send."""

from typing import Protocol

import msgspec

from halter.core.errors import HalterError
from halter.core.text import clean, decode_body


class NotificationContent(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a queued notification.

    `session` is set if the notification is about a session but not in that session's own stream.
    """

    subject: str = ""
    text: str = ""
    session: str = ""

    def body(self) -> bytes:
        content = NotificationContent(subject=clean(self.subject), text=clean(self.text), session=clean(self.session))
        return msgspec.json.encode(content)


def parse_notification(data: bytes) -> NotificationContent:
    """Parse a notification. A body that is not JSON is its text."""
    try:
        return msgspec.json.decode(data, type=NotificationContent)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NotificationContent(text=clean(decode_body(data)))


class OutgoingNotification(msgspec.Struct, frozen=True, kw_only=True):
    """A notification to send. `id` is the same on every attempt, so that duplicates are recognised.

    `about` is its subject, and `at` when it was queued.
    """

    id: str
    subject: str
    text: str
    agent: str
    session: str = ""
    about: str = ""
    at: int = 0


class DeliveryFailed(HalterError):
    """A notification was probably not delivered. The message contains no secret.

    With `may_retry`, another attempt may succeed.
    """

    def __init__(self, sentence: str, *, may_retry: bool) -> None:
        super().__init__(sentence)
        self.may_retry = may_retry


class Sender(Protocol):
    """A notification channel."""

    async def send(self, notification: OutgoingNotification) -> None:
        """Send a notification, or raise DeliveryFailed. After a cancellation it may still have been sent."""
        ...
