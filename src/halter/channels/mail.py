"""E-mail, over a server that takes it further.

Every copy of a letter has the same Message-ID, so that a mailbox knows a second one as such.
"""

import asyncio
import hashlib
import re
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP as WIRE
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from halter.channels.secrets import revealed
from halter.core.clock import SECOND
from halter.core.tasks import Channel
from halter.core.telling import Letter, Undelivered
from halter.core.text import clean, shorten

if TYPE_CHECKING:
    from aiosmtplib import SMTP, SMTPResponseException

TIMEOUT: Final = 60
"""Seconds for one letter, from the first packet to the last answer."""
FAREWELL: Final = 5
INSISTING: Final = 0.05
REFUSED_FOR_GOOD: Final = 500
LONGEST_SUBJECT: Final = 200

_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_SAID: Final = 200


class Mail:
    """A mailbox, or several, behind one mail server."""

    def __init__(self, channel: Channel, reveal: Callable[[str], str], tls: ssl.SSLContext | None = None) -> None:
        self._channel = channel
        self._reveal = reveal
        self._tls = tls

    async def send(self, letter: Letter) -> None:
        """Hand a letter to the mail server."""
        from aiosmtplib import SMTPException

        client = self._client()
        handing = asyncio.create_task(self._handed_over(client, composed(letter, self._channel)))
        try:
            await asyncio.wait({handing}, timeout=TIMEOUT)
            if not handing.done():
                raise self._undelivered("gave no answer in time", may_retry=True)
            await handing
        except (SMTPException, OSError, ValueError) as error:
            raise self._told(error) from None
        finally:
            await _stopped(handing)
            # Closed rather than left politely: whoever was told to stop does not wait for a server.
            client.close()

    async def _handed_over(self, client: "SMTP", message: EmailMessage) -> None:
        await client.connect()
        refused, _ = await client.send_message(message)
        await _farewell(client)
        if refused:
            raise self._some_refused([(name, answer.code) for name, answer in refused.items()])

    def _client(self) -> "SMTP":
        from aiosmtplib import SMTP

        channel, login = self._channel, self._login()
        return SMTP(
            hostname=channel.host or "",
            port=channel.port or None,
            use_tls=channel.security == "tls",
            start_tls=channel.security == "starttls",
            tls_context=self._tls,
            timeout=TIMEOUT,
            **login,
        )

    def _login(self) -> dict[str, Any]:
        username, password = self._channel.username, self._channel.password
        if username is UNSET or password is UNSET:
            return {}
        return {"username": username, "password": revealed(password, self._reveal, self._channel.name)}

    def _undelivered(self, said: str, *, may_retry: bool) -> Undelivered:
        return Undelivered(f"The mail server {self._channel.host} {said}.", may_retry=may_retry)

    def _some_refused(self, refused: Sequence[tuple[str, int]]) -> Undelivered:
        """The others have got it by now; they know a second copy by its Message-ID."""
        names = ", ".join(f"{name} ({code})" for name, code in refused)
        may_retry = any(code < REFUSED_FOR_GOOD for _, code in refused)
        return self._undelivered(f"does not take letters for {shorten(clean(names), _SAID)}", may_retry=may_retry)

    def _told(self, error: Exception) -> Undelivered:
        """Put an error into a sentence. What was said at the login may repeat a password: it is left out."""
        import aiosmtplib as smtp

        match error:
            case smtp.SMTPRecipientsRefused():
                return self._some_refused([(each.recipient, each.code) for each in error.recipients])
            case smtp.SMTPResponseException():
                return self._undelivered(self._refusal(error), may_retry=error.code < REFUSED_FOR_GOOD)
            case OSError():
                return self._undelivered(f"cannot be reached: {type(error).__name__}", may_retry=True)
            case smtp.SMTPException():
                said = f"does not offer what `security: {self._channel.security}` or the login needs"
                return self._undelivered(said, may_retry=False)
            case _:
                said = "cannot be given this letter: look at the addresses of the channel, and at its password"
                return self._undelivered(said, may_retry=False)

    def _refusal(self, error: "SMTPResponseException") -> str:
        from aiosmtplib import SMTPAuthenticationError, SMTPDataError, SMTPSenderRefused

        match error:
            case SMTPAuthenticationError():
                return f"refuses the login of {self._channel.username} ({error.code}): look at its name and password"
            case SMTPDataError() | SMTPSenderRefused():
                said = f"refuses the letter: {error.code} {shorten(_on_one_line(error.message), _SAID)}"
                return said.rstrip(". ")
            case _:
                return f"answered {error.code}"


async def _stopped(task: asyncio.Task[None]) -> None:
    """End a task that may be told so more than once: the library's own waits can swallow the first word."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=INSISTING)
    if not task.cancelled():
        task.exception()


async def _farewell(client: "SMTP") -> None:
    """Take leave politely. The letter is in the server's hands by now, so nothing that goes wrong here matters."""
    from aiosmtplib import SMTPException

    with suppress(SMTPException, OSError, TimeoutError):
        async with asyncio.timeout(FAREWELL):
            await client.quit()


def composed(letter: Letter, channel: Channel) -> EmailMessage:
    """Write a letter as an e-mail. A subject is one line, whatever it holds: no header can be smuggled in."""
    sender = channel.sender or ""
    message = EmailMessage(policy=WIRE)
    message["From"] = sender
    message["To"] = ", ".join(channel.to)
    message["Subject"] = shorten(_on_one_line(letter.subject), LONGEST_SUBJECT)
    message["Date"] = format_datetime(datetime.fromtimestamp(letter.at // SECOND, UTC))
    message["Message-ID"] = message_id(letter.id, sender)
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(_footed(letter))
    return message


def message_id(delivery: str, sender: str) -> str:
    """Make the name of a letter, the same for every copy of it."""
    name = delivery if _PLAIN.fullmatch(delivery) else hashlib.sha256(delivery.encode("utf-8", "replace")).hexdigest()
    domain = sender.rpartition("@")[2]
    return f"<halter.{name}@{domain if _PLAIN.fullmatch(domain) else 'halter.invalid'}>"


def _footed(letter: Letter) -> str:
    """Say at the end who sends it and why."""
    words = [f"From: {letter.agent}"]
    words += [f"Session: {letter.session}"] if letter.session else []
    words += [f"About: {letter.about}"] if letter.about else []
    return clean(f"{letter.text.rstrip()}\n\n-- \n" + "\n".join(words) + "\n")


def _on_one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in clean(text)).split())
