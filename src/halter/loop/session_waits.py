"""A session that waits: it parks until a wake, a message, an answer of a person or a halt, and runs again."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.events import DecisionMade, SessionParked, WakePosted
from halter.core.ids import FLEET, inbox_stream
from halter.core.money import BudgetRow
from halter.core.ports import ALL_STREAMS, Draft, Lease, Rows, Store, Stored
from halter.core.rows import DecisionRow, HaltRow, SessionRow
from halter.core.vocabulary import State, WakeCause
from halter.guard.call_answer import ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.loop.concurrency import wait_for_change, watch_changes
from halter.loop.session_budget import SessionBudget
from halter.state import lifecycle
from halter.state.session import Session

PARK_POLL_INTERVAL: Final = 30 * SECOND
"""Polling interval of a parked session. Change hints arrive immediately, but may be lost."""

CheckWaiting = Callable[[], Awaitable[bool]]

WaitListener = Callable[[ApprovalRequired, State], None]
"""Called once for each decision that a session waits for."""

UNREAD: Final = Session()
"""The state of a session whose events are not read yet."""


def ignore_wait(_: ApprovalRequired, __: State) -> None: ...


def _ignore_trouble() -> None: ...


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


class SessionWaits(SessionBudget):
    """Parks a session and wakes it. The journal records what it waits for, so another process can take over."""

    __slots__ = (
        "_inbox_seen",
        "_may_have_questions",
        "_notified",
        "_on_wait",
        "_pause_number",
        "inbox_head",
        "on_trouble",
        "parked_at_seq",
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
        waits: WaitListener,
    ) -> None:
        super().__init__(store, clock, guard, lease, context)
        self.state: State = UNREAD.state
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
        self.step_log: StepLog = _NullStepLog()

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

    async def record_recovery(self) -> None:
        """Record that the session runs again after trouble: its model answers, or a killed owner was replaced."""
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

    async def _questions(self) -> Sequence[lifecycle.SessionQuestion]:
        return await lifecycle.read_questions(self.store, self.lease.session, self._clock.now())

    async def withdraw_questions(self, reason: str) -> None:
        """Withdraw the session's questions, because it continues without an answer."""
        if question_ids := await self._questions():
            await self.commit(lifecycle.withdraw_questions(self.lease, question_ids, reason))
