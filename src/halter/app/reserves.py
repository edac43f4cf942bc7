"""The cap of a session as it was written, and what of it is kept for its last words.

A hold carries the cap without what is kept, so a row of the store does not tell the two apart. What a session was begun
with does.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import UNSET

from halter.core.ids import Digest, StreamId, session_of
from halter.core.limits import Caps
from halter.core.money import CARVED, BudgetRow
from halter.core.ports import Query, Store
from halter.core.rows import SessionRow
from halter.core.tasks import AnyTrigger, caps_of

ONE_BY_ONE: Final = 50
"""So many sessions are looked up by name; of more, all are listed."""


class Written(msgspec.Struct, frozen=True):
    """A session's cap as it was written, and how much of it is kept; None is no cap."""

    cap: int | None
    kept: int = 0


class _Policy(msgspec.Struct, frozen=True):
    caps: Caps
    on_cap: str
    reserve_cost_fraction: float


class _Definition(msgspec.Struct, frozen=True):
    policy: _Policy


async def written_caps(store: Store, rows: Sequence[BudgetRow]) -> Mapping[str, Written]:
    """Find the written caps of the sessions among some budgets, by their scopes."""
    names = {row.scope: session_of(StreamId(row.scope)) or "" for row in rows if _is_own(row)}
    sessions = await _sessions(store, set(names.values()))
    policies: dict[str, _Policy | None] = {}
    triggers: dict[str, AnyTrigger | None] = {}
    found: dict[str, Written] = {}
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
            found[row.scope] = written(row, session, policy, triggers.get(session.trigger))
    return found


def _is_own(row: BudgetRow) -> bool:
    return row.unit == "usd" and not row.window and row.scope.startswith("session:")


def written(row: BudgetRow, session: SessionRow, policy: _Policy, trigger: AnyTrigger | None) -> Written:
    """Work a session's cap out as its standing does; one that is over, or is played, keeps nothing."""
    own = (policy.caps if trigger is None else caps_of(policy.caps, trigger)).session.max_cost_usd
    base = row.cap if row.cap_by == CARVED else own
    plays = trigger is not None and trigger.playbook is not UNSET
    keeps = policy.on_cap == "wrap_up" and session.ended_at is None and not plays
    kept = round((base or 0) * policy.reserve_cost_fraction) if keeps else 0
    return Written(row.cap if row.cap_by else own, kept)


async def _sessions(store: Store, names: set[str]) -> Mapping[str, SessionRow]:
    rows: list[SessionRow] = []
    if len(names) > ONE_BY_ONE:
        rows += await store.ask(Query("all_sessions", SessionRow))
    else:
        for name in sorted(names):
            rows += await store.ask(Query("session", SessionRow, {"session": name}))
    return {row.session: row for row in rows}


async def _policy(store: Store, definition: str) -> _Policy | None:
    """Read the policy of a definition; None where there is none, or only one of a program that keeps nothing."""
    try:
        return msgspec.json.decode(await store.get(Digest(definition)), type=_Definition).policy if definition else None
    except (KeyError, ValueError, msgspec.MsgspecError):
        return None


async def _trigger(store: Store, trigger: str) -> AnyTrigger | None:
    # Most budgets are of no trigger, and a command that lists them should come at once.
    from halter.app.triggered import read_made, trigger_row

    row = await trigger_row(store, trigger)
    made = None if row is None else await read_made(store, row)
    return None if made is None else made.trigger()
