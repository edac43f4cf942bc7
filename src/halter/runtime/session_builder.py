"""Builds a live session: its tools, model loop, sensors and pace, from its agent and its origin."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec import UNSET

from halter.autonomy.hot_state import HotState, LiveFacts
from halter.autonomy.pace import AutonomousPace, PaceTerms
from halter.config.run_limits import NO_RUN_SETTINGS, narrow_policy
from halter.config.sections import compile_gate
from halter.core.ids import session_stream
from halter.core.messages import AnonymizationPolicy, Model, Text
from halter.core.money import Cap
from halter.core.ports import Lease, Query, Stored, Write, read_stream
from halter.core.provenance import Declaration
from halter.core.rows import SavedHotState, SessionRow
from halter.core.tools import Tool, ToolSpec
from halter.core.vocabulary import ActionLimit, SessionKind
from halter.dispatch.heartbeat import end_open_children
from halter.guard.prepare import SessionContext
from halter.loop.decide import TurnLimits
from halter.loop.loop import TurnLoop
from halter.loop.observer import NO_LIVE_CONTEXT, NO_OBSERVER, LoopObserver
from halter.loop.prompt import LoopSettings
from halter.loop.session_runtime import SessionRuntime
from halter.loop.session_waits import WaitListener
from halter.models.providers import estimate_window
from halter.policy.hours import parse_active_hours
from halter.provenance.check import ProvenanceCheck, choose_provenance_mode
from halter.runtime.agent_runtime import AgentRuntime, apply_run_settings
from halter.runtime.assembly.agent_models import AgentModels
from halter.runtime.session_origin import SessionOrigin, find_session_origin
from halter.runtime.session_verbs import TaskTools
from halter.spec.agent import Phase
from halter.spec.triggers import inherit_trigger_caps
from halter.tasks.agent_tool import AgentTool
from halter.tasks.conversation import REVIEW_PHASE, Conversation, PhasePolicy, TurnPolicy, review_nothing
from halter.tasks.task_tools import make_verbs

MAX_AUTONOMOUS_WINDOW = 60_000
"""Largest context window of an autonomous session: it sends its context repeatedly and unattended."""


class LiveSession(msgspec.Struct, frozen=True):
    """A session that runs in this process, with its parts."""

    runtime: SessionRuntime
    loop: TurnLoop
    conversation: Conversation
    hot_view: LiveFacts
    terms: PaceTerms


def compile_pace_terms(agent: AgentRuntime) -> PaceTerms:
    pacing = agent.definition.pacing
    autonomy = pacing.autonomy
    gate_model = UNSET if autonomy.gate is UNSET else autonomy.gate.model
    return PaceTerms(
        pacing=pacing,
        hours=None if autonomy.active_hours is UNSET else parse_active_hours(autonomy.active_hours),
        gate_expression=compile_gate(pacing),
        gate_model=None if gate_model is UNSET else agent.models.get(gate_model),
    )


CallAgent = Callable[[AgentRuntime, str, AgentTool, WaitListener, str, str], Awaitable[str]]
"""Has another agent do a task for a call of a session. It is passed in, since it builds the session of that agent."""


async def build_live_session(  # noqa: PLR0913 Each is an independent option.
    agent: AgentRuntime,
    row: SessionRow,
    lease: Lease,
    *,
    call_agent: CallAgent,
    observer: LoopObserver = NO_OBSERVER,
    on_wait: WaitListener = lambda _, __: None,
    answer_tool: Tool | None = None,
    sensed: Mapping[str, Tool] | None = None,
    begun: tuple[Stored, ...] = (),
    start_write: Write | None = None,
) -> LiveSession:
    """Build a live session from its row, under a lease.

    With `answer_tool`, the session ends when the model has called that tool. With `sensed`, the tools that only sensors
    use, the session is resident. If this process has just started the session, `begun` are all of its events. If the
    start is not committed yet, `start_write` is the write that carries it.
    """
    app, store = agent.app, agent.store
    history = begun or tuple(await read_stream(store, session_stream(row.session)))
    origin = await find_session_origin(agent, row, history)
    own_agent, agent = agent, apply_run_settings(agent, origin.run)
    is_plannable = answer_tool is None and sensed is None and origin.grants is None
    plan = _find_plan(agent, row) if is_plannable else None
    task_tools = TaskTools(agent, row, origin.trigger, origin.documents) if plan is None or plan.reviews else None
    if plan is None:
        own_tools = _OwnTools(
            tuple(task_tools.verbs()) if task_tools else (), answer_tool, sensed, origin.grants, call_agent, on_wait
        )
        plan = _make_plan(agent, row, own_tools)
    session_context = build_session_context(own_agent, row, plan.phases[0], origin)
    runtime = SessionRuntime(store, app.clock, agent.guard(), lease, session_context, plan.tools, on_wait)
    runtime.on_cap = observer.on_cap
    # An agent that another one asked does not wait for a window: the other one waits for its answer.
    runtime.sleeps_at_cap = not origin.is_asked and (
        agent.sleeps_at_cap or row.kind == "autonomous" or agent.policy.on_cap == "wait"
    )
    runtime.past = () if begun else history
    hot_view, live_context = plan.hot_view, NO_LIVE_CONTEXT
    if hot_view is None:
        hot_view = LiveFacts(HotState(plan.terms.pacing.fields), app.clock)
        live_context = hot_view.make_live_context()
        if plan.terms.pacing.fields:
            hot_view.hot.restore(await _load_hot_state(agent, row, origin.follows))
    loop = TurnLoop(runtime, app.clock, plan.settings, agent.rng, live_context, observer, plan.make_provenance_check)
    if task_tools is not None:
        task_tools.runtime, task_tools.describe_links = runtime, loop.describe_unsaid_links
    pace: TurnPolicy | None = None
    if row.kind == "autonomous":
        pace = AutonomousPace(runtime, loop, app.clock, plan.terms, hot_view)
    elif row.kind == "task":
        review = task_tools.review if task_tools is not None else review_nothing
        pace = PhasePolicy(runtime, loop, plan.phases, plan.offered_tools, review)
    conversation = Conversation(
        runtime,
        loop,
        app.clock,
        pace,
        resident=sensed is not None,
        start_events=begun,
        start=start_write,
        end_children=partial(end_open_children, agent.store, app.ledger, app.clock, agent.worker, row),
    )
    return LiveSession(runtime, loop, conversation, hot_view, plan.terms)


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that an agent's sessions of one kind share, if they have no tools of their own.

    `offered_tools` are the tools that the model sees in each phase. `hot_view` is the empty hot state of sessions that
    have neither fields nor an autonomous pace; None means that each session has its own.
    """

    agent: AgentRuntime
    terms: PaceTerms
    tools: Mapping[str, Tool]
    phases: tuple[Phase, ...]
    offered_tools: tuple[tuple[ToolSpec, ...], ...]
    settings: LoopSettings
    make_provenance_check: Callable[[], ProvenanceCheck | None]
    reviews: bool
    hot_view: LiveFacts | None


class _OwnTools(msgspec.Struct, frozen=True):
    """The tools and grants of one session alone: its verbs, its answer tool and the tools of its sensors."""

    verbs: tuple[Tool, ...]
    answer_tool: Tool | None
    sensor_tools: Mapping[str, Tool] | None
    grants: tuple[str, ...] | None
    call_agent: CallAgent
    on_wait: WaitListener


def _find_plan(agent: AgentRuntime, row: SessionRow) -> SessionPlan | None:
    """Return the cached plan if it was made for the same agent."""
    plan = agent.shared.plans.get((row.kind, row.unattended))
    if not isinstance(plan, SessionPlan):
        return None
    is_same_agent = (
        plan.agent.definition is agent.definition
        and plan.agent.tools is agent.tools
        and plan.agent.quarantined is agent.quarantined
        and plan.agent.models is agent.models
        and plan.agent.app is agent.app
    )
    return plan if is_same_agent and plan.agent.brake_type is agent.brake_type else None


def _bind_agent_tools(agent: AgentRuntime, session: str, own_tools: _OwnTools) -> Mapping[str, Tool]:
    """Bind the tools that call other agents to this session, whose sub-sessions they start."""

    def bind(tool: Tool) -> Tool:
        if not isinstance(tool, AgentTool):
            return tool
        return tool.bind(partial(own_tools.call_agent, agent, session, tool, own_tools.on_wait))

    return {name: bind(tool) for name, tool in agent.tools.items()}


def _make_plan(agent: AgentRuntime, row: SessionRow, own_tools: _OwnTools) -> SessionPlan:
    terms, answer_tool, sensor_tools = compile_pace_terms(agent), own_tools.answer_tool, own_tools.sensor_tools or {}
    names = tuple(dict.fromkeys(terms.pacing.names()))
    built_in = [*make_verbs(agent.store, row.kind, names), *([answer_tool] if answer_tool else [])]
    has_agent_tools = any(isinstance(tool, AgentTool) for tool in agent.tools.values())
    tools = _bind_agent_tools(agent, row.session, own_tools) if has_agent_tools else agent.tools
    tools = {**tools, **{verb.spec.name: verb for verb in (*built_in, *own_tools.verbs)}}
    extra_grants = [*(verb.spec.name for verb in built_in), *sensor_tools]
    phases = tuple([grant_phase_tools(phase, extra_grants, own_tools.grants) for phase in agent.policy.phases])
    # An agent without tools answers in one request, so its model is offered no verbs either.
    offered_tools = (
        {} if row.kind != "autonomous" and answer_tool is None and not (agent.tools or own_tools.verbs) else tools
    )
    offered_specs = tuple([_list_offered_tools(agent, offered_tools, phase) for phase in phases])
    has_facts = bool(terms.pacing.fields) or row.kind == "autonomous"
    has_sensors = bool(terms.pacing.fields or terms.pacing.sensors)
    plan = SessionPlan(
        agent=msgspec.structs.replace(agent, bound=None),
        terms=terms,
        tools={**tools, **sensor_tools} if sensor_tools else tools,
        phases=phases,
        offered_tools=offered_specs,
        settings=_build_loop_settings(agent, agent.models, row, offered_specs[0], output=answer_tool is not None),
        make_provenance_check=_plan_provenance_check(agent, tools, senses=has_sensors),
        reviews=bool(agent.definition.tasks.review.judges) or any(phase.name == REVIEW_PHASE for phase in phases),
        hot_view=None if has_facts else LiveFacts(HotState({}), agent.app.clock),
    )
    if not (
        has_agent_tools
        or own_tools.verbs
        or answer_tool
        or own_tools.sensor_tools is not None
        or own_tools.grants is not None
    ):
        agent.shared.plans[row.kind, row.unattended] = plan
    return plan


def _plan_provenance_check(
    agent: AgentRuntime, tools: Mapping[str, Tool], *, senses: bool
) -> Callable[[], ProvenanceCheck | None]:
    """Return a function that makes the provenance check of a session, with the sources of every prompt registered."""
    brakes = agent.brake_type
    mode = choose_provenance_mode(agent.policy)
    if mode == "off":
        return lambda: None
    specs, declarations = {name: tool.spec for name, tool in tools.items()}, dict[str, Declaration]()

    def make_provenance_check() -> ProvenanceCheck:
        brake = brakes(mode, agent.policy, specs, declarations)
        brake.trust(agent.definition.model_settings.instructions, "the instructions")
        brake.add_descriptions()
        if agent.definition.model_settings.provider_tools:
            # The guard does not see what a provider's own tools return to the model.
            brake.mark_erased()
        if senses:
            brake.add_text(Text("sensors", "sensor", trusted=False, source="the sensors"))
        return brake

    return make_provenance_check


def _build_loop_settings(
    agent: AgentRuntime, models: AgentModels, row: SessionRow, tool_specs: tuple[ToolSpec, ...], *, output: bool
) -> LoopSettings:
    settings, policy, kind = agent.definition.model_settings, agent.policy, row.kind
    own_models = tuple(models.get(name) for name in (settings.model, *settings.fallback_models))
    summary_model = settings.model_for.get("summary")
    pace_keys = ("min_sleep", "max_sleep", "max_actions_per_minute") if kind == "autonomous" else ()
    limits = TurnLimits(
        kind=kind,
        timeout=policy.timeout,
        max_steps=policy.max_steps,
        max_retries=settings.max_retries,
        outage_backoff=settings.outage_backoff if row.unattended else 0,
        model_count=len(own_models),
        max_tokens_recoveries=settings.max_tokens_recoveries,
        max_repeated_tool_steps=settings.max_repeated_tool_steps,
        on_cap=policy.on_cap,
        expects_output=output,
        **{key: getattr(agent.definition.pacing.autonomy, key) for key in pace_keys},
    )
    return LoopSettings(
        brain=settings,
        rules=limits,
        models=own_models,
        offered_tools=tool_specs,
        window=_window(agent, own_models, kind),
        summarizer=models.get(summary_model) if summary_model else None,
    )


def _list_offered_tools(agent: AgentRuntime, tools: Mapping[str, Tool], phase: Phase) -> tuple[ToolSpec, ...]:
    return tuple(
        tool.spec
        for name, tool in tools.items()
        if name not in agent.policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
    )


def _window(agent: AgentRuntime, models: tuple[Model, ...], kind: SessionKind) -> int:
    """Return the context window in tokens: the configured one, or the smallest of the models."""
    if agent.definition.model_settings.context_window:
        return agent.definition.model_settings.context_window
    smallest = min(estimate_window(model.name, model.base_url) for model in models)
    return min(smallest, MAX_AUTONOMOUS_WINDOW) if kind == "autonomous" else smallest


async def _load_hot_state(agent: AgentRuntime, row: SessionRow, follows: str) -> bytes:
    """Return the saved hot state: an autonomous session's own; for other kinds, that of the autonomous session.

    If there is none, return the hot state of the session that this one follows.
    """
    session = row.session
    if row.kind != "autonomous":
        autonomous = await find_autonomous_session(agent)
        session = autonomous.session if autonomous is not None else ""
    for candidate in (session, follows):
        rows = await agent.store.ask(Query("snapshot", SavedHotState, {"session": candidate})) if candidate else ()
        if rows:
            return rows[0].data
    return b""


async def find_autonomous_session(agent: AgentRuntime) -> SessionRow | None:
    """Return the agent's newest autonomous session, open or ended."""
    params = {"agent": agent.policy.name, "kind": "autonomous", "limit": 1}
    return next(iter(await agent.store.ask(Query("sessions_of", SessionRow, params))), None)


def grant_phase_tools(phase: Phase, extra: Sequence[str], allowed_tools: Sequence[str] | None) -> Phase:
    """Return a phase that also grants `extra`. Its own grants are limited to `allowed_tools` in a sub-session."""
    if allowed_tools is not None:
        phase_grants = (
            allowed_tools if phase.grants is None else [name for name in phase.grants if name in allowed_tools]
        )
        phase = Phase(phase.name, tuple(phase_grants))
    return phase if phase.grants is None else Phase(phase.name, (*phase.grants, *extra))


def build_session_context(agent: AgentRuntime, row: SessionRow, phase: Phase, origin: SessionOrigin) -> SessionContext:
    """Build the guard's context of a session: its phase, the caps of its origin and the reserve for its wrap-up."""
    policy = agent.policy
    # A person's decisions hold for runs with narrower limits, too.
    digest = str(policy.digest())
    if origin.run != NO_RUN_SETTINGS:
        policy = narrow_policy(policy, origin.run.limits)
    if origin.trigger is not None:
        policy = msgspec.structs.replace(policy, caps=inherit_trigger_caps(policy.caps, origin.trigger))
    if origin.carved_cap is not None:
        policy = msgspec.structs.replace(
            policy, caps=msgspec.structs.replace(policy.caps, session=Cap(origin.carved_cap))
        )
    anonymized_names = agent.definition.tasks.anonymize
    tokens_per_hour = agent.definition.pacing.autonomy.token_budget_per_hour if row.kind == "autonomous" else 0
    return SessionContext(
        session=row.session,
        agent=policy.name,
        phase=phase,
        policy=policy,
        policy_digest=digest,
        trigger=row.trigger,
        quarantined_tools=agent.quarantined,
        secrets=agent.find_granted_secrets(),
        reserve_usd=policy.reserve_usd,
        reserve_tokens=policy.reserve_tokens if policy.on_cap == "wrap_up" else 0,
        tokens_per_hour=tokens_per_hour or None,
        anonymize=None if anonymized_names is None else AnonymizationPolicy(anonymized_names, origin.salt),
        rate_limits=agent.definition.model_settings.rates,
        caller_caps=origin.caller_caps,
        action_limits=list_action_limits(agent, row, origin),
    )


def list_action_limits(agent: AgentRuntime, row: SessionRow, origin: SessionOrigin) -> tuple[ActionLimit, ...]:
    """List the limits of actions per minute of a session: its own, and those of the sessions that it works for."""
    limit = agent.definition.pacing.autonomy.max_actions_per_minute if row.kind == "autonomous" else 0
    return (*origin.action_limits, *([(session_stream(row.session), limit)] if limit else []))
