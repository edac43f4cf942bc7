"""Halts from any process, in four scopes, and how both doors wait: until done, timed out or halted."""

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock, format_duration
from halter.core.errors import StoreUnavailable
from halter.core.events import AgentSwitched, CallSettled, HaltLifted, HaltRequested, RequestSettled
from halter.core.ids import FLEET, StreamId, may_decide
from halter.core.ports import Draft, Query, Rows, Store, Stored, Write
from halter.core.processes import LivenessWriter
from halter.core.rows import AgentRow, HaltRow
from halter.core.vocabulary import R
from halter.state.session import InFlight

HALT_POLL_INTERVAL: Final = SECOND // 5
"""How often the store is polled while something is in flight: a halt must arrive well within a second."""


def halt(scope: str, by: str, key: str, reason: str = "") -> Write:
    """Stop everything in a scope: fleet, agent:NAME, trigger:NAME or session:ID."""
    event = HaltRequested(scope=scope, by=by, reason=reason)
    return Write(FLEET, key, lambda _: [Draft(event)], [(HaltRow, (scope,))])


def cancel(session: str, by: str, key: str, reason: str = "") -> Write:
    """End one session for good: what it has in flight is stopped, and its owner ends it."""
    scope = f"session:{session}"
    event = HaltRequested(scope=scope, by=by, reason=reason, cancels=True)
    return Write(FLEET, key, lambda _: [Draft(event)], [(HaltRow, (scope,))])


async def compute_ramp(store: Store, scope: str) -> int:
    """How long a scope takes to come back: for a fleet one second per session, at most a minute."""
    if scope != "fleet":
        return 0
    (returning,) = await store.ask(Query("sessions_that_return", _SessionCount, {"limit": MINUTE // SECOND}))
    return SECOND * returning.sessions


class _SessionCount(msgspec.Struct, frozen=True):
    sessions: int


def describe_resume(scope: str, ramp: int) -> str:
    when = f"; its sessions come back one after the other, within {format_duration(ramp)}" if ramp else ""
    return f"{scope} may act again{when}."


def resume(scope: str, by: str, key: str, ramp: int = 0, reason: str = "") -> Write:
    """Let a scope act again; with a ramp its sessions return one after the other."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(HaltRow, scope)
        if row is None or not row.halted or not may_decide(by):
            return []
        return [Draft(HaltLifted(scope=scope, by=by, ramp=ramp, reason=reason))]

    return Write(FLEET, key, decide, [(HaltRow, (scope,))])


class HaltWatch:
    """Reports halts to calls in flight. One poll serves all; with nothing in flight there is none."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.pulse = LivenessWriter()
        self._waiting: dict[asyncio.Future[str], frozenset[str]] = {}
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, scopes: Iterable[str]) -> Generator[asyncio.Future[str]]:
        """While the block runs, the future resolves to the first scope that is halted."""
        word: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[word] = frozenset(scopes)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="halter-halt-watch")
        try:
            yield word
        finally:
            del self._waiting[word]

    async def now(self, scopes: Iterable[str]) -> str | None:
        return min(await self._halted() & frozenset(scopes), default=None)

    async def rows(self) -> Rows:
        """All halts, for a decision that reads no other rows."""
        rows = await self._store.ask(Query("all_halts", HaltRow))
        return _HaltRows(self._clock.now(), {row.scope: row for row in rows})

    async def _look(self) -> None:
        while self._waiting:
            await self._clock.sleep(HALT_POLL_INTERVAL)
            # A caller that has finished meanwhile may have closed the store as well.
            halted = await self._halted() if self._waiting else frozenset[str]()
            for word, scopes in self._waiting.items():
                hit = halted & scopes
                if hit and not word.done():
                    word.set_result(min(hit))

    async def _halted(self) -> frozenset[str]:
        """Halted scopes; an unavailable store is polled again at the next interval."""
        try:
            rows = await self._store.ask(Query("all_halts", HaltRow))
        except StoreUnavailable:
            return frozenset()
        return frozenset(row.scope for row in rows if row.halted)


class _HaltRows(msgspec.Struct, frozen=True):
    now: int
    halts: Mapping[str, HaltRow]

    def get(self, kind: type[R], *key: Any) -> R | None:
        row = self.halts.get(key[0]) if kind is HaltRow else None
        return cast("R | None", row)


T = TypeVar("T")


LONGEST_ERROR: Final = 300
"""Longest error that is kept. Redact before cutting: half a secret is not recognised."""


class StillHeld(msgspec.Struct, frozen=True):
    """The budget would suffice, but other holds use it; the session waits. Nothing was written."""

    id: str


class RateUsedUp(msgspec.Struct, frozen=True):
    """The model's rate is used up until the minute ends. This is recorded; nothing is held.

    `waited` counts the earlier waits of this attempt.
    """

    id: str
    until: int
    waited: int = 0


class Halted(Exception):
    """A halt stopped what was in flight. Never leaves the doors."""


async def wait_unless_halted(
    halts: HaltWatch, scopes: Iterable[str], acting: asyncio.Future[T], allowed: int, name: str = ""
) -> T:
    """Wait until it is done, timed out or halted."""
    with halts.pulse.in_flight(name, allowed):
        try:
            await asyncio.sleep(0)
            if acting.done():
                # Done at once: there is nothing to watch.
                return acting.result()
            with halts.listening(scopes) as halted:
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait((acting, halted), timeout=allowed / SECOND, return_when=first)
            # What is done just as its time is up counts as done: it may have been paid for.
            if acting.done():
                return acting.result()
            if halted.done():
                raise Halted(f"{halted.result()} was halted.")
            raise TimeoutError
        finally:
            if not acting.done():
                acting.cancel()
                await asyncio.wait((acting,))


async def run_shielded(act: Coroutine[Any, Any, T]) -> T:
    """Finish `act` even if the caller is cancelled.

    If it then fails, the error is dropped: the journal shows what was not written.
    """
    doing = asyncio.ensure_future(act)
    doing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(doing)


async def find_outcome(store: Store, stream: StreamId, flight: InFlight) -> Stored | None:
    """Find the outcome of something begun earlier: a repeated request returns it, and nothing runs twice."""
    after = flight.seq
    while page := await store.read(stream, after):
        for stored in page:
            match stored.event:
                case CallSettled(call=settled) | RequestSettled(request=settled) if settled == flight.id:
                    return stored
                case _:
                    pass
        after = page[-1].seq
    return None


def switch_on(agent: str, by: str, key: str, reason: str = "") -> Write:
    """Let an agent run by itself. Only a person may do this."""
    event = AgentSwitched(agent=agent, on=True, by=by, reason=reason)

    def decide(_: Rows) -> Sequence[Draft]:
        return [Draft(event)] if may_decide(by) else []

    return Write(FLEET, key, decide, [(AgentRow, (agent,))])


def switch_off(agent: str, sessions: Sequence[str], by: str, key: str, reason: str = "") -> Write:
    """Stop an agent from running by itself, and halt its sessions that do."""
    event = AgentSwitched(agent=agent, on=False, by=by, reason=reason)
    why = reason or f"{agent} was switched off"
    halts = [HaltRequested(scope=f"session:{session}", by=by, reason=why) for session in sessions]
    rows = [(AgentRow, (agent,)), *((HaltRow, (halt.scope,)) for halt in halts)]
    return Write(FLEET, key, lambda _: [Draft(event), *map(Draft, halts)], rows)
