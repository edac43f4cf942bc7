"""The policy in force: the store's, which binds every process on it, and the file here where that is stricter."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.config.fleet import Fleet, read_fleet
from halter.config.policy import Differs, bind, canonical, policy_digest, stored_fleet
from halter.config.resolve import FLEET_DAY_CAP
from halter.config.shape import either
from halter.core.events import FleetPolicyAdopted
from halter.core.ports import Query, Store
from halter.core.rows import FleetPolicyRow
from halter.guard.policies import adopt_first
from halter.guard.redact import Redactor
from halter.settings import Settings

DEFAULT: Final = Fleet()
NAMED: Final = 4
"""How many differences a line names; the others are counted."""


class InForce(msgspec.Struct, frozen=True):
    """What holds for this process. `row` is the store's policy, if it has one, and `written` the file here.

    `adopted` tells that this process made the file here the policy of a store that had none.
    """

    fleet: Fleet = DEFAULT
    row: FleetPolicyRow | None = None
    written: Fleet | None = None
    differences: tuple[Differs, ...] = ()
    adopted: bool = False

    def told(self) -> str:
        """Say in one line where the store's policy and what is written here differ; nothing, if they do not."""
        if self.row is None:
            return ""
        if self.written is None:
            return _alone(self.differences)
        file = self.written.places.file
        bound = [each for each in self.differences if each.how in ("looser", "fixed")]
        stricter = [each for each in self.differences if each.how == "stricter"]
        said: list[str] = []
        if bound:
            said.append(f"This store's policy counts, and not {file}, in {_pairs(bound)}.")
        if stricter:
            said.append(f"{file} is stricter than this store's policy, and counts here only, in {_pairs(stricter)}.")
        if said:
            said.append(f"To make {file} the store's policy: halter policy apply {file}")
        return " ".join(said)

    def announced(self) -> str:
        """Say in one line that the file here binds the whole store from now on; nothing, if it did not begin here."""
        if not self.adopted or self.written is None:
            return ""
        file = self.written.places.file
        return f"{file} is this store's policy from now on: it binds every process on it. See it: halter policy"


def _alone(differences: Sequence[Differs]) -> str:
    told = [each for each in differences if each.how != "free"]
    if not told:
        return ""
    words = [f"{each.key} is {each.stored}" for each in told[:NAMED]]
    what = f"{', '.join(words)}{_more(told)}"
    return f"There is no halter.yaml here, so this store's policy alone counts: {what}. See it: halter policy"


def _pairs(differences: Sequence[Differs]) -> str:
    """Name each key with the word that counts, and the one that does not."""
    words = [
        f"{each.key} ({each.written}, not {each.stored})"
        if each.how == "stricter"
        else f"{each.key} ({each.stored}, not {each.written})"
        for each in differences[:NAMED]
    ]
    return f"{', '.join(words)}{_more(differences)}"


def _more(differences: Sequence[Differs]) -> str:
    return f" and {len(differences) - NAMED} more" if len(differences) > NAMED else ""


def written_fleet(settings: Settings) -> Fleet | None:
    """Read the fleet's file of this process, if it has one."""
    return None if settings.fleet is None else read_fleet(settings.fleet)


def unbound(settings: Settings) -> InForce:
    """Take what is written here as it stands, for a store of one's own that no other process uses."""
    written = written_fleet(settings)
    return InForce(written or DEFAULT, None, written)


async def policy_in_force(store: Store, written: Fleet | None) -> InForce:
    """Tell what holds for a process with this file, and change nothing."""
    row = await stored_policy(store)
    if row is None:
        return InForce(written or DEFAULT, None, written)
    return _held(row, written)


async def superseded(store: Store, policy: InForce) -> bool:
    """Tell whether another policy holds by now than the one that a process was bound by at its start."""
    row = await stored_policy(store)
    digest = "" if policy.row is None else policy.row.digest
    if row is None or row.digest == digest:
        return False
    now, before = _held(row, policy.written).fleet, policy.fleet
    return (now.spec, now.beside, now.silent) != (before.spec, before.beside, before.silent)


async def stored_policy(store: Store) -> FleetPolicyRow | None:
    """Find the store's policy."""
    return next(iter(await store.ask(Query("all_fleet_policy", FleetPolicyRow))), None)


def _held(row: FleetPolicyRow, written: Fleet | None) -> InForce:
    stored = stored_fleet(row.policy)
    bound = bind(stored, written)
    differences = bound.differences if written is not None else bind(stored, DEFAULT).differences
    return InForce(bound.fleet, row, written, differences)


async def bind_policy(store: Store, written: Fleet | None, by: str) -> InForce:
    """Bind a process that is about to act. The first file that a person uses on a store becomes the store's policy.

    What an agent started adopts nothing: it is bound by the defaults as if they were the store's policy.
    """
    found = await policy_in_force(store, written)
    if found.row is not None or written is None:
        return found
    adopted = bool((await store.commit(adopt_first(adoption(written, by)))).fresh())
    found = await policy_in_force(store, written)
    if found.row is None:
        return msgspec.structs.replace(found, fleet=bind(DEFAULT, written).fleet)
    return msgspec.structs.replace(found, adopted=adopted)


def _storable(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave a provider with the file whose address holds a key: what is stored here is never erased."""
    redact = Redactor({}, {}).redact
    providers: Mapping[str, Any] = said.get("providers") or {}
    kept = {name: each for name, each in providers.items() if redact(text := canonical({name: each})) == text}
    return said if len(kept) == len(providers) else {**said, "providers": kept}


def adoption(
    written: Fleet, by: str, *, replaces: str = "", loosens: tuple[str, ...] = (), reason: str = ""
) -> FleetPolicyAdopted:
    """Make the event by which a file becomes the store's policy."""
    policy, limits = canonical(_storable(written.said)), written.spec.limits
    return FleetPolicyAdopted(
        policy=policy,
        digest=policy_digest(policy),
        by=by,
        day_cap=either(limits.max_cost_usd_per_day, FLEET_DAY_CAP),
        month_cap=either(limits.max_cost_usd_per_month, None),
        replaces=replaces,
        loosens=loosens,
        reason=reason,
    )
