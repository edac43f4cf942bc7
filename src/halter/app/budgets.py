"""The budgets that count at a moment, found without a walk through those of all that ever was."""

from typing import Final

from halter.core.clock import DAY
from halter.core.money import BudgetRow
from halter.core.ports import Query, Store
from halter.core.rows import HoldRow
from halter.core.windows import window_at

ENDED: Final = 20
"""So many sessions are shown that ended last."""


async def current_budgets(store: Store, now: int, ended: int = ENDED) -> list[BudgetRow]:
    """List what stands against the caps that count now, and against whatever is still held for a window that is over.

    A day begins up to fourteen hours earlier in other zones, so windows are looked for from a day ago on.
    """
    earlier = now - DAY
    windows = {"hour": window_at("hour", now), "day": window_at("day", earlier), "month": window_at("month", earlier)}
    rows = {_key(row): row for row in await store.ask(Query("budgets_now", BudgetRow, {**windows, "ended": ended}))}
    for hold in await store.ask(Query("holds", HoldRow)):
        for leg in hold.taken():
            if (leg.scope, leg.window, leg.unit) not in rows:
                params = {"scope": leg.scope, "window": leg.window, "unit": leg.unit}
                rows.update((_key(row), row) for row in await store.ask(Query("budget", BudgetRow, params)))
    return [row for _, row in sorted(rows.items())]


def _key(row: BudgetRow) -> tuple[str, str, str]:
    return row.scope, row.window, row.unit
