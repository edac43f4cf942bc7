"""Guard an agent of Microsoft's agent-framework.

```python
desk = guard(Agent(client, tools=[pay]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = await desk.run("Pay the bill.")
```

Each run is a guarded session. Each model request is held before it is sent, with `max_tokens` lowered to what fits, and
settled by its usage. Each tool call is admitted, made and settled. A call that needs a person ends a run that has an
`AgentSession` with a `function_approval_request`: approve it in Halter and answer the request in the same session. Any
other run waits for the decision. A halt and a cap raise EffectRefused.

The guard does not see hosted tools and agents as tools: an agent with one is rejected, unless the tool's name is in
`allow_native`. A client without the framework's function and chat middleware is rejected, since it calls no guard.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, cast

import msgspec
from agent_framework import (
    Agent,
    AgentResponse,
    AgentSession,
    ChatContext,
    ChatMiddleware,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    FunctionInvocationContext,
    FunctionInvocationLayer,
    FunctionMiddleware,
    FunctionTool,
    Message,
    MiddlewareFailure,
    MiddlewareTermination,
    ResponseStream,
)

from halter.adapters.attachments import FrameworkRequest, as_mapping, find_limit, lower_limit
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
from halter.external.item_stream import Emit

APPROVAL_REQUEST: Final = "function_approval_request"


def guard(
    agent: Agent[Any],
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
) -> "GuardedChatAgent":
    """Return the agent with every run under the guard. `tools` has the properties of its tools.

    Raises ConfigError for a tool or a client that the guard would not see.
    """
    client, runs = agent.client, GuardedRuns(guard, tools, max_output_tokens, allow_native)
    if not isinstance(client, FunctionInvocationLayer) or not isinstance(client, ChatMiddlewareLayer):
        raise ConfigError(
            f"{type(client).__name__} calls no function and chat middleware, so the guard cannot see its requests. Use "
            "a client with FunctionInvocationLayer and ChatMiddlewareLayer."
        )
    runs.reject_unseen(_name_unseen(agent.default_options.get("tools")))
    return GuardedChatAgent(agent, runs)


class GuardedChatAgent:
    """An agent whose runs are guarded sessions."""

    def __init__(self, agent: Agent[Any], runs: GuardedRuns) -> None:
        self._agent = agent
        self._runs = runs

    def run(self, messages: Any = None, *, stream: bool = False, **options: Any) -> Any:
        """Run as `Agent.run` does: await the result, or iterate over the updates with `stream`."""
        if stream:
            return ResponseStream(self._updates(messages, options), finalizer=AgentResponse.from_updates)
        return self._run(messages, options)

    async def _run(self, messages: Any, options: dict[str, Any]) -> AgentResponse[Any]:
        async with self._open(messages, options) as run:
            result = await self._agent.run(messages, **_guard_options(run, options))
            run.has_question = _has_question(result.user_input_requests)
            return result

    async def _updates(self, messages: Any, options: dict[str, Any]) -> AsyncGenerator[Any]:
        requests: list[Content] = []
        async with self._open(messages, options) as run:
            async for update in self._agent.run(messages, stream=True, **_guard_options(run, options)):
                requests += update.user_input_requests
                yield update
            run.has_question = _has_question(requests)

    def _open(self, messages: Any, options: dict[str, Any]) -> AbstractAsyncContextManager[GuardedRun]:
        task, session = read_task_text(_as_list(messages)[-1:]), options.get("session")
        conversation = f"agent-framework.{session.session_id}" if isinstance(session, AgentSession) else ""
        return self._runs.run(task, conversation, can_pause=session is not None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


def _guard_options(run: GuardedRun, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run. The guard comes after every other middleware of the run."""
    return {**options, "middleware": [*(options.get("middleware") or ()), _GuardedRequests(run), _GuardedCalls(run)]}


class _GuardedCalls(FunctionMiddleware):
    """Middleware that admits each tool call of a run before it is made, and settles it."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run

    async def process(self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]) -> None:
        call = str(context.metadata["call_id"])
        try:
            answer = await self._act(context, call, call_next)
        except DecisionPending as pending:
            context.result = _ask_for_approval(context, call, pending)
            raise MiddlewareTermination(str(pending)) from None
        except Exception as error:
            # The model sees a tool's own error. An error of the guard must end the loop instead.
            if self._run.failure.done():
                raise MiddlewareFailure(str(error)) from error
            if not isinstance(error, EffectRefused):
                raise
            context.result = str(error)
        else:
            if context.result is None:
                context.result = answer  # Another process made this call before.

    async def _act(
        self, context: FunctionInvocationContext, call: str, call_next: Callable[[], Awaitable[None]]
    ) -> Any:
        tool, arguments = context.function, _arguments_of(context)
        spec = self._run.runs.spec(tool.name, tool.description, tool.parameters)

        async def act(admitted_arguments: Mapping[str, Any]) -> Any:
            if admitted_arguments != arguments:
                context.arguments = dict(admitted_arguments)
            await call_next()
            return [each.to_dict() if isinstance(each, Content) else each for each in _as_list(context.result)]

        return await self._run.call(spec, arguments, act, name=call)


class _GuardedRequests(ChatMiddleware):
    """Middleware that holds the maximum cost of each model request of a run, and settles its true cost."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        options = dict(context.options or {})
        self._run.runs.reject_unseen(_name_unseen(options.get("tools")))

        async def send(limit: int | None) -> Any:
            context.options = lower_limit(options, limit)
            await call_next()
            return context.result

        async def ask(limit: int | None) -> ModelResult[None]:
            answer = await send(limit)
            return ModelResult(None, answer.text, _read_usage(answer))

        async def stream(limit: int | None, emit: Emit) -> ModelResult[None]:
            updates = await send(limit)
            async for update in updates:
                await emit(update)
            answer = await updates.get_final_response()
            return ModelResult(None, answer.text, _read_usage(answer))

        request = _read_request(context, options)
        if context.stream:
            context.result = ResponseStream(self._run.stream(request, stream), finalizer=ChatResponse.from_updates)
        else:
            await self._run.ask(request, ask)


def _read_request(context: ChatContext, options: Mapping[str, Any]) -> FrameworkRequest:
    tools = [
        [tool.name, tool.description, tool.parameters()] if isinstance(tool, FunctionTool) else tool
        for tool in _as_list(options.get("tools"))
    ]
    sent = [options.get("instructions"), context.messages, tools]
    sent_json = msgspec.json.encode(sent, enc_hook=_to_attributes).decode()
    return FrameworkRequest(_name_model(context, options), sent_json, find_limit(options))


def _to_attributes(value: Any) -> Any:
    """Return the attributes of a message or a content. The framework's `to_dict` is ten times slower."""
    if not isinstance(value, Message | Content):
        return str(value)
    return {name: each for name, each in vars(value).items() if each is not None and name != "raw_representation"}


def _has_question(requests: Sequence[Content]) -> bool:
    return any(each.type == APPROVAL_REQUEST for each in requests)


def _ask_for_approval(context: FunctionInvocationContext, call: str, pending: DecisionPending) -> Content:
    """Make the framework's approval request. After a yes there without an approval in Halter, it gets a new id."""
    occurrence_id = str(context.metadata.get("function_call_occurrence_id") or call)
    response = context.metadata.get("approval_response")
    request_id = f"{response.id}:again" if isinstance(response, Content) else occurrence_id
    return Content.from_function_approval_request(
        id=request_id,
        function_call=Content.from_function_call(
            call, context.function.name, arguments=_arguments_of(context), id=occurrence_id
        ),
        additional_properties={
            "decision": pending.decision,
            "_approval_request_id": request_id,
            "_replacement_approval_request": request_id != occurrence_id,
        },
    )


def _arguments_of(context: FunctionInvocationContext) -> dict[str, Any]:
    arguments = context.arguments
    return dict(arguments) if isinstance(arguments, Mapping) else arguments.model_dump()


def _name_unseen(tools: Any) -> list[str]:
    """Return the tools that run outside the guard: provider-side tools, and agents, which make their own requests."""
    return [
        str(getattr(tool, "name", None) or as_mapping(tool).get("type") or type(tool).__name__)
        for tool in _as_list(tools)
        if not isinstance(tool, FunctionTool) or ".as_tool." in getattr(tool.func, "__qualname__", "")
    ]


def _name_model(context: ChatContext, options: Mapping[str, Any]) -> str:
    name = options.get("model") or getattr(context.client, "model", None) or type(context.client).__name__
    provider = getattr(context.client, "OTEL_PROVIDER_NAME", "unknown")
    return name if ":" in str(name) else f"{provider}:{name}"


def _read_usage(answer: ChatResponse[Any]) -> Usage | None:
    """Read the usage of an answer; one that was not reported settles the request at its hold."""
    usage = as_mapping(answer.usage_details)
    input_tokens, output_tokens = usage.get("input_token_count"), usage.get("output_token_count")
    if input_tokens is None or output_tokens is None:
        return None
    cached, cache_written = usage.get("cache_read_input_token_count"), usage.get("cache_creation_input_token_count")
    return read_usage(input_tokens, output_tokens, cached or 0, cache_written or 0)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(cast("Sequence[Any]", value))
    return [] if value is None else [value]
