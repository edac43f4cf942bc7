"""What stands against every cap, and a person's word to raise or lower one."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from halter.app.budgets import current_budgets
from halter.app.desk.desk import Desk, readable, refused, wrong
from halter.app.desk.operation import Dollars, Done, Name, Reason, Scope
from halter.app.reserves import Written, written_caps
from halter.core.clock import DAY
from halter.core.errors import NotDone
from halter.core.events import CapChanged
from halter.core.ids import StreamId, session_of
from halter.core.money import (
    DOLLAR,
    MINUTELY,
    NOTHING,
    Account,
    Amount,
    BudgetRow,
    Unit,
    Usd,
    dollars,
    in_unit,
    shown,
    shown_in,
    usd,
)
from halter.core.ports import Query, Store
from halter.core.rows import HoldRow
from halter.core.windows import window_at, window_end
from halter.guard.approvals import Open, decide, needs_you
from halter.guard.purse import change_cap as changing

Direction = Literal["raise", "lower"]
Way = Annotated[Direction, Meta(description="Which way it is changed; a slip in the amount is refused.")]
Window = Annotated[
    Name,
    Meta(description="Which window, as in day/2026-11-15, if there are several.", extra={"metavar": "WINDOW"}),
]
Everything = Annotated[bool, Meta(description="Show windows that are over, too.")]
LARGEST: Final = 10**12 * DOLLAR


class Spent(msgspec.Struct, frozen=True):
    """What was spent on one thing, by one agent, for one purpose."""

    agent: str
    purpose: str
    name: str
    spends: int
    spent_usd: Usd
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int


class _Sum(msgspec.Struct, frozen=True):
    """The same as the store has it: in micro-dollars."""

    agent: str
    purpose: str
    name: str
    spends: int
    usd: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int

    def told(self) -> Spent:
        facts = msgspec.structs.asdict(self)
        return Spent(spent_usd=usd(facts.pop("usd")), **facts)


class Budget(msgspec.Struct, frozen=True):
    """What stands against one cap, in its unit: dollars for `usd`, counts for `tokens` and `requests`.

    `cap` is the one that was written; `kept` is the part of it that a session keeps for its last words. `cap_by` is the
    person who set the cap; where nobody did, the configuration says it.
    """

    scope: str
    window: str
    unit: Unit
    cap: Amount | None = None
    cap_at: int = 0
    cap_by: str = ""
    spent: Amount = NOTHING
    held: Amount = NOTHING
    overrun: Amount = NOTHING
    kept: Amount = NOTHING

    @classmethod
    def of(cls, row: BudgetRow, written: Written | None = None) -> "Budget":
        """Show a row of the store, with its cap as it was `written` where that is known."""
        known = Written(row.cap) if written is None else written
        amounts = {name: in_unit(getattr(row, name), row.unit) for name in ("spent", "held", "overrun")}
        cap = None if known.cap is None else in_unit(known.cap, row.unit)
        kept = in_unit(known.kept, row.unit)
        return cls(row.scope, row.window, row.unit, cap, row.cap_at, row.cap_by, **amounts, kept=kept)

    @property
    def left(self) -> Decimal | None:
        """What may still be spent before its last words; None where there is no cap."""
        return None if self.cap is None else self.cap - self.spent - self.held - self.kept

    def told(self) -> str:
        """Say what is spent of a cap, and what of it is kept."""
        cap = "no cap" if self.cap is None else shown_in(self.cap, self.unit)
        held = f" and {shown_in(self.held, self.unit)} held" if self.held else ""
        kept = f" ({shown_in(self.kept, self.unit)} kept for the last words)" if self.kept else ""
        return f"{shown_in(self.spent, self.unit)} spent{held} of {cap}{kept}"


async def shown_budgets(store: Store, rows: Sequence[BudgetRow]) -> Sequence[Budget]:
    """Show rows of the store with the caps of their sessions as they were written."""
    caps = await written_caps(store, rows)
    return [Budget.of(row, caps.get(row.scope) if row.unit == "usd" else None) for row in rows]


class Budgets(msgspec.Struct, frozen=True):
    """The caps that count, and what the last day was spent on."""

    budgets: Sequence[Budget]
    last_day: Sequence[Spent]


async def budgets(desk: Desk, *, everything: Everything = False) -> Budgets:
    """List every cap that counts now, or that ever did, with what is spent and held against it."""
    now = desk.app.clock.now()
    rows = [row for row in await _seen(desk, everything=everything) if everything or is_current(row, now)]
    spent = await desk.app.store.ask(Query("spent_by_purpose", _Sum, {"since": now - DAY}))
    shown_rows = await shown_budgets(desk.app.store, rows)
    return Budgets(shown_rows, [line.told() for line in spent if desk.who.sees(line.agent)])


def is_current(row: BudgetRow, now: int) -> bool:
    """Tell whether a window is not over yet, or still holds something. A minute that is over holds nobody back."""
    end = row.ends_at
    return end is None or end > now or (row.held > 0 and row.window != MINUTELY)


class CapSet(Done, frozen=True):
    """A cap as a person has set it; what was spent and held beyond it by then is an overrun."""

    scope: str
    window: str
    cap_usd: Usd | None
    by: str
    overrun_usd: Usd = NOTHING
    reason: str = ""


async def change_cap(
    desk: Desk, direction: Direction, scope: str, cap: int | None, window: str = "", reason: str = ""
) -> CapSet:
    """Raise or lower a cap, for one window or for a session's whole life. It is recorded with a name."""
    desk.demand("operator", "change a cap")
    await desk.demand_scope(scope, "change the cap of the fleet")
    _refuse_no_window(window)
    now = desk.app.clock.now()
    waiting = await needs_you(desk.app.store, now)
    asking = [one for one in waiting if one.about == "cap_raise" and one.subject == scope]
    row = _chosen(await _with_asked(desk, scope, asking), scope, window, now)
    _refuse_wrong_direction(direction, row, cap)
    account = Account(row.scope, row.window, row.unit)
    write = changing(account, cap, desk.who.name, desk.app.ids.new(), reason)
    events = (await desk.app.store.commit(write)).events
    if not events:
        refused(_carved(scope))
    for one in asking if direction == "raise" and not account.window else ():
        # The session goes on by the raise itself; so nobody needs to be asked about it any more.
        await desk.app.store.commit(decide(one, "approve", desk.who.name, desk.app.ids.new(), reason))
    beyond = sum(stored.event.overrun for stored in events if isinstance(stored.event, CapChanged))
    cap_usd = None if cap is None else usd(cap)
    limit = "no cap" if cap is None else f"a cap of {shown(cap)}"
    sentence = f"{scope} has {limit} now; it stands in the journal with your name."
    return CapSet(scope, sentence, row.scope, row.window, cap_usd, desk.who.name, usd(beyond), reason)


async def set_cap(
    desk: Desk, direction: Way, scope: Scope, cap: Dollars, window: Window = "", reason: Reason = ""
) -> CapSet:
    """Raise or lower a cap, for one window or for a session's whole life."""
    desk.demand("operator", "change a cap")
    return await change_cap(desk, direction, scope, amount_of(cap), window, reason)


async def _seen(desk: Desk, *, everything: bool = False) -> Sequence[BudgetRow]:
    """List the budgets that are theirs to see. Of all agents' money nobody is told who sees only some."""
    store, now = desk.app.store, desk.app.clock.now()
    rows = await (store.ask(Query("budgets", BudgetRow)) if everything else current_budgets(store, now))
    return [row for row in rows if not desk.who.agents or await _is_theirs(desk, row.scope)]


async def _is_theirs(desk: Desk, scope: str) -> bool:
    agent = await desk.agent_of(scope)
    return agent is not None and desk.who.sees(agent)


async def _with_asked(desk: Desk, scope: str, asking: Sequence[Open]) -> Sequence[BudgetRow]:
    """List the budgets of a scope; also that of a session which asks for more before anything was ever held for it.

    Where there are none, the others tell what could have been meant.
    """
    rows = await desk.app.store.ask(Query("budgets_of", BudgetRow, {"scope": scope}))
    return rows or [BudgetRow(one.subject, "", "usd") for one in asking[:1]] or await _seen(desk)


def refuse_no_raise(asked: Open, cap: int | None) -> None:
    """Refuse a cap that is no higher than the one that was asked about, which the question's digest names."""
    old = int(asked.digest.rpartition("=")[2])
    if cap is not None and cap <= old:
        wrong(f"The cap of {asked.subject} is {shown(old)} now: that would not raise it.")


def _carved(scope: str) -> str:
    return (
        f"{scope} is a sub-session: its cap was carved out of its parent's and cannot pass what was carved. "
        "Raise the cap of its parent; sub-sessions that begin after that can be given more."
    )


async def refuse_beyond_carved(desk: Desk, scope: str, cap: int | None) -> None:
    """Refuse to give a sub-session more than what was carved out for it."""
    session = session_of(StreamId(scope)) or ""
    holds = await desk.app.store.ask(Query("holds_of", HoldRow, {"session": session}))
    carved = [leg.amount for hold in holds if hold.hold == session for leg in hold.taken() if leg.unit == "usd"]
    if any(cap is None or cap > amount for amount in carved):
        refused(_carved(scope))


def amount_of(text: str) -> int | None:
    """Read a cap that was typed; none is no cap."""
    if text.lower() == "none":
        return None
    try:
        amount = dollars(text.lstrip("$"))
    except (ArithmeticError, ValueError):
        wrong(f"{text!r} is not an amount: write dollars, as in 2.50, or none.")
    if not 0 <= amount <= LARGEST:
        wrong(f"A cap lies between nothing and {shown(LARGEST)}: {text} does not.")
    return amount


def _refuse_no_window(window: str) -> None:
    try:
        window_end(readable(window, "a window"))
        known = not window.startswith(MINUTELY)
    except (LookupError, OSError, OverflowError, ValueError):
        known = False
    if not known:
        wrong(f"{window!r} is no window: write it like day/2026-11-15, hour/2026-11-15T09 or month/2026-11.")


def _chosen(rows: Sequence[BudgetRow], scope: str, window: str, now: int) -> BudgetRow:
    """Find the one budget that is meant; say which there are if it is not clear."""
    known = [row for row in rows if row.scope == scope and row.unit == "usd"]
    found = [row for row in known if (row.window == window if window else is_current(row, now))]
    if len(found) == 1:
        return found[0]
    if not known and window:
        return BudgetRow(scope, window, "usd")
    if not known and scope == "fleet":
        return BudgetRow(scope, window_at("day", now), "usd")
    if not known:
        scopes = ", ".join(sorted({row.scope for row in rows if row.unit == "usd"})) or "none yet"
        raise NotDone(f"Nothing was ever spent in the scope {scope!r}. Scopes with a budget: {scopes}.", "missing")
    windows = ", ".join(row.window or "(no window)" for row in known)
    return wrong(f"{scope} has these windows: {windows}. Name one of them with --window.")


def _refuse_wrong_direction(direction: Direction, row: BudgetRow, amount: int | None) -> None:
    """Keep a slip of the finger from turning a raise into a cut, or a cut into a raise."""
    if row.cap_at == 0:
        return
    new, old = (float("inf") if cap is None else cap for cap in (amount, row.cap))
    if new == old or (new > old) != (direction == "raise"):
        now = "none" if row.cap is None else shown(row.cap)
        wrong(f"The cap of {row.scope} is {now} now: that would not {direction} it.")
