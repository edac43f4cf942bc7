"""Which addresses of the internet are public, and which lead back inside."""

import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from halter.core.tools import Failed
from halter.tools.group import Threads

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Finds the addresses of a host for a port."""

_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# Tunnels and special purposes within the global ranges: what is behind them is not what they look like.
_SPECIAL: Final = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")))


def is_public(address: Address) -> bool:
    """Tell whether an address belongs to the public internet and to nothing nearer."""
    plain = _unwrapped(address)
    if isinstance(plain, IPv6Address) and plain not in _GLOBAL_V6:
        return False
    return plain.is_global and not plain.is_multicast and not _is_in(plain, _SPECIAL)


def checked(host: str, found: Sequence[str], allowed: Sequence[Network]) -> Sequence[str]:
    """Return the addresses of a host if every one of them may be reached; one that may not spoils them all."""
    if not found:
        raise Failed("UnknownHost", f"{host} has no address.")
    for text in found:
        address = ip_address(text.partition("%")[0])
        if not is_public(address) and not _is_in(_unwrapped(address), allowed):
            raise Failed("ForbiddenAddress", f"{host} leads to {text}, which is not on the public internet.")
    return found


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system, which also reads decimal, octal and hexadecimal forms of addresses."""
    import asyncio

    look_up = asyncio.get_running_loop().run_in_executor(Threads(), _look_up, host, port)
    try:
        return await look_up
    except (OSError, UnicodeError) as error:
        raise Failed("UnknownHost", f"{host} cannot be found: {error}") from error


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def _unwrapped(address: Address) -> Address:
    """Take a v4 address out of the v6 address that carries it to the same place."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
