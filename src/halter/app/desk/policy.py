"""The policy of the store: what it says, how a file differs from it, and a person's word to change it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.app.desk.desk import Desk, refused
from halter.app.policy import DEFAULT, adoption, stored_policy
from halter.config.fleet import Fleet
from halter.config.policy import Difference, Differs, bind, canonical, stored_fleet
from halter.core.events import FleetPolicyAdopted
from halter.guard.policies import adopt

NONE_YET: Final = "This store has no policy yet: the first halter.yaml that is used on it becomes its policy."
ORDER: Final[tuple[Difference, ...]] = ("looser", "fixed", "free", "stricter")
"""What a person has to see first."""


class StorePolicy(msgspec.Struct, frozen=True):
    """The store's policy as it was written; without a digest, the store has none."""

    policy: Mapping[str, Any]
    digest: str = ""
    by: str = ""
    at: int = 0
    number: int = 0


async def show(desk: Desk) -> StorePolicy:
    """Show the policy that binds every process on the store, who adopted it, and when.

    What it says is for those who see all agents. Without a digest there is none.
    """
    row = await stored_policy(desk.app.store)
    if row is None:
        return StorePolicy({})
    said: Mapping[str, Any] = {} if desk.who.agents else msgspec.json.decode(row.policy)
    return StorePolicy(said, row.digest, row.by, row.at, row.number)


def lines_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Write a policy as one line for each value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  It is JSON.
            yield from lines_of(item, f"{path}.{key}".removeprefix("."))
    elif path:
        yield path, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def differences(policy: StorePolicy, written: Fleet) -> Sequence[Differs]:
    """Tell what would change if a file became the store's policy, what it loosens first."""
    before = stored_fleet(canonical(policy.policy)) if policy.digest else DEFAULT
    found = bind(before, written).differences
    return sorted(found, key=lambda each: ORDER.index(each.how))


async def apply(desk: Desk, policy: StorePolicy, written: Fleet, reason: str = "") -> FleetPolicyAdopted:
    """Make a file the store's policy, in place of the one that was shown. It is recorded with a name."""
    desk.demand("admin", "change the store's policy")
    desk.demand_all("change the store's policy")
    loosens = tuple(each.key for each in differences(policy, written) if each.how == "looser")
    event = adoption(written, desk.who.name, replaces=policy.digest, loosens=loosens, reason=reason)
    events = (await desk.app.store.commit(adopt(event, desk.app.ids.new()))).events
    if not events:
        refused("Somebody else has changed the store's policy meanwhile: look at it again, with halter policy.")
    return event
