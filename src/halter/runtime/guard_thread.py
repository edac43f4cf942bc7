"""The guard for programs that are not async. It runs in a separate thread.

```python
with Guard("runs.db", agent="desk", max_cost_usd=1.00).blocking() as desk, desk.session("Answer the mail.") as session:
    answer = session.call("send", to="ada", text="hello")
```
"""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from halter.core.errors import ConfigError
from halter.core.renamed import RenamedAttribute
from halter.state.receipt import Receipt
from halter.tools.function_tool import FunctionTool

if TYPE_CHECKING:
    from halter.guard.tool_door import Answer
    from halter.runtime.guard_api import Guard, GuardedSession, GuardSummary

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


class BlockingGuard(Blocking):
    """A guard with blocking calls."""

    NOUN = "guard"
    _opened: "Guard"

    @contextmanager
    def session(self, task: str = "", *, id: str | None = None) -> Generator["BlockingSession"]:  # noqa: A002 The public name.
        """Start a session, or resume the one with that id, as `Guard.session` does."""
        thread, manager = self._open(), self._opened.session(task, id=id)
        session = BlockingSession(thread.run(manager.__aenter__()), thread)
        try:
            yield session
        except BaseException as error:
            if not thread.run(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            thread.run(manager.__aexit__(None, None, None))

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> "Answer":
        """Make one call in a new session."""
        return self._open().run(self._opened.call(tool, **arguments))

    def model(self, client: T, *, provider: str = "") -> T:
        """Return a client of the openai or anthropic SDK whose requests pass the guard, as `Guard.model` does."""
        from halter.runtime.guard_api import guard_client

        return guard_client(
            client, lambda: self._opened.session("A request of an SDK's client."), self._open(), provider
        )

    def report(self) -> "GuardSummary":
        """Return what this agent did and spent, its budgets, and the decisions that wait for a person."""
        return self._open().run(self._opened.report())

    def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Return the receipts of this agent's sessions, newest first."""
        return self._open().run(self._opened.receipts(limit))


class BlockingSession:
    """One session of a program that is not async. `guarded` is the async session in the guard's thread."""

    def __init__(self, guarded: "GuardedSession", thread: LoopThread) -> None:
        self.guarded = guarded
        self.thread = thread

    @property
    def id(self) -> str:
        """The session's id; pass it to `session` to resume."""
        return self.guarded.id

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> "Answer":
        """Call a tool through the guard, as `GuardedSession.call` does."""
        return self.thread.run(self.guarded.call(tool, **arguments))

    def model(self, client: T, *, provider: str = "") -> T:
        """Return a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        from halter.runtime.guard_api import guard_client

        return guard_client(client, lambda: nullcontext(self.guarded), self.thread, provider)

    def is_near_budget(self) -> bool:
        """Return true if a cap of this session, its agent or the fleet is used up except for its reserve."""
        return self.thread.run(self.guarded.is_near_budget())

    near_budget = RenamedAttribute("is_near_budget")

    def receipt(self) -> Receipt:
        """Return the session's receipt up to now."""
        return self.thread.run(self.guarded.receipt())
