"""Guard a LangChain agent: `create_agent` with one more argument.

```python
agent = create_agent("openai:gpt-6-luna", tools=[pay], guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = await agent.ainvoke({"messages": [{"role": "user", "content": "Pay the bill."}]})
```

The agent is a graph of LangGraph: it runs in every way in which one runs, also as a node, a tool or a subagent of
another one. Each run is a guarded session. Each model request is held before it is sent, with its limit lowered to what
fits, and settled by its usage. Each tool call is admitted, made and settled. A call that needs a person interrupts the
run if it has a checkpointer, and otherwise waits. A halt and a cap raise EffectRefused, which ends the run.

Provider-side tools are passed as dictionaries, and no hook sees them: an agent with one is rejected, unless its type is
in `allow_native`. The guard does not see nodes of graphs that `create_agent` did not make.
"""

from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final
from urllib.parse import quote

import msgspec
from langchain import agents
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, messages_to_dict
from langchain_core.runnables import RunnableBinding
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.graph.state import CompiledStateGraph  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import interrupt

from halter.adapters.attachments import (
    LIMIT_NAMES,
    FrameworkRequest,
    as_mapping,
    find_limit,
    lower_limit,
    lower_limits,
)
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRun,
    GuardedRuns,
    iterate_in_thread,
    read_task_text,
    read_usage,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard

SESSION_KEY: Final = "__halter_session"
"""The configuration key of a run's session. LangGraph does not write keys with this prefix into checkpoints."""
PARENT_TASK: Final = "__pregel_task_id"
"""The configuration key of a run that is a part of another graph."""
_PLACE_KEYS: Final = ("thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map")
"""A configuration with one of these says where its run is. Otherwise LangGraph takes that from the calling graph."""


def create_agent(
    model: str | BaseChatModel,
    tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] = (),
    *,
    guard: Guard,
    tool_options: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
    middleware: Sequence[AgentMiddleware[Any, Any]] = (),
    **options: Any,
) -> "GuardedGraph":
    """Make LangChain's agent with every run under the guard. `tool_options` has the properties of its tools.

    Raises ConfigError for a tool that the provider would run on its side.
    """
    runs = GuardedRuns(guard, tool_options, max_output_tokens, allow_native)
    runs.reject_unseen(_name_native(tools))
    guard_middleware = GuardMiddleware(runs)
    # The first middleware is the outermost. The guard is the last, so that no other middleware can bypass it.
    make_agent: Callable[..., Any] = getattr(agents, "create_agent")  # noqa: B009 Its own types are not complete.
    agent = make_agent(model, list(tools), middleware=[*middleware, guard_middleware], **options)
    return _put_under_guard(agent, runs, guard_middleware)


class GuardedGraph(CompiledStateGraph[Any, Any, Any, Any]):
    """LangChain's agent, whose runs are guarded sessions: a graph like any other, alone or as a part of another one.

    LangGraph starts every run in `stream` or `astream`. A run that starts in another way is rejected.
    """

    _runs: GuardedRuns
    _middleware: "GuardMiddleware"

    def copy(self, update: dict[str, Any] | None = None) -> "GuardedGraph":
        return _put_under_guard(super().copy(update), self._runs, self._middleware)

    async def astream(self, input: Any, config: Any = None, **options: Any) -> AsyncGenerator[Any]:  # noqa: A002 It is LangChain's name.
        async with aclosing(self._stream_guarded(self._runs, input, config, options)) as chunks:
            async for chunk in chunks:
                yield chunk

    def stream(self, input: Any, config: Any = None, **options: Any) -> Generator[Any]:  # noqa: A002 As above.
        """Stream from a program that is not async: the run has a thread of its own, and its own connection."""
        yield from iterate_in_thread(lambda: self._stream_guarded(self._runs.detach(), input, config, options))

    async def _stream_guarded(
        self, runs: GuardedRuns, run_input: Any, config: Any, options: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        place, leaving = self._find_place(config), None
        run_graph: Callable[..., AsyncGenerator[Any]] = getattr(super(), "astream")  # noqa: B009 Its types are not complete.
        async with runs.run(_text_of(run_input), _name_conversation(place)) as run:
            session_config = _name_session(config, run.session.id)
            try:
                with self._middleware.serving(run):
                    async with aclosing(run_graph(run_input, session_config, **options)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                run.has_question = await self._is_interrupted(place, session_config)
            except GraphBubbleUp as bubble:
                # The run is a part of another graph, which waits for a person or takes over.
                leaving = bubble
                run.has_question = isinstance(bubble, GraphInterrupt)
        if leaving is not None:
            raise leaving

    def _find_place(self, config: Any) -> Mapping[str, Any]:
        """Find the thread of a run, and its place in the graph that it is a part of."""
        own = {**_find_configurable(self.config), **_find_configurable(config)}
        if any(own.get(key) for key in _PLACE_KEYS):
            return own
        return {**_find_configurable(var_child_runnable_config.get()), **own}

    async def _is_interrupted(self, place: Mapping[str, Any], config: Any) -> bool:
        """Return whether a run that is no part of another graph waits for a person."""
        if PARENT_TASK in place or not getattr(self, "checkpointer", None):
            return False
        return bool((await self.aget_state(config)).interrupts)


def _put_under_guard(agent: Any, runs: GuardedRuns, middleware: "GuardMiddleware") -> GuardedGraph:
    """Turn a new graph into a guarded one."""
    agent.__class__ = GuardedGraph
    agent._runs, agent._middleware = runs, middleware  # noqa: SLF001 They are ours.
    return agent


class GuardMiddleware(AgentMiddleware[Any, Any]):
    """Middleware that passes an agent's calls and requests through the session of its run."""

    def __init__(self, runs: GuardedRuns) -> None:
        super().__init__()
        self._runs = runs
        self._runs_by_session: dict[str, GuardedRun] = {}
        self._specs: dict[str, tuple[BaseTool, list[Any]]] = {}

    @contextmanager
    def serving(self, run: GuardedRun) -> Generator[None]:
        self._runs_by_session[run.session.id] = run
        try:
            yield
        finally:
            del self._runs_by_session[run.session.id]

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Any) -> ModelResponse[Any]:
        self._runs.reject_unseen(_name_native([*request.tools, *_find_bound_tools(request.model)]))

        async def ask(limit: int | None) -> ModelResult[ModelResponse[Any]]:
            answer = await handler(request if limit is None else _lower(request, limit))
            messages = [message for message in answer.result if isinstance(message, AIMessage)]
            return ModelResult(answer, "".join(str(each.text) for each in messages), _read_usage(messages))

        own_limit, longest = _find_limits(request)
        sent = FrameworkRequest(_name_model(request.model), self._render(request), own_limit, longest)
        return await self._find_run().ask(sent, ask)

    def _render(self, request: ModelRequest[Any]) -> str:
        """Render the whole request as text."""
        messages: list[BaseMessage] = [*([request.system_message] if request.system_message else []), *request.messages]
        tools = [tool if isinstance(tool, dict) else self._get_spec_fields(tool) for tool in request.tools]
        return msgspec.json.encode([messages_to_dict(messages), tools], enc_hook=str).decode()

    def _get_spec_fields(self, tool: BaseTool) -> list[Any]:
        """Return a tool's name, description and schema. The schema is built once, since that is the slowest step."""
        entry = self._specs.get(tool.name)
        if entry is None or entry[0] is not tool:
            entry = self._specs[tool.name] = (tool, [tool.name, tool.description, tool.get_input_jsonschema()])
        return entry[1]

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Any) -> Any:
        run, call, tool = self._find_run(), request.tool_call, request.tool
        schema = tool.get_input_jsonschema if tool else dict
        spec = self._runs.spec(call["name"], tool.description if tool else "", schema)
        run.can_pause = bool(get_config().get("configurable", {}).get("__pregel_checkpointer"))
        interrupts: list[GraphInterrupt] = []

        async def act(admitted_arguments: Mapping[str, Any]) -> Any:
            try:
                return await handler(request.override(tool_call={**call, "args": dict(admitted_arguments)}))
            except GraphInterrupt as interrupted:
                interrupts.append(interrupted)
                return INTERRUPTED

        name, attempts = str(call["id"]), 1
        try:
            while (result := await run.call(spec, call["args"], act, name=name)) == INTERRUPTED:
                if interrupts:
                    raise interrupts[0]
                attempts += 1
                name = f"{call['id']}.{attempts}"
        except DecisionPending as pending:
            # The answer to the interrupt is not the decision. Only the decision in Halter counts: it is read again.
            interrupt({"decision": pending.decision, "session": run.session.id, "tool": spec.name})
            return await self.awrap_tool_call(request, handler)
        except EffectRefused as refused:
            text = run.describe_refusal(refused)
            return ToolMessage(text, tool_call_id=call["id"], name=call["name"], status="error")
        # An earlier process made the call: its result is a text.
        is_earlier = isinstance(result, str)
        return ToolMessage(result, tool_call_id=call["id"], name=call["name"]) if is_earlier else result

    def wrap_model_call(self, request: ModelRequest[Any], handler: Any) -> ModelResponse[Any]:
        raise ConfigError(OUTSIDE)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Any) -> Any:
        raise ConfigError(OUTSIDE)

    def _find_run(self) -> GuardedRun:
        session_id = get_config().get("configurable", {}).get(SESSION_KEY)
        if session_id not in self._runs_by_session:
            raise ConfigError(OUTSIDE)
        return self._runs_by_session[session_id]


INTERRUPTED: Final = "The tool interrupted the run. It begins again when the run is resumed, as a call of its own."
"""The result of a call that was interrupted. A tool's own result is a message, and its text never is this one alone."""

OUTSIDE: Final = "A guarded agent ran outside a session. Run the agent that `create_agent` returned."


def _name_native(tools: Sequence[Any]) -> Iterator[str]:
    """Yield the names of tools that are passed as dictionaries: the provider runs them."""
    for tool in tools:
        if isinstance(tool, dict):
            values = as_mapping(tool)
            yield str(values.get("type") or values.get("name") or next(iter(values), "a tool"))


def _find_bound_tools(model: Any) -> Sequence[Any]:
    """Return the provider-side tools that were bound to the model before the agent was made."""
    return [each for each in as_mapping(getattr(model, "kwargs", None)).get("tools", ()) if "function" not in each]


def _name_model(model: BaseChatModel) -> str:
    # LangChain has no public way to read a model's name.
    params = as_mapping(getattr(model, "_get_ls_params", dict)())
    return f"{params.get('ls_provider') or type(model).__name__}:{params.get('ls_model_name') or 'unnamed'}"


def _find_limits(request: ModelRequest[Any]) -> tuple[int | None, int | None]:
    """Find the limit in the settings of a request, of its binding and of its model; and the model's longest answer."""
    model = _find_model(request.model)
    places = (request.model_settings, as_mapping(getattr(request.model, "kwargs", None)), _list_limit_fields(model))
    own_limit = max(filter(None, map(find_limit, places)), default=None)
    profile = as_mapping(getattr(model, "profile", None))
    return own_limit, None if own_limit else profile.get("max_output_tokens")


def _lower(request: ModelRequest[Any], limit: int) -> ModelRequest[Any]:
    """Copy a request with a lower limit. A model is limited by its own field, since not all read a setting."""
    model = _find_model(request.model)
    name = next((each for each in LIMIT_NAMES if each in _list_fields(model)), None)
    if name is None:
        return request.override(model_settings=lower_limit(request.model_settings, limit))
    limited_model: Any = model.model_copy(update=lower_limit(_list_limit_fields(model), limit, name))
    if isinstance(request.model, RunnableBinding):
        bound_settings = lower_limits(request.model.kwargs, limit)
        limited_model = request.model.model_copy(update={"bound": limited_model, "kwargs": bound_settings})
    return request.override(model=limited_model, model_settings=lower_limits(request.model_settings, limit))


def _find_model(model: Any) -> Any:
    bound: Any = getattr(model, "bound", None)
    return model if bound is None else bound


def _list_limit_fields(model: Any) -> dict[str, Any]:
    fields = _list_fields(model)
    return {
        name: value for name in (*LIMIT_NAMES, "model_kwargs") if name in fields and (value := getattr(model, name))
    }


def _list_fields(model: Any) -> Mapping[str, Any]:
    model_class = model.__class__
    return as_mapping(getattr(model_class, "model_fields", None))


def _read_usage(messages: Sequence[AIMessage]) -> Usage | None:
    """Read the usage of an answer; one that was not reported settles the request at its hold."""
    usage = messages[0].usage_metadata if len(messages) == 1 else None
    if usage is None:
        return None
    details = usage.get("input_token_details") or {}
    cached, cache_written = details.get("cache_read") or 0, details.get("cache_creation") or 0
    return read_usage(usage["input_tokens"], usage["output_tokens"], cached, cache_written)


def _find_configurable(config: Any) -> Mapping[str, Any]:
    return as_mapping(as_mapping(config).get("configurable"))


def _name_conversation(place: Mapping[str, Any]) -> str:
    """Name what a run continues: its thread, and its place if it is a part of another graph of that thread."""
    thread, namespace = place.get("thread_id"), str(place.get("checkpoint_ns") or "")
    if not thread:
        return ""
    return f"langchain.{thread}.{quote(namespace, safe=':')}" if namespace else f"langchain.{thread}"


def _name_session(config: Any, session: str) -> dict[str, Any]:
    return {**as_mapping(config), "configurable": {**_find_configurable(config), SESSION_KEY: session}}


def _text_of(state: Any) -> str:
    messages: Sequence[Any] = as_mapping(state).get("messages", ())
    return read_task_text(messages[-1]) if messages else ""
