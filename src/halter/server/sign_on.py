"""Sign-on by a proxy that knows people: it says in a header who asks, and in another which groups they are in.

The header counts only from the addresses that the fleet's file lists, as the connection has them, and beside a secret
that the proxy shares: an agent on the same machine has the same address. Otherwise it is not even looked at. Each
request is judged anew. Who is in no known group is nobody here.
"""

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

import msgspec
from msgspec import UNSET

from halter.core.errors import ConfigError
from halter.core.spec import SignOnSpec
from halter.core.tools import substitute_secrets
from halter.operations.desk import ROLES, Role
from halter.server.auth import Allowed, AuthRejected, IncomingRequest, Token

USER_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}(@[A-Za-z0-9.-]{1,100})?")
MAX_GROUPS: Final = 500
SECRET_HEADER: Final = "x-halter-proxy"  # noqa: S105 It is the name of a header.
SHORTEST_SECRET: Final = 16


class GroupRoles(msgspec.Struct, frozen=True):
    """The role of each group, and the agents that it is for."""

    roles: Mapping[str, Role]
    agents: Mapping[str, tuple[str, ...]] = {}

    def find(self, groups: Sequence[str]) -> tuple[Role, tuple[str, ...]] | None:
        """The highest role, for the agents of the groups that give it; a lower role adds none. None without a role."""
        held = [group for group in groups if group in self.roles]
        if not held:
            return None
        role = ROLES[max(ROLES.index(self.roles[group]) for group in held)]
        scopes = [self.agents.get(group) for group in held if self.roles[group] == role]
        return role, () if None in scopes else tuple(sorted({name for scope in scopes for name in scope or ()}))


def make_group_roles(spec: SignOnSpec) -> GroupRoles:
    return GroupRoles(dict(spec.roles), dict(spec.agents))


class ProxySignOn(msgspec.Struct, frozen=True):
    """How a listed proxy names people. `lifetime` is how long a stream that it opened may last."""

    networks: tuple[IPv4Network | IPv6Network, ...]
    secret: str
    header: str
    groups_header: str
    roles: GroupRoles
    people: Mapping[str, str]
    lifetime: int

    def identify(self, asked: IncomingRequest, now: int) -> Allowed | AuthRejected | None:
        """Who a request is from; None where no listed proxy says so."""
        users = asked.all(self.header)
        if not users or not self._lists(asked.client) or not self._proves(asked.all(SECRET_HEADER)):
            return None
        if len(users) > 1:
            return AuthRejected(400, "Say once who you are.")
        if not USER_PATTERN.fullmatch(users[0]):
            return AuthRejected(403, "The proxy names nobody who could be a person here.")
        name = self.people.get(users[0].lower(), users[0].lower())
        held = self.roles.find(_split_groups(asked.all(self.groups_header)))
        if held is None:
            sentence = f"{name} is in no group that has a role here: see `sign_on.roles` in halter.yaml."
            return AuthRejected(403, sentence)
        role, agents = held
        return Allowed(Token(name, role, "", 0, agents), until=now + self.lifetime)

    def _proves(self, shown: Sequence[str]) -> bool:
        return len(shown) == 1 and hmac.compare_digest(shown[0].encode("latin-1"), self.secret.encode())

    def _lists(self, client: str) -> bool:
        try:
            address = ip_address(client)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self.networks)


def _split_groups(lines: Sequence[str]) -> Sequence[str]:
    return [group.strip() for line in lines for group in line.split(",")][:MAX_GROUPS]


def make_proxy_sign_on(spec: SignOnSpec, reveal: Callable[[str], str]) -> ProxySignOn:
    """Raises ConfigError where the secret is not set, or could be guessed."""
    if spec.secret is UNSET:
        raise ConfigError("`sign_on.proxies` needs `sign_on.secret`: an address is no proof.")
    try:
        secret: str = substitute_secrets(spec.secret, reveal)
    except KeyError as missing:
        name = missing.args[0]
        raise ConfigError(f"`sign_on.secret` needs the secret {name}: set HALTER_SECRET_{name}.") from None
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(f"The secret of `sign_on.secret` is too short: write at least {SHORTEST_SECRET} characters.")
    return ProxySignOn(
        secret=secret,
        networks=tuple(ip_network(each) for each in spec.proxies),
        header=spec.user_header.lower(),
        groups_header=spec.groups_header.lower(),
        roles=make_group_roles(spec),
        people={user.lower(): name for user, name in spec.people.items()},
        lifetime=spec.lifetime,
    )
