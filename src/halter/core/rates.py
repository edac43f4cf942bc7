"""Limits of requests and tokens a minute."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from halter.core.clock import MINUTE, SECOND, window_at, window_end
from halter.core.money import MINUTE_WINDOW, Account, BudgetRow, Contended, FindBudget, Leg, Reserved


class RateLimit(msgspec.Struct, frozen=True):
    requests: int | None = None
    tokens: int | None = None


RateLimits = tuple[tuple[str, RateLimit], ...]
"""The named rates of a request: those of its model and of its provider."""


class RateReached(msgspec.Struct, frozen=True):
    """The rate of the current minute is used up."""

    leg: Leg
    until: int

    @property
    def sentence(self) -> str:
        name, cap = self.leg.scope.removeprefix("model:"), self.leg.cap or 0
        unit = self.leg.unit.removesuffix("s") if cap == 1 else self.leg.unit
        end = datetime.fromtimestamp(self.until // SECOND, UTC)
        return f"Waiting for the rate limit of {name} until {end:%H:%M:%S} UTC: {cap:,} {unit} a minute."


def find_rate_limits(rates: Mapping[str, RateLimit], model: str) -> RateLimits:
    """Find the rates of a model: its own, and the one for all models of its provider."""
    names = (model, f"{model.partition(':')[0]}:*")
    return tuple((name, rates[name]) for name in names if name in rates)


def make_rate_legs(rates: RateLimits, now: int, tokens: int) -> tuple[Leg, ...]:
    """Spread a request over its rates.

    A request for more tokens than a minute allows holds the whole minute, since it could never fit otherwise.
    """
    if not rates:
        return ()
    window, legs = window_at("minute", now), list[Leg]()
    for name, rate in rates:
        if rate.requests is not None:
            legs.append(Leg(f"model:{name}", window, "requests", rate.requests, 1))
        if rate.tokens is not None:
            legs.append(Leg(f"model:{name}", window, "tokens", rate.tokens, min(tokens, rate.tokens)))
    return tuple(legs)


def check_rate_legs(legs: Sequence[Leg], budget_of: FindBudget) -> Reserved | Contended | RateReached:
    """Decide whether a request fits this minute. Held tokens may be freed; held requests are not."""
    contended: Contended | None = None
    for leg in legs:
        row, cap = budget_of(leg), leg.cap or 0
        if row.cap_at > _minute_start(leg):
            return Contended(leg, row)
        used = row.spent + (row.held if leg.unit == "requests" else 0)
        if leg.amount > cap - used:
            return RateReached(leg, _minute_start(leg) + MINUTE)
        if leg.amount > cap - row.spent - row.held:
            contended = Contended(leg, row)
    return contended or Reserved(tuple(legs))


def start_minute_row(row: BudgetRow | None, account: Account) -> BudgetRow:
    """Return the row for the minute of an account: the given row, or an empty one if the minute is newer."""
    minute_start = _minute_start(account)
    if row is not None and row.cap_at >= minute_start:
        return row
    return BudgetRow(account.scope, MINUTE_WINDOW, account.unit, 0, minute_start)


def add_to_minute(row: BudgetRow, leg: Leg, *, spent: int = 0, held: int = 0) -> BudgetRow:
    """Add to the sums of a minute; an earlier minute is ignored.

    The overrun is derived from the sums, so that any order of the same events gives the same row.
    """
    minute_start = _minute_start(leg)
    if row.cap_at > minute_start:
        return row
    new_row = row.with_cap(leg.cap, minute_start).with_amounts(spent=spent, held=held)
    excess = 0 if new_row.cap is None else max(0, new_row.spent + new_row.held - new_row.cap)
    return msgspec.structs.replace(new_row, overrun=excess)


def _minute_start(account: Account) -> int:
    return (window_end(account.window) or 0) - MINUTE
