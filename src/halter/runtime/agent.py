"""An agent as an object, for programs.

```python
agent = Agent("desk", model="anthropic:claude-sonnet-5-5", store="runs.db", instructions="You keep the desk.")

@agent.tool(level="SAFE", effect="read")
async def weather(city: str) -> str: ...

result = agent.run_sync("Is it going to rain in Oslo?")
print(result.text, result.cost_usd)
```

The agent runs like an agent of a folder: guarded, capped, journaled, and resumed after any crash. Use it as an async
context manager to keep its store open between runs.
"""

import asyncio
import inspect
import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, Self, TypedDict, Unpack, cast, overload

from msgspec.structs import replace
from typing_extensions import TypeVar

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError
from halter.core.ids import SessionId, make_worker_id
from halter.core.messages import Message, Model, StreamChunk
from halter.core.money import DOLLAR, micros_to_usd
from halter.core.options import reject_unknown_options, write_out_options
from halter.core.renamed import RenamedAttribute
from halter.core.text import join_names
from halter.core.tools import Tool, ToolServer
from halter.core.vocabulary import SessionKind, State
from halter.settings import Settings, find_home, read_settings
from halter.tasks.result import CompletedResult, EndedBefore, StoppedResult, read_answer
from halter.tools import function_tool
from halter.tools.answer_form import AnswerForm, Validator
from halter.tools.function_tool import FunctionTool, ToolOptions

# The functions below import the runtime lazily, so that a program that only defines its agent starts fast.
if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from halter.config.agent_files import AgentFile
    from halter.config.definition import AgentDefinition
    from halter.config.merge import FleetConfig
    from halter.config.yaml_reader import Document
    from halter.core.tools import File
    from halter.guard.call_answer import ApprovalRequired
    from halter.journal.store_retry import ReportProblem
    from halter.loop.observer import LoopObserver
    from halter.loop.session_waits import WaitListener
    from halter.redaction.secrets import Secrets
    from halter.runtime.agent_runtime import AgentRuntime
    from halter.runtime.runtime import Runtime
    from halter.runtime.session_runner import NewSession
    from halter.spec.models import BrainSpec
    from halter.state.receipt import Receipt
    from halter.tasks.agent_tool import AgentTool
    from halter.tasks.conversation import Conclusion, Conversation
    from halter.tasks.run_events import RunEvent

T = TypeVar("T")
DepsT = TypeVar("DepsT", default=Any)
OutputT = TypeVar("OutputT", default=str)
F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("halter")


class ProgramOptions(TypedDict, total=False):
    """Options of a guard or an agent, all optional.

    `policy` holds keys of an agent file (`mode`, `limits`, `policy`, `phases`, `secrets`, …). `fleet` holds keys of the
    fleet file, or is its path. `max_cost_usd` is the cap of one session. `secrets` are values by name. `lease` is the
    number of seconds for which a dead process keeps its sessions. `tell` is called with a sentence when the store
    becomes unavailable, and with an empty string when it is available again; writes wait in between. `clock` and
    `environ` default to the system's. With `new`, a store whose file is gone begins anew, if only programs used it.
    """

    policy: Mapping[str, Any]
    fleet: Mapping[str, Any] | str | Path
    max_cost_usd: float | Decimal | Literal["none"]
    secrets: Mapping[str, str]
    tools: Sequence[Tool]
    settings: Settings
    person: str
    lease: float
    tell: "ReportProblem"
    clock: Clock
    environ: Mapping[str, str]
    new: bool


class _OpenContext:
    """An async context manager over a context that stays open after the block."""

    def __init__(self, agent: "AgentRuntime") -> None:
        self._context = agent

    async def __aenter__(self) -> "AgentRuntime":
        return self._context

    # Static: a bound method would stay in memory for each run that waits.
    @staticmethod
    async def __aexit__(*_: object) -> None: ...


class PolicyWarning(UserWarning):
    """The store's policy overrides what the program configures for its fleet."""


class AgentProgram(ABC):
    """The base of Agent and Guard. It takes tools until its store is opened, and acts only while the store is open."""

    NOUN: ClassVar[str]

    def __init__(self, name: str, store: str | Path, options: ProgramOptions) -> None:
        self._name = name
        self._options = options
        self._environ = options.get("environ", os.environ)
        self._settings = resolve_settings(str(store), options, self._environ)
        self._tools: list[Tool] = list(options.get("tools", ()))
        self._stack: AsyncExitStack | None = None
        self._open: AgentRuntime | None = None
        self._open_for_call: AbstractAsyncContextManager[AgentRuntime] | None = None

    @overload
    def tool(self, function: Callable[..., Any], /, **options: Unpack[ToolOptions]) -> FunctionTool: ...
    @overload
    def tool(self, /, **options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
    def tool(
        self, function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
    ) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
        """Make a tool of a typed function: `@guard.tool`, `@agent.tool(level="SAFE")`."""
        if function is None:
            return lambda function: self.tool(function, **options)
        if self._open is not None:
            raise ConfigError(f"Cannot add the tool {function.__name__}: the {self.NOUN} is already open.")
        new_tool = function_tool.tool(function, **options)
        self._tools.append(new_tool)
        return new_tool

    @property
    def is_open(self) -> bool:
        return self._open is not None

    async def __aenter__(self) -> Self:
        """Open the store and start to renew leases."""
        async with AsyncExitStack() as stack:
            self._open = await stack.enter_async_context(self._opening())
            self._open_for_call = _OpenContext(self._open)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        stack, self._stack, self._open, self._open_for_call = self._stack, None, None, None
        if stack is not None:
            await stack.__aexit__(kind, error, trace)

    async def is_near_budget(self, session: str = "") -> bool:
        """Return true if a cap of the agent or the fleet, or of the session, is used up except for its reserve."""
        context = self._open_context()
        if session:
            return await self._is_session_near_budget(context, session)
        return await context.guard().is_near_budget(context.make_context(session))

    async def _is_session_near_budget(self, agent: "AgentRuntime", session: str) -> bool:
        """Return whether a session without a wrap-up is near a cap."""
        return await agent.guard().is_near_budget(agent.make_context(session))

    near_budget = RenamedAttribute("is_near_budget")

    @asynccontextmanager
    async def _opening(self) -> "AsyncGenerator[AgentRuntime]":
        """Open the store, bind its policy, renew leases and assemble the agent."""
        from halter.dispatch.heartbeat import renew_leases
        from halter.journal.store_retry import ignore_problem
        from halter.runtime.assembly.agent_builder import open_agent
        from halter.runtime.runtime import DEFAULT_LEASE_DURATION, follow_prices, open_runtime
        from halter.runtime.telemetry.tracer import trace_process

        options, fleet = self._options, self._read_fleet()
        lease = round(options.get("lease", DEFAULT_LEASE_DURATION / SECOND) * SECOND)
        opened_app = open_runtime(
            self._settings,
            options.get("clock"),
            self._environ,
            lease=lease,
            load_fleet=lambda _: fleet,
            by_program=True,
            begins_anew=options.get("new", False),
        )
        async with opened_app as app, AsyncExitStack() as stack:
            if app.policy is not None and (sentence := app.policy.describe_difference()):
                warnings.warn(sentence, PolicyWarning, stacklevel=2)
            worker = make_worker_id(self._name, app.ids)
            app.store_problem.report = options.get("tell", ignore_problem)
            await stack.enter_async_context(trace_process(app, _LOG.warning))
            await stack.enter_async_context(renew_leases(app.patient(), app.clock, worker, max(lease // 3, 1)))
            await stack.enter_async_context(follow_prices(app))
            # The store must know the worker before it owns a session: see `start_session`.
            await app.patient().beat(worker)
            agent = await stack.enter_async_context(open_agent(app, self._assemble, worker))
            yield replace(agent, hold_timeout=lease + SECOND, sleeps_at_cap=False)

    @abstractmethod
    async def _assemble(self, app: "Runtime", stack: AsyncExitStack) -> "AgentRuntime":
        """Assemble the agent that the program describes; `stack` closes what it starts."""

    def _read_fleet(self) -> "FleetConfig | None":
        """Return the fleet that the program configures with keys or with the path of a file."""
        from halter.config.merge import parse_fleet, read_fleet

        fleet = self._options.get("fleet", {})
        if isinstance(fleet, str | Path):
            return read_fleet(Path(fleet))
        return parse_fleet(build_document(fleet, f"the {self.NOUN}'s fleet")) if fleet else None

    def _open_context(self) -> "AgentRuntime":
        if self._open is None:
            raise ConfigError(f"The {self.NOUN} is not open. Use it inside `async with {self.NOUN}:`.")
        return self._open


def resolve_secrets(options: ProgramOptions, environ: Mapping[str, str]) -> "Secrets":
    from halter.redaction.secrets import GivenSecrets, read_environment_secrets

    secrets = options.get("secrets")
    return read_environment_secrets(environ) if secrets is None else GivenSecrets(secrets)


_ONLY_UNATTENDED: Final = (
    "only `halter up` and `halter worker` read it. Write it in the agent.yaml of a folder, or call `run` when it is "
    "time."
)
_UNREAD_KEYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("schedules", "watches", "webhooks", "heartbeat", "autonomy", "sensors"), _ONLY_UNATTENDED),
    **dict.fromkeys(("concurrency", "idle_halt_minutes"), _ONLY_UNATTENDED),
    "gateway": "only `halter gateway` reads it. Write it in the agent.yaml of a folder.",
    "tools": "pass functions with `tools=[…]`, or decorate them with `@….tool`.",
    "agents": "pass other agents with `agents=[…]`.",
    "name": "pass the name as an argument.",
}
"""The keys of an agent file that nothing reads in a program, with what to do instead."""


def reject_unread_keys(options: ProgramOptions, where: str) -> None:
    """Raise ConfigError for keys of the policy that have no effect in a program."""
    for key in options.get("policy", {}):
        if key in _UNREAD_KEYS:
            raise ConfigError(f"{where}: `{key}` has no effect in a program: {_UNREAD_KEYS[key]}")


def parse_agent_options(
    name: str, options: ProgramOptions, where: str, limits: Mapping[str, Any], extra: Mapping[str, Any]
) -> "AgentFile":
    """Parse options as an agent file, so that the same checks apply with the same messages."""
    from halter.config.agent_files import parse_agent

    policy = options.get("policy", {})
    cap = {"max_cost_usd": options["max_cost_usd"]} if "max_cost_usd" in options else {}
    raw = {"name": name, **policy, **extra, "limits": {**policy.get("limits", {}), **limits, **cap}}
    return parse_agent(build_document(raw, where))


def build_document(keys: Mapping[str, Any], where: str) -> "Document":
    """Wrap a program's options as a file, so that mistakes get the same messages as in a file."""
    from halter.config.yaml_reader import Document, SourceMap

    return Document(dict(keys), SourceMap(where))


def resolve_settings(store: str, options: ProgramOptions, environ: Mapping[str, str]) -> Settings:
    """Return the settings of the options, or those that the command line uses for this store.

    Programs and the command line keep checkpoints and keys in the same files.
    """
    if "settings" in options:
        return options["settings"]
    settings = read_settings(environ, find_home(environ), store)
    return replace(settings, person=options["person"]) if "person" in options else settings


class AgentOptions(ProgramOptions, total=False):
    """Options of an agent, all optional: the keys of its file, under the same names.

    `model` and `fallback_models` are names or Model objects. `waits` is called when a person has to decide. `agents`
    are the agents that the model can call: agents, or tools that their `as_tool` returns. `mcp_servers` are servers by
    name, each as in `.mcp.json`. With `native_output`, a provider that can do so enforces the form of an
    `output_type`. `provider_tools` are tools that the provider runs itself; the guard does not see their calls.
    """

    model: str | Model
    fallback_models: Sequence[str | Model]
    model_for: Mapping[str, str]
    providers: Mapping[str, Any]
    instructions: str
    tool_calls: str
    temperature: float
    thinking: Literal["off", "low", "medium", "high"]
    provider_tools: Mapping[str, Mapping[str, Any]]
    reflex: Sequence[Any]
    limits: Mapping[str, Any]
    waits: "WaitListener"
    agents: "Sequence[Agent[Any, Any] | AgentTool]"
    mcp_servers: Mapping[str, Mapping[str, Any]]
    native_output: bool


MODEL_KEYS = (
    "model_for",
    "providers",
    "instructions",
    "tool_calls",
    "temperature",
    "thinking",
    "provider_tools",
    "reflex",
)


MAX_RESUMED: Final = 10_000
"""Maximum number of sessions that an agent resumes in the background."""
_FOLDER_OPTIONS: Final = (*MODEL_KEYS, "policy", "secrets", "mcp_servers")
"""Options that an agent of a folder has in its own files alone."""


class Agent(AgentProgram, Generic[DepsT, OutputT]):
    """One agent over one store. Its answers fit `output_type`, and its runs take `deps` of the type `deps_type`."""

    NOUN = "agent"

    @write_out_options(AgentOptions)
    def __init__(
        self,
        name: str = "agent",
        *,
        store: str | Path,
        output_type: type[OutputT] | None = None,
        deps_type: type[DepsT] | None = None,
        **options: Unpack[AgentOptions],
    ) -> None:
        reject_unknown_options(options, AgentOptions.__optional_keys__, "an agent")
        super().__init__(name, store, options)
        self._agent_options: AgentOptions = options
        self._output_type: type[Any] | None = None if output_type is str else output_type
        self._folder: Path | None = None
        self._tools += [each.as_tool() if isinstance(each, Agent) else each for each in options.get("agents", ())]
        self._instructions: list[Callable[..., Any]] = []
        self._toolsets: list[Callable[..., Any]] = []
        self._validators: list[Callable[..., Any]] = []
        self._is_overridden = False
        self._background: set[asyncio.Task[Any]] = set()

    @classmethod
    @write_out_options(AgentOptions)
    def load(cls, folder: str | Path, *, store: str | Path, **options: Unpack[AgentOptions]) -> "Agent[Any, str]":
        """Load the agent of a folder. Its code runs only if a person trusted it.

        `model` replaces its model, `limits` and `max_cost_usd` tighten its own, and `tools` and `agents` are added.
        """
        agent = Agent(Path(folder).name, store=store, **options)
        agent._folder = Path(folder)
        return agent

    def as_tool(
        self, description: str = "", *, max_cost_usd: float | Decimal | None = None, hand_off: bool = False
    ) -> "AgentTool":
        """Return a tool with which another agent calls this one: `Agent(..., agents=[desk.as_tool()])`.

        A task runs as a sub-session in the caller's store and fleet. Its cap is half of what the caller's session has
        left, and at most `max_cost_usd`. With `hand_off`, this agent gets the whole conversation, and its answer ends
        the caller's turn.
        """
        from halter.tasks.agent_tool import AgentTool

        limit = None if max_cost_usd is None else round(Decimal(str(max_cost_usd)) * DOLLAR)
        return AgentTool(self._name, description, max_cost=limit, hands_off=hand_off, open=self._open_for_caller)

    @asynccontextmanager
    async def _open_for_caller(self, caller: "AgentRuntime") -> "AsyncGenerator[AgentRuntime]":
        """Open this agent in the store and the fleet of the agent that calls it."""
        from halter.runtime.assembly.agent_builder import open_agent

        async with open_agent(caller.app, self._assemble, caller.worker) as opened:
            agent = (await self._add_dynamic_parts(opened, None)).run_beside(caller)
            yield replace(agent, answer_form=self._make_form(None, None))

    def instructions(self, function: F) -> F:
        """Add a function that returns further instructions: `@agent.instructions`.

        It is called when a run starts, may take `deps` and may be async. Its result is trusted: return no text from
        untrusted sources.
        """
        self._instructions.append(function)
        return function

    def output_validator(self, function: F) -> F:
        """Add a check of answers: `@agent.output_validator`. The function returns the output or a replacement.

        It raises Retry to have the model answer again. It takes the output, may also take `deps`, and may be async.
        """
        self._validators.append(function)
        return function

    def _make_form(self, output_type: type[Any] | None, deps: Any) -> "AnswerForm | None":
        output_type = output_type or self._output_type
        if output_type is None and not self._validators:
            return None

        from halter.loop.turn import FINAL_ANSWER

        def bind(function: Callable[..., Any]) -> Validator:
            async def check(value: Any) -> Any:
                arguments = (value, deps) if len(inspect.signature(function).parameters) > 1 else (value,)
                output = function(*arguments)
                return await output if inspect.isawaitable(output) else output

            return check

        return AnswerForm(FINAL_ANSWER, output_type or str, [bind(function) for function in self._validators])

    def toolset(self, function: F) -> F:
        """Add a function that returns tools for one run: `@agent.toolset`.

        It is called when a run starts, may take `deps` and may be async. Calls of its tools pass the guard.
        """
        self._toolsets.append(function)
        return function

    @contextmanager
    def override(self, *, model: str | Model, store: str | Path = "") -> Generator[Self]:
        """Use another model for runs that start inside the block: in tests, one of `halter.testing.models`.

        It takes the place of the fallback models and of those of `model_for`, too. An agent that is not open can use
        another store: `store="memory:"`.
        """
        if self._open is not None:
            if store:
                raise ConfigError(
                    "The agent is open and keeps its store. Override the store before you open the agent."
                )
            with self._override_while_open(self._open, model):
                yield self
            return
        options, agent_options, settings, is_overridden = (
            self._options,
            self._agent_options,
            self._settings,
            self._is_overridden,
        )
        overridden: AgentOptions = {**agent_options, "model": model, "fallback_models": ()}
        self._options, self._agent_options, self._is_overridden = overridden, overridden, True
        self._settings = resolve_settings(str(store), options, self._environ) if store else settings
        try:
            yield self
        finally:
            self._options, self._agent_options, self._settings = options, agent_options, settings
            self._is_overridden = is_overridden

    @contextmanager
    def _override_while_open(self, agent: "AgentRuntime", model: str | Model) -> Generator[None]:
        from halter.runtime.agent_runtime import use_model

        overridden = use_model(agent, model)
        overridden = overridden.with_settings(replace(overridden.definition.model_settings, model_for={}))
        previous, self._open_for_call = self._open_for_call, _OpenContext(overridden)
        try:
            yield
        finally:
            if self._open is agent:
                self._open_for_call = previous

    @overload
    async def run(
        self,
        message: str,
        *,
        output_type: type[T],
        session: str = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> CompletedResult[T] | StoppedResult: ...
    @overload
    async def run(
        self,
        message: str,
        *,
        session: str = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> CompletedResult[OutputT] | StoppedResult: ...
    async def run(  # noqa: PLR0913 Each is an independent option.
        self,
        message: str,
        *,
        output_type: type[Any] | None = None,
        session: str = "",
        id: str = "",  # noqa: A002 The public name.
        deps: DepsT | None = None,
        model: str | Model | None = None,
        limits: Mapping[str, Any] | None = None,
        kind: SessionKind = "task",
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
    ) -> CompletedResult[Any] | StoppedResult:
        """Run a task, and wait until it is done or needs a person.

        Pass `session` to continue an earlier session. Pass `id` to name a new one: after a crash, the same call resumes
        it; after its end, it returns its result. The answer must fit `output_type`. `model` and `limits` are those of
        a new session, written as in `agent.yaml`; limits can only tighten the agent's. A new session can begin with
        `history`, messages of a result or of Pydantic AI. `files` come with the message: pictures, PDFs, Office
        documents, sound and text.
        """
        async with self._enter_for_call() as open_context:
            context = await self._bind(open_context, deps, model, limits)
            form = self._make_form(output_type, deps)
            # Inlined from `_run_attended`: thousands of runs may wait here, and each keeps its frames and locals.
            try:
                conversation = await self._claim(
                    context, await _send_message(context, message, session, id, kind, history, files), form
                )
            except EndedBefore as ended:
                return await _read_ended_result(context, ended, form)
            try:
                return await self._conclude(conversation, await conversation.run_until_parked(), form)
            except BaseException as error:
                await conversation.release(error)
                raise

    @overload
    async def resume(
        self,
        session: str,
        message: str = ...,
        *,
        files: "Sequence[File | str | Path]" = ...,
        output_type: type[T],
        deps: DepsT | None = ...,
    ) -> CompletedResult[T] | StoppedResult: ...
    @overload
    async def resume(
        self,
        session: str,
        message: str = ...,
        *,
        files: "Sequence[File | str | Path]" = ...,
        deps: DepsT | None = ...,
    ) -> CompletedResult[OutputT] | StoppedResult: ...
    async def resume(
        self,
        session: str,
        message: str = "",
        *,
        files: "Sequence[File | str | Path]" = (),
        output_type: type[Any] | None = None,
        deps: DepsT | None = None,
    ) -> CompletedResult[Any] | StoppedResult:
        """Resume a session that has crashed, is parked, or has ended in any way except by cancellation.

        `files` come with the message.
        """
        from halter.runtime.session_runner import NewSession
        from halter.runtime.session_start import post_message, reopen_agent_session

        async with self._enter_for_call() as open_context:
            context = await self._bind(open_context, deps)
            await reopen_agent_session(context, session)
            if message or files:
                await post_message(context, session, message, files)
            return await self._run_attended(context, NewSession(SessionId(session)), self._make_form(output_type, deps))

    @overload
    async def fork(
        self,
        session: str,
        message: str = ...,
        *,
        output_type: type[T],
        at: int | None = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
    ) -> CompletedResult[T] | StoppedResult: ...
    @overload
    async def fork(
        self,
        session: str,
        message: str = ...,
        *,
        at: int | None = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
    ) -> CompletedResult[OutputT] | StoppedResult: ...
    async def fork(  # noqa: PLR0913 Each is an independent option.
        self,
        session: str,
        message: str = "",
        *,
        output_type: type[Any] | None = None,
        at: int | None = None,
        id: str = "",  # noqa: A002 The public name.
        deps: DepsT | None = None,
        model: str | Model | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> CompletedResult[Any] | StoppedResult:
        """Run a new session that begins with the messages of another one, up to its event `at` or its newest event.

        The new session has its own budget and inherits no approvals. Untrusted text stays marked as untrusted.
        """
        from halter.runtime.session_origin import read_session_row
        from halter.runtime.session_runner import NewSession
        from halter.runtime.session_start import begin_fork, read_fork

        async with self._enter_for_call() as open_context:
            context = await self._bind(open_context, deps, model, limits)
            context.require_model()
            fork = await read_fork(context.store, await read_session_row(context, session), at)
            by, redact, definition = (
                context.app.settings.person,
                context.guard().redact,
                await context.store_definition(),
            )
            new_session = await begin_fork(
                context.app, fork, message, by, redact, session=id, definition=definition, run=context.run
            )
            return await self._run_attended(context, NewSession(new_session), self._make_form(output_type, deps))

    async def _is_session_near_budget(self, agent: "AgentRuntime", session: str) -> bool:
        from halter.runtime.session_start import is_session_near_budget

        return await is_session_near_budget(agent, session)

    def start(
        self,
        message: str,
        *,
        id: str = "",  # noqa: A002 The public name.
        deps: DepsT | None = None,
    ) -> "asyncio.Task[CompletedResult[OutputT] | StoppedResult]":
        """Run a task in the background of an open agent.

        When the agent is closed, the run is cancelled; `resume_open_sessions` continues it then.
        """
        self._open_context()
        return self._run_in_background(self.run(message, id=id, deps=deps))

    async def resume_open_sessions(
        self, *, deps: DepsT | None = None
    ) -> "Sequence[asyncio.Task[CompletedResult[OutputT] | StoppedResult]]":
        """Resume, in the background of an open agent, the tasks that an earlier process has left."""
        from halter.core.ports import Query
        from halter.core.rows import SessionRow

        context = self._open_context()
        rows = await context.store.ask(
            Query("open_of", SessionRow, {"agent": context.policy.name, "limit": MAX_RESUMED})
        )
        tasks = [row.session for row in rows if row.kind == "task" and not row.parent and not row.trigger]
        return [self._run_in_background(self._resume_open(session, deps)) for session in tasks]

    async def _resume_open(self, session: str, deps: DepsT | None) -> CompletedResult[Any] | StoppedResult:
        """Resume a session that was open; unlike `resume`, reopen none that has ended meanwhile."""
        from halter.runtime.session_runner import NewSession

        async with self._enter_for_call() as open_context:
            context = await self._bind(open_context, deps)
            return await self._run_attended(context, NewSession(SessionId(session)), self._make_form(None, deps))

    def _run_in_background(self, run: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run in the background. The task is kept, since the event loop would not keep it."""

        def log_error(task: "asyncio.Task[T]") -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()):
                _LOG.warning("A run of %s in the background failed: %s", self._name, error)

        task = asyncio.create_task(run)
        self._background.add(task)
        task.add_done_callback(log_error)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the runs in the background, and close the store."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await super().__aexit__(kind, error, trace)

    async def history(self, session: str, *, at: int | None = None) -> tuple[Message, ...]:
        """Return the messages of a session, up to its event `at` or its newest event."""
        from halter.runtime.session_origin import read_session_row
        from halter.runtime.session_start import read_fork

        async with self._enter_for_call() as context:
            return (await read_fork(context.store, await read_session_row(context, session), at)).messages

    async def cost_usd(self, session: str) -> Decimal:
        """Return what a session has spent so far, plus what is held for its running calls."""
        from halter.guard.ledger import read_budget
        from halter.runtime.session_origin import read_session_row

        async with self._enter_for_call() as context:
            await read_session_row(context, session)
            row = await read_budget(context.store, f"session:{session}")
            return micros_to_usd(row.spent + row.held)

    async def receipt(self, session: str) -> "Receipt":
        """Return what a session has done, spent and seen so far."""
        from halter.core.ids import session_stream
        from halter.core.ports import read_stream
        from halter.runtime.session_origin import read_session_row
        from halter.state.receipt import make_receipt

        async with self._enter_for_call() as context:
            row = await read_session_row(context, session)
            return make_receipt(await read_stream(context.store, session_stream(row.session)))

    async def stream(  # noqa: PLR0913 Each is an independent option.
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 The public name.
        deps: DepsT | None = None,
        model: str | Model | None = None,
        limits: Mapping[str, Any] | None = None,
        kind: SessionKind = "chat",
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
    ) -> AsyncGenerator[StreamChunk | CompletedResult[OutputT] | StoppedResult]:
        """Run, and yield the answer while it streams; the last item is the result.

        A chunk with `discard` revokes the chunks of the attempt before it.
        """
        from halter.loop.observer import LoopObserver
        from halter.tasks.run_events import stream_queue

        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        observer = LoopObserver(chunks.put_nowait)
        async with self._enter_for_call() as open_context:
            context = await self._bind(open_context, deps, model, limits)
            new_session = await _send_message(context, message, session, id, kind, history, files)
            run = partial(self._run_attended, context, new_session, self._make_form(None, deps), observer)
            async with aclosing(stream_queue(chunks, run)) as items:
                async for item in items:
                    yield item

    @overload
    def stream_events(
        self,
        message: str,
        *,
        output_type: type[T],
        session: str = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> "AsyncGenerator[RunEvent | CompletedResult[T] | StoppedResult]": ...
    @overload
    def stream_events(
        self,
        message: str,
        *,
        session: str = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> "AsyncGenerator[RunEvent | CompletedResult[OutputT] | StoppedResult]": ...
    async def stream_events(  # noqa: PLR0913 Each is an independent option.
        self,
        message: str,
        *,
        output_type: type[Any] | None = None,
        session: str = "",
        id: str = "",  # noqa: A002 The public name.
        deps: DepsT | None = None,
        model: str | Model | None = None,
        limits: Mapping[str, Any] | None = None,
        kind: SessionKind = "chat",
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
    ) -> "AsyncGenerator[RunEvent | CompletedResult[Any] | StoppedResult]":
        """Run, and yield events while they happen; the last item is the result.

        The events are the streamed answer, each model answer and each call with its cost, and questions to a person.
        """
        from halter.tasks.run_events import RunEvents, stream_queue

        events = RunEvents()
        async with self._enter_for_call() as open_context:
            context = await self._bind(open_context, deps, model, limits)
            new_session = await _send_message(context, message, session, id, kind, history, files)
            waits = events.wait_with(self._get_wait_listener(context))
            run = partial(
                self._run_attended, context, new_session, self._make_form(output_type, deps), events.observe(), waits
            )
            async with aclosing(stream_queue(events.queue, run)) as items:
                async for item in items:
                    yield item

    @overload
    def run_sync(
        self,
        message: str,
        *,
        output_type: type[T],
        session: str = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> CompletedResult[T] | StoppedResult: ...
    @overload
    def run_sync(
        self,
        message: str,
        *,
        session: str = ...,
        id: str = ...,
        deps: DepsT | None = ...,
        model: str | Model | None = ...,
        limits: Mapping[str, Any] | None = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> CompletedResult[OutputT] | StoppedResult: ...
    def run_sync(  # noqa: PLR0913 Each is an independent option.
        self,
        message: str,
        *,
        output_type: type[Any] | None = None,
        session: str = "",
        id: str = "",  # noqa: A002 The public name.
        deps: DepsT | None = None,
        model: str | Model | None = None,
        limits: Mapping[str, Any] | None = None,
        kind: SessionKind = "task",
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
    ) -> CompletedResult[Any] | StoppedResult:
        """Call `run` from a program that is not async, or from a notebook."""
        run = self.run(
            message,
            output_type=cast("type[Any]", output_type),
            session=session,
            id=id,
            deps=deps,
            model=model,
            limits=limits,
            kind=kind,
            history=history,
            files=files,
        )
        return run_blocking(run, is_open=self.is_open)

    async def _run_attended(
        self,
        agent: "AgentRuntime",
        new_session: "NewSession",
        form: "AnswerForm | None",
        observer: "LoopObserver | None" = None,
        on_wait: "WaitListener | None" = None,
    ) -> CompletedResult[Any] | StoppedResult:
        try:
            conversation = await self._claim(agent, new_session, form, observer, on_wait)
        except EndedBefore as ended:
            return await _read_ended_result(agent, ended, form)
        try:
            return await self._conclude(conversation, await conversation.run_until_parked(), form)
        except BaseException as error:
            await conversation.release(error)
            raise

    async def _claim(
        self,
        agent: "AgentRuntime",
        new_session: "NewSession",
        form: "AnswerForm | None",
        observer: "LoopObserver | None" = None,
        on_wait: "WaitListener | None" = None,
    ) -> "Conversation":
        """Claim a session for this process. If the observer listens to text, the model streams its answer."""
        settings = agent.definition.model_settings
        if observer is not None and observer.on_chunk is not None and settings.streaming is None:
            agent = agent.with_settings(replace(settings, streaming=True))
        answer = None if form is None else form.tool
        on_wait = on_wait or self._get_wait_listener(agent)
        return (await new_session.claim(agent, observer, on_wait, answer)).conversation

    def _get_wait_listener(self, agent: "AgentRuntime") -> "WaitListener":
        return self._agent_options.get("waits") or partial(_log_wait, self._name, agent.app.settings.store)

    async def _conclude(
        self, conversation: "Conversation", conclusion: "Conclusion", form: "AnswerForm | None"
    ) -> CompletedResult[Any] | StoppedResult:
        """Return the result of a run, with its answer parsed into the form."""
        result = await conversation.conclude(conclusion)
        return result if form is None else await read_answer(result, form.tool.spec.name, form.read)

    def _enter_for_call(self) -> "AbstractAsyncContextManager[AgentRuntime]":
        """Return the open context, or open one for this call."""
        return self._open_for_call or self._opening()

    async def _bind(
        self,
        open_context: "AgentRuntime",
        deps: Any,
        model: str | Model | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> "AgentRuntime":
        """Return the context of one run, with its own model and limits, and with what depends on `deps`."""
        if model is not None or limits:
            from halter.runtime.agent_runtime import choose_run_settings

            open_context = choose_run_settings(open_context, model, limits)
        agent = open_context.bind()
        if self._instructions or self._toolsets:
            agent = await self._add_dynamic_parts(agent, deps)
        if deps is not None:
            agent = _attach_deps(agent, deps)
        return agent

    async def _add_dynamic_parts(self, agent: "AgentRuntime", deps: Any) -> "AgentRuntime":
        """Add the instructions and tools that functions of the program return; they are called once per run."""
        from halter.runtime.assembly.agent_tools import index_tools
        from halter.runtime.assembly.protected_paths import list_protected_paths, protect_tools

        texts = [str(await _call_with_deps(function, deps)) for function in self._instructions]
        if any(text.strip() for text in texts):
            settings = agent.definition.model_settings
            instructions = "\n\n".join(text for text in (settings.instructions, *texts) if text.strip())
            agent = agent.with_settings(replace(settings, instructions=instructions))
        new_tools = [tool for function in self._toolsets for tool in await _call_with_deps(function, deps)]
        if new_tools:
            protect_tools(new_tools, list_protected_paths(self._settings, None, None))
            agent = replace(agent, tools=index_tools([*agent.tools.values(), *new_tools]))
        return agent

    async def _assemble(self, app: "Runtime", stack: AsyncExitStack) -> "AgentRuntime":
        from halter.loop.turn import FINAL_ANSWER
        from halter.runtime.assembly.folder_agent import assemble_folder_agent

        if self._folder is None:
            agent = await self._parse_options(app, stack)
        else:
            agent = self._add_options(await assemble_folder_agent(app, stack, self._folder), self._folder)
        settings = agent.definition.model_settings
        if self._is_overridden:
            settings = replace(settings, model_for={})
        if self._agent_options.get("native_output", False):
            settings = replace(settings, native_output=FINAL_ANSWER)
        return agent.with_settings(settings).with_models(_index_models(_list_models(self._agent_options)))

    def _add_options(self, agent: "AgentRuntime", folder: Path) -> "AgentRuntime":
        """Add the program's options to the agent of a folder: models, tools, and limits that tighten its own."""
        from halter.config.run_limits import narrow_policy, narrow_settings, parse_session_limits
        from halter.runtime.assembly.agent_tools import index_tools
        from halter.runtime.assembly.protected_paths import list_protected_paths, protect_tools

        options = self._agent_options
        if keys := [key for key in options if key in _FOLDER_OPTIONS]:
            raise ConfigError(
                f"An agent that is loaded from a folder takes {join_names(keys)} from its agent.yaml: {folder}"
            )
        cap = {"max_cost_usd": options["max_cost_usd"]} if "max_cost_usd" in options else {}
        limits = parse_session_limits({**options.get("limits", {}), **cap}, "the agent")
        settings = narrow_settings(agent.definition.model_settings, limits)
        if models := _list_models(options):
            settings = _set_models(settings, models)
        if self._tools:
            protect_tools(self._tools, list_protected_paths(self._settings, None, None))
        tools = index_tools([*agent.tools.values(), *self._tools])
        agent = agent.with_policy(narrow_policy(agent.policy, limits))
        return replace(agent.with_settings(settings), tools=tools)

    def _read_fleet(self) -> "FleetConfig | None":
        """Return the configured fleet, or for an agent of a folder the fleet file."""
        from halter.runtime.runtime import read_local_fleet

        fleet = super()._read_fleet()
        return read_local_fleet(self._settings) if fleet is None and self._folder is not None else fleet

    async def _parse_options(self, app: "Runtime", stack: AsyncExitStack) -> "AgentRuntime":
        """Parse the options as an agent file, so that the same checks apply with the same messages."""
        from halter.config.resolve import resolve_agent
        from halter.runtime.assembly.agent_builder import build_agent
        from halter.runtime.assembly.agent_tools import start_servers
        from halter.runtime.assembly.protected_paths import list_protected_paths
        from halter.runtime.assembly.server_pins import settle_pins
        from halter.tasks.task_tools import list_verb_specs

        options = self._agent_options
        models = _list_models(options)
        model_keys: dict[str, Any] = {key: value for key, value in options.items() if key in MODEL_KEYS}
        has_objects = bool(_index_models(models))
        if models and not has_objects:
            model_keys |= {"model": models[0]} | ({"fallback_models": models[1:]} if models[1:] else {})
        reject_unread_keys(options, "the agent")
        file = parse_agent_options(self._name, options, "the agent", options.get("limits", {}), model_keys)
        definition = _set_default_provenance(resolve_agent(app.fleet, file, None))
        if has_objects:
            definition = replace(definition, model_settings=_set_models(definition.model_settings, models))
        secrets = resolve_secrets(options, self._environ)
        servers = self._read_servers()
        offer = await stack.enter_async_context(start_servers(app, servers, definition.policy, secrets))
        tools = [*self._tools, *offer.tools]
        paths = list_protected_paths(self._settings, None, None)
        agent = build_agent(app, file, definition, tools, paths, secrets, undeclared_tools=list_verb_specs())
        if servers:
            names = [server.name for server in servers]
            waiting = await settle_pins(app, definition.policy, names, [tool.spec for tool in offer.tools])
            agent = replace(agent, quarantined=waiting)
        return replace(agent, unavailable_tools=offer.omissions)

    def _read_servers(self) -> "Sequence[ToolServer]":
        """Parse the program's MCP servers as those of a file, so that the same checks apply."""
        from halter.config.mcp_file import parse_servers

        servers = self._agent_options.get("mcp_servers", {})
        document = build_document({"mcpServers": dict(servers)}, "the agent's mcp_servers")
        return parse_servers(document, Path.cwd(), self._environ) if servers else ()


def _set_default_provenance(agent: "AgentDefinition") -> "AgentDefinition":
    """Ask about calls with values from untrusted content, as `halter init` writes it, if no policy says otherwise."""
    if agent.policy.provenance is not None:
        return agent
    *fleet_policies, own_policy = agent.policy.policies
    policies = (*fleet_policies, replace(own_policy, provenance="ask"))
    return replace(agent, policy=replace(agent.policy, policies=policies))


def _list_models(options: AgentOptions) -> list[str | Model]:
    fallbacks = options.get("fallback_models", ())
    if isinstance(fallbacks, str):
        raise ConfigError(f"`fallback_models` is the text {fallbacks!r}, but must be a list of models.")
    from halter.config.run_limits import parse_model

    models = [*([options["model"]] if "model" in options else []), *fallbacks]
    return [parse_model(each, "the agent") if isinstance(each, str) else each for each in models]


def _index_models(models: Iterable[str | Model]) -> Mapping[str, Model]:
    return {str(model.name): model for model in models if not isinstance(model, str)}


def _set_models(settings: "BrainSpec", models: Iterable[str | Model]) -> "BrainSpec":
    first, *others = [model if isinstance(model, str) else str(model.name) for model in models]
    return replace(settings, model=first, fallback_models=tuple(others))


async def _read_ended_result(
    agent: "AgentRuntime", ended: EndedBefore, form: "AnswerForm | None"
) -> CompletedResult[Any] | StoppedResult:
    from halter.runtime.session_start import read_ended_result

    result = await read_ended_result(agent, ended.row)
    return result if form is None else await read_answer(result, form.tool.spec.name, form.read)


def run_blocking(run: Coroutine[Any, Any, T], *, is_open: bool) -> T:
    """Run a coroutine to its end. A notebook, whose cells run inside a loop, gets a thread with a loop of its own."""
    if not _is_loop_running():
        return asyncio.run(run)
    if "ipykernel" in sys.modules and not is_open:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, run).result()
    run.close()
    raise ConfigError("`run_sync` would block the event loop that runs here. Write: await agent.run(...)")


def _is_loop_running() -> bool:
    """Asked apart, so that an error of the run does not seem to come from this question."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _log_wait(name: str, store: str, approval: "ApprovalRequired", _: State) -> None:
    """Log why the run waits (by default to stderr)."""
    from halter.journal.open import format_store_location

    if location := format_store_location(store):
        _LOG.warning("%s waits for approval: %s. Run: halter inbox --store %s", name, approval.decision, location)
    else:
        sentence = "%s waits for approval: %s. Nobody can answer in a store in memory; pass a file as `store`."
        _LOG.warning(sentence, name, approval.decision)


async def _call_with_deps(function: Callable[..., Any], deps: Any) -> Any:
    """Call a function of the program, with `deps` if it takes a parameter."""
    result = function(deps) if inspect.signature(function).parameters else function()
    return await result if inspect.isawaitable(result) else result


async def _send_message(
    agent: "AgentRuntime",
    message: str,
    session: str,
    new_session: str,
    kind: SessionKind,
    history: Sequence[Any] = (),
    files: "Sequence[File | str | Path]" = (),
) -> "NewSession":
    """Post a message to a session, or start one with it. Starting is idempotent by id."""
    if not session:
        # Imported from its module: a name imported from a package is looked up at every call.
        from halter.runtime.session_origin import read_initial_messages
        from halter.runtime.session_start import open_session

        messages = await read_initial_messages(agent, history, files) if history or files else ()
        return await open_session(agent, message, kind, new_session, history=messages, takes_lease=True)
    from halter.config.run_limits import NO_RUN_SETTINGS

    if history or agent.run != NO_RUN_SETTINGS:
        raise ConfigError(
            f"Session {session} has already started. Pass `model`, `limits` and `history` only to a new session."
        )
    from halter.runtime.session_runner import NewSession
    from halter.runtime.session_start import post_message, reopen_agent_session

    await reopen_agent_session(agent, session)
    await post_message(agent, session, message, files)
    return NewSession(SessionId(session))


def _attach_deps(agent: "AgentRuntime", deps: Any) -> "AgentRuntime":
    tools = {
        name: each.with_deps(deps) if isinstance(each, FunctionTool) else each for name, each in agent.tools.items()
    }
    return replace(agent, tools=tools)
