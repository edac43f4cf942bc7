"""The budgets of a store, with the caps as they were written.

A hold carries a session's cap without what is kept for its wrap-up, so a row of the store does not tell the two apart;
the session's definition does.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Final

import msgspec
from msgspec import UNSET

from halter.core.agent_spec import AnyTrigger, inherit_trigger_caps
from halter.core.clock import DAY, window_at
from halter.core.ids import Digest, StreamId, session_of
from halter.core.money import (
    CARVED_CAP,
    ZERO_USD,
    Amount,
    BudgetRow,
    Caps,
    Unit,
    format_unit_amount,
    to_unit_amount,
)
from halter.core.ports import Query, Store
from halter.core.rows import HoldRow, SessionRow

MAX_ENDED_SESSIONS: Final = 20
"""How many of the sessions that ended last are shown."""


async def read_current_budgets(store: Store, now: int, ended: int = MAX_ENDED_SESSIONS) -> list[BudgetRow]:
    """List the budgets of current windows, and of past ones that still hold something.

    A day begins up to fourteen hours earlier in other zones, so windows are searched from a day ago on.
    """
    earlier = now - DAY
    windows = {"hour": window_at("hour", now), "day": window_at("day", earlier), "month": window_at("month", earlier)}
    rows = {_key(row): row for row in await store.ask(Query("budgets_now", BudgetRow, {**windows, "ended": ended}))}
    for hold in await store.ask(Query("holds", HoldRow)):
        for leg in hold.taken():
            if (leg.scope, leg.window, leg.unit) not in rows:
                params = {"scope": leg.scope, "window": leg.window, "unit": leg.unit}
                rows.update((_key(row), row) for row in await store.ask(Query("budget", BudgetRow, params)))
    return [row for _, row in sorted(rows.items())]


def _key(row: BudgetRow) -> tuple[str, str, str]:
    return row.scope, row.window, row.unit


MAX_SINGLE_LOOKUPS: Final = 50
"""Up to this many sessions are looked up one by one; beyond it, all are read."""


class WrittenCap(msgspec.Struct, frozen=True):
    """A session's configured cap, and how much of it is kept; None is no cap."""

    cap: int | None
    kept: int = 0


class _Policy(msgspec.Struct, frozen=True):
    caps: Caps
    on_cap: str
    reserve_cost_fraction: float


class _Definition(msgspec.Struct, frozen=True):
    policy: _Policy


async def read_written_caps(store: Store, rows: Sequence[BudgetRow]) -> Mapping[str, WrittenCap]:
    """Find the configured caps of the sessions among some budgets, by scope."""
    names = {row.scope: session_of(StreamId(row.scope)) or "" for row in rows if _is_own(row)}
    sessions = await _sessions(store, set(names.values()))
    policies: dict[str, _Policy | None] = {}
    triggers: dict[str, AnyTrigger | None] = {}
    found: dict[str, WrittenCap] = {}
    for row in rows:
        session = sessions.get(names.get(row.scope, ""))
        if session is None or not _is_own(row):
            continue
        if session.definition not in policies:
            policies[session.definition] = await _policy(store, session.definition)
        if session.trigger and session.trigger not in triggers:
            triggers[session.trigger] = await _trigger(store, session.trigger)
        policy = policies[session.definition]
        if policy is not None:
            found[row.scope] = compute_written_cap(row, session, policy, triggers.get(session.trigger))
    return found


def _is_own(row: BudgetRow) -> bool:
    return row.unit == "usd" and not row.window and row.scope.startswith("session:")


def compute_written_cap(row: BudgetRow, session: SessionRow, policy: _Policy, trigger: AnyTrigger | None) -> WrittenCap:
    """Compute a session's cap as the guard does; one that is over, or plays a playbook, keeps nothing."""
    own = (policy.caps if trigger is None else inherit_trigger_caps(policy.caps, trigger)).session.max_cost_usd
    base = row.cap if row.cap_by == CARVED_CAP else own
    plays = trigger is not None and trigger.playbook is not UNSET
    keeps = policy.on_cap == "wrap_up" and session.ended_at is None and not plays
    kept = round((base or 0) * policy.reserve_cost_fraction) if keeps else 0
    return WrittenCap(row.cap if row.cap_by else own, kept)


async def _sessions(store: Store, names: set[str]) -> Mapping[str, SessionRow]:
    rows: list[SessionRow] = []
    if len(names) > MAX_SINGLE_LOOKUPS:
        rows += await store.ask(Query("all_sessions", SessionRow))
    else:
        for name in sorted(names):
            rows += await store.ask(Query("session", SessionRow, {"session": name}))
    return {row.session: row for row in rows}


async def _policy(store: Store, definition: str) -> _Policy | None:
    """Read the policy of a definition; None if there is none, or if it keeps nothing."""
    try:
        return msgspec.json.decode(await store.get(Digest(definition)), type=_Definition).policy if definition else None
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


async def read_configured_caps(store: Store, definition: str) -> Caps | None:
    """Find the caps that a session was defined with, whether anything was spent against them or not."""
    policy = await _policy(store, definition)
    return None if policy is None else policy.caps


async def _trigger(store: Store, trigger: str) -> AnyTrigger | None:
    # Imported late: most budgets belong to no trigger, and listing them should be fast.
    from halter.runtime.session_builder import find_trigger_row, read_trigger_record

    row = await find_trigger_row(store, trigger)
    record = None if row is None else await read_trigger_record(store, row)
    return None if record is None else record.trigger()


class Budget(msgspec.Struct, frozen=True):
    """One cap, in its unit: dollars for `usd`, counts for `tokens` and `requests`.

    `cap` is the configured one; `kept` is the part of it that a session keeps for its wrap-up. `cap_by` is the person
    who set the cap; empty means the configuration.
    """

    scope: str
    window: str
    unit: Unit
    cap: Amount | None = None
    cap_at: int = 0
    cap_by: str = ""
    spent: Amount = ZERO_USD
    held: Amount = ZERO_USD
    overrun: Amount = ZERO_USD
    kept: Amount = ZERO_USD

    @classmethod
    def of(cls, row: BudgetRow, written: WrittenCap | None = None) -> "Budget":
        known = WrittenCap(row.cap) if written is None else written
        amounts = {name: to_unit_amount(getattr(row, name), row.unit) for name in ("spent", "held", "overrun")}
        cap = None if known.cap is None else to_unit_amount(known.cap, row.unit)
        kept = to_unit_amount(known.kept, row.unit)
        return cls(row.scope, row.window, row.unit, cap, row.cap_at, row.cap_by, **amounts, kept=kept)

    @property
    def remaining(self) -> Decimal | None:
        """What may still be spent before the wrap-up; None without a cap."""
        return None if self.cap is None else self.cap - self.spent - self.held - self.kept

    def describe(self) -> str:
        cap = "no cap" if self.cap is None else format_unit_amount(self.cap, self.unit)
        held = f" and {format_unit_amount(self.held, self.unit)} held" if self.held else ""
        kept = f" ({format_unit_amount(self.kept, self.unit)} kept for the last words)" if self.kept else ""
        return f"{format_unit_amount(self.spent, self.unit)} spent{held} of {cap}{kept}"


async def render_budgets(store: Store, rows: Sequence[BudgetRow]) -> Sequence[Budget]:
    caps = await read_written_caps(store, rows)
    return [Budget.of(row, caps.get(row.scope) if row.unit == "usd" else None) for row in rows]
