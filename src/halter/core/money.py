"""Holds of money and tokens: hold an upper bound in every scope, act, and settle at the true cost.

Amounts are integers: micro-dollars for the unit `usd`, plain counts for `tokens` and `requests`. The rules are pure
functions; the caller locks the rows that they read, so the decision is still valid when it is written. Public names
that end in `_usd` are dollars.

The rate of a model is counted like money: held before a request, settled after it. But it is renewed with the next
minute, so a request above the rate waits instead of being refused. One row serves all minutes: it describes the newest
one, and events of earlier minutes do not change it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec

from halter.core.clock import MINUTE, QUARTER, WindowLength, window_after, window_at, window_end
from halter.core.ids import session_stream
from halter.core.vocabulary import Row, RowKey

Unit = Literal["usd", "tokens", "requests"]
UNITS: Final[tuple[Unit, Unit]] = ("usd", "tokens")
"""The units of a session's own budgets. Requests count only towards the rate of a model."""

MINUTE_WINDOW: Final = "minute"
"""The window of a rate's row: one row serves all minutes."""

DOLLAR = 1_000_000
CENT: Final = DOLLAR // 100

MAX_AMOUNT: Final = 1_000_000_000 * DOLLAR
"""The largest single amount, chosen so that a store can hold sums of amounts."""

INTEGER_LIMIT: Final = 2**63

Usd = Annotated[Decimal, msgspec.Meta(description="Dollars, exact to six decimals.")]

Amount = Annotated[Decimal, msgspec.Meta(description="Dollars where the unit is `usd`, else a count.")]

ZERO_USD: Final = Decimal(0)


def micros_to_usd(micros: int) -> Decimal:
    """Convert micro-dollars to dollars exactly."""
    return Decimal(micros) / DOLLAR


def usd_to_micros(amount: str | float | Decimal) -> int:
    """Convert dollars to micro-dollars, rounded up so that a bound does not shrink."""
    return int((Decimal(str(amount)) * DOLLAR).to_integral_value(ROUND_CEILING))


def format_micros(micros: int) -> str:
    """Format an amount for people: two decimals, or two significant digits below a cent. Nothing else looks like $0.00.

    An amount that a person set or approves is formatted exactly, and so are amounts that a program checks.
    """
    size = abs(micros)
    step = CENT if size >= CENT else 10 ** max(0, len(str(size)) - 2)
    rounded_size = (size + step // 2) // step * step
    return format_exact_micros(-rounded_size if micros < 0 else rounded_size)


def format_bound_micros(micros: int) -> str:
    """Format an upper bound for people: short as in `format_micros`, and rounded up, so that it stays a bound."""
    step = CENT if micros >= CENT else 10 ** max(0, len(str(micros)) - 2)
    return format_exact_micros(-(-micros // step) * step)


def format_exact_micros(micros: int) -> str:
    """Format an amount to its last digit, in cents, or finer if needed."""
    dollars, fraction = divmod(abs(micros), DOLLAR)
    # The leading one keeps the zeros of the fraction.
    digits = str(DOLLAR + fraction)
    return f"{'-' if micros < 0 else ''}${dollars:,}.{digits[1:3]}{digits[3:].rstrip('0')}"


def format_compared_micros(*amounts: int) -> list[str]:
    """Format amounts that a sentence compares: all exactly if rounding made two different ones look equal."""
    texts = [format_micros(micros) for micros in amounts]
    return texts if len({*texts}) == len({*amounts}) else [format_exact_micros(micros) for micros in amounts]


def format_usd(amount: Decimal) -> str:
    """Format dollars for people, as `format_micros` does."""
    return format_micros(int(amount * DOLLAR))


def format_share(spent: Decimal, cap: Decimal | None) -> str:
    """Format spending beside its cap, if there is one."""
    return format_usd(spent) if cap is None else " of ".join(format_compared("usd", spent, cap))


def to_unit_amount(amount: int, unit: Unit) -> Decimal:
    """Convert an amount to its public form: money in dollars, other units as counts."""
    return micros_to_usd(amount) if unit == "usd" else Decimal(amount)


def format_unit_amount(amount: Decimal, unit: Unit) -> str:
    return format_usd(amount) if unit == "usd" else f"{amount:,} {unit}"


def format_compared(unit: Unit, *amounts: Decimal) -> list[str]:
    """Format amounts of a unit that a sentence compares."""
    if unit != "usd":
        return [format_unit_amount(amount, unit) for amount in amounts]
    return format_compared_micros(*(int(amount * DOLLAR) for amount in amounts))


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A scope, one of its windows, and a unit."""

    scope: str
    window: str
    unit: Unit

    @property
    def is_rate(self) -> bool:
        """True for a rate, which is renewed every minute."""
        return self.window.startswith(MINUTE_WINDOW)


class Leg(Account, frozen=True, array_like=True):
    """One account's share of a hold: the account, its configured cap, and the amount."""

    cap: int | None
    amount: int

    def __post_init__(self) -> None:
        """Reject an amount that would free money, or that no store can hold."""
        if not 0 <= self.amount <= MAX_AMOUNT:
            raise ValueError(f"{self.amount} cannot be held in {self.scope}: a hold must be from 0 to {MAX_AMOUNT}.")


class Overrun(Account, frozen=True, array_like=True):
    amount: int


class Charge(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    usd: int = 0
    tokens: int = 0
    overruns: tuple[Overrun, ...] = ()

    def __post_init__(self) -> None:
        """Reject a charge that would give money back, or that no store can hold."""
        if not (0 <= self.usd < INTEGER_LIMIT and 0 <= self.tokens < INTEGER_LIMIT):
            raise ValueError(f"{self.usd} micro-dollars and {self.tokens} tokens cannot be charged.")

    def of(self, unit: Unit) -> int:
        return self.usd if unit == "usd" else self.tokens if unit == "tokens" else 1


class BudgetRow(Row, frozen=True):
    """The state of one account: the cap, who set it, and the amounts spent and held.

    For a rate, the row describes the newest minute, which began at `cap_at`.
    """

    TABLE = "budgets"
    KEY = ("scope", "window", "unit")

    scope: str
    window: str
    unit: Unit
    cap: int | None = None
    cap_at: int = 0
    cap_by: str = ""
    spent: int = 0
    held: int = 0
    overrun: int = 0

    def key(self) -> RowKey:
        return (BudgetRow, self.scope, self.window, self.unit)

    @property
    def ends_at(self) -> int | None:
        """The end of the window, or None for a scope's whole life."""
        return self.cap_at + MINUTE if self.window == MINUTE_WINDOW else window_end(self.window)

    def with_cap(self, cap: int | None, at: int, by: str = "", held: int = 0) -> "BudgetRow":
        """Apply a cap and add a hold. A cap set by a person outranks a carved cap, which outranks a configured one.

        People's caps are in one stream and are read in order. Configured caps are in the sessions' own streams, which
        have no common order: the latest one counts, and of equally late ones the larger, so that any order of the same
        events gives the same cap.
        """
        if by or self.cap_by or at <= self.cap_at:
            is_older = at < self.cap_at or (at == self.cap_at and _rank(cap) < _rank(self.cap))
            if (not by and (self.cap_by or is_older)) or (by == CARVED_CAP and self.cap_by not in {"", CARVED_CAP}):
                cap, at, by = self.cap, self.cap_at, self.cap_by
        return BudgetRow(self.scope, self.window, self.unit, cap, at, by, self.spent, self.held + held, self.overrun)

    def binding(self, configured: int | None) -> int | None:
        """Return the cap in force, given the configured one."""
        return self.cap if self.cap_by else configured

    def with_reserve(self, amount: int) -> "BudgetRow":
        """Lower a cap that a person set by a reserve; a configured cap is lowered in `Caps`."""
        if not amount or not self.cap_by or self.cap is None:
            return self
        return msgspec.structs.replace(self, cap=max(0, self.cap - amount))

    def with_amounts(self, spent: int = 0, held: int = 0, overrun: int = 0) -> "BudgetRow":
        return BudgetRow(
            self.scope,
            self.window,
            self.unit,
            self.cap,
            self.cap_at,
            self.cap_by,
            self.spent + spent,
            self.held + held,
            self.overrun + overrun,
        )


def _rank(cap: int | None) -> float:
    return math.inf if cap is None else cap


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """The amount fits every account and may be held."""

    legs: tuple[Leg, ...]


class Contended(msgspec.Struct, frozen=True, gc=False):
    """The amount fits the unspent part of the cap, but other holds must settle first."""

    leg: Leg
    budget: BudgetRow


class CapReached(msgspec.Struct, frozen=True, gc=False):
    """The amount exceeds the unspent part of the cap, so it can never fit."""

    leg: Leg
    cap: int
    budget: BudgetRow


CARVED_CAP: Final = "carved"
"""Marks a sub-session's cap, which is carved out of its parent's."""

FindBudget = Callable[[Leg], BudgetRow]


def reserve(budgets: Sequence[tuple[Leg, BudgetRow]]) -> Reserved | Contended | CapReached:
    """Decide whether all legs fit their budgets. A reached cap outranks a contended one."""
    contended: Contended | None = None
    legs: list[Leg] = []
    for leg, budget in budgets:
        legs.append(leg)
        cap = budget.cap if budget.cap_by else leg.cap
        if cap is None:
            continue
        remaining = cap - budget.spent
        if leg.amount > remaining:
            return CapReached(leg, cap, budget)
        if leg.amount > remaining - budget.held and contended is None:
            contended = Contended(leg, budget)
    return contended or Reserved(tuple(legs))


class CapMargin(msgspec.Struct, frozen=True, gc=False):
    """The remainder at which a budget is near its cap: a fraction of a cap in dollars, or a number of tokens."""

    cost_fraction: float
    tokens: int

    def contains(self, unit: Unit, cap: int, remaining: int) -> bool:
        """Return whether no more than the margin remains of a cap."""
        return remaining <= (round(cap * self.cost_fraction) if unit == "usd" else self.tokens)


def settle(legs: Iterable[Leg], usd: int, tokens: int, budget_of: FindBudget) -> Charge:
    """Compute the charge for a hold. The true cost is never reduced; the excess over a cap is reported as overruns.

    Amounts held by others count as spent, so a cost that leaves too little for them is an overrun too. Overruns of an
    earlier, lower cap are not subtracted, because that could hide that the present cap is exceeded. A rate has no
    overruns: later requests wait longer.
    """
    charge = Charge(usd, tokens)
    overruns: list[Overrun] = []
    for leg in legs:
        overshoot = (usd if leg.unit == "usd" else charge.of(leg.unit)) - leg.amount
        if overshoot <= 0 or leg.is_rate:
            continue
        budget = budget_of(leg)
        if budget.cap is None:
            continue
        excess = min(overshoot, budget.spent + budget.held + overshoot - budget.cap)
        if excess > 0:
            overruns.append(Overrun(leg.scope, leg.window, leg.unit, excess))
    return msgspec.structs.replace(charge, overruns=tuple(overruns)) if overruns else charge


def compute_cap_overrun(budget: BudgetRow, cap: int | None) -> int:
    """Compute by how much the spent and held amounts already exceed a lowered cap."""
    if cap is None:
        return 0
    return max(0, budget.spent + budget.held - cap - budget.overrun)


class Cap(msgspec.Struct, frozen=True):
    """A `max_cost_usd` in micro-dollars, for a scope's whole life or per window; None is an explicit `none`."""

    max_cost_usd: int | None
    per: WindowLength = ""


class Caps(msgspec.Struct, frozen=True):
    """The caps of a session. Each has a default, so `none` must be explicit."""

    session: Cap = Cap(1 * DOLLAR)
    trigger: tuple[Cap, ...] = ()
    agent: tuple[Cap, ...] = (Cap(5 * DOLLAR, "day"),)
    fleet: tuple[Cap, ...] = (Cap(20 * DOLLAR, "day"),)
    token_budget: int | None = None
    zone: str = "UTC"
    tokens_per_hour: int | None = None

    def minus(self, usd: int, tokens: int) -> "Caps":
        """Lower the session's cap and token budget by a reserve."""
        session, budget = self.session.max_cost_usd, self.token_budget
        if (not usd or session is None) and (not tokens or budget is None):
            return self
        return _lessen_caps(self, usd, tokens)

    def bind(self) -> bool:
        """Return whether any cap is set. A model without a price must then not be used."""
        return any(cap.max_cost_usd is not None for cap in (self.session, *self.trigger, *self.agent, *self.fleet))


@lru_cache(maxsize=256)
def _lessen_caps(caps: Caps, usd: int, tokens: int) -> Caps:
    """Compute the lowered caps once for all sessions of an agent."""
    session, budget = caps.session.max_cost_usd, caps.token_budget
    return msgspec.structs.replace(
        caps,
        session=caps.session if session is None else Cap(max(0, session - usd), caps.session.per),
        token_budget=None if budget is None else max(0, budget - tokens),
    )


ScopedCap = tuple[str, Cap]
"""A cap, and the scope whose spending it bounds."""


class Spender(msgspec.Struct, frozen=True, gc=False):
    """The spender of an amount, which determines its scopes. The amount also counts towards `caller_caps`."""

    session: str
    agent: str
    trigger: str = ""
    caller_caps: tuple[ScopedCap, ...] = ()


def make_legs(caps: Caps, spender: Spender, now: int, *, usd: int, tokens: int = 0) -> tuple[Leg, ...]:
    """Spread an amount over all its scopes: session, trigger, agent, fleet."""
    legs = _make_usd_legs(caps, spender, now // QUARTER, usd) if usd else ()
    if not tokens:
        return legs
    token_leg = Leg(session_stream(spender.session), "", "tokens", caps.token_budget, tokens)
    if caps.tokens_per_hour is None:
        return (*legs, token_leg)
    # The hourly budget is the agent's: a session that follows another one in the same hour gets the remainder.
    hour = window_at("hour", now)
    return (*legs, token_leg, Leg(f"agent:{spender.agent}", hour, "tokens", caps.tokens_per_hour, tokens))


NO_SESSION: Final = session_stream("")


def assign_legs(legs: Sequence[Leg], stream: str) -> tuple[Leg, ...]:
    """Replace the placeholder session of legs by the session of a stream."""
    session_legs: list[Leg] = []
    for leg in legs:
        is_shared = leg.scope != NO_SESSION
        session_legs.append(leg if is_shared else Leg(stream, leg.window, leg.unit, leg.cap, leg.amount))
    return tuple(session_legs)


def list_accounts(caps: Caps, spender: Spender, now: int) -> tuple[Leg, ...]:
    """List the accounts of a cost, also of a cost without a hold."""
    return _make_usd_legs(caps, spender, now // QUARTER, 0)


def _make_usd_legs(caps: Caps, spender: Spender, quarter: int, usd: int) -> tuple[Leg, ...]:
    session_cap, zone, trigger, caller_caps = caps.session, caps.zone, spender.trigger, spender.caller_caps
    window = window_at(session_cap.per, quarter * QUARTER, zone)
    leg = Leg(session_stream(spender.session), window, "usd", session_cap.max_cost_usd, usd)
    trigger_caps = caps.trigger if trigger else ()
    shared_legs = _list_shared_accounts(
        spender.trigger, trigger_caps, spender.agent, caps.agent, caps.fleet, zone, quarter, usd
    )
    return (leg, *(_merge_accounts(shared_legs, caller_caps, zone, quarter, usd) if caller_caps else shared_legs))


# Cached per quarter of an hour, within which no window begins or ends.
@lru_cache(maxsize=256)
def _list_shared_accounts(  # noqa: PLR0913, PLR0917 The parameters are the key of the cache.
    trigger: str,
    trigger_caps: tuple[Cap, ...],
    agent: str,
    agent_caps: tuple[Cap, ...],
    fleet_caps: tuple[Cap, ...],
    zone: str,
    quarter: int,
    usd: int,
) -> tuple[Leg, ...]:
    """List the accounts above a session, which all sessions of an agent or a trigger share."""
    scoped_caps = [
        *((f"trigger:{trigger}", cap) for cap in trigger_caps),
        *((f"agent:{agent}", cap) for cap in agent_caps),
        *(("fleet", cap) for cap in fleet_caps),
    ]
    return _merge_accounts((), scoped_caps, zone, quarter, usd)


def _merge_accounts(
    legs: Sequence[Leg], scoped_caps: Sequence[ScopedCap], zone: str, quarter: int, usd: int
) -> tuple[Leg, ...]:
    """Merge accounts into legs, each account once with its tightest cap."""
    legs_by_account = {(leg.scope, leg.window): leg for leg in legs}
    for scope, cap in scoped_caps:
        leg = Leg(scope, window_at(cap.per, quarter * QUARTER, zone), "usd", cap.max_cost_usd, usd)
        legs_by_account[leg.scope, leg.window] = _pick_tighter_leg(leg, legs_by_account.get((leg.scope, leg.window)))
    return tuple(legs_by_account.values())


def roll_legs(legs: tuple[Leg, ...], now: int) -> tuple[Leg, ...]:
    """Move an amount into the current windows: after midnight it counts towards the new day."""
    if all(window_after(leg.window, now) == leg.window for leg in legs):
        return legs
    return tuple(msgspec.structs.replace(leg, window=window_after(leg.window, now)) for leg in legs)


def first_window_end(legs: Iterable[Leg]) -> int | None:
    """Return when the first of the legs' windows ends. From then on the amount belongs to the next window."""
    earliest: int | None = None
    for leg in legs:
        end = window_end(leg.window)
        if end is not None and (earliest is None or end < earliest):
            earliest = end
    return earliest


def has_past_window(legs: tuple[Leg, ...], now: int) -> bool:
    end = first_window_end(legs)
    return end is not None and end <= now


def _pick_tighter_leg(leg: Leg, other_leg: Leg | None) -> Leg:
    """Return the leg with the tighter cap: an amount is held only once in an account."""
    if other_leg is None or other_leg.cap is None:
        return leg
    return other_leg if leg.cap is None or other_leg.cap <= leg.cap else leg


def carve(parent: str, cap: int, parent_cap: int | None) -> tuple[Leg, ...]:
    """Carve a sub-session's cap out of its parent's. The other scopes count the actual costs."""
    return (Leg(f"session:{parent}", "", "usd", parent_cap, cap),)
