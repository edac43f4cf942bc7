"""The keys of notifications and their channels."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from halter.spec.forms import Address, HeaderName, HeaderValue, Name, NonEmptyText, SecretReference, Spec

ChannelType = Literal["in_app", "email", "webhook", "apprise"]


class Channel(Spec, frozen=True):
    """One channel for notifications."""

    HIDDEN: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="Name of the channel.")]
    type: Annotated[ChannelType, Meta(description="Type of the channel.")]
    to: Annotated[tuple[NonEmptyText, ...], Meta(description="Recipients of an e-mail.")] = ()
    sender: Annotated[NonEmptyText, Meta(description="Sender of an e-mail.")] | UnsetType = UNSET
    host: Annotated[NonEmptyText, Meta(description="Host of the mail server.")] | UnsetType = UNSET
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
    url: Annotated[Address, Meta(description="URL of a webhook.")] | UnsetType = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of a webhook; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    service: (
        Annotated[SecretReference, Meta(description="Apprise URL of a service, as `${secret:NAME}`.")] | UnsetType
    ) = UNSET


class Notify(Spec, frozen=True):
    """The notifications of an agent."""

    channels: Annotated[
        tuple[Channel, ...], Meta(description="Channels for notifications; by default the app only.")
    ] = ()
    on: Annotated[
        tuple[Literal["halted", "failed", "waiting", "quarantined"], ...],
        Meta(description="Conditions that the runtime reports, in addition to the agent's own notifications."),
    ] = ("halted", "failed", "waiting", "quarantined")
