"""Budgets: every cap with what is spent, held and left, how that came about, and a person's word to change it."""

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui

from halter.app.desk import looking, money, policy
from halter.app.desk.money import Budget, Direction
from halter.app.words.moments import written
from halter.core.clock import DAY
from halter.core.ids import FLEET
from halter.core.money import NOTHING
from halter.core.windows import window_at
from halter.server.dashboard.asking import REASON, Field, Given, ask
from halter.server.dashboard.charts import Point, spend_over_time
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, Words, box, button, cell, fill, meter, part, pre, table, words
from halter.server.dashboard.plot import Plot
from halter.server.dashboard.room import Refresh, Room
from halter.server.dashboard.spent import amount, cap_of, current, share

COLUMNS = ("scope", "window", "cap", "spent", "held", "left", "used", "change")
NUMBERS = ("cap", "spent", "held", "left")
PARTS = 288


async def budgets(room: Room) -> Refresh:
    """Put the page together."""
    with part("Spent today against the cap", card=True):
        whose: Any = ui.select(["fleet"], label="Whose", value="fleet").props("outlined dense")
        whose.style("max-width: 20rem")
        plot = Plot("What was spent today, against the cap", "Nothing was spent today.")
    with part("Caps", card=True):
        lines = Kept[Budget](table("Caps", COLUMNS, NUMBERS), lambda row: _row(room, row))

    with part("Policy of the store", card=True):
        adopted, says = words(""), pre("")

    async def refresh(grown: Grown) -> None:
        if not grown.written:
            return
        if grown.of(FLEET):
            await _show_policy(room, adopted, says)
        rows = await current(room)
        lines.show({(row.scope, row.window, row.unit): row for row in rows})
        scopes = ["fleet", *sorted({row.scope for row in rows if row.scope.startswith("agent:")})]
        if whose.options != scopes:
            whose.set_options(scopes)
        await _draw(room, plot, str(whose.value), rows)

    async def again() -> None:
        await refresh(Grown(everything=True))

    whose.on_value_change(again)
    await again()
    return refresh


async def _show_policy(room: Room, adopted: Words, says: Words) -> None:
    """Show what binds every process on the store, and who adopted it."""
    found = await policy.show(room.desk)
    adopted.say(f"Adopted by {found.by} on {written(found.at)}." if found.digest else policy.NONE_YET)
    says.say("\n".join(f"{key}: {value}" for key, value in policy.lines_of(found.policy)))


async def _draw(room: Room, plot: Plot, scope: str, rows: Sequence[Budget]) -> None:
    """Draw what one scope spent today. A budget's day begins at midnight in UTC, as its window says."""
    now = room.now
    since = now - now % DAY
    today = window_at("day", now)
    row = next((row for row in rows if (row.scope, row.window, row.unit) == (scope, today, "usd")), None)
    size = max(1, -(-(now + 1 - since) // PARTS))
    points: list[Point] = [
        (since + each.part * size, float(each.spent_usd))
        for each in await looking.spending(room.desk, since, now + 1, PARTS)
        if scope in ("fleet", f"agent:{each.agent}")
    ]
    cap = None if row is None or row.cap is None else float(row.cap)
    plot.show(spend_over_time(points, cap, now), empty=not points)


def _row(room: Room, row: Budget) -> Callable[[Budget], None]:
    name = f"{row.scope} {row.window}".strip()
    with box("tr"):
        cell(row.scope, "h-what")
        cell(row.window or "its life")
        figures = [cell("", "h-num") for _ in NUMBERS]
        with box("td"):
            drawn = meter(f"used of {name}", share(row))
        with box("td"), box("div", "h-row"):
            if room.may("operator") and row.unit == "usd":
                button("Raise…", lambda: _change(room, row, "raise"), "plain", f"Raise the cap of {name}")
                button("Lower…", lambda: _change(room, row, "lower"), "plain", f"Lower the cap of {name}")

    def show(row: Budget) -> None:
        kept = f" ({amount(row, row.kept)} kept for the last words)" if row.kept else ""
        left = "" if row.left is None else f"{amount(row, max(NOTHING, row.left))}{kept}"
        for one, text in zip(figures, (cap_of(row), amount(row, row.spent), amount(row, row.held), left), strict=True):
            one.say(text)
        fill(drawn, share(row))

    seen = [row]
    show(row)

    def later(row: Budget) -> None:
        if row != seen[0]:
            seen[0] = row
            show(row)

    return later


def _change(room: Room, row: Budget, direction: Direction) -> None:
    async def do(given: Given) -> str:
        cap = money.amount_of(given["cap"].strip())
        await money.change_cap(room.desk, direction, row.scope, cap, row.window, given["reason"])
        return f"The cap of {row.scope} was changed."

    says = f"{row.scope} ({row.window or 'its life'}) has {cap_of(row)}. The change is recorded with your name."
    cap = Field("cap", "New cap in dollars, or none")
    ask(room, f"{direction.capitalize()} the cap of {row.scope}?", says, (cap, REASON), direction.capitalize(), do)
