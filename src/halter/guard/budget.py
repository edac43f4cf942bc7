"""What the caps leave for an effect, and the part of them that is reserved for a session's wrap-up."""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.core.money import BudgetRow, CapReached, Leg, format_compared_micros


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """The part of a session's caps that is reserved for its wrap-up."""

    session: str = ""
    usd: int = 0
    tokens: int = 0


NO_RESERVE: Final = Reserve()


NOTHING_SPENT: Final = BudgetRow("", "", "usd")
"""The budget of an account that has no row yet."""


def find_spendable_budgets(
    legs: Sequence[Leg], rows: Sequence[BudgetRow | None], session_reserve: Reserve
) -> tuple[list[tuple[Leg, BudgetRow]], int | None, int | None]:
    """Find each leg's budget, and the dollars and tokens that the tightest caps leave.

    An amount is None if no cap binds it. A session's reserve is not spendable.
    """
    budgets: list[tuple[Leg, BudgetRow]] = []
    usd: int | None = None
    tokens: int | None = None
    for leg, stored_row in zip(legs, rows, strict=True):
        cap, row = leg.cap, stored_row or NOTHING_SPENT
        if row.cap_by:
            if not leg.window and leg.scope == f"session:{session_reserve.session}":
                # A configured cap is already lowered by the reserve; one that a person set is not.
                row = row.with_reserve(session_reserve.usd if leg.unit == "usd" else session_reserve.tokens)
            cap = row.cap
        budgets.append((leg, row))
        if cap is None:
            continue
        remaining = cap - row.spent
        if leg.unit == "usd":
            usd = remaining if usd is None or remaining < usd else usd
        elif tokens is None or remaining < tokens:
            tokens = remaining
    return budgets, usd, tokens


def describe_cap_reached(verdict: CapReached) -> str:
    where = f"{verdict.leg.scope} {verdict.leg.window}".strip()
    remaining = max(0, verdict.cap - verdict.budget.spent)
    if verdict.leg.unit == "tokens":
        return f"It may use {verdict.leg.amount:,} tokens, and {remaining:,} are left of the token budget of {where}."
    cost_text, remaining_text = format_compared_micros(verdict.leg.amount, remaining)
    return f"It may cost {cost_text}, and {remaining_text} is left of the cap of {where}."


def remove_caps(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """Remove configured caps, for observe mode. A cap that a person set is in its row and stays."""
    return tuple(msgspec.structs.replace(leg, cap=None) for leg in legs)
