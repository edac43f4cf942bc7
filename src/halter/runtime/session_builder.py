"""Builds a live session: its tools, its model loop, its sensors and its pace, from its agent and what started it."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET
from typing_extensions import TypeIs

from halter.autonomy.hot_state import HotState, LiveFacts, parse_source_text
from halter.autonomy.pace import AutonomousPace, PaceTerms, parse_active_hours
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
from halter.core.events import CallSettled, RequestSettled, SessionStarted
from halter.core.ids import Digest, session_stream, trigger_stream
from halter.core.messages import AnonymizationPolicy, Model, Prompt, Text
from halter.core.money import Cap, Caps, ScopedCap
from halter.core.ports import Lease, Query, Store, Stored, Write, read_body, read_stream
from halter.core.provenance import Declaration
from halter.core.rows import ItemRow, SavedHotState, SessionRow, TriggerRow
from halter.core.schedules import Timing
from halter.core.spec import Phase
from halter.core.text import from_body
from halter.core.tools import (
    DEFAULT_TOOL_TIMEOUT,
    HealthReport,
    Reading,
    SensorFailed,
    Tool,
    ToolSpec,
    substitute_secrets,
)
from halter.core.usage import Unpriced
from halter.core.vocabulary import SessionKind
from halter.guard.brake import SessionBrake, choose_provenance_mode
from halter.guard.model_door import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.guard.prepare import Call, SessionContext
from halter.guard.tool_door import Answer
from halter.loop.decide import End, FailedAttempt, TurnLimits, compute_backoff, compute_outage_backoff
from halter.loop.loop import NO_LIVE_CONTEXT, NO_OBSERVER, LoopObserver, TurnLoop
from halter.loop.prompt import LoopSettings, ScoreAnswer, make_question_prompt, read_form_answer
from halter.loop.session_runtime import SessionRuntime, WaitListener
from halter.models.providers import Prices
from halter.runtime.agent_context import AgentContext, Models
from halter.runtime.assemble import AssembledAgent
from halter.runtime.documents import Library, SessionDocuments
from halter.tasks.agent_tool import AgentTool
from halter.tasks.conversation import REVIEW_PHASE, Conversation, PhasePolicy, TurnPolicy, review_nothing
from halter.tasks.playbooks import (
    MAX_PLAYBOOK_DURATION,
    MAX_SKILL_ATTEMPTS,
    RUN_PLAYBOOK,
    RUN_SKILL,
    SKILL_TIMEOUT,
    run_playbook,
    run_skill,
)
from halter.tasks.retrieve import RETRIEVE_CHUNKS, DocumentRef, retrieve_chunks
from halter.tasks.review import MAX_JUDGE_ATTEMPTS, FindingInContext, JudgeAccess, JudgePanel, review_findings
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
"""The default channel: notifications stay in the store and `halter inbox` shows them."""
MAX_KEPT_ENTRIES: Final = 100
"""Most memories (the newest) and most precedents (the most frequent) that a session is given."""


class FindingBodyRow(msgspec.Struct, frozen=True):
    """A finding as stored; its body is None once erased."""

    finding: str
    severity: str
    support: str
    document: str
    name: str
    review: str
    body: bytes | None
    blob: Digest | None

    def text(self) -> str:
        read = self.decode()
        quote = f'\n"{read.quote}" ({self.name}, {self.support})' if read.quote else ""
        return f"[{self.severity}] {read.title}\n{read.text}{quote}".strip()

    def decode(self) -> Finding:
        if not self.body:
            return Finding(title="(erased)", severity="info")
        return msgspec.json.decode(self.body, type=Finding)


class TaskTools:
    """Makes the verbs of one session. Assign `running` before any of them is called.

    `mark_links` warns of links in a text that no trusted place said; without a model nothing is to be warned of.
    """

    runtime: SessionRuntime

    def __init__(
        self, context: AgentContext, row: SessionRow, trigger: AnyTrigger | None, own: Sequence[DocumentRef]
    ) -> None:
        self._context = context
        self._row = row
        tasks = context.agent.tasks
        named = tasks.collections if trigger is None else _list_collections(trigger)
        collections = {name: tasks.collections[name] for name in named if name in tasks.collections}
        self._documents = (collections, _assign_collections(own, trigger))
        self._remaining: dict[str, int] = {}
        self._has_waited = False
        self.mark_links: Callable[[str], str] = lambda _: ""

    @cached_property
    def documents(self) -> SessionDocuments:
        context = self._context
        library = context.agent.library or Library(context.store, Path())
        return SessionDocuments(library, context.store, *self._documents)

    def verbs(self) -> Sequence[Verb]:
        context, name = self._context, self._context.agent.policy.name
        clock, agent = context.app.clock, context.agent
        if not agent.tasks.verbs:
            return ()
        makers: Mapping[str, Callable[[], Verb]] = {
            RETRIEVE_CHUNKS: lambda: retrieve_chunks(self.documents, clock.now),
            RUN_SKILL: lambda: run_skill(
                agent.skills,
                lambda request, attempt: self._ask_patiently(request, context.model_for("skill"), attempt),
                agent.model_settings.max_output_tokens,
                MAX_PLAYBOOK_DURATION if self._patience else SKILL_TIMEOUT,
            ),
            RUN_PLAYBOOK: lambda: run_playbook(agent.playbooks, self._step, self._count_spent),
            EMIT_FINDING: lambda: emit_finding(name, self.documents.check),
            PROPOSE_MEMORY: lambda: propose_memory(name, clock),
            PROPOSE_PRECEDENT: lambda: propose_precedent(name, clock),
            NOTIFY: lambda: notify(
                name,
                self._row.session,
                tuple(each.name for each in agent.tasks.notify.channels) or (IN_APP,),
                self._find_reviewed,
                self._mark_links,
                MAX_PLAYBOOK_DURATION if self._patience and agent.tasks.review.judges else DEFAULT_TOOL_TIMEOUT,
            ),
        }
        return [makers[verb]() for verb in agent.tasks.verbs]

    def _mark_links(self, text: str) -> str:
        return self.mark_links(text)

    async def _step(self, call: Call, remaining: int | None) -> Answer:
        """Runs a step of a playbook; the step and what runs inside it spend at most `left`."""
        if remaining is not None:
            self._remaining[call.id] = remaining
        try:
            return await self.runtime.call(call, self._standing(call.id))
        finally:
            self._remaining.pop(call.id, None)

    def _standing(self, name: str) -> SessionContext | None:
        """Returns the context narrowed to what the enclosing steps have left."""
        within = [
            remaining for outer, remaining in self._remaining.items() if name == outer or name.startswith(f"{outer}/")
        ]
        return self.runtime.context.narrow(min(within), self.runtime.spent_usd) if within else None

    async def _count_spent(self, call: str) -> int:
        events = [stored.event for stored in await self.runtime.events()]
        return sum(
            event.charge.usd
            for event in events
            if isinstance(event, CallSettled | RequestSettled) and event.charge is not None
            if (event.call if isinstance(event, CallSettled) else event.request).startswith(f"{call}/")
        )

    async def _ask(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        if attempt:
            await self.runtime.pause(
                compute_backoff(FailedAttempt("", may_retry=True), attempt, self._context.rng.random())
            )
        return await self.runtime.request(request, model, attempt, context=self._standing(request.id))

    @property
    def _patience(self) -> int:
        """The longest wait between two tries of a model that does not answer; 0 where a person attends."""
        return self._context.agent.model_settings.outage_backoff if self._row.unattended else 0

    async def _ask_patiently(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Asks for a skill. After the last attempt, an outage is waited out as every unattended session does."""
        answer, since = await self._ask(request, model, attempt), None
        while _passes(answer, last=attempt >= MAX_SKILL_ATTEMPTS - 1):
            since = await self._wait_out([answer], since)
            if since is None:
                return answer
            attempt += 1
            answer = await self.runtime.request(request, model, attempt, context=self._standing(request.id))
        return await self._record_outage_end(answer)

    async def _record_outage_end(
        self, answer: AnsweredRequest | RefusedRequest | FailedRequest
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Records the end of an outage that was waited out, if this is an answer."""
        if self._has_waited and isinstance(answer, AnsweredRequest):
            self._has_waited = False
            await self.runtime.record_recovery()
        return answer

    async def _wait_out(self, failed: Sequence[FailedRequest], since: int | None) -> int | None:
        """Waits where time or a person mends what failed; returns since when it waits, or None if it does not.

        Of several models one that may come back is enough to wait for.
        """
        passing = [each for each in failed if each.may_retry] or [each for each in failed if each.needs_person]
        if not self._patience or not passing:
            return None
        now, asked = self._context.app.clock.now(), max(each.retry_after or 0 for each in failed)
        since = now if since is None else since
        sleep = compute_outage_backoff(now - since, asked, self._patience, self._context.rng.random())
        trouble = "outage" if passing[-1].may_retry else "needs_person"
        self._has_waited = True
        await self.runtime.wait_for_provider(trouble, passing[-1].error, sleep)
        return since

    async def _ask_judge(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Asks a judge. A request that a halt stopped is retried once the halt is lifted."""
        answer = await (
            self._ask(request, model, attempt)
            if attempt < MAX_JUDGE_ATTEMPTS
            else self.runtime.request(request, model, attempt, context=self._standing(request.id))
        )
        if isinstance(answer, AnsweredRequest):
            return await self._record_outage_end(answer)
        if answer.outcome != "external_halt" or await self.runtime.find_halt() is not None:
            return answer
        cost = answer.cost_usd if isinstance(answer, FailedRequest) else 0
        return FailedRequest(answer.request, "cancelled", "A halt stopped it.", cost, may_retry=True)

    async def _rows(self) -> Sequence[FindingBodyRow]:
        store: Store = self._context.store
        rows = await store.ask(Query("findings_of", FindingBodyRow, {"session": self._row.session}))
        return [
            msgspec.structs.replace(row, body=await load_body(store, row.body, row.blob), blob=None) for row in rows
        ]

    async def _find_reviewed(self) -> Mapping[str, tuple[str, str]]:
        """Returns the findings that may be told of, after the judges that are named have seen them."""
        await self.review()
        return {row.finding: (row.review, row.text()) for row in await self._rows()}

    async def review(self, *, phase: bool = False) -> End | None:
        policy, tasks = self._context.agent.policy, self._context.agent.tasks
        if not phase and (not tasks.review.judges or any(each.name == REVIEW_PHASE for each in policy.phases)):
            return None
        found = [await self._render_finding(row) for row in await self._rows()]
        access = JudgeAccess(self._price, self._ask_judge, self._wait_out, self.runtime.write)
        stopped = await review_findings(self._row.session, found, self._judging(), access)
        if stopped is None and self.runtime.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        halt = None if stopped is None else await self.runtime.find_halt()
        return End("CANCELLED", "cancelled") if halt is not None and halt.cancels else stopped

    async def _render_finding(self, row: FindingBodyRow) -> FindingInContext:
        source = await self.documents.read_context(row.document, row.decode().quote) if row.document else ""
        return FindingInContext(row.finding, row.text(), row.support, source, reviewed=row.review != "")

    def _judging(self) -> JudgePanel:
        said, context = self._context.agent.tasks.review, self._context
        judges = tuple(context.models.get(name) for name in said.judges) or (context.model_for("judge"),)
        cap = None if said.max_cost_per_message_usd is UNSET else said.max_cost_per_message_usd
        return JudgePanel(judges, said.instructions, cap)

    def _price(self, model: Model, prompt: Prompt) -> int | None:
        """Returns the most that a request can cost: the amount that is held for it."""
        rates = Prices(self._context.agent.policy.prices).find(model.name, model.base_url)
        if isinstance(rates, Unpriced):
            return None
        return rates.bound(model.count(prompt), prompt.max_output_tokens, self._context.app.clock.now())


def _passes(answer: AnsweredRequest | RefusedRequest | FailedRequest, *, last: bool) -> TypeIs[FailedRequest]:
    """Whether time or a person mends what failed."""
    return isinstance(answer, FailedRequest) and ((answer.may_retry and last) or answer.needs_person)


def _list_collections(trigger: AnyTrigger) -> tuple[str, ...]:
    own = (trigger.collection,) if isinstance(trigger, Watch) and trigger.collection is not UNSET else ()
    return (*trigger.collections, *own)


def _assign_collections(own: Sequence[DocumentRef], trigger: AnyTrigger | None) -> Sequence[DocumentRef]:
    """Assigns a watch's own documents to the collection that it watches."""
    if not isinstance(trigger, Watch) or trigger.collection is UNSET:
        return own
    return [msgspec.structs.replace(each, collection=trigger.collection) for each in own]


async def load_body(store: Store, body: bytes | None, blob: Digest | None) -> bytes | None:
    """Return the body beside a row or in its blob; None where it was erased."""
    if blob is None:
        return body
    try:
        return await store.get(blob)
    except KeyError:
        return None


async def read_kept_context(store: Store, agent: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Returns the ids of the memories and precedents that people kept, and the text that shows them."""
    kept = await store.ask(Query("kept_context", _StoredMemory, {"agent": agent}))
    if not kept:
        return (), (), ""
    memories = [row for row in kept if not row.is_case][-MAX_KEPT_ENTRIES:]
    precedents = [row for row in kept if row.is_case][:MAX_KEPT_ENTRIES]
    lines = [f"- {await _read_words(store, row)} ({row.id})" for row in memories]
    cases = [
        f"- {row.kind}: {await _read_words(store, row)} (seen {row.observed_count} times, {row.id})"
        for row in precedents
    ]
    parts = [
        *(["What people want you to remember:", *lines] if lines else []),
        *(["Cases you have met before:", *cases] if cases else []),
    ]
    return tuple(row.id for row in memories), tuple(row.id for row in precedents), "\n".join(parts)


class _StoredMemory(msgspec.Struct, frozen=True):
    """A memory, or a precedent: a case with its kind."""

    id: str
    kind: str
    observed_count: int
    is_case: bool
    body: bytes | None
    blob: Digest | None


async def _read_words(store: Store, row: _StoredMemory) -> str:
    body = await load_body(store, row.body, row.blob)
    return "(erased)" if body is None else from_body(body)


class TriggerRecord(msgspec.Struct, frozen=True):
    """A trigger as the journal keeps it; `timing` is when a schedule fires."""

    type: TriggerType
    spec: msgspec.Raw
    timing: Timing | None = None

    def trigger(self) -> AnyTrigger:
        kinds: dict[TriggerType, type[AnyTrigger]] = {"schedule": Schedule, "watch": Watch, "webhook": Webhook}
        return msgspec.json.decode(self.spec, type=kinds[self.type])


def classify_trigger(trigger: AnyTrigger) -> TriggerType:
    if isinstance(trigger, Schedule):
        return "schedule"
    return "watch" if isinstance(trigger, Watch) else "webhook"


def encode_trigger_record(trigger: AnyTrigger, timing: Timing | None = None) -> bytes:
    spec = msgspec.Raw(msgspec.json.encode(trigger))
    return msgspec.json.encode(TriggerRecord(classify_trigger(trigger), spec, timing))


async def read_trigger_record(store: Store, row: TriggerRow) -> TriggerRecord | None:
    """Returns a trigger as it was made last; None where it was erased."""
    (stored,) = await store.read(trigger_stream(row.trigger), row.made_seq - 1, 1)
    body = await read_body(store, stored)
    return msgspec.json.decode(body, type=TriggerRecord) if body else None


async def find_trigger_row(store: Store, trigger: str) -> TriggerRow | None:
    return next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": trigger}))), None)


class SessionOrigin(msgspec.Struct, frozen=True):
    """What started a session. `carved` is the cap of a sub-session, `follows` the session that it continues.

    `askers` are the caps of the agents, and of their triggers, whose sessions a sub-session is for.
    """

    trigger: AnyTrigger | None = None
    documents: tuple[DocumentRef, ...] = ()
    grants: tuple[str, ...] | None = None
    carved: int | None = None
    salt: str = ""
    follows: str = ""
    askers: tuple[ScopedCap, ...] = ()


async def find_session_origin(context: AgentContext, row: SessionRow, begun: tuple[Stored, ...] = ()) -> SessionOrigin:
    """Returns what started a session; empty if a person did. `begun` are its first events, if they are known.

    The hash of its first event salts the placeholders that hide data from models: its own salts never leave the store.
    """
    first = begun[0] if begun else (await context.store.read(session_stream(row.session), 0, 1))[0]
    follows = first.event.follows if isinstance(first.event, SessionStarted) else ""
    if not row.parent and not row.trigger:
        return SessionOrigin(salt=first.hash.hex(), follows=follows)
    began = await _read_origin(context.store, row, first)
    return msgspec.structs.replace(began, salt=first.hash.hex(), follows=follows)


async def _read_origin(store: Store, row: SessionRow, first: Stored) -> SessionOrigin:
    if row.parent:
        if not isinstance(first.event, SessionStarted):
            return SessionOrigin(grants=())
        carved = [leg.amount for leg in first.event.carved if leg.unit == "usd"]
        askers = await _find_asker_caps(store, row.parent)
        return SessionOrigin(grants=first.event.grants, carved=min(carved, default=None), askers=askers)
    found = await find_trigger_row(store, row.trigger)
    record = None if found is None else await read_trigger_record(store, found)
    items = await store.ask(Query("items_of_session", ItemRow, {"session": row.session}))
    name = row.trigger.partition("/")[2]
    documents = tuple(DocumentRef(item.name, name, item.item, item.seen_at, item.size) for item in items)
    return SessionOrigin(None if record is None else record.trigger(), documents)


class _StoredPolicy(msgspec.Struct, frozen=True):
    caps: Caps = Caps()


class _StoredDefinition(msgspec.Struct, frozen=True):
    """Of the definition that a session began with, its caps; the usual ones where it was not kept."""

    policy: _StoredPolicy = _StoredPolicy()


async def _find_asker_caps(store: Store, parent: str) -> tuple[ScopedCap, ...]:
    """The caps of a window, by whose sessions a sub-session was begun: what it spends counts for them as well."""
    found: list[ScopedCap] = []
    while parent:
        row = next(iter(await store.ask(Query("session", SessionRow, {"session": parent}))), None)
        if row is None:
            break
        try:
            caps = msgspec.json.decode(await store.get(Digest(row.definition)), type=_StoredDefinition).policy.caps
        except (KeyError, ValueError, msgspec.MsgspecError):
            caps = Caps()
        found += [(f"agent:{row.agent}", cap) for cap in caps.agent]
        if row.trigger:
            (first,) = await store.read(session_stream(row.session), 0, 1)
            trigger = (await _read_origin(store, row, first)).trigger
            found += [(f"trigger:{row.trigger}", cap) for cap in (() if trigger is None else trigger.caps())]
        parent = row.parent
    return tuple(found)


AUTONOMOUS_WINDOW = 60_000
"""Most tokens that an autonomous session sends: it does so repeatedly and unattended."""


class LiveSession(msgspec.Struct, frozen=True):
    """One session at work in this process."""

    runtime: SessionRuntime
    loop: TurnLoop
    conversation: Conversation
    hot_view: LiveFacts
    terms: PaceTerms


def compile_pace_terms(context: AgentContext) -> PaceTerms:
    pacing = context.agent.pacing
    autonomy = pacing.autonomy
    named = UNSET if autonomy.gate is UNSET else autonomy.gate.model
    return PaceTerms(
        pacing=pacing,
        hours=None if autonomy.active_hours is UNSET else parse_active_hours(autonomy.active_hours),
        gate_expression=compile_gate(pacing),
        gate_model=None if named is UNSET else context.models.get(named),
    )


async def build_live_session(  # noqa: PLR0913 Each is one thing that a session may be given.
    context: AgentContext,
    row: SessionRow,
    lease: Lease,
    *,
    observer: LoopObserver = NO_OBSERVER,
    waits: WaitListener = lambda _, __: None,
    answer: Tool | None = None,
    sensed: Mapping[str, Tool] | None = None,
    begun: tuple[Stored, ...] = (),
    start: Write | None = None,
) -> LiveSession:
    """Builds a session at work. With an `answer` tool it ends when the model has called it.

    With `sensed`, the tools that its sensors use and no model is offered, the session is resident. `begun` are all of
    its events, if this process has just begun it, and `start` what begins it, if that is still to be committed.
    """
    app, store = context.app, context.store
    past = begun or tuple(await read_stream(store, session_stream(row.session)))
    began = await find_session_origin(context, row, past)
    common = answer is None and sensed is None and began.grants is None
    plan = _find_plan(context, row) if common else None
    tasking = TaskTools(context, row, began.trigger, began.documents) if plan is None or plan.reviews else None
    if plan is None:
        own = _OwnTools(tuple(tasking.verbs()) if tasking else (), answer, sensed, began.grants, waits)
        plan = _make_plan(context, row, own)
    standing = resolve_standing(context, row, plan.phases[0], began)
    runtime = SessionRuntime(store, app.clock, context.guard(), lease, standing, plan.tools, waits)
    runtime.on_cap = observer.on_cap
    runtime.past = () if begun else past
    hot_view, live_context = plan.hot_view, NO_LIVE_CONTEXT
    if hot_view is None:
        hot_view = LiveFacts(HotState(plan.terms.pacing.fields), app.clock)
        live_context = hot_view.make_live_context()
        if plan.terms.pacing.fields:
            hot_view.hot.restore(await _load_hot_state(context, row, began.follows))
    loop = TurnLoop(runtime, app.clock, plan.settings, context.rng, live_context, observer, plan.make_brake)
    if tasking is not None:
        tasking.runtime, tasking.mark_links = runtime, loop.describe_unsaid_links
    pace: TurnPolicy | None = None
    if row.kind == "autonomous":
        pace = AutonomousPace(runtime, loop, app.clock, plan.terms, hot_view)
    elif row.kind == "task":
        review = tasking.review if tasking is not None else review_nothing
        pace = PhasePolicy(runtime, loop, plan.phases, plan.offered, review)
    conversation = Conversation(runtime, loop, app.clock, pace, resident=sensed is not None, begun=begun, start=start)
    return LiveSession(runtime, loop, conversation, hot_view, plan.terms)


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent's sessions of a kind have in common, made once for all that have no tools of their own.

    `offered` are the tools that a model is shown in each phase. `aware` is what they perceive if that is nothing.
    """

    context: AgentContext
    terms: PaceTerms
    tools: Mapping[str, Tool]
    phases: tuple[Phase, ...]
    offered: tuple[tuple[ToolSpec, ...], ...]
    settings: LoopSettings
    make_brake: Callable[[], SessionBrake | None]
    reviews: bool
    hot_view: LiveFacts | None


class _OwnTools(msgspec.Struct, frozen=True):
    """Tools that are made for one session: its verbs, its form of an answer, those of its sensors, its grants."""

    verbs: tuple[Tool, ...]
    answer: Tool | None
    sensed: Mapping[str, Tool] | None
    grants: tuple[str, ...] | None
    on_wait: WaitListener


def _find_plan(context: AgentContext, row: SessionRow) -> SessionPlan | None:
    """Returns the plan that was made for the same agent, if there is one."""
    plan = context.caches.plans.get((row.kind, row.unattended))
    if not isinstance(plan, SessionPlan):
        return None
    made = plan.context
    same = made.agent is context.agent and made.app is context.app and made.models is context.models
    return plan if same and made.brakes is context.brakes else None


def _make_plan(context: AgentContext, row: SessionRow, own: _OwnTools) -> SessionPlan:
    agent, terms, answer, sensed = context.agent, compile_pace_terms(context), own.answer, own.sensed or {}
    names = tuple(dict.fromkeys(terms.pacing.names()))
    always = [*make_verbs(context.store, row.kind, names), *([answer] if answer else [])]
    agents = any(isinstance(tool, AgentTool) for tool in agent.tools.values())
    tools = agent.tools
    if agents:
        # What runs a sub-session is made of what builds a session.
        from halter.runtime.sub_sessions import bind_agent_tools

        tools = bind_agent_tools(context, row.session, tools, own.on_wait)
    tools = {**tools, **{verb.spec.name: verb for verb in (*always, *own.verbs)}}
    granted = [*(verb.spec.name for verb in always), *sensed]
    phases = tuple([grant_phase_tools(phase, granted, own.grants) for phase in agent.policy.phases])
    # An agent without tools answers in one request, so it is offered none.
    told = {} if row.kind != "autonomous" and answer is None and not (agent.tools or own.verbs) else tools
    offered = tuple([_list_offered_tools(agent, told, phase) for phase in phases])
    perceives = bool(terms.pacing.fields) or row.kind == "autonomous"
    senses = bool(terms.pacing.fields or terms.pacing.sensors)
    plan = SessionPlan(
        context=msgspec.structs.replace(context, bound=None),
        terms=terms,
        tools={**tools, **sensed} if sensed else tools,
        phases=phases,
        offered=offered,
        settings=_build_loop_settings(agent, context.models, row, offered[0], output=answer is not None),
        make_brake=_plan_brake(context, tools, senses=senses),
        reviews=bool(agent.tasks.review.judges) or any(phase.name == REVIEW_PHASE for phase in phases),
        hot_view=None if perceives else LiveFacts(HotState({}), context.app.clock),
    )
    if not (agents or own.verbs or answer or own.sensed is not None or own.grants is not None):
        context.caches.plans[row.kind, row.unattended] = plan
    return plan


def _plan_brake(context: AgentContext, tools: Mapping[str, Tool], *, senses: bool) -> Callable[[], SessionBrake | None]:
    """Returns what makes the injection brake of a session, which has heard what every prompt of it begins with."""
    agent, brakes = context.agent, context.brakes
    mode = choose_provenance_mode(agent.policy)
    if mode == "off":
        return lambda: None
    specs, declarations = {name: tool.spec for name, tool in tools.items()}, dict[str, Declaration]()

    def make_brake() -> SessionBrake:
        brake = brakes(mode, agent.policy, specs, declarations)
        brake.trust(agent.model_settings.instructions, "the instructions")
        brake.add_descriptions()
        if agent.model_settings.provider_tools:
            # What a provider's own tools find reaches the model unseen.
            brake.mark_erased()
        if senses:
            brake.add_text(Text("sensors", "sensor", trusted=False, source="the sensors"))
        return brake

    return make_brake


def _build_loop_settings(
    agent: AssembledAgent, models: Models, row: SessionRow, offered: tuple[ToolSpec, ...], *, output: bool
) -> LoopSettings:
    mind, policy, kind = agent.model_settings, agent.policy, row.kind
    own = tuple(models.get(name) for name in (mind.model, *mind.fallback_models))
    summary = mind.model_for.get("summary")
    paced = ("min_sleep", "max_sleep", "max_actions_per_minute") if kind == "autonomous" else ()
    rules = TurnLimits(
        kind=kind,
        timeout=policy.timeout,
        max_steps=policy.max_steps,
        max_retries=mind.max_retries,
        outage_backoff=mind.outage_backoff if row.unattended else 0,
        models=len(own),
        max_tokens_recoveries=mind.max_tokens_recoveries,
        max_repeated_tool_steps=mind.max_repeated_tool_steps,
        on_cap=policy.on_cap,
        expects_output=output,
        **{key: getattr(agent.pacing.autonomy, key) for key in paced},
    )
    return LoopSettings(
        model=mind,
        rules=rules,
        models=own,
        offered=offered,
        window=_window(agent, own, kind),
        summarizer=models.get(summary) if summary else None,
    )


def _list_offered_tools(agent: AssembledAgent, tools: Mapping[str, Tool], phase: Phase) -> tuple[ToolSpec, ...]:
    return tuple(
        tool.spec
        for name, tool in tools.items()
        if name not in agent.policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
    )


def _window(agent: AssembledAgent, models: tuple[Model, ...], kind: SessionKind) -> int:
    """Returns the context window: configured, or the smallest of the models'."""
    from halter.models.providers import estimate_window

    if agent.model_settings.context_window:
        return agent.model_settings.context_window
    least = min(estimate_window(model.name, model.base_url) for model in models)
    return min(least, AUTONOMOUS_WINDOW) if kind == "autonomous" else least


async def _load_hot_state(context: AgentContext, row: SessionRow, follows: str) -> bytes:
    """Returns the last hot state: the session's own, or for a chat that of the autonomous session.

    A session that follows another one starts with the hot state of that one.
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
    """Returns the agent's newest autonomous session, open or ended."""
    params = {"agent": context.agent.policy.name, "kind": "autonomous", "limit": 1}
    return next(iter(await context.store.ask(Query("sessions_of", SessionRow, params))), None)


def grant_phase_tools(phase: Phase, own: Sequence[str], most: Sequence[str] | None) -> Phase:
    """Grants `own` beside what a phase grants; a sub-session is limited to `most`."""
    if most is not None:
        within = most if phase.grants is None else [name for name in phase.grants if name in most]
        phase = Phase(phase.name, tuple(within))
    return phase if phase.grants is None else Phase(phase.name, (*phase.grants, *own))


def resolve_standing(context: AgentContext, row: SessionRow, phase: Phase, began: SessionOrigin) -> SessionContext:
    """Returns the context of a session: its phase, the caps of what started it, the reserve for its last words."""
    agent, policy = context.agent, context.agent.policy
    digest = str(policy.digest())
    if began.trigger is not None:
        policy = msgspec.structs.replace(policy, caps=inherit_trigger_caps(policy.caps, began.trigger))
    if began.carved is not None:
        policy = msgspec.structs.replace(policy, caps=msgspec.structs.replace(policy.caps, session=Cap(began.carved)))
    hidden = agent.tasks.anonymize
    hourly = agent.pacing.autonomy.token_budget_per_hour if row.kind == "autonomous" else 0
    return SessionContext(
        session=row.session,
        agent=policy.name,
        phase=phase,
        policy=policy,
        policy_digest=digest,
        trigger=row.trigger,
        quarantined=agent.quarantined,
        secrets=agent.find_granted_secrets(),
        kept_usd=policy.reserve_usd,
        kept_tokens=policy.reserve_tokens if policy.on_cap == "wrap_up" else 0,
        tokens_per_hour=hourly or None,
        anonymize=None if hidden is None else AnonymizationPolicy(hidden, began.salt),
        rates=agent.model_settings.rates,
        askers=began.askers,
    )


SIGNAL_TIMEOUT = 30 * SECOND

PollSource = Callable[[], Awaitable[Any]]


def make_fetch_tools(context: AgentContext) -> Mapping[str, Tool]:
    """Makes the tools with which sensors poll URLs. No model is offered them."""
    from halter.sensors.poll import Fetch

    polled = [
        sensor for sensor in context.agent.pacing.sensors if sensor.type == "poll" and sensor.source.url is not UNSET
    ]
    made = [Fetch(sensor) for sensor in polled]
    return {fetch.spec.name: fetch for fetch in made}


class SessionSensors:
    """Makes the sensors of a session and their signals."""

    def __init__(self, context: AgentContext, runtime: SessionRuntime, folder: Path) -> None:
        self._context = context
        self._runtime = runtime
        self._folder = folder
        self._clock: Clock = context.app.clock
        self._rng: random.Random = context.rng

    def signals(self, sensor: SensorSpec) -> Signals:
        async def judge(signal: Signal, value: Any) -> Score | ScoringFailure:
            return await self._score(sensor.name, signal, value)

        return Signals(sensor.signals, compile_signals(sensor), judge)

    def runs(
        self,
        sensor: SensorSpec,
        take: Callable[[Reading], Awaitable[None]],
        changed: Callable[[HealthReport], Awaitable[None]],
    ) -> SupervisedSensor:
        return SupervisedSensor(self._make_sensor(sensor), self._clock, self._rng, take, changed)

    def _make_sensor(self, sensor: SensorSpec) -> tools.Sensor:
        match sensor.type:
            case "poll":
                from halter.sensors.poll import make_poll_sensor

                return make_poll_sensor(sensor, self._make_poll(sensor), self._clock, self._rng)
            case "watch":
                from halter.sensors.files import make_watch_sensor

                return make_watch_sensor(sensor, self._folder, self._clock, self._context.agent.refuses)
            case "stream":
                from halter.sensors.stream import make_stream_sensor

                return make_stream_sensor(sensor, self._headers(sensor), self._clock)

    def _make_poll(self, sensor: SensorSpec) -> PollSource:
        """Polls through the guard, like every call."""
        source = sensor.source
        tool = f"poll_{sensor.name}" if source.tool is UNSET else source.tool
        arguments = b"{}" if source.tool is UNSET else msgspec.json.encode(dict(source.params))

        async def poll_once() -> Any:
            call = f"{self._runtime.lease.session}.p{sensor.name}_{self._clock.now()}"
            answer = await self._runtime.call_read_only(Call(call, tool, arguments, "sensor", at_most=sensor.timeout))
            if not isinstance(answer, Answer):
                raise SensorFailed(f"{tool} needs a person, or money that others hold.")
            if answer.outcome != "ok":
                raise SensorFailed(answer.text)
            return parse_source_text(answer.text)

        return poll_once

    def _headers(self, sensor: SensorSpec) -> Mapping[str, str]:
        agent = self._context.agent

        def reveal(name: str) -> str:
            if name not in agent.policy.secrets or name not in agent.secrets.names():
                raise SensorFailed(f"The secret {name} of the sensor {sensor.name} is not set, or not granted.")
            return agent.secrets.value(name)

        return substitute_secrets(dict(sensor.source.headers), reveal)

    async def _score(self, sensor: str, signal: Signal, value: Any) -> Score | ScoringFailure:
        """Asks a model to score a reading, in a form that allows only a score."""
        if signal.model is UNSET:
            return ScoringFailure(f"The signal {signal.name} has no model.")
        request = ModelRequest(
            id=f"{self._runtime.lease.session}.s{sensor}_{signal.name}_{self._clock.now()}",
            prompt=make_question_prompt(signal.prompt, value, ScoreAnswer),
            purpose="signal",
            timeout=SIGNAL_TIMEOUT,
            optional=True,
        )
        answer = await self._runtime.request(request, self._context.models.get(signal.model))
        if not isinstance(answer, AnsweredRequest):
            return ScoringFailure(f"{signal.model} gave no score for {signal.name}.")
        score = read_form_answer(answer.reply, ScoreAnswer)
        if score is None:
            return ScoringFailure(f"{signal.model} gave no score for {signal.name} in the form that it was asked for.")
        return Score(score.score, score.reason)
