"""Guard a crew of CrewAI.

```python
desk = guard(Crew(agents=[clerk], tasks=[task]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = desk.kickoff()
```

Each kickoff is a guarded session, and runs a copy of the crew. `kickoff`, `kickoff_async` and `akickoff` stream if the
crew does. Each model request is held before it is sent, with its token limit lowered to what fits, and settled by its
usage. Each tool call is admitted, made and settled. A call that needs a person waits for the decision. A halt and a cap
raise EffectRefused. If the process of a conversation was killed, the next kickoff continues its session: decisions
still apply, and a completed call is not repeated.

CrewAI continues after a hook or a tool raises. The guard therefore wraps the models and the tools themselves, and
records the error that ends a run: no request and no call starts after it. Memory, knowledge, planning, MCP servers,
apps, remote agents, provider-side tools and agents of another class are rejected, unless their name is in
`allow_native`.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import aclosing, suppress
from contextvars import copy_context
from functools import cache
from hashlib import sha256
from threading import Thread
from typing import Any, Final

import msgspec
from crewai import Agent, Crew, llm_overlay
from crewai.hooks.dispatch import HookAborted, InterceptionPoint, scoped_hooks
from crewai.tools.agent_tools.base_agent_tools import BaseAgentTool
from crewai.types.streaming import CrewStreamingOutput
from crewai.utilities.llm_utils import create_llm

from halter.adapters.attachments import FrameworkRequest
from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRun,
    GuardedRuns,
    ReportedEffect,
    RunsInThread,
    read_usage,
)
from halter.core.errors import ConfigError
from halter.core.tools import ToolSpec
from halter.core.usage import Usage
from halter.external.effects import Act, EffectRefused, ModelResult
from halter.external.guard import Guard
from halter.external.item_stream import Emit, stream_from
from halter.external.loop_thread import WorkInLoop
from halter.loop.concurrency import cancel_and_wait
from halter.tools.function_tool import canonical_json

_LIMIT_FIELDS: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens")
"""The fields of CrewAI's models that limit an answer."""
_UNSEEN_CREW_FIELDS: Final = ("memory", "knowledge", "knowledge_sources", "planning", "function_calling_llm")
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

    def make_runs() -> GuardedRuns:
        return GuardedRuns(guard, tools, max_output_tokens, allow_native)

    make_runs().reject_unseen(_name_unseen(crew))
    return GuardedCrew(crew, make_runs)


Start = Callable[["_CrewRun"], "asyncio.Future[Any]"]
"""Starts a kickoff from the guard's loop."""


class GuardedCrew:
    """A crew whose kickoffs are guarded sessions. Any number of them may run concurrently, in threads and loops.

    A kickoff waits while a decision is pending. A kickoff of the same `conversation` continues the session of a process
    that died, from the crew's beginning: the model requests are repeated, and a call that was made returns its earlier
    result for the same arguments.
    """

    def __init__(self, crew: Crew, make_runs: Callable[[], GuardedRuns]) -> None:
        self._crew = crew
        self._guard = RunsInThread(make_runs)

    def kickoff(self, inputs: dict[str, Any] | None = None, *, conversation: str = "") -> Any:
        """Run as `Crew.kickoff` does."""
        start = self._start_in_thread(inputs)
        if self._crew.stream:
            return self._stream(start, conversation)
        with self._guard.open() as (thread, runs):
            return thread.run(self._run(runs, start, conversation, _ignore))

    async def kickoff_async(self, inputs: dict[str, Any] | None = None, *, conversation: str = "") -> Any:
        """Run as `Crew.kickoff_async` does: in a thread, while the caller's loop continues."""
        return await self._finish(self._start_in_thread(inputs), conversation)

    async def akickoff(self, inputs: dict[str, Any] | None = None, *, conversation: str = "") -> Any:
        """Run as `Crew.akickoff` does: in the caller's loop, where the models and the async tools are awaited."""
        return await self._finish(self._start_in_loop(inputs), conversation)

    async def _finish(self, start: Start, conversation: str) -> Any:
        if self._crew.stream:
            return self._stream_async(start, conversation)
        with self._guard.open() as (thread, runs):
            return await thread.start(self._run(runs, start, conversation, _ignore)).wait_async()

    def _stream(self, start: Start, conversation: str) -> CrewStreamingOutput:
        def iterate() -> Iterator[Any]:
            with self._guard.open() as (thread, runs):
                yield from thread.stream(self._read(output, runs, start, conversation))

        output = CrewStreamingOutput(sync_iterator=iterate())
        return output

    def _stream_async(self, start: Start, conversation: str) -> CrewStreamingOutput:
        async def iterate() -> AsyncGenerator[Any]:
            with self._guard.open() as (thread, runs):
                items = self._read(output, runs, start, conversation)
                async with aclosing(thread.stream_async(items)) as chunks:
                    async for chunk in chunks:
                        yield chunk

        output = CrewStreamingOutput()
        output._async_iterator = iterate()  # noqa: SLF001 CrewAI has no public name for it.
        return output

    def _read(
        self, output: CrewStreamingOutput, runs: GuardedRuns, start: Start, conversation: str
    ) -> AsyncGenerator[Any]:
        """Yield the chunks of a kickoff, and set the result of its output."""

        async def work(emit: Emit) -> None:
            output._set_result(await self._run(runs, start, conversation, emit))  # noqa: SLF001 As above.

        return stream_from(work)

    def _start_in_thread(self, inputs: dict[str, Any] | None) -> Start:
        _reject_overlay()
        context = copy_context()
        return lambda run: _start_thread(context.run, self._kickoff, run, inputs)

    def _start_in_loop(self, inputs: dict[str, Any] | None) -> Start:
        _reject_overlay()
        loop, context = asyncio.get_running_loop(), copy_context()

        def start(run: "_CrewRun") -> asyncio.Future[Any]:
            work = WorkInLoop(loop, self._akickoff(run, inputs), context)
            return asyncio.ensure_future(work.wait_async())

        return start

    async def _run(self, runs: GuardedRuns, start: Start, conversation: str, emit: Emit) -> Any:
        task = " ".join(each.description for each in self._crew.tasks)
        conversation_id = f"crewai.{conversation}" if conversation else ""
        async with runs.run(task, conversation_id, can_pause=False) as guarded_run:
            run = _CrewRun(guarded_run, emit)
            kickoff = start(run)
            try:
                await asyncio.wait([kickoff, guarded_run.failure], return_when=asyncio.FIRST_COMPLETED)
                guarded_run.require_running()
                return kickoff.result()
            finally:
                # A thread cannot be stopped, but it starts no effect after this. A task ends here.
                await run.close()
                with suppress(Exception):
                    await cancel_and_wait(kickoff)

    def _kickoff(self, run: "_CrewRun", inputs: dict[str, Any] | None) -> Any:
        crew = self._copy_crew(run)
        with scoped_hooks(run.make_hooks()):
            output = crew.kickoff(inputs=inputs)
            if isinstance(output, CrewStreamingOutput):
                for chunk in output:
                    run.start(run.emit(chunk)).wait()
                return output.result
            return output

    async def _akickoff(self, run: "_CrewRun", inputs: dict[str, Any] | None) -> Any:
        crew = self._copy_crew(run)
        with scoped_hooks(run.make_hooks()):
            output = await crew.akickoff(inputs=inputs)
            if isinstance(output, CrewStreamingOutput):
                async with output:
                    async for chunk in output:
                        await run.start(run.emit(chunk)).wait_async()
                return output.result
            return output

    def _copy_crew(self, run: "_CrewRun") -> Crew:
        crew = self._crew.copy()
        for agent in [*crew.agents, *([crew.manager_agent] if crew.manager_agent else [])]:
            agent.llm, agent.tools = _guard_model(agent.llm, run), _guard_tools(agent.tools, run)
        for task in crew.tasks:
            task.tools = _guard_tools(task.tools, run)
        if crew.manager_llm is not None:
            crew.manager_llm = _guard_model(create_llm(crew.manager_llm), run)
        return crew


Judge = Callable[[ReportedEffect], Awaitable[Any]]
"""Has the guard judge an effect, which another thread or task reports."""
Wait = Callable[[WorkInLoop[Any]], Awaitable[Any]]
"""Waits for work in the guard's loop: in a thread, or in a loop of the program's own."""


async def wait_in_thread(work: WorkInLoop[Any]) -> Any:
    return work.wait()


def run_blocking(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread without a loop: it blocks where others would suspend."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("A coroutine of a thread suspended.")


class _CrewRun:
    """A kickoff in progress: what its threads and tasks do in the run, whose loop is in another thread."""

    def __init__(self, run: GuardedRun, emit: Emit) -> None:
        self.run = run
        self._emit = emit
        self._is_asked = asyncio.Event()
        """Cleared while the reader of a stream has a chunk, and has not asked for the next one."""
        self._is_asked.set()
        self._loop = asyncio.get_running_loop()
        self._call_counts: Counter[str] = Counter()
        self._is_closed = False

    async def have(self, judge: Judge, perform: Callable[[Any], Awaitable[tuple[Any, Any]]], wait: Wait) -> Any:
        """Run an effect of the crew between the guard's admission and its settlement.

        `perform` returns the crew's value and the value to report. Raises the errors of `perform`, and EffectRefused.
        """
        effect = await wait(self.start(self._begin(judge)))
        if not effect.admission.done():
            return effect.settlement.result()  # The result of this effect in an earlier process, which died.
        try:
            value, report = await perform(effect.admission.result())
        except Exception as error:
            await wait(self.start(self._settle(effect, error=error)))
            raise
        await wait(self.start(self._settle(effect, report)))
        return value

    async def call(self, spec: ToolSpec, values: Mapping[str, Any], act: Act) -> Any:
        """Check a call under a name that a later process can repeat: a digest of its arguments, and a count."""
        digest = sha256(spec.name.encode() + canonical_json(msgspec.to_builtins(dict(values)))).hexdigest()[:16]
        self._call_counts[digest] += 1
        return await self.run.call(spec, values, act, name=f"{digest}.{self._call_counts[digest]}")

    def start(self, work: Coroutine[Any, Any, Any]) -> WorkInLoop[Any]:
        if self._is_closed:
            work.close()
            raise HookAborted("The run has ended.", "halter")
        return WorkInLoop(self._loop, work)

    async def emit(self, chunk: Any) -> None:
        self._is_asked.clear()
        await self._emit(chunk)
        self._is_asked.set()

    async def _begin(self, judge: Judge) -> ReportedEffect:
        await self._is_asked.wait()
        if self._is_closed:
            raise HookAborted("The run has ended.", "halter")
        effect = ReportedEffect()
        try:
            if not await effect.admit(judge(effect)):
                effect.settlement.result()
        except Exception as error:
            raise self._translate(error) from error
        return effect

    async def _settle(self, effect: ReportedEffect, report: Any = None, error: Exception | None = None) -> None:
        if not effect.outcome.done():
            effect.outcome.set_exception(error) if error else effect.outcome.set_result(report)
        try:
            await effect.settlement
        except Exception as raised:
            if raised is not error:
                raise self._translate(raised) from raised

    def _translate(self, error: Exception) -> Exception:
        """Return an error after which CrewAI does not continue, if the run has ended."""
        return HookAborted(str(error), "halter") if self.run.failure.done() else error

    async def close(self) -> None:
        self._is_closed = True
        self._is_asked.set()
        await self.run.stop_effects()

    def make_hooks(self) -> dict[InterceptionPoint, list[Any]]:
        """Return hooks of CrewAI that reject what was added while the crew runs."""
        return {
            InterceptionPoint.PRE_MODEL_CALL: [self.reject_model],
            InterceptionPoint.PRE_TOOL_CALL: [self.reject_tool],
        }

    def reject_model(self, context: Any) -> None:
        if getattr(context.llm, "_halter", None) is not self:
            self._refuse(str(getattr(context.llm, "model", context.llm)))

    def reject_tool(self, context: Any) -> None:
        tool = getattr(context.tool, "_original_tool", None) or context.tool
        if tool is not None and not isinstance(tool, BaseAgentTool) and not hasattr(tool, "_halter"):
            self._refuse(context.tool_name)

    def _refuse(self, name: str) -> None:
        try:
            self.run.runs.reject_unseen([name])
        except ConfigError as error:
            self._loop.call_soon_threadsafe(self.run.fail, error)
            raise HookAborted(str(error), "halter") from error


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
            request = _CrewRequest(self, model_class, messages, tools)

            async def ask(model: Any) -> Any:
                return model.call(messages, tools, *args, **options)

            return run_blocking(request.send(ask, options, wait_in_thread))

        async def acall(self, messages: Any, tools: Any = None, *args: Any, **options: Any) -> Any:
            request = _CrewRequest(self, model_class, messages, tools)
            return await request.send(
                lambda model: model.acall(messages, tools, *args, **options), options, WorkInLoop.wait_async
            )

    return GuardedModelOfCrew


@cache
def _derive_tool(tool_class: Any) -> Any:
    class GuardedToolOfCrew(tool_class):
        def run(self, *args: Any, **arguments: Any) -> Any:
            return run_blocking(_call_guarded(self, self._halter[1].run, args, arguments, wait_in_thread))

        def _run(self, *args: Any, **arguments: Any) -> Any:
            run_tool = self._halter[1]._run  # noqa: SLF001 CrewAI calls either.
            return run_blocking(_call_guarded(self, run_tool, args, arguments, wait_in_thread))

        async def arun(self, *args: Any, **arguments: Any) -> Any:
            return await _call_guarded(self, self._halter[1].arun, args, arguments, WorkInLoop.wait_async)

        async def _arun(self, *args: Any, **arguments: Any) -> Any:
            run_tool = self._halter[1]._arun  # noqa: SLF001 As above.
            return await _call_guarded(self, run_tool, args, arguments, WorkInLoop.wait_async)

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


class _CrewRequest:
    """A request to a guarded model: a copy of the model for it alone, with its own limit and its own token counts."""

    def __init__(self, model: Any, model_class: Any, messages: Any, tools: Any) -> None:
        self._run: _CrewRun = model._halter  # noqa: SLF001 It is ours.
        self._model = model
        self._messages = messages
        self._tools = tools
        self._limit_field = _find_limit(model)
        self._single_use = _copy_as(model_class, model, self._run)
        # The sum of the model is of all threads.
        self._single_use._token_usage = dict.fromkeys(model._token_usage, 0)  # noqa: SLF001

    async def send(self, ask: Callable[[Any], Awaitable[Any]], options: Any, wait: Wait) -> Any:
        """Send the request with `ask`, which gets the model of this request alone."""

        def judge(effect: ReportedEffect) -> Awaitable[Any]:
            request = [self._messages, self._tools, str(options.get("response_model"))]
            sent_json = msgspec.json.encode(request, enc_hook=str).decode()
            own_limit = getattr(self._model, self._limit_field)
            limit = None if own_limit is None else int(own_limit)
            return self._run.run.ask(FrameworkRequest(_name_model(self._model), sent_json, limit), effect.act)

        async def perform(limit: int | None) -> tuple[Any, ModelResult[None]]:
            self._shorten(limit)
            answer = await ask(self._single_use)
            return answer, ModelResult(None, str(answer), _read_usage(self._single_use))

        try:
            return await self._run.have(judge, perform, wait)
        finally:
            self._add_usage()

    def _shorten(self, limit: int | None) -> None:
        if limit is not None:
            setattr(self._single_use, self._limit_field, limit)
        self._single_use.n = None  # Several answers would cost more than the hold.

    def _add_usage(self) -> None:
        for name, tokens in self._single_use._token_usage.items():  # noqa: SLF001 As above.
            self._model._token_usage[name] += tokens  # noqa: SLF001


async def _call_guarded(
    tool: Any, run_tool: Callable[..., Any], args: Any, arguments: dict[str, Any], wait: Wait
) -> Any:
    run: _CrewRun = tool._halter[0]  # noqa: SLF001 It is ours.
    spec = run.run.runs.spec(tool.name, tool.description, tool.args_schema.model_json_schema)
    values = dict(zip(tool.args_schema.model_fields, args, strict=False)) | arguments

    async def call(admitted_arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        result = run_tool(**admitted_arguments)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result) if wait is wait_in_thread else await result
        return result, result

    try:
        return await run.have(lambda effect: run.call(spec, values, effect.act), call, wait)
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


def _reject_overlay() -> None:
    if llm_overlay.active.get() is not None:
        raise ConfigError("llm_overlay replaces models, so the guard cannot see them. Call `kickoff` without it.")


async def _ignore(chunk: Any) -> None:
    """Receive the chunks of a crew that does not stream: there are none."""


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
