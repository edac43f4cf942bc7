"""What a guard's agent did and spent, for the program itself."""

from collections.abc import Mapping

import msgspec

from halter.core.ids import session_stream
from halter.core.money import Usd, micros_to_usd
from halter.core.ports import Query, Store, read_stream
from halter.core.rows import SessionRow
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.runtime.budgets import Budget, read_current_budgets, render_budgets
from halter.state.receipt import Receipt, make_receipt

MAX_REPORT_SESSIONS = 1_000_000


class GuardSummary(msgspec.Struct, frozen=True):
    """A summary of what a guard's agent did and spent, in dollars."""

    agent: str
    sessions: int
    running: int
    cost_usd: Usd
    cost_by_name_usd: Mapping[str, Usd]
    budgets: tuple[Budget, ...]
    needs_you: tuple[PendingDecision, ...]


class _Spent(msgspec.Struct, frozen=True):
    name: str
    usd: int


async def summarize_agent(store: Store, agent: str, now: int) -> GuardSummary:
    params = {"agent": agent}
    session_rows = await store.ask(Query("sessions_of_agent", SessionRow, {**params, "limit": MAX_REPORT_SESSIONS}))
    rows = await store.ask(Query("spent_by_name", _Spent, params))
    by_name = {each.name: each.usd for each in rows}
    return GuardSummary(
        agent=agent,
        sessions=len(session_rows),
        running=sum(row.ended_at is None for row in session_rows),
        cost_usd=micros_to_usd(sum(by_name.values())),
        cost_by_name_usd={name: micros_to_usd(micros) for name, micros in by_name.items()},
        budgets=tuple(await render_budgets(store, await read_current_budgets(store, now))),
        needs_you=tuple(await list_pending_decisions(store, now)),
    )


async def make_receipts(store: Store, agent: str, limit: int) -> tuple[Receipt, ...]:
    """Make the receipts of an agent's sessions, newest first."""
    rows = await store.ask(Query("sessions_of_agent", SessionRow, {"agent": agent, "limit": limit}))
    return tuple([make_receipt(await read_stream(store, session_stream(row.session))) for row in rows])
