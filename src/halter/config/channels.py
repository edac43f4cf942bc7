"""What can be known to be wrong with a channel before anything is sent over it."""

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.config.load import KeyPath, Wrong
from halter.config.shape import dotted
from halter.core.tasks import Channel, ChannelType, Notify
from halter.core.text import listed

_TAKES: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {
        "in_app": (),
        "email": ("to", "sender", "host", "port", "security", "username", "password"),
        "webhook": ("url", "headers"),
        "apprise": ("service",),
    }
)
"""The keys of a channel that mean something to each type."""
_NEEDS: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {"in_app": (), "email": ("to", "sender", "host"), "webhook": ("url",), "apprise": ("service",)}
)
_COMMON: Final = ("name", "type")
_MAIL: Final = re.compile(r"[^\s@,;<>\"]+@[^\s@,;<>\"]+")
CHANNELS: Final[KeyPath] = ("notify", "channels")


def misled(notify: Notify) -> Iterator[Wrong]:
    """List what is wrong with channels, each by itself, and with their names."""
    seen: set[str] = set()
    for index, channel in enumerate(notify.channels):
        path = (*CHANNELS, index)
        yield from _of_channel(channel, path)
        if channel.name in seen:
            there = dotted((*path, "name"))
            yield (*path, "name"), f"`{there}` is `{channel.name}`, as that of another; choose another name."
        seen.add(channel.name)


def _of_channel(channel: Channel, path: KeyPath) -> Iterator[Wrong]:
    kind, usual = channel.type, Channel(name=channel.name, type=channel.type)
    for key in Channel.__struct_fields__:
        if key not in (*_COMMON, *_TAKES[kind]) and getattr(channel, key) != getattr(usual, key):
            sentence = f"`{dotted((*path, key))}` means nothing to a channel of type {kind}"
            yield (*path, key), f"{sentence}, {_taken(kind)}; remove it, or change `type`."
    for key in _NEEDS[kind]:
        if getattr(channel, key) == getattr(usual, key):
            yield path, f"`{dotted(path)}` is of type {kind}, which needs `{key}`; write it."
    match kind:
        case "email":
            yield from _of_mail(channel, path)
        case "webhook":
            yield from _of_address(channel, (*path, "url"))
        case "in_app" | "apprise":
            pass


def _taken(kind: ChannelType) -> str:
    return f"which takes {listed(_TAKES[kind])}" if _TAKES[kind] else "which takes no more than a name"


def _of_mail(channel: Channel, path: KeyPath) -> Iterator[Wrong]:
    for at, address in _addresses(channel, path):
        if not _MAIL.fullmatch(address) or not address.isprintable():
            yield at, f"`{dotted(at)}` is no e-mail address; write one alone, as in ada@example.com."
    if (channel.username is UNSET) != (channel.password is UNSET):
        has, lacks = ("password", "username") if channel.username is UNSET else ("username", "password")
        yield (*path, has), f"`{dotted((*path, has))}` needs a `{lacks}` beside it; write it, or remove `{has}`."
    if channel.password is not UNSET and channel.security == "none" and not _is_here(channel.host or ""):
        sentence = f"`{dotted((*path, 'security'))}` is none, so the password would be sent for all to read"
        yield (*path, "security"), f"{sentence}; write starttls or tls."


def _addresses(channel: Channel, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    yield from (((*path, "to", index), address) for index, address in enumerate(channel.to))
    if channel.sender is not UNSET:
        yield (*path, "sender"), channel.sender


def _is_here(host: str) -> bool:
    """Tell whether what is sent to a host stays on this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _of_address(channel: Channel, path: KeyPath) -> Iterator[Wrong]:
    if channel.url is not UNSET and urlsplit(channel.url).scheme not in {"http", "https"}:
        yield path, f"`{dotted(path)}` is a WebSocket, and a webhook is not; begin it with https:// or http://."
