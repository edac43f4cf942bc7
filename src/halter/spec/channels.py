"""The keys of notifications and their channels."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from halter.spec.forms import (
    Address,
    HeaderName,
    HeaderValue,
    MailAddress,
    Name,
    NonEmptyText,
    SecretReference,
    Spec,
    UnusableKey,
)


class Channel(Spec, frozen=True, kw_only=True, tag_field="type"):
    """A channel for notifications."""

    HIDDEN: ClassVar[bool] = True
    KIND: ClassVar[str] = "Type of the channel."
    MISSING: ClassVar[str] = "is of type {kind}, which needs `{key}`; write it."
    FOREIGN: ClassVar[str] = (
        "does not apply to a channel of type {kind}, which takes {keys}; remove it, or change `type`."
    )

    name: Annotated[Name, Meta(description="Name of the channel.")]


class InAppChannel(Channel, frozen=True, kw_only=True, tag="in_app"):
    """The app itself, which shows every notification."""

    FOREIGN: ClassVar[str] = (
        "does not apply to a channel of type in_app, which takes only a name; remove it, or change `type`."
    )


class EmailChannel(Channel, frozen=True, kw_only=True, tag="email"):
    """E-mail through one mail server."""

    to: Annotated[tuple[MailAddress, ...], Meta(description="Recipients of an e-mail.")]
    sender: Annotated[MailAddress, Meta(description="Sender of an e-mail.")]
    host: Annotated[NonEmptyText, Meta(description="Host of the mail server.")]
    port: (
        Annotated[
            int, Meta(ge=1, le=65535, description="Port of the mail server; by default 465, 587 or 25, by `security`.")
        ]
        | UnsetType
    ) = UNSET
    security: Annotated[
        Literal["tls", "starttls", "none"], Meta(description="Encryption of the connection to the mail server.")
    ] = "starttls"
    username: Annotated[NonEmptyText, Meta(description="User name for the mail server.")] | UnsetType = UNSET
    password: (
        Annotated[SecretReference, Meta(description="Password for the mail server, as `${secret:NAME}`.")] | UnsetType
    ) = UNSET

    def require_fit(self) -> None:
        if not self.to:
            raise UnusableKey(self.MISSING.format(kind="email", key="to"))
        if self.username is UNSET and self.password is not UNSET:
            raise UnusableKey("needs a `username`; write it, or remove `password`.", "password")
        if self.password is UNSET and self.username is not UNSET:
            raise UnusableKey("needs a `password`; write it, or remove `username`.", "username")
        if self.password is not UNSET and self.security == "none" and not _is_here(self.host):
            sentence = "is none, so the password would be sent in plain text; write starttls or tls."
            raise UnusableKey(sentence, "security")


class WebhookChannel(Channel, frozen=True, kw_only=True, tag="webhook"):
    """A URL to which notifications are posted."""

    url: Annotated[Address, Meta(description="URL of a webhook.")]
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of a webhook; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}

    def require_fit(self) -> None:
        if not self.url.startswith("http"):
            raise UnusableKey("is a WebSocket URL; write one that begins with https:// or http://.", "url")


class AppriseChannel(Channel, frozen=True, kw_only=True, tag="apprise"):
    """A service of Apprise."""

    service: Annotated[SecretReference, Meta(description="Apprise URL of a service, as `${secret:NAME}`.")]


AnyChannel = InAppChannel | EmailChannel | WebhookChannel | AppriseChannel


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Notify(Spec, frozen=True):
    """The notifications of an agent."""

    channels: Annotated[
        tuple[AnyChannel, ...], Meta(description="Channels for notifications; by default the app only.")
    ] = ()
    on: Annotated[
        tuple[Literal["halted", "failed", "waiting", "quarantined"], ...],
        Meta(description="Conditions that the runtime reports, in addition to the agent's own notifications."),
    ] = ("halted", "failed", "waiting", "quarantined")
