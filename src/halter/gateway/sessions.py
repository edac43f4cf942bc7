"""Sessions of clients at the gateway: their calls in flight, and their pending decisions.

The journal records everything. A client that reconnects finds its pending decisions again. After a gateway was killed,
a person decides about each call in doubt, and its hold stays until then.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

import msgspec
from mcp_types import CreateMessageRequestParams, CreateMessageResult

from halter.core.clock import SECOND, read_monotonic
from halter.core.errors import HalterError, LeaseLost
from halter.core.events import SessionStarted
from halter.core.ids import can_decide, session_stream
from halter.core.messages import AnonymizationPolicy
from halter.core.ports import Lease
from halter.core.rows import DecisionRow, SessionRow
from halter.core.tools import Failed, Tool, Valid
from halter.external.host import SessionHost
from halter.external.provenance import ExternalProvenanceCheck, make_external_check
from halter.external.session import CANCELLED, ExternalSession, take_over
from halter.external.state import ExternalState
from halter.gateway.calls import ClientCall, ParkedCalls, make_form_question, make_url_question
from halter.gateway.model_requests import make_sampling_prompt, make_sampling_result
from halter.gateway.tasks import SessionTasks
from halter.gateway.upstreams import GatewayAgent, Upstreams
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call, SessionContext
from halter.guard.request import (
    MODEL_REQUEST_TIMEOUT,
    ModelRequest,
)
from halter.loop.concurrency import cancel_and_wait
from halter.provenance.check import choose_provenance_mode
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.runtime import Runtime
from halter.spec.agent import GatewaySpec

BUDGET_POLL_INTERVAL: Final = SECOND // 4
WAIT_REPORT_INTERVAL: Final = 10 * SECOND


class PendingCall(msgspec.Struct, frozen=True):
    """A call that waits for a person longer than its client can."""

    decision: str
    expires_at: int


class SessionGone(HalterError):
    """The session accepts no more calls."""


class GatewayTerms(msgspec.Struct, frozen=True):
    """The terms that all sessions of a gateway share."""

    host: SessionHost
    owner: GatewayAgent
    guard: GuardRuntime
    recovering: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    @property
    def app(self) -> Runtime:
        return self.host.app

    @property
    def agent(self) -> AgentRuntime:
        return self.owner.agent

    @property
    def spec(self) -> GatewaySpec:
        return self.owner.spec


class GatedSession(ExternalSession):
    """One client's session. If it is parked for a person, a later client of the same identity resumes it."""

    def __init__(self, terms: GatewayTerms, lease: Lease, upstreams: Upstreams) -> None:
        super().__init__(
            terms.host,
            terms.guard,
            lease,
            upstreams.make_context(lease.session),
            upstreams.tools,
            _make_provenance_check(terms.agent, upstreams.tools),
        )
        self.terms = terms
        self.upstreams = upstreams
        self.parked = ParkedCalls()
        self.tasks = SessionTasks(terms.app.clock.now)
        upstreams.ask_model = self._ask_model

    def begin(self, call: ClientCall, tool: str, arguments: bytes) -> None:
        """Start a call. It continues after the client's request ends, until the client cancels it."""
        call.task = asyncio.create_task(self._make(call, tool, arguments), name=f"gated {tool}")
        call.task.add_done_callback(_consume_error)

    async def _make(self, client: ClientCall, tool: str, arguments: bytes) -> Answer | PendingCall:
        if self.end_reason:
            raise SessionGone(self.end_reason)
        await self.upstreams.refresh()
        self.runtime.context = self.upstreams.make_context(self.id)
        digest = self._digest(tool, arguments)
        name = self.make_effect_id()
        decision = self.find_question(name, tool, digest)
        call = Call(name, tool, arguments, decision=decision, provenance_check=self.call_check)
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
        deadline = read_monotonic(self._clock) + self.terms.spec.wait
        while True:
            answer = await self.make(call)
            await self.catch_up()
            match answer:
                case Answer():
                    if (cancellation := await self.find_cancellation(answer)) is not None:
                        self.end_reason = f"Session {self.id} was cancelled by {cancellation.by}."
                    return answer
                case BudgetBusy() if read_monotonic(self._clock) >= deadline:
                    sentence = "Other calls hold the budget for this call. Repeat it in a minute."
                    return Answer(call.id, "cost_cap_reached", sentence)
                case BudgetBusy():
                    await self._clock.sleep(BUDGET_POLL_INTERVAL)
                case ApprovalRequired(decision=decision):
                    row = await self._wait_for_person(client, decision, deadline, call.id)
                    if row is not None:
                        return PendingCall(decision, row.expires_at)

    async def _ask_model(self, server: str, params: CreateMessageRequestParams) -> CreateMessageResult:
        """Make a server's model request with the agent's model, through the guard and on the same account."""
        if self.end_reason:
            raise Failed("Sampling", self.end_reason)
        model = self.terms.agent.models.get(self.terms.agent.definition.model_settings.model)
        request = ModelRequest(
            id=self.make_effect_id("s"),
            prompt=make_sampling_prompt(server, params),
            timeout=min(self.terms.spec.timeout, MODEL_REQUEST_TIMEOUT),
        )
        outcome = await self.runtime.request_once(request, model, context=await self._hiding())
        return make_sampling_result(outcome, str(model.name))

    async def _hiding(self) -> SessionContext:
        """Make the context of a model request, with the names that the agent hides from models."""
        context, names = self.context, self.terms.agent.definition.tasks.anonymize
        if names is None:
            return context
        (first_event,) = await self.host.store.read(session_stream(self.id), 0, 1)
        return msgspec.structs.replace(context, anonymize=AnonymizationPolicy(names, first_event.hash.hex()))

    async def _wait_for_person(
        self, client: ClientCall, decision: str, deadline: int, call: str = ""
    ) -> DecisionRow | None:
        """Wait for a decision, which the client may show its person; return its row if it is still pending."""
        client.wait_for(decision)
        tasks = [
            asyncio.create_task(self._ask_client(client, decision), name="gated question"),
            asyncio.create_task(self._report_waiting(client, decision), name="gated wait"),
        ]
        try:
            return await self.await_decision(decision, deadline, call, can_outwait=lambda: client.is_task)
        finally:
            client.waits_for = ""
            await cancel_and_wait(*tasks)

    async def _report_waiting(self, client: ClientCall, decision: str) -> None:
        """Tell a client again and again that its call still waits, because it may give up on a silent one."""
        while True:
            await self._clock.sleep(WAIT_REPORT_INTERVAL)
            await client.report_waiting(f"Waiting for a person to decide {decision}.")

    async def _ask_client(self, client: ClientCall, decision: str) -> None:
        """Show the decision to the person at the client. The client's answer counts only if the agent trusts it."""
        spec, app = self.terms.spec, self.terms.app
        pending = next(
            (
                candidate
                for candidate in await list_pending_decisions(self.host.store, self._clock.now())
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
        await self.host.store.commit(
            answer_decision(pending, "approve" if is_approved else "deny", app.settings.person, key)
        )

    def _digest(self, tool: str, arguments: bytes) -> str:
        upstream_tool = self.upstreams.tools.get(tool)
        valid = upstream_tool.validate(arguments) if upstream_tool is not None else None
        return sha256(valid.canonical if isinstance(valid, Valid) else arguments).hexdigest()

    async def list_questions(self) -> Sequence[Mapping[str, Any]]:
        """List the pending decisions of this session for its client, which can read them but not answer them."""
        decisions, now = await list_pending_decisions(self.host.store), self._clock.now()
        return [
            {
                "decision": decision.decision,
                "tool": decision.name,
                "asked_at": decision.asked_at,
                "expires_at": decision.expires_at,
            }
            for decision in decisions
            if decision.session == self.id and decision.expires_at > now
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

    async def close(self) -> None:
        """End the session, or park it if a person can still answer a decision or has to settle a call."""
        for client in [*self.upstreams.calls.values()]:
            await client.cancel()
        await self.upstreams.close()
        with suppress(LeaseLost):
            await self.catch_up()
            if self.state.session.ended:
                return
            if self.end_reason:
                await self.end(*CANCELLED)
            elif self.state.session.in_flight or await self.has_open_question():
                await self.park()
            else:
                await self.end("COMPLETED", "completed")


def _consume_error(task: "asyncio.Task[Any]") -> None:
    """Retrieve the error of a call whose client has left, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


def _make_provenance_check(agent: AgentRuntime, tools: Mapping[str, Tool]) -> ExternalProvenanceCheck | None:
    """Make the provenance check. It trusts the agent's own instructions, because it cannot see the client's prompt.

    Text that the client's model read outside the gateway, such as mail from its own tool, is not tracked.
    """
    call_brake = make_external_check(choose_provenance_mode(agent.policy), agent.policy, tools)
    if call_brake is not None:
        call_brake.provenance_check.trust(agent.definition.model_settings.instructions, "the instructions")
    return call_brake


async def open_session(terms: GatewayTerms, upstreams: Upstreams, started_by: str, task_text: str) -> GatedSession:
    """Resume the session that an earlier client of this identity left waiting for a person, or start a new one."""
    for row in await _list_open(terms):
        if row.state != "WAITING_FOR_APPROVAL" or row.owner:
            continue
        state = ExternalState()
        await state.read(terms.host.store, row.session)
        if state.session.in_flight or state.started_by != started_by:
            continue
        lease = await terms.host.claim(row.session)
        if lease is not None:
            session = GatedSession(terms, lease, upstreams)
            await session.recall(await session.resume())
            return session
    return await _begin_session(terms, upstreams, started_by, task_text)


async def _begin_session(terms: GatewayTerms, upstreams: Upstreams, started_by: str, task_text: str) -> GatedSession:
    event = SessionStarted(
        session=terms.app.ids.make(), agent=terms.agent.policy.name, kind="gated", started_by=started_by
    )
    lease = await terms.host.begin_new(event, terms.agent.policy, task_text, terms.guard)
    session = GatedSession(terms, lease, upstreams)
    await session.catch_up()
    return session


async def _list_open(terms: GatewayTerms) -> Sequence[SessionRow]:
    return await terms.host.list_open(terms.agent.policy.name, "gated")


async def recover_sessions(terms: GatewayTerms) -> None:
    """Recover the sessions of killed gateways: ask a person about calls in doubt, and end the other sessions."""
    # Two concurrent recoveries would wake a session twice.
    async with terms.recovering:
        for row in await terms.host.without_owner(await _list_open(terms)):
            session = await take_over(terms.host, terms.guard, row, terms.agent.make_context(row.session))
            if session is not None:
                await session.sweep()
