"""A store's policy merged with a fleet's file: the stricter value applies, and each difference is listed.

The store keeps the file as written, so that a later version can read it as a file. `notify`, `channels`, `sign_on` and
`prices` stay in the file only: they belong to one machine, and addresses can be keys, which the store never erases.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from halter.config.decode import format_key_path
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.yaml_reader import Document, KeyPath, SourceMap
from halter.core.errors import ConfigError
from halter.policy.defaults import DEFAULT_LIMITS, default_fleet
from halter.policy.difference import Difference
from halter.policy.meet import meet, meet_policies
from halter.policy.order import DifferenceKind, list_orders
from halter.spec.limits import AgentBounds, Limits

STORED_POLICY_NAME: Final = "this store's policy"
FILE_ONLY_KEYS: Final = frozenset(("notify", "channels", "sign_on", "prices"))


class PolicyDifference(msgspec.Struct, frozen=True):
    key: str
    how: DifferenceKind
    stored: str
    written: str


class BoundPolicy(msgspec.Struct, frozen=True):
    fleet: FleetConfig
    differences: tuple[PolicyDifference, ...] = ()


def canonicalize_policy(raw: Mapping[str, Any]) -> str:
    """Encode the content of a file, so that equal files have equal bytes."""
    stored_keys = {key: value for key, value in raw.items() if key not in FILE_ONLY_KEYS}
    return msgspec.json.Encoder(order="sorted", decimal_format="number").encode(stored_keys).decode()


def digest_policy(policy: str) -> str:
    return hashlib.sha256(policy.encode()).hexdigest()


def parse_stored_fleet(policy: str) -> FleetConfig:
    raw: dict[str, Any] = msgspec.json.decode(policy)
    try:
        fleet = parse_fleet(Document(raw, SourceMap(STORED_POLICY_NAME)))
    except ConfigError as error:
        raise ConfigError(
            f"{error} A newer version of Halter applied it. "
            "Use that version, or apply another policy with `halter policy apply`."
        ) from error
    return replace(fleet, source_map=StoreSourceMap(STORED_POLICY_NAME, dict.fromkeys(_paths(raw), 0)))


def _paths(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  JSON has any values.
            yield from _paths(item, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]  As above.


class StoreSourceMap(SourceMap, frozen=True):
    """Locations in a store's policy, which has no lines, or in the file for values that are stricter there."""

    local_source_map: SourceMap | None = None
    stricter: frozenset[str] = frozenset()

    def at(self, path: KeyPath = ()) -> str:
        if self.local_source_map is not None and format_key_path(path) in self.stricter:
            return self.local_source_map.at(path)
        return self.file


def merge_with_policy(stored: FleetConfig, file: FleetConfig | None) -> BoundPolicy:
    """Return what holds of a store's policy and a file: the stricter value of each key."""
    if file is None:
        return BoundPolicy(stored)
    defaults = default_fleet(stored.spec)
    met = meet(stored.spec, file.spec, defaults=defaults, second_defaults=replace(defaults, agents=AgentBounds()))
    # A limit for agents that nobody sets bounds none of them, whatever applies to those that set none.
    limits = meet(stored.spec.agents.limits, file.spec.agents.limits).value
    policies = meet_policies((stored.spec.policy, file.spec.policy), defaults.policy)
    spec = replace(met.value, agents=replace(stored.spec.agents, limits=limits), policy=policies[0])
    differences = tuple(_make_difference(difference) for difference in met.differences)
    stricter = frozenset(difference.key for difference in differences if difference.how == "stricter")
    lines = {**stored.source_map.lines, **file.source_map.lines}
    source_map = StoreSourceMap(STORED_POLICY_NAME, lines, local_source_map=file.source_map, stricter=stricter)
    default_limits = _find_default_limits(stored.spec.agents.limits, limits)
    return BoundPolicy(FleetConfig(spec, source_map, file.raw, policies[1:], default_limits), differences)


def _make_difference(difference: Difference) -> PolicyDifference:
    key = format_key_path(difference.path)
    return PolicyDifference(key, difference.how, difference.first_text, difference.second_text)


def _find_default_limits(stored: Limits, limits: Limits) -> Limits:
    """Return the defaults of agents that set no limit, where only a file has a higher one."""
    defaults = {
        key: default
        for key, order in list_orders(Limits).items()
        if getattr(stored, key) is UNSET
        and (default := getattr(DEFAULT_LIMITS, key)) is not UNSET
        and getattr(limits, key) is not UNSET
        and not order.is_within(getattr(limits, key), default)
    }
    return Limits(**defaults)
