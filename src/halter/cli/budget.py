"""`halter budget`: what stands against every cap, and raising or lowering one."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import typer

from halter.app import App
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    ScopeArgument,
    StoreOption,
    fail,
    only_a_person,
    readable,
    readable_scope,
    with_app,
)
from halter.cli.plain import PlainCommand, PlainGroup
from halter.core.clock import DAY
from halter.core.events import AnyEvent, Unknown
from halter.core.ids import StreamId, session_of
from halter.core.money import DOLLAR, Account, BudgetRow, dollars, shown
from halter.core.ports import Query
from halter.core.rows import HoldRow
from halter.core.windows import window_at, window_end
from halter.guard.approvals import Open, decide, needs_you
from halter.guard.purse import change_cap

Direction = Literal["raise", "lower"]
LARGEST: Final = 10**12 * DOLLAR


class Spent(msgspec.Struct, frozen=True):
    """What was spent on one thing, by one agent, for one purpose."""

    agent: str
    purpose: str
    name: str
    spends: int
    usd: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int


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
    """Show every cap that counts now, what is spent and held against it, and what the last day was spent on."""

    async def job(app: App) -> tuple[Sequence[BudgetRow], Sequence[Spent], int]:
        now = app.clock.now()
        rows = await app.store.ask(Query("budgets", BudgetRow))
        spent = await app.store.ask(Query("spent_by_purpose", Spent, {"since": now - DAY}))
        return [row for row in rows if everything or is_current(row, now)], spent, now

    rows, spent, _ = with_app(store, job)
    if as_json:
        answer_json({"budgets": rows, "last_day": spent})
        return
    answer_table(
        "Budgets",
        ["scope", "window", "cap", "spent", "held", "left", "set by"],
        [_budget_line(row) for row in rows],
        right="cap spent held left",
        long="scope window",
        empty="Nothing was spent or held yet.",
    )
    answer_table(
        "Spent in the last 24 hours",
        ["agent", "purpose", "on", "times", "cost"],
        [[line.agent, line.purpose, line.name, str(line.spends), shown(line.usd)] for line in spent],
        right="times cost",
        empty="Nothing was spent in the last 24 hours.",
    )


def is_current(row: BudgetRow, now: int) -> bool:
    """Tell whether a window is not over yet, or still holds something."""
    end = window_end(row.window)
    return row.held > 0 or end is None or end > now


def _budget_line(row: BudgetRow) -> list[str]:
    cap = "none" if row.cap is None else _written(row, row.cap)
    left = "" if row.cap is None else _written(row, row.cap - row.spent - row.held)
    spent, held = _written(row, row.spent), _written(row, row.held)
    return [row.scope, row.window or "its life", cap, spent, held, left, row.cap_by or "config"]


def _written(row: BudgetRow, amount: int) -> str:
    return shown(amount) if row.unit == "usd" else f"{amount:,} tokens"


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
    """Raise a cap, for its present window or for a session's whole life. Recorded with your name."""
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
    """Lower a cap, also below what is spent already: then nothing more is admitted. Recorded with your name."""
    _change("lower", scope, cap, window, reason, store, as_json=as_json)


def _change(
    direction: Direction, scope: str, cap: str, window: str, reason: str, store: str | None, *, as_json: bool
) -> None:
    amount = amount_of(cap)
    readable_scope(scope)
    _refuse_no_window(window)

    async def job(app: App) -> AnyEvent | Unknown:
        only_a_person(app, "change a cap")
        asking = [one for one in await needs_you(app.store) if one.about == "cap_raise" and one.subject == scope]
        row = chosen(await _budgets(app, asking), scope, window, app.clock.now())
        refuse_wrong_direction(direction, row, amount)
        account = Account(row.scope, row.window, row.unit)
        write = change_cap(account, amount, app.settings.person, app.ids.new(), reason)
        events = (await app.store.commit(write)).events
        if not events:
            fail(_carved(scope), NOT_FINE)
        for one in asking if direction == "raise" and not account.window else ():
            # The session goes on by the raise itself; so nobody needs to be asked about it any more.
            await app.store.commit(decide(one, "approve", app.settings.person, app.ids.new(), reason))
        return events[0].event

    event = with_app(store, job)
    if as_json:
        answer_json(event)
        return
    limit = "no cap" if amount is None else f"a cap of {shown(amount)}"
    say(f"{scope} has {limit} now; it stands in the journal with your name.")


async def _budgets(app: App, asking: Sequence[Open]) -> Sequence[BudgetRow]:
    """List the budgets; also that of a session which asks for more before anything was ever held for it."""
    rows = await app.store.ask(Query("budgets", BudgetRow))
    known = {row.scope for row in rows}
    return [*rows, *(BudgetRow(one.subject, "", "usd") for one in asking[:1] if one.subject not in known)]


def refuse_no_raise(asked: Open, cap: int | None) -> None:
    """Refuse a cap that is no higher than the one that was asked about, which the question's digest names."""
    old = int(asked.digest.rpartition("=")[2])
    if cap is not None and cap <= old:
        fail(f"The cap of {asked.subject} is {shown(old)} now: that would not raise it.", WRONG_USE)


def _carved(scope: str) -> str:
    return (
        f"{scope} is a sub-session: its cap was carved out of its parent's and cannot pass what was carved. "
        "Raise the cap of its parent; sub-sessions that begin after that can be given more."
    )


async def refuse_beyond_carved(app: App, scope: str, cap: int | None) -> None:
    """Refuse to give a sub-session more than what was carved out for it."""
    session = session_of(StreamId(scope)) or ""
    holds = await app.store.ask(Query("holds_of", HoldRow, {"session": session}))
    carved = [leg.amount for hold in holds if hold.hold == session for leg in hold.taken() if leg.unit == "usd"]
    if any(cap is None or cap > amount for amount in carved):
        fail(_carved(scope), NOT_FINE)


def amount_of(text: str) -> int | None:
    """Read a cap that was typed; none is no cap."""
    if text.lower() == "none":
        return None
    try:
        amount = dollars(text.lstrip("$"))
    except (ArithmeticError, ValueError):
        return fail(f"{text!r} is not an amount: write dollars, as in 2.50, or none.", WRONG_USE)
    if not 0 <= amount <= LARGEST:
        return fail(f"A cap lies between nothing and {shown(LARGEST)}: {text} does not.", WRONG_USE)
    return amount


def _refuse_no_window(window: str) -> None:
    try:
        window_end(readable(window, "a window"))
    except (LookupError, OSError, OverflowError, ValueError):
        fail(f"{window!r} is no window: write it like day/2026-11-15, hour/2026-11-15T09 or month/2026-11.", WRONG_USE)


def chosen(rows: Sequence[BudgetRow], scope: str, window: str, now: int) -> BudgetRow:
    """Find the one budget that is meant; say which there are if it is not clear."""
    known = [row for row in rows if row.scope == scope and row.unit == "usd"]
    meant = [row for row in known if (row.window == window if window else is_current(row, now))]
    if len(meant) == 1:
        return meant[0]
    if not known and window:
        return BudgetRow(scope, window, "usd")
    if not known and scope == "fleet":
        return BudgetRow(scope, window_at("day", now), "usd")
    if not known:
        scopes = ", ".join(sorted({row.scope for row in rows if row.unit == "usd"})) or "none yet"
        return fail(f"Nothing was ever spent in the scope {scope!r}. Scopes with a budget: {scopes}.", WRONG_USE)
    windows = ", ".join(row.window or "(no window)" for row in known)
    return fail(f"{scope} has these windows: {windows}. Name one of them with --window.", WRONG_USE)


def refuse_wrong_direction(direction: Direction, row: BudgetRow, amount: int | None) -> None:
    """Keep a slip of the finger from turning a raise into a cut, or a cut into a raise."""
    if row.cap_at == 0:
        return
    new, old = (float("inf") if cap is None else cap for cap in (amount, row.cap))
    if new == old or (new > old) != (direction == "raise"):
        now = "none" if row.cap is None else shown(row.cap)
        fail(f"The cap of {row.scope} is {now} now: that would not {direction} it.", WRONG_USE)
