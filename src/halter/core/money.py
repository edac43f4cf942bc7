"""Money (and tokens) as holds: reserve an upper bound in every scope, act, settle at the true cost.

Amounts are integers: micro-dollars for the unit `usd`, plain counts for `tokens` and `requests`. The rules are pure;
the rows they read are locked by the caller, so what is decided is what is written. Public names that end in `_usd` are
dollars.

The rate of a model is counted like money: held before a request, settled after it. But it comes back with the next
minute, so a late request waits instead of being refused. One row serves all minutes: it describes the newest one, and
events of earlier ones no longer change it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from halter.core.clock import MINUTE, QUARTER, SECOND, WindowLength, window_after, window_at, window_end
from halter.core.ids import session_stream
from halter.core.vocabulary import Row, RowKey

Unit = Literal["usd", "tokens", "requests"]
UNITS: Final[tuple[Unit, Unit]] = ("usd", "tokens")
"""The units of a session's own budgets. Requests are counted only by the rate of a model."""

MINUTE_WINDOW: Final = "minute"
"""The window of a rate's row: one row serves all minutes."""

DOLLAR = 1_000_000

LARGEST_AMOUNT: Final = 1_000_000_000 * DOLLAR
"""Largest single amount: sums of them stay within what a store can hold."""

INTEGER_LIMIT: Final = 2**63


Usd = Annotated[Decimal, msgspec.Meta(description="Dollars, exact to six decimals.")]

Amount = Annotated[Decimal, msgspec.Meta(description="Dollars where the unit is `usd`, else a count.")]

ZERO_USD: Final = Decimal(0)


def micros_to_usd(micros: int) -> Decimal:
    """Micro-dollars as dollars, exactly."""
    return Decimal(micros) / DOLLAR


def usd_to_micros(amount: str | float | Decimal) -> int:
    """Dollars as micro-dollars, rounded up: a bound must not shrink."""
    return int((Decimal(str(amount)) * DOLLAR).to_integral_value(ROUND_CEILING))


def format_micros(micros: int) -> str:
    """An amount for people: cents, and finer only where needed."""
    whole, rest = divmod(abs(micros), DOLLAR)
    # With a one before it: so it has all its zeros.
    digits = str(DOLLAR + rest)
    return f"{'-' if micros < 0 else ''}${whole:,}.{digits[1:3]}{digits[3:].rstrip('0')}"


def format_usd(amount: Decimal) -> str:
    return format_micros(int(amount * DOLLAR))


def to_unit_amount(amount: int, unit: Unit) -> Decimal:
    """An amount in its unit as programs see it: money in dollars."""
    return micros_to_usd(amount) if unit == "usd" else Decimal(amount)


def format_unit_amount(amount: Decimal, unit: Unit) -> str:
    return format_usd(amount) if unit == "usd" else f"{amount:,} {unit}"


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an amount is counted against: a scope, one of its windows, and a unit."""

    scope: str
    window: str
    unit: Unit

    @property
    def is_rate(self) -> bool:
        """Whether it is counted by the minute: then it comes back by itself."""
        return self.window.startswith(MINUTE_WINDOW)


class Leg(Account, frozen=True, array_like=True):
    """One account that a hold weighs on, its configured cap, and the amount held."""

    cap: int | None
    amount: int

    def __post_init__(self) -> None:
        """Refuse an amount that would free money, or that no store can count."""
        if not 0 <= self.amount <= LARGEST_AMOUNT:
            raise ValueError(f"{self.amount} cannot be held in {self.scope}: it must be from 0 to {LARGEST_AMOUNT}.")


class Overrun(Account, frozen=True, array_like=True):
    amount: int


class Charge(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    usd: int = 0
    tokens: int = 0
    overruns: tuple[Overrun, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a charge that would give money back, or that no store can count."""
        if not (0 <= self.usd < INTEGER_LIMIT and 0 <= self.tokens < INTEGER_LIMIT):
            raise ValueError(f"{self.usd} micro-dollars and {self.tokens} tokens cannot be charged.")

    def of(self, unit: Unit) -> int:
        return self.usd if unit == "usd" else self.tokens if unit == "tokens" else 1


class BudgetRow(Row, frozen=True):
    """What stands against one cap: spent, held, and who set the cap.

    For a rate only the newest minute, which began at `cap_at`.
    """

    TABLE: ClassVar[str] = "budgets"
    KEY: ClassVar[tuple[str, ...]] = ("scope", "window", "unit")

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
        """The end of its window, or None for a scope's whole life."""
        return self.cap_at + MINUTE if self.window == MINUTE_WINDOW else window_end(self.window)

    def with_cap(self, cap: int | None, at: int, by: str = "", held: int = 0) -> "BudgetRow":
        """Take in a cap, and hold an amount: a person's newest word wins, then what was carved out, then the rest.

        People's caps are in one stream and read in order. Configured caps are in each session's own stream, between
        which there is no order: there the latest counts, of equals the larger, so that any order of the same events
        gives the same cap.
        """
        if by or self.cap_by or at <= self.cap_at:
            older = at < self.cap_at or (at == self.cap_at and _rank(cap) < _rank(self.cap))
            if (not by and (self.cap_by or older)) or (by == CARVED_CAP and self.cap_by not in {"", CARVED_CAP}):
                cap, at, by = self.cap, self.cap_at, self.cap_by
        return BudgetRow(self.scope, self.window, self.unit, cap, at, by, self.spent, self.held + held, self.overrun)

    def binding(self, configured: int | None) -> int | None:
        """The cap in force for a session whose configuration says `configured`."""
        return self.cap if self.cap_by else configured

    def with_reserve(self, kept: int) -> "BudgetRow":
        """Keep something back of a cap that a person set; a configured one is lowered where it is configured."""
        if not kept or not self.cap_by or self.cap is None:
            return self
        return msgspec.structs.replace(self, cap=max(0, self.cap - kept))

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
    """The amount fits everywhere and may be held."""

    legs: tuple[Leg, ...]


class Contended(msgspec.Struct, frozen=True, gc=False):
    """The amount fits what is unspent, but other holds must settle first."""

    leg: Leg
    budget: BudgetRow


class CapReached(msgspec.Struct, frozen=True, gc=False):
    """The amount exceeds what is unspent: it can never fit below this cap."""

    leg: Leg
    cap: int
    budget: BudgetRow


CARVED_CAP: Final = "carved"
"""Marks a sub-session's cap, carved out of its parent's."""

BudgetOf = Callable[[Leg], BudgetRow]


def reserve(budgets: Sequence[tuple[Leg, BudgetRow]]) -> Reserved | Contended | CapReached:
    """Decide whether all legs fit their budgets; a cap reached anywhere outranks a wait elsewhere."""
    waiting: Contended | None = None
    legs: list[Leg] = []
    for leg, budget in budgets:
        legs.append(leg)
        cap = budget.cap if budget.cap_by else leg.cap
        if cap is None:
            continue
        remaining = cap - budget.spent
        if leg.amount > remaining:
            return CapReached(leg, cap, budget)
        if leg.amount > remaining - budget.held and waiting is None:
            waiting = Contended(leg, budget)
    return waiting or Reserved(tuple(legs))


NEAR_CAP_PERCENT: Final = 80
"""A budget is near its cap when this much of it is spent or held."""


def is_near_cap(caps: Sequence[int | None], budgets: Iterable[BudgetRow | None]) -> bool:
    """Whether any of the budgets is near the cap in force, given what is configured for each."""
    for cap, budget in zip(caps, budgets, strict=True):
        used = 0
        if budget is not None:
            cap, used = budget.cap if budget.cap_by else cap, budget.spent + budget.held  # noqa: PLW2901
        if cap is not None and used * 100 >= cap * NEAR_CAP_PERCENT:
            return True
    return False


def settle(legs: Iterable[Leg], usd: int, tokens: int, budget_of: BudgetOf) -> Charge:
    """The charge for a hold: the true cost is never clamped; what it exceeds is reported as overruns.

    What others hold counts as promised, so an excess that would break their promise is an overrun too. An excess over
    an earlier, lower cap is no credit: it must not hide that today's cap is passed. Passing a rate is no incident:
    others wait longer.
    """
    charge = Charge(usd, tokens)
    overruns: list[Overrun] = []
    for leg in legs:
        beyond = (usd if leg.unit == "usd" else charge.of(leg.unit)) - leg.amount
        if beyond <= 0 or leg.is_rate:
            continue
        budget = budget_of(leg)
        if budget.cap is None:
            continue
        excess = min(beyond, budget.spent + budget.held + beyond - budget.cap)
        if excess > 0:
            overruns.append(Overrun(leg.scope, leg.window, leg.unit, excess))
    return msgspec.structs.replace(charge, overruns=tuple(overruns)) if overruns else charge


def compute_cap_overrun(budget: BudgetRow, cap: int | None) -> int:
    """By how much a lowered cap is already exceeded by what was spent and promised."""
    if cap is None:
        return 0
    return max(0, budget.spent + budget.held - cap - budget.overrun)


class CostForecast(msgspec.Struct, frozen=True):
    """The expected cost, and a bound it will hardly pass."""

    mean: int
    bound: int
    samples: int


SAMPLES_KEPT = 100
SAMPLES_NEEDED = 5
COLD_START_COST = 5_000


def forecast_cost(costs: Sequence[int], cold_start: int = COLD_START_COST) -> CostForecast:
    """Mean and mean + 3σ of the newest costs; a default until there are enough."""
    if len(costs) < SAMPLES_NEEDED:
        return CostForecast(cold_start, cold_start, len(costs))
    newest = costs[:SAMPLES_KEPT]
    mean = sum(newest) / len(newest)
    deviation = math.sqrt(sum((cost - mean) ** 2 for cost in newest) / len(newest))
    return CostForecast(math.ceil(mean), math.ceil(mean + 3 * deviation), len(newest))


class Cap(msgspec.Struct, frozen=True):
    """A `max_cost_usd` in micro-dollars, for a scope's whole life or per window; None is a written-out "none"."""

    max_cost_usd: int | None
    per: WindowLength = ""


class Caps(msgspec.Struct, frozen=True):
    """The caps of a session. There are always some: "none" must be written out."""

    session: Cap = Cap(1 * DOLLAR)
    trigger: tuple[Cap, ...] = ()
    agent: tuple[Cap, ...] = (Cap(5 * DOLLAR, "day"),)
    fleet: tuple[Cap, ...] = (Cap(20 * DOLLAR, "day"),)
    token_budget: int | None = None
    zone: str = "UTC"
    tokens_per_hour: int | None = None

    def minus(self, usd: int, tokens: int) -> "Caps":
        """Keep something back of what a session may spend."""
        session, budget = self.session.max_cost_usd, self.token_budget
        if (not usd or session is None) and (not tokens or budget is None):
            return self
        return _lessen_caps(self, usd, tokens)

    def bind(self) -> bool:
        """Whether any cap binds: then a model without a price must not be asked."""
        return any(cap.max_cost_usd is not None for cap in (self.session, *self.trigger, *self.agent, *self.fleet))


@lru_cache(maxsize=256)
def _lessen_caps(caps: Caps, usd: int, tokens: int) -> Caps:
    """Worked out once for all sessions of an agent."""
    session, budget = caps.session.max_cost_usd, caps.token_budget
    return msgspec.structs.replace(
        caps,
        session=caps.session if session is None else Cap(max(0, session - usd), caps.session.per),
        token_budget=None if budget is None else max(0, budget - tokens),
    )


ScopedCap = tuple[str, Cap]
"""A cap, and the scope whose spending it bounds."""


class Spender(msgspec.Struct, frozen=True, gc=False):
    """Who spends: all scopes of an amount follow from this. What `askers` had it do counts for their caps, too."""

    session: str
    agent: str
    trigger: str = ""
    askers: tuple[ScopedCap, ...] = ()


def make_legs(caps: Caps, spender: Spender, now: int, *, usd: int, tokens: int = 0) -> tuple[Leg, ...]:
    """Spread an amount over all its scopes: session, trigger, agent, fleet."""
    legs = _make_usd_legs(caps, spender, now // QUARTER, usd) if usd else ()
    if not tokens:
        return legs
    counted = Leg(session_stream(spender.session), "", "tokens", caps.token_budget, tokens)
    if caps.tokens_per_hour is None:
        return (*legs, counted)
    # It is the agent's: a session that follows another one in the same hour goes on with what is left.
    hour = window_at("hour", now)
    return (*legs, counted, Leg(f"agent:{spender.agent}", hour, "tokens", caps.tokens_per_hour, tokens))


NO_SESSION: Final = session_stream("")


def assign_legs(legs: Sequence[Leg], stream: str) -> tuple[Leg, ...]:
    """The accounts of no session in particular, for the session of a stream."""
    own: list[Leg] = []
    for leg in legs:
        shared = leg.scope != NO_SESSION
        own.append(leg if shared else Leg(stream, leg.window, leg.unit, leg.cap, leg.amount))
    return tuple(own)


def list_accounts(caps: Caps, spender: Spender, now: int) -> tuple[Leg, ...]:
    """The accounts of a cost, also of one without a hold."""
    return _make_usd_legs(caps, spender, now // QUARTER, 0)


def _make_usd_legs(caps: Caps, spender: Spender, quarter: int, usd: int) -> tuple[Leg, ...]:
    own, zone, trigger, asked = caps.session, caps.zone, spender.trigger, spender.askers
    window = window_at(own.per, quarter * QUARTER, zone)
    leg = Leg(session_stream(spender.session), window, "usd", own.max_cost_usd, usd)
    of_trigger = caps.trigger if trigger else ()
    shared = _list_shared_accounts(
        spender.trigger, of_trigger, spender.agent, caps.agent, caps.fleet, zone, quarter, usd
    )
    return (leg, *(_merge_accounts(shared, asked, zone, quarter, usd) if asked else shared))


# No window begins or ends within a quarter of an hour, and within one the same is asked again and again.
@lru_cache(maxsize=256)
def _list_shared_accounts(  # noqa: PLR0913, PLR0917 What two of them agree in is found by all of it.
    trigger: str,
    of_trigger: tuple[Cap, ...],
    agent: str,
    of_agent: tuple[Cap, ...],
    fleet: tuple[Cap, ...],
    zone: str,
    quarter: int,
    usd: int,
) -> tuple[Leg, ...]:
    """The accounts above a session, the same for all sessions of an agent or a trigger."""
    scoped = [
        *((f"trigger:{trigger}", cap) for cap in of_trigger),
        *((f"agent:{agent}", cap) for cap in of_agent),
        *(("fleet", cap) for cap in fleet),
    ]
    return _merge_accounts((), scoped, zone, quarter, usd)


def _merge_accounts(
    legs: Sequence[Leg], scoped: Sequence[ScopedCap], zone: str, quarter: int, usd: int
) -> tuple[Leg, ...]:
    """Add accounts to others, each once, with its tightest cap."""
    money = {(leg.scope, leg.window): leg for leg in legs}
    for scope, cap in scoped:
        leg = Leg(scope, window_at(cap.per, quarter * QUARTER, zone), "usd", cap.max_cost_usd, usd)
        money[leg.scope, leg.window] = _pick_tighter_leg(leg, money.get((leg.scope, leg.window)))
    return tuple(money.values())


def roll_legs(held: tuple[Leg, ...], now: int) -> tuple[Leg, ...]:
    """Move an amount into the current windows: after midnight it is today's money."""
    if all(window_after(leg.window, now) == leg.window for leg in held):
        return held
    return tuple(msgspec.structs.replace(leg, window=window_after(leg.window, now)) for leg in held)


def first_window_end(legs: Iterable[Leg]) -> int | None:
    """When the first of the legs' windows ends: from then on an amount belongs into the next one."""
    first: int | None = None
    for leg in legs:
        end = window_end(leg.window)
        if end is not None and (first is None or end < first):
            first = end
    return first


def has_past_window(held: tuple[Leg, ...], now: int) -> bool:
    end = first_window_end(held)
    return end is not None and end <= now


def _pick_tighter_leg(leg: Leg, other: Leg | None) -> Leg:
    """Of two caps on one account the tighter counts: an amount is held there once."""
    if other is None or other.cap is None:
        return leg
    return other if leg.cap is None or other.cap <= leg.cap else leg


def carve(parent: str, cap: int, parent_cap: int | None) -> tuple[Leg, ...]:
    """Carve a sub-session's cap out of its parent's session; the other scopes see real spend."""
    return (Leg(f"session:{parent}", "", "usd", parent_cap, cap),)


class RateLimit(msgspec.Struct, frozen=True):
    requests: int | None = None
    tokens: int | None = None


RateLimits = tuple[tuple[str, RateLimit], ...]
"""The rates of a request, with the name of each: that of its model, and that of its provider."""


class RateReached(msgspec.Struct, frozen=True):
    """The minute is used up until its end."""

    leg: Leg
    until: int

    @property
    def sentence(self) -> str:
        name, cap = self.leg.scope.removeprefix("model:"), self.leg.cap or 0
        unit = self.leg.unit.removesuffix("s") if cap == 1 else self.leg.unit
        at = datetime.fromtimestamp(self.until // SECOND, UTC)
        return f"It waits for the rate of {name} until {at:%H:%M:%S} UTC: {cap:,} {unit} a minute."


def find_rate_limits(rates: Mapping[str, RateLimit], model: str) -> RateLimits:
    """The rates of a model: its own, and that of all models of its provider."""
    names = (model, f"{model.partition(':')[0]}:*")
    return tuple((name, rates[name]) for name in names if name in rates)


def make_rate_legs(paces: RateLimits, now: int, tokens: int) -> tuple[Leg, ...]:
    """Spread a request over its rates.

    A request for more than a minute has could never pass: it holds a whole minute, and so passes alone.
    """
    if not paces:
        return ()
    window, legs = window_at("minute", now), list[Leg]()
    for name, rate in paces:
        if rate.requests is not None:
            legs.append(Leg(f"model:{name}", window, "requests", rate.requests, 1))
        if rate.tokens is not None:
            legs.append(Leg(f"model:{name}", window, "tokens", rate.tokens, min(tokens, rate.tokens)))
    return tuple(legs)


def check_rate_legs(legs: Sequence[Leg], budget_of: BudgetOf) -> Reserved | Contended | RateReached:
    """Decide whether a request fits this minute. Held tokens may be freed; held requests never are."""
    waiting: Contended | None = None
    for leg in legs:
        row, cap = budget_of(leg), leg.cap or 0
        if row.cap_at > _minute_start(leg):
            return Contended(leg, row)
        used = row.spent + (row.held if leg.unit == "requests" else 0)
        if leg.amount > cap - used:
            return RateReached(leg, _minute_start(leg) + MINUTE)
        if leg.amount > cap - row.spent - row.held:
            waiting = Contended(leg, row)
    return waiting or Reserved(tuple(legs))


def start_minute_row(row: BudgetRow | None, account: Account) -> BudgetRow:
    """Reset the row for a newer minute, in which the rate is not recorded yet."""
    began = _minute_start(account)
    if row is not None and row.cap_at >= began:
        return row
    return BudgetRow(account.scope, MINUTE_WINDOW, account.unit, 0, began)


def add_to_minute(row: BudgetRow, leg: Leg, *, spent: int = 0, held: int = 0) -> BudgetRow:
    """Add to the sums of a minute; a past minute stays as it is.

    The excess is derived from the sums, so that any order of the same events gives the same row.
    """
    began = _minute_start(leg)
    if row.cap_at > began:
        return row
    after = row.with_cap(leg.cap, began).with_amounts(spent=spent, held=held)
    beyond = 0 if after.cap is None else max(0, after.spent + after.held - after.cap)
    return msgspec.structs.replace(after, overrun=beyond)


def _minute_start(account: Account) -> int:
    return (window_end(account.window) or 0) - MINUTE
