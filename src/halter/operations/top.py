"""The view of `halter status --live`: open sessions, spending, what needs a person, caps, workers, recent events."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from halter.core.money import ZERO_USD, Usd
from halter.core.rows import HaltRow, SessionRow
from halter.core.vocabulary import ShownState
from halter.operations import control, decisions, fleet, money, queries
from halter.operations.actor import Actor, Limit, Name
from halter.operations.status import FleetStatus, read_status
from halter.present.decisions import render_prompt
from halter.present.events import StyledLine, summarize_event
from halter.present.moments import format_hour
from halter.runtime.budgets import Budget
from halter.runtime.needs import Need

LIVE_STATES: Final[tuple[ShownState, ...]] = (
    "WAITING_FOR_APPROVAL",
    "WAITING_FOR_INPUT",
    "WAITING_FOR_BUDGET",
    "PAUSED",
    "NOT_RUNNING",
    "RUNNING",
    "WAITING_FOR_TOOL",
    "SLEEPING",
)
"""The order of the sessions: those that wait for a person first, sleeping ones last."""
ENDED_SEARCH_LIMIT: Final = 20
"""How many of the newest sessions are searched for ended ones to show."""
TAIL_LENGTH: Final = 100

FollowedSession = Annotated[
    Name, Meta(description="Also show the last events of this session.", extra={"metavar": "SESSION"})
]


class SessionLine(msgspec.Struct, frozen=True, kw_only=True):
    """A session, with what it has spent and holds of its cap."""

    session: str
    agent: str
    kind: str
    state: str
    why: str
    started_at: int
    due_at: int | None = None
    spent_usd: Usd = ZERO_USD
    held_usd: Usd = ZERO_USD
    cap_usd: Usd | None = None


class QueuedNeed(msgspec.Struct, frozen=True):
    """A need of a person. The digest binds an answer to the decision as shown here."""

    need: Need
    digest: str = ""
    yes: str = ""
    no: str = ""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at a moment, for one screen. `tail` holds the last events of the followed session."""

    status: FleetStatus
    halts: Sequence[HaltRow] = ()
    sessions: Sequence[SessionLine] = ()
    inbox: Sequence[QueuedNeed] = ()
    budgets: Sequence[Budget] = ()
    workers: Sequence[fleet.WorkerView] = ()
    tail: Sequence[StyledLine] = ()


async def top(actor: Actor, session: FollowedSession = "", limit: Limit = 200) -> FleetView:
    """Show open sessions, what needs you, caps, workers, and the last events of one session."""
    fleet_status = await read_status(actor)
    caps = await money.list_budgets(actor)
    return FleetView(
        status=fleet_status,
        halts=await control.halts_now(actor),
        sessions=[*_list_sessions(await _read_sessions(actor, limit), caps)],
        inbox=[*_list_inbox(fleet_status.needs_you, await decisions.waiting(actor))],
        budgets=[one for one in caps if one.cap is not None and not one.scope.startswith("session:")],
        workers=await fleet.workers(actor),
        tail=await _read_tail(actor, session) if session else (),
    )


async def _read_sessions(actor: Actor, limit: int) -> list[SessionRow]:
    rows: list[SessionRow] = []
    for state in LIVE_STATES:
        if len(rows) < limit:
            rows += await queries.sessions(actor, state=state, limit=limit - len(rows))
    newest = await queries.sessions(actor, limit=min(limit, ENDED_SEARCH_LIMIT))
    return rows + [row for row in newest if row.ended_at is not None]


def _list_sessions(rows: Sequence[SessionRow], caps: Sequence[Budget]) -> Iterator[SessionLine]:
    budget_by_scope = {one.scope: one for one in caps if one.unit == "usd" and one.scope.startswith("session:")}
    for row in rows:
        budget = budget_by_scope.get(f"session:{row.session}")
        yield SessionLine(
            session=row.session,
            agent=row.agent,
            kind=row.kind,
            state=row.shown_state,
            why=row.terminal_reason,
            started_at=row.started_at,
            due_at=row.due_at,
            spent_usd=ZERO_USD if budget is None else budget.spent,
            held_usd=ZERO_USD if budget is None else budget.held,
            cap_usd=None if budget is None else budget.cap,
        )


def _list_inbox(needs: Sequence[Need], waiting: Sequence[decisions.PendingDecision]) -> Iterator[QueuedNeed]:
    decision_by_id = {decision.decision: decision for decision in waiting}
    for need in needs:
        decision = decision_by_id.get(need.decision)
        if decision is not None:
            prompt = render_prompt(decision)
            yield QueuedNeed(need, decision.digest, prompt.yes, prompt.no)
        elif not need.decision:
            yield QueuedNeed(need)


async def _read_tail(actor: Actor, session: str) -> Sequence[StyledLine]:
    summaries = [
        (stored, summarize_event(stored)) for stored in await queries.newest_events(actor, session, TAIL_LENGTH)
    ]
    return [StyledLine(f"{format_hour(stored.at)} {line.text}", line.style) for stored, line in summaries if line.text]
