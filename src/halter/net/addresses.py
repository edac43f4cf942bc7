"""Which addresses an agent may reach: public ones, and those that the operator allows.

A name is resolved once, all of its addresses are checked, and the connection goes to a checked address, so a second
look-up cannot lead elsewhere.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from halter.core.threads import ThreadPerTaskExecutor
from halter.net.failures import HttpFailure

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

ResolveHost = Callable[[str, int], Awaitable[Sequence[str]]]

_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# Tunnels and special-purpose networks in the global ranges: they can lead to addresses that are not public. The last
# line is what a cloud answers only to its own machines: Azure's wire server, and the services of IBM Cloud.
_SPECIAL_NETWORKS: Final = tuple(
    map(
        ip_network,
        (
            *("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"),
            *("168.63.129.16/32", "161.26.0.0/16", "166.8.0.0/14"),
        ),
    )
)


def is_public(address: IpAddress) -> bool:
    """Return true if an address belongs to the public internet."""
    inner_address = _unwrap_address(address)
    if isinstance(inner_address, IPv6Address) and inner_address not in _GLOBAL_V6:
        return False
    return inner_address.is_global and not inner_address.is_multicast and not _is_in(inner_address, _SPECIAL_NETWORKS)


@dataclass(frozen=True)
class AddressCheck:
    """How names are resolved, and the networks that are allowed besides public addresses."""

    resolve: ResolveHost
    allowed: tuple[IpNetwork, ...] = ()

    async def list_addresses(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host. Raises HttpFailure unless all of them are allowed."""
        try:
            addresses = await self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise HttpFailure("UnknownHost", f"Cannot resolve {host}: {error}", is_sent=False) from error
        if not addresses:
            raise HttpFailure("UnknownHost", f"{host} has no address.", is_sent=False)
        for address in addresses:
            if not self._is_allowed(ip_address(address.partition("%")[0])):
                reason = f"{host} resolves to {address}, which is not a public address."
                raise HttpFailure("ForbiddenAddress", reason, is_sent=False)
        return addresses

    def _is_allowed(self, address: IpAddress) -> bool:
        return is_public(address) or _is_in(_unwrap_address(address), self.allowed)


def _unwrap_address(address: IpAddress) -> IpAddress:
    """Extract the IPv4 address that an IPv6 address carries."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def _is_in(address: IpAddress, networks: Sequence[IpNetwork]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve with the system's resolver, which also reads decimal, octal and hexadecimal addresses."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(ThreadPerTaskExecutor(), _resolve_addresses, host, port)


def _resolve_addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(socket_address[0]) for *_, socket_address in infos))
