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
    flight: InFlight, truth: ActualResult, usd: int, tokens: int, known: Charge | None, rows: Rows
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
            outcome=truth.outcome,
            charge=charge,
            duration_ms=truth.duration_ms,
            error=truth.error,
            audited=truth.audited,
            unheld=unheld,
        )
    else:
        event = ev.RequestSettled(
            request=flight.id,
            outcome=truth.outcome,
            usage=truth.usage,
            charge=charge,
            unheld=unheld,
            error=truth.error,
            may_retry=truth.may_retry,
            retry_after=truth.retry_after,
            needs_person=truth.needs_person,
        )
    drafts = [Draft(event, truth.body, truth.blob)]
    if charge is not None and charge.overruns:
        drafts += map(Draft, map(partial(ev.OverrunIncurred.by, flight.id), charge.overruns))
    if truth.happened:
        drafts += _draft_effects(truth, rows)
    return drafts


def _list_effect_rows(happened: Sequence[JournalEffect]) -> Iterator[RowKey]:
    """The rows that the effects change, and those that suppress them."""
    for each in happened:
        yield from rows_of_event(each.event)
        if isinstance(each.event, ev.DecisionAsked):
            yield (DecisionRow, each.event.decision)
        if each.unless is not None:
            yield each.unless


def _draft_effects(truth: ActualResult, rows: Rows) -> Iterator[Draft]:
    for each in truth.happened:
        if each.unless is None or rows.get(*each.unless) is None:
            yield Draft(
                cast("ev.AnyEvent", each.event), each.body, stream=StreamId(each.stream) if each.stream else None
            )


def _compute_charge(flight: InFlight, usd: int, tokens: int, rows: Rows) -> Charge | None:
    """The charge; a cost without a hold is checked against the caps as a hold would have been."""
    if flight.legs:
        return settle(flight.legs, usd, tokens, partial(budget_row, rows))
    if flight.accounts:
        return settle(flight.accounts, usd, 0, lambda leg: budget_row(rows, leg).capped(leg.cap, rows.now))
    return None


def compute_charged_amounts(flight: InFlight, truth: ActualResult) -> tuple[int, int]:
    """Dollars and tokens to charge: as reported, or as held where no plausible figure was reported."""
    usd, tokens = truth.usd, truth.tokens
    if usd is None or not 0 <= usd <= LARGEST_AMOUNT:
        usd = flight.held("usd") if flight.legs else 0
    if tokens is None or not 0 <= tokens <= LARGEST_AMOUNT:
        tokens = flight.held("tokens") if flight.legs else 0
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
    lease: Lease, flight: InFlight, truth: ActualResult, usd: int, tokens: int, known: Charge | None = None
) -> Write:
    rows: tuple[RowKey, ...] = ()
    others: tuple[StreamId, ...] = ()
    # What has neither a hold nor a cost has at most its line of the audit.
    if flight.legs or usd:
        rows = ((HoldRow, flight.id), *map(budget_key, flight.legs or flight.accounts))
    if truth.audited:
        rows = (*rows, (AuditRow, flight.id))
    if truth.happened:
        rows = (*rows, *_list_effect_rows(truth.happened))
        others = tuple(dict.fromkeys(StreamId(each.stream) for each in truth.happened if each.stream))
    stream, key = lease.stream, f"{flight.id}/settled/{flight.seq}"
    return Write(stream, key, partial(settle_flight, flight, truth, usd, tokens, known), rows, lease, others)


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
    def __init__(self, store: Store, clock: Clock, patience: int = BUDGET_WAIT) -> None:
        self._store = store
        self._clock = clock
        self.patience = patience
        self._waiting: deque[asyncio.Event] = deque()
        self._put_off: dict[Lease, Write] = {}

    def commit(self, write: Write) -> "CoroutineType[Any, Any, Committed]":
        """Commit a write, and just before it, in the same transaction, what the session deferred."""
        lease = write.lease
        before = None if lease is None else self._put_off.get(lease)
        return (
            self._store.commit(write) if lease is None or before is None else self._commit_after(lease, before, write)
        )

    async def _commit_after(self, lease: Lease, before: Write, write: Write) -> Committed:
        committed = await self._store.commit(msgspec.structs.replace(write, first=before))
        self._carried(lease, before)
        return committed

    async def commit_intent(self, intent: Intent, patience: int, now: int = 0) -> Committed | None:
        """Commit an intent, decided at this moment, which is `now` where it is known already.

        If other holds are in the way, decide again when one settles; None when they stay for longer than `patience`.
        """
        lease = intent.lease
        now = now or self._clock.now()
        deadline = now + patience
        while True:
            before = self._put_off.get(lease)
            committed = await self._store.commit(intent.write(now, before))
            if before is not None:
                self._carried(lease, before)
            if committed.events:
                return committed
            now = self._clock.now()
            if now >= deadline:
                return None
            await self.until_freed(min(deadline - now, LONGEST_BUDGET_POLL))
            now = self._clock.now()

    def _carried(self, lease: Lease, deferred: Write) -> None:
        """Forget what was deferred: the session's newest write has carried it."""
        if self._put_off.get(lease) is deferred:
            del self._put_off[lease]
        if self._waiting:
            self._let_next_try()

    def put_off(self, lease: Lease, write: Write) -> None:
        """Defer a write into the session's next commit."""
        before = self._put_off.setdefault(lease, write)
        if before is not write:
            self._put_off[lease] = msgspec.structs.replace(write, first=before)

    def owes(self, lease: Lease) -> bool:
        return lease in self._put_off

    async def settle_up(self, lease: Lease) -> None:
        """Commit what was deferred: no further write follows to carry it."""
        before = self._put_off.pop(lease, None)
        if before is not None:
            await self._store.commit(before)
            self._let_next_try()

    async def settle(self, lease: Lease, flight: InFlight, truth: ActualResult) -> Settlement:
        """Commit the outcome with its true cost, and wake a waiter for money."""
        if truth.body is not None and len(truth.body) > BLOB_THRESHOLD:
            body, blob = await offload_body(self._store, truth.body)
            truth = msgspec.structs.replace(truth, body=body, blob=blob)
        usd, tokens = compute_charged_amounts(flight, truth)
        committed = await self.commit(_make_settling_write(lease, flight, truth, usd, tokens))
        if self._waiting:
            self._let_next_try()
        events = committed.events
        overrun = len(events) > 1 and any(isinstance(stored.event, ev.OverrunIncurred) for stored in events)
        return Settlement(usd, tokens, overrun, committed)

    def defer_settlement(self, lease: Lease, flight: InFlight, truth: ActualResult) -> Settlement | None:
        """Settle with the session's next write, where the result is certain: both are durable before anything acts.

        That is what succeeded within its hold. None where it must be committed by itself.
        """
        if truth.outcome != "ok" or truth.happened or (truth.body is not None and len(truth.body) > BLOB_THRESHOLD):
            return None
        usd, tokens = compute_charged_amounts(flight, truth)
        legs, charge = flight.legs, Charge(usd, tokens)
        if usd and not legs:
            return None
        for leg in legs:
            if (usd if leg.unit == "usd" else charge.of(leg.unit)) > leg.amount:
                return None
        self.put_off(lease, _make_settling_write(lease, flight, truth, usd, tokens, charge if legs else None))
        return Settlement(usd, tokens)

    async def settle_in_doubt(self, lease: Lease, flights: Sequence[InFlight]) -> None:
        """Settle what a crash left unanswered at its maximum: it may have been spent."""
        for flight in flights:
            await self.settle(lease, flight, ActualResult("unknown"))

    def look_at_caps(self, write: Write, find: FindCaps, tell: Callable[[bool], None]) -> Write:
        """The same write, which tells of itself whether a cap is near: its transaction has the rows anyway."""
        keys, caps = find(self._clock.now())

        def decide(rows: Rows) -> Sequence[Draft]:
            tell(is_near_cap(caps, rows.find(keys)))
            return write.decide(rows)

        return msgspec.structs.replace(write, decide=decide, reads=(*write.reads, *keys))

    async def near_budget(self, find: FindCaps) -> bool:
        """Whether the session or a scope above it is near its cap, with what is held counted as spent."""
        keys, caps = find(self._clock.now())
        return is_near_cap(caps, [await read_budget(self._store, *key[1:]) for key in keys])

    async def forecast(self, name: str, purpose: Purpose = "turn", cold_start: int = COLD_START_COST) -> CostForecast:
        since = self._clock.now() - SAMPLE_PERIOD
        params = {"name": name, "purpose": purpose, "since": since, "limit": SAMPLES_KEPT}
        return forecast_cost(
            [row.usd for row in await self._store.ask(Query("newest_costs", _Cost, params))], cold_start
        )

    def _let_next_try(self) -> None:
        """Wake one waiter; it wakes the next one when it succeeds."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.is_set():
                first.set()
                return

    async def until_freed(self, at_most: int) -> None:
        """Wait until a hold of this process settles, or poll for those of other processes."""
        freed = asyncio.Event()
        self._waiting.append(freed)
        pause = asyncio.ensure_future(self._clock.sleep(at_most))
        word = asyncio.ensure_future(freed.wait())
        try:
            await asyncio.wait((pause, word), return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.set()
            pause.cancel()
            word.cancel()


class _Cost(msgspec.Struct, frozen=True):
    usd: int
