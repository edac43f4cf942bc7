"""Sessions of clients at the gateway: what each may call, what is in flight, and which of its questions are open.

Everything is in the journal. A client that comes back finds its questions where it left them; a call that a killed
gateway left in doubt is put to a person, and its hold stays until they say what became of it.
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

from halter.core import events as ev
from halter.core.clock import SECOND
from halter.core.errors import HalterError, LeaseLost
from halter.core.ids import SessionId, WorkerId, inbox_stream, may_decide, session_stream
from halter.core.messages import AnonymizationPolicy, Message, Prompt, Text
from halter.core.ports import EVERY_STREAM, Lease, Query, Stored, offload_body, read_body, read_stream
from halter.core.rows import DecisionRow, SessionRow, WorkerRow
from halter.core.spec import GatewaySpec
from halter.core.text import clean, to_body
from halter.core.tools import Failed, Tool, Valid
from halter.core.vocabulary import State, TerminalReason
from halter.dispatch.heartbeat import acquire_lease
from halter.gateway.calls import ClientCall, ParkedCalls, make_form_question, make_url_question
from halter.gateway.tasks import SessionTasks
from halter.gateway.upstreams import GatewayAgent, Upstreams
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.brake import choose_provenance_mode
from halter.guard.call_brake import CallBrake, make_call_brake
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
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.loop.session_runtime import watch_changes
from halter.runtime.agent_context import Models, store_policy
from halter.runtime.assemble import AssembledAgent
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold

TOLD_EVERY: Final = 10 * SECOND
"""How often a client hears that its call still waits."""
POLL_INTERVAL: Final = 2 * SECOND
SHORT_REST: Final = SECOND // 4
TAKE_PATIENCE: Final = 2 * SECOND
MOST_SEEN: Final = 1000
MOST_SAMPLED_TOKENS: Final = 4096


class PendingCall(msgspec.Struct, frozen=True):
    """A call that waits for a person longer than its client can."""

    decision: str
    expires_at: int


class SessionGone(HalterError):
    """The session takes no more calls."""


class GatewayTerms(msgspec.Struct, frozen=True):
    """What all sessions of a gateway share."""

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
    """One client's session. Where it rests for a person, a later client of the same kind takes it up."""

    def __init__(self, terms: GatewayTerms, lease: Lease, upstreams: Upstreams) -> None:
        self.terms = terms
        self.lease = lease
        self.upstreams = upstreams
        self.parked = ParkedCalls()
        self.tasks = SessionTasks(terms.app.clock.now)
        self.used_at = terms.app.clock.now()
        self.state = Session()
        self.end_reason = ""
        self._store = terms.app.patient()
        self._clock = terms.app.clock
        self._numbers = itertools.count(1)
        self._questions: dict[str, tuple[str, str]] = {}
        self._awaited_calls: set[str] = set()
        self._brake = _make_brake(terms.agent, upstreams.tools)
        upstreams.ask_model = self._ask_model

    @property
    def id(self) -> str:
        return self.lease.session

    def begin(self, call: ClientCall, tool: str, arguments: bytes) -> None:
        """Begin a call. It goes on when the client's request is over, until the client cancels it."""
        call.task = asyncio.create_task(self._make(call, tool, arguments), name=f"gated {tool}")
        call.task.add_done_callback(_consume_error)

    async def _make(self, client: ClientCall, tool: str, arguments: bytes) -> Answer | PendingCall:
        if self.end_reason:
            raise SessionGone(self.end_reason)
        await self.upstreams.refresh()
        same = self._digest(tool, arguments)
        decision = self._find_question(tool, same)
        number = next(self._numbers)
        brake = None if self._brake is None else self._brake.brake
        call = Call(f"{self.id}.{self.lease.generation}.{number}", tool, arguments, decision=decision, brake=brake)
        self.upstreams.calls[call.id] = client
        try:
            return await self._try(client, call)
        except LeaseLost:
            self.end_reason = f"Another process has session {self.id} now: connect again."
            raise SessionGone(self.end_reason) from None
        finally:
            del self.upstreams.calls[call.id]
            self.used_at = self._clock.now()

    async def _try(self, client: ClientCall, call: Call) -> Answer | PendingCall:
        """Take a call through the guard, and wait a while for a person or for money."""
        deadline, attempt = self._clock.now() + self.terms.spec.wait, 0
        while True:
            answer = await self._attempt(call, attempt)
            await self.catch_up()
            match answer:
                case Answer():
                    return await self._apply_answer(call, answer)
                case BudgetBusy() if self._clock.now() >= deadline:
                    sentence = "The money for this call is held by other calls: make it again in a minute."
                    return Answer(call.id, "cost_cap_reached", sentence)
                case BudgetBusy():
                    await self._clock.sleep(SHORT_REST)
                case ApprovalRequired(decision=decision):
                    row = await self._wait_for_person(client, decision, deadline)
                    if row is not None:
                        return PendingCall(decision, row.expires_at)
                    attempt += 1

    async def _ask_model(self, server: str, params: CreateMessageRequestParams) -> CreateMessageResult:
        """Ask the agent's model what a server wants to know: a request like any other, paid from the same account."""
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
                said = TextContent(text=reply.text)
                return CreateMessageResult(role="assistant", content=said, model=str(model.name), stop_reason="endTurn")
            case RefusedRequest(sentence=sentence):
                raise Failed("Sampling", sentence)
            case FailedRequest(error=error):
                raise Failed("Sampling", f"the model gave no answer: {error}")
            case BudgetBusy() | RateLimited():
                raise Failed("Sampling", "money or rate for the model is used by other requests: ask again later.")

    async def _hiding(self) -> SessionContext:
        """The terms of a model request. What the agent hides from models is hidden here as well, and only here."""
        context, names = self.upstreams.make_context(self.id), self.terms.agent.tasks.anonymize
        if names is None:
            return context
        (first,) = await self._store.read(session_stream(self.id), 0, 1)
        return msgspec.structs.replace(context, anonymize=AnonymizationPolicy(names, first.hash.hex()))

    async def _attempt(self, call: Call, attempt: int) -> Answer | ApprovalRequired | BudgetBusy:
        async with nullcontext() if self._brake is None else self._brake.order(call.tool):
            return await self.terms.guard.call(
                self.lease, self.upstreams.make_context(self.id), call, self.upstreams.tools, attempt
            )

    async def _apply_answer(self, call: Call, answer: Answer) -> Answer:
        if self._brake is not None:
            self._brake.observe(call, answer)
        if answer.outcome == "external_halt":
            halt = await self.terms.guard.find_halt(self.upstreams.make_context(self.id))
            if halt is not None and halt.cancels:
                self.end_reason = f"Session {self.id} was cancelled by {halt.by}."
        return answer

    async def _wait_for_person(self, client: ClientCall, decision: str, deadline: int) -> DecisionRow | None:
        """Wait for a person; return the question if they have not answered when the time is over."""
        guard, inbox = self.terms.guard, inbox_stream(SessionId(self.id))
        told_at = self._clock.now() + TOLD_EVERY
        self._awaited_calls.add(decision)
        client.wait_for(decision)
        task = asyncio.create_task(self._ask_client(client, decision), name="gated question")
        try:
            async with watch_changes(self._store, lambda change: change.stream in (inbox, EVERY_STREAM)) as news:
                while True:
                    row, now = await guard.decision(decision), self._clock.now()
                    if row is None or row.verdict or now >= row.expires_at:
                        return None
                    if await guard.find_halt(self.upstreams.make_context(self.id)) is not None:
                        return None
                    if now >= deadline and not client.is_task:
                        return row
                    if now >= told_at:
                        told_at = now + TOLD_EVERY
                        await client.report_waiting(f"Waiting for a person to decide {decision}.")
                    await self._sleep(news, min(POLL_INTERVAL, max(deadline - now, SHORT_REST), told_at - now))
        finally:
            client.waits_for = ""
            self._awaited_calls.discard(decision)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sleep(self, news: asyncio.Event, duration: int) -> None:
        """Sleep by the clock; return early on news."""
        waits = [asyncio.ensure_future(news.wait()), asyncio.ensure_future(self._clock.sleep(duration))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        news.clear()

    async def _ask_client(self, client: ClientCall, decision: str) -> None:
        """Point the client's person to the decision; what the client says of them counts only where it is trusted."""
        spec, app = self.terms.spec, self.terms.app
        asked = next(
            (
                each
                for each in await list_pending_decisions(self._store, self._clock.now())
                if each.decision == decision
            ),
            None,
        )
        if asked is None:
            return
        message = f"Halter asks whether this call may be made: {asked.display_text}"
        if spec.dashboard is not msgspec.UNSET and client.can_show("url"):
            page = f"{spec.dashboard.rstrip('/')}/decision/{quote(decision)}"
            await client.elicit(make_url_question(message, page, decision))
        if not spec.trust_client_elicitation or not may_decide(app.settings.person) or not client.can_show("form"):
            return
        said = await client.elicit(make_form_question(message))
        if said.action == "cancel":
            return
        agreed = said.action == "accept" and (said.content or {}).get("approve") is True
        key = f"{decision}/elicited"
        await self._store.commit(answer_decision(asked, "approve" if agreed else "deny", app.settings.person, key))

    def _find_question(self, tool: str, same: str) -> str:
        """The question about an earlier call with the same arguments, unless another call waits for it."""
        found = (key for key, about in self._questions.items() if about == (tool, same))
        return next((key for key in found if key not in self._awaited_calls), "")

    def _digest(self, tool: str, arguments: bytes) -> str:
        known = self.upstreams.tools.get(tool)
        valid = known.validate(arguments) if known is not None else None
        return sha256(valid.canonical if isinstance(valid, Valid) else arguments).hexdigest()

    async def list_questions(self) -> Sequence[Mapping[str, Any]]:
        """The open questions of this session, for its client: it can look at them, and never answer them."""
        found = await list_pending_decisions(self._store, self._clock.now())
        return [
            {"decision": each.decision, "tool": each.name, "asked_at": each.asked_at, "expires_at": each.expires_at}
            for each in found
            if each.session == self.id
        ]

    async def wait_for_question(self, client: ClientCall, decision: str) -> str:
        """Wait for one question of this session, and say how it stands."""
        row = await self.terms.guard.decision(decision)
        if row is None or row.session != self.id:
            return f"This session has no question {decision!r}."
        if row.verdict == "" and await self._wait_for_person(
            client, decision, self._clock.now() + self.terms.spec.wait
        ):
            return f"{decision} is not decided yet: wait again, or go on with something else."
        row = await self.terms.guard.decision(decision)
        verdict = "" if row is None else row.verdict
        if verdict in ("approve", "edit"):
            return f"{decision} is approved: make the same call again, and it runs."
        return f"{decision} is denied." if verdict else f"{decision} has expired without an answer."

    async def catch_up(self) -> None:
        for stored in await read_stream(self._store, session_stream(self.id), self.state.head):
            if stored.seq > self.state.head:
                self._fold(stored)

    def _fold(self, stored: Stored) -> None:
        self.state = fold(self.state, stored)
        match stored.event:
            case ev.DecisionAsked(about="approval") as asked:
                self._questions[asked.decision] = (asked.name, asked.same)
            case ev.CallStarted(decision=decision) | ev.CallRefused(decision=decision):
                self._questions.pop(decision, None)
            case _:
                pass

    async def recall(self) -> None:
        """Fold what happened before this process had the session, for the brake as well."""
        for stored in await read_stream(self._store, session_stream(self.id)):
            self._fold(stored)
            if self._brake is not None:
                self._brake.recall(stored, await read_body(self._store, stored))

    async def close(self) -> None:
        """End the session, or let it rest where a person may still answer, or must."""
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
        parked = ev.SessionParked(state="WAITING_FOR_APPROVAL", inbox_seen=row.inbox_head)
        key = f"{self.id}/{self.lease.generation}/rest/{self.state.head}"
        await self._store.commit(lifecycle.park_session(self.lease, key, parked))

    async def _end(self, state: State, reason: TerminalReason) -> None:
        asked = await lifecycle.read_questions(self._store, self.id, self._clock.now())
        await self._store.commit(lifecycle.end_session(self.lease, state, reason, asked=asked))


def make_sampling_prompt(server: str, params: CreateMessageRequestParams) -> Prompt:
    """What a server wants a model to be asked. Raises Failed for what is not text."""
    messages: list[Message] = []
    for each in params.messages:
        if params.tools or not isinstance(each.content, TextContent):
            raise Failed("Sampling", "only texts without tools pass here.")
        messages.append(Message(each.role, (Text(clean(each.content.text), "tool", trusted=False, source=server),)))
    limit = max(1, min(params.max_tokens, MOST_SAMPLED_TOKENS))
    return Prompt(system=clean(params.system_prompt or ""), messages=tuple(messages), max_output_tokens=limit)


def _consume_error(task: "asyncio.Task[Any]") -> None:
    """A call whose client has left has no one to raise to."""
    if not task.cancelled():
        task.exception()


def _make_brake(agent: AssembledAgent, tools: Mapping[str, Tool]) -> CallBrake | None:
    """The injection brake. The client's prompt is not seen here: trusted is what the agent's own file says.

    What the client's model has read past the gateway, such as mail by a tool of its own, taints nothing.
    """
    made = make_call_brake(choose_provenance_mode(agent.policy), agent.policy, tools)
    if made is not None:
        made.brake.trust(agent.model_settings.instructions, "the instructions")
    return made


async def open_session(terms: GatewayTerms, upstreams: Upstreams, started_by: str, about: str) -> GatedSession:
    """Take up the session that this client's predecessor left for a person to answer, or begin one."""
    store, clock = terms.app.patient(), terms.app.clock
    for row in await _list_open(terms):
        left = await _load_left_session(terms, row)
        rests = row.state == "WAITING_FOR_APPROVAL" and not row.owner and not left.state.in_flight
        if not rests or left.started_by != started_by:
            continue
        lease = (
            None if left.state.in_flight else await acquire_lease(store, clock, terms.worker, SessionId(row.session), 0)
        )
        if lease is not None:
            session = GatedSession(terms, lease, upstreams)
            await session.recall()
            key = f"{row.session}/{lease.generation}/gated"
            await store.commit(lifecycle.wake_session(lease, key, "message", row.inbox_head))
            await session.catch_up()
            return session
    return await _begin_session(terms, upstreams, started_by, about)


async def _begin_session(terms: GatewayTerms, upstreams: Upstreams, started_by: str, about: str) -> GatedSession:
    app, store = terms.app, terms.app.patient()
    started = ev.SessionStarted(
        session=app.ids.make(),
        agent=terms.agent.policy.name,
        kind="gated",
        started_by=started_by,
        definition=await store_policy(store, terms.agent.policy, terms.guard.redact),
    )
    task = to_body(terms.guard.redact(about))
    await store.commit(lifecycle.start_session(started, *await offload_body(store, task)))
    lease = await acquire_lease(store, app.clock, terms.worker, SessionId(started.session), TAKE_PATIENCE)
    if lease is None:
        raise LeaseLost(f"Session {started.session} was taken by another process before it began.")
    session = GatedSession(terms, lease, upstreams)
    await session.catch_up()
    return session


class _OrphanedSession(msgspec.Struct, frozen=True):
    """A session without a gateway: what it had in flight, and its questions about calls."""

    row: SessionRow
    state: Session
    started_by: str
    questions: tuple[str, ...]


async def _load_left_session(terms: GatewayTerms, row: SessionRow) -> _OrphanedSession:
    state, started_by, questions = Session(), "", dict[str, str]()
    for stored in await read_stream(terms.app.patient(), session_stream(row.session)):
        state = fold(state, stored)
        match stored.event:
            case ev.SessionStarted() as started:
                started_by = started.started_by
            case ev.DecisionAsked(about="approval") as asked:
                questions[asked.decision] = asked.name
            case ev.CallStarted(decision=decision) | ev.CallRefused(decision=decision):
                questions.pop(decision, None)
            case _:
                pass
    return _OrphanedSession(row, state, started_by, tuple(questions))


async def _list_open(terms: GatewayTerms) -> Sequence[SessionRow]:
    params = {"agent": terms.agent.policy.name, "kind": "gated", "limit": MOST_SEEN}
    rows = await terms.app.patient().ask(Query("sessions_of", SessionRow, params))
    return [row for row in rows if row.ended_at is None]


async def recover_sessions(terms: GatewayTerms) -> None:
    """Take care of what killed gateways left: a person is asked about calls in doubt, and the rest is ended."""
    store, now = terms.app.patient(), terms.app.clock.now()
    # Two looks at once would wake a session twice.
    async with terms.recovering:
        workers = await store.ask(Query("all_workers", WorkerRow))
        alive = {each.worker for each in workers if each.alive(now)}
        for row in await _list_open(terms):
            if row.owner not in alive:
                await _recover_session(terms, row)


async def _recover_session(terms: GatewayTerms, row: SessionRow) -> None:
    left = await _load_left_session(terms, row)
    if row.state == "WAITING_FOR_APPROVAL" and await _is_waiting(terms, left):
        return
    lease = await acquire_lease(terms.app.patient(), terms.app.clock, terms.worker, SessionId(row.session), 0)
    if lease is not None:
        with suppress(LeaseLost):
            await _settle_left(terms, lease, left)


async def _is_waiting(terms: GatewayTerms, left: _OrphanedSession) -> bool:
    """Whether nothing has happened yet that the session waits for."""
    flights = [f"{flight}/unknown" for flight in left.state.in_flight]
    rows = [await terms.guard.decision(each) for each in flights or left.questions]
    now = terms.app.clock.now()
    if flights:
        return all(row is not None and not row.verdict and now < row.expires_at for row in rows)
    return any(row is not None and now < row.expires_at for row in rows)


async def _settle_left(terms: GatewayTerms, lease: Lease, left: _OrphanedSession) -> None:
    store, row = terms.app.patient(), left.row
    key = f"{row.session}/{lease.generation}/left"
    await store.commit(lifecycle.wake_session(lease, key, "timer", row.inbox_head, recovered=True))
    cleared = [await _clear_flight(terms, lease, flight) for flight in left.state.in_flight.values()]
    open_questions = msgspec.structs.replace(left, state=Session())
    if not all(cleared) or await _is_waiting(terms, open_questions):
        parked = ev.SessionParked(state="WAITING_FOR_APPROVAL", inbox_seen=row.inbox_head)
        await store.commit(lifecycle.park_session(lease, f"{key}/rest", parked))
        return
    asked = await lifecycle.read_questions(store, row.session, terms.app.clock.now())
    end: tuple[State, TerminalReason] = ("ERROR", "error") if cleared else ("COMPLETED", "idle_timeout")
    await store.commit(lifecycle.end_session(lease, *end, asked=asked))


async def _clear_flight(terms: GatewayTerms, lease: Lease, flight: InFlight) -> bool:
    """Settle a call in doubt: a read has changed nothing, and about a write a person is asked."""
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
