"""Crashes on demand: a store as a mortal process sees it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final, Literal

from halter.core.errors import StoreUnavailable
from halter.core.ports import Change, Committed, Store, Stored, Write
from halter.testing.relay import Relay

CrashKind = Literal["before", "after", "answer_lost"]
CRASH_KINDS: Final[tuple[CrashKind, ...]] = ("before", "after", "answer_lost")


@dataclass(frozen=True, slots=True)
class Crash:
    """What befalls the n-th commit of a process; the first is number 1.

    `before`: nothing is written and the process is dead. `after`: it is written, and the process is dead before
    it hears of it. `answer_lost`: it is written, the process lives, and is told that the store is unavailable.
    """

    commit: int
    kind: CrashKind


class Crashed(BaseException):
    """The process is dead. No `except Exception` can keep it alive."""


def unwatched() -> None:
    """Tell nobody."""


class CrashingStore(Relay):
    """A store as one process sees it: others may act while it is on its way there and back, and it can die.

    The store behind it stays whole, as a disk does. Whatever the dead process still tries raises `Crashed`.
    """

    def __init__(self, store: Store, crash: Crash | None = None, on_death: Callable[[], None] = unwatched) -> None:
        super().__init__(store)
        self._crash = crash
        self._on_death = on_death
        self.dead = False
        self.commits = 0
        self.written: list[Stored] = []
        self.acknowledged: list[Stored] = []

    def die(self) -> None:
        """Let the process be dead from now on."""
        if not self.dead:
            self.dead = True
            self._on_death()

    async def way(self) -> None:
        """Let others act in between, and let nobody pass who is dead."""
        await asyncio.sleep(0)
        self._refuse_if_dead()

    async def commit(self, write: Write) -> Committed:
        """Commit, unless this is the one that a crash was planned for."""
        await self.way()
        self.commits += 1
        planned = self._crash.kind if self._crash and self._crash.commit == self.commits else None
        if planned == "before":
            self.die()
            self._refuse_if_dead()
        committed = await self._store.commit(write)
        self.written.extend(committed.fresh())
        if planned == "after":
            self.die()
        await self.way()
        if planned == "answer_lost":
            raise StoreUnavailable("The answer of the store was lost, as planned: repeat the write with the same key.")
        self.acknowledged.extend(committed.all())
        return committed

    async def changes(self) -> AsyncGenerator[Change]:
        """Follow the store for as long as the process lives."""
        async for change in self._store.changes():
            self._refuse_if_dead()
            yield change

    async def close(self) -> None:
        """Leave the store open: it outlives the process."""

    def _refuse_if_dead(self) -> None:
        if self.dead:
            raise Crashed
