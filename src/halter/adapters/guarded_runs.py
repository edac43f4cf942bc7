"""What every adapter needs: one guarded session for each run of a framework's agent."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final, TypedDict, TypeVar, cast

import msgspec

from halter.core.errors import ConfigError
from halter.core.money import usd_to_micros
from halter.core.tools import Effect, Level, ToolSpec
from halter.core.usage import Usage
from halter.loop.session_runtime import cancel_and_wait
from halter.runtime.guard_api import Guard, GuardedSession, SessionOver

T = TypeVar("T")


class ExternalToolOptions(TypedDict, total=False):
    """What the guard is to know of a framework's tool: how dangerous it is, and whether it only reads."""

    level: Level
    effect: Effect
    cost: float
    idempotent: bool
    egress: bool


MAX_OUTPUT_TOKENS: Final = 4096
"""The longest answer where the model's settings name no `max_tokens`: an answer without a bound cannot be held for."""

NO_TOOLS: Final[Mapping[str, ExternalToolOptions]] = {}


def reject_unseen(names: Iterable[str], allowed: Collection[str]) -> None:
    """Refuse tools that the provider runs for itself, where no guard sees them."""
    unseen = sorted({*names}.difference(allowed))
    if unseen:
        raise ConfigError(
            f"The provider would run {', '.join(unseen)} for itself, where no guard sees it: leave it out, or name it "
            "in `allow_native`."
        )


def read_usage(given: int, written: int, cached: int, cache_written: int) -> Usage | None:
    """A usage as a framework reports it. One that contradicts itself is none: the request then settles at its hold."""
    try:
        return Usage(given, written, cached, cache_written)
    except ValueError:
        return None


async def stream_from(work: Callable[[Callable[[T], None]], Awaitable[object]]) -> AsyncGenerator[T]:
    """Yield what `work` puts out, in a task of its own; raise what it raises. Not read to its end, it is cancelled.

    A request that is cancelled is settled at its hold.
    """
    items: asyncio.Queue[T | None] = asyncio.Queue()
    task = asyncio.ensure_future(work(items.put_nowait))
    task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        task.result()
    finally:
        await cancel_and_wait(task)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Read a framework's value as the mapping that it is; anything else has nothing in it."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


class ReportedEffect:
    """An effect that is had elsewhere: the guard admits it, and waits until its outcome is reported."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.admission: asyncio.Future[Any] = loop.create_future()
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self.settled: asyncio.Future[Any] = loop.create_future()

    async def act(self, admitted: Any) -> Any:
        """What the guard has done: it says that the effect may begin, and with what."""
        self.admission.set_result(admitted)
        return await self.outcome

    async def admit(self, work: Awaitable[Any]) -> bool:
        """Let the guard judge; return whether the effect may begin. If not, `settled` says why."""
        self.settled = asyncio.ensure_future(work)
        await asyncio.wait([self.admission, self.settled], return_when=asyncio.FIRST_COMPLETED)
        return self.admission.done()


async def find_first_open(has_ended: Callable[[int], Awaitable[bool]]) -> int:
    """Find the first number that has not ended. All before it have, so a few looks are enough for a thousand."""
    first, step = 0, 1
    while await has_ended(first + step - 1):
        first, step = first + step, 2 * step
    last = first + step - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (middle + 1, last) if await has_ended(middle) else (first, middle)
    return first


class GuardedRuns:
    """A guard that is open while anything runs, and a session for each run.

    A run that waits for a person leaves its session open; the next run of the same conversation goes on with it.
    """

    def __init__(self, guard: Guard, tools: Mapping[str, ExternalToolOptions]) -> None:
        guard.allow_external_tools()
        self._guard = guard
        self._terms = tools
        self._specs: dict[str, ToolSpec] = {}
        self._run_count = 0
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None

    @asynccontextmanager
    async def session(self, task: str, conversation: str = "") -> AsyncGenerator[GuardedSession]:
        """Open the session of a run; it ends with the run, or waits if the run ends for a decision.

        A run without a conversation has a session of its own, and cannot be taken up again.
        """
        await self._open()
        try:
            async with AsyncExitStack() as stack:
                yield await self._enter(stack, task, conversation)
        finally:
            await self._close()

    async def _enter(self, stack: AsyncExitStack, task: str, conversation: str) -> GuardedSession:
        """Take up the first session of a conversation that is not over."""
        if not conversation:
            return await stack.enter_async_context(self._guard.session(task))
        while True:
            number = await find_first_open(lambda number: self._guard.has_ended(f"{conversation}.{number}"))
            # Another process may have ended it since.
            with suppress(SessionOver):
                return await stack.enter_async_context(self._guard.session(task, id=f"{conversation}.{number}"))

    async def _open(self) -> None:
        async with self._opening:
            if not self._run_count and not self._guard.is_open:
                self._stack = AsyncExitStack()
                await self._stack.enter_async_context(self._guard)
            self._run_count += 1

    async def _close(self) -> None:
        async with self._opening:
            self._run_count -= 1
            if not self._run_count and self._stack is not None:
                stack, self._stack = self._stack, None
                await stack.aclose()

    def spec(
        self, name: str, description: str, schema: Callable[[], Any], otherwise: ExternalToolOptions | None = None
    ) -> ToolSpec:
        """What the guard knows of a tool: unless said otherwise, CONTROLLED and changing something.

        `schema` is asked for at the tool's first call only.
        """
        known = self._specs.get(name)
        if known is None:
            terms: ExternalToolOptions = {**(otherwise or {}), **self._terms.get(name, {})}
            known = self._specs[name] = ToolSpec(
                name=name,
                description=description,
                schema=msgspec.json.encode(schema(), enc_hook=str),
                level=terms.get("level", "CONTROLLED"),
                effect=terms.get("effect", "write"),
                idempotent=terms.get("idempotent", False),
                egress=terms.get("egress", False),
                cost=usd_to_micros(terms.get("cost", 0)),
            )
        return known
