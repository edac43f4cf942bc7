"""Decides on the events of hooks: each program's session is a session of Halter's, each call an intent and an outcome.

A call is admitted before the program runs it, and settled when the program says how it went. Everything is in the
journal: a server that starts anew knows what is in flight, which questions are open, and which approval was used.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.resolve import resolve_agent
from halter.core import events as ev
from halter.core.clock import HOUR, SECOND
from halter.core.errors import ConfigError, HalterError, LeaseLost
from halter.core.folders import ProtectedEntry, ProtectedPaths
from halter.core.ids import SessionId, WorkerId, inbox_stream, session_stream
from halter.core.money import usd_to_micros
from halter.core.ports import EVERY_STREAM, Lease, Query, Stored, offload_body, read_body, read_stream
from halter.core.rows import SessionRow
from halter.core.text import shorten, to_body
from halter.core.vocabulary import Outcome, State, TerminalReason
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call, SessionContext
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.hooks.protocol import (
    DIALECTS,
    HookAdmission,
    HookAnswer,
    HookEvent,
    HookQuestion,
    HookRefusal,
    HookReply,
    HookSettlement,
    block,
)
from halter.hooks.registry import HookedProgram, HookFolder
from halter.hooks.tools import HookedTool, bind_arguments, unbind_arguments
from halter.loop.session_runtime import wait_for_news, watch_changes
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.agent_context import PATIENCE, make_guard, store_policy
from halter.runtime.assemble import AssembledAgent, list_protected_paths
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.session import InFlight, Session, fold

LONGEST_RESULT: Final = 20_000
"""How much of a result is kept in the journal."""
IDLE_END: Final = 24 * HOUR
"""After so long without an event, a session without an open question is taken for over."""
SWEEP_INTERVAL: Final = 60 * SECOND
DECISION_POLL: Final = 2 * SECOND
MOST_SWEPT: Final = 1000
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,120}")
_OUTCOME_LOST: Final = "The program never reported its outcome."
_REOPENED: Final = frozenset({"completed", "idle_timeout"})


class UndecidableEvent(HalterError):
    """The event cannot be decided; the sentence says why, and the call is blocked."""


class _LoadedAgent(msgspec.Struct, frozen=True):
    """An agent with its guard, as its file was when it was read."""

    entry: HookedProgram
    agent: AssembledAgent
    guard: GuardRuntime
    protected: ProtectedPaths
    read: tuple[int, ...]


class HookedSession:
    """A session of another program: what is in flight, and which of its questions are open."""

    def __init__(self, lease: Lease, context: SessionContext) -> None:
        self.lease = lease
        self.standing = context
        self.state = Session()
        self.numbers = Counter[str]()
        self.decisions: dict[tuple[str, str], str] = {}
        self.pending_calls: set[str] = set()
        """Calls that wait for a person at this moment."""

    def fold(self, stored: Stored) -> None:
        self.state = fold(self.state, stored)
        match stored.event:
            case ev.DecisionAsked(about="approval") as asked:
                self.decisions[asked.name, asked.same] = asked.decision
            case ev.CallStarted(call=call, decision=decision) | ev.CallRefused(call=call, decision=decision):
                self.numbers[call.rpartition(".")[0]] += 1
                self.decisions = {key: each for key, each in self.decisions.items() if each != decision}
            case _:
                pass

    def name_call(self, event: HookEvent, same: str) -> str:
        """The id of a call: the program's own, or where it gives none, by its arguments and a number."""
        if event.call:
            return f"{self.lease.session}.{event.call}"
        named = f"{self.lease.session}.{same[:16]}"
        return f"{named}.{self.numbers[named] + 1}"

    def find_flight(self, event: HookEvent, same: str) -> InFlight | None:
        flights = self.state.in_flight
        if event.call:
            return flights.get(f"{self.lease.session}.{event.call}")
        named = f"{self.lease.session}.{same[:16]}."
        return next((flights[key] for key in reversed(list(flights)) if key.startswith(named)), None)


class HookGate:
    """Decides for all programs that are hooked to one store, in one process."""

    def __init__(self, app: Runtime, worker: WorkerId, folder: HookFolder) -> None:
        self._app = app
        self._store = app.patient()
        self._clock = app.clock
        self._worker = worker
        self._folder = folder
        self._agents: dict[str, _LoadedAgent] = {}
        self._sessions: dict[str, HookedSession] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def reply(self, program: str, agent: str, data: bytes, *, attended: bool = True) -> HookReply:
        """Answer one event in the words of its program; what cannot be decided is blocked."""
        dialect = DIALECTS.get(program)
        if dialect is None:
            return block(f"Halter knows no program {program!r}: install its hooks anew.")
        try:
            event = dialect.parse(data, attended=attended)
            loaded = await self._load(agent, program)
            return dialect.render(await self._answer(loaded, event, edits=dialect.EDITS), event)
        except HalterError as error:
            return block(f"Halter: {str(error).rstrip('.')}. This call is blocked.")

    async def _answer(self, agent: _LoadedAgent, event: HookEvent, *, edits: bool) -> HookAnswer:
        if event.moment == "other":
            return HookSettlement()
        try:
            return await self._decide(agent, event, edits=edits)
        except LeaseLost:
            # Another process took the session over and has left it since: one more try takes it back.
            self._sessions.pop(_name_session(agent, event), None)
            return await self._decide(agent, event, edits=edits)

    async def _decide(self, agent: _LoadedAgent, event: HookEvent, *, edits: bool) -> HookAnswer:
        session = await self._session(agent, event)
        match event.moment:
            case "before":
                return await self._on_call(agent, session, event, edits=edits)
            case "after":
                return await self._on_result(agent, session, event, "ok", _result_text(event.response))
            case "failed":
                return await self._on_result(agent, session, event, "error", event.error or "Failed")
            case "refused":
                return await self._on_result(agent, session, event, "cancelled", "The program's own rules refused it.")
            case "ended":
                await self._end(agent, session, "COMPLETED", "completed")
                return HookSettlement()
            case "other":
                return HookSettlement()

    async def _on_call(
        self, agent: _LoadedAgent, session: HookedSession, event: HookEvent, *, edits: bool
    ) -> HookAnswer:
        arguments = bind_arguments(event.tool, event.arguments, event.cwd)
        same, tool = sha256(arguments).hexdigest(), self._tool(agent, event).with_risk_level(arguments)
        call = Call(
            session.name_call(event, same),
            event.tool,
            arguments,
            decision=session.decisions.get((event.tool, same), ""),
        )
        deadline = self._clock.now() + agent.entry.wait_seconds * SECOND
        while True:
            attempt = session.state.attempts.get(call.id, 0)
            answer = await agent.guard.admit(session.lease, session.standing, call, {event.tool: tool}, attempt)
            await self._catch_up(session)
            match answer:
                case InFlight():
                    return await self._admit(agent, session, event, answer, edits=edits)
                case Answer():
                    return await self._refuse(agent, session, answer)
                case BudgetBusy():
                    return HookRefusal("The money for this call is held by others: repeat it in a minute.")
                case ApprovalRequired(decision=decision):
                    if not await self._wait_for_person(agent, session, call.id, decision, deadline):
                        return HookQuestion(decision, alone=not (session.pending_calls or session.state.in_flight))

    async def _admit(
        self, agent: _LoadedAgent, session: HookedSession, event: HookEvent, flight: InFlight, *, edits: bool
    ) -> HookAnswer:
        (stored,) = await self._store.read(session.lease.stream, flight.seq - 1, 1)
        started = cast("ev.CallStarted", stored.event)
        row = await agent.guard.decision(started.decision) if started.decision else None
        if row is None or row.verdict != "edit":
            return HookAdmission(started.decided_by)
        edited = unbind_arguments(event.tool, await read_body(self._store, stored), event.arguments)
        if edits:
            return HookAdmission(started.decided_by, edited)
        await agent.guard.settle(session.lease, flight, "cancelled", "The program takes no other arguments.")
        await self._catch_up(session)
        return HookRefusal(
            f"{started.decided_by} allows this call only with other arguments: make it with "
            f"{msgspec.json.encode(edited).decode()} instead."
        )

    async def _refuse(self, agent: _LoadedAgent, session: HookedSession, answer: Answer) -> HookAnswer:
        halt = await agent.guard.find_halt(session.standing) if answer.outcome == "external_halt" else None
        if halt is not None and halt.cancels:
            await self._end(agent, session, "CANCELLED", "cancelled")
        return HookRefusal(answer.text, stops=answer.outcome == "external_halt")

    async def _wait_for_person(
        self, agent: _LoadedAgent, session: HookedSession, call: str, decision: str, deadline: int
    ) -> bool:
        """Wait until a person decides or a halt comes; return whether one did."""
        inbox = inbox_stream(session.lease.session)
        session.pending_calls.add(call)
        try:
            async with watch_changes(self._store, lambda change: change.stream in (inbox, EVERY_STREAM)) as news:
                while True:
                    row = await agent.guard.decision(decision)
                    now = self._clock.now()
                    if row is None or row.verdict or now >= row.expires_at:
                        return True
                    if await agent.guard.find_halt(session.standing) is not None:
                        return True
                    if now >= deadline:
                        return False
                    await wait_for_news(news, min(DECISION_POLL, deadline - now))
        finally:
            session.pending_calls.discard(call)

    async def _on_result(
        self, agent: _LoadedAgent, session: HookedSession, event: HookEvent, outcome: Outcome, text: str
    ) -> HookAnswer:
        """Settle a call, and mask its result. A call that was never admitted is masked all the same."""
        same = sha256(bind_arguments(event.tool, event.arguments, event.cwd)).hexdigest()
        flight = session.find_flight(event, same)
        if flight is not None:
            redacted = agent.guard.redact(text)
            await agent.guard.settle(session.lease, flight, outcome, shorten(redacted, LONGEST_RESULT))
            await self._catch_up(session)
        masked = _mask(event.response, agent.guard)
        halt = await agent.guard.find_halt(session.standing)
        stop = (
            "" if halt is None else f"{halt.scope} was halted by {halt.by}{': ' + halt.reason if halt.reason else ''}."
        )
        return HookSettlement(None if masked == event.response else masked, stop)

    def _tool(self, agent: _LoadedAgent, event: HookEvent) -> HookedTool:
        price = agent.entry.prices.get(event.tool, 0)
        return HookedTool(
            event.tool,
            event.cwd,
            agent.protected,
            agent.agent.policy.allowed_hosts,
            cost=usd_to_micros(price) if price else 0,
        )

    async def _load(self, agent: str, program: str) -> _LoadedAgent:
        """Read the agent's file, again when it changes."""
        entry = self._folder.find(agent)
        if entry.program != program:
            raise UndecidableEvent(f"The hooks of {agent} are installed for {entry.program}, and {program} asks")
        read = _file_state(Path(entry.folder) / AGENT_FILE)
        known = self._agents.get(agent)
        if known is not None and known.entry == entry and known.read == read:
            return known
        folder = Path(entry.folder)
        file = read_agent(folder)
        if file.spec.name != agent:
            raise ConfigError(f"{folder / AGENT_FILE} is of an agent {file.spec.name!r}, and not of {agent!r}")
        resolved = resolve_agent(self._app.fleet, file, folder)
        secrets = read_environment_secrets(self._app.environ)
        assembled = AssembledAgent(**resolved.parts(), tools={}, secrets=secrets)
        protected = list_protected_paths(self._app.settings, file, folder).union(_list_hook_settings(entry))
        guard = make_guard(self._app, resolved.policy, secrets)
        loaded = self._agents[agent] = _LoadedAgent(entry, assembled, guard, protected, read)
        # Sessions that are open go on under the new policy.
        for session in self._sessions.values():
            if session.standing.agent == agent:
                session.standing = assembled.make_context(session.lease.session)
        return loaded

    async def _session(self, agent: _LoadedAgent, event: HookEvent) -> HookedSession:
        name = _name_session(agent, event)
        async with self._opening.setdefault(name, asyncio.Lock()):
            session = self._sessions.get(name)
            if session is None:
                session = self._sessions[name] = await self._open(agent, name, event.cwd)
            await self._catch_up(session)
            if session.state.ended:
                del self._sessions[name]
                raise UndecidableEvent(_explain_ended(name, session.state.state, session.state.terminal_reason))
        return session

    async def _open(self, agent: _LoadedAgent, name: str, cwd: str) -> HookedSession:
        title = DIALECTS[agent.entry.program].TITLE
        started = ev.SessionStarted(
            session=name,
            agent=agent.entry.agent,
            kind="hooked",
            started_by=self._app.settings.person,
            definition=await store_policy(self._store, agent.agent.policy, agent.guard.redact),
        )
        task = to_body(agent.guard.redact(f"{title} in {cwd or 'an unknown folder'}"))
        await self._store.commit(lifecycle.start_session(started, *await offload_body(self._store, task)))
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": name}))
        if row.ended_at is not None:
            if row.terminal_reason not in _REOPENED:
                raise UndecidableEvent(_explain_ended(name, row.state, row.terminal_reason))
            by, head = self._app.settings.person, row.generation
            await self._store.commit(lifecycle.reopen_session(name, f"{name}/{head}/hooked", by))
        lease = await acquire_lease(self._store, self._clock, self._worker, SessionId(name), PATIENCE)
        if lease is None:
            raise UndecidableEvent(f"Another process, {row.owner or 'unknown'}, answers for session {name}")
        session = HookedSession(lease, agent.agent.make_context(name))
        if row.state != "RUNNING" and row.ended_at is None:
            wake = lifecycle.wake_session(lease, f"{name}/{lease.generation}/hooked", "message", row.inbox_head)
            await self._store.commit(wake)
        return session

    async def _catch_up(self, session: HookedSession) -> None:
        stream = session.lease.stream
        for stored in await read_stream(self._store, stream, session.state.head):
            if stored.seq > session.state.head:
                session.fold(stored)

    async def _end(self, agent: _LoadedAgent, session: HookedSession, state: State, reason: TerminalReason) -> None:
        """End a session, or let it rest where a question is open: the program may come back with its answer."""
        name = session.lease.session
        if session.decisions and state == "COMPLETED":
            await self._park(session)
            return
        for flight in session.state.in_flight.values():
            await agent.guard.settle(session.lease, flight, "unknown", _OUTCOME_LOST)
        asked = await lifecycle.read_questions(self._store, name, self._clock.now())
        await self._store.commit(lifecycle.end_session(session.lease, state, reason, asked=asked))
        self._sessions.pop(name, None)

    async def _park(self, session: HookedSession) -> None:
        name = session.lease.session
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": name}))
        parked = ev.SessionParked(state="WAITING_FOR_APPROVAL", inbox_seen=row.inbox_head)
        key = f"{name}/{session.lease.generation}/rest/{session.state.head}"
        await self._store.commit(lifecycle.park_session(session.lease, key, parked))
        self._sessions.pop(name, None)

    async def sweep(self) -> None:
        """End sessions that were cancelled, or that their program has left without a word."""
        for agent, entry in self._folder.agents().items():
            params = {"agent": agent, "kind": "hooked", "limit": MOST_SWEPT}
            for row in await self._store.ask(Query("sessions_of", SessionRow, params)):
                if row.ended_at is None:
                    await self._sweep_session(await self._load(agent, entry.program), row)

    async def _sweep_session(self, agent: _LoadedAgent, row: SessionRow) -> None:
        events = await read_stream(self._store, session_stream(row.session))
        halt = await agent.guard.find_halt(agent.agent.make_context(row.session))
        cancelled = halt is not None and halt.cancels
        session = self._sessions.get(row.session)
        idle = self._clock.now() - events[-1].at >= IDLE_END
        if not (cancelled or idle) or (session is not None and session.pending_calls):
            return
        if session is None:
            lease = await acquire_lease(self._store, self._clock, self._worker, SessionId(row.session), 0)
            if lease is None:
                return
            session = HookedSession(lease, agent.agent.make_context(row.session))
        await self._catch_up(session)
        if not cancelled and await self._can_be_answered(agent, session):
            return
        session.decisions.clear()
        if row.state != "RUNNING":
            key = f"{row.session}/{session.lease.generation}/swept"
            await self._store.commit(lifecycle.wake_session(session.lease, key, "timer", row.inbox_head))
        if cancelled:
            await self._end(agent, session, "CANCELLED", "cancelled")
        else:
            await self._end(agent, session, "COMPLETED", "idle_timeout")

    async def _can_be_answered(self, agent: _LoadedAgent, session: HookedSession) -> bool:
        rows = [await agent.guard.decision(each) for each in session.decisions.values()]
        return any(row is not None and self._clock.now() < row.expires_at for row in rows)


def _list_hook_settings(entry: HookedProgram) -> ProtectedPaths:
    what = f"where the hooks of {entry.agent} are installed"
    return ProtectedPaths(tuple(ProtectedEntry(Path(each.file), what) for each in entry.installed))


def _name_session(agent: _LoadedAgent, event: HookEvent) -> str:
    if not _ID.fullmatch(event.session) or (event.call and not _ID.fullmatch(event.call)):
        raise UndecidableEvent("The event names a session or a call in a form that Halter does not know")
    return f"{agent.entry.agent}-{event.session}"


def _explain_ended(session: str, state: str, reason: str) -> str:
    return f"Session {session} is over ({state}, {reason}): begin another one in the program"


def _file_state(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return (about.st_ino, about.st_mtime_ns, about.st_size)


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
