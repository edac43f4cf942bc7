"""A session put together with all that it takes to go on: its tools, its loop, its senses and its pace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from halter.app.agent import Assembled
from halter.app.agent_context import AgentContext, Models
from halter.app.tasking import Tasking
from halter.app.triggered import Beginnings, beginnings_of
from halter.autonomy.awareness import Awareness
from halter.autonomy.hotstate import HotState
from halter.autonomy.hours import hours_of
from halter.autonomy.pace import Paced, Terms
from halter.brain.decide import Rules
from halter.brain.loop import NO_SENSES, NOBODY, Loop, Watching
from halter.brain.session_runtime import SessionRuntime, Waits
from halter.brain.window import Thinking
from halter.config.pacing import compiled_gate
from halter.core.limits import Cap
from halter.core.messages import Anonymizing, Model
from halter.core.ports import Lease, Query
from halter.core.rows import SessionRow, Snapshot
from halter.core.spec import Phase
from halter.core.tasks import caps_of
from halter.core.tools import Tool
from halter.core.vocabulary import SessionKind
from halter.guard.ask import Standing
from halter.work.conversation import Conversation
from halter.work.verbs import verbs

AUTONOMOUS_WINDOW = 60_000
"""What an autonomous session sends at most: it does so again and again, unattended."""


@dataclass(frozen=True, slots=True)
class Attending:
    """One session in the hands of this process."""

    running: SessionRuntime
    loop: Loop
    conversation: Conversation
    aware: Awareness
    terms: Terms


def terms_of(speaking: AgentContext) -> Terms:
    """Make ready what an agent's file says of its pace."""
    pacing = speaking.agent.pacing
    autonomy = pacing.autonomy
    named = UNSET if autonomy.gate is UNSET else autonomy.gate.model
    return Terms(
        pacing=pacing,
        hours=None if autonomy.active_hours is UNSET else hours_of(autonomy.active_hours),
        gate_expression=compiled_gate(pacing),
        gate_model=None if named is UNSET else speaking.models.named(named),
    )


async def attending(
    speaking: AgentContext,
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
    began = await beginnings_of(speaking, row)
    tasking = Tasking(speaking, row, began.trigger, began.documents)
    always = [*verbs(store, session, row.kind, names), *([answer] if answer else [])]
    asked_for = tasking.verbs()
    more = [*always, *asked_for]
    tools = {**agent.tools, **{verb.spec.name: verb for verb in more}}
    everything = {**tools, **(sensed or {})}
    own = [*(verb.spec.name for verb in always), *(sensed or {})]
    phases = [granted(phase, own, began.grants) for phase in agent.policy.phases]
    # Who has no tools of its own answers in one request: it is told of none at all.
    told = {} if row.kind != "autonomous" and answer is None and not (agent.tools or asked_for) else tools
    thinks = _thinking(agent, speaking.models, row.kind, told, phases[0], output=answer is not None)
    standing = standing_of(speaking, row, phases[0], began)
    running = SessionRuntime(store, app.clock, speaking.gatehouse(), lease, standing, everything, waits)
    tasking.running = running
    aware = Awareness(HotState(terms.pacing.fields), app.clock)
    if terms.pacing.fields:
        aware.hot.restore(await _kept(speaking, row, began.follows))
    senses = aware.senses() if terms.pacing.fields or row.kind == "autonomous" else NO_SENSES
    loop = Loop(running, app.clock, thinks, speaking.chance, senses, watching)
    pace = (
        Paced(running, loop, app.clock, terms, aware)
        if row.kind == "autonomous"
        else tasking.walk(loop, phases, told)
        if row.kind == "task"
        else None
    )
    conversation = Conversation(running, loop, app.clock, pace, resident=sensed is not None)
    return Attending(running, loop, conversation, aware, terms)


def _thinking(
    agent: Assembled, models: Models, kind: SessionKind, tools: Mapping[str, Tool], phase: Phase, *, output: bool
) -> Thinking:
    """Put together what a session's loop thinks with."""
    mind, policy = agent.mind, agent.policy
    own = tuple(models.named(name) for name in (mind.model, *mind.fallback_models))
    summary = mind.model_for.get("summary")
    offered = tuple(
        tool.spec
        for name, tool in tools.items()
        if name not in policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
    )
    return Thinking(
        mind=mind,
        rules=_rules(agent, kind, len(own), output=output),
        models=own,
        offered=offered,
        window=_window(agent, own, kind),
        summarizer=models.named(summary) if summary else None,
    )


def _rules(agent: Assembled, kind: SessionKind, models: int, *, output: bool) -> Rules:
    mind, policy = agent.mind, agent.policy
    return Rules(
        kind=kind,
        timeout=policy.timeout,
        max_steps=policy.max_steps,
        max_retries=mind.max_retries,
        models=models,
        max_tokens_recoveries=mind.max_tokens_recoveries,
        max_repeated_tool_steps=mind.max_repeated_tool_steps,
        on_cap=policy.on_cap,
        expects_output=output,
        **_pace(agent) if kind == "autonomous" else {},
    )


def _pace(agent: Assembled) -> Mapping[str, int]:
    autonomy = agent.pacing.autonomy
    return {key: getattr(autonomy, key) for key in ("min_sleep", "max_sleep", "max_actions_per_minute")}


def _window(agent: Assembled, models: tuple[Model, ...], kind: SessionKind) -> int:
    """Tell what is sent at most: as the agent's file says, or what all of its models take."""
    from halter.models.providers import window_of

    if agent.mind.context_window:
        return agent.mind.context_window
    least = min(window_of(model.name, model.base_url) for model in models)
    return min(least, AUTONOMOUS_WINDOW) if kind == "autonomous" else least


async def _kept(speaking: AgentContext, row: SessionRow, follows: str) -> bytes:
    """Find the hot state that was kept last: the session's own, or for a chat that of the agent that runs beside it.

    A session that follows another one begins with what that one knew.
    """
    session = row.session
    if row.kind != "autonomous":
        beside = await autonomous_of(speaking)
        session = beside.session if beside is not None else ""
    for each in (session, follows):
        rows = await speaking.store.ask(Query("snapshot", Snapshot, {"session": each})) if each else ()
        if rows:
            return rows[0].data
    return b""


async def autonomous_of(speaking: AgentContext) -> SessionRow | None:
    """Find the newest session in which this agent runs, or ran, by itself."""
    params = {"agent": speaking.agent.policy.name, "kind": "autonomous", "limit": 1}
    return next(iter(await speaking.store.ask(Query("sessions_of", SessionRow, params))), None)


def granted(phase: Phase, own: Sequence[str], most: Sequence[str] | None) -> Phase:
    """Grant what every session may use beside what a phase grants; a sub-session nothing beyond what it was given."""
    if most is not None:
        within = most if phase.grants is None else [name for name in phase.grants if name in most]
        phase = Phase(phase.name, tuple(within))
    return phase if phase.grants is None else Phase(phase.name, (*phase.grants, *own))


def standing_of(speaking: AgentContext, row: SessionRow, phase: Phase, began: Beginnings) -> Standing:
    """Tell where a session stands: in its phase, below the caps of what began it, with its last words paid for."""
    agent = speaking.agent
    standing, policy = agent.standing(row.session, row.trigger), agent.policy
    if began.trigger is not None:
        policy = msgspec.structs.replace(policy, caps=caps_of(policy.caps, began.trigger))
    if began.carved is not None:
        policy = msgspec.structs.replace(policy, caps=msgspec.structs.replace(policy.caps, session=Cap(began.carved)))
    cap, wraps_up = policy.caps.session.max_cost_usd, policy.on_cap == "wrap_up"
    hidden = agent.tasks.anonymize
    hourly = agent.pacing.autonomy.token_budget_per_hour if row.kind == "autonomous" else 0
    return msgspec.structs.replace(
        standing,
        phase=phase,
        policy=policy,
        kept_usd=round((cap or 0) * policy.reserve_cost_fraction) if wraps_up else 0,
        kept_tokens=policy.reserve_tokens if wraps_up else 0,
        tokens_per_hour=hourly or None,
        anonymize=None if hidden is None else Anonymizing(hidden, began.salt),
    )
