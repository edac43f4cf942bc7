"""The guard for programs that are not async: a thread of its own runs it.

```python
with Guard("runs.db", agent="desk", max_cost_usd=1.00).blocking() as desk, desk.session("Answer the mail.") as session:
    answer = session.call("send", to="ada", text="hello")
```
"""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from halter.core.errors import ConfigError
from halter.state.receipt import Receipt
from halter.tools.function_tool import FunctionTool

if TYPE_CHECKING:
    from halter.guard.tool_door import Answer
    from halter.runtime.guard_api import Guard, GuardedSession, GuardSummary

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, and the way into it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="halter guard", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; an interrupted wait cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigError("A guard that blocks was used inside of its own tool: use the async guard there.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingGuard:
    """A guard whose calls return when they are done. Any thread may use it while it is open."""

    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        """Opens the guard in its own thread."""
        thread = LoopThread()
        try:
            thread.run(self._guard.__aenter__())
        except BaseException:
            thread.close()
            raise
        self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the guard."""
        thread, self._thread = self._open(), None
        try:
            thread.run(self._guard.__aexit__(kind, error, trace))
        finally:
            thread.close()

    @contextmanager
    def session(self, task: str = "", *, id: str | None = None) -> Generator["BlockingSession"]:  # noqa: A002 It is the word for it everywhere.
        """Starts a session, or resumes the one with that id, as `Guard.session` does."""
        thread, opened = self._open(), self._guard.session(task, id=id)
        session = BlockingSession(thread.run(opened.__aenter__()), thread)
        try:
            yield session
        except BaseException as error:
            if not thread.run(opened.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            thread.run(opened.__aexit__(None, None, None))

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> "Answer":
        """Makes one call in a session of its own."""
        return self._open().run(self._guard.call(tool, **arguments))

    def model(self, client: T, *, provider: str = "") -> T:
        """Returns a client of the openai or anthropic SDK whose requests pass the guard, as `Guard.model` does."""
        from halter.runtime.guard_api import guard_client

        return guard_client(
            client, lambda: self._guard.session("A request of an SDK's client."), self._open(), provider
        )

    def report(self) -> "GuardSummary":
        """Returns what this agent did and spent, its budgets, and what waits for a person."""
        return self._open().run(self._guard.report())

    def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Returns the receipts of this agent's sessions, the newest first."""
        return self._open().run(self._guard.receipts(limit))

    def _open(self) -> LoopThread:
        if self._thread is None:
            raise ConfigError("The guard is not open: use it inside of `with guard.blocking() as ...`.")
        return self._thread


class BlockingSession:
    """One session of a program that is not async. `guarded` is the session itself, in the guard's thread."""

    def __init__(self, guarded: "GuardedSession", thread: LoopThread) -> None:
        self.guarded = guarded
        self.thread = thread

    @property
    def id(self) -> str:
        """The session's id; pass it to `session` to resume."""
        return self.guarded.id

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> "Answer":
        """Calls a tool through the guard, as `GuardedSession.call` does."""
        return self.thread.run(self.guarded.call(tool, **arguments))

    def model(self, client: T, *, provider: str = "") -> T:
        """Returns a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        from halter.runtime.guard_api import guard_client

        return guard_client(client, lambda: nullcontext(self.guarded), self.thread, provider)

    def near_budget(self) -> bool:
        """Says whether 80 % of a cap is spent or held: of this session, its agent or the fleet."""
        return self.thread.run(self.guarded.near_budget())

    def receipt(self) -> Receipt:
        """Returns the receipt so far."""
        return self.thread.run(self.guarded.receipt())
