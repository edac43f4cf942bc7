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

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
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

from halter.adapters.attachments import OutputLimit, ask_model, find_limit, lower_limit
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRuns,
    read_task_text,
    read_usage,
    reject_unseen,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard, GuardedSession


def guard(
    agent: AbstractAgent[Any, Any],
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
) -> "GuardedAgent":
    """Return the agent with every run under the guard. `tools` has the properties of its tools."""
    capability = GuardCapability(GuardedRuns(guard, tools), max_output_tokens, frozenset(allow_native))
    return GuardedAgent(agent, capability)


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

    def __init__(self, runs: GuardedRuns, max_output_tokens: int | None, allow_native: frozenset[str]) -> None:
        self._runs = runs
        self._max_output_tokens = max_output_tokens
        self._allow_native = allow_native
        self._session: GuardedSession | None = None
        self._pauses = False

    async def for_run(self, ctx: RunContext[Any]) -> "GuardCapability":
        return copy(self)

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> AgentRunResult[Any]:
        self._pauses = ctx.agent is not None and _can_defer(ctx.agent)
        async with self._runs.session(read_task_text(ctx.prompt), str(ctx.conversation_id)) as session:
            self._session = session
            result = await handler()
            if isinstance(result.output, DeferredToolRequests):
                await session.pause()
            return result

    def get_wrapper_model(self, model: Model) -> Model | None:
        if self._session is None:
            raise ConfigError("A guarded agent requested a model outside a run. Use `run`, `iter` or `run_stream`.")
        return _GuardedModel(model, self._session, self._max_output_tokens, self._allow_native)

    async def wrap_tool_execute(
        self, ctx: RunContext[Any], *, call: ToolCallPart, tool_def: ToolDefinition, args: dict[str, Any], handler: Any
    ) -> Any:
        if self._session is None:
            raise ConfigError(f"{call.tool_name} was called outside a guarded run. Use `run`, `iter` or `run_stream`.")
        arguments = call.args_as_dict()
        spec = self._runs.spec(call.tool_name, tool_def.description or "", lambda: tool_def.parameters_json_schema)

        async def act(admitted_arguments: Mapping[str, Any]) -> Any:
            # The arguments that the framework validated, unless a person edited them.
            return await handler(args if admitted_arguments == arguments else dict(admitted_arguments))

        try:
            return await self._session.act(spec, arguments, act, name=call.tool_call_id, wait=not self._pauses)
        except DecisionPending as pending:
            raise ApprovalRequired(metadata={"decision": pending.decision, "session": self._session.id}) from None
        except EffectRefused as refused:
            if refused.terminal:
                raise
            return str(refused)


class _GuardedModel(WrapperModel):
    def __init__(
        self, wrapped: Model, session: GuardedSession, max_output_tokens: int | None, allow_native: frozenset[str]
    ) -> None:
        super().__init__(wrapped)
        self._session = session
        self._max_output_tokens = max_output_tokens
        self._allow_native = allow_native

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        self._reject_native(model_request_parameters)

        async def ask(limit: int | None) -> ModelResult[ModelResponse]:
            settings = _lower(model_settings, limit)
            answer = await self.wrapped.request(messages, settings, model_request_parameters)
            return ModelResult(answer, answer.text or "", _read_usage(answer.usage))

        return await self._hold(messages, model_settings, model_request_parameters, ask)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        self._reject_native(model_request_parameters)
        stream_future: asyncio.Future[StreamedResponse] = asyncio.get_running_loop().create_future()
        reader_done = asyncio.Event()

        async def ask(limit: int | None) -> ModelResult[None]:
            settings = _lower(model_settings, limit)
            async with self.wrapped.request_stream(messages, settings, model_request_parameters, run_context) as stream:
                stream_future.set_result(stream)
                await reader_done.wait()
                answer = stream.get()
                return ModelResult(None, answer.text or "", _read_usage(answer.usage))

        request_task = asyncio.ensure_future(self._hold(messages, model_settings, model_request_parameters, ask))
        await asyncio.wait([request_task, stream_future], return_when=asyncio.FIRST_COMPLETED)
        if not stream_future.done():
            await request_task
        reader = asyncio.current_task()
        request_task.add_done_callback(lambda _: None if reader_done.is_set() or reader is None else reader.cancel())
        try:
            yield stream_future.result()
        except asyncio.CancelledError:
            # A halt ended the request and cancelled the reader: raise the reason of the halt instead.
            if request_task.done() and not reader_done.is_set() and reader is not None:
                reader.uncancel()
                request_task.result()
            raise
        finally:
            reader_done.set()
            await asyncio.wait([request_task])
        request_task.result()

    async def _hold(
        self,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        ask: Any,
    ) -> Any:
        tools = [*parameters.function_tools, *parameters.output_tools]
        schemas = [[tool.name, tool.description, tool.parameters_json_schema] for tool in tools]
        request_json = b"[%s,%s]" % (_render(messages), msgspec.json.encode(schemas, enc_hook=str))
        limit = OutputLimit(find_limit(settings or {}), self._max_output_tokens)
        model_name = f"{self.wrapped.system}:{self.wrapped.model_name}"
        return await ask_model(self._session, model_name, request_json.decode(), ask, limit)

    def _reject_native(self, parameters: ModelRequestParameters) -> None:
        reject_unseen((tool.kind for tool in parameters.native_tools), self._allow_native)


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
