"""Sessions of clients at the gateway: their calls in flight, and their pending decisions.

The journal records everything. A client that reconnects finds its pending decisions again. After a gateway was killed,
a person decides about each call in doubt, and its hold stays until then.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

import msgspec
from mcp_types import CreateMessageRequestParams, CreateMessageResult, TextContent

from halter.core.clock import SECOND, read_monotonic
from halter.core.errors import HalterError, LeaseLost
from halter.core.events import CallRefused, CallStarted, DecisionAsked, SessionParked, SessionStarted
from halter.core.ids import SessionId, WorkerId, can_decide, inbox_stream, session_stream
from halter.core.messages import AnonymizationPolicy, Message, Prompt, Text
from halter.core.ports import ALL_STREAMS, Lease, Query, Stored, offload_body, read_body, read_stream
from halter.core.rows import DecisionRow, SessionRow, WorkerRow
from halter.core.spec import GatewaySpec
from halter.core.text import clean, encode_body
from halter.core.tools import Failed, Tool, Valid
from halter.core.vocabulary import State, TerminalReason
from halter.dispatch.heartbeat import acquire_lease
from halter.gateway.calls import ClientCall, ParkedCalls, make_form_question, make_url_question
from halter.gateway.tasks import SessionTasks
from halter.gateway.upstreams import GatewayAgent, Upstreams
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.external_provenance import ExternalProvenanceCheck, make_external_check
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.model_door import (
    MODEL_REQUEST_TIMEOUT,
    AnsweredRequest,
    FailedRequest,
    ModelRequest,
    RateLimited,
    RefusedRequest,
)
from halter.guard.prepare import Call, SessionContext
from halter.guard.provenance_check import choose_provenance_mode
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.loop.session_runtime import watch_changes
from halter.runtime.agent_context import Models, store_policy
from halter.runtime.assemble import AssembledAgent
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold

WAIT_REPORT_INTERVAL: Final = 10 * SECOND
"""Time between two reports to a client that its call still waits."""
POLL_INTERVAL: Final = 2 * SECOND
BUDGET_POLL_INTERVAL: Final = SECOND // 4
MAX_LEASE_WAIT: Final = 2 * SECOND
MAX_LISTED_SESSIONS: Final = 1000
MAX_SAMPLED_TOKENS: Final = 4096


class PendingCall(msgspec.Struct, frozen=True):
    """A call that waits for a person longer than its client can."""

    decision: str
    expires_at: int


class SessionGone(HalterError):
    """The session accepts no more calls."""


class GatewayTerms(msgspec.Struct, frozen=True):
    """The terms that all sessions of a gateway share."""

    app: Runtime
    worker: WorkerId
    owner: GatewayAgent
    guard: GuardRuntime
    models: Models
    recovering: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    @property
    def agent(self) -> AssembledAgent:
        return self.owner.agent

    @property
    def spec(self) -> GatewaySpec:
        return self.owner.spec


class GatedSession:
    """One client's session. If it is parked for a person, a later client of the same identity resumes it."""

    def __init__(self, terms: GatewayTerms, lease: Lease, upstreams: Upstreams) -> None:
        self.terms = terms
        self.lease = lease
        self.upstreams = upstreams
        self.parked = ParkedCalls()
        self.tasks = SessionTasks(terms.app.clock.now)
        self.used_at = read_monotonic(terms.app.clock)
        self.state = Session()
        self.end_reason = ""
        self._store = terms.app.patient()
        self._clock = terms.app.clock
        self._numbers = itertools.count(1)
        self._questions: dict[str, tuple[str, str]] = {}
        self._awaited_calls: set[str] = set()
        self._provenance_check = _make_provenance_check(terms.agent, upstreams.tools)
        upstreams.ask_model = self._ask_model

    @property
    def id(self) -> str:
        return self.lease.session

    def begin(self, call: ClientCall, tool: str, arguments: bytes) -> None:
        """Start a call. It continues after the client's request ends, until the client cancels it."""
        call.task = asyncio.create_task(self._make(call, tool, arguments), name=f"gated {tool}")
        call.task.add_done_callback(_consume_error)

    async def _make(self, client: ClientCall, tool: str, arguments: bytes) -> Answer | PendingCall:
        if self.end_reason:
            raise SessionGone(self.end_reason)
        await self.upstreams.refresh()
        digest = self._digest(tool, arguments)
        decision = self._find_question(tool, digest)
        number = next(self._numbers)
        brake = None if self._provenance_check is None else self._provenance_check.provenance_check
        call = Call(
            f"{self.id}.{self.lease.generation}.{number}", tool, arguments, decision=decision, provenance_check=brake
        )
        self.upstreams.calls[call.id] = client
        try:
            return await self._try(client, call)
        except LeaseLost:
            self.end_reason = f"Session {self.id} is owned by another process now. Reconnect."
            raise SessionGone(self.end_reason) from None
        finally:
            del self.upstreams.calls[call.id]
            self.used_at = read_monotonic(self._clock)

    async def _try(self, client: ClientCall, call: Call) -> Answer | PendingCall:
        """Pass a call through the guard, and wait up to the deadline for a decision or for the budget."""
        deadline, attempt = read_monotonic(self._clock) + self.terms.spec.wait, 0
        while True:
            answer = await self._attempt(call, attempt)
            await self.catch_up()
            match answer:
                case Answer():
                    return await self._apply_answer(call, answer)
                case BudgetBusy() if read_monotonic(self._clock) >= deadline:
                    sentence = "Other calls hold the budget for this call. Repeat it in a minute."
                    return Answer(call.id, "cost_cap_reached", sentence)
                case BudgetBusy():
                    await self._clock.sleep(BUDGET_POLL_INTERVAL)
                case ApprovalRequired(decision=decision):
                    row = await self._wait_for_person(client, decision, deadline)
                    if row is not None:
                        return PendingCall(decision, row.expires_at)
                    attempt += 1

    async def _ask_model(self, server: str, params: CreateMessageRequestParams) -> CreateMessageResult:
        """Make a server's model request with the agent's model, through the guard and on the same account."""
        if self.end_reason:
            raise Failed("Sampling", self.end_reason)
        model = self.terms.models.get(self.terms.agent.model_settings.model)
        request = ModelRequest(
            id=f"{self.id}.{self.lease.generation}.s{next(self._numbers)}",
            prompt=make_sampling_prompt(server, params),
            timeout=min(self.terms.spec.timeout, MODEL_REQUEST_TIMEOUT),
        )
        outcome = await self.terms.guard.request(self.lease, await self._hiding(), request, model)
        match outcome:
            case AnsweredRequest(reply=reply):
                content = TextContent(text=reply.text)
                return CreateMessageResult(
                    role="assistant", content=content, model=str(model.name), stop_reason="endTurn"
                )
            case RefusedRequest(sentence=sentence):
                raise Failed("Sampling", sentence)
            case FailedRequest(error=error):
                raise Failed("Sampling", f"the model did not answer: {error}")
            case BudgetBusy() | RateLimited():
                raise Failed("Sampling", "other requests use the budget or the rate of the model. Try again later.")

    async def _hiding(self) -> SessionContext:
        """Make the context of a model request, with the names that the agent hides from models."""
        context, names = self.upstreams.make_context(self.id), self.terms.agent.tasks.anonymize
        if names is None:
            return context
        (first_event,) = await self._store.read(session_stream(self.id), 0, 1)
        return msgspec.structs.replace(context, anonymize=AnonymizationPolicy(names, first_event.hash.hex()))

    async def _attempt(self, call: Call, attempt: int) -> Answer | ApprovalRequired | BudgetBusy:
        async with nullcontext() if self._provenance_check is None else self._provenance_check.order(call.tool):
            return await self.terms.guard.call(
                self.lease, self.upstreams.make_context(self.id), call, self.upstreams.tools, attempt
            )

    async def _apply_answer(self, call: Call, answer: Answer) -> Answer:
        if self._provenance_check is not None:
            self._provenance_check.observe(call, answer)
        if answer.outcome == "external_halt":
            halt = await self.terms.guard.find_halt(self.upstreams.make_context(self.id))
            if halt is not None and halt.cancels:
                self.end_reason = f"Session {self.id} was cancelled by {halt.by}."
        return answer

    async def _wait_for_person(self, client: ClientCall, decision: str, deadline: int) -> DecisionRow | None:
        """Wait for a decision; return its row if it is still pending at the deadline."""
        guard, inbox = self.terms.guard, inbox_stream(SessionId(self.id))
        next_report_at = read_monotonic(self._clock) + WAIT_REPORT_INTERVAL
        self._awaited_calls.add(decision)
        client.wait_for(decision)
        task = asyncio.create_task(self._ask_client(client, decision), name="gated question")
        try:
            async with watch_changes(self._store, lambda change: change.stream in (inbox, ALL_STREAMS)) as change_event:
                while True:
                    row, now = await guard.decision(decision), read_monotonic(self._clock)
                    if row is None or row.verdict or self._clock.now() >= row.expires_at:
                        return None
                    if await guard.find_halt(self.upstreams.make_context(self.id)) is not None:
                        return None
                    if now >= deadline and not client.is_task:
                        return row
                    if now >= next_report_at:
                        next_report_at = now + WAIT_REPORT_INTERVAL
                        await client.report_waiting(f"Waiting for a person to decide {decision}.")
                    await self._sleep(
                        change_event,
                        min(POLL_INTERVAL, max(deadline - now, BUDGET_POLL_INTERVAL), next_report_at - now),
                    )
        finally:
            client.waits_for = ""
            self._awaited_calls.discard(decision)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sleep(self, change_event: asyncio.Event, duration: int) -> None:
        """Sleep by the clock; return early if a change is reported."""
        tasks = [asyncio.ensure_future(change_event.wait()), asyncio.ensure_future(self._clock.sleep(duration))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        change_event.clear()

    async def _ask_client(self, client: ClientCall, decision: str) -> None:
        """Show the decision to the person at the client. The client's answer counts only if the agent trusts it."""
        spec, app = self.terms.spec, self.terms.app
        pending = next(
            (
                candidate
                for candidate in await list_pending_decisions(self._store, self._clock.now())
                if candidate.decision == decision
            ),
            None,
        )
        if pending is None:
            return
        message = f"Halter needs a decision about this call: {pending.display_text}"
        if spec.dashboard is not msgspec.UNSET and client.can_show("url"):
            page = f"{spec.dashboard.rstrip('/')}/decision/{quote(decision)}"
            await client.elicit(make_url_question(message, page, decision))
        if not spec.trust_client_elicitation or not can_decide(app.settings.person) or not client.can_show("form"):
            return
        response = await client.elicit(make_form_question(message))
        if response.action == "cancel":
            return
        is_approved = response.action == "accept" and (response.content or {}).get("approve") is True
        key = f"{decision}/elicited"
        await self._store.commit(
            answer_decision(pending, "approve" if is_approved else "deny", app.settings.person, key)
        )

    def _find_question(self, tool: str, digest: str) -> str:
        """Find the decision about an earlier call with the same arguments, unless another call waits for it."""
        decisions = (key for key, question in self._questions.items() if question == (tool, digest))
        return next((key for key in decisions if key not in self._awaited_calls), "")

    def _digest(self, tool: str, arguments: bytes) -> str:
        upstream_tool = self.upstreams.tools.get(tool)
        valid = upstream_tool.validate(arguments) if upstream_tool is not None else None
        return sha256(valid.canonical if isinstance(valid, Valid) else arguments).hexdigest()

    async def list_questions(self) -> Sequence[Mapping[str, Any]]:
        """List the pending decisions of this session for its client, which can read them but not answer them."""
        decisions = await list_pending_decisions(self._store, self._clock.now())
        return [
            {
                "decision": decision.decision,
                "tool": decision.name,
                "asked_at": decision.asked_at,
                "expires_at": decision.expires_at,
            }
            for decision in decisions
            if decision.session == self.id
        ]

    async def wait_for_question(self, client: ClientCall, decision: str) -> str:
        """Wait for one decision of this session, and describe its state."""
        row = await self.terms.guard.decision(decision)
        if row is None or row.session != self.id:
            return f"This session has no decision {decision!r}."
        if row.verdict == "" and await self._wait_for_person(
            client, decision, read_monotonic(self._clock) + self.terms.spec.wait
        ):
            return f"{decision} is still pending. Wait again, or continue with something else."
        row = await self.terms.guard.decision(decision)
        verdict = "" if row is None else row.verdict
        if verdict in ("approve", "edit"):
            return f"{decision} was approved. Repeat the same call to run it."
        return f"{decision} was denied." if verdict else f"{decision} expired without an answer."

    async def catch_up(self) -> None:
        for stored in await read_stream(self._store, session_stream(self.id), self.state.head):
            if stored.seq > self.state.head:
                self._fold(stored)

    def _fold(self, stored: Stored) -> None:
        self.state = fold(self.state, stored)
        match stored.event:
            case DecisionAsked(about="approval") as event:
                self._questions[event.decision] = (event.name, event.same)
            case CallStarted(decision=decision) | CallRefused(decision=decision):
                self._questions.pop(decision, None)
            case _:
                pass

    async def recall(self) -> None:
        """Fold the session's earlier events, for the provenance check too."""
        for stored in await read_stream(self._store, session_stream(self.id)):
            self._fold(stored)
            if self._provenance_check is not None:
                self._provenance_check.recall(stored, await read_body(self._store, stored))

    async def close(self) -> None:
        """End the session, or park it if a person can still answer a decision or has to settle a call."""
        for client in [*self.upstreams.calls.values()]:
            await client.cancel()
        await self.upstreams.close()
        with suppress(LeaseLost):
            await self.catch_up()
            if self.state.ended:
                return
            if not self.end_reason and (self._questions or self.state.in_flight) and await self._can_be_answered():
                await self._park()
            elif self.end_reason:
                await self._end("CANCELLED", "cancelled")
            else:
                await self._end("COMPLETED", "completed")

    async def _can_be_answered(self) -> bool:
        rows = [await self.terms.guard.decision(each) for each in self._questions]
        now = self._clock.now()
        return bool(self.state.in_flight) or any(row is not None and now < row.expires_at for row in rows)

    async def _park(self) -> None:
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": self.id}))
        event = SessionParked(state="WAITING_FOR_APPROVAL", inbox_seen=row.inbox_head)
        key = f"{self.id}/{self.lease.generation}/rest/{self.state.head}"
        await self._store.commit(lifecycle.park_session(self.lease, key, event))

    async def _end(self, state: State, reason: TerminalReason) -> None:
        questions = await lifecycle.read_questions(self._store, self.id, self._clock.now())
        await self._store.commit(lifecycle.end_session(self.lease, state, reason, asked=questions))


def make_sampling_prompt(server: str, params: CreateMessageRequestParams) -> Prompt:
    """Make the prompt of a server's model request. Raises Failed for anything but text."""
    messages: list[Message] = []
    for message in params.messages:
        if params.tools or not isinstance(message.content, TextContent):
            raise Failed("Sampling", "only text messages without tools are supported.")
        messages.append(
            Message(message.role, (Text(clean(message.content.text), "tool", trusted=False, source=server),))
        )
    limit = max(1, min(params.max_tokens, MAX_SAMPLED_TOKENS))
    return Prompt(system=clean(params.system_prompt or ""), messages=tuple(messages), max_output_tokens=limit)


def _consume_error(task: "asyncio.Task[Any]") -> None:
    """Retrieve the error of a call whose client has left, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


def _make_provenance_check(agent: AssembledAgent, tools: Mapping[str, Tool]) -> ExternalProvenanceCheck | None:
    """Make the provenance check. It trusts the agent's own instructions, because it cannot see the client's prompt.

    Text that the client's model read outside the gateway, such as mail from its own tool, is not tracked.
    """
    call_brake = make_external_check(choose_provenance_mode(agent.policy), agent.policy, tools)
    if call_brake is not None:
        call_brake.provenance_check.trust(agent.model_settings.instructions, "the instructions")
    return call_brake


async def open_session(terms: GatewayTerms, upstreams: Upstreams, started_by: str, task_text: str) -> GatedSession:
    """Resume the session that an earlier client of this identity left waiting for a person, or start a new one."""
    store, clock = terms.app.patient(), terms.app.clock
    for row in await _list_open(terms):
        orphan = await _load_orphaned_session(terms, row)
        is_resting = row.state == "WAITING_FOR_APPROVAL" and not row.owner and not orphan.state.in_flight
        if not is_resting or orphan.started_by != started_by:
            continue
        lease = (
            None
            if orphan.state.in_flight
            else await acquire_lease(store, clock, terms.worker, SessionId(row.session), 0)
        )
        if lease is not None:
            session = GatedSession(terms, lease, upstreams)
            await session.recall()
            key = f"{row.session}/{lease.generation}/gated"
            await store.commit(lifecycle.wake_session(lease, key, "message", row.inbox_head))
            await session.catch_up()
            return session
    return await _begin_session(terms, upstreams, started_by, task_text)


async def _begin_session(terms: GatewayTerms, upstreams: Upstreams, started_by: str, task_text: str) -> GatedSession:
    app, store = terms.app, terms.app.patient()
    event = SessionStarted(
        session=app.ids.make(),
        agent=terms.agent.policy.name,
        kind="gated",
        started_by=started_by,
        definition=await store_policy(store, terms.agent.policy, terms.guard.redact),
    )
    task = encode_body(terms.guard.redact(task_text))
    await app.adopt_policy()
    await store.commit(lifecycle.start_session(event, *await offload_body(store, task)))
    lease = await acquire_lease(store, app.clock, terms.worker, SessionId(event.session), MAX_LEASE_WAIT)
    if lease is None:
        raise LeaseLost(f"Another process took session {event.session} before it started.")
    session = GatedSession(terms, lease, upstreams)
    await session.catch_up()
    return session


class _OrphanedSession(msgspec.Struct, frozen=True):
    """A session without a gateway: its calls in flight, and its decisions about calls."""

    row: SessionRow
    state: Session
    started_by: str
    questions: tuple[str, ...]


async def _load_orphaned_session(terms: GatewayTerms, row: SessionRow) -> _OrphanedSession:
    state, started_by, questions = Session(), "", dict[str, str]()
    for stored in await read_stream(terms.app.patient(), session_stream(row.session)):
        state = fold(state, stored)
        match stored.event:
            case SessionStarted() as started:
                started_by = started.started_by
            case DecisionAsked(about="approval") as event:
                questions[event.decision] = event.name
            case CallStarted(decision=decision) | CallRefused(decision=decision):
                questions.pop(decision, None)
            case _:
                pass
    return _OrphanedSession(row, state, started_by, tuple(questions))


async def _list_open(terms: GatewayTerms) -> Sequence[SessionRow]:
    params = {"agent": terms.agent.policy.name, "kind": "gated", "limit": MAX_LISTED_SESSIONS}
    rows = await terms.app.patient().ask(Query("sessions_of", SessionRow, params))
    return [row for row in rows if row.ended_at is None]


async def recover_sessions(terms: GatewayTerms) -> None:
    """Recover the sessions of killed gateways: ask a person about calls in doubt, and end the other sessions."""
    store, now = terms.app.patient(), terms.app.clock.now()
    # Two concurrent recoveries would wake a session twice.
    async with terms.recovering:
        workers = await store.ask(Query("all_workers", WorkerRow))
        alive = {each.worker for each in workers if each.alive(now)}
        for row in await _list_open(terms):
            if row.owner not in alive:
                await _recover_session(terms, row)


async def _recover_session(terms: GatewayTerms, row: SessionRow) -> None:
    orphan = await _load_orphaned_session(terms, row)
    if row.state == "WAITING_FOR_APPROVAL" and await _is_waiting(terms, orphan):
        return
    lease = await acquire_lease(terms.app.patient(), terms.app.clock, terms.worker, SessionId(row.session), 0)
    if lease is not None:
        with suppress(LeaseLost):
            await _settle_orphaned_session(terms, lease, orphan)


async def _is_waiting(terms: GatewayTerms, orphan: _OrphanedSession) -> bool:
    """Return True while the session has to wait for its decisions."""
    doubt_decisions = [f"{flight}/unknown" for flight in orphan.state.in_flight]
    rows = [await terms.guard.decision(each) for each in doubt_decisions or orphan.questions]
    now = terms.app.clock.now()
    if doubt_decisions:
        return all(row is not None and not row.verdict and now < row.expires_at for row in rows)
    return any(row is not None and now < row.expires_at for row in rows)


async def _settle_orphaned_session(terms: GatewayTerms, lease: Lease, orphan: _OrphanedSession) -> None:
    store, row = terms.app.patient(), orphan.row
    key = f"{row.session}/{lease.generation}/left"
    await store.commit(lifecycle.wake_session(lease, key, "timer", row.inbox_head, recovered=True))
    are_settled = [await _clear_flight(terms, lease, flight) for flight in orphan.state.in_flight.values()]
    open_questions = msgspec.structs.replace(orphan, state=Session())
    if not all(are_settled) or await _is_waiting(terms, open_questions):
        event = SessionParked(state="WAITING_FOR_APPROVAL", inbox_seen=row.inbox_head)
        await store.commit(lifecycle.park_session(lease, f"{key}/rest", event))
        return
    questions = await lifecycle.read_questions(store, row.session, terms.app.clock.now())
    end: tuple[State, TerminalReason] = ("ERROR", "error") if are_settled else ("COMPLETED", "idle_timeout")
    await store.commit(lifecycle.end_session(lease, *end, asked=questions))


async def _clear_flight(terms: GatewayTerms, lease: Lease, flight: InFlight) -> bool:
    """Settle a call in doubt: a read without a question, a write after a person's decision. Return True if settled."""
    guard = terms.guard
    if flight.effect == "read" or not flight.is_call:
        await guard.ledger.settle_in_doubt(lease, [flight])
        return True
    answer = await guard.recover(lease, terms.agent.make_context(lease.session), flight, b"", {})
    if not isinstance(answer, ApprovalRequired):
        return True
    row = await guard.decision(answer.decision)
    if row is None or (not row.verdict and terms.app.clock.now() < row.expires_at):
        return False
    if row.verdict:
        await guard.was_done(lease, flight, happened=row.verdict == "approve")
    else:
        await guard.ledger.settle_in_doubt(lease, [flight])
    return True
