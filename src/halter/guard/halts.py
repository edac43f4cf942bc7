"""Halts from any process, in four scopes, and how both doors run an effect: until it is done, late or halted."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock, format_duration
from halter.core.errors import StoreUnavailable
from halter.core.events import AgentSwitched, CallSettled, HaltLifted, HaltRequested, RequestSettled
from halter.core.ids import FLEET, StreamId, may_decide
from halter.core.ports import Draft, Query, Rows, Store, Stored, Write
from halter.core.processes import LivenessWriter
from halter.core.rows import AgentRow, HaltRow
from halter.core.text import clean
from halter.core.vocabulary import Outcome, R
from halter.state.session import InFlight

T = TypeVar("T")

HALT_POLL_INTERVAL: Final = SECOND // 5
"""How often the store is polled while something is in flight: a halt must arrive well within a second."""


def halt(scope: str, by: str, key: str, reason: str = "", *, cancels: bool = False) -> Write:
    """Stop everything in a scope: fleet, agent:NAME, trigger:NAME or session:ID."""
    event = HaltRequested(scope=scope, by=by, reason=reason, cancels=cancels)
    return Write(FLEET, key, lambda _: [Draft(event)], [(HaltRow, scope)])


def cancel(session: str, by: str, key: str, reason: str = "") -> Write:
    """End one session for good: what it has in flight is stopped, and its owner ends it."""
    return halt(f"session:{session}", by, key, reason, cancels=True)


async def read_halts(store: Store, scopes: Iterable[str]) -> Mapping[str, HaltRow]:
    """What is or was halted of some scopes: as much as they are, whatever else ever was."""
    named = msgspec.json.encode([*dict.fromkeys(map(clean, scopes))]).decode()
    return {row.scope: row for row in await store.ask(Query("halts_of", HaltRow, {"scopes": named}))}


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

    return Write(FLEET, key, decide, [(HaltRow, scope)])


class EffectStopped(Exception):
    """A halt or its deadline stopped an effect. Never leaves the doors.

    `left` is what the effect ended with all the same: a value, or an exception.
    """

    def __init__(self, outcome: Outcome, sentence: str, left: object) -> None:
        super().__init__(sentence)
        self.outcome: Outcome = outcome
        self.leftover = left


class CancelledEffect(msgspec.Struct, frozen=True):
    """What an effect ended with whose session's task was cancelled: the argument of the CancelledError.

    Cancelled `twice`, the effect could not finish stopping, so its outcome is unknown.
    """

    leftover: object = None
    twice: bool = False


def read_cancelled_effect(cancelled: asyncio.CancelledError) -> CancelledEffect:
    found = cancelled.args[0] if cancelled.args else None
    return found if isinstance(found, CancelledEffect) else CancelledEffect()


class WatchedEffect(msgspec.Struct, eq=False):
    """An effect in flight: the task that it runs in, what halts it, its deadline, and what stopped it.

    What it returns is put into `left`. Not a context manager: one that waits would keep a bound method.
    """

    watch: "HaltWatch"
    task: asyncio.Task[Any]
    scopes: tuple[str, ...]
    deadline: float
    name: str
    before: int
    mark: object | None
    leftover: object = None
    halted: str = ""
    timed_out: bool = False

    def end(self, error: BaseException | None = None) -> None:
        """Watch no longer, after what the effect raised, if it did.

        Raises Stopped, or CancelledError with a CancelledEffect where the caller was cancelled.
        """
        del self.watch.flights[self]
        if self.mark is not None:
            self.watch.liveness.end_call(self.mark)
        stops = self.task.cancelling() - self.before
        if error is None and not stops:
            return
        cancelled = isinstance(error, asyncio.CancelledError)
        # Only a task that was told to stop was stopped: what is done just as its time is up counts as done.
        if not (stops or cancelled) or not (error is None or cancelled or isinstance(error, Exception)):
            return
        left = self.leftover if error is None else error
        if (self.halted or self.timed_out) and self.task.uncancel() == self.before:
            if self.halted:
                raise EffectStopped("external_halt", f"{self.halted} was halted.", left)
            raise EffectStopped("timeout", f"TimeoutError: {self.name} took longer than it may", left)
        # No subclass of it: `asyncio.timeout` around a session knows only the class itself.
        raise asyncio.CancelledError(CancelledEffect(left, stops > 1))


class HaltWatch:
    """Stops effects that are halted or late. One timer and one poll serve all; with nothing in flight there is none.

    An effect runs in the task of its caller and is stopped by cancelling that task once, so one that does not wait
    costs no trip through the event loop.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.liveness = LivenessWriter()
        self.flights: dict[WatchedEffect, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0
        self._poll_at = 0.0
        self._polling: asyncio.Task[None] | None = None

    async def run(self, effect: Coroutine[Any, Any, T], scopes: tuple[str, ...], allowed: int, name: str = "") -> T:
        """Run an effect until it is done, late or halted."""
        flight = self.watch(scopes, allowed, name)
        try:
            done = flight.leftover = await effect
        except BaseException as error:
            flight.end(error)
            raise
        flight.end()
        return done

    def watch(self, scopes: tuple[str, ...], allowed: int, name: str = "") -> WatchedEffect:
        """Watch over an effect of the current task, which must tell its end."""
        loop = asyncio.get_running_loop()
        task: Any = asyncio.current_task(loop)
        deadline, mark = loop.time() + allowed / SECOND, self.liveness.begin_call(name, allowed)
        flight = WatchedEffect(self, task, scopes, deadline, name, task.cancelling(), mark)
        self.flights[flight] = None
        if self._timer is None or deadline < self._next or self._loop is not loop:
            self._arm(loop, deadline)
        return flight

    def _arm(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        """Set the timer for the next deadline or poll, whichever comes first."""
        if self._timer is not None:
            self._timer.cancel()
        if self._timer is None or self._loop is not loop:
            self._poll_at = loop.time() + HALT_POLL_INTERVAL / SECOND
        self._loop = loop
        self._next = min(deadline, self._poll_at)
        self._timer = loop.call_at(self._next, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if not self.flights:
            self._timer = None
            return
        stopping = self._stop({flight: "" for flight in self.flights if flight.deadline <= now})
        if self._poll_at <= now:
            self._poll_at = now + HALT_POLL_INTERVAL / SECOND
            if self._polling is None or self._polling.done():
                self._polling = loop.create_task(self._poll(), name="halter-halt-watch")
        deadlines = [flight.deadline for flight in self.flights if flight.task not in stopping]
        self._arm(loop, min(deadlines, default=self._poll_at))

    async def _poll(self) -> None:
        """Stop what is halted; an unavailable store is polled again at the next interval."""
        with suppress(StoreUnavailable):
            halts = await read_halts(self._store, {scope for flight in self.flights for scope in flight.scopes})
            halted = {scope for scope, row in halts.items() if row.halted}
            hits = {flight: halted.intersection(flight.scopes) for flight in self.flights}
            self._stop({flight: min(hit) for flight, hit in hits.items() if hit})

    def _stop(self, flights: Mapping[WatchedEffect, str]) -> set[asyncio.Task[Any]]:
        """Stop effects that are late, or halted by a scope; return the tasks in which something is being stopped.

        Of effects inside of each other the innermost is stopped first, and the next one when that has ended: told twice
        to stop, an effect may not finish stopping.
        """
        stopping = {flight.task for flight in self.flights if flight.timed_out or flight.halted}
        for flight in reversed(list(flights)):
            if flight.task not in stopping:
                flight.halted, flight.timed_out = flights[flight], not flights[flight]
                stopping.add(flight.task)
                flight.task.cancel()
        return stopping

    async def find(self, scopes: Sequence[str]) -> HaltRow | None:
        """The first of these scopes that is halted."""
        halts = await read_halts(self._store, scopes)
        return next((halts[scope] for scope in scopes if scope in halts and halts[scope].halted), None)

    async def rows(self, scopes: Iterable[str]) -> Rows:
        """The halts of some scopes, for a decision that reads no other rows."""
        return _HaltRows(self._clock.now(), await read_halts(self._store, scopes))


class _HaltRows(msgspec.Struct, frozen=True):
    now: int
    halts: Mapping[str, HaltRow]

    def get(self, kind: type[R], *key: Any) -> R | None:
        row = self.halts.get(key[0]) if kind is HaltRow else None
        return cast("R | None", row)

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        return [self.get(*key) for key in keys]


LONGEST_ERROR: Final = 300
"""Longest error that is kept. Redact before cutting: half a secret is not recognised."""


class BudgetBusy(msgspec.Struct, frozen=True):
    """The budget would suffice, but other holds use it; the session waits. Nothing was written."""

    id: str


class RateLimited(msgspec.Struct, frozen=True):
    """The model's rate is used up until the minute ends. This is recorded; nothing is held.

    `waited` counts the earlier waits of this attempt.
    """

    id: str
    until: int
    waited: int = 0


async def run_shielded(act: Coroutine[Any, Any, T]) -> T:
    """Finish `act` even if the caller is cancelled.

    If it then fails, the error is dropped: the journal shows what was not written.
    """
    doing = asyncio.ensure_future(act)
    doing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    # From Python 3.14 on, asyncio.shield would report that error.
    await asyncio.wait([doing])
    return doing.result()


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

    return Write(FLEET, key, decide, [(AgentRow, agent)])


def switch_off(agent: str, sessions: Sequence[str], by: str, key: str, reason: str = "") -> Write:
    """Stop an agent from running by itself, and halt its sessions that do."""
    event = AgentSwitched(agent=agent, on=False, by=by, reason=reason)
    why = reason or f"{agent} was switched off"
    halts = [HaltRequested(scope=f"session:{session}", by=by, reason=why) for session in sessions]
    rows = [(AgentRow, agent), *((HaltRow, halt.scope) for halt in halts)]
    return Write(FLEET, key, lambda _: [Draft(event), *map(Draft, halts)], rows)
