"""The budget check: hold money before an effect, settle after it.

The decisions are pure functions of locked rows. `Ledger` commits them, and waits for a bounded time while other holds
use the budget.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, Final, Protocol, cast

import msgspec

from halter.core.clock import DAY, SECOND, Clock, read_monotonic
from halter.core.events import AnyEvent, CallSettled, CapChanged, DecisionAsked, OverrunIncurred, RequestSettled
from halter.core.events.effects import SubSessionCost, UnheldCost
from halter.core.forecast import COLD_START_COST, MAX_SAMPLES, CostForecast, forecast_cost
from halter.core.ids import FLEET, Digest, StreamId, can_decide, make_sub_session_id, parse_session_id, session_stream
from halter.core.messages import Text
from halter.core.money import MAX_AMOUNT, Account, BudgetRow, Charge, Unit, compute_cap_overrun, settle
from halter.core.ports import BLOB_THRESHOLD, Committed, Draft, Lease, Query, Rows, Store, Write, offload_body
from halter.core.project import rows_of_event
from halter.core.project.holds import PrepareCapCheck, budget_key, budget_row
from halter.core.rows import AuditRow, DecisionRow, HoldRow, SessionRow
from halter.core.tools import JournalEffect
from halter.core.usage import Usage
from halter.core.vocabulary import Outcome, Purpose, RowKey
from halter.state.lifecycle import release_expired
from halter.state.session import InFlight

BUDGET_WAIT: Final = 60 * SECOND
MAX_BUDGET_POLL: Final = SECOND // 2
SAMPLE_PERIOD: Final = 30 * DAY


class ActualResult(msgspec.Struct, frozen=True, gc=False):
    """The outcome of an effect and its cost. If the cost is None, the whole hold is charged."""

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
    files: tuple[Text, ...] = ()


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """The charged amounts, with what a sub-session spent, and the commit. `overrun`: they exceeded a cap.

    A deferred commit is empty.
    """

    usd: int
    tokens: int
    overrun: bool = False
    committed: Committed = Committed(())


def settle_flight(
    flight: InFlight, result: ActualResult, usd: int, tokens: int, precomputed_charge: Charge | None, rows: Rows
) -> Sequence[Draft]:
    """Settle an effect exactly once, at its true cost, with an overrun event for each exceeded cap.

    A `precomputed_charge` is within its hold, and needs no rows.
    """
    legs = flight.legs
    if legs and rows.get(HoldRow, flight.id) is None:
        return []
    charge = (
        _compute_charge(flight, usd, tokens, rows)
        if precomputed_charge is None and (legs or usd)
        else precomputed_charge
    )
    unheld = None if legs or charge is None else UnheldCost(flight.name, flight.purpose, flight.accounts)
    if flight.is_call:
        event: AnyEvent = CallSettled(
            call=flight.id,
            outcome=result.outcome,
            charge=charge,
            duration_ms=result.duration_ms,
            error=result.error,
            audited=result.audited,
            unheld=unheld,
            sub_session=find_sub_session(flight, rows),
        )
    else:
        event = RequestSettled(
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
        drafts += map(Draft, map(partial(OverrunIncurred.by, flight.id), charge.overruns))
    if result.happened:
        drafts += _draft_effects(result, rows)
    return drafts


def find_sub_session(flight: InFlight, rows: Rows) -> SubSessionCost | None:
    """Return what the sub-session of a call has spent; None if the call started none."""
    if not flight.may_have_sub_session:
        return None
    child = make_sub_session_id(flight.id)
    row = rows.get(SessionRow, child)
    if row is None or not row.started_at:
        return None
    return SubSessionCost(child, budget_row(rows, Account(session_stream(child), "", "usd")).spent)


def _list_sub_session_rows(flight: InFlight) -> tuple[RowKey, ...]:
    child = make_sub_session_id(flight.id)
    return ((SessionRow, child), budget_key(Account(session_stream(child), "", "usd")))


def _list_effect_rows(effects: Sequence[JournalEffect]) -> Iterator[RowKey]:
    """List the rows that effects change, and those whose existence suppresses them."""
    for effect in effects:
        yield from rows_of_event(effect.event)
        if isinstance(effect.event, DecisionAsked):
            yield (DecisionRow, effect.event.decision)
        if effect.unless is not None:
            yield effect.unless


def _draft_effects(result: ActualResult, rows: Rows) -> Iterator[Draft]:
    for effect in result.happened:
        if effect.unless is None or rows.get(*effect.unless) is None:
            yield Draft(
                cast("AnyEvent", effect.event),
                effect.body,
                effect.blob,
                stream=StreamId(effect.stream) if effect.stream else None,
            )


def _compute_charge(flight: InFlight, usd: int, tokens: int, rows: Rows) -> Charge | None:
    """Compute the charge. A cost without a hold is checked against the caps as a hold is."""
    if flight.legs:
        return settle(flight.legs, usd, tokens, partial(budget_row, rows))
    if flight.accounts:
        return settle(flight.accounts, usd, 0, lambda leg: budget_row(rows, leg).with_cap(leg.cap, rows.now))
    return None


def compute_charged_amounts(flight: InFlight, result: ActualResult) -> tuple[int, int]:
    """Compute the dollars and tokens to charge: those reported, or those held if the report is implausible.

    If a part of the report has no known price, at least what was held is charged.
    """
    usd, tokens = result.usd, result.tokens
    has_unpriced = result.usage is not None and bool(result.usage.unpriced)
    if usd is None or has_unpriced or not 0 <= usd <= MAX_AMOUNT:
        usd = max(flight.held_amount("usd") if flight.legs else 0, _plausible(usd) if usd else 0)
    if tokens is None or has_unpriced or not 0 <= tokens <= MAX_AMOUNT:
        tokens = max(flight.held_amount("tokens") if flight.legs else 0, _plausible(tokens) if tokens else 0)
    return usd, tokens


def _plausible(amount: int) -> int:
    return amount if 0 <= amount <= MAX_AMOUNT else 0


def change_cap(account: Account, cap: int | None, by: str, key: str, reason: str = "") -> Write:
    """Set a cap. It may be below the amount already spent; the excess is recorded.

    Nothing is written if an agent sets the cap, or if a sub-session's cap would exceed the amount carved out for it.
    """
    session = parse_session_id(StreamId(account.scope)) or ""

    def decide(rows: Rows) -> Sequence[Draft]:
        if not can_decide(by):
            return []
        carved_hold = rows.get(HoldRow, session) if session else None
        bounds = (
            [leg for leg in carved_hold.decode_legs() if leg.unit == account.unit] if carved_hold is not None else []
        )
        if any(cap is None or cap > leg.amount for leg in bounds):
            return []
        overrun = compute_cap_overrun(budget_row(rows, account), cap)
        event = CapChanged(
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
    lease: Lease,
    flight: InFlight,
    result: ActualResult,
    usd: int,
    tokens: int,
    precomputed_charge: Charge | None = None,
    *,
    may_have_sub_session: bool = False,
) -> Write:
    rows: tuple[RowKey, ...] = ()
    others: tuple[StreamId, ...] = ()
    # An effect with neither a hold nor a cost changes at most its audit row.
    if flight.legs or usd:
        rows = ((HoldRow, flight.id), *map(budget_key, flight.legs or flight.accounts))
    if result.audited:
        rows = (*rows, (AuditRow, flight.id))
    if may_have_sub_session:
        rows = (*rows, *_list_sub_session_rows(flight))
    if result.happened:
        rows = (*rows, *_list_effect_rows(result.happened))
        others = tuple(dict.fromkeys(StreamId(each.stream) for each in result.happened if each.stream))
    stream, key = lease.stream, f"{flight.id}/settled/{flight.seq}"
    return Write(
        stream, key, partial(settle_flight, flight, result, usd, tokens, precomputed_charge), rows, lease, others
    )


class Intent(Protocol):
    """An effect's intent: makes the write that admits or refuses it at a given time."""

    @property
    def lease(self) -> Lease: ...

    def write(self, now: int, deferred: Write | None = None) -> Write: ...


async def read_budget(store: Store, scope: str, window: str = "", unit: Unit = "usd") -> BudgetRow:
    """Return a budget's row; an empty one where nothing was spent."""
    params = {"scope": scope, "window": window, "unit": unit}
    return next(iter(await store.ask(Query("budget", BudgetRow, params))), BudgetRow(scope, window, unit))


class Ledger:
    """Commits the intents and settlements of one process, and adds deferred writes to a session's next commit."""

    def __init__(self, store: Store, clock: Clock, max_wait: int = BUDGET_WAIT) -> None:
        self._store = store
        self._clock = clock
        self.hold_timeout = max_wait
        self._waiting: deque[asyncio.Event] = deque()
        self._deferred: dict[Lease, Write] = {}

    def commit(self, write: Write) -> "CoroutineType[Any, Any, Committed]":
        """Commit a write, preceded in the same transaction by the session's deferred writes."""
        lease = write.lease
        deferred_write = None if lease is None else self._deferred.get(lease)
        return (
            self._store.commit(write)
            if lease is None or deferred_write is None
            else self._commit_after(lease, deferred_write, write)
        )

    async def _commit_after(self, lease: Lease, deferred_write: Write, write: Write) -> Committed:
        committed = await self._store.commit(msgspec.structs.replace(write, first=deferred_write))
        self._forget_deferred(lease, deferred_write)
        return committed

    async def commit_intent(
        self, intent: Intent, max_wait: int, now: int = 0, must_return: Callable[[], bool] = bool
    ) -> Committed | None:
        """Commit an intent; `now` is the current time, if the caller has just read it.

        While other holds use the budget, decides again whenever one settles. Returns None after `max_wait`, or as soon
        as the caller `must_return`.
        """
        lease = intent.lease
        now = now or self._clock.now()
        deadline: int | None = None
        while True:
            deferred_write = self._deferred.get(lease)
            committed = await self._store.commit(intent.write(now, deferred_write))
            if deferred_write is not None:
                self._forget_deferred(lease, deferred_write)
            if committed.events:
                return committed
            deadline = deadline or read_monotonic(self._clock) + max_wait
            remaining = deadline - read_monotonic(self._clock)
            if not await self.release_expired():
                if remaining <= 0 or must_return():
                    return None
                await self.wait_until_freed(min(remaining, MAX_BUDGET_POLL))
            now = self._clock.now()

    async def release_expired(self) -> bool:
        """Release what expired questions hold; return whether there were any."""
        holds = await self._store.ask(Query("expired_holds", HoldRow, {"now": self._clock.now()}))
        return any([(await self._store.commit(release_expired(hold))).events for hold in holds])

    def _forget_deferred(self, lease: Lease, deferred_write: Write) -> None:
        """Forget a deferred write that is committed now."""
        if self._deferred.get(lease) is deferred_write:
            del self._deferred[lease]
        if self._waiting:
            self._wake_next_waiter()

    def defer(self, lease: Lease, write: Write) -> None:
        """Defer a write to the session's next commit."""
        earlier_write = self._deferred.setdefault(lease, write)
        if earlier_write is not write:
            self._deferred[lease] = msgspec.structs.replace(write, first=earlier_write)

    def has_deferred(self, lease: Lease) -> bool:
        return lease in self._deferred

    async def flush_deferred(self, lease: Lease) -> None:
        """Commit the deferred writes now. If that fails, they still precede the session's next commit."""
        deferred_write = self._deferred.get(lease)
        if deferred_write is not None:
            await self._store.commit(deferred_write)
            self._forget_deferred(lease, deferred_write)

    async def settle(self, lease: Lease, flight: InFlight, result: ActualResult) -> Settlement:
        """Commit the outcome with its true cost, and wake a session that waits for money."""
        if result.body is not None and len(result.body) > BLOB_THRESHOLD:
            body, blob = await offload_body(self._store, result.body)
            result = msgspec.structs.replace(result, body=body, blob=blob)
        if result.happened:
            happened = tuple([await self._offload_effect(effect) for effect in result.happened])
            result = msgspec.structs.replace(result, happened=happened)
        usd, tokens = compute_charged_amounts(flight, result)
        may_have_sub_session = flight.may_have_sub_session
        write = _make_settling_write(lease, flight, result, usd, tokens, may_have_sub_session=may_have_sub_session)
        committed = await self.commit(write)
        if self._waiting:
            self._wake_next_waiter()
        events = committed.events
        overrun = len(events) > 1 and any(isinstance(stored.event, OverrunIncurred) for stored in events)
        if may_have_sub_session and events and isinstance(events[0].event, CallSettled):
            usd = events[0].event.cost_micros
        return Settlement(usd, tokens, overrun, committed)

    async def _offload_effect(self, effect: JournalEffect) -> JournalEffect:
        body, blob = await offload_body(self._store, effect.body)
        return effect if blob is None else msgspec.structs.replace(effect, body=body, blob=blob)

    def defer_settlement(self, lease: Lease, flight: InFlight, result: ActualResult) -> Settlement | None:
        """Defer a settlement to the session's next write; return None if it must be committed now.

        Only a success within its hold and without effects on other rows may be deferred. It is durable before the next
        effect starts. None is deferred while another session of this process waits for the money that it frees.
        """
        if self._waiting:
            return None
        if result.outcome != "ok" or result.happened or (result.body is not None and len(result.body) > BLOB_THRESHOLD):
            return None
        if flight.may_have_sub_session:
            return None
        usd, tokens = compute_charged_amounts(flight, result)
        charge: Charge | None = None
        if flight.legs:
            charge = Charge(usd, tokens)
            if any(charge.of(leg.unit) > leg.amount for leg in flight.legs):
                return None
        elif usd:
            return None
        self.defer(lease, _make_settling_write(lease, flight, result, usd, tokens, charge))
        return Settlement(usd, tokens)

    async def settle_in_doubt(self, lease: Lease, flights: Sequence[InFlight]) -> None:
        """Settle effects in doubt at their maximum, which may have been spent."""
        for flight in flights:
            await self.settle(lease, flight, ActualResult("unknown"))

    def with_cap_notice(
        self, write: Write, prepare_cap_check: PrepareCapCheck, on_near_cap: Callable[[bool], None]
    ) -> Write:
        """Extend a write: its transaction also reports to `on_near_cap` whether a cap is near."""
        keys, is_near_cap = prepare_cap_check(self._clock.now())

        def decide(rows: Rows) -> Sequence[Draft]:
            on_near_cap(is_near_cap(rows.find(keys)))
            return write.decide(rows)

        return msgspec.structs.replace(write, decide=decide, reads=(*write.reads, *keys))

    async def is_near_budget(self, prepare_cap_check: PrepareCapCheck) -> bool:
        """Return whether the session or a scope above it is near its cap; holds count as spent."""
        keys, is_near_cap = prepare_cap_check(self._clock.now())
        return is_near_cap([await read_budget(self._store, *key[1:]) for key in keys])

    async def forecast(self, name: str, purpose: Purpose = "turn", cold_start: int = COLD_START_COST) -> CostForecast:
        oldest_at = self._clock.now() - SAMPLE_PERIOD
        params = {"name": name, "purpose": purpose, "since": oldest_at, "limit": MAX_SAMPLES}
        return forecast_cost(
            [row.usd for row in await self._store.ask(Query("newest_costs", _Cost, params))], cold_start
        )

    def _wake_next_waiter(self) -> None:
        """Wake one waiter; it wakes the next one when it succeeds."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.is_set():
                waiter.set()
                return

    async def wait_until_freed(self, max_wait: int) -> None:
        """Wait until a hold of this process settles, at most for `max_wait`: holds of other processes are polled."""
        freed_event = asyncio.Event()
        self._waiting.append(freed_event)
        timer = asyncio.ensure_future(self._clock.sleep(max_wait))
        waiter = asyncio.ensure_future(freed_event.wait())
        try:
            await asyncio.wait((timer, waiter), return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed_event.set()
            timer.cancel()
            waiter.cancel()


class _Cost(msgspec.Struct, frozen=True):
    usd: int
