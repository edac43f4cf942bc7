"""An agent as an object, for programs.

```python
agent = Agent("desk", model="anthropic:claude-sonnet-4-5", store="runs.db", instructions="You keep the desk.")

@agent.tool(level="SAFE", effect="read")
async def weather(city: str) -> str: ...

result = agent.run_sync("Is it going to rain in Oslo?")
print(result.text, result.cost_usd)
```

It runs as an agent of a folder does: guarded, capped, journaled, and resumed after any crash. Used as an async
context manager it keeps its store open from run to run.

"""

import asyncio
import inspect
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict, TypeVar, Unpack, overload

from msgspec.structs import replace

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError
from halter.core.ids import SessionId, make_worker_id
from halter.core.messages import Message, Model, StreamChunk
from halter.core.money import DOLLAR, micros_to_usd
from halter.core.text import reject_unknown_options
from halter.core.tools import Tool, ToolServer
from halter.core.vocabulary import SessionKind, State
from halter.settings import Settings, find_home, read_settings
from halter.tasks.result import Result, find_accepted_call
from halter.tools.answer_form import AnswerForm, Validator
from halter.tools.function_tool import FunctionTool, ToolOptions
from halter.tools.function_tool import tool as made_tool

# A program that only describes its agent does not wait for what runs it: the functions below import that.
if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from halter.config.agent_files import AgentFile
    from halter.config.merge import FleetConfig
    from halter.config.yaml_reader import Document
    from halter.guard.tool_door import ApprovalRequired
    from halter.journal.store import ReportProblem
    from halter.loop.loop import LoopObserver
    from halter.loop.session_runtime import WaitListener
    from halter.models.input_files import File
    from halter.redaction.secrets import Secrets
    from halter.runtime.agent_context import AgentContext, Models
    from halter.runtime.assemble import AssembledAgent
    from halter.runtime.runtime import Runtime
    from halter.runtime.sessions import NewSession
    from halter.tasks.agent_tool import AgentTool
    from halter.tasks.conversation import Conclusion, Conversation
    from halter.tasks.run_events import RunEvent

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("halter")


class ProgramOptions(TypedDict, total=False):
    """Options of a guard or an agent, all optional.

    `policy` holds keys of an agent file (`mode`, `limits`, `policy`, `phases`, `secrets`, …), `fleet` those of the
    fleet file, or its path. `max_cost_usd` is the cap of one session. `secrets` are values by name. `lease` is how many
    seconds a dead process keeps its sessions. `tell` is called with a sentence when the store is unavailable, and with
    an empty one when it is back: writes wait meanwhile. `clock` and `environ` default to the system's.
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


class _OpenContext:
    """Gives out a context that stays open."""

    def __init__(self, context: "AgentContext") -> None:
        self._context = context

    async def __aenter__(self) -> "AgentContext":
        return self._context

    # Static: a run that waits would keep a bound method.
    @staticmethod
    async def __aexit__(*_: object) -> None: ...


class PolicyWarning(UserWarning):
    """The store's policy overrides what the program configures for its fleet."""


class AgentProgram(ABC):
    """Base of Agent and Guard: takes tools, then opens a store; it works while it is open."""

    NOUN: ClassVar[str]

    def __init__(self, name: str, store: str | Path, options: ProgramOptions) -> None:
        self._name = name
        self._options = options
        self._environ = options.get("environ", os.environ)
        self._settings = resolve_settings(str(store), options, self._environ)
        self._tools: list[Tool] = list(options.get("tools", ()))
        self._stack: AsyncExitStack | None = None
        self._open: AgentContext | None = None
        self._open_for_call: AbstractAsyncContextManager[AgentContext] | None = None

    @overload
    def tool(self, function: Callable[..., Any], /, **options: Unpack[ToolOptions]) -> FunctionTool: ...
    @overload
    def tool(self, /, **options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
    def tool(
        self, function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
    ) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
        """Makes a tool of a typed function: `@guard.tool`, `@agent.tool(level="SAFE")`."""
        if function is None:
            return lambda function: self.tool(function, **options)
        if self._open is not None:
            raise ConfigError(f"The {self.NOUN} is open already: give it {function.__name__} before it is.")
        made = made_tool(function, **options)
        self._tools.append(made)
        return made

    @property
    def is_open(self) -> bool:
        return self._open is not None

    async def __aenter__(self) -> Self:
        """Opens the store and starts to renew leases."""
        async with AsyncExitStack() as stack:
            self._open = await stack.enter_async_context(self._opening())
            self._open_for_call = _OpenContext(self._open)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the store."""
        stack, self._stack, self._open, self._open_for_call = self._stack, None, None, None
        if stack is not None:
            await stack.__aexit__(kind, error, trace)

    async def near_budget(self, session: str = "") -> bool:
        """Says whether 80 % of a cap is spent or held: the agent's, the fleet's, or that of a session."""
        opened = self._open_context()
        return await opened.guard().is_near_budget(opened.agent.make_context(session))

    @asynccontextmanager
    async def _opening(self) -> "AsyncGenerator[AgentContext]":
        """Opens the store, binds its policy, renews leases, and assembles the agent."""
        from halter.dispatch.heartbeat import keep_leases
        from halter.journal.store import ignore_problem
        from halter.runtime.agent_context import AgentContext
        from halter.runtime.runtime import DEFAULT_LEASE_DURATION, open_runtime
        from halter.runtime.telemetry import trace_process

        options, written = self._options, self._read_fleet()
        lease = round(options.get("lease", DEFAULT_LEASE_DURATION / SECOND) * SECOND)
        app_of = open_runtime(
            self._settings, options.get("clock"), self._environ, lease=lease, written=lambda _: written
        )
        async with app_of as app, AsyncExitStack() as stack:
            if app.policy is not None and (sentence := app.policy.describe_difference()):
                warnings.warn(sentence, PolicyWarning, stacklevel=2)
            worker = make_worker_id(self._name, app.ids)
            app.trouble.tell = options.get("tell", ignore_problem)
            await stack.enter_async_context(trace_process(app, _LOG.warning))
            await stack.enter_async_context(keep_leases(app.patient(), app.clock, worker, max(lease // 3, 1)))
            # Before it owns a session: see `start_session`.
            await app.patient().beat(worker)
            agent, models = await self._assemble(app, stack)
            yield AgentContext(app, agent, models, worker, lease + SECOND)

    @abstractmethod
    async def _assemble(self, app: "Runtime", stack: AsyncExitStack) -> "tuple[AssembledAgent, Models]":
        """Assembles the agent that the program describes; `stack` closes it with the store."""

    def _read_fleet(self) -> "FleetConfig | None":
        """Return the fleet that the program configures, by keys or by the path of a file."""
        from halter.config.merge import parse_fleet, read_fleet

        fleet = self._options.get("fleet", {})
        if isinstance(fleet, str | Path):
            return read_fleet(Path(fleet))
        return parse_fleet(build_document(fleet, f"the {self.NOUN}'s fleet")) if fleet else None

    def _open_context(self) -> "AgentContext":
        if self._open is None:
            raise ConfigError(f"The {self.NOUN} is not open: use it inside of `async with {self.NOUN}:`.")
        return self._open


def resolve_secrets(options: ProgramOptions, environ: Mapping[str, str]) -> "Secrets":
    from halter.redaction.secrets import GivenSecrets, read_environment_secrets

    given = options.get("secrets")
    return read_environment_secrets(environ) if given is None else GivenSecrets(given)


def agent_said(
    name: str, options: ProgramOptions, where: str, limits: Mapping[str, Any], more: Mapping[str, Any]
) -> "AgentFile":
    """Parses options as an agent file, so that the same checks apply with the same messages."""
    from halter.config.agent_files import parse_agent

    policy = options.get("policy", {})
    capped = {"max_cost_usd": options["max_cost_usd"]} if "max_cost_usd" in options else {}
    said = {"name": name, **policy, **more, "limits": {**policy.get("limits", {}), **limits, **capped}}
    return parse_agent(build_document(said, where))


def build_document(said: Mapping[str, Any], where: str) -> "Document":
    """Wraps a program's options as a file, so that mistakes are reported alike."""
    from halter.config.yaml_reader import Document, SourceMap

    return Document(dict(said), SourceMap(where))


def resolve_settings(store: str, options: ProgramOptions, environ: Mapping[str, str]) -> Settings:
    """Returns the given settings, or the command line's: checkpoints and keys are kept in the same places."""
    if "settings" in options:
        return options["settings"]
    settings = read_settings(environ, find_home(environ), store)
    return replace(settings, person=options["person"]) if "person" in options else settings


class AgentOptions(ProgramOptions, total=False):
    """Options of an agent, all optional: the keys of its file, under the same names.

    `model` and `fallback_models` are names, or Model objects. `waits` is called when a person has to decide. `agents`
    are those whom the model can ask: agents, or what their `as_tool` returns. `mcp_servers` are servers of tools by
    name, each as in `.mcp.json`. With `native_output`, an answer of an `output_type` is held to its form by the
    provider, where it can be. `provider_tools` are those that the provider runs itself, unseen by the guard.
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
    agents: "Sequence[Agent | AgentTool]"
    mcp_servers: Mapping[str, Mapping[str, Any]]
    native_output: bool


KEYS = ("model_for", "providers", "instructions", "tool_calls", "temperature", "thinking", "provider_tools", "reflex")


class Agent(AgentProgram):
    """One agent over one store."""

    NOUN = "agent"

    def __init__(self, name: str = "agent", *, store: str | Path, **options: Unpack[AgentOptions]) -> None:
        reject_unknown_options(options, AgentOptions.__optional_keys__, "an agent")
        super().__init__(name, store, options)
        self._agent_options: AgentOptions = options
        self._folder: Path | None = None
        self._tools += [each.as_tool() if isinstance(each, Agent) else each for each in options.get("agents", ())]
        self._log_wait: WaitListener = partial(_log_wait, name, self._settings.store)
        self._instructions: list[Callable[..., Any]] = []
        self._toolsets: list[Callable[..., Any]] = []
        self._validators: list[Callable[..., Any]] = []

    @classmethod
    def load(cls, folder: str | Path, *, store: str | Path, **options: Unpack[AgentOptions]) -> Self:
        """Loads the agent of a folder. Its code runs only if a person trusted it."""
        agent = cls(Path(folder).name, store=store, **options)
        agent._folder = Path(folder)
        return agent

    def as_tool(
        self, description: str = "", *, max_cost_usd: float | Decimal | None = None, hand_off: bool = False
    ) -> "AgentTool":
        """Makes a tool of this agent, with which another one's model asks it: `Agent(..., agents=[desk.as_tool()])`.

        A task runs as a sub-session in the other one's store and fleet, with at most half of what its session has left,
        and at most `max_cost_usd`. With `hand_off` it gets the whole conversation, and its answer ends the turn.
        """
        from halter.tasks.agent_tool import AgentTool

        limit = None if max_cost_usd is None else round(Decimal(str(max_cost_usd)) * DOLLAR)
        return AgentTool(self._name, description, max_cost=limit, hands_off=hand_off, open=self._open_beside)

    @asynccontextmanager
    async def _open_beside(self, context: "AgentContext") -> "AsyncGenerator[AgentContext]":
        """Yields this agent's context in the store and the fleet of the one that asks it."""
        async with AsyncExitStack() as stack:
            agent, models = await self._assemble(context.app, stack)
            agent = await self._add_dynamic_parts(agent, None)
            yield replace(context, agent=agent, models=models, bound=None, form=self._make_form(None, None))

    def instructions(self, function: F) -> F:
        """Adds a function that returns further instructions, asked when a run begins: `@agent.instructions`.

        It may take `deps` and may be async. What it returns counts as your own words, so let it return no foreign text.
        """
        self._instructions.append(function)
        return function

    def output_validator(self, function: F) -> F:
        """Adds a check of answers: `@agent.output_validator`. It returns the output, or another one in its place.

        It raises Retry to have the model answer again. It may take `deps` beside the output, and may be async.
        """
        self._validators.append(function)
        return function

    def _make_form(self, output_type: type[Any] | None, deps: Any) -> "AnswerForm | None":
        if output_type is None and not self._validators:
            return None

        from halter.loop.decide import FINAL_ANSWER

        def bind(function: Callable[..., Any]) -> Validator:
            async def check(value: Any) -> Any:
                given = (value, deps) if len(inspect.signature(function).parameters) > 1 else (value,)
                found = function(*given)
                return await found if inspect.isawaitable(found) else found

            return check

        return AnswerForm(FINAL_ANSWER, output_type or str, [bind(function) for function in self._validators])

    def toolset(self, function: F) -> F:
        """Adds a function that returns tools for one run, asked when it begins: `@agent.toolset`.

        It may take `deps` and may be async. Its tools pass the guard like all others.
        """
        self._toolsets.append(function)
        return function

    @contextmanager
    def override(self, *, model: str | Model) -> Generator[Self]:
        """Runs with another model inside of the block: in tests, one of `halter.testing.models`."""
        if self._open is not None:
            raise ConfigError("The agent is open already: override its model before it is.")
        options, said_of = self._options, self._agent_options
        overridden: AgentOptions = {**said_of, "model": model, "fallback_models": ()}
        self._options, self._agent_options = overridden, overridden
        try:
            yield self
        finally:
            self._options, self._agent_options = options, said_of

    @overload
    async def run(
        self,
        message: str,
        *,
        output_type: type[T],
        session: str = ...,
        id: str = ...,
        deps: Any = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> Result[T]: ...
    @overload
    async def run(
        self,
        message: str,
        *,
        session: str = ...,
        id: str = ...,
        deps: Any = ...,
        kind: SessionKind = ...,
        history: Sequence[Any] = ...,
        files: "Sequence[File | str | Path]" = ...,
    ) -> Result[str]: ...
    async def run(  # noqa: PLR0913 Each is one thing that a run is given.
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "task",
        output_type: type[Any] | None = None,
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
    ) -> Result[Any]:
        """Gives the agent a task and waits until it is done, or needs a person.

        Pass `session` to continue an earlier one. Pass an `id` for a new one: after a crash the program makes the same
        call, and the session resumes. `output_type` is what the answer must fit. `history` are messages that a new
        session begins with, those of a result or of Pydantic AI, and `files` are pictures, PDFs, sound and texts.
        """
        async with self._enter_for_call() as opened:
            context, form = await self._bind(opened, deps), self._make_form(output_type, deps)
            # As `_attended`, without its frame and what began the run while it waits: there may be thousands.
            conversation = await self._claim(
                context, await _send_message(context, message, session, id, kind, history, files), form
            )
            try:
                return await self._conclude(conversation, await conversation.run_until_parked(), form)
            except BaseException as error:
                await conversation.release(error)
                raise

    async def resume(
        self, session: str, message: str = "", *, deps: Any = None, output_type: type[Any] | None = None
    ) -> Result[Any]:
        """Resumes a session after a crash, a rest, or any end except a cancellation."""
        from halter.runtime.sessions import NewSession, post_message, reopen_agent_session

        async with self._enter_for_call() as opened:
            context = await self._bind(opened, deps)
            await reopen_agent_session(context, session)
            if message:
                await post_message(context, session, message)
            return await self._run_attended(context, NewSession(SessionId(session)), self._make_form(output_type, deps))

    async def fork(
        self,
        session: str,
        message: str = "",
        *,
        at: int | None = None,
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        output_type: type[Any] | None = None,
    ) -> Result[Any]:
        """Runs a new session that begins with what was said in another one, up to the event `at`, or its newest.

        Its budget is its own. What was approved in the other one is not inherited; what others wrote stays marked.
        """
        from halter.runtime.sessions import NewSession, begin_fork, read_fork, read_session_row

        async with self._enter_for_call() as opened:
            context = await self._bind(opened, deps)
            context.require_model()
            fork = await read_fork(context.store, await read_session_row(context, session), at)
            by, redact, known = context.app.settings.person, context.guard().redact, await context.definition()
            forked = await begin_fork(context.app, fork, message, by, redact, session=id, definition=known)
            return await self._run_attended(context, NewSession(forked), self._make_form(output_type, deps))

    async def history(self, session: str, *, at: int | None = None) -> tuple[Message, ...]:
        """Returns what was said in a session, up to the event `at`, or its newest."""
        from halter.runtime.sessions import read_fork, read_session_row

        async with self._enter_for_call() as context:
            return (await read_fork(context.store, await read_session_row(context, session), at)).messages

    async def cost_usd(self, session: str) -> Decimal:
        """Returns what a session has cost so far, with what is held for calls under way."""
        from halter.guard.ledger import read_budget
        from halter.runtime.sessions import read_session_row

        async with self._enter_for_call() as context:
            await read_session_row(context, session)
            row = await read_budget(context.store, f"session:{session}")
            return micros_to_usd(row.spent + row.held)

    async def stream(
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "chat",
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
    ) -> AsyncGenerator[StreamChunk | Result[str]]:
        """Runs, and yields the answer as it comes; the last item is the result.

        A chunk with `discard` takes back what the attempt before it yielded.
        """
        from halter.loop.loop import LoopObserver
        from halter.tasks.run_events import stream_queue

        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        observer = LoopObserver(chunks.put_nowait)
        async with self._enter_for_call() as opened:
            context = await self._bind(opened, deps)
            new_session = await _send_message(context, message, session, id, kind, history, files)
            run = partial(self._run_attended, context, new_session, None, observer)
            async with aclosing(stream_queue(chunks, run)) as items:
                async for item in items:
                    yield item

    async def stream_events(  # noqa: PLR0913 Each is one thing that a run is given.
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "chat",
        history: Sequence[Any] = (),
        files: "Sequence[File | str | Path]" = (),
        output_type: type[Any] | None = None,
    ) -> "AsyncGenerator[RunEvent | Result[Any]]":
        """Runs, and yields what happens as it happens; the last item is the result.

        That is the answer as it comes, each answer of a model and each call with its cost, and questions to a person.
        """
        from halter.tasks.run_events import RunEvents, stream_queue

        events = RunEvents()
        async with self._enter_for_call() as opened:
            context = await self._bind(opened, deps)
            new_session = await _send_message(context, message, session, id, kind, history, files)
            waits = events.wait_with(self._agent_options.get("waits", self._log_wait))
            run = partial(
                self._run_attended, context, new_session, self._make_form(output_type, deps), events.observe(), waits
            )
            async with aclosing(stream_queue(events.queue, run)) as items:
                async for item in items:
                    yield item

    def run_sync(self, message: str, **options: Any) -> Result[Any]:
        """Calls `run` from a program that is not async."""
        return asyncio.run(self.run(message, **options))

    async def _run_attended(
        self,
        context: "AgentContext",
        new_session: "NewSession",
        form: "AnswerForm | None",
        observer: "LoopObserver | None" = None,
        waits: "WaitListener | None" = None,
    ) -> Result[Any]:
        conversation = await self._claim(context, new_session, form, observer, waits)
        try:
            return await self._conclude(conversation, await conversation.run_until_parked(), form)
        except BaseException as error:
            await conversation.release(error)
            raise

    async def _claim(
        self,
        context: "AgentContext",
        new_session: "NewSession",
        form: "AnswerForm | None",
        observer: "LoopObserver | None" = None,
        waits: "WaitListener | None" = None,
    ) -> "Conversation":
        """Takes a session, to be attended here; what its answer streams to is heard while it does."""
        agent = context.agent
        if observer is not None and observer.listen is not None and agent.model_settings.streaming is None:
            context = replace(context, agent=replace(agent, mind=replace(agent.model_settings, streaming=True)))
        answer = None if form is None else form.tool
        waits = waits or self._agent_options.get("waits", self._log_wait)
        return (await new_session.claim(context, observer, waits, answer)).conversation

    async def _conclude(
        self, conversation: "Conversation", came: "Conclusion", form: "AnswerForm | None"
    ) -> Result[Any]:
        """Returns the result of a session that was attended, with the answer in its form."""
        result, loop = await conversation.conclude(came), conversation.loop
        if form is None:
            return result
        # Not before it is needed: an import inside of a function takes as long as a good part of a transaction.
        from halter.loop.decide import FINAL_ANSWER

        arguments = find_accepted_call(loop.messages[-2:], FINAL_ANSWER) if loop.turn.answered else None
        return replace(result, output=None if arguments is None else await form.read(arguments))

    def _enter_for_call(self) -> "AbstractAsyncContextManager[AgentContext]":
        """The open context, or one that is opened for this call alone."""
        return self._open_for_call or self._opening()

    async def _bind(self, opened: "AgentContext", deps: Any) -> "AgentContext":
        """Returns the context of one run, with what depends on `deps`: tools, toolsets and instructions."""
        context = opened.bind()
        agent = context.agent
        if self._instructions or self._toolsets:
            agent = await self._add_dynamic_parts(agent, deps)
        if deps is not None:
            agent = _attach_deps(agent, deps)
        return context if agent is context.agent else replace(context, agent=agent)

    async def _add_dynamic_parts(self, agent: "AssembledAgent", deps: Any) -> "AssembledAgent":
        """Asks the functions of the program for instructions and tools, once for each run."""
        from halter.runtime import assemble

        texts = [str(await _call_with_deps(function, deps)) for function in self._instructions]
        if any(words.strip() for words in texts):
            instructions = "\n\n".join(words for words in (agent.model_settings.instructions, *texts) if words.strip())
            agent = replace(agent, mind=replace(agent.model_settings, instructions=instructions))
        more = [tool for function in self._toolsets for tool in await _call_with_deps(function, deps)]
        if more:
            assemble.protect_tools(more, assemble.list_protected_paths(self._settings, None, None))
            agent = replace(agent, tools=assemble.index_tools([*agent.tools.values(), *more]))
        return agent

    async def _assemble(self, app: "Runtime", stack: AsyncExitStack) -> "tuple[AssembledAgent, Models]":
        from halter.loop.decide import FINAL_ANSWER
        from halter.runtime.agent_context import models_of
        from halter.runtime.assemble import assemble_agent

        given: Mapping[str, Model] = {}
        if self._folder is None:
            agent, given = await self._parse_options(app, stack)
        else:
            agent = await stack.enter_async_context(assemble_agent(app, self._folder))
        if self._agent_options.get("native_output", False):
            agent = replace(agent, mind=replace(agent.model_settings, native_output=FINAL_ANSWER))
        return agent, await stack.enter_async_context(models_of(app, agent, given))

    def _read_fleet(self) -> "FleetConfig | None":
        """Falls back to the fleet file of an agent in a folder."""
        from halter.runtime.runtime import read_local_fleet

        said = super()._read_fleet()
        return read_local_fleet(self._settings) if said is None and self._folder is not None else said

    async def _parse_options(
        self, app: "Runtime", stack: AsyncExitStack
    ) -> "tuple[AssembledAgent, Mapping[str, Model]]":
        """Parses the options as an agent file, so that the same checks apply with the same messages."""
        from halter.config.resolve import check_named_tools, resolve_agent
        from halter.runtime import assemble
        from halter.tasks.task_tools import list_verb_specs

        options = self._agent_options
        fallbacks = options.get("fallback_models", ())
        if isinstance(fallbacks, str):
            raise ConfigError(f"`fallback_models` is the text {fallbacks!r}, but must be a list of models.")
        named = [*([options["model"]] if "model" in options else []), *fallbacks]
        given = {str(each.name): each for each in named if not isinstance(each, str)}
        more: dict[str, Any] = {key: value for key, value in options.items() if key in KEYS}
        if not given and named:
            more |= {"model": named[0]} | ({"fallback_models": named[1:]} if named[1:] else {})
        agent = agent_said(self._name, options, "the agent", options.get("limits", {}), more)
        resolved = resolve_agent(app.fleet, agent, None)
        if given:
            names = [each if isinstance(each, str) else str(each.name) for each in named]
            mind = replace(resolved.model_settings, model=names[0], fallback_models=tuple(names[1:]))
            resolved = replace(resolved, model_settings=mind)
        secrets = resolve_secrets(options, self._environ)
        servers = self._read_servers()
        offer = await stack.enter_async_context(assemble.start_servers(app, servers, resolved.policy, secrets))
        tools = [*self._tools, *offer.tools]
        check_named_tools(resolved.policy, agent, (*(tool.spec for tool in tools), *list_verb_specs()))
        assemble.check_pacing_tools(resolved.policy, resolved.pacing, agent, tools)
        assemble.protect_tools(tools, assemble.list_protected_paths(self._settings, None, None))
        names, specs = [server.name for server in servers], [tool.spec for tool in offer.tools]
        waiting = await assemble.settle_pins(app, self._name, names, specs) if servers else frozenset[str]()
        return assemble.AssembledAgent(
            **resolved.parts(),
            tools=assemble.index_tools(tools),
            secrets=secrets,
            quarantined=waiting,
            left_out=offer.left_out,
        ), given

    def _read_servers(self) -> "Sequence[ToolServer]":
        """Parses the program's MCP servers as those of a file, so that the same checks apply."""
        from halter.config.mcp_file import parse_servers

        said = self._agent_options.get("mcp_servers", {})
        document = build_document({"mcpServers": dict(said)}, "the agent's mcp_servers")
        return parse_servers(document, Path.cwd(), self._environ) if said else ()


def _log_wait(name: str, store: str, approval: "ApprovalRequired", _: State) -> None:
    """Say on the log, by default on stderr, why nothing seems to happen."""
    from halter.journal.open import name_store_place

    place = name_store_place(store)
    _LOG.warning("%s waits for your decision %s: halter inbox --store %s", name, approval.decision, place)


async def _call_with_deps(function: Callable[..., Any], deps: Any) -> Any:
    """Calls a function of the program, with `deps` if it takes a parameter."""
    found = function(deps) if inspect.signature(function).parameters else function()
    return await found if inspect.isawaitable(found) else found


async def _send_message(
    context: "AgentContext",
    message: str,
    session: str,
    new: str,
    kind: SessionKind,
    history: Sequence[Any] = (),
    files: "Sequence[File | str | Path]" = (),
) -> "NewSession":
    """Posts a message to a session, or starts one with it. Starting is idempotent by id."""
    if not session:
        # By its own module: what is imported from a package is looked for each time.
        from halter.runtime.sessions import open_session, read_given_messages

        given = read_given_messages(context, history, files) if history or files else ()
        return await open_session(context, message, kind, new, history=given, attends=True)
    if history or files:
        raise ConfigError(f"Session {session} has begun already: give a history, or files, only to a new one.")
    from halter.runtime.sessions import NewSession, post_message, reopen_agent_session

    await reopen_agent_session(context, session)
    await post_message(context, session, message)
    return NewSession(SessionId(session))


def _attach_deps(agent: "AssembledAgent", deps: Any) -> "AssembledAgent":
    tools = {name: each.given(deps) if isinstance(each, FunctionTool) else each for name, each in agent.tools.items()}
    return replace(agent, tools=tools)
