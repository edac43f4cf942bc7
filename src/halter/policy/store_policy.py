"""The store's own policy: it is adopted by a person, and binds every process that uses the store.

It is read under the lock of each hold, so a process that started before the policy was tightened cannot spend more.
"""

from collections.abc import Sequence

import msgspec

from halter.core.events import FleetPolicyAdopted
from halter.core.ids import FLEET, can_decide
from halter.core.money import Cap, Caps, Leg
from halter.core.ports import Draft, Rows, Write
from halter.core.project.holds import POLICY_KEY
from halter.core.rows import FleetPolicyRow


def adopt_first_policy(event: FleetPolicyAdopted) -> Write:
    """Adopt the first policy of a store. If several processes try, one wins and its policy binds the others."""

    def decide(rows: Rows) -> Sequence[Draft]:
        is_first = rows.get(FleetPolicyRow, FLEET) is None
        return [Draft(event)] if is_first and can_decide(event.by) else []

    return Write(FLEET, "policy/first", decide, [POLICY_KEY])


def adopt_policy(event: FleetPolicyAdopted, key: str) -> Write:
    """Replace the policy named in `event.replaces`; write nothing if another one is in force."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(FleetPolicyRow, FLEET)
        is_current = event.replaces == ("" if row is None else row.digest)
        return [Draft(event)] if is_current and can_decide(event.by) else []

    return Write(FLEET, key, decide, [POLICY_KEY])


def lower_legs_to_policy(legs: tuple[Leg, ...], rows: Rows) -> tuple[Leg, ...]:
    """Lower the caps of the fleet's legs to the current policy of the store."""
    for leg in legs:
        if leg.scope == FLEET:
            row = rows.get(FleetPolicyRow, FLEET)
            return legs if row is None else lower_legs(legs, row)
    return legs


def lower_legs(legs: tuple[Leg, ...], row: FleetPolicyRow) -> tuple[Leg, ...]:
    return tuple([_lower_leg(leg, row) for leg in legs])


def _lower_leg(leg: Leg, row: FleetPolicyRow) -> Leg:
    cap = row.lower(leg.window.partition("/")[0], leg.cap) if leg.scope == FLEET else leg.cap
    return leg if cap == leg.cap else msgspec.structs.replace(leg, cap=cap)


def lower_caps_to_policy(caps: Caps, row: FleetPolicyRow | None) -> Caps:
    if row is None:
        return caps
    fleet = tuple(Cap(row.lower(cap.per, cap.max_cost_usd), cap.per) for cap in caps.fleet)
    return caps if fleet == caps.fleet else msgspec.structs.replace(caps, fleet=fleet)
