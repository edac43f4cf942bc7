"""The notification channels: webhook, Apprise and e-mail. A failed delivery raises DeliveryFailed."""

import asyncio
import hashlib
import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET

from halter.core.clock import SECOND
from halter.core.errors import require_module
from halter.core.notifications import DeliveryFailed, OutgoingNotification, Sender
from halter.core.text import clean, shorten, to_one_line
from halter.core.tools import substitute_secrets
from halter.net.client import SUCCESS, HttpClient, HttpRequest
from halter.net.failures import HttpFailure
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.spec.channels import AnyChannel, AppriseChannel, EmailChannel, InAppChannel, WebhookChannel
from halter_agents import VERSION

if TYPE_CHECKING:
    from aiosmtplib import SMTP, SMTPResponseException


RevealSecret = Callable[[str], str]
"""Returns the value of a secret; raises KeyError if there is none."""


def reveal_secrets(value: Any, reveal: RevealSecret, channel: str) -> Any:
    """Insert secrets into a value. A missing secret may be retried, since it may be set by the next attempt."""
    try:
        return substitute_secrets(value, reveal)
    except KeyError as error:
        name = str(error.args[0])
        sentence = f"The channel {channel} needs the secret {name}, which is not set. Set HALTER_SECRET_{name}."
        raise DeliveryFailed(sentence, may_retry=True) from None


WEBHOOK_TIMEOUT: Final = 30
"""Seconds until the response starts."""
DELIVERY_HEADER: Final = "Halter-Delivery"

_RETRYABLE_STATUSES: Final = frozenset({408, 425, 429})
_SERVER_ERROR: Final = 500
_REDIRECT_STATUSES: Final = range(300, 400)


class WebhookSender:
    """A channel that posts notifications to a URL. Local addresses are allowed, because a person configured the URL."""

    def __init__(self, channel: WebhookChannel, reveal: RevealSecret, tls: ssl.SSLContext | None = None) -> None:
        self._channel = channel
        self._url = channel.url
        self._reveal = reveal
        self._tls = tls

    async def send(self, notification: OutgoingNotification) -> None:
        headers = self._headers(notification)
        try:
            async with asyncio.timeout(WEBHOOK_TIMEOUT):
                status = await self._post(msgspec.json.encode(notification), headers)
        except TimeoutError:
            raise self._make_failure("did not answer in time", may_retry=True) from None
        except HttpFailure as failure:
            if failure.kind in {"BadUrl", "BadRequest"}:
                raise self._make_failure("cannot be called: check the URL and its headers", may_retry=False) from None
            raise self._make_failure(f"cannot be reached: {failure.reason}", may_retry=True) from None
        if status in _REDIRECT_STATUSES:
            sentence = f"redirects to another URL ({status}): use that URL if it is correct"
            raise self._make_failure(sentence, may_retry=False)
        if status not in SUCCESS:
            raise self._make_failure(
                f"answered {status}", may_retry=status in _RETRYABLE_STATUSES or status >= _SERVER_ERROR
            )

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """Post a body and return the status; the response body is not read."""
        request = HttpRequest("POST", self._url, headers, body)
        async with HttpClient(HttpxTransport(HttpxTerms(tls=self._tls))) as client, client.open(request) as response:
            return response.status

    def _headers(self, notification: OutgoingNotification) -> Mapping[str, str]:
        """Merge the headers of the file with the required ones, which win. Secrets of the file go to this URL only."""
        file_headers: Mapping[str, Any] = reveal_secrets(dict(self._channel.headers), self._reveal, self._channel.name)
        required_headers = {"content-type": "application/json", DELIVERY_HEADER.lower(): notification.id}
        defaults = {"user-agent": f"halter/{VERSION}"}
        return {**defaults, **{name.lower(): value for name, value in file_headers.items()}, **required_headers}

    def _make_failure(self, text: str, *, may_retry: bool) -> DeliveryFailed:
        return DeliveryFailed(f"The webhook at {urlsplit(self._url).hostname} {text}.", may_retry=may_retry)


SERVICE_TIMEOUT: Final = 60
"""Seconds for one notification."""


class AppriseSender:
    """A channel that sends notifications through a service of Apprise."""

    def __init__(self, channel: AppriseChannel, reveal: RevealSecret) -> None:
        self._channel = channel
        self._reveal = reveal

    async def send(self, notification: OutgoingNotification) -> None:
        """Send from a thread, since the library blocks. An abandoned thread ends at its own deadline."""
        address: str = reveal_secrets(self._channel.service, self._reveal, self._channel.name)
        await asyncio.to_thread(self._send_one, address, notification)

    def _send_one(self, address: str, notification: OutgoingNotification) -> None:
        services = self._open()
        # The library's messages may contain the URL, so they are not used.
        if not services.add(address):
            sentence = "has a URL that Apprise does not know: check its secret"
            raise self._make_failure(sentence, may_retry=False)
        if not services.notify(
            title=to_one_line(notification.subject), body=clean(notification.text) or " ", timeout=SERVICE_TIMEOUT
        ):
            raise self._make_failure("could not send the notification", may_retry=True)

    def _open(self) -> Any:
        from apprise import Apprise

        return Apprise()

    def _make_failure(self, text: str, *, may_retry: bool) -> DeliveryFailed:
        return DeliveryFailed(f"The channel {self._channel.name} {text}.", may_retry=may_retry)


class InAppSender:
    """A channel that sends nothing, because the app shows the notification."""

    async def send(self, notification: OutgoingNotification) -> None: ...


def require_libraries(channels: Iterable[AnyChannel]) -> None:
    """Raise ConfigError for the first channel whose library is not installed."""
    for channel in channels:
        match channel:
            case AppriseChannel():
                require_module("apprise", "notify", f"The channel {channel.name}")
            case EmailChannel():
                require_module("aiosmtplib", "notify", f"The channel {channel.name}")
            case InAppChannel() | WebhookChannel():
                pass


def make_sender(channel: AnyChannel, reveal: RevealSecret, tls: ssl.SSLContext | None = None) -> Sender:
    """Make the sender of a channel; `tls` replaces the default certificate authorities."""
    match channel:
        case InAppChannel():
            return InAppSender()
        case EmailChannel():
            return MailSender(channel, reveal, tls)
        case WebhookChannel():
            return WebhookSender(channel, reveal, tls)
        case AppriseChannel():
            return AppriseSender(channel, reveal)


MAIL_TIMEOUT: Final = 60
"""Seconds for one message, from connect to the last reply."""
QUIT_TIMEOUT: Final = 5
CANCEL_INTERVAL: Final = 0.05
PERMANENT_SMTP_ERROR: Final = 500
MAX_SUBJECT_LENGTH: Final = 200

_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MAX_QUOTE: Final = 200


class MailSender:
    """A channel that sends e-mail through one mail server."""

    def __init__(self, channel: EmailChannel, reveal: RevealSecret, tls: ssl.SSLContext | None = None) -> None:
        self._channel = channel
        self._reveal = reveal
        self._tls = tls

    async def send(self, notification: OutgoingNotification) -> None:
        from aiosmtplib import SMTPException

        client = self._client()
        delivery = asyncio.create_task(self._deliver(client, compose_mail(notification, self._channel)))
        try:
            await asyncio.wait({delivery}, timeout=MAIL_TIMEOUT)
            if not delivery.done():
                raise self._make_failure("did not answer in time", may_retry=True)
            await delivery
        except (SMTPException, OSError, ValueError) as error:
            raise self._convert_error(error) from None
        finally:
            await _stop_task(delivery)
            # Closed without QUIT: a cancelled task must not wait for a server.
            client.close()

    async def _deliver(self, client: "SMTP", message: EmailMessage) -> None:
        await client.connect()
        refusals, _ = await client.send_message(message)
        await _quit(client)
        if refusals:
            raise self._make_partial_failure([(name, answer.code) for name, answer in refusals.items()])

    def _client(self) -> "SMTP":
        from aiosmtplib import SMTP

        channel, login = self._channel, self._login()
        return SMTP(
            hostname=channel.host,
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

    def _make_failure(self, text: str, *, may_retry: bool) -> DeliveryFailed:
        return DeliveryFailed(f"The mail server {self._channel.host} {text}.", may_retry=may_retry)

    def _make_partial_failure(self, refusals: Sequence[tuple[str, int]]) -> DeliveryFailed:
        """Make the failure for some recipients. The others have the mail; a second copy has the same Message-ID."""
        names = ", ".join(f"{name} ({code})" for name, code in refusals)
        may_retry = any(code < PERMANENT_SMTP_ERROR for _, code in refusals)
        return self._make_failure(f"rejects mail for {shorten(clean(names), _MAX_QUOTE)}", may_retry=may_retry)

    def _convert_error(self, error: Exception) -> DeliveryFailed:
        """Make the failure for an error. Replies to a login may repeat the password, so they are left out."""
        import aiosmtplib

        match error:
            case aiosmtplib.SMTPRecipientsRefused():
                return self._make_partial_failure(
                    [(recipient.recipient, recipient.code) for recipient in error.recipients]
                )
            case aiosmtplib.SMTPResponseException():
                return self._make_failure(self._refusal(error), may_retry=error.code < PERMANENT_SMTP_ERROR)
            case OSError():
                return self._make_failure(f"cannot be reached: {type(error).__name__}", may_retry=True)
            case aiosmtplib.SMTPException():
                text = f"does not support `security: {self._channel.security}` or the login"
                return self._make_failure(text, may_retry=False)
            case _:
                text = "cannot accept this message: check the channel's addresses and password"
                return self._make_failure(text, may_retry=False)

    def _refusal(self, error: "SMTPResponseException") -> str:
        from aiosmtplib import SMTPAuthenticationError, SMTPDataError, SMTPSenderRefused

        match error:
            case SMTPAuthenticationError():
                return f"rejects the login of {self._channel.username} ({error.code}): check its name and password"
            case SMTPDataError() | SMTPSenderRefused():
                text = f"rejects the message: {error.code} {shorten(_join_lines(error.message), _MAX_QUOTE)}"
                return text.rstrip(". ")
            case _:
                return f"answered {error.code}"


async def _stop_task(task: asyncio.Task[None]) -> None:
    """Cancel a task until it ends: the library can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_INTERVAL)
    if not task.cancelled():
        task.exception()


async def _quit(client: "SMTP") -> None:
    """Send QUIT. The server already has the mail, so failures do not matter."""
    from aiosmtplib import SMTPException

    with suppress(SMTPException, OSError, TimeoutError):
        async with asyncio.timeout(QUIT_TIMEOUT):
            await client.quit()


def compose_mail(notification: OutgoingNotification, channel: EmailChannel) -> EmailMessage:
    """Compose the e-mail of a notification. The subject is one line, so that it cannot inject a header."""
    message = EmailMessage(policy=policy.SMTP)
    message["From"] = channel.sender
    message["To"] = ", ".join(channel.to)
    message["Subject"] = shorten(_join_lines(notification.subject), MAX_SUBJECT_LENGTH)
    message["Date"] = format_datetime(datetime.fromtimestamp(notification.at // SECOND, UTC))
    message["Message-ID"] = make_message_id(notification.id, channel.sender)
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(_add_footer(notification))
    return message


def make_message_id(delivery: str, sender: str) -> str:
    """Make the Message-ID, which is the same for every copy."""
    name = delivery if _PLAIN.fullmatch(delivery) else hashlib.sha256(delivery.encode("utf-8", "replace")).hexdigest()
    domain = sender.rpartition("@")[2]
    return f"<halter.{name}@{domain if _PLAIN.fullmatch(domain) else 'halter.invalid'}>"


def _add_footer(notification: OutgoingNotification) -> str:
    lines = [f"From: {notification.agent}"]
    lines += [f"Session: {notification.session}"] if notification.session else []
    lines += [f"About: {notification.about}"] if notification.about else []
    return clean(f"{notification.text.rstrip()}\n\n-- \n" + "\n".join(lines) + "\n")


def _join_lines(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in clean(text)).split())
