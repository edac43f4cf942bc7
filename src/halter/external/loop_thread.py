"""An event loop in a thread of its own, and what a program that is not async does on it."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeVar

from halter.core.errors import ConfigError

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread, and the way to run coroutines on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="halter guard", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result. An interrupted wait cancels it."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigError("A blocking guard cannot be used inside its own tool. Use the async guard there.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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
