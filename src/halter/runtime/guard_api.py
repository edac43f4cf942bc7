"""The guard as an object of its own, for programs that have a loop already.

```python
guard = Guard("runs.db", agent="desk", max_cost_usd=1.00)

@guard.tool(level="CONTROLLED", cost=0.02)
async def send(to: str, text: str) -> str: ...

async with guard, guard.session("answer the mail") as session:
    answer = await session.call("send", to="ada", text="hello")
```

Every call passes the same checks as those of an agent: halts, grants, rates, money, approvals, in this order, and
is in the journal before it runs. After a crash the program resumes from the journal.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

import msgspec

from halter.config.resolve import check_named_tools, list_named_tools, read_model_rates, resolve_policy
from halter.core.agent_spec import BrainSpec
from halter.core.clock import HOUR, SECOND
from halter.core.errors import ConfigError, HalterError, LeaseLost
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, session_stream
from halter.core.messages import Message, Model, Prompt, Text
from halter.core.money import Usd, micros_to_usd
from halter.core.ports import Lease, Query, offload_body, read_body, read_stream
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.text import from_body, reject_unknown_options, to_body
from halter.core.tools import Tool, ToolSpec
from halter.core.vocabulary import Outcome, State, TerminalReason
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.guard.call_brake import CallBrake, make_call_brake
from halter.guard.halts import BudgetBusy
from halter.guard.model_door import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.guard.prepare import Call
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.loop.session_runtime import SessionRuntime
from halter.models.providers import Prices
from halter.runtime.agent import AgentProgram, ProgramOptions, agent_said, resolve_secrets
from halter.runtime.agent_context import AgentContext, Models, store_policy
from halter.runtime.assemble import AssembledAgent, index_tools, list_protected_paths, protect_tools
from halter.runtime.budgets import Budget, read_current_budgets, render_budgets
from halter.runtime.external import Act, Ask, DecisionPending, EffectRefused, ExternalModel, ExternalTool
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.receipt import Receipt
from halter.state.receipt import make_receipt as receipt_of
from halter.tools.function_tool import FunctionTool, canonical_json

if TYPE_CHECKING:
    from halter.runtime.guard_thread import BlockingGuard, LoopThread

R = TypeVar("R")
MAX_REPORT_SESSIONS: Final = 1_000_000
SHORT_REST: Final = SECOND


class GuardOptions(ProgramOptions, total=False):
    """Options of a guard. `simulates` is a model that predicts what dangerous calls would do."""

    simulates: Model


class GuardSummary(msgspec.Struct, frozen=True):
    """What a guard's agent did and spent, in dollars."""

    agent: str
    sessions: int
    running: int
    cost_usd: Usd
    cost_by_name_usd: Mapping[str, Usd]
    budgets: tuple[Budget, ...]
    needs_you: tuple[PendingDecision, ...]


class Guard(AgentProgram):
    """One agent's guard over one store. Use it as an async context manager."""

    NOUN = "guard"

    def __init__(self, store: str | Path, agent: str = "program", **options: Unpack[GuardOptions]) -> None:
        reject_unknown_options(options, GuardOptions.__optional_keys__, "a guard")
        super().__init__(agent, store, options)
        self._agent = agent
        self._simulates = options.get("simulates")
        self._external = False

    @asynccontextmanager
    async def session(self, task: str = "", *, id: str | None = None) -> AsyncGenerator["GuardedSession"]:  # noqa: A002 It is the word for it everywhere.
        """Starts a session, or resumes the one with that id, also after a crash: calls in doubt are resolved first.

        It ends with the block: completed, as an error if the block raises, or by the brake that was tripped.
        """
        session = await self._resume_or_begin(task, id)
        try:
            yield session
        except DecisionPending:
            await session.pause()
            raise
        except Exception:
            with suppress(LeaseLost):
                await session.end("ERROR", "error")
            raise
        await session.end("COMPLETED", "completed")

    async def has_ended(self, session: str) -> bool:
        """Says whether a session with this id has begun and ended."""
        rows = await self._open_context().store.ask(Query("session", SessionRow, {"session": session}))
        return any(row.ended_at is not None for row in rows)

    @property
    def max_cost_usd(self) -> float | None:
        """What a session may cost at most, where the program says so."""
        cap = self._options.get("max_cost_usd", "none")
        return None if cap == "none" else float(cap)

    def blocking(self) -> "BlockingGuard":
        """Returns the guard for a program that is not async."""
        from halter.runtime.guard_thread import BlockingGuard

        return BlockingGuard(self)

    def allow_external_tools(self) -> None:
        """Let the policy name tools that are the caller's own, and known only when they are first called."""
        self._external = True

    async def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Makes one call in a session of its own."""
        async with self.session(f"call {_name(tool)}") as session:
            return await session.call(tool, **arguments)

    def model(self, client: R, *, provider: str = "") -> R:
        """Returns a client of the openai or anthropic SDK whose requests pass the guard, each in a session of its own.

        `provider` is under which name a fleet's prices have the models of a server that only speaks the same protocol.
        """
        self._open_context()
        return guard_client(client, lambda: self.session("A request of an SDK's client."), None, provider)

    async def report(self) -> GuardSummary:
        """Returns what this agent did and spent, its budgets, and what waits for a person."""
        app, named = self._open_context().app, {"agent": self._agent}
        store, now = app.store, app.clock.now()
        own = await store.ask(Query("sessions_of_agent", SessionRow, {**named, "limit": MAX_REPORT_SESSIONS}))
        spent = await store.ask(Query("spent_by_name", _Spent, named))
        by_name = {each.name: each.usd for each in spent}
        return GuardSummary(
            agent=self._agent,
            sessions=len(own),
            running=sum(row.ended_at is None for row in own),
            cost_usd=micros_to_usd(sum(by_name.values())),
            cost_by_name_usd={name: micros_to_usd(micros) for name, micros in by_name.items()},
            budgets=tuple(await render_budgets(store, await read_current_budgets(store, now))),
            needs_you=tuple(await list_pending_decisions(store, now)),
        )

    async def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Returns the receipts of this agent's sessions, the newest first."""
        opened = self._open_context()
        params = {"agent": self._agent, "limit": limit}
        own = await opened.app.store.ask(Query("sessions_of_agent", SessionRow, params))
        return tuple([receipt_of(await read_stream(opened.store, session_stream(row.session))) for row in own])

    async def _resume_or_begin(self, task: str, session: str | None) -> "GuardedSession":
        opened = self._open_context()
        started = SessionStarted(
            session=session or opened.app.ids.make(),
            agent=self._agent,
            kind="task",
            started_by=self._settings.person,
            definition=await store_policy(opened.store, opened.agent.policy, opened.guard().redact),
        )
        body = to_body(opened.guard().redact(task))
        await opened.store.commit(lifecycle.start_session(started, *await offload_body(opened.store, body)))
        lease = await self._lease(opened, SessionId(started.session))
        if lease is None:
            raise await _explain_not_taken(opened, started.session)
        context, tools = opened.agent.make_context(started.session), dict(opened.agent.tools)
        runtime = SessionRuntime(opened.store, opened.app.clock, opened.guard(), lease, context, tools)
        events = await runtime.resume()
        brake = make_call_brake(opened.agent.policy.provenance, opened.agent.policy, tools)
        if brake is not None:
            for stored in events:
                body = await read_body(opened.store, stored)
                if isinstance(stored.event, SessionStarted):
                    brake.add_task(from_body(body))
                brake.recall(stored, body)
            brake.add_task(opened.guard().redact(task))
        return GuardedSession(opened, runtime, len(events), tools, brake)

    async def _lease(self, opened: AgentContext, session: SessionId) -> Lease | None:
        """Takes a session at once if it is free or over; else waits as long as a dead owner's lease lasts."""
        (row,) = await opened.store.ask(Query("session", SessionRow, {"session": session}))
        max_wait = 0 if row.ended_at is not None or explain_newer_format(row) else opened.hold_timeout
        return await acquire_lease(opened.store, opened.app.clock, opened.worker, session, max_wait)

    async def _assemble(self, app: Runtime, stack: AsyncExitStack) -> tuple[AssembledAgent, Models]:
        agent = agent_said(self._agent, self._options, "the guard's policy", {}, {})
        policy = resolve_policy(app.fleet, agent)
        tools = index_tools(self._tools)
        protect_tools(self._tools, list_protected_paths(self._settings, None, None))
        specs = [tool.spec for tool in self._tools]
        if self._external:
            unknown = {name for _, name in list_named_tools(agent)} - {spec.name for spec in specs}
            specs += [ToolSpec(name=name, description="", schema=b"{}") for name in sorted(unknown)]
        check_named_tools(policy, agent, specs)
        model, mind = self._simulates, BrainSpec(rates=read_model_rates(app.fleet))
        if model is not None:
            mind = msgspec.structs.replace(mind, model_for={"simulation": str(model.name)})
        made = AssembledAgent(
            policy=policy, model_settings=mind, tools=tools, secrets=resolve_secrets(self._options, self._environ)
        )
        return made, Models(app, made, {} if model is None else {str(model.name): model})


class _Spent(msgspec.Struct, frozen=True):
    name: str
    usd: int


class SessionTaken(HalterError):
    """The session cannot be resumed: another process works on it."""


class SessionOver(HalterError):
    """The session cannot be resumed: it has ended."""


async def _explain_not_taken(opened: AgentContext, session: str) -> SessionTaken | SessionOver:
    (row,) = await opened.store.ask(Query("session", SessionRow, {"session": session}))
    if row.ended_at is not None:
        return SessionOver(f"Session {session} is over ({row.state}, {row.terminal_reason}): begin another one.")
    if newer := explain_newer_format(row):
        return SessionTaken(newer)
    return SessionTaken(f"Another process, {row.owner}, works on session {session}: wait for it, or cancel it there.")


class GuardedSession:
    """One session of a program."""

    def __init__(
        self,
        opened: AgentContext,
        running: SessionRuntime,
        seen: int,
        tools: dict[str, Tool],
        brake: CallBrake | None,
    ) -> None:
        self._context = opened
        self._runtime = running
        self._seen_calls = seen
        self._tools = tools
        self._brake = brake
        self._models: dict[str, ExternalModel] = {}
        self._end: tuple[State, TerminalReason] | None = None
        self._paused = False

    @property
    def id(self) -> str:
        """The session's id; pass it to `Guard.session` to resume."""
        return self._runtime.lease.session

    async def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Calls a tool through the guard. Waits while a person has to decide, or while other holds take up the money.

        The answer has an outcome, also where the call was refused. After a halt or at a cap the session ends with its
        block, and each further call is refused in the same way.
        """
        call = self._make_call(tool, arguments)
        async with nullcontext() if self._brake is None else self._brake.order(call.tool):
            return await self._apply_answer(call, await self._runtime.call(call))

    async def attempt(
        self, call: str, tool: str | FunctionTool, /, **arguments: Any
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Calls a tool through the guard without waiting. After a decision, try the same call again by its id.

        An id that was settled before returns the same answer: nothing is done twice.
        """
        named = self._make_call(tool, arguments)
        named = msgspec.structs.replace(named, id=f"{self.id}.{call}")
        return await self._try(named)

    async def act(
        self, spec: ToolSpec, arguments: Mapping[str, Any], do: Act, *, name: str = "", wait: bool = False
    ) -> Any:
        """Makes a call whose effect is the caller's own: the guard admits it, `do` has it, the guard settles it.

        Returns what `do` returns, and raises what it raises. Raises EffectRefused if a brake refuses it. If a person
        has to decide first, it waits for them, or without `wait` raises DecisionPending: then make the same call again,
        with the same `name`. A name that was settled before returns the same answer: nothing is done twice.
        """
        tool = self._tools.setdefault(spec.name, ExternalTool(spec))
        if not isinstance(tool, ExternalTool):
            raise ConfigError(f"{spec.name} is a tool of this guard already: call it with `call`.")
        call = self._make_call(spec.name, arguments)
        call = msgspec.structs.replace(call, id=f"{self.id}.{name}") if name else call
        tool.expect(call.id, do)
        while not isinstance(answer := await self._try(call), Answer):
            if isinstance(answer, BudgetBusy):
                await self._context.app.clock.sleep(SHORT_REST)
            elif wait:
                await self._runtime.wait_for_decision([answer])
            else:
                raise DecisionPending(answer.decision, spec.name)
        if answer.outcome not in ("ok", "error"):
            raise EffectRefused(answer.text, answer.outcome)
        return tool.result(call.id, answer.text)

    async def _try(self, call: Call) -> Answer | ApprovalRequired | BudgetBusy:
        async with nullcontext() if self._brake is None else self._brake.order(call.tool):
            answer = await self._runtime.attempt(call)
            return await self._apply_answer(call, answer) if isinstance(answer, Answer) else answer

    async def _apply_answer(self, call: Call, answer: Answer) -> Answer:
        """Takes an answer in: it may end the session, and the brake knows what it said."""
        if self._brake is not None:
            self._brake.observe(call, answer)
        self._end = self._end or await self._runtime.find_end(answer)
        return answer

    async def ask(
        self, model: str, sent: str, do: Ask[R], *, max_output_tokens: int = 4096, attached: tuple[Text, ...] = ()
    ) -> R:
        """Makes a model request that is the caller's own: its most is held, `do` asks, and the true cost is settled.

        `sent` is everything that is sent, as text: the journal keeps it, and its size bounds the input. `attached` is
        what is no text, each with its tokens. `do` is told how many output tokens fit. Raises EffectRefused if a
        brake refuses it, and what `do` raises.
        """
        known = self._models.setdefault(model, ExternalModel(model))
        request = self.next_request()
        known.expect(request, do)
        said = Message("user", (Text(sent), *attached))
        prompt = Prompt(messages=(said,), max_output_tokens=max_output_tokens)
        match await self.request(ModelRequest(id=request, prompt=prompt), known):
            case RefusedRequest(sentence=sentence, outcome=outcome):
                raise EffectRefused(sentence, outcome)
            case FailedRequest(outcome="external_halt" | "timeout" as outcome, error=error):
                raise EffectRefused(error, outcome)
            case AnsweredRequest() | FailedRequest():
                return known.result(request)

    def model(self, client: R, *, provider: str = "") -> R:
        """Returns a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        return guard_client(client, lambda: nullcontext(self), None, provider)

    def next_request(self) -> str:
        """Returns the id of a request that is made next."""
        self._seen_calls += 1
        return f"{self.id}.{self._runtime.lease.generation}.{self._seen_calls}"

    async def request(self, request: ModelRequest, model: Model) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Makes a model request, of a model of the caller's own. After a halt or at a cap the session ends."""
        answer = await self._runtime.request(request, model, patient=False)
        if isinstance(answer, AnsweredRequest):
            self._end = self._end or (("BUDGET_EXCEEDED", "overrun") if answer.overrun else None)
        else:
            self._end = self._end or _end_of_request(answer.outcome)
        return answer

    @property
    def prices(self) -> Prices:
        return Prices(self._context.agent.policy.prices)

    async def until_halted(self) -> EffectRefused:
        """Waits until a halt reaches this session, which then ends by it, and returns the refusal to raise."""
        while await self._runtime.find_halt() is None:
            await self._runtime.pause(HOUR)
        self._end = self._end or ("HALTED", "external_halt")
        return EffectRefused("A halt ended this session.", "external_halt")

    async def near_budget(self) -> bool:
        """Says whether 80 % of a cap is spent or held: of this session, its agent or the fleet."""
        return await self._runtime.is_near_budget()

    async def pause(self) -> None:
        """Leaves the session until a person has decided; `Guard.session` resumes it by its id."""
        (row,) = await self._context.store.ask(Query("session", SessionRow, {"session": self.id}))
        self._paused = await self._runtime.park("WAITING_FOR_APPROVAL", row.inbox_head)

    async def receipt(self) -> Receipt:
        """Returns the receipt so far."""
        return receipt_of(await self._runtime.events())

    async def end(self, state: State, reason: TerminalReason) -> None:
        """Ends the session, unless it is paused; a tripped brake overrides state and reason."""
        if not self._paused:
            await self._runtime.end(*(self._end or (state, reason)))

    def _make_call(self, tool: str | FunctionTool, arguments: Mapping[str, Any]) -> Call:
        self._seen_calls += 1
        call = f"{self.id}.{self._runtime.lease.generation}.{self._seen_calls}"
        return Call(call, _name(tool), _json(arguments), brake=None if self._brake is None else self._brake.brake)


def guard_client(
    client: R,
    open_session: Callable[[], AbstractAsyncContextManager[GuardedSession]],
    thread: "LoopThread | None",
    provider: str,
) -> R:
    from halter.adapters import sdk_clients

    return sdk_clients.guard_client(client, open_session, thread, provider)


def _end_of_request(outcome: Outcome) -> tuple[State, TerminalReason] | None:
    match outcome:
        case "external_halt":
            return ("HALTED", "external_halt")
        case "cost_cap_reached":
            return ("BUDGET_EXCEEDED", "cost_cap_reached")
        case _:
            return None


def _name(tool: str | FunctionTool) -> str:
    return tool if isinstance(tool, str) else tool.spec.name


def _json(arguments: Mapping[str, Any]) -> bytes:
    return canonical_json(msgspec.to_builtins(dict(arguments)))
