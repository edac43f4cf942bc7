"""A session put together with all that it takes to go on: its tools, its loop, its senses and its pace."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from halter.app.speaking import Speaking
from halter.app.thinking import thinking
from halter.autonomy.awareness import Awareness
from halter.autonomy.hotstate import HotState
from halter.autonomy.hours import hours_of
from halter.autonomy.pace import Paced, Terms
from halter.brain.loop import NO_SENSES, NOBODY, Loop, Watching
from halter.brain.running import Running, Waits
from halter.config.pacing import compiled_gate
from halter.core.ports import Lease, Query
from halter.core.rows import SessionRow, Snapshot
from halter.core.spec import Phase
from halter.core.tools import Tool
from halter.guard.ask import Standing
from halter.work.conversation import Conversation
from halter.work.verbs import verbs


@dataclass(frozen=True, slots=True)
class Attending:
    """One session in the hands of this process."""

    running: Running
    loop: Loop
    conversation: Conversation
    aware: Awareness
    terms: Terms


def terms_of(speaking: Speaking) -> Terms:
    """Make ready what an agent's file says of its pace."""
    pacing = speaking.agent.read.pacing
    autonomy = pacing.autonomy
    named = UNSET if autonomy.gate is UNSET else autonomy.gate.model
    return Terms(
        pacing=pacing,
        hours=None if autonomy.active_hours is UNSET else hours_of(autonomy.active_hours),
        gate_expression=compiled_gate(pacing),
        gate_model=None if named is UNSET else speaking.models.named(named),
    )


async def attending(
    speaking: Speaking,
    row: SessionRow,
    lease: Lease,
    *,
    watching: Watching = NOBODY,
    waits: Waits = lambda _, __: None,
    answer: Tool | None = None,
    sensed: Mapping[str, Tool] | None = None,
) -> Attending:
    """Put a session together. With an `answer`, a tool, it ends when the model has called it.

    One that is given `sensed`, the tools that its sensors use and no model is told of, is resident.
    """
    app, store, agent, session = speaking.app, speaking.store, speaking.agent, row.session
    terms = terms_of(speaking)
    names = tuple(dict.fromkeys(terms.pacing.names()))
    more = [*verbs(store, session, row.kind, names), *([answer] if answer else [])]
    tools = {**agent.tools, **{verb.spec.name: verb for verb in more}}
    thinks = thinking(agent, speaking.models, row.kind, tools, output=answer is not None)
    everything = {**tools, **(sensed or {})}
    standing = standing_of(speaking, session, row, everything)
    running = Running(store, app.clock, speaking.gatehouse(), lease, standing, everything, waits)
    aware = Awareness(HotState(terms.pacing.fields), app.clock)
    aware.hot.restore(await _kept(speaking, row))
    senses = aware.senses() if terms.pacing.fields or row.kind == "autonomous" else NO_SENSES
    loop = Loop(running, app.clock, thinks, speaking.chance, senses, watching)
    pace = Paced(running, loop, app.clock, terms, aware) if row.kind == "autonomous" else None
    conversation = Conversation(running, loop, app.clock, pace, resident=sensed is not None)
    return Attending(running, loop, conversation, aware, terms)


async def _kept(speaking: Speaking, row: SessionRow) -> bytes:
    """Find the hot state that was kept last: the session's own, or for a chat that of the agent that runs beside it."""
    session = row.session
    if row.kind != "autonomous":
        beside = await autonomous_of(speaking)
        session = beside.session if beside is not None else ""
    rows = await speaking.store.ask(Query("snapshot", Snapshot, {"session": session}))
    return rows[0].data if rows else b""


async def autonomous_of(speaking: Speaking) -> SessionRow | None:
    """Find the newest session in which this agent runs, or ran, by itself."""
    params = {"agent": speaking.agent.policy.name, "kind": "autonomous", "limit": 1}
    return next(iter(await speaking.store.ask(Query("sessions_of", SessionRow, params))), None)


def standing_of(speaking: Speaking, session: str, row: SessionRow, tools: Mapping[str, Tool]) -> Standing:
    """Tell where a session stands: with the verbs granted in its phase, and with its last words paid for beforehand."""
    agent = speaking.agent
    standing, policy = agent.standing(session, row.trigger), agent.policy
    phase = standing.phase
    if phase.grants is not None:
        own = (name for name in tools if name not in agent.tools)
        phase = Phase(phase.name, (*phase.grants, *own))
    cap, wraps_up = policy.caps.session.max_cost_usd, policy.on_cap == "wrap_up"
    hourly = agent.read.pacing.autonomy.token_budget_per_hour if row.kind == "autonomous" else 0
    return msgspec.structs.replace(
        standing,
        phase=phase,
        kept_usd=round((cap or 0) * policy.reserve_cost_fraction) if wraps_up else 0,
        kept_tokens=policy.reserve_tokens if wraps_up else 0,
        tokens_per_hour=hourly or None,
    )
