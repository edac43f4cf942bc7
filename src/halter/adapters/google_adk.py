"""Guard an agent of Google's Agent Development Kit.

```python
desk = guard(Runner(app=app, session_service=sessions), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
async for event in desk.run_async(user_id="ada", session_id="s1", new_message=message): ...
```

Each run is a guarded session that includes all agents of the tree: `run_async`, and `run` for a program without an
event loop, with and without streaming. Each model request is held before it is sent, with
`max_output_tokens` lowered to what fits, and settled by its usage. Each tool call is admitted, made and settled. A call
that needs a person ends the run with ADK's own confirmation request: approve it in Halter, and answer the request in
the same session. A halt and a cap raise EffectRefused.

The guard does not see provider-side tools (search, code, URLs), agents as tools, code executors and agents of another
class: they are rejected, unless their name is in `allow_native`.
"""
# pyright: basic, reportMissingImports=false

import copy
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Final
from urllib.parse import quote

import msgspec
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.models import LlmRequest
from google.adk.runners import Runner
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.set_model_response_tool import SetModelResponseTool
from google.adk.tools.tool_context import ToolContext
from google.adk.tools.transfer_to_agent_tool import TransferToAgentTool
from google.adk.workflow import BaseNode
from google.genai.types import Tool

from halter.adapters.attachments import FrameworkRequest
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRun,
    GuardedRuns,
    RunsInThread,
    read_usage,
)
from halter.core.errors import ConfigError
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard
from halter.external.item_stream import Emit, stream_from

ATTEMPT: Final = "halter_attempt:"
"""The prefix of keys in a session's state that count the attempts of a call whose own tool asked for something."""


def guard(
    runner: Runner,
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
) -> "GuardedAdkRunner":
    """Return the runner with every run under the guard. `tools` has the properties of its agents' tools.

    The agents are copied, and the originals are not changed. Raises ConfigError for anything that the guard would not
    see.
    """

    def make_runs() -> GuardedRuns:
        return GuardedRuns(guard, tools, max_output_tokens, allow_native)

    runs = make_runs()
    runs.reject_unseen(_name_unseen(runner))
    guarded_runner = copy.copy(runner)
    guarded_runner.agent = _guard_agent(runner.agent)
    guarded_runner.app = runner.app.model_copy(update={"root_agent": guarded_runner.agent})
    return GuardedAdkRunner(guarded_runner, runs, RunsInThread(make_runs))


_RUN: Final[ContextVar[GuardedRun | None]] = ContextVar("halter_google_adk_run", default=None)


def _find_run() -> GuardedRun:
    run = _RUN.get()
    if run is None:
        raise ConfigError("A guarded agent ran outside a session. Run it with `run_async` of the guarded runner.")
    run.require_running()
    return run


class GuardedAdkRunner:
    """A runner of agents under the guard."""

    def __init__(self, runner: Runner, runs: GuardedRuns, thread: RunsInThread) -> None:
        self._runner = runner
        self._runs = runs
        self._thread = thread

    @property
    def agent(self) -> BaseAgent:
        return self._runner.agent

    async def run_async(
        self, *, user_id: str, session_id: str, new_message: Any = None, **options: Any
    ) -> AsyncGenerator[Any]:
        """Run as `Runner.run_async` does. A run of the same ADK session continues one that ended for a decision."""
        options |= {"user_id": user_id, "session_id": session_id, "new_message": new_message}
        async with aclosing(stream_from(partial(self._run, self._runs, options))) as events:
            async for event in events:
                yield event

    def run(self, *, user_id: str, session_id: str, new_message: Any, **options: Any) -> Generator[Any, None, None]:
        """Run as `Runner.run` does, in a program without an event loop. Several threads may call it concurrently."""
        options |= {"user_id": user_id, "session_id": session_id, "new_message": new_message}

        with self._thread.open() as (thread, runs):
            yield from thread.stream(stream_from(partial(self._run, runs, options)))

    async def _run(self, runs: GuardedRuns, options: dict[str, Any], emit: Emit) -> None:
        key_parts = (self._runner.app_name, options["user_id"], options["session_id"])
        conversation = "google-adk." + ":".join(quote(each, safe="") for each in key_parts)
        async with runs.run(_text_of(options["new_message"]), conversation) as run:
            _RUN.set(run)  # Each run has its own task, and so its own context.
            async with aclosing(self._runner.run_async(**options)) as events:
                async for event in events:
                    run.require_running()
                    await emit(event)


async def _ask_guarded(model: Any, generate: Any, request: LlmRequest, *, stream: bool) -> AsyncGenerator[Any]:
    """Make a request under the guard: hold its maximum cost, and settle its true cost."""
    run = _find_run()

    async def send(limit: int | None, emit: Emit) -> ModelResult[Any]:
        return await _pass_on(generate(_shorten(request, limit), stream=stream), emit)

    try:
        run.runs.reject_unseen(_name_unseen_tools(request))
    except ConfigError as error:
        run.fail(error)
        raise
    name = _name_model(request.model or model.model)
    sent = FrameworkRequest(name, _render(request), request.config.max_output_tokens)
    async with aclosing(run.stream(sent, send)) as answers:
        async for answer in answers:
            yield answer


async def _call_guarded(tool: Any, run_tool: Any, args: dict[str, Any], context: ToolContext) -> Any:
    """Admit a call before it is made, and settle it."""
    run = _find_run()

    async def act(admitted_arguments: Mapping[str, Any]) -> Any:
        result = await run_tool(args=dict(admitted_arguments), tool_context=context)
        _count_attempt(context)
        return result

    if _is_rejected(context):
        return {"error": "This tool call was rejected."}
    try:
        spec = run.runs.spec(tool.name, tool.description, lambda: _schema_of(tool))
        return await run.call(spec, args, act, name=_name_call(context))
    except DecisionPending as pending:
        return _ask_for_confirmation(run, context, pending)
    except EffectRefused as refused:
        return {"error": run.describe_refusal(refused)}


@cache
def _derive_model(model_class: Any) -> Any:
    class GuardedModelOfAdk(model_class):
        async def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> AsyncGenerator[Any]:  # noqa: FBT001, FBT002 It is ADK's.
            answers = _ask_guarded(self, super().generate_content_async, llm_request, stream=stream)
            async with aclosing(answers):
                async for answer in answers:
                    yield answer

        def connect(self, llm_request: LlmRequest) -> Any:
            raise ConfigError(f"The guard cannot see a live connection to {llm_request.model}. Use `run_async`.")

    return GuardedModelOfAdk


@cache
def _derive_tool(tool_class: Any) -> Any:
    class GuardedToolOfAdk(tool_class):
        async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
            return await _call_guarded(self, super().run_async, args, tool_context)

    return GuardedToolOfAdk


@cache
def _derive_toolset(toolset_class: Any) -> Any:
    class GuardedToolsetOfAdk(toolset_class):
        async def get_tools(self, readonly_context: Any = None) -> list[Any]:
            return [_guard_tool(tool) for tool in await super().get_tools(readonly_context)]

    return GuardedToolsetOfAdk


def _is_guarded(value: Any) -> bool:
    return type(value).__module__ == __name__


def _copy_as(derive: Callable[[Any], Any], original: Any) -> Any:
    """Copy an object into a subclass of its class, because ADK checks the classes of models and tools."""
    if _is_guarded(original):
        return original
    clone = copy.copy(original)
    object.__setattr__(clone, "__class__", derive(type(original)))
    return clone


def _guard_agent(agent: Any) -> Any:
    if not isinstance(agent, BaseAgent):
        return agent  # It is in `allow_native`.
    update: dict[str, Any] = {"sub_agents": [_guard_agent(each) for each in agent.sub_agents]}
    if isinstance(agent, LlmAgent):
        update["model"] = _copy_as(_derive_model, agent.canonical_model)
        update["tools"] = [_guard_tool(each) for each in agent.tools]
    return agent.clone(update=update)


def _guard_tool(tool: Any) -> Any:
    if isinstance(tool, BaseToolset):
        toolset = _copy_as(_derive_toolset, tool)
        toolset._cached_prefixed_tools = None  # noqa: SLF001 They are not guarded.
        return toolset
    if isinstance(tool, BaseNode | AgentTool):
        return tool  # It is in `allow_native`.
    return _copy_as(_derive_tool, tool if isinstance(tool, BaseTool) else FunctionTool(func=tool))


def _name_unseen(runner: Runner) -> Iterator[str]:
    """Yield the parts of a runner that would run or request a model outside the guard."""
    compaction = runner.app.events_compaction_config
    if getattr(compaction, "summarizer", None) is not None:
        yield type(compaction.summarizer).__name__
    yield from _name_unseen_agents([runner.agent])


def _name_unseen_agents(agents: Iterable[Any]) -> Iterator[str]:
    for agent in agents:
        if type(agent) not in (LlmAgent, SequentialAgent, ParallelAgent, LoopAgent):
            yield agent.name
            continue
        if isinstance(agent, LlmAgent):
            if agent.code_executor is not None:
                yield type(agent.code_executor).__name__
            yield from (each.name for each in agent.tools if not _can_guard(each))
        yield from _name_unseen_agents(agent.sub_agents)


def _can_guard(tool: Any) -> bool:
    """Return True for a tool that works in its `run_async`: no provider-side tool and no agent."""
    if isinstance(tool, BaseToolset):
        return True
    if isinstance(tool, BaseTool):
        return not isinstance(tool, AgentTool) and type(tool).run_async is not BaseTool.run_async
    return not isinstance(tool, BaseNode)


def _name_unseen_tools(request: LlmRequest) -> Iterator[str]:
    """Yield the tools of a request that the provider would run, and those that were added without the guard."""
    for declaration in request.config.tools or ():
        if isinstance(declaration, Tool):
            yield from (name for name in declaration.model_dump(exclude_none=True) if name != "function_declarations")
        else:
            yield type(declaration).__name__
    for name, tool in request.tools_dict.items():
        if not _is_guarded(tool) and not isinstance(tool, TransferToAgentTool | SetModelResponseTool):
            yield name


def _shorten(request: LlmRequest, limit: int | None) -> LlmRequest:
    """Copy the request with a limit on its answer, unless that is None, and with a single answer."""
    lowered: dict[str, Any] = {} if limit is None else {"max_output_tokens": limit}
    config = request.config.model_copy(update={**lowered, "candidate_count": None})
    return request.model_copy(update={"config": config})


async def _pass_on(answers: AsyncGenerator[Any], emit: Emit) -> ModelResult[Any]:
    """Emit all answers but the last whole one: ADK does not read on after it, so the request is settled before."""
    text, usage, last = "", None, None
    async with aclosing(answers):
        async for answer in answers:
            usage = answer.usage_metadata or usage
            if last is not None:
                await emit(last)
            last = None if answer.partial else answer
            if answer.partial:
                await emit(answer)
            elif answer.content:
                text += answer.content.model_dump_json(exclude_none=True)
    return ModelResult(last, text, _read_usage(usage))


def _read_usage(usage: Any) -> Usage | None:
    """Read the usage of an answer; one that was not reported settles the request at its hold."""
    if usage is None or usage.prompt_token_count is None or usage.candidates_token_count is None:
        return None
    input_tokens = usage.prompt_token_count + (usage.tool_use_prompt_token_count or 0)
    output_tokens = usage.candidates_token_count + (usage.thoughts_token_count or 0)
    return read_usage(input_tokens, output_tokens, usage.cached_content_token_count or 0, 0)


def _render(request: LlmRequest) -> str:
    contents = [msgspec.Raw(each.model_dump_json(exclude_none=True).encode()) for each in request.contents]
    config = {"system_instruction", "tools", "response_schema", "response_json_schema"}
    return msgspec.json.encode(
        [contents, request.config.model_dump(mode="json", include=config, exclude_none=True)], enc_hook=str
    ).decode()


def _name_model(name: str) -> str:
    """Add the provider to a name of ADK, which has none for Gemini and Claude."""
    if ":" in name or "/" in name:
        return name
    return f"anthropic:{name}" if name.startswith("claude") else f"google:{name}"


def _schema_of(tool: Any) -> Any:
    declaration = tool._get_declaration()  # noqa: SLF001 ADK has no public name for it.
    return {} if declaration is None else declaration.model_dump(mode="json", exclude_none=True)


def _is_rejected(context: ToolContext) -> bool:
    """Return True if a person rejected the call in ADK. A tool that asked itself reads its own answer."""
    answer = context.tool_confirmation
    return answer is not None and not answer.confirmed and not context.state.get(ATTEMPT + context.function_call_id)


def _name_call(context: ToolContext) -> str:
    """Return the name of a call. It is the same if ADK repeats the call, unless its own tool asked for the repeat."""
    call = context.function_call_id or ""
    attempt = context.state.get(ATTEMPT + call)
    return f"{call}.{attempt}" if attempt else call


def _count_attempt(context: ToolContext) -> None:
    actions = context.actions
    if actions.requested_auth_configs or actions.requested_tool_confirmations:
        key = ATTEMPT + (context.function_call_id or "")
        context.state[key] = (context.state.get(key) or 0) + 1


def _ask_for_confirmation(run: GuardedRun, context: ToolContext, pending: DecisionPending) -> Any:
    """Send ADK's confirmation request. A yes there without an approval in Halter ends the run, and can be repeated."""
    if context.tool_confirmation is not None:
        run.fail(pending)
        raise pending
    context.request_confirmation(hint=str(pending), payload={"decision": pending.decision})
    context.actions.skip_summarization = True
    return {"error": str(pending)}


def _text_of(message: Any) -> str:
    return " ".join(content.text for content in getattr(message, "parts", None) or () if content.text)
