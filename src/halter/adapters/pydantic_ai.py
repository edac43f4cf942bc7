"""Guard a Pydantic AI agent.

```python
agent = guard(Agent("openai:gpt-6-luna", tools=[pay]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = await agent.run("Pay the bill.")
```

Each run is a guarded session. Each attempt of each model request is held before it is sent, with `max_tokens` lowered
to what fits, and settled by its usage. Each tool call is admitted, made and settled. A call that needs a person ends
the run with `DeferredToolRequests` if that is one of the agent's output types, and otherwise waits. A halt and a cap
raise EffectRefused, which ends the run.

No hook sees provider-side tools (web search, code execution): a request that offers one is rejected, unless its name is
in `allow_native`. Realtime sessions and batches are rejected too.
"""

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from functools import partial
from typing import Any

import msgspec
from pydantic_ai.agent import AbstractAgent, AgentRunResult, WrapperAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ApprovalRequired
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, ToolCallPart
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, RunContext, ToolDefinition
from pydantic_ai.usage import RequestUsage
from pydantic_core import to_jsonable_python

from halter.adapters.attachments import FrameworkRequest, find_limit, lower_limit
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRun,
    GuardedRuns,
    read_task_text,
    read_usage,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard


def guard(
    agent: AbstractAgent[Any, Any],
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
) -> "GuardedAgent":
    """Return the agent with every run under the guard. `tools` has the properties of its tools."""
    return GuardedAgent(agent, GuardCapability(GuardedRuns(guard, tools, max_output_tokens, allow_native)))


class GuardedAgent(WrapperAgent[Any, Any]):
    """An agent whose runs are guarded sessions."""

    def __init__(self, wrapped: AbstractAgent[Any, Any], capability: "GuardCapability") -> None:
        super().__init__(wrapped)
        self._capability = capability

    @asynccontextmanager
    async def iter(self, *args: Any, **options: Any) -> AsyncGenerator[Any]:
        """Run the agent. All other ways to run it call this method."""
        capabilities = options.pop("capabilities", None) or ()
        async with self.wrapped.iter(*args, **options, capabilities=[self._capability, *capabilities]) as run:
            yield run

    def realtime_session(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("A realtime session calls no hooks and cannot be guarded. Use `run` or `iter`.")


class GuardCapability(AbstractCapability[Any]):
    """A capability that passes an agent's calls and requests through the guard; one copy for each run."""

    def __init__(self, runs: GuardedRuns) -> None:
        self._runs = runs
        self._run: GuardedRun | None = None

    async def for_run(self, ctx: RunContext[Any]) -> "GuardCapability":
        return copy(self)

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> AgentRunResult[Any]:
        can_pause = ctx.agent is not None and _can_defer(ctx.agent)
        async with self._runs.run(read_task_text(ctx.prompt), str(ctx.conversation_id), can_pause=can_pause) as run:
            self._run = run
            result = await handler()
            run.has_question = isinstance(result.output, DeferredToolRequests)
            return result

    def get_wrapper_model(self, model: Model) -> Model | None:
        return _GuardedModel(model, self._find_run())

    async def wrap_tool_execute(
        self, ctx: RunContext[Any], *, call: ToolCallPart, tool_def: ToolDefinition, args: dict[str, Any], handler: Any
    ) -> Any:
        run, arguments = self._find_run(), call.args_as_dict()
        spec = self._runs.spec(call.tool_name, tool_def.description or "", lambda: tool_def.parameters_json_schema)

        async def act(admitted_arguments: Mapping[str, Any]) -> Any:
            # The arguments that the framework validated, unless a person edited them.
            return await handler(args if admitted_arguments == arguments else dict(admitted_arguments))

        try:
            return await run.call(spec, arguments, act, name=call.tool_call_id)
        except DecisionPending as pending:
            raise ApprovalRequired(metadata={"decision": pending.decision, "session": run.session.id}) from None
        except EffectRefused as refused:
            return run.describe_refusal(refused)

    def _find_run(self) -> GuardedRun:
        if self._run is None:
            raise ConfigError("A guarded agent ran outside a session. Use `run`, `iter` or `run_stream`.")
        return self._run


class _GuardedModel(WrapperModel):
    def __init__(self, wrapped: Model, run: GuardedRun) -> None:
        super().__init__(wrapped)
        self._run = run

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        async def ask(limit: int | None) -> ModelResult[ModelResponse]:
            settings = _lower(model_settings, limit)
            answer = await self.wrapped.request(messages, settings, model_request_parameters)
            return ModelResult(answer, answer.text or "", _read_usage(answer.usage))

        return await self._run.ask(self._read(messages, model_settings, model_request_parameters), ask)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        def send(limit: int | None) -> AbstractAsyncContextManager[StreamedResponse]:
            settings = _lower(model_settings, limit)
            return self.wrapped.request_stream(messages, settings, model_request_parameters, run_context)

        def report(stream: StreamedResponse) -> ModelResult[None]:
            answer = stream.get()
            return ModelResult(None, answer.text or "", _read_usage(answer.usage))

        request = self._read(messages, model_settings, model_request_parameters)
        async with self._run.hold_open(request, send, report) as stream:
            yield stream

    def _read(
        self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: ModelRequestParameters
    ) -> FrameworkRequest:
        self._run.runs.reject_unseen(tool.kind for tool in parameters.native_tools)
        tools = [*parameters.function_tools, *parameters.output_tools]
        schemas = [[tool.name, tool.description, tool.parameters_json_schema] for tool in tools]
        sent_json = b"[%s,%s]" % (_render(messages), msgspec.json.encode(schemas, enc_hook=str))
        model = f"{self.wrapped.system}:{self.wrapped.model_name}"
        return FrameworkRequest(model, sent_json.decode(), find_limit(settings or {}))


def _render(messages: list[ModelMessage]) -> bytes:
    """Render messages as JSON. The framework's encoder is the fallback: it renders more, and is 100 times slower."""
    try:
        return msgspec.json.encode(messages, enc_hook=partial(to_jsonable_python, fallback=str))
    except (TypeError, ValueError, RecursionError):
        return ModelMessagesTypeAdapter.dump_json(messages)


def _lower(settings: ModelSettings | None, limit: int | None) -> ModelSettings | None:
    return settings if limit is None else lower_limit(settings or {}, limit)  # pyright: ignore[reportReturnType]  The same mapping, with other limits.


def _read_usage(usage: RequestUsage) -> Usage | None:
    """Read the usage of an answer. Without tokens it was not reported, and the request settles at its hold."""
    if not usage.has_values():
        return None
    return read_usage(usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, usage.cache_write_tokens)


def _can_defer(agent: AbstractAgent[Any, Any]) -> bool:
    kinds = agent.output_type
    return DeferredToolRequests in (kinds if isinstance(kinds, list | tuple) else [kinds])
