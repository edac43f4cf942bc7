"""The body of an effect: what a call and a request share from the commit of their intent to their outcome.

    admit    an intent that was committed before: its outcome is read, and a concurrent attempt is waited for
    run      no transaction: a halt or the deadline stops the effect
    settle   the outcome and its true cost, now or with the session's next commit

A door prepares an effect and commits what the judge decides. It says how its effects run and how their outcome reads.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from halter.core.clock import SECOND, Clock, bind_monotonic
from halter.core.events import CallSettled, RequestSettled
from halter.core.ids import StreamId
from halter.core.ports import Committed, Lease, Store, Stored
from halter.guard.halts import CancelledEffect, HaltWatch, read_cancelled_effect, run_shielded
from halter.guard.ledger import ActualResult, Ledger, Settlement
from halter.state.session import InFlight

MILLISECOND: Final = SECOND // 1000
MAX_ERROR_LENGTH: Final = 300
"""Maximum length of a recorded error, in characters. Redact before cutting: half a secret is not recognised."""
STARTED_BY_EARLIER_OWNER: Final = "An earlier owner of this session started it; its outcome is unknown."


class RunningEffect(msgspec.Struct):
    """An effect that runs now: its intent, its start, and the scopes and the deadline that stop it.

    A call starts at a reading of the clock for durations, a request at a time, which decides its price. With
    `can_defer` the settlement may be deferred to the session's next commit.
    """

    lease: Lease
    flight: InFlight
    started_at: int
    scopes: tuple[str, ...]
    timeout: int
    can_defer: bool


E = TypeVar("E", bound=RunningEffect)
V = TypeVar("V")
A = TypeVar("A")


class Door(ABC, Generic[E, V, A]):
    """A door for effects `E` that return a value `V`; the answer `A` says how one ended."""

    failures: ClassVar[tuple[type[Exception], ...]]
    """The errors that are outcomes of an effect. Any other error is a bug, and leaves the effect in doubt."""

    def __init__(self, store: Store, clock: Clock, ledger: Ledger, halts: HaltWatch | None) -> None:
        self._store = store
        self._clock = clock
        self._read_monotonic = bind_monotonic(clock)
        self._ledger = ledger
        self._halts = halts or HaltWatch(store, clock)
        self._running: dict[str, asyncio.Event | None] = {}

    async def find_earlier_answer(self, lease: Lease, flight: InFlight, committed: Committed) -> A | None:
        """Find the answer of an effect whose intent was committed before. A concurrent attempt is waited for.

        Returns None if this process committed the intent, but lost the reply to that commit: then the effect must run.
        """
        settled = await find_outcome(self._store, lease.stream, flight)
        if settled is None and flight.id in self._running:
            done_event = self._running[flight.id] = self._running[flight.id] or asyncio.Event()
            await done_event.wait()
            await self._ledger.flush_deferred(lease)
            settled = await find_outcome(self._store, lease.stream, flight)
        if settled is not None:
            return await self.restore_answer(lease, settled, committed)
        if committed.events[0].generation != lease.generation:
            return self.answer_in_doubt(flight)
        return None

    async def carry_out(self, effect: E) -> A:
        """Run an admitted effect, and settle its cost even if it is halted, late or cancelled."""
        running, flight = self._running, effect.flight
        running[flight.id] = None
        try:
            watched = self._halts.watch(effect.scopes, effect.timeout, flight.name)
            try:
                try:
                    value = watched.leftover = await self.start(effect)
                except BaseException as error:
                    watched.end(error)
                    raise
                watched.end()
            except asyncio.CancelledError as stop:
                await self._settle_cancelled(effect, stop)
                raise
            except self.failures as error:
                result = self.read_failure(effect, error)
            else:
                result = self.read_value(effect, value)
            result, settlement = await self.record_outcome(effect, result)
            return self.make_answer(effect, result, settlement)
        finally:
            done_event = running.pop(flight.id)
            if done_event is not None:
                done_event.set()

    async def _settle_cancelled(self, effect: E, stop: asyncio.CancelledError) -> None:
        is_left = self._halts.departures.includes(effect.lease)
        result = self.read_cancel(effect, read_cancelled_effect(stop), is_left=is_left)
        if result is not None:
            await run_shielded(self.record_outcome(effect, result))

    async def run_unrecorded(self, effect: E) -> ActualResult:
        """Run an effect that has no intent, and whose outcome no event records."""
        try:
            value = await self._halts.run(self.start(effect), effect.scopes, effect.timeout, effect.flight.name)
        except self.failures as error:
            return self.read_failure(effect, error)
        return self.read_value(effect, value)

    async def record_outcome(self, effect: RunningEffect, result: ActualResult) -> tuple[ActualResult, Settlement]:
        """Settle the true cost, now or with the session's next commit; return the outcome as it was recorded."""
        lease, flight, ledger = effect.lease, effect.flight, self._ledger
        if flight.is_call:
            duration_ms = (self._read_monotonic() - effect.started_at) // MILLISECOND
            if duration_ms or flight.audited:
                result = msgspec.structs.replace(result, duration_ms=duration_ms, audited=flight.audited)
        settlement = ledger.defer_settlement(lease, flight, result) if effect.can_defer else None
        if settlement is None:
            settlement = await ledger.settle(lease, flight, result)
        return result, settlement

    @abstractmethod
    def start(self, effect: E) -> Coroutine[Any, Any, V]:
        """Use the permit: call the tool, or ask the model."""

    @abstractmethod
    def read_value(self, effect: E, value: V) -> ActualResult:
        """Read the outcome of an effect that returned a value."""

    @abstractmethod
    def read_failure(self, effect: E, error: Exception) -> ActualResult:
        """Read the outcome of an effect that failed, was halted or was late."""

    @abstractmethod
    def read_cancel(self, effect: E, cancelled: CancelledEffect, *, is_left: bool) -> ActualResult | None:
        """Read the outcome of an effect whose session was cancelled; None leaves it in flight for the next owner.

        `is_left`: this process leaves the session to a later owner.
        """

    @abstractmethod
    def make_answer(self, effect: E, result: ActualResult, settlement: Settlement) -> A:
        """Make the answer of an effect that has just been settled."""

    @abstractmethod
    async def restore_answer(self, lease: Lease, settled: Stored, committed: Committed) -> A:
        """Restore the answer of an effect that was settled before; `committed` has its intent."""

    @abstractmethod
    def answer_in_doubt(self, flight: InFlight) -> A:
        """Make the answer of an effect that an earlier owner of the session started."""


async def find_outcome(store: Store, stream: StreamId, flight: InFlight) -> Stored | None:
    """Find the outcome of an effect that was started earlier."""
    after_seq = flight.seq
    while page := await store.read(stream, after_seq):
        for stored in page:
            match stored.event:
                case CallSettled(call=settled_id) | RequestSettled(request=settled_id) if settled_id == flight.id:
                    return stored
                case _:
                    pass
        after_seq = page[-1].seq
    return None
