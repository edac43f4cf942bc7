"""The part that all adapters share: one guarded session for each run of a framework's agent."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, Final, TypedDict, TypeVar, cast

import msgspec

from halter.adapters.attachments import AskWithin, FrameworkRequest, as_mapping, ask_model
from halter.core.errors import ConfigError, LeaseLost
from halter.core.money import usd_to_micros
from halter.core.tools import Effect, Level, ToolSpec
from halter.core.usage import Usage
from halter.external.effects import Act, DecisionPending, EffectRefused, ModelResult
from halter.external.guard import Guard, GuardedSession, SessionAlreadyEnded
from halter.external.item_stream import Emit, stream_from
from halter.external.loop_thread import LoopThread
from halter.guard.halts import run_shielded

T = TypeVar("T")


class ExternalToolOptions(TypedDict, total=False):
    """The properties of a framework's tool that the guard decides by: its level, its effect and its cost."""

    level: Level
    effect: Effect
    cost: float
    idempotent: bool
    egress: bool


NO_TOOLS: Final[Mapping[str, ExternalToolOptions]] = {}


def reject_unseen(names: Iterable[str], allowed_names: Collection[str]) -> None:
    """Reject tools that the provider runs on its side, where the guard does not see them."""
    unseen = sorted({*names}.difference(allowed_names))
    if unseen:
        raise ConfigError(
            f"The guard cannot see {', '.join(unseen)}: it runs outside this program. Remove it, or add its name to "
            "`allow_native`."
        )


def read_usage(input_tokens: int, output_tokens: int, cached_tokens: int, cache_write_tokens: int) -> Usage | None:
    """Read a usage that a framework reports. Return None for an inconsistent one: the request settles at its hold."""
    try:
        return Usage(input_tokens, output_tokens, cached_tokens, cache_write_tokens)
    except ValueError:
        return None


def iterate_in_thread(make_items: Callable[[], AsyncGenerator[T]]) -> Generator[T]:
    """Iterate over async items from a program that is not async: one task in a thread of its own makes all of them."""
    thread = LoopThread()

    async def pump(emit: Emit) -> None:
        async with aclosing(make_items()) as items:
            async for item in items:
                await emit(item)

    try:
        yield from thread.stream(stream_from(pump))
    finally:
        thread.close()


def read_task_text(content: Any) -> str:
    """Read the texts of a framework's message or input. Pictures and files are left out: they name no task."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        parts = cast("Sequence[Any]", content)
        return " ".join(text for part in parts if (text := read_task_text(part)))
    values = as_mapping(content)
    texts = (values.get("text"), getattr(content, "text", ""), values.get("content"), getattr(content, "content", ""))
    return next((read_task_text(text) for text in texts if text and isinstance(text, str | list | tuple)), "")


class ReportedEffect:
    """An effect that another program makes: the guard admits it, and waits until its outcome is reported."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.admission: asyncio.Future[Any] = loop.create_future()
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self.settlement: asyncio.Future[Any] = loop.create_future()

    async def act(self, value: Any) -> Any:
        """Run as the effect for the guard: report the admission with its arguments, and wait for the outcome."""
        self.admission.set_result(value)
        return await self.outcome

    async def admit(self, work: Awaitable[Any]) -> bool:
        """Run the guard's checks; return True if the effect may begin. If it may not, `settlement` has the reason."""
        self.settlement = asyncio.ensure_future(work)
        # A run that ends records the error. Its framework may not ask for it.
        self.settlement.add_done_callback(lambda settlement: settlement.cancelled() or settlement.exception())
        await asyncio.wait([self.admission, self.settlement], return_when=asyncio.FIRST_COMPLETED)
        return self.admission.done()


async def find_first_open(has_ended: Callable[[int], Awaitable[bool]]) -> int:
    """Find the first number that has not ended. All numbers before it have ended, so a binary search finds it."""
    low, step = 0, 1
    while await has_ended(low + step - 1):
        low, step = low + step, 2 * step
    high = low + step - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if await has_ended(middle) else (low, middle)
    return low


class GuardedRuns:
    """A guard that is open while any run is in progress, and a session for each run.

    The next run of a conversation continues the session of a run that waits for a person, or that was broken off: by a
    kill, a cancellation, an error or a halt. So a call that was settled, but whose result the framework has not
    recorded, is not made again when the framework repeats it.
    """

    def __init__(
        self,
        guard: Guard,
        tools: Mapping[str, ExternalToolOptions],
        max_output_tokens: int | None = None,
        allow_native: Collection[str] = (),
    ) -> None:
        guard.allow_external_tools()
        self.max_output_tokens = max_output_tokens
        self.allow_native = frozenset(allow_native)
        self._guard = guard
        self._terms = tools
        self._specs: dict[str, ToolSpec] = {}
        self._run_count = 0
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None

    def detach(self) -> "GuardedRuns":
        """Copy the runs for another event loop, with a guard that opens its own connection to the store."""
        return GuardedRuns(self._guard.copy_closed(), self._terms, self.max_output_tokens, self.allow_native)

    def reject_unseen(self, names: Iterable[str]) -> None:
        """Reject what the guard would not see, unless `allow_native` names it."""
        reject_unseen(names, self.allow_native)

    @asynccontextmanager
    async def run(self, task: str, conversation: str = "", *, can_pause: bool = True) -> AsyncGenerator["GuardedRun"]:
        """Open the session of a run. It raises what ended the run, whatever the framework has made of that.

        With `can_pause`, a call that needs a person raises DecisionPending, and the session waits; otherwise the call
        waits for the decision.
        """
        async with self.session(task, conversation) as session:
            run = GuardedRun(self, session, can_pause=can_pause)
            try:
                yield run
                run.require_running()
            except Exception:
                run.require_running()
                raise
            finally:
                await run.stop_effects()
            if run.has_question:
                await session.pause()

    @asynccontextmanager
    async def session(self, task: str, conversation: str = "") -> AsyncGenerator[GuardedSession]:
        """Open the session of a run; it ends with the run, or waits if the run ends for a decision.

        A run without a conversation has a new session, and cannot be resumed.
        """
        await self._open()
        try:
            async with AsyncExitStack() as stack:
                session = await self._enter(stack, task, conversation)
                session.can_defer = True
                try:
                    yield session
                except Exception:
                    if conversation:
                        with suppress(LeaseLost):
                            await session.pause_if_asked()
                    raise
        finally:
            await self._close()

    async def _enter(self, stack: AsyncExitStack, task: str, conversation: str) -> GuardedSession:
        """Open the first session of a conversation that has not ended, or reopen the last one if it was broken off."""
        if not conversation:
            return await stack.enter_async_context(self._guard.session(task))
        while True:
            number = await find_first_open(lambda number: self._guard.has_ended(f"{conversation}.{number}"))
            is_new = number > 0 and not await self._guard.has_started(f"{conversation}.{number}")
            if is_new and await self._guard.reopen(f"{conversation}.{number - 1}"):
                number -= 1
            # Another process may have ended it after the search.
            with suppress(SessionAlreadyEnded):
                return await stack.enter_async_context(self._guard.session(task, id=f"{conversation}.{number}"))

    async def _open(self) -> None:
        async with self._opening:
            if not self._run_count and not self._guard.is_open:
                self._stack = AsyncExitStack()
                await self._stack.enter_async_context(self._guard)
            self._run_count += 1

    async def _close(self) -> None:
        # Before any wait: a run that is cancelled while it ends counts no longer.
        self._run_count -= 1
        if not self._run_count and self._stack is not None:
            await run_shielded(self._close_guard())

    async def _close_guard(self) -> None:
        """Close the guard, unless another run has begun in the meantime."""
        async with self._opening:
            if not self._run_count and self._stack is not None:
                stack, self._stack = self._stack, None
                await stack.aclose()

    def spec(
        self, name: str, description: str, schema: Callable[[], Any], defaults: ExternalToolOptions | None = None
    ) -> ToolSpec:
        """Return the guard's description of a tool: by default CONTROLLED, with the effect `write`.

        `schema` is called only at the tool's first call.
        """
        tool_spec = self._specs.get(name)
        if tool_spec is None:
            terms: ExternalToolOptions = {**(defaults or {}), **self._terms.get(name, {})}
            tool_spec = self._specs[name] = ToolSpec(
                name=name,
                description=description,
                schema=msgspec.json.encode(schema(), enc_hook=str),
                level=terms.get("level", "CONTROLLED"),
                effect=terms.get("effect", "write"),
                idempotent=terms.get("idempotent", False),
                egress=terms.get("egress", False),
                cost=usd_to_micros(terms.get("cost", 0)),
            )
        return tool_spec


class GuardedRun:
    """A run of a framework's agent in progress: its session, and the error that ends it.

    A framework may replace an error of the guard, or show it to the model and continue. The run therefore records it,
    and starts no further effect. An error of the framework's own tool or model is the framework's.
    """

    def __init__(self, runs: GuardedRuns, session: GuardedSession, *, can_pause: bool) -> None:
        self.runs = runs
        self.session = session
        self.can_pause = can_pause
        self.has_question = False
        """True if the run ends for a person, and continues in the same conversation."""
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.admitted: dict[str, ReportedEffect] = {}
        """The calls that are admitted, and that the framework has not reported yet."""
        self._tasks: list[asyncio.Task[Any]] = []
        """The tasks of requests and calls in progress. Not every framework waits for those of a run that it ends."""

    def fail(self, error: Exception) -> None:
        """Record the error that ends the run."""
        if not self.failure.done():
            self.failure.set_result(error)

    def require_running(self) -> None:
        """Raise the error that ended the run."""
        if self.failure.done():
            raise self.failure.result()

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any], act: Act, *, name: str) -> Any:
        """Make a call, and return what `act` returns. Raises DecisionPending, EffectRefused, and what `act` raises."""
        own_errors: list[Exception] = []

        async def perform(admitted_arguments: Mapping[str, Any]) -> Any:
            try:
                return await act(admitted_arguments)
            except Exception as error:
                own_errors.append(error)
                raise

        with self._in_effect(own_errors):
            return await self.session.act(spec, arguments, perform, name=name, wait=not self.can_pause)

    async def ask(self, request: FrameworkRequest, ask: AskWithin) -> Any:
        """Make a request within its limit, and return its value. Raises EffectRefused, and what `ask` raises."""
        own_errors: list[Exception] = []

        async def perform(limit: int | None) -> ModelResult[Any]:
            try:
                return await ask(limit)
            except Exception as error:
                own_errors.append(error)
                raise

        with self._in_effect(own_errors):
            return await ask_model(self.session, request, perform, self.runs.max_output_tokens)

    def stream(
        self, request: FrameworkRequest, send: Callable[[int | None, Emit], Awaitable[ModelResult[Any]]]
    ) -> AsyncGenerator[Any]:
        """Make a request whose answer `send` emits. The value of its result, if any, follows the settlement."""

        async def work(emit: Emit) -> None:
            if (last := await self.ask(request, lambda limit: send(limit, emit))) is not None:
                await emit(last)

        return stream_from(work)

    @asynccontextmanager
    async def hold_open(
        self,
        request: FrameworkRequest,
        send: Callable[[int | None], AbstractAsyncContextManager[T]],
        report: Callable[[T], ModelResult[None]],
    ) -> AsyncGenerator[T]:
        """Hold a request while its caller reads the answer, and settle it by the report. A halt ends the caller."""
        opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        is_read = asyncio.Event()

        async def ask(limit: int | None) -> ModelResult[None]:
            async with send(limit) as answer:
                opened.set_result(answer)
                await is_read.wait()
                return report(answer)

        request_task = asyncio.ensure_future(self.ask(request, ask))
        await asyncio.wait([request_task, opened], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            await request_task
        reader = cast("asyncio.Task[Any]", asyncio.current_task())
        request_task.add_done_callback(lambda _: None if is_read.is_set() else reader.cancel())
        try:
            yield opened.result()
        except asyncio.CancelledError:
            # A halt ended the request and cancelled the reader: raise the reason of the halt instead.
            if request_task.done() and not is_read.is_set():
                reader.uncancel()
                request_task.result()
            raise
        finally:
            is_read.set()
            await asyncio.wait([request_task])
        request_task.result()

    def describe_refusal(self, refused: EffectRefused) -> str:
        """Return the text of a refusal for the model. One that ends the session is raised."""
        if refused.terminal:
            raise refused
        return str(refused)

    async def stop_effects(self) -> None:
        """Cancel the requests and calls that are still in progress, and wait until they are settled."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @contextmanager
    def _in_effect(self, own_errors: list[Exception]) -> Generator[None]:
        """Record an error that is not the framework's own."""
        self.require_running()
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.append(task)
        try:
            yield
        except DecisionPending:
            self.has_question = True
            raise
        except EffectRefused as refused:
            if refused.terminal:
                self.fail(refused)
            raise
        except Exception as error:
            if error not in own_errors:
                self.fail(error)
            raise
        finally:
            self._tasks.remove(task)


class RunsInThread:
    """Guarded runs in an event loop of their own thread, for frameworks that run agents in threads or block their loop.

    Runs of several threads share it, while any of them is in progress.
    """

    def __init__(self, make_runs: Callable[[], GuardedRuns]) -> None:
        self._make_runs = make_runs
        self._lock = threading.Lock()
        self._user_count = 0
        self._shared: tuple[LoopThread, GuardedRuns] | None = None

    @contextmanager
    def open(self) -> Generator[tuple[LoopThread, GuardedRuns]]:
        with self._lock:
            shared = self._shared = self._shared or (LoopThread(), self._make_runs())
            self._user_count += 1
        try:
            yield shared
        finally:
            with self._lock:
                self._user_count -= 1
                if not self._user_count:
                    self._shared = None
                    shared[0].close()
