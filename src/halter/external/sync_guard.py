"""A guard and its sessions for programs that are not async. The async guard runs in a thread of its own."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from halter.core.renamed import RenamedAttribute
from halter.external.guard_summary import GuardSummary
from halter.external.guarded_session import GuardedSession, guard_client
from halter.external.loop_thread import Blocking, LoopThread
from halter.guard.call_answer import Answer
from halter.state.receipt import Receipt
from halter.tools.function_tool import FunctionTool

R = TypeVar("R")


class BlockingGuard(Blocking):
    """A guard with blocking calls."""

    NOUN = "guard"

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

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Make one call in a new session."""
        return self._open().run(self._opened.call(tool, **arguments))

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard, as `Guard.model` does."""
        return guard_client(
            client, lambda: self._opened.session("A request of an SDK's client."), self._open(), provider
        )

    def report(self) -> GuardSummary:
        """Return what this agent did and spent, its budgets, and the decisions that wait for a person."""
        return self._open().run(self._opened.report())

    def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Return the receipts of this agent's sessions, newest first."""
        return self._open().run(self._opened.receipts(limit))


class BlockingSession:
    """One session of a program that is not async. `guarded` is the async session in the guard's thread."""

    def __init__(self, guarded: GuardedSession, thread: LoopThread) -> None:
        self.guarded = guarded
        self.thread = thread

    @property
    def id(self) -> str:
        """The session's id; pass it to `session` to resume."""
        return self.guarded.id

    def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Call a tool through the guard, as `GuardedSession.call` does."""
        return self.thread.run(self.guarded.call(tool, **arguments))

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        return guard_client(client, lambda: nullcontext(self.guarded), self.thread, provider)

    def is_near_budget(self) -> bool:
        """Return true if a cap of this session, its agent or the fleet is used up except for its reserve."""
        return self.thread.run(self.guarded.is_near_budget())

    near_budget = RenamedAttribute("is_near_budget")

    def receipt(self) -> Receipt:
        """Return the session's receipt up to now."""
        return self.thread.run(self.guarded.receipt())
