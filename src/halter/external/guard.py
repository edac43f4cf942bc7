"""The guard as an object, for programs that have their own loop.

```python
guard = Guard("runs.db", agent="desk", max_cost_usd=1.00)

@guard.tool(level="CONTROLLED", cost=0.02)
async def send(to: str, text: str) -> str: ...

async with guard, guard.session("answer the mail") as session:
    answer = await session.call("send", to="ada", text="hello")
```

Every call passes the same checks as the calls of an agent, in this order: halts, grants, rates, money, approvals. The
journal records it before it runs. After a crash, the program resumes from the journal.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from copy import copy
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import msgspec

from halter.config.resolve import read_model_rates, resolve_policy
from halter.config.tool_names import check_named_tools, list_named_tools
from halter.core.clock import HOUR, SECOND
from halter.core.errors import ConfigError, HalterError, LeaseLost
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import session_stream
from halter.core.messages import Message, Model, Prompt, Text
from halter.core.money import Usd, micros_to_usd
from halter.core.ports import Query, read_body, read_stream
from halter.core.renamed import RenamedAttribute
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.text import decode_body, reject_unknown_options, write_out_options
from halter.core.tools import Tool, ToolSpec
from halter.core.vocabulary import Outcome, State, TerminalReason
from halter.external.effects import Act, Ask, DecisionPending, EffectRefused, ExternalModel, ExternalTool
from halter.external.loop_thread import Blocking, LoopThread
from halter.external.session import SessionHost
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.external_provenance import ExternalProvenanceCheck, make_external_check
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.loop.session_runtime import SessionRuntime
from halter.models.price_tables import make_prices
from halter.models.providers import Prices
from halter.runtime.agent import (
    MODEL_KEYS,
    AgentProgram,
    ProgramOptions,
    parse_agent_options,
    reject_unread_keys,
    resolve_secrets,
)
from halter.runtime.agent_context import AgentContext, Models
from halter.runtime.assembly.agent_tools import index_tools
from halter.runtime.assembly.assembled_agent import AssembledAgent
from halter.runtime.assembly.protected_paths import list_protected_paths, protect_tools
from halter.runtime.budgets import Budget, read_current_budgets, render_budgets
from halter.runtime.runtime import Runtime
from halter.spec.models import BrainSpec
from halter.state import lifecycle
from halter.state.receipt import Receipt, make_receipt
from halter.tools.function_tool import FunctionTool, canonical_json

R = TypeVar("R")
_LOOP_KEYS: Final = (
    *("model", "fallback_models", "model_for", *MODEL_KEYS, "script"),
    *("hot_state", "collections", "verbs", "review", "notify", "anonymize"),
)
"""The keys of an agent file that only the loop of an agent reads."""
_REOPENABLE_REASONS: Final = frozenset({"error", "external_halt"})
"""The reasons of an end after which the caller of a session may repeat what it has not recorded."""
MAX_REPORT_SESSIONS: Final = 1_000_000
BUDGET_RETRY_DELAY: Final = SECOND
MAX_DEFERRAL: Final = SECOND // 20
"""The time after which a deferred settlement is committed if the session makes no other commit."""


class GuardOptions(ProgramOptions, total=False):
    """Options of a guard. `simulates` is a model that predicts what dangerous calls would do."""

    simulates: Model


class GuardSummary(msgspec.Struct, frozen=True):
    """A summary of what a guard's agent did and spent, in dollars."""

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

    @write_out_options(GuardOptions)
    def __init__(self, store: str | Path, agent: str = "program", **options: Unpack[GuardOptions]) -> None:
        reject_unknown_options(options, GuardOptions.__optional_keys__, "a guard")
        super().__init__(agent, store, options)
        self._agent = agent
        self._simulates = options.get("simulates")
        self._external = False
        self._sessions = set[GuardedSession]()

    @asynccontextmanager
    async def session(self, task: str = "", *, id: str | None = None) -> AsyncGenerator["GuardedSession"]:  # noqa: A002 The public name.
        """Start a session, or resume the one with that id. After a crash, calls in doubt are resolved first.

        The session ends with the block: as completed, as an error if the block raises, or for the reason for which the
        guard stopped it.
        """
        session = await self._resume_or_begin(task, id)
        self._sessions.add(session)
        try:
            yield session
        except DecisionPending:
            await session.pause()
            raise
        except Exception:
            with suppress(LeaseLost):
                await session.end("ERROR", "error")
            raise
        except BaseException:
            with suppress(LeaseLost):
                await session.leave_open()
            raise
        else:
            await session.end("COMPLETED", "completed")
        finally:
            self._sessions.discard(session)
            session.cancel_flush()

    async def _flush_sessions(self) -> None:
        """Commit what open sessions have returned to the program but deferred, so that a query sees it."""
        for session in tuple(self._sessions):
            with suppress(LeaseLost):
                await session.flush_deferred()

    async def has_started(self, session: str) -> bool:
        """Return true if a session with this id has started."""
        row = await self._find_row(session)
        return row is not None and row.started_at > 0

    async def has_ended(self, session: str) -> bool:
        """Return true if a session with this id has started and ended."""
        row = await self._find_row(session)
        return row is not None and row.ended_at is not None

    async def reopen(self, session: str) -> bool:
        """Reopen a session of this agent that an error or a halt ended; return whether it is open.

        Its costs still count, its settled calls are not made again, and its decisions still apply.
        """
        row = await self._find_row(session)
        if row is None or row.agent != self._agent or explain_newer_format(row):
            return False
        if row.ended_at is not None and row.terminal_reason not in _REOPENABLE_REASONS:
            return False
        key, by = f"{session}/{row.generation}/reopened", self._settings.person
        await self._open_context().store.commit(lifecycle.reopen_session(session, key, by))
        return not await self.has_ended(session)

    async def _find_row(self, session: str) -> SessionRow | None:
        rows = await self._open_context().store.ask(Query("session", SessionRow, {"session": session}))
        return next(iter(rows), None)

    @property
    def max_cost_usd(self) -> float | None:
        """The cap of a session that the program configures; None if it configures none."""
        cap = self._options.get("max_cost_usd", "none")
        return None if cap == "none" else float(cap)

    def copy_closed(self) -> "Guard":
        """Copy the guard for another event loop. The copy is not open, whether this one is or not."""
        guard = copy(self)
        vars(guard).update(_stack=None, _open=None, _open_for_call=None, _sessions=set())
        return guard

    def blocking(self) -> "BlockingGuard":
        """Return the guard for a program that is not async."""
        return BlockingGuard(self)

    def allow_external_tools(self) -> None:
        """Allow the policy to name tools that the caller declares only at their first call."""
        self._external = True

    async def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Make one call in a new session."""
        async with self.session(f"call {_name(tool)}") as session:
            return await session.call(tool, **arguments)

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard, each in a new session.

        `provider` names the provider in the fleet's prices, for a server that speaks the protocol of another one.
        """
        self._open_context()
        return guard_client(client, lambda: self.session("A request of an SDK's client."), None, provider)

    async def report(self) -> GuardSummary:
        """Return what this agent did and spent, its budgets, and the decisions that wait for a person."""
        app, params = self._open_context().app, {"agent": self._agent}
        await self._flush_sessions()
        store, now = app.store, app.clock.now()
        session_rows = await store.ask(Query("sessions_of_agent", SessionRow, {**params, "limit": MAX_REPORT_SESSIONS}))
        rows = await store.ask(Query("spent_by_name", _Spent, params))
        by_name = {each.name: each.usd for each in rows}
        return GuardSummary(
            agent=self._agent,
            sessions=len(session_rows),
            running=sum(row.ended_at is None for row in session_rows),
            cost_usd=micros_to_usd(sum(by_name.values())),
            cost_by_name_usd={name: micros_to_usd(micros) for name, micros in by_name.items()},
            budgets=tuple(await render_budgets(store, await read_current_budgets(store, now))),
            needs_you=tuple(await list_pending_decisions(store, now)),
        )

    async def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Return the receipts of this agent's sessions, newest first."""
        context = self._open_context()
        params = {"agent": self._agent, "limit": limit}
        await self._flush_sessions()
        session_rows = await context.app.store.ask(Query("sessions_of_agent", SessionRow, params))
        return tuple(
            [make_receipt(await read_stream(context.store, session_stream(row.session))) for row in session_rows]
        )

    async def _resume_or_begin(self, task: str, session: str | None) -> "GuardedSession":
        agent_context = self._open_context()
        event = SessionStarted(
            session=session or agent_context.app.ids.make(),
            agent=self._agent,
            kind="task",
            started_by=self._settings.person,
        )
        host = SessionHost(agent_context.app, agent_context.worker)
        await host.record_start(event, agent_context.agent.policy, task, agent_context.guard().redact)
        row = await host.read_row(event.session)
        # If it is owned and open, wait until the lease of a dead owner would expire.
        is_over = row.ended_at is not None or explain_newer_format(row)
        lease = await host.acquire_lease(event.session, 0 if is_over else agent_context.hold_timeout)
        if lease is None:
            raise await _make_claim_error(agent_context, event.session)
        context, tools = agent_context.agent.make_context(event.session), dict(agent_context.agent.tools)
        runtime = SessionRuntime(
            agent_context.store, agent_context.app.clock, agent_context.guard(), lease, context, tools
        )
        runtime.sleeps_at_cap = context.policy.on_cap == "wait"
        events = await runtime.resume()
        brake = make_external_check(agent_context.agent.policy.provenance, agent_context.agent.policy, tools)
        if brake is not None:
            for stored in events:
                body = await read_body(agent_context.store, stored)
                if isinstance(stored.event, SessionStarted):
                    brake.add_task(decode_body(body))
                brake.recall(stored, body)
            brake.add_task(agent_context.guard().redact(task))
        return GuardedSession(agent_context, runtime, len(events), tools, brake)

    async def _assemble(self, app: Runtime, stack: AsyncExitStack) -> tuple[AssembledAgent, Models]:
        reject_unread_keys(self._options, "the guard's policy")
        if unread := next((key for key in self._options.get("policy", {}) if key in _LOOP_KEYS), ""):
            raise ConfigError(
                f"the guard's policy: `{unread}` has no effect in a guard: only an agent's own loop reads it."
            )
        agent = parse_agent_options(self._agent, self._options, "the guard's policy", {}, {})
        policy = resolve_policy(app.fleet, agent)
        tools = index_tools(self._tools)
        protect_tools(self._tools, list_protected_paths(self._settings, None, None))
        specs = [tool.spec for tool in self._tools]
        if self._external:
            unknown = {name for _, name in list_named_tools(agent)} - {spec.name for spec in specs}
            specs += [ToolSpec(name=name, description="", schema=b"{}") for name in sorted(unknown)]
        check_named_tools(policy, agent, specs)
        model, model_settings = self._simulates, BrainSpec(rates=read_model_rates(app.fleet))
        if model is not None:
            model_settings = msgspec.structs.replace(model_settings, model_for={"simulation": str(model.name)})
        assembled = AssembledAgent(
            policy=policy,
            model_settings=model_settings,
            tools=tools,
            secrets=resolve_secrets(self._options, self._environ),
        )
        return assembled, Models(app, assembled, {} if model is None else {str(model.name): model})


class _Spent(msgspec.Struct, frozen=True):
    name: str
    usd: int


class SessionInUse(HalterError):
    """The session cannot be resumed: another process runs it."""


class SessionAlreadyEnded(HalterError):
    """The session cannot be resumed: it has ended."""


async def _make_claim_error(context: AgentContext, session: str) -> SessionInUse | SessionAlreadyEnded:
    (row,) = await context.store.ask(Query("session", SessionRow, {"session": session}))
    if row.ended_at is not None:
        return SessionAlreadyEnded(
            f"Session {session} has ended ({row.state}: {row.terminal_reason}). Start a new one."
        )
    if newer := explain_newer_format(row):
        return SessionInUse(newer)
    return SessionInUse(f"Session {session} is running in another process ({row.owner}). Wait for it, or cancel it.")


class GuardedSession:
    """One session of a program. Its calls and model requests pass the guard."""

    def __init__(
        self,
        context: AgentContext,
        runtime: SessionRuntime,
        call_count: int,
        tools: dict[str, Tool],
        provenance_check: ExternalProvenanceCheck | None,
    ) -> None:
        self._context = context
        self._runtime = runtime
        self._call_count = call_count
        self._tools = tools
        self._provenance_check = provenance_check
        self._models: dict[str, ExternalModel] = {}
        self._end: tuple[State, TerminalReason] | None = None
        self._paused = False
        self.can_defer = False
        """True if the caller makes one effect after the other, so that a settlement may go with the next intent."""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flush_task: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        """The session's id; pass it to `Guard.session` to resume."""
        return self._runtime.lease.session

    async def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Call a tool through the guard. Waits for a person's decision, and while other holds use up the budget.

        The answer has an outcome, also for a refused call. After a halt or at a cap, the session ends with its block,
        and each further call is refused for the same reason.
        """
        call = self._make_call(tool, arguments)
        async with nullcontext() if self._provenance_check is None else self._provenance_check.order(call.tool):
            return await self._apply_answer(call, await self._runtime.call(call))

    async def attempt(
        self, call: str, tool: str | FunctionTool, /, **arguments: Any
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Call a tool through the guard without waiting. After a decision, repeat the call with the same id.

        A settled id returns the same answer again: no effect happens twice.
        """
        identified = self._make_call(tool, arguments)
        identified = msgspec.structs.replace(identified, id=f"{self.id}.{call}")
        return await self._try(identified)

    async def act(
        self, spec: ToolSpec, arguments: Mapping[str, Any], do: Act, *, name: str = "", wait: bool = False
    ) -> Any:
        """Make a call whose effect is the caller's own: the guard admits it, `do` performs it, the guard settles it.

        Returns what `do` returns, and raises what it raises. Raises EffectRefused if the guard refuses the call. If a
        person has to decide first, the call waits; without `wait` it raises DecisionPending, and you repeat the call
        with the same `name` after the decision. A settled name returns the same answer again: no effect happens twice.
        """
        tool = self._tools.setdefault(spec.name, ExternalTool(spec))
        if not isinstance(tool, ExternalTool):
            raise ConfigError(f"{spec.name} is already a tool of this guard. Call it with `call`.")
        call = self._make_call(spec.name, arguments)
        call = msgspec.structs.replace(call, id=f"{self.id}.{name}") if name else call
        # Only a read may be in doubt after a crash although it has returned: it can be repeated.
        call = msgspec.structs.replace(call, can_defer=self.can_defer and spec.effect == "read")
        tool.expect(call.id, do)
        while not isinstance(answer := await self._try(call), Answer):
            if isinstance(answer, BudgetBusy):
                await self._context.app.clock.sleep(BUDGET_RETRY_DELAY)
            elif wait:
                await self._runtime.wait_for_decision([answer])
            else:
                raise DecisionPending(answer.decision, spec.name)
        if name and not tool.has_result(call.id) and await self._can_be_made_again(call, answer):
            return await self.act(spec, arguments, do, name=f"{name}.again", wait=wait)
        if answer.outcome not in ("ok", "error"):
            raise EffectRefused(answer.text, answer.outcome)
        return tool.result(call.id, answer.text)

    async def _can_be_made_again(self, call: Call, answer: Answer) -> bool:
        """Return whether a settled name may be used for a new call: the earlier one failed, or was another call."""
        if answer.outcome != "ok":
            return answer.outcome in ("error", "cancelled")
        for stored in await self._runtime.events():
            if isinstance(made := stored.event, CallStarted) and made.call == call.id:
                redact = self._context.guard().redact
                made_text = decode_body(await read_body(self._context.store, stored))
                is_same = made.tool == redact(call.tool) and redact(decode_body(call.arguments)) in (
                    made_text,
                    redact(made_text),
                )
                # A person may have edited the arguments of a call that was asked about.
                return not (is_same or made.decision)
        return False

    async def _try(self, call: Call) -> Answer | ApprovalRequired | BudgetBusy:
        async with nullcontext() if self._provenance_check is None else self._provenance_check.order(call.tool):
            answer = await self._runtime.attempt(call)
            self._flush_soon()
            return await self._apply_answer(call, answer) if isinstance(answer, Answer) else answer

    async def _apply_answer(self, call: Call, answer: Answer) -> Answer:
        """Register an answer: its text with the provenance check, and the session's end if it causes one."""
        if self._provenance_check is not None:
            self._provenance_check.observe(call, answer)
        self._end = self._end or await self._runtime.find_end(answer)
        return answer

    async def ask(
        self, model: str, sent: str, do: Ask[R], *, max_output_tokens: int = 4096, attached: tuple[Text, ...] = ()
    ) -> R:
        """Make a model request of the caller's own: the guard holds its maximum cost, `do` makes it, the guard settles.

        `sent` is everything that is sent, as text. The journal records it, and its size bounds the input. `attached`
        are the parts that are not text, each with its tokens. `do` gets the number of output tokens that fit the
        budget. Raises EffectRefused if the guard refuses the request, and what `do` raises.
        """
        external_model = self._models.setdefault(model, ExternalModel(model))
        request = self.next_request()
        external_model.expect(request, do)
        message = Message("user", (Text(sent), *attached))
        prompt = Prompt(messages=(message,), max_output_tokens=max_output_tokens)
        match await self.request(ModelRequest(id=request, prompt=prompt, can_defer=self.can_defer), external_model):
            case RefusedRequest(sentence=sentence, outcome=outcome):
                raise EffectRefused(sentence, outcome)
            case FailedRequest(outcome="external_halt" | "timeout" as outcome, error=error):
                raise EffectRefused(error, outcome)
            case AnsweredRequest() | FailedRequest():
                return external_model.result(request)

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        return guard_client(client, lambda: nullcontext(self), None, provider)

    def next_request(self) -> str:
        """Return a new id for the next request."""
        self._call_count += 1
        return f"{self.id}.{self._runtime.lease.generation}.{self._call_count}"

    async def request(self, request: ModelRequest, model: Model) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Make a request to a model of the caller's own. After a halt or at a cap, the session ends."""
        answer = await self._runtime.request(request, model, can_wait_for_cap=False)
        self._flush_soon()
        if isinstance(answer, AnsweredRequest):
            self._end = self._end or (("BUDGET_EXCEEDED", "overrun") if answer.overrun else None)
        else:
            self._end = self._end or _end_of_request(answer.outcome)
        return answer

    @property
    def prices(self) -> Prices:
        return make_prices(self._context.agent.policy, self._context.app.prices.tables)

    async def wait_until_halted(self) -> EffectRefused:
        """Wait until a halt applies to this session, mark the session as halted, and return the refusal to raise."""
        while await self._runtime.find_halt() is None:
            await self._runtime.pause(HOUR)
        self._end = self._end or ("HALTED", "external_halt")
        return EffectRefused("A halt ended this session.", "external_halt")

    async def is_near_budget(self) -> bool:
        """Return true if a cap of this session, its agent or the fleet is used up except for its reserve."""
        await self.flush_deferred()
        return await self._runtime.is_near_budget()

    until_halted = RenamedAttribute("wait_until_halted")
    near_budget = RenamedAttribute("is_near_budget")

    async def pause(self) -> None:
        """Park the session until a person has decided. Pass its id to `Guard.session` to resume it."""
        if self._paused:
            return
        (row,) = await self._context.store.ask(Query("session", SessionRow, {"session": self.id}))
        self._paused = await self._runtime.park("WAITING_FOR_APPROVAL", row.inbox_head)

    async def pause_if_asked(self) -> None:
        """Park the session if a question of it is open: its end would withdraw the question."""
        store, now = self._context.store, self._context.app.clock.now()
        if self._end is None and await lifecycle.read_questions(store, self.id, now):
            await self.pause()

    async def receipt(self) -> Receipt:
        """Return the session's receipt up to now."""
        await self.flush_deferred()
        return make_receipt(await self._runtime.events())

    async def end(self, state: State, reason: TerminalReason) -> None:
        """End the session unless it is paused. If the guard stopped it, the guard's state and reason apply instead."""
        self.cancel_flush()
        if self._paused:
            return
        if state == "ERROR":
            await self._runtime.ensure_running()
        end = self._end or (state, reason)
        if state == "ERROR" and end[1] == "overrun":
            # The overrun would have ended the session at its next step. The error ended it before.
            end = state, reason
        if not await self._runtime.end(*end):
            await self._runtime.release()

    async def leave_open(self) -> None:
        """Leave the session to its next caller, as after a kill: settle what is deferred, and release the lease."""
        await self.flush_deferred()
        await self._runtime.release()

    async def flush_deferred(self) -> None:
        """Commit the settlements that wait for the session's next commit."""
        await self._runtime.flush_deferred()

    def cancel_flush(self) -> None:
        """Cancel the commit of a deferred settlement by itself. A commit that has begun is finished."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self._flush_task is not None:
            self._flush_task.cancel()

    def _flush_soon(self) -> None:
        """Commit a deferred settlement after a short time, unless another commit takes it along."""
        if not self.can_defer:
            return
        self.cancel_flush()
        loop = asyncio.get_running_loop()
        self._flush_timer = loop.call_later(MAX_DEFERRAL / SECOND, self._start_flush)

    def _start_flush(self) -> None:
        self._flush_task = asyncio.ensure_future(self._flush_until_committed())

    async def _flush_until_committed(self) -> None:
        """Commit the deferred settlements, and repeat what fails until the session's next commit takes it along."""
        pause = MAX_DEFERRAL
        with suppress(LeaseLost):
            while not await self._try_flush():
                await self._context.app.clock.sleep(pause)
                pause = min(2 * pause, SECOND)

    async def _try_flush(self) -> bool:
        try:
            await self._runtime.flush_deferred()
        except LeaseLost:
            raise
        except Exception:  # noqa: BLE001  The session's next commit, at the latest its end, raises what persists.
            return False
        return True

    def _make_call(self, tool: str | FunctionTool, arguments: Mapping[str, Any]) -> Call:
        self._call_count += 1
        call = f"{self.id}.{self._runtime.lease.generation}.{self._call_count}"
        return Call(
            call,
            _name(tool),
            _json(arguments),
            provenance_check=None if self._provenance_check is None else self._provenance_check.provenance_check,
        )


def guard_client(
    client: R,
    open_session: Callable[[], AbstractAsyncContextManager[GuardedSession]],
    thread: LoopThread | None,
    provider: str,
) -> R:
    from halter.external import sdk_clients

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


class BlockingGuard(Blocking):
    """A guard with blocking calls."""

    NOUN = "guard"
    _opened: Guard

    @contextmanager
    def session(self, task: str = "", *, id: str | None = None) -> Generator["BlockingSession"]:  # noqa: A002 The public name.
        """Start a session, or resume the one with that id, as `Guard.session` does."""
        thread, manager = self._open(), self._opened.session(task, id=id)
        session = BlockingSession(thread.run(manager.__aenter__()), thread)
        try:
            yield session
        except BaseException as error:
            if not thread.run(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            thread.run(manager.__aexit__(None, None, None))

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Make one call in a new session."""
        return self._open().run(self._opened.call(tool, **arguments))

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard, as `Guard.model` does."""
        return guard_client(
            client, lambda: self._opened.session("A request of an SDK's client."), self._open(), provider
        )

    def report(self) -> GuardSummary:
        """Return what this agent did and spent, its budgets, and the decisions that wait for a person."""
        return self._open().run(self._opened.report())

    def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Return the receipts of this agent's sessions, newest first."""
        return self._open().run(self._opened.receipts(limit))


class BlockingSession:
    """One session of a program that is not async. `guarded` is the async session in the guard's thread."""

    def __init__(self, guarded: GuardedSession, thread: LoopThread) -> None:
        self.guarded = guarded
        self.thread = thread

    @property
    def id(self) -> str:
        """The session's id; pass it to `session` to resume."""
        return self.guarded.id

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Call a tool through the guard, as `GuardedSession.call` does."""
        return self.thread.run(self.guarded.call(tool, **arguments))

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        return guard_client(client, lambda: nullcontext(self.guarded), self.thread, provider)

    def is_near_budget(self) -> bool:
        """Return true if a cap of this session, its agent or the fleet is used up except for its reserve."""
        return self.thread.run(self.guarded.is_near_budget())

    near_budget = RenamedAttribute("is_near_budget")

    def receipt(self) -> Receipt:
        """Return the session's receipt up to now."""
        return self.thread.run(self.guarded.receipt())
