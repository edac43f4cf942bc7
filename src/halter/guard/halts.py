"""Halts: from any process, in four scopes, and heard by whatever is in flight."""

import asyncio
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.durations import shown_duration
from halter.core.errors import StoreUnavailable
from halter.core.events import HaltLifted, HaltRequested
from halter.core.ids import FLEET, may_decide
from halter.core.ports import Draft, Query, Rows, Store, Write
from halter.core.pulse import Pulse
from halter.core.row import R
from halter.core.rows import HaltRow

LOOK: Final = SECOND // 5
"""How often the store is asked while something is in flight: a halt must be heard well within a second."""


def halt(scope: str, by: str, key: str, reason: str = "") -> Write:
    """Stop everything in a scope: fleet, agent:NAME, trigger:NAME or session:ID."""
    event = HaltRequested(scope=scope, by=by, reason=reason)
    return Write(FLEET, key, lambda _: [Draft(event)], [(HaltRow, (scope,))])


def cancel(session: str, by: str, key: str, reason: str = "") -> Write:
    """End one session for good: whatever it has in flight is stopped, and its owner ends it."""
    scope = f"session:{session}"
    event = HaltRequested(scope=scope, by=by, reason=reason, cancels=True)
    return Write(FLEET, key, lambda _: [Draft(event)], [(HaltRow, (scope,))])


async def usual_ramp(store: Store, scope: str) -> int:
    """Work out over how long a scope comes back: a fleet takes a second for each of its sessions, and at most a minute.

    So many do not rush in at once, and few do not wait for nobody.
    """
    if scope != "fleet":
        return 0
    (returning,) = await store.ask(Query("sessions_that_return", _Returning, {"limit": MINUTE // SECOND}))
    return SECOND * returning.sessions


class _Returning(msgspec.Struct, frozen=True):
    sessions: int


def let_go(scope: str, ramp: int) -> str:
    """Say that a scope may act again, and how soon its sessions do."""
    when = f"; its sessions come back one after the other, within {shown_duration(ramp)}" if ramp else ""
    return f"{scope} may act again{when}."


def resume(scope: str, by: str, key: str, ramp: int = 0, reason: str = "") -> Write:
    """Let a scope act again; over a ramp its sessions come back one after the other, not all at once."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(HaltRow, scope)
        if row is None or not row.halted or not may_decide(by):
            return []
        return [Draft(HaltLifted(scope=scope, by=by, ramp=ramp, reason=reason))]

    return Write(FLEET, key, decide, [(HaltRow, (scope,))])


class HaltWatch:
    """Tells whoever has something in flight that it was halted. One look serves all; with nothing in flight, none."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.pulse = Pulse()
        self._waiting: dict[asyncio.Future[str], frozenset[str]] = {}
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, scopes: Iterable[str]) -> Generator[asyncio.Future[str]]:
        """Listen for as long as the block takes: the future is the first of the scopes that is halted."""
        word: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[word] = frozenset(scopes)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="halter-halt-watch")
        try:
            yield word
        finally:
            del self._waiting[word]

    async def now(self, scopes: Iterable[str]) -> str | None:
        """Tell which of the scopes is halted at this moment, if any is."""
        return min(await self._halted() & frozenset(scopes), default=None)

    async def rows(self) -> Rows:
        """Read all halts as they stand, for a decision that looks at nothing else."""
        rows = await self._store.ask(Query("all_halts", HaltRow))
        return _Halts(self._clock.now(), {row.scope: row for row in rows})

    async def _look(self) -> None:
        while self._waiting:
            await self._clock.sleep(LOOK)
            # Whoever has finished meanwhile may have closed the store as well.
            halted = await self._halted() if self._waiting else frozenset[str]()
            for word, scopes in self._waiting.items():
                hit = halted & scopes
                if hit and not word.done():
                    word.set_result(min(hit))

    async def _halted(self) -> frozenset[str]:
        """Ask for the halted scopes; a store that is away for a moment is asked again at the next look."""
        try:
            rows = await self._store.ask(Query("all_halts", HaltRow))
        except StoreUnavailable:
            return frozenset()
        return frozenset(row.scope for row in rows if row.halted)


class _Halts(msgspec.Struct, frozen=True):
    """Halts as the rows of a decision; there are no others."""

    now: int
    halts: Mapping[str, HaltRow]

    def get(self, kind: type[R], *key: Any) -> R | None:
        row = self.halts.get(key[0]) if kind is HaltRow else None
        return cast("R | None", row)
