"""Where a person said "always", and taking it back."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from halter.app.desk.desk import Desk, refused
from halter.app.desk.operation import Done, Name, Reason
from halter.core.ports import Query
from halter.core.rows import RuleRow
from halter.guard.approvals import end_rule

RuleName = Annotated[Name, Meta(description="A rule's id.")]


async def rules(desk: Desk) -> Sequence[RuleRow]:
    """List the rules by which a person said "always", also those that are over.

    A rule for every agent is shown to everyone.
    """
    rows = await desk.app.store.ask(Query("all_rules", RuleRow))
    if not desk.who.agents:
        return rows
    return [row for row in rows if row.scope == "fleet" or desk.who.sees(await _agent(desk, row))]


async def _agent(desk: Desk, row: RuleRow) -> str:
    return (await desk.agent_of(f"session:{row.owner}") or "") if row.scope == "session" else row.owner


async def end(desk: Desk, rule: RuleName, reason: Reason = "") -> Done:
    """Take an "always" back: from now on such calls are asked about again."""
    desk.demand("operator", "end a rule")
    row = desk.meant([(row.rule, row) for row in await rules(desk)], rule, "rule", "halter rules")
    if row.scope == "fleet":
        desk.demand_all("end a rule for every agent")
    if not (await desk.app.store.commit(end_rule(row.rule, desk.who.name, desk.app.ids.new(), reason))).events:
        refused(f"The rule {row.rule} is over already.")
    return Done(row.rule, f"The rule {row.rule} is over: {row.tool} is asked about again.")
