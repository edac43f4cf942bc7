"""Budgets, caps and the policy of the store.

A hold carries a session's cap without what is kept for its wrap-up, so a row of the store does not tell the two apart;
the session's definition does.
"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta

from halter.config.merge import FleetConfig
from halter.config.policy import (
    DifferenceKind,
    PolicyDifference,
    canonicalize_policy,
    merge_with_policy,
    parse_stored_fleet,
)
from halter.core.agent_spec import AnyTrigger, inherit_trigger_caps
from halter.core.clock import DAY, window_at, window_end
from halter.core.errors import NotDone
from halter.core.events import CapChanged, FleetPolicyAdopted
from halter.core.ids import Digest, StreamId, session_of
from halter.core.money import (
    CARVED_CAP,
    DOLLAR,
    MINUTE_WINDOW,
    ZERO_USD,
    Account,
    Amount,
    BudgetRow,
    Caps,
    Unit,
    Usd,
    format_micros,
    format_unit_amount,
    micros_to_usd,
    to_unit_amount,
    usd_to_micros,
)
from halter.core.ports import Query, Store
from halter.core.rows import HoldRow, SessionRow
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.guard.judge import adopt_policy
from halter.guard.ledger import change_cap
from halter.operations.desk import Desk, Dollars, Done, Name, Reason, Scope, readable, refused, wrong
from halter.runtime.runtime import DEFAULT_FLEET, make_adoption_event, read_stored_policy

MAX_ENDED_SESSIONS: Final = 20
"""How many of the sessions that ended last are shown."""


async def read_current_budgets(store: Store, now: int, ended: int = MAX_ENDED_SESSIONS) -> list[BudgetRow]:
    """List the budgets of current windows, and of past ones that still hold something.

    A day begins up to fourteen hours earlier in other zones, so windows are searched from a day ago on.
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


MAX_SINGLE_LOOKUPS: Final = 50
"""Up to this many sessions are looked up one by one; beyond it, all are read."""


class WrittenCap(msgspec.Struct, frozen=True):
    """A session's configured cap, and how much of it is kept; None is no cap."""

    cap: int | None
    kept: int = 0


class _Policy(msgspec.Struct, frozen=True):
    caps: Caps
    on_cap: str
    reserve_cost_fraction: float


class _Definition(msgspec.Struct, frozen=True):
    policy: _Policy


async def read_written_caps(store: Store, rows: Sequence[BudgetRow]) -> Mapping[str, WrittenCap]:
    """Find the configured caps of the sessions among some budgets, by scope."""
    names = {row.scope: session_of(StreamId(row.scope)) or "" for row in rows if _is_own(row)}
    sessions = await _sessions(store, set(names.values()))
    policies: dict[str, _Policy | None] = {}
    triggers: dict[str, AnyTrigger | None] = {}
    found: dict[str, WrittenCap] = {}
    for row in rows:
        session = sessions.get(names.get(row.scope, ""))
        if session is None or not _is_own(row):
            continue
        if session.definition not in policies:
            policies[session.definition] = await _policy(store, session.definition)
        if session.trigger and session.trigger not in triggers:
            triggers[session.trigger] = await _trigger(store, session.trigger)
        policy = policies[session.definition]
        if policy is not None:
            found[row.scope] = compute_written_cap(row, session, policy, triggers.get(session.trigger))
    return found


def _is_own(row: BudgetRow) -> bool:
    return row.unit == "usd" and not row.window and row.scope.startswith("session:")


def compute_written_cap(row: BudgetRow, session: SessionRow, policy: _Policy, trigger: AnyTrigger | None) -> WrittenCap:
    """Compute a session's cap as the guard does; one that is over, or plays a playbook, keeps nothing."""
    own = (policy.caps if trigger is None else inherit_trigger_caps(policy.caps, trigger)).session.max_cost_usd
    base = row.cap if row.cap_by == CARVED_CAP else own
    plays = trigger is not None and trigger.playbook is not UNSET
    keeps = policy.on_cap == "wrap_up" and session.ended_at is None and not plays
    kept = round((base or 0) * policy.reserve_cost_fraction) if keeps else 0
    return WrittenCap(row.cap if row.cap_by else own, kept)


async def _sessions(store: Store, names: set[str]) -> Mapping[str, SessionRow]:
    rows: list[SessionRow] = []
    if len(names) > MAX_SINGLE_LOOKUPS:
        rows += await store.ask(Query("all_sessions", SessionRow))
    else:
        for name in sorted(names):
            rows += await store.ask(Query("session", SessionRow, {"session": name}))
    return {row.session: row for row in rows}


async def _policy(store: Store, definition: str) -> _Policy | None:
    """Read the policy of a definition; None if there is none, or if it keeps nothing."""
    try:
        return msgspec.json.decode(await store.get(Digest(definition)), type=_Definition).policy if definition else None
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


async def _trigger(store: Store, trigger: str) -> AnyTrigger | None:
    # Imported late: most budgets belong to no trigger, and listing them should be fast.
    from halter.runtime.session_builder import find_trigger_row, read_trigger_record

    row = await find_trigger_row(store, trigger)
    made = None if row is None else await read_trigger_record(store, row)
    return None if made is None else made.trigger()


Direction = Literal["raise", "lower"]
Way = Annotated[Direction, Meta(description="raise or lower; an amount that does the opposite is refused.")]
Window = Annotated[
    Name,
    Meta(description="Which window, as in day/2026-11-15, if there are several.", extra={"metavar": "WINDOW"}),
]
Everything = Annotated[bool, Meta(description="Include windows that are over.")]
LARGEST: Final = 10**12 * DOLLAR


class Spending(msgspec.Struct, frozen=True):
    """What one agent spent on one thing for one purpose."""

    agent: str
    purpose: str
    name: str
    spends: int
    spent_usd: Usd
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int


class _Sum(msgspec.Struct, frozen=True):
    agent: str
    purpose: str
    name: str
    spends: int
    usd: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int

    def told(self) -> Spending:
        facts = msgspec.structs.asdict(self)
        return Spending(spent_usd=micros_to_usd(facts.pop("usd")), **facts)


class Budget(msgspec.Struct, frozen=True):
    """One cap, in its unit: dollars for `usd`, counts for `tokens` and `requests`.

    `cap` is the configured one; `kept` is the part of it that a session keeps for its wrap-up. `cap_by` is the person
    who set the cap; empty means the configuration.
    """

    scope: str
    window: str
    unit: Unit
    cap: Amount | None = None
    cap_at: int = 0
    cap_by: str = ""
    spent: Amount = ZERO_USD
    held: Amount = ZERO_USD
    overrun: Amount = ZERO_USD
    kept: Amount = ZERO_USD

    @classmethod
    def of(cls, row: BudgetRow, written: WrittenCap | None = None) -> "Budget":
        known = WrittenCap(row.cap) if written is None else written
        amounts = {name: to_unit_amount(getattr(row, name), row.unit) for name in ("spent", "held", "overrun")}
        cap = None if known.cap is None else to_unit_amount(known.cap, row.unit)
        kept = to_unit_amount(known.kept, row.unit)
        return cls(row.scope, row.window, row.unit, cap, row.cap_at, row.cap_by, **amounts, kept=kept)

    @property
    def left(self) -> Decimal | None:
        """What may still be spent before the wrap-up; None without a cap."""
        return None if self.cap is None else self.cap - self.spent - self.held - self.kept

    def told(self) -> str:
        cap = "no cap" if self.cap is None else format_unit_amount(self.cap, self.unit)
        held = f" and {format_unit_amount(self.held, self.unit)} held" if self.held else ""
        kept = f" ({format_unit_amount(self.kept, self.unit)} kept for the last words)" if self.kept else ""
        return f"{format_unit_amount(self.spent, self.unit)} spent{held} of {cap}{kept}"


async def shown_budgets(store: Store, rows: Sequence[BudgetRow]) -> Sequence[Budget]:
    caps = await read_written_caps(store, rows)
    return [Budget.of(row, caps.get(row.scope) if row.unit == "usd" else None) for row in rows]


class Budgets(msgspec.Struct, frozen=True):
    """Current caps, and what the last day was spent on."""

    budgets: Sequence[Budget]
    last_day: Sequence[Spending]


async def budgets(desk: Desk, *, everything: Everything = False) -> Budgets:
    """List current caps, or all that ever were, with what is spent and held against them."""
    now = desk.app.clock.now()
    rows = [row for row in await _seen(desk, everything=everything) if everything or is_current(row, now)]
    spent = await desk.app.store.ask(Query("spent_by_purpose", _Sum, {"since": now - DAY}))
    shown_rows = await shown_budgets(desk.app.store, rows)
    return Budgets(shown_rows, [line.told() for line in spent if desk.who.sees(line.agent)])


def is_current(row: BudgetRow, now: int) -> bool:
    """Return whether a window is not over, or still holds something. A past minute does not count."""
    end = row.ends_at
    return end is None or end > now or (row.held > 0 and row.window != MINUTE_WINDOW)


class CapSet(Done, frozen=True):
    """A cap as a person set it; what was spent and held beyond it by then is an overrun."""

    scope: str
    window: str
    cap_usd: Usd | None
    by: str
    overrun_usd: Usd = ZERO_USD
    reason: str = ""


async def set_cap(
    desk: Desk, direction: Way, scope: Scope, cap: Dollars, window: Window = "", reason: Reason = ""
) -> CapSet:
    """Raise or lower a cap, for one window or for a session's whole life."""
    desk.demand("operator", "change a cap")
    amount = amount_of(cap)
    await desk.demand_scope(scope, "change the cap of the fleet")
    _refuse_no_window(window)
    now = desk.app.clock.now()
    waiting = await list_pending_decisions(desk.app.store, now)
    asking = [one for one in waiting if one.about == "cap_raise" and one.subject == scope]
    row = _chosen(await _with_asked(desk, scope, asking), scope, window, now)
    _refuse_wrong_direction(direction, row, amount)
    account = Account(row.scope, row.window, row.unit)
    write = change_cap(account, amount, desk.who.name, desk.app.ids.new(), reason)
    events = (await desk.app.store.commit(write)).events
    if not events:
        refused(_carved(scope))
    for one in asking if direction == "raise" and not account.window else ():
        # The raise itself lets the session continue, so the question is answered.
        await desk.app.store.commit(answer_decision(one, "approve", desk.who.name, desk.app.ids.new(), reason))
    beyond = sum(stored.event.overrun for stored in events if isinstance(stored.event, CapChanged))
    cap_usd = None if amount is None else micros_to_usd(amount)
    limit = "no cap" if amount is None else f"a cap of {format_micros(amount)}"
    sentence = f"{scope} has {limit} now; the journal records it with your name."
    return CapSet(scope, sentence, row.scope, row.window, cap_usd, desk.who.name, micros_to_usd(beyond), reason)


async def _seen(desk: Desk, *, everything: bool = False) -> Sequence[BudgetRow]:
    """List the budgets that they may see. The fleet's is for those who see all agents."""
    store, now = desk.app.store, desk.app.clock.now()
    rows = await (store.ask(Query("budgets", BudgetRow)) if everything else read_current_budgets(store, now))
    return [row for row in rows if not desk.who.agents or await _is_theirs(desk, row.scope)]


async def _is_theirs(desk: Desk, scope: str) -> bool:
    agent = await desk.agent_of(scope)
    return agent is not None and desk.who.sees(agent)


async def _with_asked(desk: Desk, scope: str, asking: Sequence[PendingDecision]) -> Sequence[BudgetRow]:
    """List the budgets of a scope; also that of a session which asks for more before anything was held for it.

    If there are none, return all others, for the error message.
    """
    rows = await desk.app.store.ask(Query("budgets_of", BudgetRow, {"scope": scope}))
    return rows or [BudgetRow(one.subject, "", "usd") for one in asking[:1]] or await _seen(desk)


def refuse_no_raise(asked: PendingDecision, cap: int | None) -> None:
    """Refuse a cap that is no higher than the one in the question, which its digest names."""
    old = int(asked.digest.rpartition("=")[2])
    if cap is not None and cap <= old:
        wrong(f"The cap of {asked.subject} is {format_micros(old)} now: that would not raise it.")


def _carved(scope: str) -> str:
    return (
        f"{scope} is a sub-session: its cap was carved out of its parent's and cannot pass what was carved. "
        "Raise the cap of its parent; sub-sessions that begin after that can be given more."
    )


async def refuse_beyond_carved(desk: Desk, scope: str, cap: int | None) -> None:
    """Refuse to give a sub-session more than was carved out for it."""
    session = session_of(StreamId(scope)) or ""
    holds = await desk.app.store.ask(Query("holds_of", HoldRow, {"session": session}))
    carved = [leg.amount for hold in holds if hold.hold == session for leg in hold.taken() if leg.unit == "usd"]
    if any(cap is None or cap > amount for amount in carved):
        refused(_carved(scope))


def amount_of(text: str) -> int | None:
    """Parse a cap in dollars; `none` is no cap."""
    if text.lower() == "none":
        return None
    try:
        amount = usd_to_micros(text.lstrip("$"))
    except (ArithmeticError, ValueError):
        wrong(f"{text!r} is not an amount: write dollars, as in 2.50, or none.")
    if not 0 <= amount <= LARGEST:
        wrong(f"A cap lies between nothing and {format_micros(LARGEST)}: {text} does not.")
    return amount


def _refuse_no_window(window: str) -> None:
    try:
        window_end(readable(window, "a window"))
        known = not window.startswith(MINUTE_WINDOW)
    except (LookupError, OSError, OverflowError, ValueError):
        known = False
    if not known:
        wrong(f"{window!r} is no window: write it like day/2026-11-15, hour/2026-11-15T09 or month/2026-11.")


def _chosen(rows: Sequence[BudgetRow], scope: str, window: str, now: int) -> BudgetRow:
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
    """Keep a typo from turning a raise into a cut, or a cut into a raise."""
    if row.cap_at == 0:
        return
    new, old = (float("inf") if cap is None else cap for cap in (amount, row.cap))
    if new == old or (new > old) != (direction == "raise"):
        now = "none" if row.cap is None else format_micros(row.cap)
        wrong(f"The cap of {row.scope} is {now} now: that would not {direction} it.")


NONE_YET: Final = "This store has no policy yet: the first halter.yaml that is used on it becomes its policy."
ORDER: Final[tuple[DifferenceKind, ...]] = ("looser", "fixed", "free", "stricter")
"""What a person must see comes first."""


class StorePolicy(msgspec.Struct, frozen=True):
    """The store's policy; without a digest, the store has none."""

    policy: Mapping[str, Any]
    digest: str = ""
    by: str = ""
    at: int = 0
    number: int = 0


async def show(desk: Desk) -> StorePolicy:
    """Show the policy that binds every process on the store, who adopted it, and when.

    Its content is for those who see all agents. Without a digest there is none.
    """
    row = await read_stored_policy(desk.app.store)
    if row is None:
        return StorePolicy({})
    said: Mapping[str, Any] = {} if desk.who.agents else msgspec.json.decode(row.policy)
    return StorePolicy(said, row.digest, row.by, row.at, row.number)


def lines_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Flatten a policy to one line for each value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  It is JSON.
            yield from lines_of(item, f"{path}.{key}".removeprefix("."))
    elif path:
        yield path, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def differences(policy: StorePolicy, written: FleetConfig) -> Sequence[PolicyDifference]:
    """List what a file would change in the store's policy, looser keys first."""
    before = parse_stored_fleet(canonicalize_policy(policy.policy)) if policy.digest else DEFAULT_FLEET
    found = merge_with_policy(before, written).differences
    return sorted(found, key=lambda each: ORDER.index(each.how))


async def apply(desk: Desk, policy: StorePolicy, written: FleetConfig, reason: str = "") -> FleetPolicyAdopted:
    """Make a file the store's policy, in place of the one that was shown."""
    desk.demand("admin", "change the store's policy")
    desk.demand_all("change the store's policy")
    loosens = tuple(each.key for each in differences(policy, written) if each.how == "looser")
    event = make_adoption_event(written, desk.who.name, replaces=policy.digest, loosens=loosens, reason=reason)
    events = (await desk.app.store.commit(adopt_policy(event, desk.app.ids.new()))).events
    if not events:
        refused("The store's policy has changed meanwhile: look at it again with halter policy.")
    return event
