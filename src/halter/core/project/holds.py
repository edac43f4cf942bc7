"""The rows of holds, and of the accounts that they are held from."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from halter.core.events import CallSettled, HoldMade, HoldReleased, RequestSettled
from halter.core.ids import FLEET
from halter.core.money import MINUTE_WINDOW, Account, BudgetRow, Charge, Leg, Unit
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore
from halter.core.rates import add_to_minute, start_minute_row
from halter.core.rows import FleetPolicyRow, HoldRow, SessionRow, SpendRow, find_session
from halter.core.usage import Usage
from halter.core.vocabulary import Purpose, RowKey

POLICY_KEY: Final[RowKey] = (FleetPolicyRow, FLEET)
NO_USAGE: Final = Usage()
_ENCODE_LEGS: Final = msgspec.json.Encoder().encode


def rows_of_hold(hold: str, legs: Sequence[Leg]) -> tuple[RowKey, ...]:
    """List the rows that a hold or its settlement touches, for the write to declare.

    A hold on the fleet is checked against the current policy of the store.
    """
    keys: tuple[RowKey, ...] = ((HoldRow, hold), *map(budget_key, legs))
    return (*keys, POLICY_KEY) if any(leg.scope == FLEET for leg in legs) else keys


def insert_hold(
    hold: str, name: str, purpose: Purpose, legs: tuple[Leg, ...], position: EventPosition, rows: MutableRows
) -> None:
    at = position.at
    rows.save(HoldRow(hold, find_session(position.stream), at, purpose, name, _ENCODE_LEGS(legs)))
    for leg in legs:
        row = budget_row(rows, leg)
        if row.window == MINUTE_WINDOW:
            rows.save(add_to_minute(row, leg, held=leg.amount))
        else:
            rows.save(row.with_cap(leg.cap, at, "", leg.amount))


def settle_hold(
    call: str,
    event: CallSettled | RequestSettled,
    charge: Charge,
    usage: Usage,
    position: EventPosition,
    rows: MutableRows,
) -> None:
    unheld = event.unheld
    if unheld is not None and unheld.accounts:
        # No hold was made: insert an empty one, so that the true cost counts.
        insert_hold(call, unheld.name, unheld.purpose, unheld.accounts, position, rows)
    hold = rows.get(HoldRow, call)
    if hold is None:
        return
    held_usd = free_hold(hold, charge, rows)
    session = rows.get(SessionRow, hold.session) or SessionRow(hold.session)
    rows.save(
        SpendRow(
            position.at,
            call,
            session.agent,
            hold.session,
            session.trigger,
            hold.name,
            hold.purpose,
            charge.usd,
            held_usd,
            usage.input_tokens,
            usage.output_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
        )
    )


def free_hold(hold: HoldRow, charge: Charge, rows: MutableRows) -> int:
    """Settle every account of a hold, and return the micro-dollars that it held."""
    rows.drop(hold.key())
    held_usd = 0
    for leg in hold.decode_legs():
        row, amount, unit = budget_row(rows, leg), leg.amount, leg.unit
        cost = charge.tokens if unit == "tokens" else charge.of(unit)
        if row.window == MINUTE_WINDOW:
            rows.save(add_to_minute(row, leg, spent=cost, held=-amount))
        else:
            rows.save(row.with_amounts(cost, -amount))
        if unit == "usd" and amount > held_usd:
            held_usd = amount
    for overrun in charge.overruns:
        rows.save(budget_row(rows, overrun).with_amounts(overrun=overrun.amount))
    return held_usd


def project_hold_made(event: HoldMade, position: EventPosition, rows: MutableRows) -> None:
    if rows.get(HoldRow, event.hold) is not None:
        # Its release was read first, from another stream: only the caps of the accounts are left to learn.
        rows.drop((HoldRow, event.hold))
        for leg in event.legs:
            rows.save(budget_row(rows, leg).with_cap(leg.cap, position.at))
        return
    insert_hold(event.hold, event.name, event.purpose, event.legs, position, rows)


def project_hold_released(event: HoldReleased, position: EventPosition, rows: MutableRows) -> None:
    hold = rows.get(HoldRow, event.hold)
    if hold is None:
        # A rebuild reads streams in any order: this empty hold says that the hold to come is already released.
        rows.save(HoldRow(event.hold, "", position.at, "turn", "", b"[]"))
        return
    rows.drop(hold.key())
    for leg in hold.decode_legs():
        rows.save(budget_row(rows, leg).with_amounts(held=-leg.amount))


BudgetKey = tuple[type[BudgetRow], str, str, Unit]
PrepareCapCheck = Callable[[int], tuple[Sequence[BudgetKey], Callable[[Sequence[BudgetRow | None]], bool]]]
"""Returns the rows of all accounts of a session at a moment, and a check of whether any is near its cap."""


def budget_row(rows: RowsBefore, account: Account) -> BudgetRow:
    """Return the row of an account, or an empty row."""
    window = account.window
    if window and window.startswith(MINUTE_WINDOW):
        return start_minute_row(rows.get(BudgetRow, account.scope, MINUTE_WINDOW, account.unit), account)
    row = rows.get(BudgetRow, account.scope, window, account.unit)
    return row if row is not None else BudgetRow(account.scope, window, account.unit)


def budget_key(account: Account) -> BudgetKey:
    scope, window, unit = account.scope, account.window, account.unit
    return _make_shared_key(scope, window, unit) if window else (BudgetRow, scope, window, unit)


# Cached: accounts with a window belong to an agent, a trigger, a model or the fleet, which sessions share.
@lru_cache(maxsize=256)
def _make_shared_key(scope: str, window: str, unit: Unit) -> BudgetKey:
    return (BudgetRow, scope, MINUTE_WINDOW if window.startswith(MINUTE_WINDOW) else window, unit)
