"""A session while a worker holds its lease: it makes calls, parks to wait for a person or for money, and ends.

The journal records what a session waits for, so another process can resume it at the same point.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial, reduce
from typing import Any, Final, Protocol, TypeGuard, TypeVar

import msgspec

from halter.core.clock import SECOND, Clock, read_monotonic, window_end
from halter.core.events import (
    AnyEvent,
    CallStarted,
    CostCapReached,
    DecisionMade,
    GuardrailTriggered,
    OverrunIncurred,
    SessionParked,
    SessionResumed,
    SessionStarted,
    Unknown,
    WakePosted,
)
from halter.core.ids import FLEET, inbox_stream
from halter.core.messages import Message, Model, Part, Text, ToolResult
from halter.core.money import BudgetRow
from halter.core.ports import (
    ALL_STREAMS,
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
from halter.core.text import encode_body, shorten
from halter.core.tools import Tool
from halter.core.vocabulary import REFUSAL_OUTCOMES, Outcome, RowKey, State, TerminalReason, WakeCause
from halter.guard.approvals import ask_question, make_cap_question
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy, RateLimited, run_shielded
from halter.guard.ledger import BUDGET_WAIT
from halter.guard.prepare import Call, SessionContext
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest, RequestOutcome
from halter.loop.decide import HAND_OFF
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold, make_unknown_event_error, replay

T = TypeVar("T")


async def run_together(functions: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> Sequence[T]:
    """Run functions concurrently. If one fails, cancel the others and raise its error."""
    if len(functions) == 1:
        return [await functions[0]()]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(act()) for act in functions]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_until_first(coroutines: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Run coroutines concurrently until the first one finishes, then cancel the others."""
    tasks = [asyncio.ensure_future(act) for act in coroutines]
    try:
        finished_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in finished_tasks:
        task.result()


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Raises the first error of a task."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if another error has hidden that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@asynccontextmanager
async def watch_changes(
    store: Store, matters: Callable[[Change], bool] = matters_always, change_event: asyncio.Event | None = None
) -> AsyncGenerator[asyncio.Event]:
    """Yield an event that is set whenever a process writes a relevant change, from the start of the block on."""
    change_event, is_listening = change_event or asyncio.Event(), asyncio.Event()

    async def listen() -> None:
        # No other task runs between this line and the store's subscription.
        is_listening.set()
        async for _ in store.changes(matters):
            change_event.set()

    listener_task = asyncio.create_task(listen(), name="halter-rest")
    try:
        await is_listening.wait()
        yield change_event
    finally:
        await cancel_and_wait(listener_task)


async def wait_for_either(first: asyncio.Event, second: asyncio.Event) -> None:
    wait_tasks = [asyncio.create_task(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(wait_tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait_task in wait_tasks:
            wait_task.cancel()


async def wait_for_change(change_event: asyncio.Event, max_wait: int) -> None:
    """Wait for the event or a timeout in microseconds, then clear the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max_wait / SECOND):
            await change_event.wait()
    change_event.clear()


PARK_POLL_INTERVAL: Final = 30 * SECOND
"""Polling interval of a parked session. Change hints arrive immediately, but may be lost."""

Attempt = Answer | ApprovalRequired | BudgetBusy
"""The outcome of one attempt to make a call."""

CheckWaiting = Callable[[], Awaitable[bool]]

WaitListener = Callable[[ApprovalRequired, State], None]
"""Called once for each decision that a session waits for."""


def _ignore_wait(_: ApprovalRequired, __: State) -> None: ...


class StepLog(Protocol):
    """Receives notes about a step while its calls are made.

    `predictions` are by call id; the model sees them with the results.
    """

    predictions: Mapping[str, str]

    def add_wait(self, duration: int) -> None:
        """Add the duration of a wait, which does not count as work."""


class _NullStepLog:
    """The step log of a session that takes no turns."""

    __slots__ = ("predictions",)

    def __init__(self) -> None:
        self.predictions: Mapping[str, str] = {}

    def add_wait(self, duration: int) -> None: ...


CapListener = Callable[[CostCapReached, int], None]
"""Called with the cap that a session has reached, and with the end of its window."""


def ignore(*_: object) -> None: ...


def _ignore_trouble() -> None: ...


MIN_PARK_TIME: Final = SECOND // 4
_PAID: Final = (AnsweredRequest, FailedRequest)

_UNREAD: Final = Session()
_NOT_READ: Final = SessionStarted(session="", agent="", kind="task", started_by="")

MAX_FINAL_TEXT_LENGTH: Final = 20_000
"""Maximum length of the final text for a parent session, in characters."""

MAX_PARALLEL_CALLS: Final = 10
"""Maximum number of concurrent calls of a step."""


class SessionRuntime:
    """Runs one session under its lease, until it parks or ends.

    Reads and writes the session's stream and inbox, makes its calls and requests, and waits for people and money. Texts
    are redacted before they are written.
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
        "reached_cap",
        "redact",
        "sleeps_at_cap",
        "spent_tokens",
        "spent_usd",
        "state",
        "step_log",
        "store",
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
        self.store = store
        self._clock = clock
        self._guard = guard
        self.redact = guard.redact
        self._tools = tools
        self._on_wait = waits
        self._notified: tuple[str, ...] = ()
        self._may_have_questions = True
        """False only if this runtime wrote all events of the session, and none of them asked a question."""
        self._inbox_seen = 0
        self.inbox_head: int | None = None
        """The head of the inbox, if the session's row was just read."""
        self.parked_at_seq = 0
        """The inbox position up to which messages were read when the session last parked between two turns."""
        self._pause_number = 0
        self.on_trouble: Callable[[], None] = _ignore_trouble
        """Called when no model answers, and when one answers again."""
        self.on_cap: CapListener = ignore
        """Called before the session sleeps until the window of a cap ends."""
        self.sleeps_at_cap = True
        """If false, a used-up window refuses like any other cap."""
        self.reached_cap: CostCapReached | None = None
        """The newest cap whose used-up window refused a call or a request."""
        self._attempts: Mapping[str, int] = _UNREAD.attempts
        self.step_log: StepLog = _NullStepLog()
        self.spent_usd = self.spent_tokens = 0
        self.overrun = False
        """True if a request or call outside of a turn exceeded a cap."""
        self._cap: tuple[int | None] | None = None
        self._is_near: bool | None = None
        self._head = 0
        self.ending: Callable[[], Awaitable[None]] = _do_nothing
        """Called before the session ends, to stop its background work and settle the holds."""
        self._doubts: tuple[InFlight, ...] | None = None
        self._looking_back: asyncio.Event | None = None
        self.past: Sequence[Stored] = ()
        """All events of the session, if they were just read under its lease."""

    async def load_history(self) -> list[Stored]:
        events = list(self.past) or await self.events()
        self._recall(events)
        return events

    def _recall(self, events: Sequence[Stored]) -> Session:
        """Set the runtime's state from all events of the session."""
        session, self.past = replay(events), ()
        self.state, self._attempts, self._inbox_seen = session.state, session.attempts, session.inbox_seen
        self._apply_history(events, tuple(session.in_flight.values()))
        self.parked_at_seq = self._inbox_seen
        return session

    def _apply_history(self, events: Sequence[Stored], doubts: tuple[InFlight, ...]) -> None:
        if events and isinstance(start_event := events[0].event, SessionStarted):
            self.began = start_event
            # A later runtime of this session in the same process must not reuse the keys of its parks.
            self._pause_number = max(self._pause_number, events[-1].seq)
        if self._doubts is None:
            self._doubts = doubts
            if self._looking_back is not None:
                self._looking_back.set()

    async def wait_until_recovered(self) -> None:
        """Wait until this runtime has read which effects an earlier owner left in doubt."""
        if self._doubts is None:
            self._looking_back = self._looking_back or asyncio.Event()
            await self._looking_back.wait()

    async def resume(self, row: SessionRow | None = None, start_events: Sequence[Stored] = ()) -> Sequence[Stored]:
        """Load all events, and settle the effects in doubt.

        Pass the session's `row` if it was just read under the lease, and `start_events` if this process has just
        started the session: they are then all of its events.
        """
        if start_events:
            self._may_have_questions, self.inbox_head = False, 0
            self._apply_history(start_events, ())
            return start_events
        events = list(self.past) or await self.events()
        session = self._recall(events)
        doubts, self.spent_usd, self.spent_tokens = self._doubts or (), session.spent.usd, session.spent.tokens
        new_events: Sequence[Stored] = ()
        if self.lease.generation > 1:
            new_events = await self._mark_running(row=row)
        # Inner calls are settled first, so that a repeated outer call finds their outcomes.
        for flight in sorted(doubts, key=lambda doubt: -doubt.id.count("/")):
            await self.settle_doubt(flight, await self._arguments(events, flight.id))
        if doubts:
            new_events = await self.events(session.head)
        events += new_events
        session = reduce(fold, new_events, session)
        self.spent_usd, self.spent_tokens = session.spent.usd, session.spent.tokens
        self.overrun = has_overrun(events)
        return events

    async def settle_doubt(self, flight: InFlight, arguments: bytes, max_wait: int | None = None) -> bool:
        """Settle one call in doubt. If its outcome stays unknown, charge its maximum.

        Returns false if a person has not decided about it within `max_wait`.
        """
        answer = await self._guard.recover(self.lease, self.context, flight, arguments, self._tools)
        if not isinstance(answer, ApprovalRequired):
            return True
        row = await self._wait_for_one_decision(answer, "WAITING_FOR_APPROVAL", max_wait=max_wait)
        if row.verdict:
            has_happened = row.verdict == "approve"
            await self._guard.was_done(self.lease, flight, happened=has_happened)
        elif max_wait is not None and self._clock.now() < row.expires_at:
            return False
        else:
            await self._guard.ledger.settle_in_doubt(self.lease, [flight])
        return True

    def try_call(self, call: Call, context: SessionContext | None = None) -> Coroutine[Any, Any, Attempt]:
        """Attempt a call once. Pass the outcome to `record_attempt`."""
        return self._guard.call(self.lease, context or self.context, call, self._tools, self._count_attempts(call))

    async def attempt(self, call: Call, context: SessionContext | None = None) -> Attempt:
        return self.record_attempt(call, await self.try_call(call, context))

    def _count_attempts(self, call: Call) -> int:
        """Count the attempts of a call. A staged call had one, perhaps in another process."""
        return self._attempts.get(call.id) or (1 if call.staging == "due" else 0)

    def record_attempt(self, call: Call, answer: Attempt) -> Attempt:
        """Count a refused attempt, and store its prediction until the call has an outcome."""
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
        """Make a call. Wait for a person, for money or for a window if needed.

        `context` may be narrower than the session's own.
        """
        attempt = self.record_attempt(call, await self.try_call(call, context))
        return self.accept_answer(attempt) or (await self.collect_answers([call], [attempt], context))[0]

    def accept_answer(self, attempt: Attempt) -> Answer | None:
        """Count the cost of an answer; return None if `collect_answers` must wait or count more."""
        if (
            not isinstance(attempt, Answer)
            or attempt.cap is not None
            or self.lease.session in self._guard.unattributed_cost
        ):
            return None
        self.spent_usd += attempt.cost_micros
        return attempt

    async def call_before(self, call: Call, following: Sequence[Call]) -> Answer:
        """Make a call to its end. If a person is asked about it, they are asked about the following ones as well."""
        attempt = self.record_attempt(call, await self.try_call(call))
        if isinstance(attempt, ApprovalRequired):
            for other in following:
                await self._ask_about(other)
        return self.accept_answer(attempt) or (await self.collect_answers([call], [attempt]))[0]

    async def _ask_about(self, call: Call) -> None:
        """Ask a person about a call that waits for others, if it needs that. The call is not made."""
        approval = await self._guard.ask(self.lease, self.context, call, self._tools, self._count_attempts(call))
        if approval is not None:
            self.record_attempt(call, approval)
            self._notify_waiting(approval, "WAITING_FOR_APPROVAL")

    async def has_question(self, call: Call) -> bool:
        """Return whether a person was asked about a call."""
        return await self._guard.decision(call.approval) is not None

    async def depends_on_staged(self, call: Call) -> bool:
        """Return whether a call must not be made before the staged calls."""
        return await self._guard.depends_on_staged(self.context, call, self._tools)

    async def calls(self, calls: Sequence[Call], context: SessionContext | None = None) -> Sequence[Answer]:
        """Make calls concurrently, up to a limit. A call that waits does not block the others."""
        return await self.collect_answers(calls, await self._try_calls(calls, context), context)

    async def collect_answers(
        self, calls: Sequence[Call], attempts: Sequence[Attempt], context: SessionContext | None = None
    ) -> Sequence[Answer]:
        """Collect the answers of calls: count their cost, and wait and retry until each call has one."""
        answers: dict[str, Answer] = {}
        waiting, overrun = calls, False
        while waiting:
            if (extra_cost := self._guard.unattributed_cost.pop(self.lease.session, None)) is not None:
                self.spent_usd += extra_cost.usd
                self.spent_tokens += extra_cost.tokens
                overrun = overrun or extra_cost.overrun
            for attempt in attempts:
                if isinstance(attempt, Answer):
                    answers[attempt.call] = attempt
                    self.spent_usd += attempt.cost_micros
            waiting = await self._wait_for_refused(list(zip(waiting, attempts, strict=True)))
            attempts = await self._try_calls(waiting, context) if waiting else ()
        ordered_answers = [answers[call.id] for call in calls]
        return (
            [msgspec.structs.replace(answer, overrun=True) for answer in ordered_answers]
            if overrun
            else ordered_answers
        )

    async def _try_calls(self, calls: Sequence[Call], context: SessionContext | None) -> Sequence[Attempt]:
        slots, started_at = asyncio.Semaphore(MAX_PARALLEL_CALLS), read_monotonic(self._clock)
        # While a person decides about one of the calls, no other one waits for money: the answer must be read.
        has_asked = asyncio.Event()
        if any(call.provenance_check is not None and call.provenance_check.keeps_order(call.tool) for call in calls):
            # Each call affects the provenance check of the next one.
            return [await self._attempt_in(slots, call, started_at, context, has_asked) for call in calls]
        return await run_together(
            [partial(self._attempt_in, slots, call, started_at, context, has_asked) for call in calls]
        )

    async def _attempt_in(
        self,
        slots: asyncio.Semaphore,
        call: Call,
        started_at: int,
        context: SessionContext | None,
        has_asked: asyncio.Event,
    ) -> Attempt:
        """Attempt a call when a slot is free. The wait counts against the call's timeout."""
        async with slots:
            if call.timeout is not None:
                remaining = max(1, call.timeout - (read_monotonic(self._clock) - started_at))
                call = msgspec.structs.replace(call, timeout=remaining)
            attempt = await self.attempt(msgspec.structs.replace(call, must_return=has_asked.is_set), context)
            if isinstance(attempt, ApprovalRequired):
                has_asked.set()
            return attempt

    async def _wait_for_refused(self, attempted_calls: Sequence[tuple[Call, Attempt]]) -> list[Call]:
        """Park until a refused call may pass; return the calls to retry."""
        retries = [call for call, answer in attempted_calls if not isinstance(answer, Answer)]
        approvals = [answer for _, answer in attempted_calls if isinstance(answer, ApprovalRequired)]
        capped_calls = [
            (call, answer.cap)
            for call, answer in attempted_calls
            if isinstance(answer, Answer) and answer.cap is not None
        ]
        if capped_calls and await self._wait_for_budget(
            capped_calls[0][0].id, capped_calls[0][0].tool, capped_calls[0][1]
        ):
            return [*retries, *(call for call, _ in capped_calls)]
        is_busy = any(isinstance(answer, BudgetBusy) for _, answer in attempted_calls)
        if approvals:
            await self.wait_for_decision(approvals, BUDGET_WAIT if is_busy else None)
        elif is_busy:
            await self._park_and_wait("WAITING_FOR_BUDGET", self._clock.now() + MIN_PARK_TIME)
        return retries

    async def request(
        self,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        *,
        is_wrap_up: bool = False,
        can_wait_for_cap: bool = True,
        context: SessionContext | None = None,
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Make a request. Wait for other holds and for the model's rate limit, as long as needed.

        With `can_wait_for_cap`, also wait for the next window or a raised cap. With `is_wrap_up`, the request may use
        the reserve. `context` may be narrower than the session's own.
        """
        answer = self.charge(
            request, await self.request_once(request, model, attempt, is_wrap_up=is_wrap_up, context=context)
        )
        if isinstance(answer, AnsweredRequest):
            return answer
        return await self.request_until_admitted(
            request, model, answer, attempt, is_wrap_up=is_wrap_up, can_wait_for_cap=can_wait_for_cap, context=context
        )

    def request_once(
        self,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        waited: int = 0,
        *,
        is_wrap_up: bool = False,
        context: SessionContext | None = None,
    ) -> Coroutine[Any, Any, RequestOutcome]:
        """Attempt a request once. Pass the outcome to `charge`."""
        context = context or self.context
        if is_wrap_up:
            context = msgspec.structs.replace(context, reserve_usd=0, reserve_tokens=0)
        return self._guard.request(self.lease, context, request, model, attempt, waited)

    def charge(self, request: ModelRequest, answer: RequestOutcome) -> RequestOutcome:
        """Count the cost of an answer, and return the answer."""
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
        is_wrap_up: bool = False,
        can_wait_for_cap: bool = True,
        context: SessionContext | None = None,
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Wait and retry until the request is answered, fails, or is refused without a condition to wait for."""
        wait_count = 0
        while True:
            match answer:
                case RateLimited(retry_at=until):
                    wait_count = answer.wait_count + 1
                    await self._park_and_wait("SLEEPING", max(until, self._clock.now() + MIN_PARK_TIME))
                case BudgetBusy() if request.optional:
                    return FailedRequest(answer.id, "cost_cap_reached", "Other holds use the remaining budget.")
                case BudgetBusy():
                    await self._park_and_wait("WAITING_FOR_BUDGET", self._clock.now() + MIN_PARK_TIME)
                case RefusedRequest(cap=CostCapReached() as cap) if can_wait_for_cap and await self._wait_for_budget(
                    request.id, str(model.name), cap
                ):
                    attempt, wait_count = attempt + 1, 0
                case AnsweredRequest() | FailedRequest() | RefusedRequest():
                    return answer
            answer = self.charge(
                request,
                await self.request_once(request, model, attempt, wait_count, is_wrap_up=is_wrap_up, context=context),
            )

    async def flush_deferred(self) -> None:
        """Commit deferred writes, even if the caller is cancelled."""
        if self._guard.ledger.has_deferred(self.lease):
            await run_shielded(self._guard.ledger.flush_deferred(self.lease))

    async def release(self) -> None:
        """Release the session's lease, even if the caller is cancelled."""
        await run_shielded(self.store.release(self.lease))

    async def refuse(self, calls: Sequence[Call], outcome: Outcome, sentence: str) -> Sequence[Answer]:
        return await self._guard.refuse(self.lease, calls, outcome, sentence)

    async def call_read_only(self, call: Call) -> Attempt:
        """Make a sensor's call. A pure read writes no event."""
        answer = await self._guard.call_read_only(self.lease, self.context, call, self._tools)
        if isinstance(answer, Answer):
            self.spent_usd += answer.cost_micros
            self.overrun = self.overrun or answer.overrun
        else:
            self._may_have_questions = True
        return answer

    async def end(
        self, state: State, reason: TerminalReason, inbox_seen: int | None = None, messages: Sequence[Message] = ()
    ) -> bool:
        """End the session; return whether it has ended.

        It does not end if a hold is in doubt, or if the inbox has messages after `inbox_seen`. A parent session
        receives the final text of `messages`.
        """
        if self.ending is not _do_nothing:
            # Background work may need time to stop, and settlements must not wait for it.
            await self.flush_deferred()
            await self.ending()
        parent = self.began.parent
        last_words = encode_body(shorten(find_final_text(messages), MAX_FINAL_TEXT_LENGTH)) if parent else None
        question_ids = await self._questions() if self._may_have_questions else ()
        # A model that asked another agent waits for its answer as for any tool's result: it needs no wake.
        wakes = self.began.origin != "agent"
        write = lifecycle.end_session(
            self.lease, state, reason, parent, inbox_seen, last_words, question_ids, wakes_parent=wakes
        )
        ledger = self._guard.ledger
        write = ledger.with_cap_notice(write, self.context.prepare_cap_check, partial(setattr, self, "_is_near"))
        committed = await ledger.commit(write)
        self._head = max((each.seq for each in committed.events if each.stream == write.stream), default=0)
        return bool(committed.events)

    async def _questions(self) -> Sequence[lifecycle.SessionQuestion]:
        return await lifecycle.read_questions(self.store, self.lease.session, self._clock.now())

    async def withdraw_questions(self, reason: str) -> None:
        """Withdraw the session's questions, because it continues without an answer."""
        if question_ids := await self._questions():
            await self.commit(lifecycle.withdraw_questions(self.lease, question_ids, reason))

    async def find_end(self, answer: Answer) -> tuple[State, TerminalReason] | None:
        # The outcome of an effect that a halt could not stop is unknown, but the session was halted.
        halt = await self._guard.find_halt(self.context) if answer.outcome in ("external_halt", "unknown") else None
        if halt is not None or answer.outcome == "external_halt":
            return ("CANCELLED", "cancelled") if halt is not None and halt.cancels else ("HALTED", "external_halt")
        if answer.outcome == "cost_cap_reached":
            return ("BUDGET_EXCEEDED", "cost_cap_reached")
        if answer.overrun:
            return ("BUDGET_EXCEEDED", "overrun")
        return None

    async def _wait_for_budget(self, refused_id: str, name: str, cap: CostCapReached) -> bool:
        """Wait until the window ends or a person raises the cap; return whether a retry may succeed.

        A session that does not sleep at a cap does not wait for a window.
        """
        end = window_end(cap.window)
        has_next_window = end is not None and cap.amount <= cap.cap
        self.reached_cap = cap if has_next_window and not self.sleeps_at_cap else None
        if self.reached_cap is not None:
            return False
        if end is not None and has_next_window:
            if cap.unit == "tokens":
                sentence = (
                    f"The budget of {cap.cap:,} tokens per hour is used up; the session resumes when the hour ends."
                )
                event = GuardrailTriggered(guardrail="token_budget_per_hour", sentence=sentence, until=end)
                await self.write(f"{refused_id}/{cap.window}/used_up", event)
            self.on_cap(cap, end)
            await self._park_and_wait("SLEEPING", end, lambda: self._is_raised(cap))
            return True
        if self.context.policy.on_cap != "ask":
            return False
        # Each cap that a call or a request reaches has one question.
        self._may_have_questions = True
        question = make_cap_question(refused_id, name, cap, self.context.policy)
        await self.commit(ask_question(question, self.lease))
        approval = ApprovalRequired(refused_id, question.decision)
        row = await self._wait_for_one_decision(approval, "WAITING_FOR_BUDGET", lambda: self._is_raised(cap))
        await self._read_cap()
        return row.verdict == "approve" or await self._is_raised(cap)

    async def _read_cap(self) -> None:
        params = {"scope": self.lease.stream, "window": "", "unit": "usd"}
        rows = await self.store.ask(Query("budget", BudgetRow, params))
        self._set_cap(rows[0] if rows else None)

    def _set_cap(self, row: BudgetRow | None) -> None:
        """Use the row's cap if a person has set it; otherwise the policy's cap applies."""
        self._cap = (row.cap,) if row is not None and row.cap_by else None

    async def is_near_budget(self) -> bool:
        """Return whether the session is near a cap, or was near one at its end."""
        return await self._guard.is_near_budget(self.context) if self._is_near is None else self._is_near

    def is_near_own_cap(self, usd: int | None, tokens: int | None) -> bool:
        """Return whether the session is near a cap of its own, given its remaining budget."""
        policy = self.context.policy
        margin, cap, budget = policy.cap_margin, policy.caps.session.max_cost_usd, policy.caps.token_budget
        if self._cap is not None:
            (cap,) = self._cap
        is_near_cost = cap is not None and usd is not None and margin.contains("usd", cap, usd)
        return is_near_cost or (budget is not None and tokens is not None and margin.contains("tokens", budget, tokens))

    def remaining_budget(self) -> tuple[int | None, int | None]:
        caps = self.context.caps
        cap, budget = caps.session.max_cost_usd, caps.token_budget
        if self._cap is not None:
            cap = None if self._cap[0] is None else self._cap[0] - self.context.reserve_usd
        return (None if cap is None else cap - self.spent_usd, None if budget is None else budget - self.spent_tokens)

    async def _is_raised(self, cap: CostCapReached) -> bool:
        params = {"scope": cap.scope, "window": cap.window, "unit": cap.unit}
        rows = await self.store.ask(Query("budget", BudgetRow, params))
        return any(row.cap_by and (row.cap is None or row.cap > cap.cap) for row in rows)

    async def resume_parked(self, row: SessionRow | None = None) -> None:
        """Resume a session that this process has parked; `row` as in `resume`."""
        self._pause_number += 1
        self.parked_at_seq = self._inbox_seen
        await self._mark_running(row=row)

    async def ensure_running(self, cause: WakeCause = "message") -> None:
        """Resume a session that was interrupted while it waited for a person or for money."""
        if (await self._row()).state != "RUNNING":
            self._pause_number += 1
            await self._mark_running(cause)

    async def _find_wake_cause(self, inbox_head: int) -> WakeCause | None:
        """Find the cause of the wake: a message, a decision or the timer; None for a takeover."""
        if self.state == "RUNNING":
            return None
        for stored in await self.inbox(self._inbox_seen) if inbox_head > self._inbox_seen else ():
            match stored.event:
                case WakePosted(wakes=True, cause=cause):
                    return cause
                case DecisionMade():
                    return "decision"
                case _:
                    pass
        return "timer"

    async def park(  # noqa: PLR0913 Each is a field of the park event, or a condition.
        self,
        state: State,
        inbox_seen: int,
        wake_at: int | None = None,
        wake_on: tuple[str, ...] = (),
        *,
        resident: bool = False,
        trouble: str = "",
        sentence: str = "",
        require_empty_inbox: bool = False,
    ) -> bool:
        """Park the session; return whether it is parked.

        It does not park if an unseen waking message has arrived, or with `require_empty_inbox`, any unseen message.
        A resident session keeps its lease; any other releases it. People are notified of a `trouble`.
        """
        self._pause_number += 1
        event = SessionParked(
            state=state,
            inbox_seen=inbox_seen,
            wake_at=wake_at,
            wake_on=wake_on,
            resident=resident,
            trouble=trouble,
            sentence=self.redact(sentence),
        )
        key = f"{self.lease.session}/{self.lease.generation}/rest/{self._pause_number}"
        write = lifecycle.park_session(self.lease, key, event, require_empty_inbox=require_empty_inbox)
        is_parked = bool((await self.commit(write)).events)
        if is_parked:
            self._inbox_seen = inbox_seen
            self.state = state
            if trouble:
                self.on_trouble()
        return is_parked

    async def wait_for_provider(self, trouble: str, sentence: str, sleep: int) -> None:
        """Park during a call because of a trouble, and notify people of it."""
        await self._park_and_wait("SLEEPING", self._clock.now() + sleep, trouble=trouble, sentence=sentence)

    async def _park_and_wait(
        self, state: State, wake_at: int, or_when: CheckWaiting | None = None, *, trouble: str = "", sentence: str = ""
    ) -> None:
        """Park until a message, the wake time, a halt or the given condition."""
        self._pause_number += 1
        parked_at = read_monotonic(self._clock)
        text = self.redact(sentence)
        event = SessionParked(
            state=state, inbox_seen=self._inbox_seen, wake_at=wake_at, resident=True, trouble=trouble, sentence=text
        )
        key = f"{self.lease.session}/{self.lease.generation}/rest/{self._pause_number}"
        committed = await self.commit(lifecycle.park_session(self.lease, key, event))
        if trouble:
            self.on_trouble()
        is_due = bool(committed.events) and await self.wait_for_wake(wake_at, or_when)
        await self._mark_running("timer" if is_due else "decision")
        self.parked_at_seq = self._inbox_seen
        self.step_log.add_wait(read_monotonic(self._clock) - parked_at)

    async def wait_for_wake(self, wake_at: int | None, or_when: CheckWaiting | None = None) -> bool:
        """Wait while the session is parked; return True at its wake time.

        Returns False for an inbox message, a halt, or `or_when`. A clock that is set back does not lengthen the wait.
        """
        clock, deadline = self._clock, None
        if wake_at is not None:
            deadline = read_monotonic(clock) + wake_at - clock.now()

        def find_remaining() -> int:
            if wake_at is None or deadline is None:
                return PARK_POLL_INTERVAL
            return min(PARK_POLL_INTERVAL, wake_at - clock.now(), deadline - read_monotonic(clock))

        # Messages and decisions are in the inbox, halts and caps in the fleet's stream.
        streams = (inbox_stream(self.lease.session), FLEET, ALL_STREAMS)
        async with watch_changes(self.store, lambda change: change.stream in streams) as change_event:
            while (remaining := find_remaining()) > 0:
                if (await self._row()).inbox_wake > self._inbox_seen or (or_when and await or_when()):
                    return False
                if await self._guard.find_halt(self.context) is not None:
                    return False
                await wait_for_change(change_event, remaining)
        return True

    async def _mark_running(self, cause: WakeCause | None = None, *, row: SessionRow | None = None) -> Sequence[Stored]:
        """Record that the session runs, with its inbox read up to now; return the recorded events.

        The same write reads the session's current cap.
        """
        inbox_head = (row or await self._row()).inbox_head
        cause, self._inbox_seen = cause or await self._find_wake_cause(inbox_head), inbox_head
        self.inbox_head = inbox_head
        key = f"{self.lease.session}/{self.lease.generation}/woken/{self._pause_number}"
        write = lifecycle.wake_session(self.lease, key, cause, self._inbox_seen)
        budget_key = self.lease.stream, "", "usd"

        def decide(rows: Rows) -> Sequence[Draft]:
            self._set_cap(rows.get(BudgetRow, *budget_key))
            return write.decide(rows)

        reads = (*write.reads, (BudgetRow, *budget_key))
        committed = await self.commit(msgspec.structs.replace(write, decide=decide, reads=reads))
        if committed.is_repeated:
            await self._read_cap()
        self.state = "RUNNING"
        return committed.events

    async def record_recovery(self) -> None:
        """Record that a model answers again."""
        self._pause_number += 1
        key = f"{self.lease.session}/{self.lease.generation}/recovered/{self._pause_number}"
        await self.commit(lifecycle.wake_session(self.lease, key, "timer", self._inbox_seen, recovered=True))
        self.on_trouble()

    async def wait_for_decision(self, approvals: Sequence[ApprovalRequired], max_wait: int | None = None) -> None:
        """Park until one of the questions is answered or expires, or for `max_wait`."""
        first_approval, *other_approvals = approvals

        async def is_another_due() -> bool:
            rows = [await self._guard.decision(approval.decision) for approval in other_approvals]
            return any(row is not None and (row.verdict or self._clock.now() >= row.expires_at) for row in rows)

        for approval in approvals:
            self._notify_waiting(approval, "WAITING_FOR_APPROVAL")
        await self._wait_for_one_decision(
            first_approval, "WAITING_FOR_APPROVAL", is_another_due if other_approvals else None, max_wait
        )

    async def _wait_for_one_decision(
        self,
        approval: ApprovalRequired,
        state: State,
        or_when: CheckWaiting | None = None,
        max_wait: int | None = None,
    ) -> DecisionRow:
        """Park until a person decides, the question expires, a halt, the given condition, or for `max_wait`."""
        started_at = read_monotonic(self._clock)
        while True:
            row = await self._guard.decision(approval.decision)
            if row is None:
                raise LookupError(f"Decision {approval.decision} is missing from the store.")
            if row.verdict or self._clock.now() >= row.expires_at or (or_when and await or_when()):
                return row
            if await self._guard.find_halt(self.context) is not None:
                return row
            self._notify_waiting(approval, state)
            if max_wait is None:
                await self._park_and_wait(state, row.expires_at, or_when)
            elif (remaining := max_wait - (read_monotonic(self._clock) - started_at)) <= 0:
                return row
            else:
                await self._park_and_wait(state, min(row.expires_at, self._clock.now() + remaining), or_when)

    def _notify_waiting(self, approval: ApprovalRequired, state: State) -> None:
        if approval.decision not in self._notified:
            self._notified += (approval.decision,)
            self._on_wait(approval, state)

    def find_halt(self) -> Coroutine[Any, Any, HaltRow | None]:
        return self._guard.find_halt(self.context)

    async def pause(self, duration: int) -> None:
        """Sleep for a duration; a halt ends the sleep early."""
        await self._guard.pause(self.context, duration)

    async def events(self, after_seq: int = 0) -> list[Stored]:
        return await read_stream(self.store, self.lease.stream, after_seq)

    async def read_later(self) -> Callable[[], Sequence[Stored]]:
        """Return a function that reads all events up to now, or up to the end of an ended session."""
        stream = self.lease.stream
        head = self._head or (await self.store.ask(Query("head", StreamRow, {"stream": stream})))[0].head
        return await self.store.read_later(stream, head)

    async def commit(self, write: Write) -> Committed:
        """Commit a write of the session, preceded by its deferred writes."""
        return await self._guard.ledger.commit(write)

    def defer(self, write: Write) -> None:
        """Defer a write to the session's next commit."""
        self._guard.ledger.defer(self.lease, write)

    async def write(self, key: str, event: AnyEvent, body: bytes | None = None) -> None:
        await self.write_all(key, [(event, body)])

    async def write_all(
        self, key: str, entries: Sequence[tuple[AnyEvent, bytes | None]], *, is_deferred: bool = False
    ) -> None:
        """Record several events in one write, which `is_deferred` defers to the session's next commit."""
        drafts: list[Draft] = []
        rows: list[RowKey] = []
        for event, body in entries:
            drafts.append(Draft(event, *await offload_body(self.store, body)))
            rows += rows_of_event(event)
        write = Write(self.lease.stream, key, lambda _: drafts, rows, self.lease)
        if is_deferred:
            self._guard.ledger.defer(self.lease, write)
        else:
            await self.commit(write)

    async def post(self, key: str, event: WakePosted, text: str) -> bool:
        """Post to the session's own inbox; return whether the post wakes it."""
        body, blob = await offload_body(self.store, encode_body(self.redact(text)))
        committed = await self.store.commit(lifecycle.post_wake(self.lease.session, key, event, body, blob, self.lease))
        return any(isinstance(stored.event, WakePosted) and stored.event.wakes for stored in committed.events)

    async def save_snapshot(self, snapshot: bytes) -> None:
        """Save the hot state for the next owner and for dashboards on other machines."""
        await self.store.beat(self.lease.worker, {self.lease.session: snapshot})

    async def load_snapshot(self) -> bytes:
        rows = await self.store.ask(Query("snapshot", SavedHotState, {"session": self.lease.session}))
        return rows[0].data if rows else b""

    async def inbox(self, after_seq: int) -> Sequence[Stored]:
        """Read the inbox after a position.

        Raises an error for an event of a newer version: a skipped event would count as read without being handled.
        """
        events = await read_stream(self.store, inbox_stream(self.lease.session), after_seq)
        for stored in events:
            if isinstance(stored.event, Unknown):
                raise make_unknown_event_error(stored)
        return events

    async def read_body(self, stored: Stored) -> bytes:
        return await read_body(self.store, stored)

    async def _row(self) -> SessionRow:
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": self.lease.session}))
        return row

    async def _arguments(self, events: Sequence[Stored], call: str) -> bytes:
        for stored in events:
            if isinstance(stored.event, CallStarted) and stored.event.call == call:
                return await read_body(self.store, stored)
        return b""


def has_overrun(events: Sequence[Stored]) -> bool:
    """Return whether a cap was exceeded since a person last reopened the session."""
    relevant_events = (
        each.event for each in reversed(events) if isinstance(each.event, OverrunIncurred | SessionResumed)
    )
    return isinstance(next(relevant_events, None), OverrunIncurred)


async def _do_nothing() -> None: ...


def find_final_text(messages: Sequence[Message]) -> str:
    """Find the model's last text. An answer that was cut off and continued is one text.

    After a hand-off, it is the answer of the agent that took over the conversation.
    """
    if messages and (handed_over_texts := [part.text for part in messages[-1].parts if _is_hand_off_result(part)]):
        return handed_over_texts[-1]
    texts: list[str] = []
    for message in reversed(messages):
        if message.role == "assistant":
            texts.append("".join([part.text for part in message.parts if isinstance(part, Text)]))
        elif not _continues_turn(message) if texts else _is_unanswered(message):
            break
    return "".join(reversed(texts))


def _is_hand_off_result(part: Part) -> TypeGuard[ToolResult]:
    return isinstance(part, ToolResult) and part.outcome == "ok" and part.tool.startswith(HAND_OFF)


def _is_unanswered(message: Message) -> bool:
    return any(isinstance(part, Text) and not part.reason for part in message.parts)


def _continues_turn(message: Message) -> bool:
    return all(isinstance(part, Text) and part.reason == "max_tokens_recovery" for part in message.parts)
