"""The guard in an event loop of its own, for frameworks that run agents in threads or block their loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent import futures
from contextlib import contextmanager, suppress
from contextvars import Context
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from halter.adapters.guarded_runs import GuardedRuns

T = TypeVar("T")


class WorkInLoop:
    """Work in an event loop of another thread. A caller that is interrupted cancels it, and waits for its end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> None:
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self.outcome: futures.Future[Any] = futures.Future()
        loop.call_soon_threadsafe(self._start, work, context=context)

    def wait(self) -> Any:
        """Wait in a thread without a loop."""
        try:
            return self.outcome.result()
        except BaseException:
            self.stop()
            raise

    async def wait_async(self) -> Any:
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

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if not self.outcome.done():
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.outcome.cancel()
            self.outcome.set_running_or_notify_cancel()  # For those who wait in threads.
        elif error := task.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class GuardThread:
    """An event loop in a separate thread, with the guard, while any run of a framework needs it.

    Runs of several threads, and runs that block their own loop, share it.
    """

    def __init__(self, make_runs: Callable[[], GuardedRuns]) -> None:
        self._make_runs = make_runs
        self._lock = Lock()
        self._users = 0
        self._loop_and_thread: tuple[asyncio.AbstractEventLoop, GuardedRuns] | None = None
        self._thread: Thread | None = None

    @contextmanager
    def open(self) -> Generator[tuple[asyncio.AbstractEventLoop, GuardedRuns]]:
        with self._lock:
            if self._loop_and_thread is None:
                self._loop_and_thread = (asyncio.new_event_loop(), self._make_runs())
                self._thread = Thread(target=self._loop_and_thread[0].run_forever, name="halter guard", daemon=True)
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

    def stream(
        self, make_work: Callable[[GuardedRuns, Callable[[Any], None]], Coroutine[Any, Any, T]]
    ) -> Generator[Any, None, T]:
        """Yield what the work emits, and return its result. If the caller stops reading, the work is cancelled."""
        items: SimpleQueue[Any] = SimpleQueue()
        with self.open() as (loop, runs):
            work = WorkInLoop(loop, make_work(runs, items.put))
            work.outcome.add_done_callback(lambda _: items.put(None))
            try:
                while (item := items.get()) is not None:
                    yield item
            finally:
                work.stop()
            return work.wait()

    async def stream_async(
        self,
        make_work: Callable[[GuardedRuns, Callable[[Any], None]], Coroutine[Any, Any, Any]],
        on_result: Callable[[Any], None],
    ) -> AsyncGenerator[Any]:
        """Yield what the work emits, and pass on its result, as `stream` does in a thread."""
        own_loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def emit(item: Any) -> None:
            own_loop.call_soon_threadsafe(items.put_nowait, item)

        with self.open() as (loop, runs):
            work = WorkInLoop(loop, make_work(runs, emit))
            work.outcome.add_done_callback(lambda _: emit(None))
            try:
                while (item := await items.get()) is not None:
                    yield item
            finally:
                await work.stop_async()
            on_result(await work.wait_async())

    def _close(self) -> None:
        if self._loop_and_thread is None or self._thread is None:
            return
        loop, self._loop_and_thread = self._loop_and_thread[0], None
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
