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

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
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

from halter.adapters.attachments import OutputLimit, ask_model, find_limit, lower_limit
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRuns,
    as_mapping,
    read_task_text,
    read_usage,
    reject_unseen,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard, GuardedSession
from halter.external.item_stream import Emit, stream_from

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
    client, allowed_names = agent.client, frozenset(allow_native)
    if not isinstance(client, FunctionInvocationLayer) or not isinstance(client, ChatMiddlewareLayer):
        raise ConfigError(
            f"{type(client).__name__} calls no function and chat middleware, so the guard cannot see its requests. Use "
            "a client with FunctionInvocationLayer and ChatMiddlewareLayer."
        )
    reject_unseen(_name_unseen(agent.default_options.get("tools")), allowed_names)
    return GuardedChatAgent(agent, GuardedRuns(guard, tools), max_output_tokens, allowed_names)


class GuardedChatAgent:
    """An agent whose runs are guarded sessions."""

    def __init__(
        self, agent: Agent[Any], runs: GuardedRuns, max_output_tokens: int | None, allow_native: frozenset[str]
    ) -> None:
        self._agent = agent
        self._runs = runs
        self._max_output_tokens = max_output_tokens
        self._allow_native = allow_native

    def run(self, messages: Any = None, *, stream: bool = False, **options: Any) -> Any:
        """Run as `Agent.run` does: await the result, or iterate over the updates with `stream`."""
        if stream:
            return ResponseStream(self._updates(messages, options), finalizer=AgentResponse.from_updates)
        return self._run(messages, options)

    async def _run(self, messages: Any, options: dict[str, Any]) -> AgentResponse[Any]:
        async with self._runs.session(read_task_text(_as_list(messages)[-1:]), _find_conversation(options)) as session:
            with _translate_guard_errors():
                result = await self._agent.run(messages, **self._guard_options(session, options))
            await _pause_for_approval(session, result.user_input_requests)
            return result

    async def _updates(self, messages: Any, options: dict[str, Any]) -> AsyncGenerator[Any]:
        requests: list[Content] = []
        async with self._runs.session(read_task_text(_as_list(messages)[-1:]), _find_conversation(options)) as session:
            with _translate_guard_errors():
                async for update in self._agent.run(messages, stream=True, **self._guard_options(session, options)):
                    requests += update.user_input_requests
                    yield update
            await _pause_for_approval(session, requests)

    def _guard_options(self, session: GuardedSession, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a run. The guard comes after every other middleware of the run."""
        guard_middleware = [
            _GuardedRequests(session, self._max_output_tokens, self._allow_native),
            _GuardedCalls(session, self._runs, can_pause=options.get("session") is not None),
        ]
        return {**options, "middleware": [*(options.get("middleware") or ()), *guard_middleware]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class _GuardedCalls(FunctionMiddleware):
    """Middleware that admits each tool call of a run before it is made, and settles it."""

    def __init__(self, session: GuardedSession, runs: GuardedRuns, *, can_pause: bool) -> None:
        self._session = session
        self._runs = runs
        self._can_pause = can_pause

    async def process(self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]) -> None:
        call, error_recorder = str(context.metadata["call_id"]), _Raised()
        try:
            answer = await self._act(context, call, error_recorder.watch(call_next))
        except DecisionPending as pending:
            context.result = _ask_for_approval(context, call, pending)
            raise MiddlewareTermination(str(pending)) from None
        except EffectRefused as refused:
            if refused.terminal:
                raise MiddlewareFailure(str(refused)) from refused
            context.result = str(refused)
        except Exception as error:
            # The model sees a tool's own error. An error of the guard must end the loop instead.
            if error is error_recorder.error:
                raise
            raise MiddlewareFailure(f"The guard failed to check {context.function.name}: {error}") from error
        else:
            if context.result is None:
                context.result = answer  # Another process made this call before.

    async def _act(
        self, context: FunctionInvocationContext, call: str, call_next: Callable[[], Awaitable[None]]
    ) -> Any:
        tool, arguments = context.function, _arguments_of(context)
        spec = self._runs.spec(tool.name, tool.description, tool.parameters)

        async def act(admitted_arguments: Mapping[str, Any]) -> Any:
            if admitted_arguments != arguments:
                context.arguments = dict(admitted_arguments)
            await call_next()
            return [each.to_dict() if isinstance(each, Content) else each for each in _as_list(context.result)]

        return await self._session.act(spec, arguments, act, name=call, wait=not self._can_pause)


class _Raised:
    """A recorder of the error that a tool itself raised."""

    error: Exception | None = None

    def watch(self, call_next: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def record_error() -> None:
            try:
                await call_next()
            except Exception as error:
                self.error = error
                raise

        return record_error


class _GuardedRequests(ChatMiddleware):
    """Middleware that holds the maximum cost of each model request of a run, and settles its true cost."""

    def __init__(self, session: GuardedSession, max_output_tokens: int | None, allow_native: frozenset[str]) -> None:
        self._session = session
        self._max_output_tokens = max_output_tokens
        self._allow_native = allow_native

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        options = dict(context.options or {})
        reject_unseen(_name_unseen(options.get("tools")), self._allow_native)

        async def open_answer(limit: int | None) -> Any:
            context.options = lower_limit(options, limit)
            await call_next()
            return context.result

        if context.stream:
            context.result = ResponseStream(
                self._stream(context, options, open_answer), finalizer=ChatResponse.from_updates
            )
            return

        async def ask(limit: int | None) -> ModelResult[None]:
            answer = await open_answer(limit)
            return ModelResult(None, answer.text, _read_usage(answer))

        await self._hold(context, options, ask)

    async def _stream(self, context: ChatContext, options: dict[str, Any], open_answer: Any) -> AsyncGenerator[Any]:
        async def request(emit: Emit) -> None:
            async def ask(limit: int | None) -> ModelResult[None]:
                stream = await open_answer(limit)
                async for update in stream:
                    await emit(update)
                answer = await stream.get_final_response()
                return ModelResult(None, answer.text, _read_usage(answer))

            await self._hold(context, options, ask)

        async with aclosing(stream_from(request)) as updates:
            async for update in updates:
                yield update

    async def _hold(self, context: ChatContext, options: dict[str, Any], ask: Any) -> None:
        tools = [
            [tool.name, tool.description, tool.parameters()] if isinstance(tool, FunctionTool) else tool
            for tool in _as_list(options.get("tools"))
        ]
        request_json = msgspec.json.encode(
            [options.get("instructions"), context.messages, tools], enc_hook=_to_attributes
        ).decode()
        limit = OutputLimit(find_limit(options), self._max_output_tokens)
        await ask_model(self._session, _name_model(context, options), request_json, ask, limit)


def _to_attributes(value: Any) -> Any:
    """Return the attributes of a message or a content. The framework's `to_dict` is ten times slower."""
    if not isinstance(value, Message | Content):
        return str(value)
    return {name: each for name, each in vars(value).items() if each is not None and name != "raw_representation"}


@contextmanager
def _translate_guard_errors() -> Generator[None]:
    """Raise the guard's own error after it ended the framework's loop."""
    try:
        yield
    except MiddlewareFailure as failed:
        raise failed.__cause__ or failed from None


async def _pause_for_approval(session: GuardedSession, requests: Sequence[Content]) -> None:
    if any(each.type == APPROVAL_REQUEST for each in requests):
        await session.pause()


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


def _find_conversation(options: Mapping[str, Any]) -> str:
    session = options.get("session")
    return f"agent-framework.{session.session_id}" if isinstance(session, AgentSession) else ""


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(cast("Sequence[Any]", value))
    return [] if value is None else [value]
