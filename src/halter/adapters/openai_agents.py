"""Guard an agent of the OpenAI Agents SDK.

```python
desk = guard(Agent(name="desk", tools=[pay]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = await desk.run("Pay the bill.")
```

Each run is a guarded session, with all agents that it hands off to. Each model request is held before it is sent, with
`max_tokens` lowered to what fits, and settled by its usage. Each tool call is admitted, made and settled. A call that
needs a person interrupts a run that names its `conversation`: approve it in Halter and in the run's state, and run that
state in the same conversation. Any other run waits for the decision. A halt and a cap raise EffectRefused.

Hosted tools, shells, patches, computers, MCP servers and agents as tools do not pass here: an agent with one is
refused, unless the tool's name is in `allow_native`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final

import msgspec
from agents import Agent, Handoff, Model, ModelResponse, ModelSettings, RunConfig, Runner, RunResult, RunState
from agents.models.interface import ModelProvider
from agents.result import RunResultStreaming
from agents.tool import FunctionTool

from halter.adapters.attachments import ask_model
from halter.adapters.guarded_runs import (
    MAX_OUTPUT_TOKENS,
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRuns,
    read_usage,
    stream_from,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.loop.session_runtime import cancel_and_wait
from halter.runtime.external import DecisionPending, EffectRefused, ModelResult
from halter.runtime.guard_api import Guard, GuardedSession


def guard(
    agent: Agent[Any],
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    allow_native: Collection[str] = (),
) -> "GuardedRunner":
    """Return a runner of the agent with every run under the guard. `tools` says what the guard is to know of its tools.

    Raises ConfigError for a tool that no guard would see.
    """
    terms = _Terms(GuardedRuns(guard, tools), max_output_tokens, frozenset(allow_native))
    return GuardedRunner(_AgentWrapper(terms).wrap(agent), terms)


class _Terms(msgspec.Struct, frozen=True):
    runs: GuardedRuns
    max_output_tokens: int
    allow_native: frozenset[str]


class _Run:
    """A run under way: its session, whether a question ends it, and the calls that were admitted and not begun."""

    def __init__(self, session: GuardedSession, *, pauses: bool) -> None:
        self.session = session
        self.pauses = pauses
        self.admitted: dict[str, _AdmittedCall] = {}


_RUN: Final[ContextVar[_Run | None]] = ContextVar("halter_openai_agents_run", default=None)


def _find_run() -> _Run:
    run = _RUN.get()
    if run is None:
        raise ConfigError("A guarded agent was run outside of a session: run it with its own `run` or `run_streamed`.")
    return run


class GuardedRunner:
    """Runs an agent under the guard. `agent` is the guarded one, with which a state is read back."""

    def __init__(self, agent: Agent[Any], terms: _Terms) -> None:
        self.agent = agent
        self._terms = terms

    async def run(self, input: Any, *, conversation: str = "", **options: Any) -> RunResult:  # noqa: A002 It is the SDK's name.
        """Run as `Runner.run` does. A run that names its conversation is interrupted by questions and resumed later."""
        async with self._session(input, conversation) as run:
            result = await Runner.run(self.agent, input, **self._guard_options(options))
            if result.interruptions:
                await run.session.pause()
            return result

    def run_sync(self, input: Any, **options: Any) -> RunResult:  # noqa: A002 It is the SDK's name.
        """Calls `run` from a program that is not async."""
        return asyncio.run(self.run(input, **options))

    @asynccontextmanager
    async def run_streamed(
        self,
        input: Any,  # noqa: A002 It is the SDK's name.
        *,
        conversation: str = "",
        **options: Any,
    ) -> AsyncGenerator[RunResultStreaming]:
        """Run as `Runner.run_streamed` does; read the events inside of the block."""
        async with self._session(input, conversation) as run:
            result = Runner.run_streamed(self.agent, input, **self._guard_options(options))
            try:
                yield result
            finally:
                if not result.is_complete:
                    result.cancel()
            if result.interruptions:
                await run.session.pause()

    @asynccontextmanager
    async def _session(self, given: Any, conversation: str) -> AsyncGenerator[_Run]:
        if isinstance(given, RunState) and not conversation:
            raise ConfigError("A state goes on in the conversation that it was made in: name it with `conversation`.")
        task = given if isinstance(given, str) else ""
        named = f"openai-agents.{conversation}" if conversation else ""
        async with self._terms.runs.session(task, named) as session:
            run = _Run(session, pauses=bool(conversation))
            token = _RUN.set(run)
            try:
                yield run
            finally:
                _RUN.reset(token)
                await cancel_and_wait(*(each.settled for each in run.admitted.values()))

    def _guard_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options, with the models of the run's own configuration under the guard."""
        config = options.get("run_config") or RunConfig()
        if not isinstance(config, RunConfig):
            config = RunConfig(**config)
        model = _GuardedModel(config.model, self._terms) if isinstance(config.model, Model) else config.model
        provider = _GuardedProvider(config.model_provider, self._terms)
        return {**options, "run_config": replace(config, model=model, model_provider=provider)}


class _AgentWrapper:
    """Makes guarded copies of an agent, and of those that it hands off to, each once."""

    def __init__(self, terms: _Terms) -> None:
        self._terms = terms
        self._wrapped_agents: dict[int, tuple[Agent[Any], Agent[Any]]] = {}
        """The copies by the ids of what they are of, which are kept: the id of one that is gone is given away."""

    def wrap(self, agent: Agent[Any]) -> Agent[Any]:
        if id(agent) in self._wrapped_agents:
            return self._wrapped_agents[id(agent)][1]
        if agent.mcp_servers:
            names = ", ".join(server.name for server in agent.mcp_servers)
            raise ConfigError(f"No guard would see the tools of {names}: give them to the agent as function tools.")
        model = _GuardedModel(agent.model, self._terms) if isinstance(agent.model, Model) else agent.model
        made = agent.clone(tools=[self._tool(tool) for tool in agent.tools], handoffs=[])
        # Not by `clone`, which would take the settings of a named model for those of none.
        made.model = model
        self._wrapped_agents[id(agent)] = (agent, made)
        made.handoffs = [self._handoff(each) for each in agent.handoffs]
        return made

    def _handoff(self, given: Agent[Any] | Handoff[Any, Any]) -> Any:
        if isinstance(given, Agent):
            return self.wrap(given)
        found = given.on_invoke_handoff

        async def invoke(context: Any, arguments: str) -> Any:
            return self.wrap(await found(context, arguments))

        return replace(given, on_invoke_handoff=invoke)

    def _tool(self, tool: Any) -> Any:
        name = str(getattr(tool, "name", type(tool).__name__))
        if isinstance(tool, FunctionTool) and not getattr(tool, "_is_agent_tool", False):
            return _guard_tool(tool, self._terms.runs)
        if name not in self._terms.allow_native:
            raise ConfigError(
                f"No guard would see what {name} does: leave it out, or name it in `allow_native`. An agent that is "
                "used as a tool can be handed off to instead."
            )
        return tool


class _AdmittedCall:
    """A call that the guard has admitted, and that the SDK has not begun yet."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.work: asyncio.Future[Callable[[Mapping[str, Any]], Any]] = asyncio.get_running_loop().create_future()
        self.settled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def act(self, arguments: Mapping[str, Any]) -> Any:
        self.started.set()
        return await (await self.work)(arguments)


def _guard_tool(tool: FunctionTool, runs: GuardedRuns) -> FunctionTool:
    """The same tool, which is admitted before it begins, and settled when it has ended."""
    spec = runs.spec(tool.name, tool.description, lambda: tool.params_json_schema)

    async def needs_approval(_: Any, arguments: dict[str, Any], call: str) -> bool:
        """Let the guard admit the call; say whether a person has to decide first."""
        run, admitted = _find_run(), _AdmittedCall()
        if not run.pauses:
            return False
        admitted.settled = asyncio.ensure_future(run.session.act(spec, arguments, admitted.act, name=call))
        begun = asyncio.ensure_future(admitted.started.wait())
        await asyncio.wait([admitted.settled, begun], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if admitted.settled.done() and isinstance(admitted.settled.exception(), DecisionPending):
            return True
        run.admitted[call] = admitted
        return False

    async def invoke(context: Any, written: str) -> Any:
        run, call = _find_run(), context.tool_call_id
        arguments = msgspec.json.decode(written or "{}", type=dict[str, Any])

        async def work(admitted: Mapping[str, Any]) -> Any:
            # The words of the model, unless a person put others in their place.
            text = written if admitted == arguments else msgspec.json.encode(admitted).decode()
            return await tool.on_invoke_tool(context, text)

        try:
            if (known := run.admitted.pop(call, None)) is None:
                return await run.session.act(spec, arguments, work, name=call, wait=not run.pauses)
            known.work.set_result(work)
            return await known.settled
        except EffectRefused as refused:
            if refused.terminal:
                raise
            return str(refused)

    return FunctionTool(
        name=tool.name,
        description=tool.description,
        params_json_schema=tool.params_json_schema,
        on_invoke_tool=invoke,
        strict_json_schema=tool.strict_json_schema,
        is_enabled=tool.is_enabled,
        tool_input_guardrails=tool.tool_input_guardrails,
        tool_output_guardrails=tool.tool_output_guardrails,
        needs_approval=needs_approval,
        timeout_seconds=tool.timeout_seconds,
        timeout_behavior=tool.timeout_behavior,
        timeout_error_function=tool.timeout_error_function,
    )


class _GuardedProvider(ModelProvider):
    def __init__(self, wrapped: ModelProvider, terms: _Terms) -> None:
        self._wrapped = wrapped
        self._terms = terms

    def get_model(self, model_name: str | None) -> Model:
        return _GuardedModel(self._wrapped.get_model(model_name), self._terms)


class _GuardedModel(Model):
    def __init__(self, wrapped: Model, terms: _Terms) -> None:
        self._wrapped = wrapped
        self._terms = terms

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 It is the SDK's name.
        model_settings: ModelSettings,
        tools: Any,
        *args: Any,
        **options: Any,
    ) -> ModelResponse:
        async def ask(fits: int) -> ModelResult[ModelResponse]:
            settings = replace(model_settings, max_tokens=fits)
            answer = await self._wrapped.get_response(system_instructions, input, settings, tools, *args, **options)
            return ModelResult(answer, str(answer.to_input_items()), _read_usage(answer.usage))

        return await self._hold(system_instructions, input, model_settings, tools, ask)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 It is the SDK's name.
        model_settings: ModelSettings,
        tools: Any,
        *args: Any,
        **options: Any,
    ) -> AsyncGenerator[Any]:
        async def request(emit: Callable[[Any], None]) -> None:
            async def ask(fits: int) -> ModelResult[None]:
                settings = replace(model_settings, max_tokens=fits)
                ended: Any = None
                async for event in self._wrapped.stream_response(
                    system_instructions, input, settings, tools, *args, **options
                ):
                    ended = getattr(event, "response", ended)
                    emit(event)
                return ModelResult(None, str(getattr(ended, "output", "")), _read_usage(getattr(ended, "usage", None)))

            await self._hold(system_instructions, input, model_settings, tools, ask)

        async with aclosing(stream_from(request)) as events:
            async for event in events:
                yield event

    async def _hold(self, system: str | None, given: Any, settings: ModelSettings, tools: Any, ask: Any) -> Any:
        schemas = [
            [tool.name, getattr(tool, "description", ""), getattr(tool, "params_json_schema", {})] for tool in tools
        ]
        sent = msgspec.json.encode([system, given, schemas], enc_hook=str).decode()
        limit = settings.max_tokens or self._terms.max_output_tokens
        name = str(getattr(self._wrapped, "model", type(self._wrapped).__name__))
        named = name if ":" in name else f"openai:{name}"
        return await ask_model(_find_run().session, named, sent, ask, limit)


def _read_usage(usage: Any) -> Usage | None:
    """Read the usage of an answer; one that was not reported settles the request at its hold."""
    if usage is None or not usage.total_tokens:
        return None
    cached = getattr(usage.input_tokens_details, "cached_tokens", 0) or 0
    written = getattr(usage.input_tokens_details, "cache_write_tokens", 0) or 0
    return read_usage(usage.input_tokens, usage.output_tokens, cached, written)
