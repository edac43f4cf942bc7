"""`halter budget`: what stands against every cap, and raising or lowering one."""

from typing import Annotated

import typer

from halter.app.desk import money
from halter.app.desk.money import Budget, Direction, amount_of
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import (
    WRONG_USE,
    JsonOption,
    ReasonOption,
    ScopeArgument,
    StoreOption,
    desk_of,
    fail,
    saying_errors,
    with_app,
)
from halter.cli.plain import PlainCommand, PlainGroup
from halter.core.money import shown, shown_in, shown_usd


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="budget", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    for name, command in (("show", show), ("raise", raise_cap), ("lower", lower_cap)):
        group.command(name, cls=PlainCommand)(command)
    return group


EverythingOption = Annotated[bool, typer.Option("--everything", help="Show windows that are over, too.")]


def _default(
    context: typer.Context,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
    everything: EverythingOption = False,
) -> None:
    """Show what is spent and held against every cap, or raise or lower one."""
    if context.invoked_subcommand is None:
        show(store=store, as_json=as_json, everything=everything)
    elif store is not None or as_json or everything:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", WRONG_USE)


def show(*, store: StoreOption = None, as_json: JsonOption = False, everything: EverythingOption = False) -> None:
    """Show every cap that counts now, what is spent and held against it, and what the last day was spent on.

    A hold is money kept back for a call or a request that is under way; it is settled with what that really cost.
    What is kept of a session's cap pays for its last words.
    """
    found = with_app(store, lambda app: money.budgets(desk_of(app), everything=everything), despite_doubt=True)
    if as_json:
        answer_json(found)
        return
    kept = any(row.kept for row in found.budgets)
    answer_table(
        "Budgets",
        ["scope", "window", "cap", "spent", "held", *(["kept"] if kept else []), "left", "set by"],
        [_budget_line(row, kept=kept) for row in found.budgets],
        right="cap spent held kept left",
        long="scope window",
        empty="Nothing was spent or held yet.",
    )
    answer_table(
        "Spent in the last 24 hours",
        ["agent", "purpose", "on", "times", "cost"],
        [[line.agent, line.purpose, line.name, str(line.spends), shown_usd(line.spent_usd)] for line in found.last_day],
        right="times cost",
        empty="Nothing was spent in the last 24 hours.",
    )


def _budget_line(row: Budget, *, kept: bool) -> list[str]:
    cap = "none" if row.cap is None else shown_in(row.cap, row.unit)
    left = "" if row.left is None else shown_in(row.left, row.unit)
    spent, held = shown_in(row.spent, row.unit), shown_in(row.held, row.unit)
    reserve = ([shown_in(row.kept, row.unit)] if row.kept else [""]) if kept else []
    return [row.scope, row.window or "its life", cap, spent, held, *reserve, left, row.cap_by or "config"]


CapArgument = Annotated[str, typer.Argument(help="The new cap in dollars, or none.")]
WindowOption = Annotated[
    str, typer.Option("--window", metavar="WINDOW", help="Which window, as in day/2026-11-15, if there are several.")
]


def raise_cap(
    scope: ScopeArgument,
    cap: CapArgument,
    *,
    window: WindowOption = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Raise a cap, for its present window or for a session's whole life. Recorded with your name.

    What waits for more money in that scope goes on by itself.
    """
    _change("raise", scope, cap, window, reason, store, as_json=as_json)


def lower_cap(
    scope: ScopeArgument,
    cap: CapArgument,
    *,
    window: WindowOption = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lower a cap, also below what is spent already: then nothing more is admitted. Recorded with your name.

    What is under way is not stopped by it: `halter halt` does that.
    """
    _change("lower", scope, cap, window, reason, store, as_json=as_json)


def _change(
    direction: Direction, scope: str, cap: str, window: str, reason: str, store: str | None, *, as_json: bool
) -> None:
    amount = saying_errors(lambda: amount_of(cap))
    changed = with_app(store, lambda app: money.change_cap(desk_of(app), direction, scope, amount, window, reason))
    if as_json:
        answer_json(changed)
        return
    limit = "no cap" if amount is None else f"a cap of {shown(amount)}"
    say(f"{scope} has {limit} now; it stands in the journal with your name.")
