"""Switching an agent on and off, in the store: which sessions that starts or stops."""

from collections.abc import Sequence
from typing import get_args

from halter.core.errors import ConfigError
from halter.core.events import WakePosted
from halter.core.ports import Query
from halter.core.rows import DecisionRow, OutageRow, SessionRow
from halter.core.vocabulary import ProviderTrouble
from halter.guard.approvals import withdraw_question
from halter.guard.halts import switch_off, switch_on
from halter.runtime.runtime import Runtime
from halter.state import lifecycle


async def turn_on(app: Runtime, agent: str, reason: str = "", by: str = "") -> None:
    """Switch an agent on, and resume its sessions that were paused after failures or for being idle."""
    store, by = app.patient(), by or app.settings.person
    committed = await store.commit(switch_on(agent, by, app.ids.make(), reason))
    if not committed.events:
        raise ConfigError("Only a person can switch an agent on; this command runs inside an agent.")
    for row in (*await _list_open_sessions(app, agent), *await list_open_tasks(app, agent)):
        if row.state == "PAUSED":
            await store.commit(lifecycle.post_message(row.session, app.ids.make(), b"", by))
    await wake_troubled(app, agent, get_args(ProviderTrouble))


async def wake_troubled(app: Runtime, agent: str, troubles: Sequence[str]) -> None:
    """Wake the sessions of an agent that wait for their model, so that they retry now."""
    for row in await app.patient().ask(Query("open_outages", OutageRow)):
        if row.agent == agent and row.trouble in troubles:
            event = WakePosted(cause="timer", origin="config", sender="halter")
            await app.patient().commit(lifecycle.post_wake(row.session, app.ids.make(), event))


async def turn_off(app: Runtime, agent: str, reason: str = "", by: str = "") -> Sequence[str]:
    """Switch an agent off and stop its sessions; return the stopped sessions."""
    sessions = [row.session for row in (*await _list_open_sessions(app, agent), *await list_open_tasks(app, agent))]
    await app.store.commit(switch_off(agent, sessions, by or app.settings.person, app.ids.make(), reason))
    # The agent is not loaded: its definition may be broken.
    for question in await app.store.ask(Query("waiting_about_servers", DecisionRow, {"agent": agent})):
        sentence = f"{agent} was switched off; the question is asked again when it runs."
        await app.store.commit(withdraw_question(question.decision, sentence))
    return sessions


async def list_open_tasks(app: Runtime, agent: str) -> Sequence[SessionRow]:
    """List the open sessions of an agent that a trigger started."""
    return await app.store.ask(Query("open_tasks", SessionRow, {"agent": agent}))


async def _list_open_sessions(app: Runtime, agent: str) -> Sequence[SessionRow]:
    params = {"agent": agent, "kind": "autonomous", "limit": 10}
    rows = await app.store.ask(Query("sessions_of", SessionRow, params))
    return [row for row in rows if row.ended_at is None]
