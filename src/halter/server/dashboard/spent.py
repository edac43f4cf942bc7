"""Money on a page: what is spent and held, of which cap."""

from collections.abc import Callable, Sequence
from decimal import Decimal

from halter.app.desk import looking, money
from halter.app.desk.money import Budget
from halter.core.money import shown_in
from halter.server.dashboard.parts import box, fill, meter, words
from halter.server.dashboard.room import Room

NEWEST = 500
"""Among so many sessions it is looked which are under way."""


async def current(room: Room) -> Sequence[Budget]:
    """List the caps that count: of the fleet, of agents and triggers, and of sessions that are under way."""
    rows = (await money.budgets(room.desk)).budgets
    sessions = await looking.sessions(room.desk, limit=NEWEST)
    under_way = {f"session:{row.session}" for row in sessions if row.ended_at is None}
    return [row for row in rows if not row.scope.startswith("session:") or row.scope in under_way]


def amount(row: Budget, number: Decimal) -> str:
    """Write an amount in the unit that a budget is kept in."""
    return shown_in(number, row.unit)


def cap_of(row: Budget) -> str:
    """Write a cap."""
    return "no cap" if row.cap is None else amount(row, row.cap)


def share(row: Budget) -> float:
    """Tell how much of a cap is spent or held: 1 is all of it, and also what is left of a cap of nothing."""
    used = row.spent + row.held
    if row.cap is None:
        return 0.0
    return float(used / row.cap) if row.cap else float(used > 0)


def figures(row: Budget) -> str:
    """Say what a bar shows."""
    return row.told()


def bar(row: Budget) -> Callable[[Budget], None]:
    """Show a budget as a bar with its figures."""
    with box("div").style("margin-bottom: 0.7rem"):
        with box("div", "h-row"):
            words(row.scope, "h-what")
            words(row.window or "its life", "h-dim")
        said = words(figures(row))
        drawn = meter(f"{row.scope} {row.window}", share(row))

    def later(row: Budget) -> None:
        if said.text != figures(row):
            said.say(figures(row))
            fill(drawn, share(row))

    return later
