"""The economic brake (R4): reserve before acting, settle after.

The decisions are pure and read locked rows. `Ledger` commits them and waits, for a bounded time, while other holds are
in the way.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, Final, Protocol, cast

import msgspec

from halter.core import events as ev
from halter.core.clock import DAY, SECOND, Clock
from halter.core.effect_events import UnheldCost
from halter.core.ids import FLEET, Digest, StreamId, may_decide, session_of
from halter.core.money import (
    COLD_START_COST,
    LARGEST_AMOUNT,
    SAMPLES_KEPT,
    Account,
    BudgetRow,
    Charge,
    CostForecast,
    Unit,
    compute_cap_overrun,
    forecast_cost,
    is_near_cap,
    settle,
)
from halter.core.ports import BLOB_THRESHOLD, Committed, Draft, Lease, Query, Rows, Store, Write, offload_body
from halter.core.project import FindCaps, budget_key, budget_row, rows_of_event
from halter.core.rows import AuditRow, DecisionRow, HoldRow
from halter.core.tools import JournalEffect
from halter.core.usage import Usage
from halter.core.vocabulary import Outcome, Purpose, RowKey
from halter.state.session import InFlight

BUDGET_WAIT: Final = 60 * SECOND
LONGEST_BUDGET_POLL: Final = SECOND // 2
SAMPLE_PERIOD: Final = 30 * DAY


class ActualResult(msgspec.Struct, frozen=True, gc=False):
    """The outcome and its cost. A cost of None is charged at the hold: nothing better is known."""

    outcome: Outcome
    usd: int | None = None
    tokens: int | None = None
    usage: Usage | None = None
    body: bytes | None = None
    blob: Digest | None = None
    duration_ms: int = 0
    error: str = ""
    audited: bool = False
    may_retry: bool = False
    retry_after: int | None = None
    needs_person: bool = False
    happened: tuple[JournalEffect, ...] = ()


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """What was charged, whether a cap was passed by it, and the commit; a deferred one has no events yet."""

    usd: int
    tokens: int
    overrun: bool = False
    committed: Committed = Committed(())


def settle_flight(
    flight: InFlight, result: ActualResult, usd: int, tokens: int, known: Charge | None, rows: Rows
) -> Sequence[Draft]:
    """Settle exactly once, at the true cost, with an incident for each cap that it passed; a `known` charge: none."""
    legs = flight.legs
    if legs and rows.get(HoldRow, flight.id) is None:
        return []
    charge = _compute_charge(flight, usd, tokens, rows) if known is None and (legs or usd) else known
    unheld = None if legs or charge is None else UnheldCost(flight.name, flight.purpose, flight.accounts)
    if flight.is_call:
        event: ev.AnyEvent = ev.CallSettled(
            call=flight.id,
            outcome=result.outcome,
            charge=charge,
            duration_ms=result.duration_ms,
            error=result.error,
            audited=result.audited,
            unheld=unheld,
        )
    else:
        event = ev.RequestSettled(
            request=flight.id,
            outcome=result.outcome,
            usage=result.usage,
            charge=charge,
            unheld=unheld,
            error=result.error,
            may_retry=result.may_retry,
            retry_after=result.retry_after,
            needs_person=result.needs_person,
        )
    drafts = [Draft(event, result.body, result.blob)]
    if charge is not None and charge.overruns:
        drafts += map(Draft, map(partial(ev.OverrunIncurred.by, flight.id), charge.overruns))
    if result.happened:
        drafts += _draft_effects(result, rows)
    return drafts


def _list_effect_rows(happened: Sequence[JournalEffect]) -> Iterator[RowKey]:
    """The rows that the effects change, and those that suppress them."""
    for each in happened:
        yield from rows_of_event(each.event)
        if isinstance(each.event, ev.DecisionAsked):
            yield (DecisionRow, each.event.decision)
        if each.unless is not None:
            yield each.unless


def _draft_effects(result: ActualResult, rows: Rows) -> Iterator[Draft]:
    for each in result.happened:
        if each.unless is None or rows.get(*each.unless) is None:
            yield Draft(
                cast("ev.AnyEvent", each.event), each.body, stream=StreamId(each.stream) if each.stream else None
            )


def _compute_charge(flight: InFlight, usd: int, tokens: int, rows: Rows) -> Charge | None:
    """The charge; a cost without a hold is checked against the caps as a hold would have been."""
    if flight.legs:
        return settle(flight.legs, usd, tokens, partial(budget_row, rows))
    if flight.accounts:
        return settle(flight.accounts, usd, 0, lambda leg: budget_row(rows, leg).with_cap(leg.cap, rows.now))
    return None


def compute_charged_amounts(flight: InFlight, result: ActualResult) -> tuple[int, int]:
    """Dollars and tokens to charge: as reported, or as held where no plausible figure was reported."""
    usd, tokens = result.usd, result.tokens
    if usd is None or not 0 <= usd <= LARGEST_AMOUNT:
        usd = flight.held_amount("usd") if flight.legs else 0
    if tokens is None or not 0 <= tokens <= LARGEST_AMOUNT:
        tokens = flight.held_amount("tokens") if flight.legs else 0
    return usd, tokens


def change_cap(account: Account, cap: int | None, by: str, key: str, reason: str = "") -> Write:
    """Set a cap, also below what is spent already: the excess is recorded.

    A sub-session's cap cannot exceed what was carved out for it, and no agent changes any cap: then nothing is written.
    """
    session = session_of(StreamId(account.scope)) or ""

    def decide(rows: Rows) -> Sequence[Draft]:
        if not may_decide(by):
            return []
        carved = rows.get(HoldRow, session) if session else None
        bounds = [leg for leg in carved.taken() if leg.unit == account.unit] if carved is not None else []
        if any(cap is None or cap > leg.amount for leg in bounds):
            return []
        overrun = compute_cap_overrun(budget_row(rows, account), cap)
        event = ev.CapChanged(
            scope=account.scope,
            window=account.window,
            unit=account.unit,
            cap=cap,
            by=by,
            overrun=overrun,
            reason=reason,
        )
        return [Draft(event)]

    reads = [budget_key(account), *([(HoldRow, session)] if session else [])]
    return Write(FLEET, key, decide, reads)


def _make_settling_write(
    lease: Lease, flight: InFlight, result: ActualResult, usd: int, tokens: int, known: Charge | None = None
) -> Write:
    rows: tuple[RowKey, ...] = ()
    others: tuple[StreamId, ...] = ()
    # What has neither a hold nor a cost has at most its line of the audit.
    if flight.legs or usd:
        rows = ((HoldRow, flight.id), *map(budget_key, flight.legs or flight.accounts))
    if result.audited:
        rows = (*rows, (AuditRow, flight.id))
    if result.happened:
        rows = (*rows, *_list_effect_rows(result.happened))
        others = tuple(dict.fromkeys(StreamId(each.stream) for each in result.happened if each.stream))
    stream, key = lease.stream, f"{flight.id}/settled/{flight.seq}"
    return Write(stream, key, partial(settle_flight, flight, result, usd, tokens, known), rows, lease, others)


class Intent(Protocol):
    """The write that admits something or refuses it, decided at the moment at which it is tried."""

    @property
    def lease(self) -> Lease: ...

    def write(self, now: int, first: Write | None = None) -> Write: ...


async def read_budget(store: Store, scope: str, window: str = "", unit: Unit = "usd") -> BudgetRow:
    """Return a budget's row; an empty one where nothing was spent."""
    params = {"scope": scope, "window": window, "unit": unit}
    return next(iter(await store.ask(Query("budget", BudgetRow, params))), BudgetRow(scope, window, unit))


class Ledger:
    def __init__(self, store: Store, clock: Clock, max_wait: int = BUDGET_WAIT) -> None:
        self._store = store
        self._clock = clock
        self.hold_timeout = max_wait
        self._waiting: deque[asyncio.Event] = deque()
        self._deferred: dict[Lease, Write] = {}

    def commit(self, write: Write) -> "CoroutineType[Any, Any, Committed]":
        """Commit a write, and just before it, in the same transaction, what the session deferred."""
        lease = write.lease
        before = None if lease is None else self._deferred.get(lease)
        return (
            self._store.commit(write) if lease is None or before is None else self._commit_after(lease, before, write)
        )

    async def _commit_after(self, lease: Lease, before: Write, write: Write) -> Committed:
        committed = await self._store.commit(msgspec.structs.replace(write, first=before))
        self._forget_deferred(lease, before)
        return committed

    async def commit_intent(self, intent: Intent, max_wait: int, now: int = 0) -> Committed | None:
        """Commit an intent, decided at this moment, which is `now` where it is known already.

        If other holds are in the way, decide again when one settles; None when they stay for longer than `patience`.
        """
        lease = intent.lease
        now = now or self._clock.now()
        deadline = now + max_wait
        while True:
            before = self._deferred.get(lease)
            committed = await self._store.commit(intent.write(now, before))
            if before is not None:
                self._forget_deferred(lease, before)
            if committed.events:
                return committed
            now = self._clock.now()
            if now >= deadline:
                return None
            await self.wait_until_freed(min(deadline - now, LONGEST_BUDGET_POLL))
            now = self._clock.now()

    def _forget_deferred(self, lease: Lease, deferred: Write) -> None:
        """Forget what was deferred: the session's newest write has carried it."""
        if self._deferred.get(lease) is deferred:
            del self._deferred[lease]
        if self._waiting:
            self._wake_next_waiter()

    def defer(self, lease: Lease, write: Write) -> None:
        """Defer a write into the session's next commit."""
        before = self._deferred.setdefault(lease, write)
        if before is not write:
            self._deferred[lease] = msgspec.structs.replace(write, first=before)

    def has_deferred(self, lease: Lease) -> bool:
        return lease in self._deferred

    async def flush_deferred(self, lease: Lease) -> None:
        """Commit what was deferred: no further write follows to carry it."""
        before = self._deferred.pop(lease, None)
        if before is not None:
            await self._store.commit(before)
            self._wake_next_waiter()

    async def settle(self, lease: Lease, flight: InFlight, result: ActualResult) -> Settlement:
        """Commit the outcome with its true cost, and wake a waiter for money."""
        if result.body is not None and len(result.body) > BLOB_THRESHOLD:
            body, blob = await offload_body(self._store, result.body)
            result = msgspec.structs.replace(result, body=body, blob=blob)
        usd, tokens = compute_charged_amounts(flight, result)
        committed = await self.commit(_make_settling_write(lease, flight, result, usd, tokens))
        if self._waiting:
            self._wake_next_waiter()
        events = committed.events
        overrun = len(events) > 1 and any(isinstance(stored.event, ev.OverrunIncurred) for stored in events)
        return Settlement(usd, tokens, overrun, committed)

    def defer_settlement(self, lease: Lease, flight: InFlight, result: ActualResult) -> Settlement | None:
        """Settle with the session's next write, where the result is certain: both are durable before anything acts.

        That is what succeeded within its hold. None where it must be committed by itself.
        """
        if result.outcome != "ok" or result.happened or (result.body is not None and len(result.body) > BLOB_THRESHOLD):
            return None
        usd, tokens = compute_charged_amounts(flight, result)
        legs, charge = flight.legs, Charge(usd, tokens)
        if usd and not legs:
            return None
        for leg in legs:
            if (usd if leg.unit == "usd" else charge.of(leg.unit)) > leg.amount:
                return None
        self.defer(lease, _make_settling_write(lease, flight, result, usd, tokens, charge if legs else None))
        return Settlement(usd, tokens)

    async def settle_in_doubt(self, lease: Lease, flights: Sequence[InFlight]) -> None:
        """Settle what a crash left unanswered at its maximum: it may have been spent."""
        for flight in flights:
            await self.settle(lease, flight, ActualResult("unknown"))

    def with_cap_notice(self, write: Write, find: FindCaps, tell: Callable[[bool], None]) -> Write:
        """The same write, which tells of itself whether a cap is near: its transaction has the rows anyway."""
        keys, caps = find(self._clock.now())

        def decide(rows: Rows) -> Sequence[Draft]:
            tell(is_near_cap(caps, rows.find(keys)))
            return write.decide(rows)

        return msgspec.structs.replace(write, decide=decide, reads=(*write.reads, *keys))

    async def is_near_budget(self, find: FindCaps) -> bool:
        """Whether the session or a scope above it is near its cap, with what is held counted as spent."""
        keys, caps = find(self._clock.now())
        return is_near_cap(caps, [await read_budget(self._store, *key[1:]) for key in keys])

    async def forecast(self, name: str, purpose: Purpose = "turn", cold_start: int = COLD_START_COST) -> CostForecast:
        since = self._clock.now() - SAMPLE_PERIOD
        params = {"name": name, "purpose": purpose, "since": since, "limit": SAMPLES_KEPT}
        return forecast_cost(
            [row.usd for row in await self._store.ask(Query("newest_costs", _Cost, params))], cold_start
        )

    def _wake_next_waiter(self) -> None:
        """Wake one waiter; it wakes the next one when it succeeds."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.is_set():
                first.set()
                return

    async def wait_until_freed(self, max_wait: int) -> None:
        """Wait until a hold of this process settles, or poll for those of other processes."""
        freed = asyncio.Event()
        self._waiting.append(freed)
        pause = asyncio.ensure_future(self._clock.sleep(max_wait))
        word = asyncio.ensure_future(freed.wait())
        try:
            await asyncio.wait((pause, word), return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.set()
            pause.cancel()
            word.cancel()


class _Cost(msgspec.Struct, frozen=True):
    usd: int
