"""Guard an agent of the OpenAI Agents SDK.

```python
desk = guard(Agent(name="desk", tools=[pay]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = await desk.run("Pay the bill.")
```

Each run is a guarded session that includes all agents of its handoffs, and the agents that are tools. Each model
request is held before it is sent, with its limit lowered to what fits, and settled by its usage. Each tool call, also
of an MCP server, is admitted, made and settled. A call that needs a person interrupts a run that names its
`conversation`: approve it in Halter and in the run's state, and run that state in the same conversation. Any other run
waits for the decision. A halt and a cap raise EffectRefused.

The call of an agent that is a tool is admitted and settled before that agent runs. Its own requests and calls follow in
the same session, so they share its caps, and each of them is recorded.

The guard does not see hosted tools, shells, patches and computers: an agent with one is rejected, unless the name of
the tool is in `allow_native`.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any, Final

import msgspec
from agents import Agent, Handoff, Model, ModelResponse, ModelSettings, RunConfig, Runner, RunResult, RunState
from agents.models.interface import ModelProvider
from agents.result import RunResultStreaming
from agents.tool import FunctionTool

from halter.adapters.attachments import FrameworkRequest, find_limit, lower_limit
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRun,
    GuardedRuns,
    ReportedEffect,
    read_task_text,
    read_usage,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard
from halter.external.item_stream import Emit


def guard(
    agent: Agent[Any],
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
) -> "GuardedRunner":
    """Return a runner of the agent with every run under the guard. `tools` has the properties of its tools.

    Raises ConfigError for a tool that the guard would not see.
    """
    runs = GuardedRuns(guard, tools, max_output_tokens, allow_native)
    return GuardedRunner(_AgentWrapper(runs).wrap(agent), runs)


_RUN: Final[ContextVar[GuardedRun | None]] = ContextVar("halter_openai_agents_run", default=None)


def _find_run() -> GuardedRun:
    run = _RUN.get()
    if run is None:
        raise ConfigError("A guarded agent ran outside a session. Use `run` or `run_streamed` of the guarded runner.")
    return run


class GuardedRunner:
    """A runner of an agent under the guard. `agent` is the guarded copy; pass it when you load a RunState."""

    def __init__(self, agent: Agent[Any], runs: GuardedRuns) -> None:
        self.agent = agent
        self._runs = runs

    async def run(self, input: Any, *, conversation: str = "", **options: Any) -> RunResult:  # noqa: A002 It is the SDK's name.
        """Run as `Runner.run` does. With a `conversation`, a pending decision interrupts the run, which can resume."""
        async with self._session(input, conversation) as run:
            result = await Runner.run(self.agent, input, **self._guard_options(options))
            run.has_question = bool(result.interruptions) and run.can_pause
            return result

    def run_sync(self, input: Any, **options: Any) -> RunResult:  # noqa: A002 It is the SDK's name.
        """Call `run` from a program that is not async."""
        return asyncio.run(self.run(input, **options))

    @asynccontextmanager
    async def run_streamed(
        self,
        input: Any,  # noqa: A002 It is the SDK's name.
        *,
        conversation: str = "",
        **options: Any,
    ) -> AsyncGenerator[RunResultStreaming]:
        """Run as `Runner.run_streamed` does. Read the events inside the `async with` block."""
        async with self._session(input, conversation) as run:
            result = Runner.run_streamed(self.agent, input, **self._guard_options(options))
            try:
                yield result
            finally:
                if not result.is_complete:
                    result.cancel()
            run.has_question = bool(result.interruptions) and run.can_pause

    @asynccontextmanager
    async def _session(self, run_input: Any, conversation: str) -> AsyncGenerator[GuardedRun]:
        if isinstance(run_input, RunState) and not conversation:
            raise ConfigError("A RunState continues only in its own conversation. Pass it as `conversation`.")
        task = read_task_text(run_input[-1:] if isinstance(run_input, list) else run_input)
        conversation_id = f"openai-agents.{conversation}" if conversation else ""
        async with self._runs.run(task, conversation_id, can_pause=bool(conversation)) as run:
            token = _RUN.set(run)
            try:
                yield run
            finally:
                _RUN.reset(token)

    def _guard_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Copy the options with the models of the run's configuration under the guard."""
        return {**options, "run_config": _guard_config(options.get("run_config"))}


def _guard_config(config: Any) -> RunConfig:
    config = config or RunConfig()
    if not isinstance(config, RunConfig):
        config = RunConfig(**config)
    model = _GuardedModel(config.model) if isinstance(config.model, Model) else config.model
    return replace(config, model=model, model_provider=_GuardedProvider(config.model_provider))


class _AgentWrapper:
    """A factory of guarded copies: of an agent, of each agent that it hands off to, and of each that is a tool."""

    def __init__(self, runs: GuardedRuns) -> None:
        self._runs = runs
        self._wrapped_agents: dict[int, tuple[Agent[Any], Agent[Any]]] = {}
        """The originals with their copies, by the id of the original. A kept original's id cannot be reused."""
        self._classes: dict[type[Any], type[Any]] = {}

    def wrap(self, agent: Agent[Any]) -> Agent[Any]:
        if id(agent) in self._wrapped_agents:
            return self._wrapped_agents[id(agent)][1]
        model = _GuardedModel(agent.model) if isinstance(agent.model, Model) else agent.model
        guarded_agent = agent.clone(tools=[], handoffs=[])
        # `clone` would replace the settings of a named model with the defaults.
        guarded_agent.model = model
        guarded_agent.__class__ = self._get_class(type(agent))
        self._wrapped_agents[id(agent)] = (agent, guarded_agent)
        guarded_agent.tools = [self._tool(tool) for tool in agent.tools]
        guarded_agent.handoffs = [self._handoff(each) for each in agent.handoffs]
        return guarded_agent

    def _get_class(self, agent_class: type[Any]) -> type[Any]:
        """Get the subclass of an agent's class that guards the tools of MCP servers. The SDK's own copies keep it."""
        if agent_class not in self._classes:

            async def get_mcp_tools(agent: Any, run_context: Any) -> list[Any]:
                return [self._tool(tool) for tool in await agent_class.get_mcp_tools(agent, run_context)]

            members = {"get_mcp_tools": get_mcp_tools, "__module__": agent_class.__module__}
            self._classes[agent_class] = type(agent_class.__name__, (agent_class,), members)
        return self._classes[agent_class]

    def _handoff(self, handoff: Agent[Any] | Handoff[Any, Any]) -> Any:
        if isinstance(handoff, Agent):
            return self.wrap(handoff)
        invoke_original = handoff.on_invoke_handoff

        async def invoke(context: Any, arguments: str) -> Any:
            return self.wrap(await invoke_original(context, arguments))

        return replace(handoff, on_invoke_handoff=invoke)

    def _tool(self, tool: Any) -> Any:
        if isinstance(tool, FunctionTool):
            if not getattr(tool, "_is_agent_tool", False):
                return _guard_tool(tool, self._runs)
            if (agent_tool := self._agent_tool(tool)) is not None:
                return _guard_tool(agent_tool, self._runs, runs_agent=True)
        name = str(getattr(tool, "name", type(tool).__name__))
        if name not in self._runs.allow_native:
            raise ConfigError(f"The guard cannot see what {name} does. Remove it, or add its name to `allow_native`.")
        return tool

    def _agent_tool(self, tool: FunctionTool) -> FunctionTool | None:
        """Copy a tool that runs an agent so that it runs the guarded copy. Return None if it is not made as expected.

        The SDK has no public way to do so: `Agent.as_tool` makes a function of the agent and of what it was given.
        """
        agent: Any = getattr(tool, "_agent_instance", None)
        invoker = copy(tool.on_invoke_tool)
        function = getattr(invoker, "_invoke_tool_impl", None)
        if agent is None or not isinstance(function, FunctionType) or function.__module__ != Agent.__module__:
            return None
        values = {**inspect.getclosurevars(function).nonlocals}
        if values.get("self") is not agent or "run_config" not in values:
            return None
        wrapped_agent = values["self"] = self.wrap(agent)
        if values["run_config"] is not None:
            values["run_config"] = _guard_config(values["run_config"])
        code = function.__code__
        cells = tuple(CellType(values[name]) for name in code.co_freevars)
        run_agent = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
        setattr(invoker, "_invoke_tool_impl", run_agent)  # noqa: B010 As above.
        return replace(tool, on_invoke_tool=invoker, _agent_instance=wrapped_agent)


def _guard_tool(tool: FunctionTool, runs: GuardedRuns, *, runs_agent: bool = False) -> FunctionTool:
    """Copy a tool so that the guard admits each call before it starts, and settles it after it ends.

    With `runs_agent`, the effect of a call is only that it was admitted. It returns the admitted arguments, and the
    agent runs after it: a call in progress would stop it at its time limit, and could not wait for a person with it.
    """
    spec = runs.spec(tool.name, tool.description, lambda: tool.params_json_schema)

    async def needs_approval(context: Any, arguments: dict[str, Any], call: str) -> bool:
        """Pass the call to the guard; return True if a person has to decide first."""
        run = _find_run()
        own: Any = tool.needs_approval
        if own is True or (own and await own(context, arguments, call)):
            return True
        if not run.can_pause:
            return False
        effect = ReportedEffect()

        async def act(admitted_arguments: Mapping[str, Any]) -> Any:
            # The SDK says how the call is made when it starts it.
            work = await effect.act(admitted_arguments)
            return await work(admitted_arguments)

        is_admitted = await effect.admit(run.call(spec, arguments, act, name=call))
        if not is_admitted and isinstance(effect.settlement.exception(), DecisionPending):
            return True
        run.admitted[call] = effect
        return False

    async def invoke(context: Any, arguments_json: str) -> Any:
        run, call = _find_run(), context.tool_call_id
        arguments = msgspec.json.decode(arguments_json or "{}", type=dict[str, Any])

        async def work(admitted_arguments: Mapping[str, Any]) -> Any:
            # The model's own text, unless a person edited the arguments.
            is_same = admitted_arguments == arguments
            text = arguments_json if is_same else msgspec.json.encode(admitted_arguments).decode()
            return text if runs_agent else await tool.on_invoke_tool(context, text)

        try:
            if (effect := run.admitted.pop(call, None)) is None:
                result = await run.call(spec, arguments, work, name=call)
            else:
                effect.outcome.set_result(work)
                result = await effect.settlement
        except EffectRefused as refused:
            return run.describe_refusal(refused)
        if runs_agent:
            result = await tool.on_invoke_tool(context, result)
            # An agent that is a tool makes a text of what ended it.
            run.require_running()
        return result

    return replace(tool, on_invoke_tool=invoke, needs_approval=needs_approval)


class _GuardedProvider(ModelProvider):
    def __init__(self, wrapped: ModelProvider) -> None:
        self._wrapped = wrapped

    def get_model(self, model_name: str | None) -> Model:
        return _GuardedModel(self._wrapped.get_model(model_name))


class _GuardedModel(Model):
    def __init__(self, wrapped: Model) -> None:
        self._wrapped = wrapped

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 It is the SDK's name.
        model_settings: ModelSettings,
        tools: Any,
        *args: Any,
        **options: Any,
    ) -> ModelResponse:
        async def ask(limit: int | None) -> ModelResult[ModelResponse]:
            settings = _lower(model_settings, limit)
            answer = await self._wrapped.get_response(system_instructions, input, settings, tools, *args, **options)
            return ModelResult(answer, str(answer.to_input_items()), _read_usage(answer.usage))

        return await _find_run().ask(self._read(system_instructions, input, model_settings, tools), ask)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 It is the SDK's name.
        model_settings: ModelSettings,
        tools: Any,
        *args: Any,
        **options: Any,
    ) -> AsyncGenerator[Any]:
        async def send(limit: int | None, emit: Emit) -> ModelResult[None]:
            response: Any = None
            settings = _lower(model_settings, limit)
            async for event in self._wrapped.stream_response(
                system_instructions, input, settings, tools, *args, **options
            ):
                response = getattr(event, "response", response)
                await emit(event)
            usage = _read_usage(getattr(response, "usage", None))
            return ModelResult(None, str(getattr(response, "output", "")), usage)

        request = self._read(system_instructions, input, model_settings, tools)
        async with aclosing(_find_run().stream(request, send)) as events:
            async for event in events:
                yield event

    def _read(self, system: str | None, request_input: Any, settings: ModelSettings, tools: Any) -> FrameworkRequest:
        schemas = [
            [tool.name, getattr(tool, "description", ""), getattr(tool, "params_json_schema", {})] for tool in tools
        ]
        sent_json = msgspec.json.encode([system, request_input, schemas], enc_hook=str).decode()
        name = str(getattr(self._wrapped, "model", type(self._wrapped).__name__))
        own_limit = find_limit(_list_limit_settings(settings))
        return FrameworkRequest(name if ":" in name else f"openai:{name}", sent_json, own_limit)


def _list_limit_settings(settings: ModelSettings) -> dict[str, Any]:
    names = ("max_tokens", "extra_args", "extra_body")
    return {name: value for name in names if (value := getattr(settings, name)) is not None}


def _lower(settings: ModelSettings, limit: int | None) -> ModelSettings:
    return settings if limit is None else replace(settings, **lower_limit(_list_limit_settings(settings), limit))


def _read_usage(usage: Any) -> Usage | None:
    """Read the usage of an answer; one that was not reported settles the request at its hold."""
    if usage is None or not usage.total_tokens:
        return None
    cached = getattr(usage.input_tokens_details, "cached_tokens", 0) or 0
    cache_written = getattr(usage.input_tokens_details, "cache_write_tokens", 0) or 0
    return read_usage(usage.input_tokens, usage.output_tokens, cached, cache_written)
