"""Budgets, caps and the policy of the store."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from halter.config.merge import FleetConfig
from halter.config.policy import (
    DifferenceKind,
    PolicyDifference,
    canonicalize_policy,
    merge_with_policy,
    parse_stored_fleet,
)
from halter.core.clock import DAY, window_after, window_at, window_end
from halter.core.errors import NotDone
from halter.core.events import CapChanged, FleetPolicyAdopted
from halter.core.ids import FLEET, StreamId, session_of
from halter.core.money import (
    DOLLAR,
    MINUTE_WINDOW,
    ZERO_USD,
    Account,
    BudgetRow,
    Usd,
    format_micros,
    micros_to_usd,
    usd_to_micros,
)
from halter.core.ports import Query
from halter.core.rows import HoldRow, SessionRow
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.guard.judge import adopt_policy
from halter.guard.ledger import change_cap
from halter.operations.desk import Actor, Dollars, Done, Name, Reason, Scope, fail_conflict, fail_invalid, readable
from halter.runtime.budgets import Budget, read_configured_caps, read_current_budgets, render_budgets
from halter.runtime.runtime import DEFAULT_FLEET, make_adoption_event, read_stored_policy

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

    def to_spending(self) -> Spending:
        facts = msgspec.structs.asdict(self)
        return Spending(spent_usd=micros_to_usd(facts.pop("usd")), **facts)


class Budgets(msgspec.Struct, frozen=True):
    """Current caps, and what the last day was spent on."""

    budgets: Sequence[Budget]
    last_day: Sequence[Spending]


async def budgets(actor: Actor, *, everything: Everything = False) -> Budgets:
    """List current caps, or all that ever were, with what is spent and held against them."""
    rows = await list_budgets(actor, everything=everything)
    return Budgets(rows, await read_spending(actor, actor.app.clock.now() - DAY))


async def list_budgets(actor: Actor, *, everything: bool = False) -> Sequence[Budget]:
    """List current caps, or all that ever were, without what was spent on what."""
    now = actor.app.clock.now()
    rows = [row for row in await _list_visible(actor, everything=everything) if everything or is_current(row, now)]
    return await render_budgets(actor.app.store, rows)


async def read_spending(actor: Actor, since: int) -> Sequence[Spending]:
    """Read what was spent since a moment, by agent, purpose and name; the dearest first."""
    spent = await actor.app.store.ask(Query("spent_by_purpose", _Sum, {"since": since}))
    return [line.to_spending() for line in spent if actor.principal.can_see(line.agent)]


async def read_fleet_day(actor: Actor) -> tuple[Usd, Usd | None]:
    """Read what the fleet spent today, and its cap, also before anything was spent."""
    now = actor.app.clock.now()
    rows = [row for row in await read_current_budgets(actor.app.store, now, 0) if row.scope == "fleet"]
    days = [row for row in rows if row.unit == "usd" and row.window.startswith("day/") and is_current(row, now)]
    if days:
        row = days[-1]
        return micros_to_usd(row.spent + row.held), None if row.cap is None else micros_to_usd(row.cap)
    sessions = await actor.app.store.ask(Query("sessions", SessionRow, {"since": 1, "limit": 1}))
    caps = await read_configured_caps(actor.app.store, sessions[0].definition) if sessions else None
    cap = None if caps is None else next((cap.max_cost_usd for cap in caps.fleet if cap.per == "day"), None)
    return ZERO_USD, None if cap is None else micros_to_usd(cap)


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
    actor: Actor, direction: Way, scope: Scope, cap: Dollars, window: Window = "", reason: Reason = ""
) -> CapSet:
    """Raise or lower a cap, for one window or for a session's whole life."""
    actor.demand("operator", "change a cap")
    amount = amount_of(cap)
    await actor.require_scope(scope, "change the cap of the fleet")
    _reject_no_window(window)
    now = actor.app.clock.now()
    waiting = await list_pending_decisions(actor.app.store, now)
    asking = [decision for decision in waiting if decision.about == "cap_raise" and decision.subject == scope]
    row = _choose_budget(await _list_with_requested(actor, scope, asking), scope, window, now)
    _reject_wrong_direction(direction, row, amount)
    account = Account(row.scope, row.window, row.unit)
    write = change_cap(account, amount, actor.principal.name, actor.app.ids.make(), reason)
    events = (await actor.app.store.commit(write)).events
    if not events:
        fail_conflict(_find_carved(scope))
    for decision in asking if direction == "raise" and not account.window else ():
        # The raise itself lets the session continue, so the question is answered.
        await actor.app.store.commit(
            answer_decision(decision, "approve", actor.principal.name, actor.app.ids.make(), reason)
        )
    beyond = sum(stored.event.overrun for stored in events if isinstance(stored.event, CapChanged))
    cap_usd = None if amount is None else micros_to_usd(amount)
    limit = "no cap" if amount is None else f"a cap of {format_micros(amount)}"
    sentence = f"{scope} has {limit} now; the journal records it with your name."
    return CapSet(scope, sentence, row.scope, row.window, cap_usd, actor.principal.name, micros_to_usd(beyond), reason)


async def _list_visible(actor: Actor, *, everything: bool = False) -> Sequence[BudgetRow]:
    """List the budgets that they may see. The fleet's is for those who see all agents."""
    store, now = actor.app.store, actor.app.clock.now()
    rows = await (store.ask(Query("budgets", BudgetRow)) if everything else read_current_budgets(store, now))
    return [row for row in rows if not actor.principal.agents or await _is_theirs(actor, row.scope)]


async def _is_theirs(actor: Actor, scope: str) -> bool:
    agent = await actor.agent_of(scope)
    return agent is not None and actor.principal.can_see(agent)


async def _list_with_requested(actor: Actor, scope: str, asking: Sequence[PendingDecision]) -> Sequence[BudgetRow]:
    """List the budgets of a scope; also that of a session which asks for more before anything was held for it.

    If there are none, return all others, for the error message.
    """
    rows = await actor.app.store.ask(Query("budgets_of", BudgetRow, {"scope": scope}))
    return rows or [BudgetRow(decision.subject, "", "usd") for decision in asking[:1]] or await _list_visible(actor)


def reject_no_raise(decision: PendingDecision, cap: int | None) -> None:
    """Refuse a cap that is no higher than the one in the question, which its digest names."""
    old = int(decision.digest.rpartition("=")[2])
    if cap is not None and cap <= old:
        fail_invalid(f"The cap of {decision.subject} is {format_micros(old)} now: that would not raise it.")


def _find_carved(scope: str) -> str:
    return (
        f"{scope} is a sub-session: its cap was carved out of its parent's and cannot pass what was carved. "
        "Raise the cap of its parent; sub-sessions that begin after that can be given more."
    )


async def reject_beyond_carved(actor: Actor, scope: str, cap: int | None) -> None:
    """Refuse to give a sub-session more than was carved out for it."""
    session = session_of(StreamId(scope)) or ""
    holds = await actor.app.store.ask(Query("holds_of", HoldRow, {"session": session}))
    carved = [leg.amount for hold in holds if hold.hold == session for leg in hold.taken() if leg.unit == "usd"]
    if any(cap is None or cap > amount for amount in carved):
        fail_conflict(_find_carved(scope))


def amount_of(text: str) -> int | None:
    """Parse a cap in dollars; `none` is no cap."""
    if text.lower() == "none":
        return None
    try:
        amount = usd_to_micros(text.lstrip("$"))
    except (ArithmeticError, ValueError):
        fail_invalid(f"{text!r} is not an amount: write dollars, as in 2.50, or none.")
    if not 0 <= amount <= LARGEST:
        fail_invalid(f"A cap lies between nothing and {format_micros(LARGEST)}: {text} does not.")
    return amount


def _reject_no_window(window: str) -> None:
    try:
        window_end(readable(window, "a window"))
        known = not window.startswith(MINUTE_WINDOW)
    except (LookupError, OSError, OverflowError, ValueError):
        known = False
    if not known:
        fail_invalid(f"{window!r} is no window: write it like day/2026-11-15, hour/2026-11-15T09 or month/2026-11.")


def _choose_budget(rows: Sequence[BudgetRow], scope: str, window: str, now: int) -> BudgetRow:
    known = [row for row in rows if row.scope == scope and row.unit == "usd"]
    found = [row for row in known if (row.window == window if window else is_current(row, now))]
    if len(found) == 1:
        return found[0]
    if not known and window:
        if (current := window_after(window, now)) != window:
            fail_invalid(f"{window} is not now, and a cap there would hold for nothing. Write --window {current}.")
        return BudgetRow(scope, window, "usd")
    if not known and scope == FLEET:
        return BudgetRow(scope, window_at("day", now), "usd")
    if not known:
        scopes = ", ".join(sorted({row.scope for row in rows if row.unit == "usd"})) or "none yet"
        raise NotDone(f"Nothing was ever spent in the scope {scope!r}. Scopes with a budget: {scopes}.", "missing")
    windows_now = _find_current_windows(known, now)
    if not found and (window in windows_now or (not window and len(windows_now) == 1)):
        return windows_now[window or next(iter(windows_now))]
    windows = ", ".join(each or "(no window)" for each in sorted(windows_now))
    return fail_invalid(f"{scope} has these windows: {windows}. Name one of them with --window.")


def _find_current_windows(known: Sequence[BudgetRow], now: int) -> Mapping[str, BudgetRow]:
    """The windows of now that follow on those of a scope, with what is configured for them.

    One in which nothing was spent yet has no row of its own. A person's word held for a window that is over.
    """
    found: dict[str, BudgetRow] = {}
    for row in sorted(known, key=attrgetter("cap_at")):
        window = row.window and window_after(row.window, now)
        if not row.cap_by:
            found[window] = BudgetRow(row.scope, window, "usd", row.cap, row.cap_at)
        elif window not in found:
            found[window] = BudgetRow(row.scope, window, "usd")
    return found


def _reject_wrong_direction(direction: Direction, row: BudgetRow, amount: int | None) -> None:
    """Keep a typo from turning a raise into a cut, or a cut into a raise."""
    if row.cap_at == 0:
        return
    new, old = (float("inf") if cap is None else cap for cap in (amount, row.cap))
    if new == old or (new > old) != (direction == "raise"):
        now = "none" if row.cap is None else format_micros(row.cap)
        fail_invalid(f"The cap of {row.scope} is {now} now: that would not {direction} it.")


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


async def show(actor: Actor) -> StorePolicy:
    """Show the policy that binds every process on the store, who adopted it, and when.

    Its content is for those who see all agents. Without a digest there is none.
    """
    row = await read_stored_policy(actor.app.store)
    if row is None:
        return StorePolicy({})
    said: Mapping[str, Any] = {} if actor.principal.agents else msgspec.json.decode(row.policy)
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


async def apply(actor: Actor, policy: StorePolicy, written: FleetConfig, reason: str = "") -> FleetPolicyAdopted:
    """Make a file the store's policy, in place of the one that was shown."""
    actor.demand("admin", "change the store's policy")
    actor.require_all_agents("change the store's policy")
    loosens = tuple(each.key for each in differences(policy, written) if each.how == "looser")
    event = make_adoption_event(written, actor.principal.name, replaces=policy.digest, loosens=loosens, reason=reason)
    events = (await actor.app.store.commit(adopt_policy(event, actor.app.ids.make()))).events
    if not events:
        fail_conflict("The store's policy has changed meanwhile: look at it again with halter policy.")
    return event
