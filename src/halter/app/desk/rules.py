"""Where a person said "always", and taking it back."""

from collections.abc import Sequence

from halter.app.desk.desk import Desk, meant, refused
from halter.core.ports import Query
from halter.core.rows import RuleRow
from halter.guard.approvals import end_rule


async def rules(desk: Desk) -> Sequence[RuleRow]:
    """List the rules, also those that are over. One for every agent concerns everybody."""
    rows = await desk.app.store.ask(Query("all_rules", RuleRow))
    if not desk.who.agents:
        return rows
    return [row for row in rows if row.scope == "fleet" or desk.who.sees(await _agent(desk, row))]


async def _agent(desk: Desk, row: RuleRow) -> str:
    return (await desk.agent_of(f"session:{row.owner}") or "") if row.scope == "session" else row.owner


async def end(desk: Desk, rule: str, reason: str = "", *, whole: bool = True) -> RuleRow:
    """Take an "always" back: from now on such calls are asked about again."""
    desk.demand("operator", "end a rule")
    found = [(row.rule, row) for row in await rules(desk)]
    none = f"No rule {'is called' if whole else 'begins with'} {rule!r}: look at `halter rules`."
    row = meant(found, rule, none, whole=whole)
    if row.scope == "fleet":
        desk.demand_all("end a rule for every agent")
    if not (await desk.app.store.commit(end_rule(row.rule, desk.who.name, desk.app.ids.new(), reason))).events:
        refused(f"The rule {row.rule} is over already.")
    return row
