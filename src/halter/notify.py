"""Ways to notify people: each channel sends one message, or says why it could not."""

import asyncio
import hashlib
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP as WIRE
from email.utils import format_datetime
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET

from halter.core.agent_spec import Channel
from halter.core.clock import SECOND
from halter.core.errors import explain_extra
from halter.core.ports import DeliveryFailed, OutgoingNotification, Sender
from halter.core.text import clean, shorten, to_one_line
from halter.core.tools import substitute_secrets

if TYPE_CHECKING:
    from aiosmtplib import SMTP, SMTPResponseException


def reveal_secrets(value: Any, reveal: Callable[[str], str], channel: str) -> Any:
    """Fills in secrets. A missing one may be set by the next attempt."""
    try:
        return substitute_secrets(value, reveal)
    except KeyError as missing:
        name = str(missing.args[0])
        sentence = f"The channel {channel} needs the secret {name}, which is not set: set HALTER_SECRET_{name}."
        raise DeliveryFailed(sentence, may_retry=True) from None


WEBHOOK_TIMEOUT: Final = 30
"""Seconds until the response starts."""
DELIVERY_HEADER: Final = "Halter-Delivery"

_OK: Final = range(200, 300)
_LATER: Final = frozenset({408, 425, 429})
_BROKEN: Final = 500
_ELSEWHERE: Final = range(300, 400)


class WebhookSender:
    """Posts notifications to a URL. Addresses of this network are allowed: a person configured it."""

    def __init__(self, channel: Channel, reveal: Callable[[str], str], tls: ssl.SSLContext | None = None) -> None:
        self._channel = channel
        self._url = channel.url or ""
        self._reveal = reveal
        self._tls = tls

    async def send(self, letter: OutgoingNotification) -> None:
        from httpx2 import InvalidURL, LocalProtocolError, TransportError

        headers = self._headers(letter)
        try:
            async with asyncio.timeout(WEBHOOK_TIMEOUT):
                status = await self._post(msgspec.json.encode(letter), headers)
        except TimeoutError:
            raise self._undelivered("gave no answer in time", may_retry=True) from None
        except (LocalProtocolError, InvalidURL, UnicodeEncodeError):
            # The library's message quotes its input, which may hold a key.
            raise self._undelivered("cannot be asked: look at the address and its headers", may_retry=False) from None
        except TransportError as error:
            raise self._undelivered(f"cannot be reached: {type(error).__name__}", may_retry=True) from None
        if status in _ELSEWHERE:
            sentence = f"sends on to another place ({status}): write that address, if it is right"
            raise self._undelivered(sentence, may_retry=False)
        if status not in _OK:
            raise self._undelivered(f"answered {status}", may_retry=status in _LATER or status >= _BROKEN)

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """Posts a body and returns the status; the response body is not read."""
        from httpx2 import AsyncClient, AsyncHTTPTransport

        self._tls = self._tls or await asyncio.to_thread(_make_tls_context)
        transport = AsyncHTTPTransport(verify=self._tls, trust_env=False)
        async with (
            AsyncClient(transport=transport, trust_env=False, timeout=None) as client,
            client.stream("POST", self._url, content=body, headers=headers) as response,
        ):
            return response.status_code

    def _headers(self, letter: OutgoingNotification) -> Mapping[str, str]:
        """Our headers override those of the file, whose secrets go to this URL alone."""
        theirs: Mapping[str, Any] = reveal_secrets(dict(self._channel.headers), self._reveal, self._channel.name)
        ours = {"content-type": "application/json", DELIVERY_HEADER.lower(): letter.id}
        usual = {"user-agent": f"halter/{version('halter')}"}
        return {**usual, **{name.lower(): value for name, value in theirs.items()}, **ours}

    def _undelivered(self, text: str, *, may_retry: bool) -> DeliveryFailed:
        return DeliveryFailed(f"The webhook at {urlsplit(self._url).hostname} {text}.", may_retry=may_retry)


@cache
def _make_tls_context() -> ssl.SSLContext:
    """Read the machine's certificates once for all."""
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=False)


SERVICE_TIMEOUT: Final = 60
"""Seconds for one letter."""


class AppriseSender:
    """Sends notifications through a service of Apprise."""

    def __init__(self, channel: Channel, reveal: Callable[[str], str]) -> None:
        self._channel = channel
        self._reveal = reveal

    async def send(self, letter: OutgoingNotification) -> None:
        """Sends from a thread, since the library blocks. An abandoned thread ends by its own deadline."""
        address: str = reveal_secrets(self._channel.service or "", self._reveal, self._channel.name)
        await asyncio.to_thread(self._send_one, address, letter)

    def _send_one(self, address: str, letter: OutgoingNotification) -> None:
        services = self._open()
        # The library's messages may hold the address, so they are not used.
        if not services.add(address):
            sentence = "has an address that apprise does not know: look at its secret"
            raise self._undelivered(sentence, may_retry=False)
        if not services.notify(
            title=to_one_line(letter.subject), body=clean(letter.text) or " ", timeout=SERVICE_TIMEOUT
        ):
            raise self._undelivered("could not be told", may_retry=True)

    def _open(self) -> Any:
        try:
            from apprise import Apprise
        except ImportError:
            raise DeliveryFailed(explain_extra("notify", f"The channel {self._channel.name}"), may_retry=True) from None
        return Apprise()

    def _undelivered(self, text: str, *, may_retry: bool) -> DeliveryFailed:
        return DeliveryFailed(f"The channel {self._channel.name} {text}.", may_retry=may_retry)


RevealSecret = Callable[[str], str]
"""Returns the value of a secret; raises KeyError if there is none."""


class InAppSender:
    """Sends nothing: the app shows the notification."""

    async def send(self, letter: OutgoingNotification) -> None: ...


def make_sender(channel: Channel, reveal: RevealSecret, tls: ssl.SSLContext | None = None) -> Sender:
    """Makes the sender of a channel; `tls` replaces the default certificate authorities."""
    match channel.type:
        case "in_app":
            return InAppSender()
        case "email":
            return MailSender(channel, reveal, tls)
        case "webhook":
            return WebhookSender(channel, reveal, tls)
        case "apprise":
            return AppriseSender(channel, reveal)


MAIL_TIMEOUT: Final = 60
"""Seconds for one message, from connect to the last reply."""
QUIT_TIMEOUT: Final = 5
CANCEL_INTERVAL: Final = 0.05
PERMANENT_SMTP_ERROR: Final = 500
LONGEST_SUBJECT: Final = 200

_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_SAID: Final = 200


class MailSender:
    """Sends e-mail through one mail server."""

    def __init__(self, channel: Channel, reveal: Callable[[str], str], tls: ssl.SSLContext | None = None) -> None:
        self._channel = channel
        self._reveal = reveal
        self._tls = tls

    async def send(self, letter: OutgoingNotification) -> None:
        from aiosmtplib import SMTPException

        client = self._client()
        handing = asyncio.create_task(self._hand_over(client, compose_mail(letter, self._channel)))
        try:
            await asyncio.wait({handing}, timeout=MAIL_TIMEOUT)
            if not handing.done():
                raise self._undelivered("gave no answer in time", may_retry=True)
            await handing
        except (SMTPException, OSError, ValueError) as error:
            raise self._describe_error(error) from None
        finally:
            await _stop_task(handing)
            # Close without QUIT: a cancelled task does not wait for a server.
            client.close()

    async def _hand_over(self, client: "SMTP", message: EmailMessage) -> None:
        await client.connect()
        refused, _ = await client.send_message(message)
        await _quit(client)
        if refused:
            raise self._make_partial_failure([(name, answer.code) for name, answer in refused.items()])

    def _client(self) -> "SMTP":
        from aiosmtplib import SMTP

        channel, login = self._channel, self._login()
        return SMTP(
            hostname=channel.host or "",
            port=channel.port or None,
            use_tls=channel.security == "tls",
            start_tls=channel.security == "starttls",
            tls_context=self._tls,
            timeout=MAIL_TIMEOUT,
            **login,
        )

    def _login(self) -> dict[str, Any]:
        username, password = self._channel.username, self._channel.password
        if username is UNSET or password is UNSET:
            return {}
        return {"username": username, "password": reveal_secrets(password, self._reveal, self._channel.name)}

    def _undelivered(self, text: str, *, may_retry: bool) -> DeliveryFailed:
        return DeliveryFailed(f"The mail server {self._channel.host} {text}.", may_retry=may_retry)

    def _make_partial_failure(self, refused: Sequence[tuple[str, int]]) -> DeliveryFailed:
        """The other recipients have the mail; they recognise a second copy by its Message-ID."""
        names = ", ".join(f"{name} ({code})" for name, code in refused)
        may_retry = any(code < PERMANENT_SMTP_ERROR for _, code in refused)
        return self._undelivered(f"does not take letters for {shorten(clean(names), _SAID)}", may_retry=may_retry)

    def _describe_error(self, error: Exception) -> DeliveryFailed:
        """Describes an error. Server replies to a login may repeat the password, so they are left out."""
        import aiosmtplib as smtp

        match error:
            case smtp.SMTPRecipientsRefused():
                return self._make_partial_failure([(each.recipient, each.code) for each in error.recipients])
            case smtp.SMTPResponseException():
                return self._undelivered(self._refusal(error), may_retry=error.code < PERMANENT_SMTP_ERROR)
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
                text = f"refuses the letter: {error.code} {shorten(_join_lines(error.message), _SAID)}"
                return text.rstrip(". ")
            case _:
                return f"answered {error.code}"


async def _stop_task(task: asyncio.Task[None]) -> None:
    """Cancels a task until it ends: the library's own waits can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_INTERVAL)
    if not task.cancelled():
        task.exception()


async def _quit(client: "SMTP") -> None:
    """Sends QUIT. The server has the mail by now, so failures do not matter."""
    from aiosmtplib import SMTPException

    with suppress(SMTPException, OSError, TimeoutError):
        async with asyncio.timeout(QUIT_TIMEOUT):
            await client.quit()


def compose_mail(letter: OutgoingNotification, channel: Channel) -> EmailMessage:
    """Writes a notification as an e-mail. The subject is one line, so that it cannot inject a header."""
    sender = channel.sender or ""
    message = EmailMessage(policy=WIRE)
    message["From"] = sender
    message["To"] = ", ".join(channel.to)
    message["Subject"] = shorten(_join_lines(letter.subject), LONGEST_SUBJECT)
    message["Date"] = format_datetime(datetime.fromtimestamp(letter.at // SECOND, UTC))
    message["Message-ID"] = make_message_id(letter.id, sender)
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(_add_footer(letter))
    return message


def make_message_id(delivery: str, sender: str) -> str:
    """Makes the Message-ID, the same for every copy."""
    name = delivery if _PLAIN.fullmatch(delivery) else hashlib.sha256(delivery.encode("utf-8", "replace")).hexdigest()
    domain = sender.rpartition("@")[2]
    return f"<halter.{name}@{domain if _PLAIN.fullmatch(domain) else 'halter.invalid'}>"


def _add_footer(letter: OutgoingNotification) -> str:
    words = [f"From: {letter.agent}"]
    words += [f"Session: {letter.session}"] if letter.session else []
    words += [f"About: {letter.about}"] if letter.about else []
    return clean(f"{letter.text.rstrip()}\n\n-- \n" + "\n".join(words) + "\n")


def _join_lines(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in clean(text)).split())
