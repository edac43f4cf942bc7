"""Budgets, caps and the policy of the store."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from halter.config.merge import FleetConfig
from halter.config.policy import (
    PolicyDifference,
    canonicalize_policy,
    merge_with_policy,
    parse_stored_fleet,
)
from halter.core.clock import DAY, window_after, window_at, window_end
from halter.core.errors import NotDone
from halter.core.events import CapChanged, FleetPolicyAdopted, PricesChanged
from halter.core.ids import FLEET, StreamId, parse_session_id
from halter.core.money import (
    DOLLAR,
    MINUTE_WINDOW,
    ZERO_USD,
    Account,
    BudgetRow,
    Usd,
    format_exact_micros,
    format_micros,
    micros_to_usd,
    usd_to_micros,
)
from halter.core.ports import Query
from halter.core.rows import HoldRow, SessionRow
from halter.core.text import format_count
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.guard.ledger import change_cap
from halter.operations.actor import Actor, Dollars, Done, Name, Reason, Scope, fail_conflict, fail_invalid, readable
from halter.policy.order import DifferenceKind
from halter.policy.store_policy import adopt_policy
from halter.runtime import runtime
from halter.runtime.budgets import Budget, read_configured_caps, read_current_budgets, render_budgets
from halter.runtime.needs import describe_continuation
from halter.runtime.runtime import DEFAULT_FLEET, make_adoption_event, read_stored_policy

Direction = Literal["raise", "lower"]
DirectionName = Annotated[Direction, Meta(description="raise or lower; an amount that does the opposite is rejected.")]
Window = Annotated[
    Name,
    Meta(description="The window, such as day/2026-11-15, if there are several.", extra={"metavar": "WINDOW"}),
]
Everything = Annotated[bool, Meta(description="Include past windows.")]
MAX_CAP: Final = 10**12 * DOLLAR
MIN_DIGEST_LENGTH: Final = 12
"""Shorter beginnings of a digest could be met by another file."""


class Spending(msgspec.Struct, frozen=True):
    """The spending of one agent on one model or tool for one purpose."""

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
    """Current caps, and the spending of the last day."""

    budgets: Sequence[Budget]
    last_day: Sequence[Spending]


async def budgets(actor: Actor, *, everything: Everything = False) -> Budgets:
    """List current caps, or all past ones too, with what is spent and held against them."""
    rows = await list_budgets(actor, everything=everything)
    return Budgets(rows, await read_spending(actor, actor.app.clock.now() - DAY))


async def list_budgets(actor: Actor, *, everything: bool = False) -> Sequence[Budget]:
    """List current caps, or all past ones too, without the spending by purpose."""
    now = actor.app.clock.now()
    rows = [row for row in await _list_visible(actor, everything=everything) if everything or is_current(row, now)]
    return await render_budgets(actor.app.store, rows)


async def read_spending(actor: Actor, since: int) -> Sequence[Spending]:
    """Read the spending since a moment by agent, purpose and name, the highest first."""
    rows = await actor.app.store.ask(Query("spent_by_purpose", _Sum, {"since": since}))
    return [line.to_spending() for line in rows if actor.principal.can_see(line.agent)]


async def read_fleet_day(actor: Actor) -> tuple[Usd, Usd | None]:
    """Read the fleet's spending of today and its cap; the cap is known before anything is spent."""
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
    """Return whether a window is current, or past with an open hold. A past minute does not count."""
    end = row.ends_at
    return end is None or end > now or (row.held > 0 and row.window != MINUTE_WINDOW)


class CapSet(Done, frozen=True):
    """A cap that a person set. Spending and holds that already exceed it are an overrun."""

    scope: str
    window: str
    cap_usd: Usd | None
    by: str
    overrun_usd: Usd = ZERO_USD
    reason: str = ""


async def set_cap(
    actor: Actor, direction: DirectionName, scope: Scope, cap: Dollars, window: Window = "", reason: Reason = ""
) -> CapSet:
    """Raise or lower a cap, for one window or for the whole life of a session."""
    actor.require_person("operator", "change a cap")
    amount = amount_of(cap)
    await actor.require_scope(scope, "change the fleet's cap")
    _reject_no_window(window)
    now = actor.app.clock.now()
    waiting = await list_pending_decisions(actor.app.store, now)
    cap_decisions = [decision for decision in waiting if decision.about == "cap_raise" and decision.subject == scope]
    row = _choose_budget(await _list_with_requested(actor, scope, cap_decisions), scope, window, now)
    _reject_wrong_direction(direction, row, amount)
    account = Account(row.scope, row.window, row.unit)
    waiting_session = cap_decisions[0].session if cap_decisions else ""
    continuation = await describe_continuation(actor.app.store, waiting_session, now)
    write = change_cap(account, amount, actor.principal.name, actor.app.ids.make(), reason)
    events = (await actor.app.store.commit(write)).events
    if not events:
        fail_conflict(_find_carved(scope))
    for decision in cap_decisions if direction == "raise" and not account.window else ():
        # The raise itself lets the session continue, so the decision is answered.
        await actor.app.store.commit(
            answer_decision(decision, "approve", actor.principal.name, actor.app.ids.make(), reason)
        )
    overrun_micros = sum(stored.event.overrun for stored in events if isinstance(stored.event, CapChanged))
    cap_usd = None if amount is None else micros_to_usd(amount)
    cap_text = "none" if amount is None else format_exact_micros(amount)
    sentence = f"Cap of {scope} is now {cap_text} (recorded in the journal with your name). {continuation}".rstrip()
    return CapSet(
        scope, sentence, row.scope, row.window, cap_usd, actor.principal.name, micros_to_usd(overrun_micros), reason
    )


async def _list_visible(actor: Actor, *, everything: bool = False) -> Sequence[BudgetRow]:
    """List the budgets that the principal can see. The fleet's budget requires access to every agent."""
    store, now = actor.app.store, actor.app.clock.now()
    rows = await (store.ask(Query("budgets", BudgetRow)) if everything else read_current_budgets(store, now))
    return [row for row in rows if not actor.principal.agents or await _is_theirs(actor, row.scope)]


async def _is_theirs(actor: Actor, scope: str) -> bool:
    agent = await actor.agent_of(scope)
    return agent is not None and actor.principal.can_see(agent)


async def _list_with_requested(
    actor: Actor, scope: str, cap_decisions: Sequence[PendingDecision]
) -> Sequence[BudgetRow]:
    """List the budgets of a scope, or that of a session which asks for a cap before anything was held for it.

    If there are none, list all visible budgets, for the error message.
    """
    rows = await actor.app.store.ask(Query("budgets_of", BudgetRow, {"scope": scope}))
    return (
        rows or [BudgetRow(decision.subject, "", "usd") for decision in cap_decisions[:1]] or await _list_visible(actor)
    )


def reject_no_raise(decision: PendingDecision, cap: int | None) -> None:
    """Reject a cap that is no higher than the one in the decision, which its digest names."""
    current = int(decision.digest.rpartition("=")[2])
    if cap is not None and cap <= current:
        fail_invalid(f"The cap of {decision.subject} is {format_exact_micros(current)}. Give a higher one.")


def _find_carved(scope: str, amount: int | None = None) -> str:
    limit_text = "amount" if amount is None else format_exact_micros(amount)
    return (
        f"{scope} is a sub-session; its cap cannot exceed the {limit_text} given by its parent. "
        "Raise the parent's cap: sub-sessions started after that can get more."
    )


async def reject_beyond_carved(actor: Actor, scope: str, cap: int | None) -> None:
    """Reject a cap of a sub-session above the amount that its parent gave it."""
    session = parse_session_id(StreamId(scope)) or ""
    holds = await actor.app.store.ask(Query("holds_of", HoldRow, {"session": session}))
    carved_amounts = [
        leg.amount for hold in holds if hold.hold == session for leg in hold.decode_legs() if leg.unit == "usd"
    ]
    if any(cap is None or cap > amount for amount in carved_amounts):
        fail_conflict(_find_carved(scope, min(carved_amounts)))


def amount_of(text: str) -> int | None:
    """Parse a cap in dollars; `none` means no cap."""
    if text.lower() == "none":
        return None
    try:
        amount = usd_to_micros(text.lstrip("$"))
    except (ArithmeticError, ValueError):
        fail_invalid(f"Invalid amount {text!r}. Use dollars, such as 2.50, or none.")
    if not 0 <= amount <= MAX_CAP:
        fail_invalid(f"Invalid cap {text}: use an amount from 0 to {format_micros(MAX_CAP)}.")
    return amount


def _reject_no_window(window: str) -> None:
    try:
        window_end(readable(window, "window"))
        is_valid = not window.startswith(MINUTE_WINDOW)
    except (LookupError, OSError, OverflowError, ValueError):
        is_valid = False
    if not is_valid:
        fail_invalid(
            f"Invalid window {window!r}. Use a form such as day/2026-11-15, hour/2026-11-15T09 or month/2026-11."
        )


def _choose_budget(rows: Sequence[BudgetRow], scope: str, window: str, now: int) -> BudgetRow:
    scope_budgets = [row for row in rows if row.scope == scope and row.unit == "usd"]
    matches = [row for row in scope_budgets if (row.window == window if window else is_current(row, now))]
    if len(matches) == 1:
        return matches[0]
    if not scope_budgets and window:
        if (current := window_after(window, now)) != window:
            fail_invalid(f"{window} is not the current window, so a cap there has no effect. Use --window {current}.")
        return BudgetRow(scope, window, "usd")
    if not scope_budgets and scope == FLEET:
        return BudgetRow(scope, window_at("day", now), "usd")
    if not scope_budgets:
        scopes = ", ".join(sorted({row.scope for row in rows if row.unit == "usd"})) or "none yet"
        raise NotDone(f"There is no budget for scope {scope!r}. Scopes with a budget: {scopes}.", "missing")
    windows_now = _find_current_windows(scope_budgets, now)
    if not matches and (window in windows_now or (not window and len(windows_now) == 1)):
        return windows_now[window or next(iter(windows_now))]
    windows = ", ".join(each or "(no window)" for each in sorted(windows_now))
    return fail_invalid(f"{scope} has these windows: {windows}. Choose one with --window.")


def _find_current_windows(scope_budgets: Sequence[BudgetRow], now: int) -> Mapping[str, BudgetRow]:
    """Find the current windows that follow the recorded ones of a scope, with their configured caps.

    A window without spending has no row yet. A cap that a person set ended with its window.
    """
    budget_by_window: dict[str, BudgetRow] = {}
    for row in sorted(scope_budgets, key=attrgetter("cap_at")):
        window = row.window and window_after(row.window, now)
        if not row.cap_by:
            budget_by_window[window] = BudgetRow(row.scope, window, "usd", row.cap, row.cap_at)
        elif window not in budget_by_window:
            budget_by_window[window] = BudgetRow(row.scope, window, "usd")
    return budget_by_window


def _reject_wrong_direction(direction: Direction, row: BudgetRow, amount: int | None) -> None:
    """Reject a raise that lowers the cap, or a cut that raises it: it is a typing error."""
    if row.cap_at == 0:
        return
    new_cap, old_cap = (float("inf") if cap is None else cap for cap in (amount, row.cap))
    if new_cap == old_cap or (new_cap > old_cap) != (direction == "raise"):
        current = "none" if row.cap is None else format_exact_micros(row.cap)
        fail_invalid(f"The cap of {row.scope} is {current}; this amount would not {direction} it.")


NO_POLICY_YET: Final = "This store has no policy yet. The halter.yaml of its first session becomes it."
DIFFERENCE_ORDER: Final[tuple[DifferenceKind, ...]] = ("looser", "fixed", "free", "stricter")
"""The differences that a person must review come first."""


class StorePolicy(msgspec.Struct, frozen=True):
    """The policy of the store; the digest is empty if it has none."""

    policy: Mapping[str, Any]
    digest: str = ""
    by: str = ""
    at: int = 0
    number: int = 0


async def show(actor: Actor) -> StorePolicy:
    """Show the policy that binds every process on the store, who adopted it, and when.

    Its content requires access to every agent. Without a digest, the store has none.
    """
    row = await read_stored_policy(actor.app.store)
    if row is None:
        return StorePolicy({})
    content: Mapping[str, Any] = {} if actor.principal.agents else msgspec.json.decode(row.policy)
    return StorePolicy(content, row.digest, row.by, row.at, row.number)


def lines_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Flatten a policy to one line per value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  It is JSON.
            yield from lines_of(item, f"{path}.{key}".removeprefix("."))
    elif path:
        yield path, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def differences(policy: StorePolicy, fleet: FleetConfig) -> Sequence[PolicyDifference]:
    """List the changes of a file to the store's policy, looser keys first."""
    stored_fleet = parse_stored_fleet(canonicalize_policy(policy.policy)) if policy.digest else DEFAULT_FLEET
    policy_differences = merge_with_policy(stored_fleet, fleet).differences
    return sorted(policy_differences, key=lambda each: DIFFERENCE_ORDER.index(each.how))


async def apply(actor: Actor, policy: StorePolicy, fleet: FleetConfig, reason: str = "") -> FleetPolicyAdopted:
    """Make a file the store's policy, replacing the one that was shown."""
    actor.require_person("admin", "change the store's policy")
    actor.require_all_agents("change the store's policy")
    loosens = tuple(each.key for each in differences(policy, fleet) if each.how == "looser")
    event = make_adoption_event(fleet, actor.principal.name, replaces=policy.digest, loosens=loosens, reason=reason)
    events = (await actor.app.store.commit(adopt_policy(event, actor.app.ids.make()))).events
    if not events:
        fail_conflict("The store's policy has changed in the meantime. Review it again with `halter policy`.")
    return event


class PriceReport(msgspec.Struct, frozen=True):
    """The price tables in force. Without a digest, the bundled one is alone.

    The changes are those of the newest file: new models and higher prices count, and what is `waiting` does not yet.
    """

    bundled: str
    digest: str = ""
    source: str = ""
    at: int = 0
    added: Sequence[str] = ()
    raised: Sequence[str] = ()
    waiting: Sequence[str] = ()


class PricesSet(Done, frozen=True):
    """A fetched price table that a person let count as it is."""

    by: str
    reason: str = ""


async def read_prices(actor: Actor) -> PriceReport:
    """Show the price tables in force, and which lower prices wait for a person's yes."""
    await actor.app.prices.refresh(actor.app.store)
    fetched, bundled = actor.app.prices.read(), f"genai-prices {version('genai-prices')}"
    if fetched is None:
        return PriceReport(bundled)
    return PriceReport(
        bundled, fetched.digest, fetched.source, fetched.at, fetched.added, fetched.raised, fetched.waiting
    )


async def update_prices(actor: Actor) -> PricesChanged | None:
    """Fetch the price table; None if the newest one is kept already."""
    actor.require_person("operator", "update the price table")
    actor.require_all_agents("update the price table")
    return await runtime.update_prices(actor.app, actor.principal.name)


Digest = Annotated[Name, Meta(description="Digest of the file, or its beginning, as `halter prices` shows it.")]


async def accept_prices(actor: Actor, digest: Digest, reason: Reason = "") -> PricesSet:
    """Let the newest fetched price table count as it is: its lower prices and its free models, too."""
    actor.require_person("admin", "accept lower prices")
    actor.require_all_agents("accept lower prices")
    report = await read_prices(actor)
    if not report.digest:
        raise NotDone("No price table was fetched. Run `halter prices update` first.", "missing")
    if len(digest) < MIN_DIGEST_LENGTH or not report.digest.startswith(digest):
        fail_conflict(f"The newest price table is {report.digest[:12]}, not {digest[:64]}. See `halter prices`.")
    if not report.waiting:
        fail_conflict("Nothing in the newest price table waits: it counts as it is.")
    event = await runtime.accept_prices(actor.app, actor.principal.name, reason)
    if event is None:
        fail_conflict("The price table has changed in the meantime. Review it again with `halter prices`.")
    count = format_count(len(report.waiting), "lower price")
    sentence = f"{count} of {report.digest[:12]} in force from now on (recorded in the journal with your name)."
    return PricesSet(report.digest, sentence, actor.principal.name, reason)
