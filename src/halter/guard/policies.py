"""The policy of a store: the writes by which a person adopts it, and the caps of the fleet that every hold obeys.

A process reads the policy when it starts. Its caps on the fleet's money are read again under the lock of each hold, so
that a process which runs since before the policy was adopted, or tightened, spends nothing beyond it.
"""

from collections.abc import Sequence

import msgspec

from halter.core.events import FleetPolicyAdopted
from halter.core.ids import FLEET, may_decide
from halter.core.limits import Cap, Caps
from halter.core.money import Leg
from halter.core.ports import Draft, Rows, Write
from halter.core.project import POLICY
from halter.core.rows import FleetPolicyRow


def adopt_first(event: FleetPolicyAdopted) -> Write:
    """Adopt a policy for a store that has none. Of several processes one is first, and the others are bound by it."""

    def decide(rows: Rows) -> Sequence[Draft]:
        first = rows.get(FleetPolicyRow, FLEET) is None
        return [Draft(event)] if first and may_decide(event.by) else []

    return Write(FLEET, "policy/first", decide, [POLICY])


def adopt(event: FleetPolicyAdopted, key: str) -> Write:
    """Put a policy in place of the one that it says it replaces; where another one is there by now, write nothing."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(FleetPolicyRow, FLEET)
        as_seen = event.replaces == ("" if row is None else row.digest)
        return [Draft(event)] if as_seen and may_decide(event.by) else []

    return Write(FLEET, key, decide, [POLICY])


def legs_within(legs: tuple[Leg, ...], rows: Rows) -> tuple[Leg, ...]:
    """Lower the caps of the fleet's legs to those of the store's policy."""
    row = rows.get(FleetPolicyRow, FLEET) if any(leg.scope == FLEET for leg in legs) else None
    return legs if row is None else tuple(_leg_within(leg, row) for leg in legs)


def caps_within(caps: Caps, rows: Rows) -> Caps:
    """Lower the fleet's caps to those of the store's policy."""
    return caps_under(caps, rows.get(FleetPolicyRow, FLEET) if caps.fleet else None)


def caps_under(caps: Caps, row: FleetPolicyRow | None) -> Caps:
    """Lower the fleet's caps to those of a policy, if there is one."""
    if row is None:
        return caps
    fleet = tuple(Cap(row.lower(cap.per, cap.max_cost_usd), cap.per) for cap in caps.fleet)
    return caps if fleet == caps.fleet else msgspec.structs.replace(caps, fleet=fleet)


def _leg_within(leg: Leg, row: FleetPolicyRow) -> Leg:
    cap = row.lower(leg.window.partition("/")[0], leg.cap) if leg.scope == FLEET else leg.cap
    return leg if cap == leg.cap else msgspec.structs.replace(leg, cap=cap)
