"""Guard a crew of CrewAI.

```python
desk = guard(Crew(agents=[clerk], tasks=[task]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = desk.kickoff()
```

Each kickoff is a guarded session, and runs a copy of the crew. Each model request is held before it is sent, with its
token limit lowered to what fits, and settled by its usage. Each tool call is admitted, made and settled. A call that
needs a person waits for the decision. A halt and a cap raise EffectRefused. If the process of a conversation was
killed, the next kickoff continues its session: decisions still apply, and a completed call is not repeated.

CrewAI continues after a hook or a tool raises. The guard therefore wraps the models and the tools themselves, and
records the error that ends a run: no request and no call starts after it. Memory, knowledge, planning, MCP servers,
apps, remote agents, provider-side tools and agents of another class are rejected, unless their name is in
`allow_native`.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache
from hashlib import sha256
from threading import Lock, Thread
from typing import Any, Final

import msgspec
from crewai import Agent, Crew, llm_overlay
from crewai.hooks.dispatch import HookAborted, InterceptionPoint, scoped_hooks
from crewai.tools.agent_tools.base_agent_tools import BaseAgentTool
from crewai.utilities.llm_utils import create_llm

from halter.adapters.attachments import OutputLimit, ask_model
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRuns,
    ReportedEffect,
    read_usage,
    reject_unseen,
)
from halter.core.errors import ConfigError
from halter.core.tools import ToolSpec
from halter.core.usage import Usage
from halter.loop.session_runtime import cancel_and_wait
from halter.runtime.external_effects import Act, EffectRefused, ModelResult
from halter.runtime.guard_api import Guard, GuardedSession
from halter.tools.function_tool import canonical_json

_LIMIT_FIELDS: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens")
"""The fields of CrewAI's models that limit an answer."""
_UNSEEN_CREW_FIELDS: Final = ("memory", "knowledge", "knowledge_sources", "planning", "function_calling_llm", "stream")
_UNSEEN_AGENT_FIELDS: Final = (
    *("memory", "knowledge", "knowledge_sources", "function_calling_llm", "mcps", "apps", "a2a"),
    "allow_code_execution",
)
_UNSEEN_MODEL_FIELDS: Final = ("builtin_tools", "additional_params")


def guard(
    crew: Crew,
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int | None = None,
    allow_native: Collection[str] = (),
) -> "GuardedCrew":
    """Return the crew with every kickoff under the guard. `tools` has the properties of its tools.

    Raises ConfigError for anything that the guard would not see.
    """
    reject_unseen(_name_unseen(crew), allow_native)
    return GuardedCrew(crew, lambda: GuardedRuns(guard, tools), max_output_tokens, frozenset(allow_native))


class GuardedCrew:
    """A crew whose kickoffs are guarded sessions. Several threads may call `kickoff` concurrently."""

    def __init__(
        self,
        crew: Crew,
        make_runs: Callable[[], GuardedRuns],
        max_output_tokens: int | None,
        allow_native: frozenset[str],
    ) -> None:
        self._crew = crew
        self._loop = _LoopThread(make_runs)
        self._max_output_tokens = max_output_tokens
        self._allow_native = allow_native

    def kickoff(self, inputs: dict[str, Any] | None = None, *, conversation: str = "") -> Any:
        """Run as `Crew.kickoff` does. It waits while a decision is pending.

        A kickoff of the same `conversation` continues the session of a process that died, from the crew's beginning:
        the model requests are repeated, and a call that was made returns its earlier result for the same arguments.
        """
        if llm_overlay.active.get() is not None:
            raise ConfigError("llm_overlay replaces models, so the guard cannot see them. Call `kickoff` without it.")
        context = copy_context()
        with self._loop.open() as (loop, runs):
            return asyncio.run_coroutine_threadsafe(self._run(runs, context.run, inputs, conversation), loop).result()

    async def _run(
        self, runs: GuardedRuns, run_in_context: Callable[..., Any], inputs: dict[str, Any] | None, conversation: str
    ) -> Any:
        task = " ".join(each.description for each in self._crew.tasks)
        async with runs.session(task, f"crewai.{conversation}" if conversation else "") as session:
            run = _CrewRun(session, runs, self._max_output_tokens, self._allow_native)
            kickoff = _start_thread(run_in_context, self._kickoff, run, inputs)
            try:
                await asyncio.wait([kickoff, run.failure], return_when=asyncio.FIRST_COMPLETED)
                if run.failure.done():
                    raise run.failure.result()
                return kickoff.result()
            finally:
                # A thread cannot be stopped, but it starts no effect after this.
                await run.close()

    def _kickoff(self, run: "_CrewRun", inputs: dict[str, Any] | None) -> Any:
        crew = self._crew.copy()
        for agent in [*crew.agents, *([crew.manager_agent] if crew.manager_agent else [])]:
            agent.llm, agent.tools = _guard_model(agent.llm, run), _guard_tools(agent.tools, run)
        for task in crew.tasks:
            task.tools = _guard_tools(task.tools, run)
        if crew.manager_llm is not None:
            crew.manager_llm = _guard_model(create_llm(crew.manager_llm), run)
        hooks = {
            InterceptionPoint.PRE_MODEL_CALL: [run.reject_model],
            InterceptionPoint.PRE_TOOL_CALL: [run.reject_tool],
        }
        with scoped_hooks(hooks):
            return crew.kickoff(inputs=inputs)


class _CrewRun:
    """A run in progress: the effects of its threads, and the failure that ended it."""

    def __init__(
        self, session: GuardedSession, runs: GuardedRuns, max_output_tokens: int | None, allow_native: frozenset[str]
    ) -> None:
        self.session = session
        self.runs = runs
        self.max_output_tokens = max_output_tokens
        self._allow_native = allow_native
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._effects: set[ReportedEffect] = set()
        self._call_counts: Counter[str] = Counter()
        self._is_closed = False

    def have(self, judge: Callable[[ReportedEffect], Awaitable[Any]], perform: Callable[[Any], tuple[Any, Any]]) -> Any:
        """Run an effect in a thread of the crew, between the guard's admission and its settlement.

        `perform` returns the crew's value and the value to report. Raises the errors of `perform`, and EffectRefused.
        """
        effect = self._wait(self._begin(judge))
        if not effect.admission.done():
            return effect.settlement.result()  # The result of this effect in an earlier process, which died.
        try:
            value, report = perform(effect.admission.result())
        except Exception as error:
            self._wait(self._settle(effect, error=error))
            raise
        self._wait(self._settle(effect, report))
        return value

    async def call(self, spec: ToolSpec, values: Mapping[str, Any], act: Act) -> Any:
        """Check a call under a name that a later process can repeat: a digest of its arguments, and a count."""
        digest = sha256(spec.name.encode() + canonical_json(msgspec.to_builtins(dict(values)))).hexdigest()[:16]
        self._call_counts[digest] += 1
        return await self.session.act(spec, values, act, name=f"{digest}.{self._call_counts[digest]}", wait=True)

    def _wait(self, work: Any) -> Any:
        if self._is_closed:
            work.close()
            raise HookAborted("The run has ended.", "halter")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, judge: Callable[[ReportedEffect], Awaitable[Any]]) -> ReportedEffect:
        if self.failure.done():
            raise self._abort(self.failure.result())
        effect = ReportedEffect()
        try:
            if not await effect.admit(judge(effect)):
                effect.settlement.result()
        except EffectRefused as refused:
            if refused.terminal:
                raise self._abort(refused) from refused
            raise
        except Exception as error:
            raise self._abort(error) from error
        if effect.admission.done():
            self._effects.add(effect)
            effect.settlement.add_done_callback(lambda settled: self._end_early(effect, settled))
        return effect

    def _end_early(self, effect: ReportedEffect, settlement: asyncio.Future[Any]) -> None:
        """End the run on a halt while a thread still waits for its provider or its tool."""
        if effect in self._effects and not settlement.cancelled() and (error := settlement.exception()):
            self._abort(error)

    async def _settle(self, effect: ReportedEffect, report: Any = None, error: Exception | None = None) -> None:
        self._effects.discard(effect)
        if not effect.outcome.done():
            effect.outcome.set_exception(error) if error else effect.outcome.set_result(report)
        try:
            await effect.settlement
        except Exception as raised:
            if raised is not error:
                raise self._abort(raised) from raised

    def _abort(self, error: BaseException) -> HookAborted:
        """Record the error for the caller of `kickoff`, and return one after which CrewAI does not continue."""
        if not self.failure.done():
            self.failure.set_result(error)
        return HookAborted(str(error), "halter")

    async def close(self) -> None:
        self._is_closed = True
        with suppress(Exception):
            await cancel_and_wait(*(each.settlement for each in self._effects))

    def reject_model(self, context: Any) -> None:
        if getattr(context.llm, "_halter", None) is not self:
            self._refuse(str(getattr(context.llm, "model", context.llm)))

    def reject_tool(self, context: Any) -> None:
        tool = getattr(context.tool, "_original_tool", None) or context.tool
        if tool is not None and not isinstance(tool, BaseAgentTool) and not hasattr(tool, "_halter"):
            self._refuse(context.tool_name)

    def _refuse(self, name: str) -> None:
        try:
            reject_unseen([name], self._allow_native)
        except ConfigError as error:
            self._loop.call_soon_threadsafe(self._abort, error)
            raise HookAborted(str(error), "halter") from error


class _LoopThread:
    """An event loop in a separate thread while any crew runs: CrewAI is not async."""

    def __init__(self, make_runs: Callable[[], GuardedRuns]) -> None:
        self._make_runs = make_runs
        self._lock = Lock()
        self._users = 0
        self._loop_and_thread: tuple[asyncio.AbstractEventLoop, GuardedRuns] | None = None
        self._thread: Thread | None = None

    @contextmanager
    def open(self) -> Iterator[tuple[asyncio.AbstractEventLoop, GuardedRuns]]:
        with self._lock:
            if self._loop_and_thread is None:
                self._loop_and_thread = (asyncio.new_event_loop(), self._make_runs())
                self._thread = Thread(target=self._loop_and_thread[0].run_forever, name="halter-crewai", daemon=True)
                self._thread.start()
            self._users += 1
            loop_and_runs = self._loop_and_thread
        try:
            yield loop_and_runs
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._close()

    def _close(self) -> None:
        if self._loop_and_thread is None or self._thread is None:
            return
        loop, self._loop_and_thread = self._loop_and_thread[0], None
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()


def _start_thread(run_in_context: Callable[..., Any], work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Run a function in a new thread, which may still wait for its provider after a halt ended the run."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    future.add_done_callback(lambda _: future.cancelled() or future.exception())  # It may end after its run.

    def end(settle: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            settle(value)

    def run() -> None:
        try:
            outcome = (future.set_result, run_in_context(work, *args))
        except BaseException as error:  # noqa: BLE001 It is raised where the run is awaited.
            outcome = (future.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed, because the run ended earlier.
            loop.call_soon_threadsafe(end, *outcome)

    Thread(target=run, name="halter-crew", daemon=True).start()
    return future


@cache
def _derive_model(model_class: Any) -> Any:
    class GuardedModelOfCrew(model_class):
        def call(self, messages: Any, tools: Any = None, *args: Any, **options: Any) -> Any:
            return _ask_guarded(self, model_class, messages, tools, args, options)

        async def acall(self, *_: Any, **__: Any) -> Any:
            raise HookAborted("A guarded crew is not async. Use `kickoff`, in a thread if needed.", "halter")

    return GuardedModelOfCrew


@cache
def _derive_tool(tool_class: Any) -> Any:
    class GuardedToolOfCrew(tool_class):
        def run(self, *args: Any, **arguments: Any) -> Any:
            return _call_guarded(self, self._halter[1].run, args, arguments)

        def _run(self, *args: Any, **arguments: Any) -> Any:
            return _call_guarded(self, self._halter[1]._run, args, arguments)  # noqa: SLF001 CrewAI calls either.

        async def arun(self, *_: Any, **__: Any) -> Any:
            raise HookAborted("A guarded crew is not async. Use `kickoff`, in a thread if needed.", "halter")

        _arun = arun

    return GuardedToolOfCrew


def _copy_as(kind: Any, original: Any, binding: Any) -> Any:
    clone = copy.copy(original)
    object.__setattr__(clone, "__class__", kind)
    object.__setattr__(clone, "_halter", binding)
    return clone


def _guard_model(model: Any, run: _CrewRun) -> Any:
    return _copy_as(_derive_model(type(model)), model, run)


def _guard_tools(tools: Any, run: _CrewRun) -> list[Any]:
    return [_copy_as(_derive_tool(type(tool)), tool, (run, tool)) for tool in tools or ()]


def _ask_guarded(model: Any, model_class: Any, messages: Any, tools: Any, args: Any, options: Any) -> Any:
    run: _CrewRun = model._halter  # noqa: SLF001 It is ours.
    limit_field = _find_limit(model)
    request_json = msgspec.json.encode([messages, tools, str(options.get("response_model"))], enc_hook=str).decode()
    # A copy of the model for one request, with its own limit and its own token counts.
    single_use = _copy_as(model_class, model, run)
    single_use._token_usage = dict.fromkeys(model._token_usage, 0)  # noqa: SLF001 The sum of the model is of all threads.

    def ask(limit: int | None) -> tuple[Any, ModelResult[None]]:
        if limit is not None:
            setattr(single_use, limit_field, limit)
        single_use.n = None  # Several answers would cost more than the hold.
        answer = single_use.call(messages, tools, *args, **options)
        return answer, ModelResult(None, str(answer), _read_usage(single_use))

    def judge(effect: ReportedEffect) -> Awaitable[Any]:
        own_limit = getattr(model, limit_field)
        limit = OutputLimit(None if own_limit is None else int(own_limit), run.max_output_tokens)
        return ask_model(run.session, _name_model(model), request_json, effect.act, limit)

    try:
        return run.have(judge, ask)
    finally:
        for name, tokens in single_use._token_usage.items():  # noqa: SLF001 As above.
            model._token_usage[name] += tokens  # noqa: SLF001


def _call_guarded(tool: Any, run_tool: Callable[..., Any], args: Any, arguments: dict[str, Any]) -> Any:
    run: _CrewRun = tool._halter[0]  # noqa: SLF001 It is ours.
    if args:
        arguments = dict(zip(tool.args_schema.model_fields, args, strict=False)) | arguments
    spec = run.runs.spec(tool.name, tool.description, tool.args_schema.model_json_schema)

    def judge(effect: ReportedEffect) -> Awaitable[Any]:
        return run.call(spec, arguments, effect.act)

    def call(admitted_arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        result = run_tool(**admitted_arguments)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        return result, result

    try:
        return run.have(judge, call)
    except EffectRefused as refused:
        return str(refused)


def _find_limit(model: Any) -> str:
    """Return the field that limits an answer: Gemini's, else the one that is set, else the newest of the model."""
    fields = [each for each in _LIMIT_FIELDS if each in type(model).model_fields]
    if fields[0] == _LIMIT_FIELDS[0]:
        return fields[0]
    return next((each for each in fields if getattr(model, each) is not None), fields[0])


def _read_usage(model: Any) -> Usage | None:
    """Read the usage of one request; one that was not reported settles the request at its hold."""
    usage = model.get_token_usage_summary()
    if not usage.total_tokens:
        return None
    return read_usage(
        usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.cache_creation_tokens
    )


def _name_model(model: Any) -> str:
    if ":" in model.model or "/" in model.model:
        return model.model
    return f"{model.provider or 'openai'}:{model.model}"


def _name_unseen(crew: Crew) -> Iterator[str]:
    """Yield the parts of a crew that would run or request a model outside the guard."""
    yield from _name_set(crew, _UNSEEN_CREW_FIELDS)
    for agent in [*crew.agents, *([crew.manager_agent] if crew.manager_agent else [])]:
        if type(agent) is not Agent:
            yield type(agent).__name__
            continue
        yield from _name_set(agent, _UNSEEN_AGENT_FIELDS)
        yield from _name_set(agent.llm, _UNSEEN_MODEL_FIELDS)
    if crew.manager_llm is not None:
        yield from _name_set(create_llm(crew.manager_llm), _UNSEEN_MODEL_FIELDS)


def _name_set(target: Any, names: Collection[str]) -> Iterator[str]:
    yield from (name for name in names if getattr(target, name, None))
