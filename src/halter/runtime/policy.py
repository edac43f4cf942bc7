"""The policy in force: the store's, which binds every process on it, and the file here where that is stricter."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.config.decode import value_or_default
from halter.config.merge import FleetConfig, read_fleet
from halter.config.policy import (
    PolicyDifference,
    canonicalize_policy,
    digest_policy,
    merge_with_policy,
    parse_stored_fleet,
)
from halter.config.resolve import FLEET_DAY_CAP
from halter.core.events import FleetPolicyAdopted
from halter.core.ports import Query, Store
from halter.core.rows import FleetPolicyRow
from halter.guard.judge import adopt_first_policy
from halter.redaction.redact import Redactor
from halter.settings import Settings

DEFAULT_FLEET: Final = FleetConfig()
MAX_NAMED_DIFFERENCES: Final = 4
"""How many differences a line names; the others are counted."""


class EffectivePolicy(msgspec.Struct, frozen=True):
    """What holds for this process. `row` is the store's policy, if it has one, and `written` the file here.

    `adopted` tells that this process made the file here the policy of a store that had none.
    """

    fleet: FleetConfig = DEFAULT_FLEET
    row: FleetPolicyRow | None = None
    written: FleetConfig | None = None
    differences: tuple[PolicyDifference, ...] = ()
    adopted: bool = False

    def told(self) -> str:
        """Say in one line where the store's policy and what is written here differ; nothing, if they do not."""
        if self.row is None:
            return ""
        if self.written is None:
            return _describe_store_only(self.differences)
        file = self.written.places.file
        bound = [each for each in self.differences if each.how in ("looser", "fixed")]
        stricter = [each for each in self.differences if each.how == "stricter"]
        said: list[str] = []
        if bound:
            said.append(f"This store's policy counts, and not {file}, in {_describe_pairs(bound)}.")
        if stricter:
            said.append(
                f"{file} is stricter than this store's policy, and counts here only, in {_describe_pairs(stricter)}."
            )
        if said:
            said.append(f"To make {file} the store's policy: halter policy apply {file}")
        return " ".join(said)

    def announced(self) -> str:
        """Say in one line that the file here binds the whole store from now on; nothing, if it did not begin here."""
        if not self.adopted or self.written is None:
            return ""
        file = self.written.places.file
        return f"{file} is this store's policy from now on: it binds every process on it. See it: halter policy"


def _describe_store_only(differences: Sequence[PolicyDifference]) -> str:
    told = [each for each in differences if each.how != "free"]
    if not told:
        return ""
    words = [f"{each.key} is {each.stored}" for each in told[:MAX_NAMED_DIFFERENCES]]
    what = f"{', '.join(words)}{_more(told)}"
    return f"There is no halter.yaml here, so this store's policy alone counts: {what}. See it: halter policy"


def _describe_pairs(differences: Sequence[PolicyDifference]) -> str:
    """Name each key with the word that counts, and the one that does not."""
    words = [
        f"{each.key} ({each.written}, not {each.stored})"
        if each.how == "stricter"
        else f"{each.key} ({each.stored}, not {each.written})"
        for each in differences[:MAX_NAMED_DIFFERENCES]
    ]
    return f"{', '.join(words)}{_more(differences)}"


def _more(differences: Sequence[PolicyDifference]) -> str:
    return f" and {len(differences) - MAX_NAMED_DIFFERENCES} more" if len(differences) > MAX_NAMED_DIFFERENCES else ""


def read_local_fleet(settings: Settings) -> FleetConfig | None:
    """Read the fleet's file of this process, if it has one."""
    return None if settings.fleet is None else read_fleet(settings.fleet)


def use_local_policy(settings: Settings) -> EffectivePolicy:
    """Take what is written here as it stands, for a store of one's own that no other process uses."""
    written = read_local_fleet(settings)
    return EffectivePolicy(written or DEFAULT_FLEET, None, written)


async def resolve_effective_policy(store: Store, written: FleetConfig | None) -> EffectivePolicy:
    """Tell what holds for a process with this file, and change nothing."""
    row = await read_stored_policy(store)
    if row is None:
        return EffectivePolicy(written or DEFAULT_FLEET, None, written)
    return _make_effective_policy(row, written)


async def is_superseded(store: Store, policy: EffectivePolicy) -> bool:
    """Tell whether another policy holds by now than the one that a process was bound by at its start."""
    row = await read_stored_policy(store)
    digest = "" if policy.row is None else policy.row.digest
    if row is None or row.digest == digest:
        return False
    now, before = _make_effective_policy(row, policy.written).fleet, policy.fleet
    return (now.spec, now.beside, now.silent) != (before.spec, before.beside, before.silent)


async def read_stored_policy(store: Store) -> FleetPolicyRow | None:
    """Find the store's policy."""
    return next(iter(await store.ask(Query("all_fleet_policy", FleetPolicyRow))), None)


def _make_effective_policy(row: FleetPolicyRow, written: FleetConfig | None) -> EffectivePolicy:
    stored = parse_stored_fleet(row.policy)
    bound = merge_with_policy(stored, written)
    differences = bound.differences if written is not None else merge_with_policy(stored, DEFAULT_FLEET).differences
    return EffectivePolicy(bound.fleet, row, written, differences)


async def bind_policy(store: Store, written: FleetConfig | None, by: str) -> EffectivePolicy:
    """Bind a process that is about to act. The first file that a person uses on a store becomes the store's policy.

    What an agent started adopts nothing: it is bound by the defaults as if they were the store's policy.
    """
    found = await resolve_effective_policy(store, written)
    if found.row is not None or written is None:
        return found
    adopted = bool((await store.commit(adopt_first_policy(make_adoption_event(written, by)))).fresh())
    found = await resolve_effective_policy(store, written)
    if found.row is None:
        return msgspec.structs.replace(found, fleet=merge_with_policy(DEFAULT_FLEET, written).fleet)
    return msgspec.structs.replace(found, adopted=adopted)


def _drop_secret_providers(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave a provider with the file whose address holds a key: what is stored here is never erased."""
    redact = Redactor({}, {}).redact
    providers: Mapping[str, Any] = said.get("providers") or {}
    kept = {name: each for name, each in providers.items() if redact(text := canonicalize_policy({name: each})) == text}
    return said if len(kept) == len(providers) else {**said, "providers": kept}


def make_adoption_event(
    written: FleetConfig, by: str, *, replaces: str = "", loosens: tuple[str, ...] = (), reason: str = ""
) -> FleetPolicyAdopted:
    """Make the event by which a file becomes the store's policy."""
    policy, limits = canonicalize_policy(_drop_secret_providers(written.said)), written.spec.limits
    return FleetPolicyAdopted(
        policy=policy,
        digest=digest_policy(policy),
        by=by,
        day_cap=value_or_default(limits.max_cost_usd_per_day, FLEET_DAY_CAP),
        month_cap=value_or_default(limits.max_cost_usd_per_month, None),
        replaces=replaces,
        loosens=loosens,
        reason=reason,
    )
