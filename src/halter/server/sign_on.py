"""Sign-on by a proxy that knows people: it says in a header who asks, and in another which groups they are in.

The header counts only from the addresses that the fleet's file lists, as the connection has them, and beside a secret
that the proxy shares: an agent on the same machine has the same address. Otherwise it is not even looked at. Each
request is judged anew. Who is in no known group is nobody here.
"""

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

import msgspec
from msgspec import UNSET

from halter.core.clock import HOUR, Clock
from halter.core.errors import ConfigError, StoreUnavailable
from halter.core.events import PersonSignedOn, SignOnRefused
from halter.core.ids import FLEET, Ids
from halter.core.ports import Draft, Store, Write
from halter.core.rows import AuditRow
from halter.core.spec import SignOnSpec
from halter.core.tools import substitute_secrets
from halter.operations.desk import ROLES, Role
from halter.server.auth import Allowed, AuthRejected, IncomingRequest, Token

USER_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}(@[A-Za-z0-9.-]{1,100})?")
MAX_GROUPS: Final = 500
SECRET_HEADER: Final = "x-halter-proxy"  # noqa: S105 It is the name of a header.
SHORTEST_SECRET: Final = 16
RECORD_INTERVAL: Final = HOUR
"""How long the same is not recorded again."""


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

    def identify(self, request: IncomingRequest, now: int) -> Allowed | AuthRejected | None:
        """Who a request is from; None where no listed proxy says so."""
        users = request.all(self.header)
        if not users or not self._lists(request.client) or not self._proves(request.all(SECRET_HEADER)):
            return None
        if len(users) > 1:
            return AuthRejected(400, "Say once who you are.")
        if not USER_PATTERN.fullmatch(users[0]):
            return AuthRejected(403, "The proxy names nobody who could be a person here.", why="no_person")
        name = self.people.get(users[0].lower(), users[0].lower())
        held = self.roles.find(_split_groups(request.all(self.groups_header)))
        if held is None:
            sentence = f"{name} is in no group that has a role here: see `sign_on.roles` in halter.yaml."
            return AuthRejected(403, sentence, why="no_role", account=users[0])
        role, agents = held
        return Allowed(Token(name, role, "", 0, agents), until=now + self.lifetime, account=users[0])

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


class SignOnLog:
    """Records who was let in and who was not.

    A proxy names people with every request, and anyone may be refused at a provider again and again: the same is
    recorded once an hour. Neither tokens nor texts that a caller chose are recorded; a refusal is one of a few words.
    """

    def __init__(self, store: Store, ids: Ids, clock: Clock) -> None:
        self._store = store
        self._ids = ids
        self._clock = clock
        self._logged_at: dict[PersonSignedOn | SignOnRefused, int] = {}

    async def record_login(self, verdict: Allowed | AuthRejected, provider: str) -> None:
        """Record a login by a provider, before it counts. Raises StoreUnavailable."""
        await self._record(verdict, provider, always=isinstance(verdict, Allowed))

    async def record_request(self, verdict: Allowed | AuthRejected, client: str) -> None:
        """Record whom a proxy names. Without the store nothing can be done or seen, so the request goes on."""
        with suppress(StoreUnavailable):
            await self._record(verdict, f"proxy {client}", always=False)

    async def _record(self, verdict: Allowed | AuthRejected, via: str, *, always: bool) -> None:
        event, now = make_sign_on_event(verdict, via), self._clock.now()
        if event is None or (not always and self._logged_at.get(event, 0) > now):
            return
        new = msgspec.structs.replace(event, id=f"sign-on/{self._ids.make()}")
        await self._store.commit(Write(FLEET, new.id, lambda _: [Draft(new)], [(AuditRow, new.id)]))
        self._logged_at = {each: until for each, until in self._logged_at.items() if until > now}
        self._logged_at[event] = now + RECORD_INTERVAL


def make_sign_on_event(verdict: Allowed | AuthRejected, via: str) -> PersonSignedOn | SignOnRefused | None:
    """The event of a person whom a proxy or a provider named; None for all else."""
    if isinstance(verdict, AuthRejected):
        return SignOnRefused(id="", via=via, why=verdict.why, account=verdict.account) if verdict.why else None
    if verdict.token is None or not verdict.account:
        return None
    who = verdict.token
    return PersonSignedOn(id="", name=who.name, role=who.role, via=via, account=verdict.account, agents=who.agents)
