"""Decisions on hook events: each program's session is a session of Halter, each call an intent and a settlement.

A call is admitted before the program runs it, and settled when the program reports its outcome. The journal records
everything: after a restart the server knows the calls in flight, the pending decisions, and the used approvals.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, cast

import msgspec

from halter.core.clock import SECOND, read_monotonic
from halter.core.errors import HalterError, LeaseLost
from halter.core.events import CallStarted
from halter.core.ids import WorkerId
from halter.core.ports import read_body
from halter.core.text import shorten
from halter.core.vocabulary import Outcome
from halter.external.host import SessionHost
from halter.external.session import CANCELLED
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call
from halter.hooks.agents import HookedAgent, HookedAgents
from halter.hooks.protocol import (
    DIALECTS,
    Dialect,
    HookAdmission,
    HookAnswer,
    HookEvent,
    HookQuestion,
    HookRefusal,
    HookReply,
    HookSettlement,
    block,
)
from halter.hooks.registry import HookFolder
from halter.hooks.sessions import HookedSession, HookedSessions
from halter.hooks.tools import bind_arguments, unbind_arguments
from halter.runtime.runtime import Runtime
from halter.state.session import InFlight

MAX_RESULT_LENGTH: Final = 20_000
"""Maximum number of characters of a result in the journal."""
SWEEP_INTERVAL: Final = 60 * SECOND


class HookGate:
    """The decisions of one process for all programs that are hooked to its store."""

    def __init__(self, app: Runtime, worker: WorkerId, folder: HookFolder) -> None:
        self._clock = app.clock
        self._store = app.patient()
        self._folder = folder
        self._sessions = HookedSessions(SessionHost(app, worker))
        self._agents = HookedAgents(app, folder, self._sessions.adopt_policy)

    async def reply(self, program: str, agent_name: str, data: bytes, *, attended: bool = True) -> HookReply:
        """Answer one event in the protocol of its program. An event that cannot be decided is blocked."""
        dialect = DIALECTS.get(program)
        if dialect is None:
            return block(f"Halter: unknown program {program!r}. Run `halter hook install` again.")
        try:
            event = dialect.parse(data, attended=attended)
            agent = self._agents.load(agent_name, program)
            return dialect.render(await self._answer(agent, event, dialect), event)
        except HalterError as error:
            return block(f"Halter: {str(error).rstrip('.')}. This call is blocked.")

    async def _answer(self, agent: HookedAgent, event: HookEvent, dialect: Dialect) -> HookAnswer:
        if event.moment == "other":
            return HookSettlement()
        try:
            return await self._decide(agent, event, dialect)
        except LeaseLost:
            # Another process took the session and may have released it since: a second attempt acquires it again.
            self._sessions.forget(agent, event)
            return await self._decide(agent, event, dialect)

    async def _decide(self, agent: HookedAgent, event: HookEvent, dialect: Dialect) -> HookAnswer:
        session = await self._sessions.get(agent, event)
        match event.moment:
            case "before":
                return await self._on_call(agent, session, event, dialect)
            case "after":
                return await self._on_result(agent, session, event, "ok", _result_text(event.response))
            case "failed":
                return await self._on_result(agent, session, event, "error", event.error or "Failed")
            case "refused":
                return await self._on_result(agent, session, event, "cancelled", "Refused by the program's own rules.")
            case "ended":
                await self._sessions.leave(session)
                return HookSettlement()
            case "other":
                return HookSettlement()

    async def _on_call(
        self, agent: HookedAgent, session: HookedSession, event: HookEvent, dialect: Dialect
    ) -> HookAnswer:
        arguments = bind_arguments(event.tool, event.arguments, event.cwd)
        digest, tool = sha256(arguments).hexdigest(), agent.make_tool(event).with_risk_level(arguments)
        name = session.name_call(event, digest)
        call = Call(name, event.tool, arguments, decision=session.find_question(name, event.tool, digest))
        deadline = read_monotonic(self._clock) + agent.entry.wait_seconds * SECOND
        while True:
            match await session.judge(call, tool):
                case InFlight() as flight:
                    return await self._admit(session, event, flight, edits=dialect.EDITS)
                case Answer() as refusal:
                    return await self._refuse(session, refusal)
                case BudgetBusy():
                    return HookRefusal("Other calls hold the budget for this call. Repeat it in a minute.")
                case ApprovalRequired(decision=decision):
                    if await session.await_decision(decision, deadline, call.id) is not None:
                        is_deferred = dialect.DEFERS and session.defer(call.id, event)
                        return HookQuestion(decision, is_deferred, bool(event.subagent))

    async def _admit(self, session: HookedSession, event: HookEvent, flight: InFlight, *, edits: bool) -> HookAnswer:
        (stored,) = await self._store.read(session.lease.stream, flight.seq - 1, 1)
        event_started = cast("CallStarted", stored.event)
        row = await session.guard.decision(event_started.decision) if event_started.decision else None
        if row is None or row.verdict != "edit":
            return HookAdmission(event_started.decided_by)
        edited_arguments = unbind_arguments(event.tool, await read_body(self._store, stored), event.arguments)
        if edits:
            return HookAdmission(event_started.decided_by, edited_arguments)
        await session.report(flight, "cancelled", "The program does not accept edited arguments.")
        return HookRefusal(
            f"{event_started.decided_by} approved this call with different arguments. Repeat it with "
            f"{msgspec.json.encode(edited_arguments).decode()}."
        )

    async def _refuse(self, session: HookedSession, answer: Answer) -> HookAnswer:
        if await session.find_cancellation(answer) is not None:
            await self._sessions.end(session, *CANCELLED)
        return HookRefusal(answer.text, stops=answer.outcome == "external_halt")

    async def _on_result(
        self, agent: HookedAgent, session: HookedSession, event: HookEvent, outcome: Outcome, text: str
    ) -> HookAnswer:
        """Settle a call, and mask its result. The result of a call that was not admitted is masked too."""
        digest = sha256(bind_arguments(event.tool, event.arguments, event.cwd)).hexdigest()
        flight = session.find_flight(event, digest)
        if flight is not None:
            await session.report(flight, outcome, shorten(session.guard.redact(text), MAX_RESULT_LENGTH))
        masked_response = _mask(event.response, agent.guard)
        halt = await agent.guard.find_halt(session.context)
        stop_reason = (
            "" if halt is None else f"{halt.scope} was halted by {halt.by}{': ' + halt.reason if halt.reason else ''}."
        )
        return HookSettlement(None if masked_response == event.response else masked_response, stop_reason)

    async def sweep(self) -> None:
        """End sessions that were cancelled, and those that their program left without an end event."""
        for name, entry in self._folder.agents().items():
            for row in await self._sessions.list_open(name):
                await self._sessions.sweep(self._agents.load(name, entry.program), row)


def _result_text(response: Any) -> str:
    if isinstance(response, str):
        return response
    match response:
        case {"stdout": str(out), "stderr": str(err)}:
            return f"{out}\n{err}".strip()
        case None:
            return ""
        case _:
            return msgspec.json.encode(response).decode()


def _mask(value: Any, guard: GuardRuntime) -> Any:
    """Mask secrets in every text of a JSON value."""
    match value:
        case str():
            return guard.redact(value)
        case list():
            return [_mask(each, guard) for each in cast("list[Any]", value)]
        case Mapping():
            return {key: _mask(each, guard) for key, each in cast("Mapping[str, Any]", value).items()}
        case _:
            return value
