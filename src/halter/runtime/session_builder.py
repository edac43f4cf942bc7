"""A session put together with all that it takes to go on: its tools, its loop, its senses and its pace.

What a task session has beside its agent's own tools: verbs, documents, phases and a reviewer.

The sensors of one session: what its agent's file names, made, and looking through the guard.

What a session was begun by: its trigger as it is now, its documents, and what it may use at most.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET

from halter.autonomy.hot_state import Awareness, HotState
from halter.autonomy.pace import AutonomousPace, PaceTerms, parse_active_hours, parse_source_text
from halter.autonomy.resident import SupervisedSensor
from halter.autonomy.signals import Score, ScoringFailure, Signals
from halter.config.sections import compile_gate, compile_signals
from halter.core import tools
from halter.core.agent_spec import (
    AnyTrigger,
    Schedule,
    SensorSpec,
    Signal,
    TriggerType,
    Watch,
    Webhook,
    inherit_trigger_caps,
)
from halter.core.clock import SECOND, Clock
from halter.core.events import CallSettled, FindingReviewed, JudgesChosen, RequestSettled, SessionStarted
from halter.core.ids import Digest, session_stream, trigger_stream
from halter.core.messages import AnonymizationPolicy, Model, Prompt
from halter.core.money import Cap
from halter.core.ports import Lease, Query, Store, Stored, read_body
from halter.core.rows import ItemRow, SavedHotState, SessionRow, TriggerRow
from halter.core.schedules import Timing
from halter.core.spec import Phase
from halter.core.text import from_body
from halter.core.tools import HealthReport, Reading, SensorFailed, Tool, ToolSpec, substitute_secrets
from halter.core.usage import Unpriced
from halter.core.vocabulary import SessionKind
from halter.guard.model_door import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.guard.prepare import Call, SessionContext
from halter.guard.tool_door import Answer
from halter.loop.decide import End, FailedAttempt, TurnLimits, compute_backoff
from halter.loop.loop import NO_LIVE_CONTEXT, NO_OBSERVER, LoopObserver, TurnLoop
from halter.loop.prompt import LoopSettings, ScoreAnswer, make_question_prompt, read_form_answer
from halter.loop.session_runtime import SessionRuntime, WaitListener
from halter.models.providers import Prices
from halter.runtime.agent_context import AgentContext, Models
from halter.runtime.assemble import AssembledAgent
from halter.runtime.documents import Library, SessionDocuments
from halter.tasks.conversation import Conversation, PhaseWalk
from halter.tasks.playbooks import RUN_PLAYBOOK, RUN_SKILL, run_playbook, run_skill
from halter.tasks.retrieve import RETRIEVE_CHUNKS, DocumentRef, retrieve_chunks
from halter.tasks.review import FindingInContext, JudgePanel, review_findings
from halter.tasks.task_tools import (
    EMIT_FINDING,
    NOTIFY,
    PROPOSE_MEMORY,
    PROPOSE_PRECEDENT,
    Finding,
    Verb,
    emit_finding,
    make_verbs,
    notify,
    propose_memory,
    propose_precedent,
)

IN_APP: Final = "in_app"
"""The channel that is always there: what is told over it stands in the store, and `halter inbox` shows it."""


MAX_KEPT_ENTRIES: Final = 100
"""So many memories, the newest, and so many precedents, the most frequent, a session is given."""


class FindingBodyRow(msgspec.Struct, frozen=True):
    """A finding as it stands in the store, with its words where they are still there."""

    finding: str
    severity: str
    support: str
    document: str
    name: str
    review: str
    body: bytes | None
    blob: Digest | None

    def words(self) -> str:
        """Put the finding into words for people."""
        read = self.read()
        quote = f'\n"{read.quote}" ({self.name}, {self.support})' if read.quote else ""
        return f"[{self.severity}] {read.title}\n{read.text}{quote}".strip()

    def read(self) -> Finding:
        """Read what was found; what was erased is told as such."""
        if not self.body:
            return Finding(title="(erased)", severity="info")
        return msgspec.json.decode(self.body, type=Finding)


class TaskTools:
    """Makes the verbs of one session. They act through its `running`, which is there before any of them is called."""

    running: SessionRuntime

    def __init__(
        self, context: AgentContext, row: SessionRow, trigger: AnyTrigger | None, own: Sequence[DocumentRef]
    ) -> None:
        self._context = context
        self._row = row
        tasks = context.agent.tasks
        named = tasks.collections if trigger is None else _list_collections(trigger)
        collections = {name: tasks.collections[name] for name in named if name in tasks.collections}
        library = context.agent.library or Library(context.store, Path())
        self.shelves = SessionDocuments(library, context.store, collections, _place_documents(own, trigger))
        self._left: dict[str, int] = {}

    def verbs(self) -> Sequence[Verb]:
        """Make those verbs that the agent's file asks for."""
        context, name = self._context, self._context.agent.policy.name
        clock, agent = context.app.clock, context.agent
        makers: Mapping[str, Callable[[], Verb]] = {
            RETRIEVE_CHUNKS: lambda: retrieve_chunks(self.shelves, clock.now),
            RUN_SKILL: lambda: run_skill(agent.skills, self._ask_by_skill, agent.mind.max_output_tokens),
            RUN_PLAYBOOK: lambda: run_playbook(agent.playbooks, self._step, self._spent_in),
            EMIT_FINDING: lambda: emit_finding(name, self.shelves.check),
            PROPOSE_MEMORY: lambda: propose_memory(name, clock),
            PROPOSE_PRECEDENT: lambda: propose_precedent(name, clock),
            NOTIFY: lambda: notify(name, self._row.session, self._channels(), self._found),
        }
        return [makers[verb]() for verb in agent.tasks.verbs]

    def walk(self, loop: TurnLoop, phases: Sequence[Phase], tools: Mapping[str, Tool]) -> PhaseWalk:
        """Make the pace of a task."""
        agent = self._context.agent

        def offered(phase: Phase) -> tuple[ToolSpec, ...]:
            return tuple(
                tool.spec
                for name, tool in tools.items()
                if name not in agent.policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
            )

        return PhaseWalk(self.running, loop, phases, offered, self._review)

    def _channels(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._context.agent.tasks.notify.channels) or (IN_APP,)

    async def _step(self, call: Call, left: int | None) -> Answer:
        """Take a step of a playbook; neither it nor what is done inside of it spends more than is left."""
        if left is not None:
            self._left[call.id] = left
        try:
            return await self.running.call(call, self._standing(call.id))
        finally:
            self._left.pop(call.id, None)

    def _standing(self, name: str) -> SessionContext | None:
        """Tell how narrow a call or a request stands, by what it is done inside of."""
        within = [left for outer, left in self._left.items() if name == outer or name.startswith(f"{outer}/")]
        return self.running.standing.within(min(within), self.running.spent.usd) if within else None

    async def _spent_in(self, call: str) -> int:
        events = [stored.event for stored in await self.running.events()]
        return sum(
            event.charge.usd
            for event in events
            if isinstance(event, CallSettled | RequestSettled) and event.charge is not None
            if (event.call if isinstance(event, CallSettled) else event.request).startswith(f"{call}/")
        )

    async def _ask_by_skill(
        self, request: ModelRequest, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        return await self._ask(request, self._context.model_for("skill"), attempt)

    async def _ask(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        if attempt:
            await self.running.pause(
                compute_backoff(FailedAttempt("", may_retry=True), attempt, self._context.chance.random())
            )
        return await self.running.request(request, model, attempt, standing=self._standing(request.id))

    async def _ask_judge(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Ask a judge. One who was stopped by a halt that is lifted by now has not been heard, and is asked again."""
        answer = await self._ask(request, model, attempt)
        if (
            isinstance(answer, AnsweredRequest)
            or answer.outcome != "external_halt"
            or await self.running.halted() is not None
        ):
            return answer
        cost = answer.cost_usd if isinstance(answer, FailedRequest) else 0
        return FailedRequest(answer.request, "cancelled", "A halt stopped it.", cost, may_retry=True)

    async def _rows(self) -> Sequence[FindingBodyRow]:
        store: Store = self._context.store
        rows = await store.ask(Query("findings_of", FindingBodyRow, {"session": self._row.session}))
        return [await _load_finding(store, row) for row in rows]

    async def _found(self) -> Mapping[str, tuple[str, str]]:
        return {row.finding: (row.review, row.words()) for row in await self._rows()}

    async def _review(self) -> End | None:
        """Let others look at what was found."""
        found = [await self._shown(row) for row in await self._rows()]
        stopped = await review_findings(
            self._row.session, found, self._judging(), self._price, self._ask_judge, self._write
        )
        if stopped is None and self.running.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        halt = None if stopped is None else await self.running.halted()
        return End("CANCELLED", "cancelled") if halt is not None and halt.cancels else stopped

    async def _shown(self, row: FindingBodyRow) -> FindingInContext:
        source = await self.shelves.around(row.document, row.read().quote) if row.document else ""
        return FindingInContext(row.finding, row.words(), row.support, source, reviewed=row.review != "")

    def _judging(self) -> JudgePanel:
        said, context = self._context.agent.tasks.review, self._context
        judges = tuple(context.models.named(name) for name in said.judges) or (context.model_for("judge"),)
        cap = None if said.max_cost_per_message_usd is UNSET else said.max_cost_per_message_usd
        return JudgePanel(judges, said.instructions, cap)

    def _price(self, model: Model, prompt: Prompt) -> int | None:
        """Tell what a request may cost at most: as much as will be held for it."""
        rates = Prices(self._context.agent.policy.prices).find(model.name, model.base_url)
        if isinstance(rates, Unpriced):
            return None
        return rates.bound(model.count(prompt), prompt.max_output_tokens, self._context.app.clock.now())

    async def _write(self, key: str, event: FindingReviewed | JudgesChosen, body: bytes | None) -> None:
        await self.running.write(key, event, body)


def _list_collections(trigger: AnyTrigger) -> tuple[str, ...]:
    """Name the collections that a trigger's sessions may read."""
    own = (trigger.collection,) if isinstance(trigger, Watch) and trigger.collection is not UNSET else ()
    return (*trigger.collections, *own)


def _place_documents(own: Sequence[DocumentRef], trigger: AnyTrigger | None) -> Sequence[DocumentRef]:
    """Let a document that a watch found in a collection stand in that collection."""
    if not isinstance(trigger, Watch) or trigger.collection is UNSET:
        return own
    return [msgspec.structs.replace(each, collection=trigger.collection) for each in own]


async def _load_finding(store: Store, row: FindingBodyRow) -> FindingBodyRow:
    """Have a finding's words at hand, wherever they are kept."""
    if row.blob is None:
        return row
    try:
        return msgspec.structs.replace(row, body=await store.get(row.blob), blob=None)
    except KeyError:
        return row


async def read_kept_context(store: Store, agent: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Put together what people kept of earlier sessions: the names of it all, and the words."""
    memories = (await store.ask(Query("kept_memories", _Memory, {"agent": agent})))[-MAX_KEPT_ENTRIES:]
    precedents = (await store.ask(Query("kept_precedents", _Precedent, {"agent": agent})))[:MAX_KEPT_ENTRIES]
    lines = [f"- {await _read_words(store, row.body, row.blob)} ({row.memory})" for row in memories]
    cases = [
        f"- {row.kind}: {await _read_words(store, row.body, row.blob)} (seen {row.observed_count} times, "
        f"{row.precedent})"
        for row in precedents
    ]
    parts = [
        *(["What people want you to remember:", *lines] if lines else []),
        *(["Cases you have met before:", *cases] if cases else []),
    ]
    return tuple(row.memory for row in memories), tuple(row.precedent for row in precedents), "\n".join(parts)


class _Memory(msgspec.Struct, frozen=True):
    memory: str
    body: bytes | None
    blob: Digest | None


class _Precedent(msgspec.Struct, frozen=True):
    precedent: str
    kind: str
    observed_count: int
    body: bytes | None
    blob: Digest | None


async def _read_words(store: Store, body: bytes | None, blob: Digest | None) -> str:
    if blob is not None:
        try:
            body = await store.get(blob)
        except KeyError:
            body = None
    return "(erased)" if body is None else from_body(body)


class TriggerRecord(msgspec.Struct, frozen=True):
    """A trigger as the journal keeps it: what was said of it, and when it fires if it is a schedule."""

    type: TriggerType
    spec: msgspec.Raw
    timing: Timing | None = None

    def trigger(self) -> AnyTrigger:
        """Read what was said of it."""
        kinds: dict[TriggerType, type[AnyTrigger]] = {"schedule": Schedule, "watch": Watch, "webhook": Webhook}
        return msgspec.json.decode(self.spec, type=kinds[self.type])


def encode_trigger_record(trigger: AnyTrigger, timing: Timing | None = None) -> bytes:
    """Write a trigger down."""
    match trigger:
        case Schedule():
            kind: TriggerType = "schedule"
        case Watch():
            kind = "watch"
        case Webhook():
            kind = "webhook"
    return msgspec.json.encode(TriggerRecord(kind, msgspec.Raw(msgspec.json.encode(trigger)), timing))


async def read_trigger_record(store: Store, row: TriggerRow) -> TriggerRecord | None:
    """Read a trigger as it was made last; None where that was erased."""
    (stored,) = await store.read(trigger_stream(row.trigger), row.made_seq - 1, 1)
    body = await read_body(store, stored)
    return msgspec.json.decode(body, type=TriggerRecord) if body else None


async def find_trigger_row(store: Store, trigger: str) -> TriggerRow | None:
    """Find a trigger."""
    return next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": trigger}))), None)


class SessionOrigin(msgspec.Struct, frozen=True):
    """What a session was begun by. A sub-session has `carved` as its own cap, if something was carved out for it.

    `follows` names the session that came before one that began by itself.
    """

    trigger: AnyTrigger | None = None
    documents: tuple[DocumentRef, ...] = ()
    grants: tuple[str, ...] | None = None
    carved: int | None = None
    salt: str = ""
    follows: str = ""


async def find_session_origin(context: AgentContext, row: SessionRow) -> SessionOrigin:
    """Find out what a session was begun by; nothing in particular, if a person began it.

    The hash of its first event salts what is hidden from models: it is made of salts that never leave the store.
    """
    store = context.store
    (first,) = await store.read(session_stream(row.session), 0, 1)
    follows = first.event.follows if isinstance(first.event, SessionStarted) else ""
    return msgspec.structs.replace(await _read_origin(store, row, first), salt=first.hash.hex(), follows=follows)


async def _read_origin(store: Store, row: SessionRow, first: Stored) -> SessionOrigin:
    if row.parent:
        return _sub_session_origin(first)
    if not row.trigger:
        return SessionOrigin()
    found = await find_trigger_row(store, row.trigger)
    made = None if found is None else await read_trigger_record(store, found)
    return SessionOrigin(None if made is None else made.trigger(), await _documents(store, row))


async def _documents(store: Store, row: SessionRow) -> tuple[DocumentRef, ...]:
    items = await store.ask(Query("items_of_session", ItemRow, {"session": row.session}))
    name = row.trigger.partition("/")[2]
    return tuple(DocumentRef(item.name, name, item.item, item.seen_at, item.size) for item in items)


def _sub_session_origin(first: Stored) -> SessionOrigin:
    if not isinstance(first.event, SessionStarted):
        return SessionOrigin(grants=())
    carved = [leg.amount for leg in first.event.carved if leg.unit == "usd"]
    return SessionOrigin(grants=first.event.grants, carved=min(carved, default=None))


AUTONOMOUS_WINDOW = 60_000
"""What an autonomous session sends at most: it does so again and again, unattended."""


@dataclass(frozen=True, slots=True)
class LiveSession:
    """One session in the hands of this process."""

    running: SessionRuntime
    loop: TurnLoop
    conversation: Conversation
    aware: Awareness
    terms: PaceTerms


def compile_pace_terms(context: AgentContext) -> PaceTerms:
    """Make ready what an agent's file says of its pace."""
    pacing = context.agent.pacing
    autonomy = pacing.autonomy
    named = UNSET if autonomy.gate is UNSET else autonomy.gate.model
    return PaceTerms(
        pacing=pacing,
        hours=None if autonomy.active_hours is UNSET else parse_active_hours(autonomy.active_hours),
        gate_expression=compile_gate(pacing),
        gate_model=None if named is UNSET else context.models.named(named),
    )


async def build_live_session(
    context: AgentContext,
    row: SessionRow,
    lease: Lease,
    *,
    watching: LoopObserver = NO_OBSERVER,
    waits: WaitListener = lambda _, __: None,
    answer: Tool | None = None,
    sensed: Mapping[str, Tool] | None = None,
) -> LiveSession:
    """Put a session together. With an `answer`, a tool, it ends when the model has called it.

    One that is given `sensed`, the tools that its sensors use and no model is told of, is resident.
    """
    app, store, agent, session = context.app, context.store, context.agent, row.session
    terms = compile_pace_terms(context)
    names = tuple(dict.fromkeys(terms.pacing.names()))
    began = await find_session_origin(context, row)
    tasking = TaskTools(context, row, began.trigger, began.documents)
    always = [*make_verbs(store, session, row.kind, names), *([answer] if answer else [])]
    asked_for = tasking.verbs()
    more = [*always, *asked_for]
    tools = {**agent.tools, **{verb.spec.name: verb for verb in more}}
    everything = {**tools, **(sensed or {})}
    own = [*(verb.spec.name for verb in always), *(sensed or {})]
    phases = [grant_phase_tools(phase, own, began.grants) for phase in agent.policy.phases]
    # Who has no tools of its own answers in one request: it is told of none at all.
    told = {} if row.kind != "autonomous" and answer is None and not (agent.tools or asked_for) else tools
    thinks = _thinking(agent, context.models, row.kind, told, phases[0], output=answer is not None)
    standing = resolve_standing(context, row, phases[0], began)
    running = SessionRuntime(store, app.clock, context.gatehouse(), lease, standing, everything, waits)
    tasking.running = running
    aware = Awareness(HotState(terms.pacing.fields), app.clock)
    if terms.pacing.fields:
        aware.hot.restore(await _load_hot_state(context, row, began.follows))
    senses = aware.senses() if terms.pacing.fields or row.kind == "autonomous" else NO_LIVE_CONTEXT
    loop = TurnLoop(running, app.clock, thinks, context.chance, senses, watching)
    pace = (
        AutonomousPace(running, loop, app.clock, terms, aware)
        if row.kind == "autonomous"
        else tasking.walk(loop, phases, told)
        if row.kind == "task"
        else None
    )
    conversation = Conversation(running, loop, app.clock, pace, resident=sensed is not None)
    return LiveSession(running, loop, conversation, aware, terms)


def _thinking(
    agent: AssembledAgent, models: Models, kind: SessionKind, tools: Mapping[str, Tool], phase: Phase, *, output: bool
) -> LoopSettings:
    """Put together what a session's loop thinks with."""
    mind, policy = agent.mind, agent.policy
    own = tuple(models.named(name) for name in (mind.model, *mind.fallback_models))
    summary = mind.model_for.get("summary")
    offered = tuple(
        tool.spec
        for name, tool in tools.items()
        if name not in policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
    )
    return LoopSettings(
        mind=mind,
        rules=_rules(agent, kind, len(own), output=output),
        models=own,
        offered=offered,
        window=_window(agent, own, kind),
        summarizer=models.named(summary) if summary else None,
    )


def _rules(agent: AssembledAgent, kind: SessionKind, models: int, *, output: bool) -> TurnLimits:
    mind, policy = agent.mind, agent.policy
    return TurnLimits(
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


def _pace(agent: AssembledAgent) -> Mapping[str, int]:
    autonomy = agent.pacing.autonomy
    return {key: getattr(autonomy, key) for key in ("min_sleep", "max_sleep", "max_actions_per_minute")}


def _window(agent: AssembledAgent, models: tuple[Model, ...], kind: SessionKind) -> int:
    """Tell what is sent at most: as the agent's file says, or what all of its models take."""
    from halter.models.providers import estimate_window

    if agent.mind.context_window:
        return agent.mind.context_window
    least = min(estimate_window(model.name, model.base_url) for model in models)
    return min(least, AUTONOMOUS_WINDOW) if kind == "autonomous" else least


async def _load_hot_state(context: AgentContext, row: SessionRow, follows: str) -> bytes:
    """Find the hot state that was kept last: the session's own, or for a chat that of the agent that runs beside it.

    A session that follows another one begins with what that one knew.
    """
    session = row.session
    if row.kind != "autonomous":
        beside = await find_autonomous_session(context)
        session = beside.session if beside is not None else ""
    for each in (session, follows):
        rows = await context.store.ask(Query("snapshot", SavedHotState, {"session": each})) if each else ()
        if rows:
            return rows[0].data
    return b""


async def find_autonomous_session(context: AgentContext) -> SessionRow | None:
    """Find the newest session in which this agent runs, or ran, by itself."""
    params = {"agent": context.agent.policy.name, "kind": "autonomous", "limit": 1}
    return next(iter(await context.store.ask(Query("sessions_of", SessionRow, params))), None)


def grant_phase_tools(phase: Phase, own: Sequence[str], most: Sequence[str] | None) -> Phase:
    """Grant what every session may use beside what a phase grants; a sub-session nothing beyond what it was given."""
    if most is not None:
        within = most if phase.grants is None else [name for name in phase.grants if name in most]
        phase = Phase(phase.name, tuple(within))
    return phase if phase.grants is None else Phase(phase.name, (*phase.grants, *own))


def resolve_standing(context: AgentContext, row: SessionRow, phase: Phase, began: SessionOrigin) -> SessionContext:
    """Tell where a session stands: in its phase, below the caps of what began it, with its last words paid for."""
    agent = context.agent
    standing, policy = agent.standing(row.session, row.trigger), agent.policy
    if began.trigger is not None:
        policy = msgspec.structs.replace(policy, caps=inherit_trigger_caps(policy.caps, began.trigger))
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
        anonymize=None if hidden is None else AnonymizationPolicy(hidden, began.salt),
    )


SIGNAL_TIMEOUT = 30 * SECOND

PollSource = Callable[[], Awaitable[Any]]


def make_fetch_tools(context: AgentContext) -> Mapping[str, Tool]:
    """Make the tools by which sensors poll addresses. No model is told of them."""
    from halter.sensors.poll import Fetch

    polled = [
        sensor for sensor in context.agent.pacing.sensors if sensor.type == "poll" and sensor.source.url is not UNSET
    ]
    made = [Fetch(sensor) for sensor in polled]
    return {fetch.spec.name: fetch for fetch in made}


class SessionSensors:
    """Makes whatever a session's sensors need."""

    def __init__(self, context: AgentContext, running: SessionRuntime, folder: Path) -> None:
        self._context = context
        self._running = running
        self._folder = folder
        self._clock: Clock = context.app.clock
        self._chance: random.Random = context.chance

    def signals(self, sensor: SensorSpec) -> Signals:
        """Make the signals on what a sensor reads."""

        async def judge(signal: Signal, value: Any) -> Score | ScoringFailure:
            return await self._judged(sensor.name, signal, value)

        return Signals(sensor.signals, compile_signals(sensor), judge)

    def runs(
        self,
        sensor: SensorSpec,
        take: Callable[[Reading], Awaitable[None]],
        changed: Callable[[HealthReport], Awaitable[None]],
    ) -> SupervisedSensor:
        """Make what keeps a sensor running."""
        return SupervisedSensor(self._made(sensor), self._clock, self._chance, take, changed)

    def _made(self, sensor: SensorSpec) -> tools.Sensor:
        match sensor.type:
            case "poll":
                from halter.sensors.poll import make_poll_sensor

                return make_poll_sensor(sensor, self._look(sensor), self._clock, self._chance)
            case "watch":
                from halter.sensors.files import make_watch_sensor

                return make_watch_sensor(sensor, self._folder, self._clock, self._context.agent.refuses)
            case "stream":
                from halter.sensors.stream import make_stream_sensor

                return make_stream_sensor(sensor, self._headers(sensor), self._clock)

    def _look(self, sensor: SensorSpec) -> PollSource:
        """Poll through the guard, as every call goes."""
        source = sensor.source
        tool = f"poll_{sensor.name}" if source.tool is UNSET else source.tool
        arguments = b"{}" if source.tool is UNSET else msgspec.json.encode(dict(source.params))

        async def look() -> Any:
            call = f"{self._running.lease.session}.p{sensor.name}_{self._clock.now()}"
            answer = await self._running.look(Call(call, tool, arguments, "sensor", at_most=sensor.timeout))
            if not isinstance(answer, Answer):
                raise SensorFailed(f"{tool} needs a person, or money that others hold.")
            if answer.outcome != "ok":
                raise SensorFailed(answer.text)
            return parse_source_text(answer.text)

        return look

    def _headers(self, sensor: SensorSpec) -> Mapping[str, str]:
        """Fill in the secrets that the agent may use."""
        agent = self._context.agent

        def reveal(name: str) -> str:
            if name not in agent.policy.secrets or name not in agent.secrets.names():
                raise SensorFailed(f"The secret {name} of the sensor {sensor.name} is not set, or not granted.")
            return agent.secrets.value(name)

        return substitute_secrets(dict(sensor.source.headers), reveal)

    async def _judged(self, sensor: str, signal: Signal, value: Any) -> Score | ScoringFailure:
        """Let a model score a reading, in a form that can be nothing else than a score."""
        if signal.model is UNSET:
            return ScoringFailure(f"The signal {signal.name} has no model.")
        request = ModelRequest(
            id=f"{self._running.lease.session}.s{sensor}_{signal.name}_{self._clock.now()}",
            prompt=make_question_prompt(signal.prompt, value, ScoreAnswer),
            purpose="signal",
            timeout=SIGNAL_TIMEOUT,
            optional=True,
        )
        answer = await self._running.request(request, self._context.models.named(signal.model))
        if not isinstance(answer, AnsweredRequest):
            return ScoringFailure(f"{signal.model} gave no score for {signal.name}.")
        score = read_form_answer(answer.reply, ScoreAnswer)
        if score is None:
            return ScoringFailure(f"{signal.model} gave no score for {signal.name} in the form that it was asked for.")
        return Score(score.score, score.reason)
