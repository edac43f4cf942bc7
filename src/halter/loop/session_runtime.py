"""A session while a worker holds its lease: it makes calls and requests, waits for money, and ends.

The journal records what a session waits for, so another process can resume it at the same point.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND, Clock, read_monotonic, window_end
from halter.core.events import CostCapReached, GuardrailTriggered, OverrunIncurred, SessionResumed, SessionStarted
from halter.core.messages import Message, Model
from halter.core.ports import Lease, Store, Stored
from halter.core.rows import SessionRow
from halter.core.text import encode_body, shorten
from halter.core.tools import Tool
from halter.core.vocabulary import REFUSAL_OUTCOMES, Outcome, State, TerminalReason
from halter.guard.approvals import ask_question, make_cap_question
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy, RateLimited
from halter.guard.ledger import BUDGET_WAIT
from halter.guard.prepare import Call, SessionContext
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest, RequestOutcome
from halter.loop.concurrency import run_together
from halter.loop.final_text import find_final_text
from halter.loop.observer import CapListener, ignore
from halter.loop.session_waits import UNREAD, SessionWaits, WaitListener, ignore_wait
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold, replay

Attempt = Answer | ApprovalRequired | BudgetBusy
"""The outcome of one attempt to make a call."""

MIN_PARK_TIME: Final = SECOND // 4
_NOT_READ: Final = SessionStarted(session="", agent="", kind="task", started_by="")

MAX_FINAL_TEXT_LENGTH: Final = 20_000
"""Maximum length of the final text for a parent session, in characters."""

MAX_PARALLEL_CALLS: Final = 10
"""Maximum number of concurrent calls of a step."""


async def _do_nothing() -> None: ...


class SessionRuntime(SessionWaits):
    """Runs one session under its lease, until it parks or ends: makes its calls and requests, and waits for money."""

    __slots__ = (
        "_attempts",
        "_doubts",
        "_looking_back",
        "_tools",
        "began",
        "ending",
        "on_cap",
        "past",
        "reached_cap",
        "sleeps_at_cap",
    )

    def __init__(
        self,
        store: Store,
        clock: Clock,
        guard: GuardRuntime,
        lease: Lease,
        context: SessionContext,
        tools: Mapping[str, Tool],
        waits: WaitListener = ignore_wait,
    ) -> None:
        super().__init__(store, clock, guard, lease, context, waits)
        self.began = _NOT_READ
        self._tools = tools
        self._attempts: Mapping[str, int] = UNREAD.attempts
        self.on_cap: CapListener = ignore
        """Called before the session sleeps until the window of a cap ends."""
        self.sleeps_at_cap = True
        """If false, a used-up window refuses like any other cap."""
        self.reached_cap: CostCapReached | None = None
        """The newest cap whose used-up window refused a call or a request."""
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

    async def call(self, call: Call, context: SessionContext | None = None) -> Answer:
        """Make a call. Wait for a person, for money or for a window if needed.

        `context` may be narrower than the session's own.
        """
        return await self.finish_call(call, await self.try_call(call, context), context)

    async def calls(self, calls: Sequence[Call], context: SessionContext | None = None) -> Sequence[Answer]:
        """Make calls concurrently, up to a limit. A call that waits does not block the others."""
        return await self._collect_answers(calls, await self._try_calls(calls, context), context)

    def try_call(self, call: Call, context: SessionContext | None = None) -> Coroutine[Any, Any, Attempt]:
        """Attempt a call once. Pass the outcome to `finish_call`."""
        attempt = self._count_attempts(call)
        return self._guard.call(self.lease, context or self.context, call, self._tools, attempt)

    async def attempt(self, call: Call, context: SessionContext | None = None) -> Attempt:
        return self._record_attempt(call, await self.try_call(call, context))

    def _count_attempts(self, call: Call) -> int:
        """Count the attempts of a call. A staged call had one, perhaps in another process."""
        return self._attempts.get(call.id) or (1 if call.staging == "due" else 0)

    async def finish_call(self, call: Call, attempt: Attempt, context: SessionContext | None = None) -> Answer:
        """Count the cost of a call. Without an answer yet, wait for a person, for money or for a window, and retry."""
        attempt = self._record_attempt(call, attempt)
        costs = self._guard.unattributed_cost
        if isinstance(attempt, Answer) and attempt.cap is None and self.lease.session not in costs:
            self.spent_usd += attempt.cost_micros
            return attempt
        (answer,) = await self._collect_answers([call], [attempt], context)
        return answer

    def _record_attempt(self, call: Call, answer: Attempt) -> Attempt:
        """Count a refused attempt, and store its prediction until the call has an outcome."""
        if not isinstance(answer, Answer) or answer.outcome in REFUSAL_OUTCOMES:
            if isinstance(answer, BudgetBusy):
                return answer
            self._may_have_questions = self._may_have_questions or isinstance(answer, ApprovalRequired)
            earlier = self._count_attempts(call)
            self._attempts = {**self._attempts, call.id: earlier + 1}
        if answer.simulation:
            self.step_log.predictions = {**self.step_log.predictions, answer.call: answer.simulation}
        elif self.step_log.predictions and (text := self.step_log.predictions.get(answer.call, "")):
            return msgspec.structs.replace(answer, simulation=text)
        return answer

    async def call_before(self, call: Call, following: Sequence[Call]) -> Answer:
        """Make a call to its end. If a person is asked about it, they are asked about the following ones as well."""
        attempt = await self.try_call(call)
        if isinstance(attempt, ApprovalRequired):
            for other in following:
                await self._ask_about(other)
        return await self.finish_call(call, attempt)

    async def _ask_about(self, call: Call) -> None:
        """Ask a person about a call that waits for others, if it needs that. The call is not made."""
        attempt = self._count_attempts(call)
        approval = await self._guard.ask(self.lease, self.context, call, self._tools, attempt)
        if approval is not None:
            self._record_attempt(call, approval)
            self._notify_waiting(approval, "WAITING_FOR_APPROVAL")

    async def has_question(self, call: Call) -> bool:
        """Return whether a person was asked about a call."""
        return await self._guard.decision(call.approval) is not None

    async def depends_on_staged(self, call: Call) -> bool:
        """Return whether a call must not be made before the staged calls."""
        return await self._guard.depends_on_staged(self.context, call, self._tools)

    async def _collect_answers(
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
        outcome = await self.request_once(request, model, attempt, is_wrap_up=is_wrap_up, context=context)
        return await self.finish_request(
            request, model, outcome, attempt, is_wrap_up=is_wrap_up, can_wait_for_cap=can_wait_for_cap, context=context
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
        """Attempt a request once. Pass the outcome to `finish_request`."""
        context = context or self.context
        if is_wrap_up:
            context = msgspec.structs.replace(context, reserve_usd=0, reserve_tokens=0)
        return self._guard.request(self.lease, context, request, model, attempt, waited)

    async def finish_request(
        self,
        request: ModelRequest,
        model: Model,
        outcome: RequestOutcome,
        attempt: int = 0,
        *,
        is_wrap_up: bool = False,
        can_wait_for_cap: bool = True,
        context: SessionContext | None = None,
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Count the cost of a request; until it is answered, fails, or is refused for good, wait and retry."""
        wait_count = 0
        while True:
            match outcome:
                case AnsweredRequest() | FailedRequest():
                    self._charge(request, outcome)
                    return outcome
                case RateLimited(retry_at=until):
                    wait_count = outcome.wait_count + 1
                    await self._park_and_wait("SLEEPING", max(until, self._clock.now() + MIN_PARK_TIME))
                case BudgetBusy() if request.optional:
                    return FailedRequest(outcome.id, "cost_cap_reached", "Other holds use the remaining budget.")
                case BudgetBusy():
                    await self._park_and_wait("WAITING_FOR_BUDGET", self._clock.now() + MIN_PARK_TIME)
                case RefusedRequest(cap=CostCapReached() as cap) if can_wait_for_cap and await self._wait_for_budget(
                    request.id, str(model.name), cap
                ):
                    attempt, wait_count = attempt + 1, 0
                case RefusedRequest():
                    return outcome
            outcome = await self.request_once(
                request, model, attempt, wait_count, is_wrap_up=is_wrap_up, context=context
            )

    def _charge(self, request: ModelRequest, answer: AnsweredRequest | FailedRequest) -> None:
        """Count the cost of an answer, unless it was paid before."""
        if not answer.repeated:
            self.spent_usd += answer.cost_usd
            self.spent_tokens += answer.tokens
        if isinstance(answer, AnsweredRequest) and answer.overrun and request.purpose != "turn":
            self.overrun = True

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


def has_overrun(events: Sequence[Stored]) -> bool:
    """Return whether a cap was exceeded since a person last reopened the session."""
    relevant_events = (
        each.event for each in reversed(events) if isinstance(each.event, OverrunIncurred | SessionResumed)
    )
    return isinstance(next(relevant_events, None), OverrunIncurred)
