"""A store for programs that let people decide: a web back end, a chat bot, a script.

```python
async with Store("runs.db") as store:
    for need in await store.inbox():
        print(need.sentence)
        if need.decision:
            await store.approve(need.decision, need.digest, by="ada")
```

Every act names the person in whose name it is done; the journal keeps the name. The program has to know who is there:
the store takes its word, as it takes the word of everyone who can open it.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from halter.core.clock import Clock
from halter.core.errors import ConfigError
from halter.core.ids import normalize_person
from halter.core.rows import SessionRow
from halter.core.tools import File
from halter.external.loop_thread import Blocking
from halter.operations import control, decisions, messages, money, queries
from halter.operations.actor import Actor, Done, Principal
from halter.operations.control import HaltDone, ResumeResult
from halter.operations.decisions import DecisionResult
from halter.operations.money import CapSet
from halter.runtime.budgets import Budget
from halter.runtime.needs import Need
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import find_home, read_settings
from halter.state.receipt import Receipt


class StoreAccess:
    """A store with what people do in it. `environ` and `clock` default to the system's."""

    def __init__(
        self, store: str | Path, *, environ: Mapping[str, str] | None = None, clock: Clock | None = None
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._settings = read_settings(self._environ, find_home(self._environ), str(store))
        self._clock = clock
        self._stack: AsyncExitStack | None = None
        self._app: Runtime | None = None

    async def __aenter__(self) -> Self:
        """Open the store; nothing runs in it."""
        async with AsyncExitStack() as stack:
            opened_app = open_runtime(self._settings, self._clock, self._environ, acts=False)
            self._app = await stack.enter_async_context(opened_app)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        stack, self._stack, self._app = self._stack, None, None
        if stack is not None:
            await stack.__aexit__(kind, error, trace)

    def blocking(self) -> "BlockingStore":
        """Return the store for a program that is not async."""
        return BlockingStore(self)

    async def inbox(self) -> Sequence[Need]:
        """List what waits for a person: decisions with their `digest`, questions of sessions, and everything else."""
        return await queries.read_needs(self._actor())

    async def approve(
        self,
        decision: str,
        digest: str,
        *,
        by: str,
        edit: Mapping[str, Any] | None = None,
        cap: str | Decimal | None = None,
        reason: str = "",
    ) -> DecisionResult:
        """Approve a decision as it was shown: `digest` is that of the inbox. `edit` replaces the arguments of a call.

        `cap` is the new cap in dollars, or "none", where a session asks for a higher one.
        """
        return await decisions.approve_with(
            self._actor(by),
            decision,
            edit=None if edit is None else dict(edit),
            cap=None if cap is None else str(cap),
            digest=digest,
            reason=reason,
        )

    async def deny(self, decision: str, *, by: str, reason: str = "") -> DecisionResult:
        return await decisions.deny(self._actor(by), decision, reason)

    async def answer(self, session: str, text: str, *, by: str, files: Sequence[File] = ()) -> Done:
        """Answer the question that a session asks. `files` come with the answer."""
        return await messages.answer(self._actor(by), session, text, tuple(files))

    async def halt(self, scope: str, *, by: str, reason: str = "") -> HaltDone:
        """Halt a scope: `fleet`, an agent's name, a session's id, `agent:NAME`, `trigger:NAME` or `session:ID`."""
        return await control.halt(self._actor(by), scope, reason)

    async def resume(self, scope: str, *, by: str, over_seconds: int | None = None, reason: str = "") -> ResumeResult:
        """Lift a halt; the sessions resume over so many seconds."""
        return await control.resume(self._actor(by), scope, over_seconds, reason)

    async def budget(self) -> Sequence[Budget]:
        """List current caps, with what is spent and held against them."""
        return await money.list_budgets(self._actor())

    async def set_cap(
        self, direction: money.Direction, scope: str, cap: str | Decimal, *, by: str, window: str = "", reason: str = ""
    ) -> CapSet:
        """Raise or lower a cap, in dollars or "none", for one window or for the whole life of a session."""
        return await money.set_cap(self._actor(by), direction, scope, str(cap), window, reason)

    async def sessions(self, agent: str = "", *, state: str = "", limit: int = 50) -> Sequence[SessionRow]:
        """List sessions, the newest first: all, or those of an agent or in a state."""
        return await queries.sessions(self._actor(), agent, state, limit=limit)

    async def receipt(self, session: str) -> Receipt:
        """Return what a session has done, spent and seen so far."""
        return await queries.receipt(self._actor(), session)

    def _actor(self, by: str | None = None) -> Actor:
        """Return the actor of an act in a person's name; without one, of a program that only reads."""
        if self._app is None:
            raise ConfigError("The store is not open. Use it inside `async with Store(...) as store:`.")
        name = self._settings.person if by is None else normalize_person(by)
        if not name:
            raise ConfigError('Name the person who decides, as in `by="ada"`: the journal keeps the name.')
        return Actor(self._app, Principal(name))


class BlockingStore(Blocking):
    """A store with blocking calls."""

    NOUN = "store"
    _opened: StoreAccess

    def inbox(self) -> Sequence[Need]:
        """See `StoreAccess.inbox`."""
        return self._open().run(self._opened.inbox())

    def approve(
        self,
        decision: str,
        digest: str,
        *,
        by: str,
        edit: Mapping[str, Any] | None = None,
        cap: str | Decimal | None = None,
        reason: str = "",
    ) -> DecisionResult:
        """See `StoreAccess.approve`."""
        return self._open().run(self._opened.approve(decision, digest, by=by, edit=edit, cap=cap, reason=reason))

    def deny(self, decision: str, *, by: str, reason: str = "") -> DecisionResult:
        """See `StoreAccess.deny`."""
        return self._open().run(self._opened.deny(decision, by=by, reason=reason))

    def answer(self, session: str, text: str, *, by: str, files: Sequence[File] = ()) -> Done:
        """See `StoreAccess.answer`."""
        return self._open().run(self._opened.answer(session, text, by=by, files=files))

    def halt(self, scope: str, *, by: str, reason: str = "") -> HaltDone:
        """See `StoreAccess.halt`."""
        return self._open().run(self._opened.halt(scope, by=by, reason=reason))

    def resume(self, scope: str, *, by: str, over_seconds: int | None = None, reason: str = "") -> ResumeResult:
        """See `StoreAccess.resume`."""
        return self._open().run(self._opened.resume(scope, by=by, over_seconds=over_seconds, reason=reason))

    def budget(self) -> Sequence[Budget]:
        """See `StoreAccess.budget`."""
        return self._open().run(self._opened.budget())

    def set_cap(
        self, direction: money.Direction, scope: str, cap: str | Decimal, *, by: str, window: str = "", reason: str = ""
    ) -> CapSet:
        """See `StoreAccess.set_cap`."""
        return self._open().run(self._opened.set_cap(direction, scope, cap, by=by, window=window, reason=reason))

    def sessions(self, agent: str = "", *, state: str = "", limit: int = 50) -> Sequence[SessionRow]:
        """See `StoreAccess.sessions`."""
        return self._open().run(self._opened.sessions(agent, state=state, limit=limit))

    def receipt(self, session: str) -> Receipt:
        """See `StoreAccess.receipt`."""
        return self._open().run(self._opened.receipt(session))


Store = StoreAccess
"""The public name, `halter.Store`. Inside Halter, `Store` is the port of the journal."""
