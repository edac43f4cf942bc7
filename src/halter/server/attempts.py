"""Wrong tokens are limited by where they come from, and nobody is locked out by a neighbour.

From one place so many wrong tokens may come in a minute. Then what comes from there is not looked at, unless it was
right there before: a person who works behind the same proxy as an attacker goes on working, and an attacker learns
nothing by going on.
"""

import hashlib
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

import msgspec

from halter.server.limits import Rates

MOST_PROVEN: Final = 10_000
PROXIED: Final = 10
"""So many times as much may come through a proxy on this machine, or from all IPv6 networks of one site."""
SITE: Final = 48
"""The bits by which an IPv6 site is known: many providers give a single customer all networks of one."""
FORWARDED: Final = b"x-forwarded-for"


class Place(msgspec.Struct, frozen=True):
    """Where a request came from: who is connected, and whom a proxy on this machine says it speaks for."""

    peer: str
    origin: str


def place_of(peer: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Place:
    """Name a place. Only what this machine's own proxy added last is believed; an IPv6 network is one place."""
    address = _address(peer)
    if address is None or not address.is_loopback:
        return Place(_network(peer), _network(peer))
    said = [value.decode("latin-1") for name, value in headers if name.lower() == FORWARDED]
    last = said[-1].rpartition(",")[2].strip() if said else ""
    return Place(_network(peer), _network(last if _address(last) is not None else peer))


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def _network(text: str) -> str:
    address = _address(text)
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return str(ip_network((address.packed[:8] + bytes(8), 64)))
    return text if address is None else str(address)


def _around(origin: str) -> str:
    """Name the site that an IPv6 network belongs to; other places belong to none."""
    return str(ip_network(origin).supernet(new_prefix=SITE)) if origin.endswith("/64") else ""


def name_of(shown: str) -> str:
    """Name what was shown, without keeping it."""
    return hashlib.sha256(shown.encode("utf-8", "replace")).hexdigest()


class Attempts:
    """How many wrong ones came from where, and what was right there."""

    def __init__(self, most: int) -> None:
        self._origins = Rates(most)
        self._peers = Rates(PROXIED * most)
        self._sites = Rates(PROXIED * most)
        self._proven: dict[tuple[str, str], None] = {}

    def wait(self, place: Place, shown: str, now: int) -> int:
        """Return how long it is until something is looked at; 0 where that is now."""
        if (place.origin, name_of(shown)) in self._proven:
            return 0
        through_proxy = 0 if place.origin == place.peer else self._peers.is_spent(place.peer, now)
        site = _around(place.origin)
        from_site = self._sites.is_spent(site, now) if site else 0
        return self._origins.is_spent(place.origin, now) or through_proxy or from_site

    def wrong(self, place: Place, shown: str, now: int) -> None:
        """Count one that was wrong, also where it was right before."""
        self._proven.pop((place.origin, name_of(shown)), None)
        self._origins.wait(place.origin, now)
        if place.origin != place.peer:
            self._peers.wait(place.peer, now)
        if site := _around(place.origin):
            self._sites.wait(site, now)

    def right(self, place: Place, shown: str) -> None:
        """Remember one that was right; the newest are kept."""
        key = (place.origin, name_of(shown))
        self._proven.pop(key, None)
        self._proven[key] = None
        if len(self._proven) > MOST_PROVEN:
            del self._proven[next(iter(self._proven))]

    def remembered(self) -> int:
        """Tell how much is kept."""
        return sum(each.remembered() for each in (self._origins, self._peers, self._sites)) + len(self._proven)
