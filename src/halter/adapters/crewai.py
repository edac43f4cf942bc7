"""Guard a crew of CrewAI.

```python
desk = guard(Crew(agents=[clerk], tasks=[task]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
result = desk.kickoff()
```

Each kickoff is a guarded session, of a copy of the crew. Each model request is held before it is sent, with its limit
of tokens lowered to what fits, and settled by its usage. Each tool call is admitted, made and settled. A call that
needs a person waits for the decision. A halt and a cap raise EffectRefused. A kickoff of a conversation that a killed
process left goes on in its session: what was decided counts, and a call that was made is not made again.

CrewAI goes on where a hook or a tool raises. So the guard stands in the models and the tools themselves, and what ends
a run is kept: nothing is asked or made after it. Memory, knowledge, planning, MCP servers, apps, remote agents, tools
of the provider's and agents of another class are refused, unless their name is in `allow_native`.
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
from crewai import Agent, Crew
from crewai.hooks.dispatch import HookAborted, InterceptionPoint, scoped_hooks
from crewai.llm_overlay import active as overlay_active
from crewai.tools.agent_tools.base_agent_tools import BaseAgentTool
from crewai.utilities.llm_utils import create_llm

from halter.adapters.attachments import ask_model
from halter.adapters.guarded_runs import (
    MAX_OUTPUT_TOKENS,
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
from halter.runtime.external import Act, EffectRefused, ModelResult
from halter.runtime.guard_api import Guard, GuardedSession
from halter.tools.function_tool import canonical_json

_LIMITS: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens")
"""How the models of CrewAI name the longest answer."""
_UNSEEN_OF_CREW: Final = ("memory", "knowledge", "knowledge_sources", "planning", "function_calling_llm", "stream")
_UNSEEN_OF_AGENT: Final = (
    *("memory", "knowledge", "knowledge_sources", "function_calling_llm", "mcps", "apps", "a2a"),
    "allow_code_execution",
)
_UNSEEN_OF_MODEL: Final = ("builtin_tools", "additional_params")


def guard(
    crew: Crew,
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    allow_native: Collection[str] = (),
) -> "GuardedCrew":
    """Return the crew with every kickoff under the guard. `tools` says what the guard is to know of its tools.

    Raises ConfigError for what no guard would see.
    """
    reject_unseen(_name_unseen(crew), allow_native)
    return GuardedCrew(crew, lambda: GuardedRuns(guard, tools), max_output_tokens, frozenset(allow_native))


class GuardedCrew:
    """A crew whose kickoffs are guarded sessions. Several threads may kick it off at once."""

    def __init__(
        self, crew: Crew, make_runs: Callable[[], GuardedRuns], max_output_tokens: int, allow_native: frozenset[str]
    ) -> None:
        self._crew = crew
        self._loop = _LoopThread(make_runs)
        self._max_output_tokens = max_output_tokens
        self._allow_native = allow_native

    def kickoff(self, inputs: dict[str, Any] | None = None, *, conversation: str = "") -> Any:
        """Run as `Crew.kickoff` does. It waits while a person has to decide.

        A kickoff of the same `conversation` takes up what a process that died left, from the crew's beginning: the
        model is asked again, and a call with the same arguments that was made returns what it returned.
        """
        if overlay_active.get() is not None:
            raise ConfigError("An llm_overlay puts models in place that no guard sees: kick the crew off without it.")
        context = copy_context()
        with self._loop.open() as (loop, runs):
            return asyncio.run_coroutine_threadsafe(self._run(runs, context.run, inputs, conversation), loop).result()

    async def _run(
        self, runs: GuardedRuns, enter: Callable[..., Any], inputs: dict[str, Any] | None, conversation: str
    ) -> Any:
        task = " ".join(each.description for each in self._crew.tasks)
        async with runs.session(task, f"crewai.{conversation}" if conversation else "") as session:
            run = _CrewRun(session, runs, self._max_output_tokens, self._allow_native)
            ended = _start_thread(enter, self._kickoff, run, inputs)
            try:
                await asyncio.wait([ended, run.failure], return_when=asyncio.FIRST_COMPLETED)
                if run.failure.done():
                    raise run.failure.result()
                return ended.result()
            finally:
                # No thread can be stopped, but none begins anything after this.
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
    """A run under way: what its threads may begin, and what ended it."""

    def __init__(
        self, session: GuardedSession, runs: GuardedRuns, max_output_tokens: int, allow_native: frozenset[str]
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

    def have(self, judge: Callable[[ReportedEffect], Awaitable[Any]], make: Callable[[Any], tuple[Any, Any]]) -> Any:
        """In a thread of the crew: have an effect between the guard's admission and its settlement.

        `make` returns what the crew gets and what is reported. Raises what it raises, and EffectRefused.
        """
        effect = self._wait(self._begin(judge))
        if not effect.begun.done():
            return effect.settled.result()  # A process that died had this effect, and this is what it returned.
        try:
            value, reported = make(effect.begun.result())
        except Exception as error:
            self._wait(self._settle(effect, error=error))
            raise
        self._wait(self._settle(effect, reported))
        return value

    async def call(self, spec: ToolSpec, values: Mapping[str, Any], act: Act) -> Any:
        """Judge a call under a name that a later process gives it again: by its arguments, and how often they came."""
        same = sha256(spec.name.encode() + canonical_json(msgspec.to_builtins(dict(values)))).hexdigest()[:16]
        self._call_counts[same] += 1
        return await self.session.act(spec, values, act, name=f"{same}.{self._call_counts[same]}", wait=True)

    def _wait(self, work: Any) -> Any:
        if self._is_closed:
            work.close()
            raise HookAborted("The run is over.", "halter")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, judge: Callable[[ReportedEffect], Awaitable[Any]]) -> ReportedEffect:
        if self.failure.done():
            raise self._abort(self.failure.result())
        effect = ReportedEffect()
        try:
            if not await effect.admit(judge(effect)):
                effect.settled.result()
        except EffectRefused as refused:
            if refused.terminal:
                raise self._abort(refused) from refused
            raise
        except Exception as error:
            raise self._abort(error) from error
        if effect.admission.done():
            self._effects.add(effect)
            effect.settled.add_done_callback(lambda settled: self._end_early(effect, settled))
        return effect

    def _end_early(self, effect: ReportedEffect, settled: asyncio.Future[Any]) -> None:
        """A halt ends the run while a thread still waits for its provider or its tool."""
        if effect in self._effects and not settled.cancelled() and (error := settled.exception()):
            self._abort(error)

    async def _settle(self, effect: ReportedEffect, reported: Any = None, error: Exception | None = None) -> None:
        self._effects.discard(effect)
        if not effect.outcome.done():
            effect.outcome.set_exception(error) if error else effect.outcome.set_result(reported)
        try:
            await effect.settled
        except Exception as raised:
            if raised is not error:
                raise self._abort(raised) from raised

    def _abort(self, error: BaseException) -> HookAborted:
        """What CrewAI does not go on after; the caller of `kickoff` gets the error itself."""
        if not self.failure.done():
            self.failure.set_result(error)
        return HookAborted(str(error), "halter")

    async def close(self) -> None:
        self._is_closed = True
        with suppress(Exception):
            await cancel_and_wait(*(each.settled for each in self._effects))

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
    """An event loop in a thread of its own while any crew runs: CrewAI is not async."""

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
            opened = self._loop_and_thread
        try:
            yield opened
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


def _start_thread(enter: Callable[..., Any], work: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
    """Run a function in a thread of its own: a run that a halt ended may still wait there for its provider."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    ended.add_done_callback(lambda _: ended.cancelled() or ended.exception())  # It may end after its run.

    def end(settle: Callable[[Any], None], value: Any) -> None:
        if not ended.done():
            settle(value)

    def run() -> None:
        try:
            said = (ended.set_result, enter(work, *given))
        except BaseException as error:  # noqa: BLE001 It is raised where the run is awaited.
            said = (ended.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed: the run was over before.
            loop.call_soon_threadsafe(end, *said)

    Thread(target=run, name="halter-crew", daemon=True).start()
    return ended


@cache
def _derive_model(own: Any) -> Any:
    class GuardedModelOfCrew(own):
        def call(self, messages: Any, tools: Any = None, *args: Any, **options: Any) -> Any:
            return _ask_guarded(self, own, messages, tools, args, options)

        async def acall(self, *_: Any, **__: Any) -> Any:
            raise HookAborted("A guarded crew is not async: use `kickoff`, in a thread if need be.", "halter")

    return GuardedModelOfCrew


@cache
def _derive_tool(own: Any) -> Any:
    class GuardedToolOfCrew(own):
        def run(self, *args: Any, **given: Any) -> Any:
            return _call_guarded(self, self._halter[1].run, args, given)

        def _run(self, *args: Any, **given: Any) -> Any:
            return _call_guarded(self, self._halter[1]._run, args, given)  # noqa: SLF001 CrewAI calls either.

        async def arun(self, *_: Any, **__: Any) -> Any:
            raise HookAborted("A guarded crew is not async: use `kickoff`, in a thread if need be.", "halter")

        _arun = arun

    return GuardedToolOfCrew


def _copy_as(kind: Any, given: Any, bound: Any) -> Any:
    made = copy.copy(given)
    object.__setattr__(made, "__class__", kind)
    object.__setattr__(made, "_halter", bound)
    return made


def _guard_model(model: Any, run: _CrewRun) -> Any:
    return _copy_as(_derive_model(type(model)), model, run)


def _guard_tools(tools: Any, run: _CrewRun) -> list[Any]:
    return [_copy_as(_derive_tool(type(tool)), tool, (run, tool)) for tool in tools or ()]


def _ask_guarded(model: Any, own: Any, messages: Any, tools: Any, args: Any, options: Any) -> Any:
    run: _CrewRun = model._halter  # noqa: SLF001 It is ours.
    limit = _find_limit(model)
    sent = msgspec.json.encode([messages, tools, str(options.get("response_model"))], enc_hook=str).decode()
    # One that makes a single request, with its own limit and its own count of tokens.
    asked = _copy_as(own, model, run)
    asked._token_usage = dict.fromkeys(model._token_usage, 0)  # noqa: SLF001 The sum of the model is of all threads.

    def ask(fits: int) -> tuple[Any, ModelResult[None]]:
        setattr(asked, limit, fits)
        asked.n = None  # More answers than one would cost more than what is held.
        answer = asked.call(messages, tools, *args, **options)
        return answer, ModelResult(None, str(answer), _read_usage(asked))

    def judge(effect: ReportedEffect) -> Awaitable[Any]:
        most = getattr(model, limit) or run.max_output_tokens
        return ask_model(run.session, _name_model(model), sent, effect.act, int(most))

    try:
        return run.have(judge, ask)
    finally:
        for name, tokens in asked._token_usage.items():  # noqa: SLF001 As above.
            model._token_usage[name] += tokens  # noqa: SLF001


def _call_guarded(tool: Any, make: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
    run: _CrewRun = tool._halter[0]  # noqa: SLF001 It is ours.
    if args:
        given = dict(zip(tool.args_schema.model_fields, args, strict=False)) | given
    spec = run.runs.spec(tool.name, tool.description, tool.args_schema.model_json_schema)

    def judge(effect: ReportedEffect) -> Awaitable[Any]:
        return run.call(spec, given, effect.act)

    def call(admitted: Mapping[str, Any]) -> tuple[Any, Any]:
        made = make(**admitted)
        if asyncio.iscoroutine(made):
            made = asyncio.run(made)
        return made, made

    try:
        return run.have(judge, call)
    except EffectRefused as refused:
        return str(refused)


def _find_limit(model: Any) -> str:
    """The field that bounds an answer: Gemini's, else the one that is set, else the newest that the model has."""
    known = [each for each in _LIMITS if each in type(model).model_fields]
    if known[0] == _LIMITS[0]:
        return known[0]
    return next((each for each in known if getattr(model, each) is not None), known[0])


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
    """What would run or ask a model where no guard sees it."""
    yield from _name_set(crew, _UNSEEN_OF_CREW)
    for agent in [*crew.agents, *([crew.manager_agent] if crew.manager_agent else [])]:
        if type(agent) is not Agent:
            yield type(agent).__name__
            continue
        yield from _name_set(agent, _UNSEEN_OF_AGENT)
        yield from _name_set(agent.llm, _UNSEEN_OF_MODEL)
    if crew.manager_llm is not None:
        yield from _name_set(create_llm(crew.manager_llm), _UNSEEN_OF_MODEL)


def _name_set(given: Any, names: Collection[str]) -> Iterator[str]:
    yield from (name for name in names if getattr(given, name, None))
