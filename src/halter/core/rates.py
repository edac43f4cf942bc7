"""How fast models may be asked: so many requests and tokens in each minute, by everybody on one store together.

A rate is counted as money is: held before a model is asked, settled after it. But what is used up comes back with the
next minute, so nobody is refused: whoever comes too late waits. And a minute that is over matters to nobody, so one row
serves them all: it tells of the newest minute, and what is said of an earlier one changes nothing any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from halter.core.clock import MINUTE, SECOND
from halter.core.money import MINUTELY, Account, BudgetOf, BudgetRow, Leg, MustWait, Reserved
from halter.core.windows import window_at, window_end


class Rate(msgspec.Struct, frozen=True):
    """The most that may be asked of some models in a minute."""

    requests: int | None = None
    tokens: int | None = None


Paces = tuple[tuple[str, Rate], ...]
"""The rates that a request falls under, with the name of each: that of its model, and that of its provider."""


class RateReached(msgspec.Struct, frozen=True):
    """The minute is used up. There is room again at its end."""

    leg: Leg
    until: int

    @property
    def sentence(self) -> str:
        """Say what is waited for."""
        name, cap = self.leg.scope.removeprefix("model:"), self.leg.cap or 0
        unit = self.leg.unit.removesuffix("s") if cap == 1 else self.leg.unit
        at = datetime.fromtimestamp(self.until // SECOND, UTC)
        return f"It waits for the rate of {name} until {at:%H:%M:%S} UTC: {cap:,} {unit} a minute."


def paces_of(rates: Mapping[str, Rate], model: str) -> Paces:
    """Find the rates that a model is asked under: its own, and that of all models of its provider."""
    names = (model, f"{model.partition(':')[0]}:*")
    return tuple((name, rates[name]) for name in names if name in rates)


def rate_legs(paces: Paces, now: int, tokens: int) -> tuple[Leg, ...]:
    """Spread a request over the rates that it falls under.

    Nobody could ever wait long enough for more than a minute has: such a request holds a whole minute, and so is let
    through alone.
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


def within_rates(legs: Sequence[Leg], budget_of: BudgetOf) -> Reserved | MustWait | RateReached:
    """Decide whether a request fits this minute. Tokens that others hold may be freed; their requests never are."""
    waiting: MustWait | None = None
    for leg in legs:
        row, cap = budget_of(leg), leg.cap or 0
        if row.cap_at > _began(leg):
            return MustWait(leg, row)
        used = row.spent + (row.held if leg.unit == "requests" else 0)
        if leg.amount > cap - used:
            return RateReached(leg, _began(leg) + MINUTE)
        if leg.amount > cap - row.spent - row.held:
            waiting = MustWait(leg, row)
    return waiting or Reserved(tuple(legs))


def in_its_minute(row: BudgetRow | None, account: Account) -> BudgetRow:
    """Begin the row anew for a minute that it does not tell of yet, and in which nobody has named the rate."""
    began = _began(account)
    if row is not None and row.cap_at >= began:
        return row
    return BudgetRow(account.scope, MINUTELY, account.unit, 0, began)


def moved(row: BudgetRow, leg: Leg, *, spent: int = 0, held: int = 0) -> Iterator[BudgetRow]:
    """Add to the sums of a minute; to those of one that is over there is nothing to add.

    What goes beyond the rate is worked out of the sums, so that any order of the same events ends in the same row.
    """
    began = _began(leg)
    if row.cap_at > began:
        return
    after = row.capped(leg.cap, began).moved(spent=spent, held=held)
    beyond = 0 if after.cap is None else max(0, after.spent + after.held - after.cap)
    yield msgspec.structs.replace(after, overrun=beyond)


def _began(account: Account) -> int:
    return (window_end(account.window) or 0) - MINUTE
