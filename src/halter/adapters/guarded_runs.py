"""The part that all adapters share: one guarded session for each run of a framework's agent."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypedDict, TypeVar, cast

import msgspec

from halter.core.errors import ConfigError, LeaseLost
from halter.core.money import usd_to_micros
from halter.core.tools import Effect, Level, ToolSpec
from halter.core.usage import Usage
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


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a framework's value if it is a mapping, and an empty mapping otherwise."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


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

    def __init__(self, guard: Guard, tools: Mapping[str, ExternalToolOptions]) -> None:
        guard.allow_external_tools()
        self._guard = guard
        self._terms = tools
        self._specs: dict[str, ToolSpec] = {}
        self._run_count = 0
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None

    def detach(self) -> "GuardedRuns":
        """Copy the runs for another event loop, with a guard that opens its own connection to the store."""
        return GuardedRuns(self._guard.copy_closed(), self._terms)

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
