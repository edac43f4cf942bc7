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
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypedDict, TypeVar, Unpack, overload

import msgspec
from msgspec.structs import replace

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError, HalterError
from halter.core.ids import make_worker_id
from halter.core.messages import Message, Model, StreamChunk, ToolCall, ToolResult
from halter.core.text import reject_unknown_options
from halter.core.tools import Tool
from halter.core.usage import Usage
from halter.core.vocabulary import END_STATES, SessionKind, State
from halter.settings import Settings, read_settings
from halter.state.receipt import Receipt, make_receipt
from halter.tools.function_tool import FunctionTool, ToolOptions
from halter.tools.function_tool import tool as made_tool

# A program that only describes its agent does not wait for what runs it: the functions below import that.
if TYPE_CHECKING:
    from halter.config.agent_files import AgentFile
    from halter.config.merge import FleetConfig
    from halter.config.yaml_reader import Document
    from halter.core.ports import Stored
    from halter.guard.tool_door import NeedsPerson
    from halter.journal.store import ReportProblem
    from halter.loop.loop import LoopObserver, TurnLoop
    from halter.loop.session_runtime import WaitListener
    from halter.redaction.secrets import Secrets
    from halter.runtime.agent_context import AgentContext, Models
    from halter.runtime.assemble import AssembledAgent
    from halter.runtime.runtime import Runtime
    from halter.tasks.conversation import Conclusion

T = TypeVar("T")

_LOG = logging.getLogger("halter")

GOOD_STATES: frozenset[State] = frozenset(("COMPLETED", "WAITING_FOR_INPUT", "SLEEPING"))


class RunFailed(HalterError):
    """The run failed; the message says why."""

    def __init__(self, result: "Result[Any]") -> None:
        why = result.terminal_reason or "turn not finished"
        super().__init__(f"Session {result.session} is {result.state} ({why}). {result.sentence}".strip())
        self.result = result


class Result(msgspec.Struct, Generic[T], frozen=True, kw_only=True, dict=True):
    """The result of a run. `cost_usd` is in dollars and counts the whole session.

    `ok` says that the model finished, or asks a person for something; otherwise `sentence` says what stopped it.
    `output` is the answer as `output_type`, or None if there is none; without an `output_type` it is the text.
    `near_budget` says that 80 % of a cap is spent or held: the session's own, its agent's or the fleet's.
    """

    session: str
    state: State
    ok: bool
    text: str
    output: T
    terminal_reason: str = ""
    sentence: str = ""
    question: str = ""
    messages: tuple[Message, ...] = ()
    near_budget: bool = False
    build_receipt: Callable[[], Receipt] = Receipt

    @cached_property
    def receipt(self) -> Receipt:
        """What the session did and cost, made from its events when it is first asked for."""
        return self.build_receipt()

    @property
    def cost_usd(self) -> Decimal:
        return self.receipt.cost_usd

    @property
    def usage(self) -> Usage:
        """The tokens of all requests."""
        used = [line.usage for line in self.receipt.requests if line.usage is not None]
        return Usage(
            sum(each.input_tokens for each in used),
            sum(each.output_tokens for each in used),
            sum(each.cache_read_tokens for each in used),
            sum(each.cache_write_tokens for each in used),
            sum(each.cache_write_1h_tokens for each in used),
            sum(each.web_searches for each in used),
        )

    @property
    def over(self) -> bool:
        """Whether the session has ended; if not, it can be resumed."""
        return self.state in END_STATES

    def raise_for_state(self) -> "Result[T]":
        """Raises RunFailed unless `ok`; returns the result itself."""
        if not self.ok:
            raise RunFailed(self)
        return self


def build_result(
    came: "Conclusion", loop: "TurnLoop", session: str, events: "Sequence[Stored]", *, near_budget: bool
) -> Result[Any]:
    from halter.loop.decide import TROUBLED_ENDS
    from halter.loop.session_runtime import find_last_words

    turn, messages = loop.turn, loop.messages
    text = find_last_words(messages)
    return Result(
        session=session,
        state=came.state,
        ok=came.state in GOOD_STATES and turn.why not in (*TROUBLED_ENDS, "cancelled"),
        text=text,
        output=text,
        terminal_reason=came.terminal_reason,
        sentence=came.sentence,
        question=_question(messages) if turn.why == "asked" else "",
        messages=tuple(messages),
        near_budget=near_budget,
        build_receipt=partial(make_receipt, events),
    )


def _question(messages: Sequence[Message]) -> str:
    from halter.loop.decide import ASK_USER

    arguments = _find_accepted_call(messages, ASK_USER)
    return "" if arguments is None else str(msgspec.json.decode(arguments).get("question", ""))


def _find_accepted_call(messages: Sequence[Message], tool: str) -> str | None:
    parts = [part for message in messages for part in message.parts]
    accepted = {part.id for part in parts if isinstance(part, ToolResult) and part.outcome == "ok"}
    found = [part for part in parts if isinstance(part, ToolCall) and part.tool == tool and part.id in accepted]
    return found[-1].arguments if found else None


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
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the store."""
        stack, self._stack, self._open = self._stack, None, None
        if stack is not None:
            await stack.__aexit__(kind, error, trace)

    async def near_budget(self, session: str = "") -> bool:
        """Says whether 80 % of a cap is spent or held: the agent's, the fleet's, or that of a session."""
        opened = self._opened()
        return await opened.guard().near_budget(opened.agent.standing(session))

    @asynccontextmanager
    async def _opening(self) -> "AsyncGenerator[AgentContext]":
        """Opens the store, binds its policy, renews leases, and assembles the agent."""
        from halter.dispatch.heartbeat import keep_leases
        from halter.journal.store import ignore_problem
        from halter.runtime.agent_context import AgentContext
        from halter.runtime.runtime import DEFAULT_LEASE_DURATION, open_runtime
        from halter.runtime.telemetry import trace_process

        options, written = self._options, self._written()
        lease = round(options.get("lease", DEFAULT_LEASE_DURATION / SECOND) * SECOND)
        app_of = open_runtime(
            self._settings, options.get("clock"), self._environ, lease=lease, written=lambda _: written
        )
        async with app_of as app, AsyncExitStack() as stack:
            if app.policy is not None and (told := app.policy.told()):
                warnings.warn(told, PolicyWarning, stacklevel=2)
            worker = make_worker_id(self._name, app.ids)
            app.trouble.tell = options.get("tell", ignore_problem)
            await stack.enter_async_context(trace_process(app, _LOG.warning))
            await stack.enter_async_context(keep_leases(app.patient(), app.clock, worker, max(lease // 3, 1)))
            agent, models = await self._assembled(app, stack)
            yield AgentContext(app, agent, models, worker, lease + SECOND)

    @abstractmethod
    async def _assembled(self, app: "Runtime", stack: AsyncExitStack) -> "tuple[AssembledAgent, Models]":
        """Assembles the agent that the program describes; `stack` closes it with the store."""

    def _written(self) -> "FleetConfig | None":
        """Return the fleet that the program configures, by keys or by the path of a file."""
        from halter.config.merge import parse_fleet, read_fleet

        fleet = self._options.get("fleet", {})
        if isinstance(fleet, str | Path):
            return read_fleet(Path(fleet))
        return parse_fleet(build_document(fleet, f"the {self.NOUN}'s fleet")) if fleet else None

    def _opened(self) -> "AgentContext":
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
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    settings = read_settings(environ, home, store)
    return replace(settings, person=options["person"]) if "person" in options else settings


class AgentOptions(ProgramOptions, total=False):
    """Options of an agent, all optional: the keys of its file, under the same names.

    `model` and `fallback_models` are names, or Model objects. `waits` is called when a person has to decide.
    """

    model: str | Model
    fallback_models: Sequence[str | Model]
    model_for: Mapping[str, str]
    providers: Mapping[str, Any]
    instructions: str
    tool_calls: str
    temperature: float
    reflex: Sequence[Any]
    limits: Mapping[str, Any]
    waits: "WaitListener"


KEYS = ("model_for", "providers", "instructions", "tool_calls", "temperature", "reflex")


class Agent(AgentProgram):
    """One agent over one store."""

    NOUN = "agent"

    def __init__(self, name: str = "agent", *, store: str | Path, **options: Unpack[AgentOptions]) -> None:
        reject_unknown_options(options, AgentOptions.__optional_keys__, "an agent")
        super().__init__(name, store, options)
        self._said_of: AgentOptions = options
        self._folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path, *, store: str | Path, **options: Unpack[AgentOptions]) -> Self:
        """Loads the agent of a folder. Its code runs only if a person trusted it."""
        agent = cls(Path(folder).name, store=store, **options)
        agent._folder = Path(folder)
        return agent

    @contextmanager
    def override(self, *, model: str | Model) -> Generator[Self]:
        """Runs with another model inside of the block: in tests, one of `halter.testing.models`."""
        if self._open is not None:
            raise ConfigError("The agent is open already: override its model before it is.")
        options, said_of = self._options, self._said_of
        overridden: AgentOptions = {**said_of, "model": model, "fallback_models": ()}
        self._options, self._said_of = overridden, overridden
        try:
            yield self
        finally:
            self._options, self._said_of = options, said_of

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
    ) -> Result[T]: ...
    @overload
    async def run(
        self, message: str, *, session: str = ..., id: str = ..., deps: Any = ..., kind: SessionKind = ...
    ) -> Result[str]: ...
    async def run(
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "task",
        output_type: type[Any] | None = None,
    ) -> Result[Any]:
        """Gives the agent a task and waits until it is done, or needs a person.

        Pass `session` to continue an earlier one. Pass an `id` for a new one: after a crash the program makes the same
        call, and the session resumes. `output_type` is what the answer must fit.
        """
        async with self._for_once() as context:
            session = await _send_message(context, message, session, id, kind)
            return await self._attended(context, session, deps, output_type)

    async def resume(
        self, session: str, message: str = "", *, deps: Any = None, output_type: type[Any] | None = None
    ) -> Result[Any]:
        """Resumes a session after a crash, a rest, or any end except a cancellation."""
        from halter.runtime.sessions import reopen_agent_session, say_to_session

        async with self._for_once() as context:
            await reopen_agent_session(context, session)
            if message:
                await say_to_session(context, session, message)
            return await self._attended(context, session, deps, output_type)

    async def stream(
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "chat",
    ) -> AsyncGenerator[StreamChunk | Result[str]]:
        """Runs, and yields the answer as it comes; the last item is the result.

        A chunk with `discard` takes back what the attempt before it yielded.
        """
        from halter.loop.loop import LoopObserver

        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        async with self._for_once() as context:
            session = await _send_message(context, message, session, id, kind)
            watching = LoopObserver(chunks.put_nowait)
            running = asyncio.create_task(self._attended(context, session, deps, None, watching))
            running.add_done_callback(lambda _: chunks.put_nowait(None))
            try:
                while (chunk := await chunks.get()) is not None:
                    yield chunk
                yield await running
            finally:
                from halter.loop.session_runtime import cancel_and_wait

                await cancel_and_wait(running)

    def run_sync(self, message: str, **options: Any) -> Result[Any]:
        """Calls `run` from a program that is not async."""
        return asyncio.run(self.run(message, **options))

    async def _attended(
        self,
        context: "AgentContext",
        session: str,
        deps: Any,
        output_type: type[Any] | None,
        watching: "LoopObserver | None" = None,
    ) -> Result[Any]:
        from halter.loop.decide import FINAL_ANSWER
        from halter.loop.loop import NO_OBSERVER
        from halter.runtime.sessions import claim_session

        agent, watching = context.agent, watching or NO_OBSERVER
        if watching.listen is not None and agent.mind.streaming is None:
            agent = replace(agent, mind=replace(agent.mind, streaming=True))
        agent = _attach_deps(agent, deps)
        context = context if agent is context.agent else replace(context, agent=agent)
        answer = None if output_type is None else make_answer_tool(output_type)
        waits = self._said_of.get("waits", self._log_wait)
        claimed = await claim_session(context, session, watching=watching, waits=waits, answer=answer)
        came, loop = await claimed.conversation.attend(), claimed.loop
        near = await claimed.running.near_budget()
        result = build_result(came, loop, session, await claimed.running.events(), near_budget=near)
        if output_type is None:
            return result
        arguments = _find_accepted_call(loop.messages, FINAL_ANSWER) if loop.turn.answered else None
        output = None if arguments is None else _parse_output(output_type, arguments)
        return replace(result, output=output)

    def _log_wait(self, asked: "NeedsPerson", _: State) -> None:
        """Say on the log, by default on stderr, why nothing seems to happen."""
        from halter.journal.open import name_store_place

        place = name_store_place(self._settings.store)
        _LOG.warning("%s waits for your decision %s: halter inbox --store %s", self._name, asked.decision, place)

    @asynccontextmanager
    async def _for_once(self) -> "AsyncGenerator[AgentContext]":
        """Yields the open context, or opens one for this call."""
        if self._open is not None:
            yield self._open.bind()
            return
        async with self._opening() as context:
            yield context.bind()

    async def _assembled(self, app: "Runtime", stack: AsyncExitStack) -> "tuple[AssembledAgent, Models]":
        from halter.runtime.agent_context import models_of
        from halter.runtime.assemble import assemble_agent

        given: Mapping[str, Model] = {}
        if self._folder is None:
            agent, given = self._said(app.fleet)
        else:
            agent = await stack.enter_async_context(assemble_agent(app, self._folder))
        return agent, await stack.enter_async_context(models_of(app, agent, given))

    def _written(self) -> "FleetConfig | None":
        """Falls back to the fleet file of an agent in a folder."""
        from halter.runtime.runtime import read_local_fleet

        said = super()._written()
        return read_local_fleet(self._settings) if said is None and self._folder is not None else said

    def _said(self, fleet: "FleetConfig") -> "tuple[AssembledAgent, Mapping[str, Model]]":
        """Parses the options as an agent file, so that the same checks apply with the same messages."""
        from halter.config.resolve import check_named_tools, resolve_agent
        from halter.runtime import assemble
        from halter.tasks.task_tools import list_verb_specs

        options = self._said_of
        fallbacks = options.get("fallback_models", ())
        if isinstance(fallbacks, str):
            raise ConfigError(f"`fallback_models` is the text {fallbacks!r}, but must be a list of models.")
        named = [*([options["model"]] if "model" in options else []), *fallbacks]
        given = {str(each.name): each for each in named if not isinstance(each, str)}
        more: dict[str, Any] = {key: value for key, value in options.items() if key in KEYS}
        if not given and named:
            more |= {"model": named[0]} | ({"fallback_models": named[1:]} if named[1:] else {})
        agent = agent_said(self._name, options, "the agent", options.get("limits", {}), more)
        resolved = resolve_agent(fleet, agent, None)
        if given:
            names = [each if isinstance(each, str) else str(each.name) for each in named]
            mind = replace(resolved.mind, model=names[0], fallback_models=tuple(names[1:]))
            resolved = replace(resolved, mind=mind)
        check_named_tools(resolved.policy, agent, (*(tool.spec for tool in self._tools), *list_verb_specs()))
        assemble.check_pacing_tools(resolved.policy, resolved.pacing, agent, self._tools)
        assemble.protect_tools(self._tools, assemble.list_protected_paths(self._settings, None, None))
        secrets = resolve_secrets(options, self._environ)
        return assemble.AssembledAgent(
            **resolved.parts(), tools=assemble.index_tools(self._tools), secrets=secrets
        ), given


async def _send_message(context: "AgentContext", message: str, session: str, new: str, kind: SessionKind) -> str:
    """Posts a message to a session, or starts one with it. Starting is idempotent by id."""
    from halter.runtime.sessions import begin_session, reopen_agent_session, say_to_session

    if not session:
        return await begin_session(context, message, kind, new)
    await reopen_agent_session(context, session)
    await say_to_session(context, session, message)
    return session


def _attach_deps(agent: "AssembledAgent", deps: Any) -> "AssembledAgent":
    if deps is None:
        return agent
    tools = {name: each.given(deps) if isinstance(each, FunctionTool) else each for name, each in agent.tools.items()}
    return replace(agent, tools=tools)


def make_answer_tool(output_type: type[Any]) -> Tool:
    """Makes the tool with which the model gives a typed answer.

    One that does not fit is rejected and asked for again.
    """
    from halter.loop.decide import FINAL_ANSWER

    async def answer(value: Any) -> str:  # noqa: ARG001 It stands in the journal as the call's arguments.
        return "Your answer was taken."

    answer.__annotations__["value"] = output_type
    answer.__doc__ = "Give your final answer. Your turn ends with it."
    return made_tool(
        answer, name=FINAL_ANSWER, level="SAFE", effect="read", idempotent=True, reads="nothing", reach="none"
    )


def _parse_output(output_type: type[T], arguments: str) -> T:
    from pydantic import TypeAdapter

    return TypeAdapter(output_type).validate_python(msgspec.json.decode(arguments)["value"])
