"""Halts by any process, in five scopes, and the watch that stops effects that are halted or late."""

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, Final, TypeVar, cast

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock, format_duration
from halter.core.errors import StoreUnavailable
from halter.core.events import AgentSwitched, HaltLifted, HaltRequested
from halter.core.ids import FLEET, can_decide
from halter.core.ports import Draft, Lease, Query, Rows, Store, Write
from halter.core.rows import AgentRow, HaltRow
from halter.core.text import clean
from halter.core.vocabulary import Outcome, R
from halter.system.liveness import LivenessWriter
from halter.system.processes import is_ending

T = TypeVar("T")

HALT_POLL_INTERVAL: Final = SECOND // 5
"""Interval of polling the store while an effect is in flight: a halt must arrive within a second."""


def halt(scope: str, by: str, key: str, reason: str = "", *, cancels: bool = False) -> Write:
    """Stop everything in a scope: fleet, agent:NAME, trigger:NAME, session:ID or key:AGENT/NAME."""
    event = HaltRequested(scope=scope, by=by, reason=reason, cancels=cancels)
    return Write(FLEET, key, lambda _: [Draft(event)], [(HaltRow, scope)])


def cancel(session: str, by: str, key: str, reason: str = "") -> Write:
    """End one session: its effects in flight stop, and its owner ends it."""
    return halt(f"session:{session}", by, key, reason, cancels=True)


async def read_halts(store: Store, scopes: Iterable[str]) -> Mapping[str, HaltRow]:
    """Read the halts of some scopes, including lifted ones. The cost depends only on the number of scopes."""
    encoded_scopes = msgspec.json.encode([*dict.fromkeys(map(clean, scopes))]).decode()
    return {row.scope: row for row in await store.ask(Query("halts_of", HaltRow, {"scopes": encoded_scopes}))}


async def compute_ramp(store: Store, scope: str) -> int:
    """Compute the ramp of a resumed scope: one second per session for the fleet, at most a minute."""
    if scope != "fleet":
        return 0
    (count,) = await store.ask(Query("sessions_that_return", _SessionCount, {"limit": MINUTE // SECOND}))
    return SECOND * count.sessions


class _SessionCount(msgspec.Struct, frozen=True):
    sessions: int


def describe_resume(scope: str, ramp: int) -> str:
    suffix = f"; its sessions resume one after another within {format_duration(ramp)}" if ramp else ""
    return f"Resumed {scope}{suffix}."


def resume(scope: str, by: str, key: str, ramp: int = 0, reason: str = "") -> Write:
    """Lift a halt; with a ramp, the scope's sessions resume one after another."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(HaltRow, scope)
        if row is None or not row.halted or not can_decide(by):
            return []
        return [Draft(HaltLifted(scope=scope, by=by, ramp=ramp, reason=reason))]

    return Write(FLEET, key, decide, [(HaltRow, scope)])


HaltKeys = tuple[tuple[type[HaltRow], str], ...]
"""The rows of the scopes whose halt stops a session's effects."""


def list_halt_rows(scopes: Iterable[str]) -> HaltKeys:
    """List the halt rows of some scopes."""
    return tuple([(HaltRow, scope) for scope in scopes])


def explain_halt(halts: Iterable[HaltRow | None], session: str, now: int) -> str:
    """Describe the halt of a scope, or the ramp of a resumed one; empty if neither applies."""
    for row in filter(None, halts):
        if row.halted:
            return f"{row.scope} was halted by {row.by}{': ' + row.reason if row.reason else ''}."
        if now < row.at + compute_ramp_delay(session, row.ramp):
            text = f"{row.scope} was resumed by {row.by}"
            return f"{text}; its sessions resume one after another, this one shortly."
    return ""


def compute_ramp_delay(session: str, ramp: int) -> int:
    """Compute a session's delay within the ramp after a halt: spread evenly, and constant for a session."""
    if ramp <= 0:
        return 0
    return int.from_bytes(sha256(session.encode()).digest()[:8]) % ramp


class Departures:
    """The sessions that this process leaves to a later owner, because it stops or has lost them.

    What they have in flight stays in flight: the next owner finds it in doubt, as after a crash.
    """

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._parents: dict[Lease, Lease] = {}

    def begin(self, leases: Iterable[Lease]) -> None:
        """Note, right before their tasks are cancelled, that these sessions are left."""
        self._leases.update(leases)

    def end(self, lease: Lease) -> None:
        self._leases.discard(lease)

    @contextmanager
    def follow(self, child: Lease, parent: Lease) -> Generator[None]:
        """Let a sub-session be left together with the session whose call runs it."""
        self._parents[child] = parent
        try:
            yield
        finally:
            del self._parents[child]

    def includes(self, lease: Lease) -> bool:
        parent = self._parents.get(lease)
        return lease in self._leases or is_ending() or (parent is not None and self.includes(parent))


class EffectStopped(Exception):
    """A halt or its deadline stopped an effect. The doors handle it; their callers never see it.

    `leftover` is the value or exception with which the stopped effect ended.
    """

    def __init__(self, outcome: Outcome, sentence: str, leftover: object) -> None:
        super().__init__(sentence)
        self.outcome: Outcome = outcome
        self.leftover = leftover


class CancelledEffect(msgspec.Struct, frozen=True):
    """The end of an effect whose session's task was cancelled; the argument of the CancelledError.

    `is_cancelled_twice`: the task was cancelled again before it had stopped, so the outcome is unknown.
    """

    leftover: object = None
    is_cancelled_twice: bool = False


def read_cancelled_effect(error: asyncio.CancelledError) -> CancelledEffect:
    effect = error.args[0] if error.args else None
    return effect if isinstance(effect, CancelledEffect) else CancelledEffect()


class WatchedEffect(msgspec.Struct, eq=False):
    """An effect in flight: its task, the scopes that halt it, its deadline, and what stopped it.

    The caller stores the effect's value in `leftover`. This is no context manager, which would keep a bound method in
    memory for each effect in flight.
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
        """Stop watching; `error` is what the effect raised, if it did.

        Raises EffectStopped, or CancelledError with a CancelledEffect if the caller was cancelled.
        """
        del self.watch.flights[self]
        if self.mark is not None:
            self.watch.liveness.end_call(self.mark)
        stops = self.task.cancelling() - self.before
        if error is None and not stops:
            return
        is_cancelled = isinstance(error, asyncio.CancelledError)
        # An effect counts as stopped only if its task was cancelled. One that finishes exactly at its deadline is done.
        if not (stops or is_cancelled) or not (error is None or is_cancelled or isinstance(error, Exception)):
            return
        leftover = self.leftover if error is None else error
        if (self.halted or self.timed_out) and self.task.uncancel() == self.before:
            if self.halted:
                raise EffectStopped("external_halt", f"{self.halted} was halted.", leftover)
            raise EffectStopped("timeout", f"TimeoutError: {self.name} exceeded its deadline", leftover)
        # Not a subclass: `asyncio.timeout` recognises only CancelledError itself.
        raise asyncio.CancelledError(CancelledEffect(leftover, stops > 1))


class HaltWatch:
    """Stops effects that are halted or late, with one timer and one poll for all effects in flight.

    An effect runs in its caller's task, and cancelling that task once stops it. An effect that does not wait therefore
    costs no trip through the event loop.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.liveness = LivenessWriter()
        self.departures = Departures()
        self.flights: dict[WatchedEffect, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0
        self._poll_at = 0.0
        self._polling: asyncio.Task[None] | None = None

    async def run(
        self, effect: Coroutine[Any, Any, T], scopes: tuple[str, ...], max_duration: int, name: str = ""
    ) -> T:
        """Run an effect until it is done, late or halted."""
        flight = self.watch(scopes, max_duration, name)
        try:
            result = flight.leftover = await effect
        except BaseException as error:
            flight.end(error)
            raise
        flight.end()
        return result

    def watch(self, scopes: tuple[str, ...], max_duration: int, name: str = "") -> WatchedEffect:
        """Watch an effect of the current task, which must call `end` on the returned object."""
        loop = asyncio.get_running_loop()
        task: Any = asyncio.current_task(loop)
        deadline, liveness_mark = loop.time() + max_duration / SECOND, self.liveness.begin_call(name, max_duration)
        flight = WatchedEffect(self, task, scopes, deadline, name, task.cancelling(), liveness_mark)
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
        """Stop the halted effects. An unavailable store is polled again at the next interval."""
        with suppress(StoreUnavailable):
            halts = await read_halts(self._store, {scope for flight in self.flights for scope in flight.scopes})
            halted_scopes = {scope for scope, row in halts.items() if row.halted}
            hits = {flight: halted_scopes.intersection(flight.scopes) for flight in self.flights}
            self._stop({flight: min(hit) for flight, hit in hits.items() if hit})

    def _stop(self, flights: Mapping[WatchedEffect, str]) -> set[asyncio.Task[Any]]:
        """Stop effects that are late, or halted by a scope; return the tasks with an effect that is stopping.

        Of nested effects the innermost stops first, and the next one after it has ended: a task that is cancelled twice
        may not finish stopping.
        """
        stopping = {flight.task for flight in self.flights if flight.timed_out or flight.halted}
        for flight in reversed(list(flights)):
            if flight.task not in stopping:
                flight.halted, flight.timed_out = flights[flight], not flights[flight]
                stopping.add(flight.task)
                flight.task.cancel()
        return stopping

    async def find(self, scopes: Sequence[str]) -> HaltRow | None:
        """Find the halt of the first halted scope."""
        halts = await read_halts(self._store, scopes)
        return next((halts[scope] for scope in scopes if scope in halts and halts[scope].halted), None)

    async def rows(self, scopes: Iterable[str]) -> Rows:
        """Read the halts of some scopes, for a decision that reads no other rows."""
        return _HaltRows(self._clock.now(), await read_halts(self._store, scopes))


class _HaltRows(msgspec.Struct, frozen=True):
    now: int
    halts: Mapping[str, HaltRow]

    def get(self, kind: type[R], *key: Any) -> R | None:
        row = self.halts.get(key[0]) if kind is HaltRow else None
        return cast("R | None", row)

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        return [self.get(*key) for key in keys]


class BudgetBusy(msgspec.Struct, frozen=True):
    """Other holds use the remaining budget, so the session must wait. Nothing was written."""

    id: str


class RateLimited(msgspec.Struct, frozen=True):
    """The model's rate limit is reached until `retry_at`. This is recorded; nothing is held.

    `wait_count` counts the earlier waits of this attempt.
    """

    id: str
    retry_at: int
    wait_count: int = 0


async def run_shielded(coroutine: Coroutine[Any, Any, T]) -> T:
    """Finish a coroutine even if the caller is cancelled.

    If it then fails, its error is dropped: the journal shows that the write is missing.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(lambda finished: None if finished.cancelled() else finished.exception())
    # From Python 3.14 on, asyncio.shield would report that error.
    await asyncio.wait([task])
    return task.result()


def switch_on(agent: str, by: str, key: str, reason: str = "") -> Write:
    """Let an agent run unattended. Only a person can do this."""
    event = AgentSwitched(agent=agent, on=True, by=by, reason=reason)

    def decide(_: Rows) -> Sequence[Draft]:
        return [Draft(event)] if can_decide(by) else []

    return Write(FLEET, key, decide, [(AgentRow, agent)])


def switch_off(agent: str, sessions: Sequence[str], by: str, key: str, reason: str = "") -> Write:
    """Stop an agent from running unattended, and halt its unattended sessions."""
    event = AgentSwitched(agent=agent, on=False, by=by, reason=reason)
    halt_reason = reason or f"{agent} was switched off"
    halts = [HaltRequested(scope=f"session:{session}", by=by, reason=halt_reason) for session in sessions]
    rows = [(AgentRow, agent), *((HaltRow, halt.scope) for halt in halts)]
    return Write(FLEET, key, lambda _: [Draft(event), *map(Draft, halts)], rows)
