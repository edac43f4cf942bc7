"""The sender that belongs to a channel. What a channel must have was checked when its file was read."""

import ssl
from collections.abc import Callable

from halter.core.tasks import Channel
from halter.core.telling import Letter, Sender

Reveal = Callable[[str], str]
"""Tells the value of a secret; KeyError if there is none."""


class InApp:
    """Whoever opens the app sees it there: nothing has to be sent."""

    async def send(self, letter: Letter) -> None:
        """Be content."""


def sender_for(channel: Channel, reveal: Reveal, tls: ssl.SSLContext | None = None) -> Sender:
    """Make the sender of a channel. With `tls`, other authorities are trusted than the usual ones."""
    match channel.type:
        case "in_app":
            return InApp()
        case "email":
            from halter.channels.mail import Mail

            return Mail(channel, reveal, tls)
        case "webhook":
            from halter.channels.webhook import Hook

            return Hook(channel, reveal, tls)
        case "apprise":
            from halter.channels.service import Service

            return Service(channel, reveal)
