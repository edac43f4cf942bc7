"""A session whose loop runs in another program: an agent of a framework, a program with hooks, a client, a proxy.

Every such session has the same life. It begins with its lease. Each effect is judged, and its outcome reported. Where a
person has to decide, the call waits; where the program does not wait, it repeats the call, and the question about the
same tool and arguments is found again. The session parks while a decision is pending, and ends otherwise. What a killed
process left is swept by the next one.

What differs between programs is how a call arrives and how its answer is put: that is in their own packages.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from halter.core.clock import SECOND, read_monotonic
from halter.core.events import CallRefused, CallStarted, DecisionAsked, SessionParked, SessionStarted
from halter.core.ids import FLEET, SessionId, WorkerId, inbox_stream, session_stream
from halter.core.ports import ALL_STREAMS, Lease, Query, Store, Stored, offload_body, read_stream
from halter.core.rows import DecisionRow, SessionRow, WorkerRow
from halter.core.text import encode_body
from halter.core.vocabulary import SessionKind, State, TerminalReason, WakeCause
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.call_answer import ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.journal.store import JournalStore
from halter.loop.session_runtime import watch_changes
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.redact import Redact
from halter.runtime.agent_context import store_policy
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold

MAX_LISTED_SESSIONS: Final = 10_000
DECISION_POLL_INTERVAL: Final = 2 * SECOND
MIN_POLL_INTERVAL: Final = SECOND // 4
WAIT_REPORT_INTERVAL: Final = 10 * SECOND
"""Time between two reports to a program that its call still waits."""
UNREPORTED_OUTCOME: Final = "The program did not report the outcome."


class SessionHost(msgspec.Struct, frozen=True):
    """The process that runs external sessions: an open store, and the worker id that its leases belong to."""

    app: Runtime
    worker: WorkerId

    @property
    def store(self) -> JournalStore:
        """The store, with retries while it is unavailable."""
        return self.app.patient()

    async def record_start(self, event: SessionStarted, policy: ResolvedPolicy, task: str, redact: Redact) -> None:
        """Record that a session starts under a policy. A session that has started keeps its first start."""
        definition = await store_policy(self.store, policy, redact)
        body, blob = await offload_body(self.store, encode_body(redact(task)))
        await self.app.adopt_policy()
        start = msgspec.structs.replace(event, definition=definition)
        await self.store.commit(lifecycle.start_session(start, body, blob))

    async def acquire_lease(self, session: str, max_wait: int = 0) -> Lease | None:
        """Claim a session, and wait for the lease of an owner that may have died."""
        return await acquire_lease(self.store, self.app.clock, self.worker, SessionId(session), max_wait)

    async def read_row(self, session: str) -> SessionRow:
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": session}))
        return row

    async def list_open(self, agent: str, kind: SessionKind) -> Sequence[SessionRow]:
        """List an agent's sessions of a kind that have not ended."""
        params = {"agent": agent, "kind": kind, "limit": MAX_LISTED_SESSIONS}
        rows = await self.store.ask(Query("sessions_of", SessionRow, params))
        return [row for row in rows if row.ended_at is None]

    async def without_owner(self, rows: Sequence[SessionRow]) -> Sequence[SessionRow]:
        """Keep the sessions that no living process runs."""
        now = self.app.clock.now()
        workers = await self.store.ask(Query("all_workers", WorkerRow))
        alive = {each.worker for each in workers if each.alive(now)}
        return [row for row in rows if row.owner not in alive]


class ExternalState:
    """What the journal says about an external session: its effects in flight, and its pending questions.

    A question is bound to a tool and to the digest of its arguments, not to the program's id of a call.
    """

    def __init__(self) -> None:
        self.session = Session()
        self.started_by = ""
        self.questions: dict[str, tuple[str, str]] = {}
        """By pending decision, the tool and the digest of the arguments that it is about."""
        self.call_counts = Counter[str]()
        """By the start of their ids, the numbers of calls that were admitted or refused."""

    def fold(self, stored: Stored) -> None:
        self.session = fold(self.session, stored)
        match stored.event:
            case SessionStarted(started_by=started_by):
                self.started_by = started_by
            case DecisionAsked(about="approval") as event:
                self.questions[event.decision] = (event.name, event.same)
            case CallStarted(call=call, decision=decision) | CallRefused(call=call, decision=decision):
                self.call_counts[call.rpartition(".")[0]] += 1
                self.questions.pop(decision, None)
            case _:
                pass

    async def read(self, store: Store, session: str) -> Sequence[Stored]:
        """Fold the events of the session that are new, and return them."""
        new_events = await read_stream(store, session_stream(session), self.session.head)
        # Several calls of one session read at the same time.
        unfolded_events = [stored for stored in new_events if stored.seq > self.session.head]
        for stored in unfolded_events:
            self.fold(stored)
        return unfolded_events

    async def has_open_question(self, guard: GuardRuntime, now: int) -> bool:
        """Return whether the answer to a question, given or not, can still admit the program's call."""
        rows = [await guard.decision(decision) for decision in self.questions]
        return any(row is not None and now < row.expires_at for row in rows)

    async def is_waiting(self, guard: GuardRuntime, now: int) -> bool:
        """Return whether only a person's decision can move the session on."""
        doubts = [await guard.decision(f"{flight}/unknown") for flight in self.session.in_flight]
        if doubts:
            return all(row is not None and not row.verdict and now < row.expires_at for row in doubts)
        return await self.has_open_question(guard, now)


class ExternalSession:
    """One session under its lease, for as long as a program uses it."""

    def __init__(self, host: SessionHost, guard: GuardRuntime, lease: Lease, context: SessionContext) -> None:
        self.host = host
        self.guard = guard
        self.lease = lease
        self.context = context
        self.state = ExternalState()
        self.used_at = read_monotonic(host.app.clock)
        self.end_reason = ""
        """Why the session accepts no more calls; empty while it does."""
        self.awaited: dict[str, str] = {}
        """By decision, the call of this process that waits for it now."""
        self._store = host.store
        self._clock = host.app.clock

    @property
    def id(self) -> str:
        return self.lease.session

    def make_context(self) -> SessionContext:
        """Return the context of the next call."""
        return self.context

    async def catch_up(self) -> Sequence[Stored]:
        """Fold the events that were committed since the last time, and return them."""
        return await self.state.read(self._store, self.id)

    def find_question(self, call: str, tool: str, digest: str) -> str:
        """Find the decision about an earlier call with the same arguments, unless another call waits for it."""
        questions = self.state.questions.items()
        decisions = (decision for decision, question in questions if question == (tool, digest))
        return next((decision for decision in decisions if self.awaited.get(decision, call) == call), "")

    async def await_decision(
        self,
        decision: str,
        deadline: int,
        call: str = "",
        *,
        can_outwait: Callable[[], bool] = lambda: False,
        report: Callable[[], Awaitable[None]] | None = None,
    ) -> DecisionRow | None:
        """Wait until a person decides, the decision expires or a halt applies; return its row if it is still pending.

        That is so at the deadline, unless the program `can_outwait` it. A program that may give up on a silent call is
        told every ten seconds that it still waits.
        """
        # Decisions are in the inbox, halts in the fleet's stream.
        streams = (inbox_stream(self.lease.session), FLEET, ALL_STREAMS)
        next_report_at = read_monotonic(self._clock) + WAIT_REPORT_INTERVAL
        self.awaited[decision] = call
        try:
            async with watch_changes(self._store, lambda change: change.stream in streams) as change_event:
                while True:
                    row, now = await self.guard.decision(decision), read_monotonic(self._clock)
                    if row is None or not self._is_pending(row):
                        return None
                    if await self.guard.find_halt(self.make_context()) is not None:
                        return None
                    if now >= deadline and not can_outwait():
                        return row
                    if report is not None and now >= next_report_at:
                        next_report_at = now + WAIT_REPORT_INTERVAL
                        await report()
                    remaining = max(deadline - now, MIN_POLL_INTERVAL)
                    await self._sleep(change_event, min(DECISION_POLL_INTERVAL, remaining))
        finally:
            self.awaited.pop(decision, None)

    async def _sleep(self, change_event: asyncio.Event, duration: int) -> None:
        """Sleep by the clock; return early if a change is reported."""
        tasks = [asyncio.ensure_future(change_event.wait()), asyncio.ensure_future(self._clock.sleep(duration))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        change_event.clear()

    def _is_pending(self, row: DecisionRow) -> bool:
        return not row.verdict and self._clock.now() < row.expires_at

    async def wake(self, cause: WakeCause, *, recovered: bool = False) -> None:
        """Record that the session runs again, with its inbox read up to now."""
        row = await self.host.read_row(self.id)
        key = f"{self.id}/{self.lease.generation}/woken/{self.state.session.head}"
        await self._store.commit(lifecycle.wake_session(self.lease, key, cause, row.inbox_head, recovered=recovered))

    async def park(self) -> None:
        """Give up the lease until a person has decided. The next call of the program, or a sweep, resumes it."""
        row = await self.host.read_row(self.id)
        event = SessionParked(state="WAITING_FOR_APPROVAL", inbox_seen=row.inbox_head)
        key = f"{self.id}/{self.lease.generation}/rest/{self.state.session.head}"
        await self._store.commit(lifecycle.park_session(self.lease, key, event))

    async def end(self, state: State, reason: TerminalReason) -> None:
        """End the session. A call whose outcome the program did not report is unknown."""
        for flight in self.state.session.in_flight.values():
            await self.guard.settle(self.lease, flight, "unknown", UNREPORTED_OUTCOME)
        questions = await lifecycle.read_questions(self._store, self.id, self._clock.now())
        await self._store.commit(lifecycle.end_session(self.lease, state, reason, asked=questions))

    async def clear_doubts(self) -> bool:
        """Settle the effects that a killed process left in flight, and return whether all are settled.

        A read or a request settles at its hold. About a write a person decides, and its hold stays until then.
        """
        are_settled = [await self._clear_doubt(flight) for flight in tuple(self.state.session.in_flight.values())]
        return all(are_settled)

    async def _clear_doubt(self, flight: InFlight) -> bool:
        if flight.effect == "read" or not flight.is_call:
            await self.guard.ledger.settle_in_doubt(self.lease, [flight])
            return True
        answer = await self.guard.recover(self.lease, self.make_context(), flight, b"", {})
        if not isinstance(answer, ApprovalRequired):
            return True
        row = await self.guard.decision(answer.decision)
        if row is None or self._is_pending(row):
            return False
        if row.verdict:
            await self.guard.was_done(self.lease, flight, happened=row.verdict == "approve")
        else:
            await self.guard.ledger.settle_in_doubt(self.lease, [flight])
        return True
