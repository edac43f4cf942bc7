"""An event loop in a thread of its own, and what a program that is not async does on it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent import futures
from contextlib import suppress
from contextvars import Context
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, cast

from halter.core.errors import ConfigError

T = TypeVar("T")

_END: Final = object()
"""Follows the last item of a stream."""


class WorkInLoop(Generic[T]):
    """Work in an event loop of another thread. A caller that is interrupted cancels it, and waits for its end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context | None = None
    ) -> None:
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self.outcome: futures.Future[T] = futures.Future()
        loop.call_soon_threadsafe(self._start, work, context=context)

    def wait(self) -> T:
        """Wait in a thread without a loop."""
        try:
            return self.outcome.result()
        except BaseException:
            self.stop()
            raise

    async def wait_async(self) -> T:
        try:
            return await asyncio.shield(asyncio.wrap_future(self.outcome))
        except BaseException:
            await self.stop_async()
            raise

    def stop(self) -> None:
        self._cancel()
        futures.wait([self.outcome])

    async def stop_async(self) -> None:
        self._cancel()
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.shield(asyncio.wrap_future(self.outcome))

    def _start(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if not self.outcome.done():
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.cancel()
            self.outcome.set_running_or_notify_cancel()  # For those who wait in threads.
        elif error := task.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class LoopThread:
    """An event loop in a separate thread, and the ways to run coroutines on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="halter guard", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> WorkInLoop[T]:
        """Start a coroutine on the loop."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigError("A blocking guard cannot be used inside its own tool. Use the async guard there.")
        return WorkInLoop(self._loop, work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result. An interrupted wait cancels it."""
        return self.start(work).wait()

    def stream(self, items: AsyncGenerator[T]) -> Generator[T]:
        """Yield items that are made on the loop, each when it is asked for. Closes them if the caller stops reading."""
        try:
            while (item := self.run(_make_next(items))) is not _END:
                yield cast("T", item)
        finally:
            self.run(_close(items))

    async def stream_async(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yield items that are made on the loop in the caller's own loop, as `stream` does in a thread."""
        try:
            while (item := await self.start(_make_next(items)).wait_async()) is not _END:
                yield cast("T", item)
        finally:
            await self.start(_close(items)).wait_async()

    def close(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make_next(items: AsyncGenerator[T]) -> T | object:
    return await anext(items, _END)


async def _close(items: AsyncGenerator[Any]) -> None:
    await items.aclose()


class _Opened(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Blocking:
    """An async context manager, opened in a thread of its own. Any thread may use it while it is open."""

    NOUN: ClassVar[str]

    def __init__(self, opened: _Opened) -> None:
        self._opened: Any = opened
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        """Open it in its thread."""
        thread = LoopThread()
        try:
            thread.run(self._opened.__aenter__())
        except BaseException:
            thread.close()
            raise
        self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        thread, self._thread = self._open(), None
        try:
            thread.run(self._opened.__aexit__(kind, error, trace))
        finally:
            thread.close()

    def _open(self) -> LoopThread:
        if self._thread is None:
            raise ConfigError(f"The {self.NOUN} is not open. Use it inside `with {self.NOUN}.blocking() as ...`.")
        return self._thread
