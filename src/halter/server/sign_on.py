"""Sign-on by a proxy that authenticates people: one header has the person, another one their groups.

The headers are read only from connections of the addresses that the fleet's file lists, and only together with the
proxy's secret, since an agent on the same machine has the same address. Each request is authorized separately. A person
in no known group is rejected.
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
from halter.core.events import PersonSignedOff, PersonSignedOn, SignOnRefused
from halter.core.ids import FLEET, Ids
from halter.core.ports import Draft, Store, Write
from halter.core.rows import AuditRow
from halter.core.tools import substitute_secrets
from halter.operations.actor import ROLES, Role
from halter.server.auth import Allowed, AuthRejected, IncomingRequest, Token
from halter.spec.fleet import SignOnSpec

USER_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}(@[A-Za-z0-9.-]{1,100})?")
MAX_GROUPS: Final = 500
SECRET_HEADER: Final = "x-halter-proxy"  # noqa: S105 It is the name of a header.
MIN_SECRET_LENGTH: Final = 16
RECORD_INTERVAL: Final = HOUR
"""Time for which an identical event is not recorded again."""


class GroupRoles(msgspec.Struct, frozen=True):
    """The role of each group, and the agents that it is for."""

    roles: Mapping[str, Role]
    agents: Mapping[str, tuple[str, ...]] = {}

    def find(self, groups: Sequence[str]) -> tuple[Role, tuple[str, ...]] | None:
        """Return the highest role, and the agents of the groups that give it; a lower role adds no agents."""
        matching = [group for group in groups if group in self.roles]
        if not matching:
            return None
        role = ROLES[max(ROLES.index(self.roles[group]) for group in matching)]
        scopes = [self.agents.get(group) for group in matching if self.roles[group] == role]
        return role, () if None in scopes else tuple(sorted({name for scope in scopes for name in scope or ()}))


def make_group_roles(spec: SignOnSpec) -> GroupRoles:
    return GroupRoles(dict(spec.roles), dict(spec.agents))


class ProxySignOn(msgspec.Struct, frozen=True):
    """The configuration of sign-on by a proxy. `lifetime` bounds a stream that it opened."""

    networks: tuple[IPv4Network | IPv6Network, ...]
    secret: str
    header: str
    groups_header: str
    roles: GroupRoles
    people: Mapping[str, str]
    lifetime: int

    def identify(self, request: IncomingRequest, now: int) -> Allowed | AuthRejected | None:
        """Identify the person of a request; None if no listed proxy names one."""
        users = request.list_values(self.header)
        if not users or not self._lists(request.client) or not self._proves(request.list_values(SECRET_HEADER)):
            return None
        if len(users) > 1:
            return AuthRejected(400, "Send exactly one credential.")
        if not USER_PATTERN.fullmatch(users[0]):
            return AuthRejected(403, "The proxy sent no valid user name.", why="no_person")
        name = self.people.get(users[0].lower(), users[0].lower())
        role_and_agents = self.roles.find(_split_groups(request.list_values(self.groups_header)))
        if role_and_agents is None:
            sentence = f"No group of {name} has a role: see `sign_on.roles` in halter.yaml."
            return AuthRejected(403, sentence, why="no_role", account=users[0])
        role, agents = role_and_agents
        return Allowed(Token(name, role, "", 0, agents), until=now + self.lifetime, account=users[0])

    def _proves(self, values: Sequence[str]) -> bool:
        return len(values) == 1 and hmac.compare_digest(values[0].encode("latin-1"), self.secret.encode())

    def _lists(self, client: str) -> bool:
        try:
            address = ip_address(client)
        except ValueError:
            return False
        mapped_address = getattr(address, "ipv4_mapped", None)
        return any((mapped_address or address) in network for network in self.networks)


def _split_groups(lines: Sequence[str]) -> Sequence[str]:
    return [group.strip() for line in lines for group in line.split(",")][:MAX_GROUPS]


def make_proxy_sign_on(spec: SignOnSpec, reveal: Callable[[str], str]) -> ProxySignOn:
    """Make the sign-on by a proxy. Raises ConfigError if the secret is not set or is too short."""
    if spec.secret is UNSET:
        raise ConfigError("`sign_on.proxies` needs `sign_on.secret`: an address alone proves nothing.")
    try:
        secret: str = substitute_secrets(spec.secret, reveal)
    except KeyError as missing:
        name = missing.args[0]
        raise ConfigError(f"`sign_on.secret` needs the secret {name}. Set HALTER_SECRET_{name}.") from None
    if len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(f"The secret of `sign_on.secret` is too short. Use at least {MIN_SECRET_LENGTH} characters.")
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
    """The log of sign-ons, rejections and logouts in the journal.

    A proxy names people with every request, and rejections may repeat, so an identical event is recorded once an hour.
    Neither tokens nor texts that a caller chose are recorded; the reason of a rejection is one of a few codes.
    """

    def __init__(self, store: Store, ids: Ids, clock: Clock) -> None:
        self._store = store
        self._ids = ids
        self._clock = clock
        self._logged_at: dict[PersonSignedOn | SignOnRefused, int] = {}

    async def record_login(self, verdict: Allowed | AuthRejected, provider: str) -> None:
        """Record a login by a provider, before it is valid. Raises StoreUnavailable."""
        await self._record(verdict, provider, always=isinstance(verdict, Allowed))

    async def record_request(self, verdict: Allowed | AuthRejected, client: str) -> None:
        """Record the person whom a proxy names. The request proceeds even if the store is unavailable."""
        with suppress(StoreUnavailable):
            await self._record(verdict, f"proxy {client}", always=False)

    async def record_token(self, token: Token) -> None:
        """Record a login with a token. It is valid even if the store is unavailable."""
        with suppress(StoreUnavailable):
            await self._commit(
                PersonSignedOn(id="", name=token.name, role=token.role, via="token", agents=token.agents)
            )

    async def record_logout(self, name: str) -> None:
        """Record the end of a login by its person. It has ended even if the store is unavailable."""
        with suppress(StoreUnavailable):
            await self._commit(PersonSignedOff(id="", name=name))

    async def _record(self, verdict: Allowed | AuthRejected, via: str, *, always: bool) -> None:
        event, now = make_sign_on_event(verdict, via), self._clock.now()
        if event is None or (not always and self._logged_at.get(event, 0) > now):
            return
        await self._commit(event)
        self._logged_at = {each: repeat_at for each, repeat_at in self._logged_at.items() if repeat_at > now}
        self._logged_at[event] = now + RECORD_INTERVAL

    async def _commit(self, event: PersonSignedOn | PersonSignedOff | SignOnRefused) -> None:
        visit = msgspec.structs.replace(event, id=f"sign-on/{self._ids.make()}")
        await self._store.commit(Write(FLEET, visit.id, lambda _: [Draft(visit)], [(AuditRow, visit.id)]))


def make_sign_on_event(verdict: Allowed | AuthRejected, via: str) -> PersonSignedOn | SignOnRefused | None:
    """Make the event for a person whom a proxy or a provider named; None for other verdicts."""
    if isinstance(verdict, AuthRejected):
        return SignOnRefused(id="", via=via, why=verdict.why, account=verdict.account) if verdict.why else None
    if verdict.token is None or not verdict.account:
        return None
    token = verdict.token
    return PersonSignedOn(
        id="", name=token.name, role=token.role, via=via, account=verdict.account, agents=token.agents
    )
