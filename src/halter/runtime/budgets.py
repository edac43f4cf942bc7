"""The budgets of a store, with the configured caps.

A hold carries a session's cap minus the reserve for its wrap-up, so a row of the store does not separate the two. The
session's definition does.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Final

import msgspec
from msgspec import UNSET

from halter.core.clock import DAY, window_at
from halter.core.ids import Digest, StreamId, parse_session_id
from halter.core.money import CARVED_CAP, ZERO_USD, Amount, BudgetRow, Cap, Caps, Unit, format_compared, to_unit_amount
from halter.core.ports import Query, Store
from halter.core.rows import FleetPolicyRow, HoldRow, SessionRow, TriggerRow
from halter.spec.triggers import AnyTrigger, inherit_trigger_caps
from halter.state.trigger_records import find_trigger_row, read_trigger_record

MAX_ENDED_SESSIONS: Final = 20
"""Number of the newest ended sessions that are shown."""


async def read_current_budgets(store: Store, now: int, ended: int = MAX_ENDED_SESSIONS) -> list[BudgetRow]:
    """List the budgets of current windows, and of past windows that still have holds.

    A day begins up to fourteen hours earlier in other time zones, so windows are searched from a day ago.
    """
    earlier = now - DAY
    windows = {"hour": window_at("hour", now), "day": window_at("day", earlier), "month": window_at("month", earlier)}
    rows = {_key(row): row for row in await store.ask(Query("budgets_now", BudgetRow, {**windows, "ended": ended}))}
    for hold in await store.ask(Query("holds", HoldRow)):
        for leg in hold.decode_legs():
            if (leg.scope, leg.window, leg.unit) not in rows:
                params = {"scope": leg.scope, "window": leg.window, "unit": leg.unit}
                rows.update((_key(row), row) for row in await store.ask(Query("budget", BudgetRow, params)))
    return [await _drop_removed_cap(store, row) for _, row in sorted(rows.items())]


async def _drop_removed_cap(store: Store, row: BudgetRow) -> BudgetRow:
    """Return the budget without a configured cap that was removed after it last bound a hold.

    A cap without a hold leaves no trace, so the removal is in what came later: a policy, a session or a trigger.
    """
    if row.unit != "usd" or row.cap is None or row.cap_by:
        return row
    caps = await _read_caps_since(store, row.scope, row.cap_at)
    per = row.window.partition("/")[0]
    is_removed = caps is not None and not any(cap.per == per and cap.max_cost_usd is not None for cap in caps)
    return msgspec.structs.replace(row, cap=None) if is_removed else row


async def _read_caps_since(store: Store, scope: str, at: int) -> Sequence[Cap] | None:
    """Read the caps of a scope from what configures it; None if that is not newer than a moment, or cannot be read."""
    kind, _, name = scope.partition(":")
    if kind == "fleet":
        policies = await store.ask(Query("all_fleet_policy", FleetPolicyRow))
        newer = [policy for policy in policies if policy.at > at]
        return [cap for policy in newer for cap in (Cap(policy.day_cap, "day"), Cap(policy.month_cap, "month"))] or None
    if kind == "agent":
        sessions = await store.ask(Query("sessions_of_agent", SessionRow, {"agent": name, "limit": 1}))
        is_newer = bool(sessions) and sessions[0].started_at > at
        caps = await read_configured_caps(store, sessions[0].definition) if is_newer else None
        return None if caps is None else caps.agent
    if kind == "trigger":
        rows = await store.ask(Query("trigger", TriggerRow, {"trigger": name}))
        trigger = await _trigger(store, name) if rows and rows[0].made_at > at else None
        return None if trigger is None else trigger.caps()
    return None


def _key(row: BudgetRow) -> tuple[str, str, str]:
    return row.scope, row.window, row.unit


MAX_SINGLE_LOOKUPS: Final = 50
"""Up to this many sessions are looked up one by one; beyond it, all are read."""


class WrittenCap(msgspec.Struct, frozen=True):
    """A session's configured cap and its reserve for the wrap-up. A cap of None is no cap."""

    cap: int | None
    kept: int = 0


class _Policy(msgspec.Struct, frozen=True):
    caps: Caps
    on_cap: str
    reserve_cost_fraction: float


class _Definition(msgspec.Struct, frozen=True):
    policy: _Policy


async def read_written_caps(store: Store, rows: Sequence[BudgetRow]) -> Mapping[str, WrittenCap]:
    """Read the configured caps of the sessions among some budgets, by scope."""
    names = {row.scope: parse_session_id(StreamId(row.scope)) or "" for row in rows if _is_own(row)}
    sessions = await _sessions(store, set(names.values()))
    policies: dict[str, _Policy | None] = {}
    triggers: dict[str, AnyTrigger | None] = {}
    caps: dict[str, WrittenCap] = {}
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
            caps[row.scope] = compute_written_cap(row, session, policy, triggers.get(session.trigger))
    return caps


def _is_own(row: BudgetRow) -> bool:
    return row.unit == "usd" and not row.window and row.scope.startswith("session:")


def compute_written_cap(row: BudgetRow, session: SessionRow, policy: _Policy, trigger: AnyTrigger | None) -> WrittenCap:
    """Compute a session's cap as the guard does. An ended session, or one that runs a playbook, has no reserve."""
    configured_cap = (
        policy.caps if trigger is None else inherit_trigger_caps(policy.caps, trigger)
    ).session.max_cost_usd
    base = row.cap if row.cap_by == CARVED_CAP else configured_cap
    plays_playbook = trigger is not None and trigger.playbook is not UNSET
    has_reserve = policy.on_cap == "wrap_up" and session.ended_at is None and not plays_playbook
    reserve = round((base or 0) * policy.reserve_cost_fraction) if has_reserve else 0
    return WrittenCap(row.cap if row.cap_by else configured_cap, reserve)


async def _sessions(store: Store, names: set[str]) -> Mapping[str, SessionRow]:
    rows: list[SessionRow] = []
    if len(names) > MAX_SINGLE_LOOKUPS:
        rows += await store.ask(Query("all_sessions", SessionRow))
    else:
        for name in sorted(names):
            rows += await store.ask(Query("session", SessionRow, {"session": name}))
    return {row.session: row for row in rows}


async def _policy(store: Store, definition: str) -> _Policy | None:
    """Read the policy of a definition; None if it is not stored or cannot be read."""
    try:
        return msgspec.json.decode(await store.get(Digest(definition)), type=_Definition).policy if definition else None
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


async def read_configured_caps(store: Store, definition: str) -> Caps | None:
    """Read the caps of a definition, including those against which nothing was spent."""
    policy = await _policy(store, definition)
    return None if policy is None else policy.caps


async def _trigger(store: Store, trigger: str) -> AnyTrigger | None:
    # Imported here because most budgets belong to no trigger, and listing them must be fast.
    row = await find_trigger_row(store, trigger)
    record = None if row is None else await read_trigger_record(store, row)
    return None if record is None else record.trigger()


class Budget(msgspec.Struct, frozen=True):
    """One cap, in its unit: dollars for `usd`, counts for `tokens` and `requests`.

    `cap` is the configured cap, and `kept` the part of it that is reserved for a session's wrap-up. `cap_by` is the
    person who set the cap; empty means the configuration.
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
    def of(cls, row: BudgetRow, session_cap: WrittenCap | None = None) -> "Budget":
        source = WrittenCap(row.cap) if session_cap is None else session_cap
        amounts = {name: to_unit_amount(getattr(row, name), row.unit) for name in ("spent", "held", "overrun")}
        cap = None if source.cap is None else to_unit_amount(source.cap, row.unit)
        reserve = to_unit_amount(source.kept, row.unit)
        return cls(row.scope, row.window, row.unit, cap, row.cap_at, row.cap_by, **amounts, kept=reserve)

    @property
    def remaining(self) -> Decimal | None:
        """The amount that may still be spent before the wrap-up; None without a cap."""
        return None if self.cap is None else self.cap - self.spent - self.held - self.kept

    def describe(self) -> str:
        amounts = self.spent, self.held, self.kept, self.spent if self.cap is None else self.cap
        spent, held, reserve, cap = format_compared(self.unit, *amounts)
        held_text = f" and {held} held" if self.held else ""
        reserve_text = f" ({reserve} reserved for the wrap-up)" if self.kept else ""
        return f"{spent} spent{held_text} of {'no cap' if self.cap is None else cap}{reserve_text}"


async def render_budgets(store: Store, rows: Sequence[BudgetRow]) -> Sequence[Budget]:
    caps = await read_written_caps(store, rows)
    return [Budget.of(row, caps.get(row.scope) if row.unit == "usd" else None) for row in rows]
