"""What an agent may spend at most, in words: said before it runs where nobody watches."""

from collections.abc import Iterable

from halter.app.budgets import current_budgets
from halter.app.opened import App
from halter.core.limits import Spender, accounts
from halter.core.money import BudgetRow, Leg, shown
from halter.core.spec import Resolved


async def at_most(app: App, policy: Resolved) -> str:
    """Say what one session, the agent and the fleet may spend. What a person said of a window counts first."""
    rows = await current_budgets(app.store, app.clock.now(), ended=0)
    said = {(row.scope, row.window): row for row in rows if row.unit == "usd" and row.cap_by}
    legs = accounts(policy.caps, Spender("", policy.name), app.clock.now())

    def told(scope: str) -> str:
        return _listed(_cap(leg, said.get((leg.scope, leg.window))) for leg in legs if leg.scope == scope)

    own, agent, fleet = (told(scope) for scope in ("session:", f"agent:{policy.name}", "fleet"))
    return f"It may spend at most {own} a session and {agent}, and all agents together {fleet}."


def _listed(caps: Iterable[str]) -> str:
    return " and ".join(caps) or "any amount"


def _cap(leg: Leg, row: BudgetRow | None) -> str:
    cap = leg.cap if row is None else row.cap
    per = leg.window.partition("/")[0]
    return f"{'any amount' if cap is None else shown(cap)}{f' a {per}' if per else ''}"
