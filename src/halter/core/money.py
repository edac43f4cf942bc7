"""Money (and tokens) as holds: reserve an upper bound in every scope, act, settle with the truth.

Amounts are integers: micro-dollars for the unit `usd`, plain counts for `tokens` and `requests`. The rules are here,
pure; the rows they look at are locked by whoever asks, so what is decided is what is written. What leaves the program
is dollars: `usd` turns one into the other, and a public name that ends in `_usd` holds what it returns.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from halter.core.clock import MINUTE
from halter.core.row import Row, RowKey
from halter.core.windows import window_end

Unit = Literal["usd", "tokens", "requests"]
UNITS: Final[tuple[Unit, Unit]] = ("usd", "tokens")
"""What a session's own budgets are counted in. Requests are counted by the rate of a model alone."""

MINUTELY: Final = "minute"
"""The window of a rate, as its row has it: one row serves all minutes, one after the other."""

DOLLAR = 1_000_000

MOST: Final = 1_000_000_000 * DOLLAR
"""No single amount is larger: sums of any number of them that can happen stay within what a store can hold."""

COUNTABLE: Final = 2**63
"""Where the whole numbers of a store end."""


Usd = Annotated[Decimal, msgspec.Meta(description="Dollars, exact to six decimals.")]
"""An amount as people and programs are shown it."""

Amount = Annotated[Decimal, msgspec.Meta(description="Dollars where the unit is `usd`, else a count.")]
"""An amount whose unit is named beside it."""

NOTHING: Final = Decimal(0)


def usd(micros: int) -> Decimal:
    """Turn micro-dollars into dollars, exactly."""
    return Decimal(micros) / DOLLAR


def dollars(amount: str | float | Decimal) -> int:
    """Turn dollars as people write them into micro-dollars, rounded up: a bound must not shrink."""
    return int((Decimal(str(amount)) * DOLLAR).to_integral_value(ROUND_CEILING))


def shown(micros: int) -> str:
    """Write an amount for people: cents, and finer only where there is something finer."""
    sign, (whole, rest) = ("-" if micros < 0 else ""), divmod(abs(micros), DOLLAR)
    return f"{sign}${whole:,}.{f'{rest:06}'.rstrip('0'):0<2}"


def shown_usd(amount: Decimal) -> str:
    """Write an amount in dollars for people."""
    return shown(int(amount * DOLLAR))


def in_unit(amount: int, unit: Unit) -> Decimal:
    """Write an amount in its unit as programs are shown it: money in dollars."""
    return usd(amount) if unit == "usd" else Decimal(amount)


def shown_in(amount: Decimal, unit: Unit) -> str:
    """Write an amount in its unit for people."""
    return shown_usd(amount) if unit == "usd" else f"{amount:,} {unit}"


def believable(amount: int) -> bool:
    """Tell whether an amount can be what something costs."""
    return 0 <= amount <= MOST


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an amount is counted against: a scope, one of its windows, and a unit."""

    scope: str
    window: str
    unit: Unit

    @property
    def is_rate(self) -> bool:
        """Tell whether it is counted by the minute: what is used up there comes back by itself."""
        return self.window.startswith(MINUTELY)


class Leg(Account, frozen=True, array_like=True):
    """One account that a hold weighs on, the cap that the configuration names there, and how much is held."""

    cap: int | None
    amount: int

    def __post_init__(self) -> None:
        """Refuse an amount that would free money, or that no store can count."""
        if not believable(self.amount):
            raise ValueError(f"{self.amount} cannot be held in {self.scope}: it must be from 0 to {MOST}.")


class Overrun(Account, frozen=True, array_like=True):
    """By how much the truth went beyond the cap of one account."""

    amount: int


class Charge(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a hold turned out to cost."""

    usd: int = 0
    tokens: int = 0
    overruns: tuple[Overrun, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a charge that would give money back, or that no store can count."""
        if not (0 <= self.usd < COUNTABLE and 0 <= self.tokens < COUNTABLE):
            raise ValueError(f"{self.usd} micro-dollars and {self.tokens} tokens cannot be charged.")

    def of(self, unit: Unit) -> int:
        """Tell the part of the charge that is counted in that unit."""
        match unit:
            case "usd":
                return self.usd
            case "tokens":
                return self.tokens
            case "requests":
                return 1


class BudgetRow(Row, frozen=True):
    """What stands against one cap: what is spent, what is held, and who said what the cap is.

    That of a rate tells of the newest minute only, which began at `cap_at`.
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
        """Tell where this row stands."""
        return (BudgetRow, (self.scope, self.window, self.unit))

    @property
    def ends_at(self) -> int | None:
        """The moment at which its window is over, or None for a scope's whole life."""
        return self.cap_at + MINUTE if self.window == MINUTELY else window_end(self.window)

    def capped(self, cap: int | None, at: int, by: str = "") -> "BudgetRow":
        """Take note of a cap: a person's newest word counts, then what was carved out, then the configuration.

        What people say stands in one stream and is read in order. What the configuration says is told by each
        session in its own stream, between which there is no order: there the latest counts, of equals the larger,
        so that any order of the same events ends in the same cap.
        """
        if not by and (self.cap_by or (at, _rank(cap)) < (self.cap_at, _rank(self.cap))):
            return self
        if by == CARVED and self.cap_by not in {"", CARVED}:
            return self
        return BudgetRow(self.scope, self.window, self.unit, cap, at, by, self.spent, self.held, self.overrun)

    def binding(self, configured: int | None) -> int | None:
        """Tell the cap that counts for somebody whose configuration says `configured`."""
        return self.cap if self.cap_by else configured

    def lessened(self, kept: int) -> "BudgetRow":
        """Keep something back of a cap that somebody has set; a configured one is lessened where it is configured."""
        if not kept or not self.cap_by or self.cap is None:
            return self
        return msgspec.structs.replace(self, cap=max(0, self.cap - kept))

    def moved(self, *, spent: int = 0, held: int = 0, overrun: int = 0) -> "BudgetRow":
        """Add to the sums."""
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


class Reserved(msgspec.Struct, frozen=True):
    """The amount fits everywhere and may be held."""

    legs: tuple[Leg, ...]


class MustWait(msgspec.Struct, frozen=True):
    """The amount fits what is unspent, but other holds stand in the way until they are settled."""

    leg: Leg
    budget: BudgetRow


class CapReached(msgspec.Struct, frozen=True):
    """The amount exceeds what is unspent: it can never fit below this cap."""

    leg: Leg
    cap: int
    budget: BudgetRow


CARVED: Final = "carved"
"""By whom a sub-session's cap was set: by what was carved out of its parent's."""

BudgetOf = Callable[[Leg], BudgetRow]


def reserve(legs: Sequence[Leg], budget_of: BudgetOf) -> Reserved | MustWait | CapReached:
    """Decide whether all legs fit; a cap that is reached anywhere outranks a wait elsewhere."""
    waiting: MustWait | None = None
    for leg in legs:
        budget = budget_of(leg)
        cap = budget.binding(leg.cap)
        if cap is None:
            continue
        if leg.amount > cap - budget.spent:
            return CapReached(leg, cap, budget)
        if leg.amount > cap - budget.spent - budget.held and waiting is None:
            waiting = MustWait(leg, budget)
    return waiting or Reserved(tuple(legs))


def settle(legs: Iterable[Leg], usd: int, tokens: int, budget_of: BudgetOf) -> Charge:
    """Work out the charge for a hold: the truth is never clamped; what it breaks is said as overruns.

    What others hold counts as promised, so an excess that would break their promise is an overrun too. What went
    beyond an earlier, lower cap is no credit: it must not hide that the cap of today is passed. A rate is no promise
    about money: to pass one is no incident, others wait the longer for it.
    """
    charge = Charge(usd=usd, tokens=tokens)
    overruns: list[Overrun] = []
    for leg in legs:
        budget = budget_of(leg)
        beyond = charge.of(leg.unit) - leg.amount
        if leg.is_rate or budget.cap is None or beyond <= 0:
            continue
        excess = min(beyond, budget.spent + budget.held + beyond - budget.cap)
        if excess > 0:
            overruns.append(Overrun(leg.scope, leg.window, leg.unit, excess))
    return msgspec.structs.replace(charge, overruns=tuple(overruns)) if overruns else charge


def overrun_by_cap(budget: BudgetRow, cap: int | None) -> int:
    """Tell by how much a lowered cap is already exceeded by what was spent and promised under the old one."""
    if cap is None:
        return 0
    return max(0, budget.spent + budget.held - cap - budget.overrun)


class Forecast(msgspec.Struct, frozen=True):
    """What the next one of its kind will probably cost, and a bound it will hardly pass."""

    mean: int
    bound: int
    samples: int


SAMPLES_KEPT = 100
SAMPLES_NEEDED = 5
COLD_START = 5_000


def forecast(costs: Sequence[int], cold_start: int = COLD_START) -> Forecast:
    """Work out mean and mean + 3σ of the newest costs; a default stands in until there are enough."""
    if len(costs) < SAMPLES_NEEDED:
        return Forecast(cold_start, cold_start, len(costs))
    newest = costs[:SAMPLES_KEPT]
    mean = sum(newest) / len(newest)
    deviation = math.sqrt(sum((cost - mean) ** 2 for cost in newest) / len(newest))
    return Forecast(math.ceil(mean), math.ceil(mean + 3 * deviation), len(newest))
