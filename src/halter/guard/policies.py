"""The policy of a store: the writes by which a person adopts it."""

from collections.abc import Sequence

from halter.core.events import FleetPolicyAdopted
from halter.core.ids import FLEET, may_decide
from halter.core.ports import Draft, Rows, Write
from halter.core.row import RowKey
from halter.core.rows import FleetPolicyRow

POLICY: RowKey = (FleetPolicyRow, (FLEET,))


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
