"""A session while a worker holds its lease: it makes calls, rests while it waits for a person or money, and ends.

What it waits for is in the journal, so another process can resume it in the same place.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial, reduce
from typing import Any, Final, Protocol, TypeGuard, TypeVar

import msgspec

from halter.core import events as ev
from halter.core.clock import SECOND, Clock, window_end
from halter.core.ids import FLEET, inbox_stream
from halter.core.messages import Message, Model, Part, Text, ToolResult
from halter.core.money import BudgetRow
from halter.core.ports import (
    EVERY_STREAM,
    Change,
    Committed,
    Draft,
    Lease,
    Query,
    Rows,
    Store,
    Stored,
    Write,
    matters_always,
    offload_body,
    read_body,
    read_stream,
)
from halter.core.project import rows_of_event
from halter.core.rows import DecisionRow, HaltRow, SavedHotState, SessionRow, StreamRow
from halter.core.text import shorten, to_body
from halter.core.tools import Tool
from halter.core.vocabulary import REFUSAL_OUTCOMES, Outcome, RowKey, State, TerminalReason, WakeCause
from halter.guard.approvals import ask_question, make_cap_question
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy, RateLimited, run_shielded
from halter.guard.model_door import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest, RequestOutcome
from halter.guard.prepare import Call, SessionContext
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.loop.decide import HAND_OFF
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold, make_unknown_event_error, replay

T = TypeVar("T")


async def run_together(acts: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> Sequence[T]:
    """Run concurrently; if one fails, cancel the others and raise its error."""
    if len(acts) == 1:
        return [await acts[0]()]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(act()) for act in acts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_until_first(acts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run concurrently until the first one is done; cancel the others."""
    tasks = [asyncio.ensure_future(act) for act in acts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended. A cancel of the caller meanwhile is raised, as are their errors."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


def raise_if_cancelled() -> None:
    """Raise if this task was cancelled, even if another error hid it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@asynccontextmanager
async def watch_changes(
    store: Store, matters: Callable[[Change], bool] = matters_always, news: asyncio.Event | None = None
) -> AsyncGenerator[asyncio.Event]:
    """Set an event whenever a relevant change is written, by any process, from the start of the block on."""
    news, listens = news or asyncio.Event(), asyncio.Event()

    async def listen() -> None:
        # No other task runs between this and the moment at which the store knows of it.
        listens.set()
        async for _ in store.changes(matters):
            news.set()

    listening = asyncio.create_task(listen(), name="halter-rest")
    try:
        await listens.wait()
        yield news
    finally:
        await cancel_and_wait(listening)


async def wait_for_either(one: asyncio.Event, other: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def wait_for_news(news: asyncio.Event, max_wait: int) -> None:
    """Wait for news or a timeout in microseconds, then clear the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max_wait / SECOND):
            await news.wait()
    news.clear()


REST_POLL_INTERVAL: Final = 30 * SECOND
"""Polling interval while resting. Change hints arrive at once, but may be lost."""

Attempt = Answer | ApprovalRequired | BudgetBusy
"""What comes of one attempt to make a call."""

CheckWaiting = Callable[[], Awaitable[bool]]

WaitListener = Callable[[ApprovalRequired, State], None]
"""Called once for each decision that a session rests for."""


def _ignore_wait(_: ApprovalRequired, __: State) -> None: ...


class StepLog(Protocol):
    """What is noted of a step as its calls are made: predictions by call id, which the model sees with the results."""

    predictions: Mapping[str, str]

    def add_wait(self, duration: int) -> None:
        """Note the length of a rest, which does not count as work."""


class _NullStepLog:
    """The notes of a session that takes no turns."""

    __slots__ = ("predictions",)

    def __init__(self) -> None:
        self.predictions: Mapping[str, str] = {}

    def add_wait(self, duration: int) -> None: ...


CapListener = Callable[[ev.CostCapReached, int], None]
"""Called with the cap of a window that a session has come to, and with the end of that window."""


def ignore(*_: object) -> None: ...


def _ignore_trouble() -> None: ...


SHORT_REST: Final = SECOND // 4
_PAID: Final = (AnsweredRequest, FailedRequest)

_UNREAD: Final = Session()
_NOT_READ: Final = ev.SessionStarted(session="", agent="", kind="task", started_by="")

LONGEST_LAST_WORDS: Final = 20_000
"""Longest last words passed to a parent."""

MOST_PARALLEL_CALLS: Final = 10
"""How many calls of one step run concurrently."""


class SessionRuntime:
    """One session, from the moment its lease is taken until it rests or ends.

    Reads and writes its stream and inbox, makes its calls and requests, and waits for their conditions. Everything it
    writes is redacted.
    """

    __slots__ = (
        "_attempts",
        "_cap",
        "_clock",
        "_doubts",
        "_guard",
        "_head",
        "_inbox_seen",
        "_is_near",
        "_looking_back",
        "_may_have_questions",
        "_notified",
        "_on_wait",
        "_pause_number",
        "_store",
        "_tools",
        "began",
        "context",
        "ending",
        "inbox_head",
        "lease",
        "on_cap",
        "on_trouble",
        "overrun",
        "parked_at_seq",
        "past",
        "redact",
        "spent_tokens",
        "spent_usd",
        "state",
        "step_log",
    )

    def __init__(
        self,
        store: Store,
        clock: Clock,
        guard: GuardRuntime,
        lease: Lease,
        context: SessionContext,
        tools: Mapping[str, Tool],
        waits: WaitListener = _ignore_wait,
    ) -> None:
        self.lease = lease
        self.context = context
        self.state: State = _UNREAD.state
        self.began = _NOT_READ
        self._store = store
        self._clock = clock
        self._guard = guard
        self.redact = guard.redact
        self._tools = tools
        self._on_wait = waits
        self._notified: tuple[str, ...] = ()
        self._may_have_questions = True
        """Whether a question of the session may be open: not where all that it did was done here without one."""
        self._inbox_seen = 0
        self.inbox_head: int | None = None
        """How far the inbox goes, where that was just read with the session's row."""
        self.parked_at_seq = 0
        """How far the inbox had been read when the session last rested between two turns."""
        self._pause_number = 0
        self.on_trouble: Callable[[], None] = _ignore_trouble
        """Called when no model answers the session, and when one does again."""
        self.on_cap: CapListener = ignore
        """Called before the session sleeps until the window of a cap is over."""
        self._attempts: Mapping[str, int] = _UNREAD.attempts
        self.step_log: StepLog = _NullStepLog()
        self.spent_usd = self.spent_tokens = 0
        self.overrun = False
        """Whether something besides the turns passed a cap."""
        self._cap: tuple[int | None] | None = None
        self._is_near: bool | None = None
        self._head = 0
        self.ending: Callable[[], Awaitable[None]] = _do_nothing
        """Called before the session ends: its other workers must stop, and settle what they hold."""
        self._doubts: tuple[InFlight, ...] | None = None
        self._looking_back: asyncio.Event | None = None
        self.past: Sequence[Stored] = ()
        """All events of the session, where they were just read under its lease."""

    async def load_history(self) -> list[Stored]:
        events = list(self.past) or await self.events()
        self._recall(events)
        return events

    def _recall(self, events: Sequence[Stored]) -> Session:
        """Fold all events of the session; what they say of its state is kept, not all that they fold into."""
        found, self.past = replay(events), ()
        self.state, self._attempts, self._inbox_seen = found.state, found.attempts, found.inbox_seen
        self._apply_history(events, tuple(found.in_flight.values()))
        self.parked_at_seq = self._inbox_seen
        return found

    def _apply_history(self, events: Sequence[Stored], doubts: tuple[InFlight, ...]) -> None:
        if events and isinstance(began := events[0].event, ev.SessionStarted):
            self.began = began
            # A later runtime of this session in this process must not reuse the names of its rests.
            self._pause_number = max(self._pause_number, events[-1].seq)
        if self._doubts is None:
            self._doubts = doubts
            if self._looking_back is not None:
                self._looking_back.set()

    async def wait_until_recovered(self) -> None:
        """Wait until it is known what an earlier owner left in doubt: what is in flight after that is under way."""
        if self._doubts is None:
            self._looking_back = self._looking_back or asyncio.Event()
            await self._looking_back.wait()

    async def resume(self, row: SessionRow | None = None, begun: Sequence[Stored] = ()) -> Sequence[Stored]:
        """Load all events, and settle what a crash left in doubt.

        `row` is the session's, if it was just read under its lease. `begun` are all of its events, if it only began.
        """
        if begun:
            self._may_have_questions, self.inbox_head = False, 0
            self._apply_history(begun, ())
            return begun
        events = list(self.past) or await self.events()
        past = self._recall(events)
        doubts, self.spent_usd, self.spent_tokens = self._doubts or (), past.spent.usd, past.spent.tokens
        since: Sequence[Stored] = ()
        if self.lease.generation > 1:
            since = await self._mark_running(row=row)
        # What is inside another call is cleared before it, so that the outer one, done again, finds how it went.
        for flight in sorted(doubts, key=lambda doubt: -doubt.id.count("/")):
            await self._settle_doubt(flight, await self._arguments(events, flight.id))
        if doubts:
            since = await self.events(past.head)
        events += since
        past = reduce(fold, since, past)
        self.spent_usd, self.spent_tokens = past.spent.usd, past.spent.tokens
        self.overrun = has_overrun(events)
        return events

    async def _settle_doubt(self, flight: InFlight, arguments: bytes) -> None:
        """Settle one call in doubt; what stays unknown is charged at its maximum."""
        answer = await self._guard.recover(self.lease, self.context, flight, arguments, self._tools)
        if not isinstance(answer, ApprovalRequired):
            return
        row = await self._wait_for_one_decision(answer, "WAITING_FOR_APPROVAL")
        if row.verdict:
            happened = row.verdict == "approve"
            await self._guard.was_done(self.lease, flight, happened=happened)
        else:
            await self._guard.ledger.settle_in_doubt(self.lease, [flight])

    def try_call(self, call: Call, context: SessionContext | None = None) -> Coroutine[Any, Any, Attempt]:
        """Make a call once; what comes of it must be taken in with `attempted`."""
        return self._guard.call(self.lease, context or self.context, call, self._tools, self._count_attempts(call))

    async def attempt(self, call: Call, context: SessionContext | None = None) -> Attempt:
        return self.record_attempt(call, await self.try_call(call, context))

    def _count_attempts(self, call: Call) -> int:
        """How often a call was tried; one that was staged, also in another process, was tried once."""
        return self._attempts.get(call.id) or (1 if call.stage == "over" else 0)

    def record_attempt(self, call: Call, answer: Attempt) -> Attempt:
        """Count a refused attempt, and keep its prediction until the call has an outcome."""
        if not isinstance(answer, Answer) or answer.outcome in REFUSAL_OUTCOMES:
            if isinstance(answer, BudgetBusy):
                return answer
            self._may_have_questions = self._may_have_questions or isinstance(answer, ApprovalRequired)
            self._attempts = {**self._attempts, call.id: self._count_attempts(call) + 1}
        if answer.simulation:
            self.step_log.predictions = {**self.step_log.predictions, answer.call: answer.simulation}
        elif text := self.step_log.predictions.get(answer.call, ""):
            return msgspec.structs.replace(answer, simulation=text)
        return answer

    async def call(self, call: Call, context: SessionContext | None = None) -> Answer:
        """Make a call, and wait for a person, money or a window if needed.

        `standing` may be narrower than the session's own.
        """
        tried = self.record_attempt(call, await self.try_call(call, context))
        return self.accept_answer(tried) or (await self.answers([call], [tried], context))[0]

    def accept_answer(self, tried: Attempt) -> Answer | None:
        """Count what one call cost; None where that is not all there is to do: see `answers`."""
        if (
            not isinstance(tried, Answer)
            or tried.cap is not None
            or self.lease.session in self._guard.unattributed_cost
        ):
            return None
        self.spent_usd += tried.cost_micros
        return tried

    async def calls(self, calls: Sequence[Call], context: SessionContext | None = None) -> Sequence[Answer]:
        """Make calls concurrently up to a limit; one that waits does not block the others."""
        return await self.answers(calls, await self._try_calls(calls, context), context)

    async def answers(
        self, calls: Sequence[Call], tried: Sequence[Attempt], context: SessionContext | None = None
    ) -> Sequence[Answer]:
        """Count what calls cost, wait for what they lacked, and try those again, until all are answered."""
        answers: dict[str, Answer] = {}
        waiting, overrun = calls, False
        while waiting:
            if (beside := self._guard.unattributed_cost.pop(self.lease.session, None)) is not None:
                self.spent_usd += beside.usd
                self.spent_tokens += beside.tokens
                overrun = overrun or beside.overrun
            for each in tried:
                if isinstance(each, Answer):
                    answers[each.call] = each
                    self.spent_usd += each.cost_micros
            waiting = await self._wait_for_refused(list(zip(waiting, tried, strict=True)))
            tried = await self._try_calls(waiting, context) if waiting else ()
        found = [answers[call.id] for call in calls]
        return [msgspec.structs.replace(answer, overrun=True) for answer in found] if overrun else found

    async def _try_calls(self, calls: Sequence[Call], context: SessionContext | None) -> Sequence[Attempt]:
        slots, began = asyncio.Semaphore(MOST_PARALLEL_CALLS), self._clock.now()
        if any(call.brake is not None and call.brake.keeps_order(call.tool) for call in calls):
            # Each act counts when the next one is judged.
            return [await self._attempt_in(slots, call, began, context) for call in calls]
        return await run_together([partial(self._attempt_in, slots, call, began, context) for call in calls])

    async def _attempt_in(
        self, slots: asyncio.Semaphore, call: Call, began: int, context: SessionContext | None
    ) -> Attempt:
        """Try a call when a slot is free; the wait for it counts against the call's time."""
        async with slots:
            if call.at_most is not None:
                remaining = max(1, call.at_most - (self._clock.now() - began))
                call = msgspec.structs.replace(call, at_most=remaining)
            return await self.attempt(call, context)

    async def _wait_for_refused(self, tried: Sequence[tuple[Call, Attempt]]) -> list[Call]:
        """Rest until one of the refused calls may pass; return those to be tried again."""
        again = [call for call, answer in tried if not isinstance(answer, Answer)]
        asked = [answer for _, answer in tried if isinstance(answer, ApprovalRequired)]
        capped = [(call, answer.cap) for call, answer in tried if isinstance(answer, Answer) and answer.cap is not None]
        if capped and await self._wait_for_budget(capped[0][0].id, capped[0][0].tool, capped[0][1]):
            return [*again, *(call for call, _ in capped)]
        if any(isinstance(answer, BudgetBusy) for _, answer in tried):
            for each in asked:
                self._notify_waiting(each, "WAITING_FOR_APPROVAL")
            await self._park_and_wait("WAITING_FOR_BUDGET", self._clock.now() + SHORT_REST)
        elif asked:
            await self.wait_for_decision(asked)
        return again

    async def request(
        self,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        *,
        last: bool = False,
        patient: bool = True,
        context: SessionContext | None = None,
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Make a request, and wait for money: others' holds, and if `patient` the next window or a raised cap.

        It also waits for the model's rate, for as long as needed. With `last`, the request may use the reserve.
        `standing` may be narrower than the session's own.
        """
        answer = self.charge(request, await self.request_once(request, model, attempt, last=last, context=context))
        if isinstance(answer, AnsweredRequest):
            return answer
        return await self.request_until_admitted(
            request, model, answer, attempt, last=last, patient=patient, context=context
        )

    def request_once(
        self,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        waited: int = 0,
        *,
        last: bool = False,
        context: SessionContext | None = None,
    ) -> Coroutine[Any, Any, RequestOutcome]:
        """Make a request once; what comes of it must be taken in with `take`."""
        context = context or self.context
        if last:
            context = msgspec.structs.replace(context, kept_usd=0, kept_tokens=0)
        return self._guard.request(self.lease, context, request, model, attempt, waited)

    def charge(self, request: ModelRequest, answer: RequestOutcome) -> RequestOutcome:
        """Count what an answer cost."""
        if isinstance(answer, _PAID):
            if not answer.repeated:
                self.spent_usd += answer.cost_usd
                self.spent_tokens += answer.tokens
            if isinstance(answer, AnsweredRequest) and answer.overrun and request.purpose != "turn":
                self.overrun = True
        return answer

    async def request_until_admitted(
        self,
        request: ModelRequest,
        model: Model,
        answer: RequestOutcome,
        attempt: int = 0,
        *,
        last: bool = False,
        patient: bool = True,
        context: SessionContext | None = None,
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Wait for what an attempt lacked, and try again, until the request is answered, or refused for good."""
        waited = 0
        while True:
            match answer:
                case RateLimited(until=until):
                    waited = answer.waited + 1
                    await self._park_and_wait("SLEEPING", max(until, self._clock.now() + SHORT_REST))
                case BudgetBusy() if request.optional:
                    return FailedRequest(answer.id, "cost_cap_reached", "The money for it is held by others.")
                case BudgetBusy():
                    await self._park_and_wait("WAITING_FOR_BUDGET", self._clock.now() + SHORT_REST)
                case RefusedRequest(cap=ev.CostCapReached() as cap) if patient and await self._wait_for_budget(
                    request.id, str(model.name), cap
                ):
                    attempt, waited = attempt + 1, 0
                case AnsweredRequest() | FailedRequest() | RefusedRequest():
                    return answer
            answer = self.charge(
                request, await self.request_once(request, model, attempt, waited, last=last, context=context)
            )

    async def flush_deferred(self) -> None:
        """Commit deferred writes, even if the caller is cancelled."""
        if self._guard.ledger.has_deferred(self.lease):
            await run_shielded(self._guard.ledger.flush_deferred(self.lease))

    async def release(self) -> None:
        """Give the session back, even if the caller is cancelled."""
        await run_shielded(self._store.release(self.lease))

    async def refuse(self, calls: Sequence[Call], outcome: Outcome, sentence: str) -> Sequence[Answer]:
        return await self._guard.refuse(self.lease, calls, outcome, sentence)

    async def call_read_only(self, call: Call) -> Attempt:
        """Make a sensor's call; a pure read leaves no trace."""
        answer = await self._guard.call_read_only(self.lease, self.context, call, self._tools)
        if isinstance(answer, Answer):
            self.spent_usd += answer.cost_micros
            self.overrun = self.overrun or answer.overrun
        else:
            self._may_have_questions = True
        return answer

    def has_effect(self, tool: str) -> bool:
        known = self._tools.get(tool)
        return known is not None and known.spec.effect == "write"

    async def end(
        self, state: State, reason: TerminalReason, inbox_seen: int | None = None, messages: Sequence[Message] = ()
    ) -> bool:
        """End the session; not with a hold in doubt, or with unseen messages if `inbox_seen` is given.

        A parent is told the last words of its `messages`.
        """
        if self.ending is not _do_nothing:
            # What works for it may take its time to stop, and what is done must not wait for that.
            await self.flush_deferred()
            await self.ending()
        parent = self.began.parent
        words = to_body(shorten(find_final_text(messages), LONGEST_LAST_WORDS)) if parent else None
        asked = await self._questions() if self._may_have_questions else ()
        # A model that asked another agent waits for its answer as for that of any tool: nothing has to wake it.
        wakes = self.began.origin != "agent"
        write = lifecycle.end_session(self.lease, state, reason, parent, inbox_seen, words, asked, wakes_parent=wakes)
        ledger = self._guard.ledger
        write = ledger.with_cap_notice(write, self.context.find_caps, partial(setattr, self, "_is_near"))
        committed = await ledger.commit(write)
        self._head = max((each.seq for each in committed.events if each.stream == write.stream), default=0)
        return bool(committed.events)

    async def _questions(self) -> Sequence[str]:
        return await lifecycle.read_questions(self._store, self.lease.session, self._clock.now())

    async def withdraw_questions(self, why: str) -> None:
        """Withdraw what the session asked, because it goes on without an answer."""
        if asked := await self._questions():
            await self.commit(lifecycle.withdraw_questions(self.lease, asked, why))

    async def find_end(self, answer: Answer) -> tuple[State, TerminalReason] | None:
        # What a halt could not stop is unknown, and its session was halted all the same.
        halt = await self._guard.find_halt(self.context) if answer.outcome in ("external_halt", "unknown") else None
        if halt is not None or answer.outcome == "external_halt":
            return ("CANCELLED", "cancelled") if halt is not None and halt.cancels else ("HALTED", "external_halt")
        if answer.outcome == "cost_cap_reached":
            return ("BUDGET_EXCEEDED", "cost_cap_reached")
        if answer.overrun:
            return ("BUDGET_EXCEEDED", "overrun")
        return None

    async def _wait_for_budget(self, refused: str, name: str, cap: ev.CostCapReached) -> bool:
        """Wait for a window to roll or a person to raise the cap; return whether there may be money now."""
        end = window_end(cap.window)
        if end is not None and cap.amount <= cap.cap:
            if cap.unit == "tokens":
                sentence = (
                    f"It may use {cap.cap:,} tokens in an hour, and they are used up; it goes on when the hour is over."
                )
                event = ev.GuardrailTriggered(guardrail="token_budget_per_hour", sentence=sentence, until=end)
                await self.write(f"{refused}/{cap.window}/used_up", event)
            self.on_cap(cap, end)
            await self._park_and_wait("SLEEPING", end, lambda: self._is_raised(cap))
            return True
        if self.context.policy.on_cap != "ask":
            return False
        # Asked once for each cap that a call or a request meets.
        self._may_have_questions = True
        question = make_cap_question(refused, name, cap, self.context.policy.approval_expiry)
        await self.commit(ask_question(question, self.lease))
        approval = ApprovalRequired(refused, question.decision)
        row = await self._wait_for_one_decision(approval, "WAITING_FOR_BUDGET", lambda: self._is_raised(cap))
        await self._read_cap()
        return row.verdict == "approve" or await self._is_raised(cap)

    async def _read_cap(self) -> None:
        params = {"scope": self.lease.stream, "window": "", "unit": "usd"}
        rows = await self._store.ask(Query("budget", BudgetRow, params))
        self._set_cap(rows[0] if rows else None)

    def _set_cap(self, row: BudgetRow | None) -> None:
        """Only what a person has set counts: else the cap is that of the policy."""
        self._cap = (row.cap,) if row is not None and row.cap_by else None

    async def is_near_budget(self) -> bool:
        """Whether a cap is near: of a session that is over, as its end found it."""
        return await self._guard.is_near_budget(self.context) if self._is_near is None else self._is_near

    def remaining_budget(self) -> tuple[int | None, int | None]:
        caps = self.context.caps
        cap, budget = caps.session.max_cost_usd, caps.token_budget
        if self._cap is not None:
            cap = None if self._cap[0] is None else self._cap[0] - self.context.kept_usd
        return (None if cap is None else cap - self.spent_usd, None if budget is None else budget - self.spent_tokens)

    async def _is_raised(self, cap: ev.CostCapReached) -> bool:
        params = {"scope": cap.scope, "window": cap.window, "unit": cap.unit}
        rows = await self._store.ask(Query("budget", BudgetRow, params))
        return any(row.cap_by and (row.cap is None or row.cap > cap.cap) for row in rows)

    async def resume_parked(self, row: SessionRow | None = None) -> None:
        """Resume a session that rested in this process; `row` as in `take_up`."""
        self._pause_number += 1
        self.parked_at_seq = self._inbox_seen
        await self._mark_running(row=row)

    async def ensure_running(self) -> None:
        """Resume a session that was interrupted while it rested for a person or for money."""
        if (await self._row()).state != "RUNNING":
            self._pause_number += 1
            await self._mark_running("message")

    async def _find_wake_cause(self, inbox_head: int) -> WakeCause | None:
        """Why the session resumes: a message, its timer, or takeover."""
        if self.state == "RUNNING":
            return None
        for stored in await self.inbox(self._inbox_seen) if inbox_head > self._inbox_seen else ():
            match stored.event:
                case ev.WakePosted(wakes=True, cause=cause):
                    return cause
                case ev.DecisionMade():
                    return "decision"
                case _:
                    pass
        return "timer"

    async def park(  # noqa: PLR0913 Each is one thing that a rest may say.
        self,
        state: State,
        inbox_seen: int,
        wake_at: int | None = None,
        wake_on: tuple[str, ...] = (),
        *,
        resident: bool = False,
        trouble: str = "",
        sentence: str = "",
        unless_news: bool = False,
    ) -> bool:
        """Park the session; not where a waking message has arrived that is not seen, or `unless_news`, anything.

        A resident session keeps its lease; any other is released. A `trouble` is told to people.
        """
        self._pause_number += 1
        parked = ev.SessionParked(
            state=state,
            inbox_seen=inbox_seen,
            wake_at=wake_at,
            wake_on=wake_on,
            resident=resident,
            trouble=trouble,
            sentence=self.redact(sentence),
        )
        key = f"{self.lease.session}/{self.lease.generation}/rest/{self._pause_number}"
        park = lifecycle.park_session(self.lease, key, parked, unless_news=unless_news)
        rests = bool((await self.commit(park)).events)
        if rests:
            self._inbox_seen = inbox_seen
            self.state = state
            if trouble:
                self.on_trouble()
        return rests

    async def wait_for_provider(self, trouble: str, sentence: str, sleep: int) -> None:
        """Rest in the middle of a call, because of a trouble that people are told of."""
        await self._park_and_wait("SLEEPING", self._clock.now() + sleep, trouble=trouble, sentence=sentence)

    async def _park_and_wait(
        self, state: State, wake_at: int, or_when: CheckWaiting | None = None, *, trouble: str = "", sentence: str = ""
    ) -> None:
        """Rest until a message, the wake time, a halt or another condition."""
        self._pause_number += 1
        began = self._clock.now()
        text = self.redact(sentence)
        parked = ev.SessionParked(
            state=state, inbox_seen=self._inbox_seen, wake_at=wake_at, resident=True, trouble=trouble, sentence=text
        )
        key = f"{self.lease.session}/{self.lease.generation}/rest/{self._pause_number}"
        committed = await self.commit(lifecycle.park_session(self.lease, key, parked))
        if trouble:
            self.on_trouble()
        due = bool(committed.events) and await self.wait_for_wake(wake_at, or_when)
        await self._mark_running("timer" if due else "decision")
        self.parked_at_seq = self._inbox_seen
        self.step_log.add_wait(self._clock.now() - began)

    async def wait_for_wake(self, wake_at: int | None, or_when: CheckWaiting | None = None) -> bool:
        """Wait while the session rests; return whether its time has come.

        Also returns for an inbox message, a halt, or `or_when`.
        """
        # Messages and decisions are in the inbox; halts and caps in the stream of the fleet.
        streams = (inbox_stream(self.lease.session), FLEET, EVERY_STREAM)
        async with watch_changes(self._store, lambda change: change.stream in streams) as news:
            while wake_at is None or self._clock.now() < wake_at:
                if (await self._row()).inbox_wake > self._inbox_seen or (or_when and await or_when()):
                    return False
                if await self._guard.find_halt(self.context) is not None:
                    return False
                await wait_for_news(
                    news,
                    REST_POLL_INTERVAL if wake_at is None else min(REST_POLL_INTERVAL, wake_at - self._clock.now()),
                )
        return True

    async def _mark_running(self, cause: WakeCause | None = None, *, row: SessionRow | None = None) -> Sequence[Stored]:
        """Record that the session resumes, with its inbox read up to now; return the events of that.

        The cap that it has now is read by the same write.
        """
        inbox_head = (row or await self._row()).inbox_head
        cause, self._inbox_seen = cause or await self._find_wake_cause(inbox_head), inbox_head
        self.inbox_head = inbox_head
        key = f"{self.lease.session}/{self.lease.generation}/woken/{self._pause_number}"
        wakes = lifecycle.wake_session(self.lease, key, cause, self._inbox_seen)
        budget = self.lease.stream, "", "usd"

        def decide(rows: Rows) -> Sequence[Draft]:
            self._set_cap(rows.get(BudgetRow, *budget))
            return wakes.decide(rows)

        reads = (*wakes.reads, (BudgetRow, *budget))
        committed = await self.commit(msgspec.structs.replace(wakes, decide=decide, reads=reads))
        if committed.repeated:
            await self._read_cap()
        self.state = "RUNNING"
        return committed.events

    async def record_recovery(self) -> None:
        """Record that a model answers again."""
        self._pause_number += 1
        key = f"{self.lease.session}/{self.lease.generation}/recovered/{self._pause_number}"
        await self.commit(lifecycle.wake_session(self.lease, key, "timer", self._inbox_seen, recovered=True))
        self.on_trouble()

    async def wait_for_decision(self, approvals: Sequence[ApprovalRequired]) -> None:
        """Rest until one of several questions is answered or expires."""
        first, *others = approvals

        async def is_another_due() -> bool:
            rows = [await self._guard.decision(each.decision) for each in others]
            return any(row is not None and (row.verdict or self._clock.now() >= row.expires_at) for row in rows)

        for each in approvals:
            self._notify_waiting(each, "WAITING_FOR_APPROVAL")
        await self._wait_for_one_decision(first, "WAITING_FOR_APPROVAL", is_another_due if others else None)

    async def _wait_for_one_decision(
        self, approval: ApprovalRequired, state: State, or_when: CheckWaiting | None = None
    ) -> DecisionRow:
        """Rest until a person decides, the question expires, or a halt comes first."""
        while True:
            row = await self._guard.decision(approval.decision)
            if row is None:
                raise LookupError(f"The decision {approval.decision} is gone from the store.")
            if row.verdict or self._clock.now() >= row.expires_at or (or_when and await or_when()):
                return row
            if await self._guard.find_halt(self.context) is not None:
                return row
            self._notify_waiting(approval, state)
            await self._park_and_wait(state, row.expires_at, or_when)

    def _notify_waiting(self, approval: ApprovalRequired, state: State) -> None:
        if approval.decision not in self._notified:
            self._notified += (approval.decision,)
            self._on_wait(approval, state)

    def find_halt(self) -> Coroutine[Any, Any, HaltRow | None]:
        return self._guard.find_halt(self.context)

    async def pause(self, duration: int) -> None:
        """Sleep; return early on halt."""
        await self._guard.pause(self.context, duration)

    async def events(self, after: int = 0) -> list[Stored]:
        return await read_stream(self._store, self.lease.stream, after)

    async def read_later(self) -> Callable[[], Sequence[Stored]]:
        """All events up to now, read when they are asked for: of a session that is over, up to its end."""
        stream = self.lease.stream
        head = self._head or (await self._store.ask(Query("head", StreamRow, {"stream": stream})))[0].head
        return await self._store.read_later(stream, head)

    async def commit(self, write: Write) -> Committed:
        """Commit a write of the session, and just before it its deferred writes."""
        return await self._guard.ledger.commit(write)

    def defer(self, write: Write) -> None:
        """Commit a write with what follows."""
        self._guard.ledger.defer(self.lease, write)

    async def write(self, key: str, event: ev.AnyEvent, body: bytes | None = None) -> None:
        await self.write_all(key, [(event, body)])

    async def write_all(
        self, key: str, happened: Sequence[tuple[ev.AnyEvent, bytes | None]], *, goes_on: bool = False
    ) -> None:
        """Record several events at once; where the session `goes_on`, with what follows."""
        drafts: list[Draft] = []
        rows: list[RowKey] = []
        for event, body in happened:
            drafts.append(Draft(event, *await offload_body(self._store, body)))
            rows += rows_of_event(event)
        write = Write(self.lease.stream, key, lambda _: drafts, rows, self.lease)
        if goes_on:
            self._guard.ledger.defer(self.lease, write)
        else:
            await self.commit(write)

    async def post(self, key: str, event: ev.WakePosted, text: str) -> bool:
        """Post to the session's own inbox; return whether that wakes it."""
        body, blob = await offload_body(self._store, to_body(self.redact(text)))
        committed = await self._store.commit(
            lifecycle.post_wake(self.lease.session, key, event, body, blob, self.lease)
        )
        return any(isinstance(stored.event, ev.WakePosted) and stored.event.wakes for stored in committed.events)

    async def save_snapshot(self, snapshot: bytes) -> None:
        """Keep the hot state for the next owner, and for dashboards elsewhere."""
        await self._store.beat(self.lease.worker, {self.lease.session: snapshot})

    async def load_snapshot(self) -> bytes:
        rows = await self._store.ask(Query("snapshot", SavedHotState, {"session": self.lease.session}))
        return rows[0].data if rows else b""

    async def inbox(self, after: int) -> Sequence[Stored]:
        """Read the inbox after a place.

        Events of a newer program are not skipped: they would count as read although no one saw them.
        """
        events = await read_stream(self._store, inbox_stream(self.lease.session), after)
        for stored in events:
            if isinstance(stored.event, ev.Unknown):
                raise make_unknown_event_error(stored)
        return events

    async def read_body(self, stored: Stored) -> bytes:
        return await read_body(self._store, stored)

    async def _row(self) -> SessionRow:
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": self.lease.session}))
        return row

    async def _arguments(self, events: Sequence[Stored], call: str) -> bytes:
        for stored in events:
            if isinstance(stored.event, ev.CallStarted) and stored.event.call == call:
                return await read_body(self._store, stored)
        return b""


def has_overrun(events: Sequence[Stored]) -> bool:
    """Whether a cap was passed since a person last let the session continue."""
    said = (each.event for each in reversed(events) if isinstance(each.event, ev.OverrunIncurred | ev.SessionResumed))
    return isinstance(next(said, None), ev.OverrunIncurred)


async def _do_nothing() -> None: ...


def find_final_text(messages: Sequence[Message]) -> str:
    """The model's last text; one that was cut off and continued is one answer.

    What an agent said to whom the conversation was handed over is the last text.
    """
    if messages and (handed := [part.text for part in messages[-1].parts if _is_handed_over_result(part)]):
        return handed[-1]
    texts: list[str] = []
    for message in reversed(messages):
        if message.role == "assistant":
            texts.append("".join([part.text for part in message.parts if isinstance(part, Text)]))
        elif not _continues_turn(message) if texts else _is_unanswered(message):
            break
    return "".join(reversed(texts))


def _is_handed_over_result(part: Part) -> TypeGuard[ToolResult]:
    return isinstance(part, ToolResult) and part.outcome == "ok" and part.tool.startswith(HAND_OFF)


def _is_unanswered(message: Message) -> bool:
    return any(isinstance(part, Text) and not part.reason for part in message.parts)


def _continues_turn(message: Message) -> bool:
    return all(isinstance(part, Text) and part.reason == "max_tokens_recovery" for part in message.parts)
