"""A session of an agent whose loop runs in another program.

The program may be a script with a `Guard`, an agent of a framework, a program with hooks, an MCP client, or a client of
the proxy. Its session has the same life everywhere, and this page tells it in order:

    begin             the start is recorded, and this process owns the session (`SessionHost.begin`)
    resume            its journal is read, and it runs again
    judge, make       a call is admitted, refused, or put to a person; the program makes it, or the guard does
    await_decision    the call waits until the person has decided
    report            the program reports what its call has done
    park              the session waits without an owner, for a person
    end               nothing more can happen in it
    sweep             what a killed program left is settled

How a call arrives and how its answer is put differs between programs: that is in their own packages.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Final

from halter.core.clock import SECOND, read_monotonic
from halter.core.errors import LeaseLost
from halter.core.ids import FLEET, inbox_stream
from halter.core.ports import ALL_STREAMS, Lease, Stored, read_body
from halter.core.rows import DecisionRow, HaltRow, SessionRow
from halter.core.tools import Tool
from halter.core.vocabulary import Outcome, State, TerminalReason, WakeCause
from halter.external.host import SessionHost
from halter.external.provenance import ExternalProvenanceCheck
from halter.external.state import ExternalState
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call, SessionContext
from halter.loop.concurrency import run_until_first, watch_changes
from halter.loop.session_runtime import Attempt, SessionRuntime
from halter.provenance.check import ProvenanceCheck
from halter.state.session import InFlight

DECISION_POLL_INTERVAL: Final = 2 * SECOND
MIN_POLL_INTERVAL: Final = SECOND // 4
UNREPORTED_OUTCOME: Final = "The program did not report the outcome."
NO_TOOLS: Final[Mapping[str, Tool]] = {}
CANCELLED: Final[tuple[State, TerminalReason]] = ("CANCELLED", "cancelled")


class ExternalSession:
    """One session under its lease, for as long as a program uses it."""

    def __init__(
        self,
        host: SessionHost,
        guard: GuardRuntime,
        lease: Lease,
        context: SessionContext,
        tools: Mapping[str, Tool] = NO_TOOLS,
        provenance_check: ExternalProvenanceCheck | None = None,
    ) -> None:
        self.host = host
        self.guard = guard
        self.lease = lease
        self.runtime = SessionRuntime(host.store, host.app.clock, guard, lease, context, tools)
        self.provenance_check = provenance_check
        self.state = ExternalState()
        self.effect_count = 0
        self.used_at = read_monotonic(host.app.clock)
        self.end_reason = ""
        """Why the session accepts no more calls; empty while it does."""
        self.awaited: dict[str, str] = {}
        """By decision, the call of this process that waits for it now."""
        self._clock = host.app.clock

    @property
    def id(self) -> str:
        return self.lease.session

    @property
    def context(self) -> SessionContext:
        return self.runtime.context

    async def resume(self, cause: WakeCause = "message") -> Sequence[Stored]:
        """Read the journal, and run again if the session was parked. Calls that are in flight stay so."""
        events = await self.load()
        if self.state.session.state != "RUNNING":
            await self.runtime.ensure_running(cause)
            await self.catch_up()
        return events

    async def recover(self) -> Sequence[Stored]:
        """Read the journal, and settle what a killed process of the program left in flight.

        About a call that may have changed something a person may have to decide. It waits for that.
        """
        events = await self.runtime.resume()
        self.state.apply_all(events)
        self.effect_count = len(events)
        return events

    async def judge(self, call: Call, tool: Tool) -> InFlight | Answer | ApprovalRequired | BudgetBusy:
        """Admit a call that the program then makes itself, refuse it, or ask a person about it."""
        attempt = self.state.session.attempts.get(call.id, 0)
        verdict = await self.guard.admit(self.lease, self.context, call, {call.tool: tool}, attempt)
        await self.catch_up()
        return verdict

    async def make(self, call: Call) -> Attempt:
        """Judge a call, and make it with the guard's own tool if it is admitted."""
        async with self.order(call):
            answer = await self.runtime.attempt(call)
            self.observe(call, answer)
        return answer

    async def await_decision(
        self,
        decision: str,
        deadline: int | None = None,
        call: str = "",
        *,
        can_outwait: Callable[[], bool] = lambda: False,
    ) -> DecisionRow | None:
        """Wait until a person decides, the decision expires or a halt applies; return its row if it is still pending.

        That is so at the deadline, unless the program `can_outwait` it. Without a deadline, the session is parked while
        it waits.
        """
        if deadline is None:
            await self.runtime.wait_for_decision([ApprovalRequired(call, decision)])
            return None
        # Decisions are in the inbox, halts in the fleet's stream.
        streams = (inbox_stream(self.lease.session), FLEET, ALL_STREAMS)
        self.awaited[decision] = call
        try:
            async with watch_changes(self.host.store, lambda change: change.stream in streams) as change_event:
                while (row := await self._find_pending(decision)) is not None:
                    remaining = deadline - read_monotonic(self._clock)
                    if remaining <= 0 and not can_outwait():
                        break
                    timer = self._clock.sleep(min(DECISION_POLL_INTERVAL, max(remaining, MIN_POLL_INTERVAL)))
                    await run_until_first([change_event.wait(), timer])
                    change_event.clear()
                return row
        finally:
            self.awaited.pop(decision, None)

    async def _find_pending(self, decision: str) -> DecisionRow | None:
        """Find a decision that a person can still make, unless a halt applies to its session."""
        row = await self.guard.decision(decision)
        if row is None or row.verdict or self._clock.now() >= row.expires_at:
            return None
        return row if await self.guard.find_halt(self.context) is None else None

    async def report(self, flight: InFlight, outcome: Outcome, text: str) -> None:
        """Settle a call that the program has made, with the outcome that it reports."""
        await self.guard.settle(self.lease, flight, outcome, text)
        await self.catch_up()

    async def park(self) -> None:
        """Give up the lease until a person has decided. The next call of the program, or a sweep, resumes it."""
        row = await self.host.read_row(self.id)
        is_parked = await self.runtime.park("WAITING_FOR_APPROVAL", row.inbox_head)
        if not is_parked:  # The answer has just come.
            await self.runtime.release()

    async def end(self, state: State, reason: TerminalReason) -> None:
        """End the session. A call whose outcome the program did not report is unknown.

        While money is held for an effect in doubt, the session does not end: it is left to its next owner.
        """
        for flight in tuple(self.state.session.in_flight.values()):
            await self.guard.settle(self.lease, flight, "unknown", UNREPORTED_OUTCOME)
        if not await self.runtime.end(state, reason):
            await self.runtime.release()

    async def sweep(self) -> bool:
        """Settle what a killed process left in flight; then end the session, or park it for a person.

        A read or a request settles at its hold. About a call that may have changed something a person decides, and its
        hold stays until then. Returns true if the session has ended.
        """
        flights = tuple(self.state.session.in_flight.values())
        with suppress(LeaseLost):
            await self.runtime.record_recovery()
            if not await self._settle_doubts(flights) or await self.has_open_question():
                await self.park()
                return False
            await self.end(*(("ERROR", "error") if flights else ("COMPLETED", "idle_timeout")))
            return True
        return False

    async def _settle_doubts(self, flights: Sequence[InFlight]) -> bool:
        are_settled = True
        for flight in flights:
            if flight.effect == "read":
                await self.guard.ledger.settle_in_doubt(self.lease, [flight])
            elif not await self.runtime.settle_doubt(flight, b"", max_wait=0):
                are_settled = False
        await self.catch_up()
        return are_settled

    async def load(self) -> Sequence[Stored]:
        """Read the journal up to now, and return its events."""
        events = await self.runtime.load_history()
        self.state.apply_all(events)
        return events

    async def catch_up(self) -> None:
        """Read what was committed since the last time."""
        await self.state.read(self.host.store, self.id)

    def make_effect_id(self, prefix: str = "") -> str:
        """Make the id of the next call or request."""
        self.effect_count += 1
        return f"{self.id}.{self.lease.generation}.{prefix}{self.effect_count}"

    def find_question(self, call: str, tool: str, digest: str) -> str:
        """Find the decision about an earlier call with the same arguments, unless another call waits for it.

        A program that did not wait repeats its call, often under another id.
        """
        questions = self.state.questions.items()
        decisions = (decision for decision, question in questions if question == (tool, digest))
        return next((decision for decision in decisions if self.awaited.get(decision, call) == call), "")

    async def has_open_question(self) -> bool:
        """Return whether the answer to a question, given or not, can still admit a call of the program."""
        return await self.state.has_open_question(self.guard, self._clock.now())

    async def find_cancellation(self, answer: Answer) -> HaltRow | None:
        """Find the cancellation that refused a call; a halt that can be lifted is none."""
        halt = await self.guard.find_halt(self.context) if answer.outcome == "external_halt" else None
        return halt if halt is not None and halt.cancels else None

    @property
    def call_check(self) -> ProvenanceCheck | None:
        """The provenance check that judges each call."""
        return None if self.provenance_check is None else self.provenance_check.provenance_check

    def order(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Make calls one after the other where the result of one affects whether the next is admitted."""
        return nullcontext() if self.provenance_check is None else self.provenance_check.order(call.tool)

    def observe(self, call: Call, answer: Attempt) -> None:
        """Show the provenance check what a call returned to the program."""
        if self.provenance_check is not None and isinstance(answer, Answer):
            self.provenance_check.observe(call, answer)

    async def recall(self, events: Sequence[Stored]) -> None:
        """Repeat to the provenance check what an earlier process has seen."""
        if self.provenance_check is not None:
            for stored in events:
                self.provenance_check.recall(stored, await read_body(self.host.store, stored))


async def take_over(
    host: SessionHost, guard: GuardRuntime, row: SessionRow, context: SessionContext, *, is_cancelled: bool = False
) -> ExternalSession | None:
    """Claim a session that no process runs.

    Returns None if another process has it, or if it waits for a person and is not cancelled.
    """
    if row.state == "WAITING_FOR_APPROVAL" and not is_cancelled:
        state = ExternalState()
        await state.read(host.store, row.session)
        if await state.is_waiting(guard, host.app.clock.now()):
            return None
    lease = await host.claim(row.session)
    if lease is None:
        return None
    session = ExternalSession(host, guard, lease, context)
    await session.load()
    return session
