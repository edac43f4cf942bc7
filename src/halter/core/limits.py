"""Which caps apply to whom, and how an amount becomes the legs of a hold."""

from functools import lru_cache

import msgspec

from halter.core.money import DOLLAR, Leg
from halter.core.windows import QUARTER, Per, window_after, window_at, window_end


class Cap(msgspec.Struct, frozen=True):
    """A `max_cost_usd` in micro-dollars, for a scope's whole life or per window; None is a written-out "none"."""

    max_cost_usd: int | None
    per: Per = ""


class Caps(msgspec.Struct, frozen=True):
    """The caps that a session spends under. There are always some: "none" must be written out."""

    session: Cap = Cap(1 * DOLLAR)
    trigger: tuple[Cap, ...] = ()
    agent: tuple[Cap, ...] = (Cap(5 * DOLLAR, "day"),)
    fleet: tuple[Cap, ...] = (Cap(20 * DOLLAR, "day"),)
    token_budget: int | None = None
    zone: str = "UTC"
    tokens_per_hour: int | None = None

    def less(self, usd: int, tokens: int) -> "Caps":
        """Keep something back of what a session may spend."""
        session, budget = self.session.max_cost_usd, self.token_budget
        if (not usd or session is None) and (not tokens or budget is None):
            return self
        return msgspec.structs.replace(
            self,
            session=self.session if session is None else Cap(max(0, session - usd), self.session.per),
            token_budget=None if budget is None else max(0, budget - tokens),
        )

    def bind(self) -> bool:
        """Tell whether any amount of money can reach a cap: then a model without a price must not be asked."""
        return any(cap.max_cost_usd is not None for cap in (self.session, *self.trigger, *self.agent, *self.fleet))


class Spender(msgspec.Struct, frozen=True):
    """Who spends: all the scopes that an amount weighs on follow from this."""

    session: str
    agent: str
    trigger: str = ""


def legs(caps: Caps, spender: Spender, now: int, *, usd: int, tokens: int = 0) -> tuple[Leg, ...]:
    """Spread an amount over all scopes it weighs on: session, trigger, agent, fleet."""
    return _legs(caps, spender, now // QUARTER, usd, tokens)


def accounts(caps: Caps, spender: Spender, now: int) -> tuple[Leg, ...]:
    """List where a cost is counted, also one that nothing was held for."""
    return _accounts(caps, spender, now // QUARTER)


# No window begins or ends within a quarter of an hour, and within one the same is asked again and again.
@lru_cache(maxsize=4096)
def _legs(caps: Caps, spender: Spender, quarter: int, usd: int, tokens: int) -> tuple[Leg, ...]:
    money = [msgspec.structs.replace(leg, amount=usd) for leg in _accounts(caps, spender, quarter)] if usd else []
    counted = [Leg(f"session:{spender.session}", "", "tokens", caps.token_budget, tokens)] if tokens else []
    if tokens and caps.tokens_per_hour is not None:
        hour = window_at("hour", quarter * QUARTER)
        # It is the agent's: a session that follows another one in the same hour goes on with what is left.
        counted.append(Leg(f"agent:{spender.agent}", hour, "tokens", caps.tokens_per_hour, tokens))
    return (*money, *counted)


@lru_cache(maxsize=4096)
def _accounts(caps: Caps, spender: Spender, quarter: int) -> tuple[Leg, ...]:
    now = quarter * QUARTER
    scoped = [(f"session:{spender.session}", caps.session)]
    if spender.trigger:
        scoped += [(f"trigger:{spender.trigger}", cap) for cap in caps.trigger]
    scoped += [(f"agent:{spender.agent}", cap) for cap in caps.agent]
    scoped += [("fleet", cap) for cap in caps.fleet]
    money: dict[tuple[str, str], Leg] = {}
    for scope, cap in scoped:
        leg = Leg(scope, window_at(cap.per, now, caps.zone), "usd", cap.max_cost_usd, 0)
        money[leg.scope, leg.window] = _tighter(leg, money.get((leg.scope, leg.window)))
    return tuple(money.values())


def rolled(held: tuple[Leg, ...], now: int) -> tuple[Leg, ...]:
    """Move an amount into the windows of now: whoever waited past midnight spends today's money, not yesterday's."""
    if all(window_after(leg.window, now) == leg.window for leg in held):
        return held
    return tuple(msgspec.structs.replace(leg, window=window_after(leg.window, now)) for leg in held)


def outdated(held: tuple[Leg, ...], now: int) -> bool:
    """Tell whether one of the windows is over."""
    return any(end is not None and end <= now for end in (window_end(leg.window) for leg in held))


def _tighter(leg: Leg, other: Leg | None) -> Leg:
    """Of two caps on one account the tighter counts: an amount is held there once."""
    if other is None or other.cap is None:
        return leg
    return other if leg.cap is None or other.cap <= leg.cap else leg


def carve(parent: str, cap: int, parent_cap: int | None) -> tuple[Leg, ...]:
    """Carve a sub-session's cap out of its parent's: the parent's session only, the other scopes see real spend."""
    return (Leg(f"session:{parent}", "", "usd", parent_cap, cap),)
