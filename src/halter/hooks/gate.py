"""Decisions on hook events: each program's session is a session of Halter, each call an intent and a settlement.

A call is admitted before the program runs it, and settled when the program reports its outcome. The journal records
everything: after a restart the server knows the calls in flight, the pending decisions, and the used approvals.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.resolve import resolve_agent
from halter.core.clock import HOUR, SECOND, read_monotonic
from halter.core.errors import ConfigError, HalterError, LeaseLost
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.money import usd_to_micros
from halter.core.ports import Lease, read_body, read_stream
from halter.core.rows import SessionRow
from halter.core.text import shorten
from halter.core.vocabulary import Outcome, State, TerminalReason
from halter.external.host import SessionHost
from halter.external.open_sessions import OpenSessions
from halter.external.session import CANCELLED, ExternalSession, take_over
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call, SessionContext
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
from halter.hooks.registry import HookedProgram, HookFolder
from halter.hooks.tools import HookedTool, bind_arguments, unbind_arguments
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.agent_context import LEASE_WAIT_TIMEOUT, make_guard
from halter.runtime.assembly.assembled_agent import AssembledAgent
from halter.runtime.assembly.protected_paths import list_protected_paths
from halter.runtime.runtime import Runtime
from halter.state.session import InFlight
from halter.system.protected_paths import ProtectedEntry, ProtectedPaths

MAX_RESULT_LENGTH: Final = 20_000
"""Maximum number of characters of a result in the journal."""
IDLE_END: Final = 24 * HOUR
"""A session without a pending decision ends after this long without an event."""
SWEEP_INTERVAL: Final = 60 * SECOND
_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9_.:-]{1,120}")
_REOPENABLE_REASONS: Final = frozenset({"completed", "idle_timeout"})


class UndecidableEvent(HalterError):
    """The event cannot be decided, and the call is blocked; the sentence is the reason."""


class _LoadedAgent(msgspec.Struct, frozen=True):
    """An agent and its guard, with the state of the agent's file when it was read."""

    entry: HookedProgram
    agent: AssembledAgent
    guard: GuardRuntime
    protected: ProtectedPaths
    read: tuple[int, ...]


class HookedSession(ExternalSession):
    """A session of a hooked program."""

    def __init__(self, host: SessionHost, guard: GuardRuntime, lease: Lease, context: SessionContext) -> None:
        super().__init__(host, guard, lease, context)
        self.deferred = ""
        """The call that the program deferred last. It keeps only one until it is resumed, and loses every other."""

    def name_call(self, event: HookEvent, digest: str) -> str:
        """Return the id of a call: the program's own, or one from a digest of its arguments and a number."""
        if event.call:
            return f"{self.id}.{event.call}"
        prefix = f"{self.id}.{digest[:16]}"
        return f"{prefix}.{self.state.call_counts[prefix] + 1}"

    def defer(self, call: str, event: HookEvent) -> bool:
        """Let the program defer a call, and return True, if it will repeat the call when it is resumed.

        It drops a call of a sub-agent, and each but one of several. With a person at it, it ignores a deferral.
        """
        is_kept = not (event.subagent or event.is_attended or self.awaited or self.state.session.in_flight)
        if is_kept and self.deferred in ("", call):
            self.deferred = call
            return True
        return False

    def find_flight(self, event: HookEvent, digest: str) -> InFlight | None:
        flights = self.state.session.in_flight
        if event.call:
            return flights.get(f"{self.id}.{event.call}")
        prefix = f"{self.id}.{digest[:16]}."
        return next((flights[key] for key in reversed(list(flights)) if key.startswith(prefix)), None)


class HookGate:
    """The decisions of one process for all programs that are hooked to its store."""

    def __init__(self, app: Runtime, worker: WorkerId, folder: HookFolder) -> None:
        self._app = app
        self._host = SessionHost(app, worker)
        self._clock = app.clock
        self._folder = folder
        self._agents: dict[str, _LoadedAgent] = {}
        self._sessions = OpenSessions[str, HookedSession]()

    async def reply(self, program: str, agent_name: str, data: bytes, *, attended: bool = True) -> HookReply:
        """Answer one event in the protocol of its program. An event that cannot be decided is blocked."""
        dialect = DIALECTS.get(program)
        if dialect is None:
            return block(f"Halter: unknown program {program!r}. Run `halter hook install` again.")
        try:
            event = dialect.parse(data, attended=attended)
            loaded_agent = await self._load(agent_name, program)
            return dialect.render(await self._answer(loaded_agent, event, dialect), event)
        except HalterError as error:
            return block(f"Halter: {str(error).rstrip('.')}. This call is blocked.")

    async def _answer(self, loaded_agent: _LoadedAgent, event: HookEvent, dialect: Dialect) -> HookAnswer:
        if event.moment == "other":
            return HookSettlement()
        try:
            return await self._decide(loaded_agent, event, dialect)
        except LeaseLost:
            # Another process took the session and may have released it since: a second attempt acquires it again.
            self._sessions.remove(_name_session(loaded_agent, event))
            return await self._decide(loaded_agent, event, dialect)

    async def _decide(self, loaded_agent: _LoadedAgent, event: HookEvent, dialect: Dialect) -> HookAnswer:
        session = await self._session(loaded_agent, event)
        match event.moment:
            case "before":
                return await self._on_call(loaded_agent, session, event, dialect)
            case "after":
                return await self._on_result(loaded_agent, session, event, "ok", _result_text(event.response))
            case "failed":
                return await self._on_result(loaded_agent, session, event, "error", event.error or "Failed")
            case "refused":
                return await self._on_result(
                    loaded_agent, session, event, "cancelled", "Refused by the program's own rules."
                )
            case "ended":
                await self._leave(session)
                return HookSettlement()
            case "other":
                return HookSettlement()

    async def _on_call(
        self, loaded_agent: _LoadedAgent, session: HookedSession, event: HookEvent, dialect: Dialect
    ) -> HookAnswer:
        arguments = bind_arguments(event.tool, event.arguments, event.cwd)
        digest, tool = sha256(arguments).hexdigest(), self._tool(loaded_agent, event).with_risk_level(arguments)
        name = session.name_call(event, digest)
        call = Call(name, event.tool, arguments, decision=session.find_question(name, event.tool, digest))
        deadline = read_monotonic(self._clock) + loaded_agent.entry.wait_seconds * SECOND
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
        (stored,) = await self._host.store.read(session.lease.stream, flight.seq - 1, 1)
        event_started = cast("CallStarted", stored.event)
        row = await session.guard.decision(event_started.decision) if event_started.decision else None
        if row is None or row.verdict != "edit":
            return HookAdmission(event_started.decided_by)
        edited_arguments = unbind_arguments(event.tool, await read_body(self._host.store, stored), event.arguments)
        if edits:
            return HookAdmission(event_started.decided_by, edited_arguments)
        await session.report(flight, "cancelled", "The program does not accept edited arguments.")
        return HookRefusal(
            f"{event_started.decided_by} approved this call with different arguments. Repeat it with "
            f"{msgspec.json.encode(edited_arguments).decode()}."
        )

    async def _refuse(self, session: HookedSession, answer: Answer) -> HookAnswer:
        if await session.find_cancellation(answer) is not None:
            await self._end(session, *CANCELLED)
        return HookRefusal(answer.text, stops=answer.outcome == "external_halt")

    async def _on_result(
        self, loaded_agent: _LoadedAgent, session: HookedSession, event: HookEvent, outcome: Outcome, text: str
    ) -> HookAnswer:
        """Settle a call, and mask its result. The result of a call that was not admitted is masked too."""
        digest = sha256(bind_arguments(event.tool, event.arguments, event.cwd)).hexdigest()
        flight = session.find_flight(event, digest)
        if flight is not None:
            await session.report(flight, outcome, shorten(session.guard.redact(text), MAX_RESULT_LENGTH))
        masked_response = _mask(event.response, loaded_agent.guard)
        halt = await loaded_agent.guard.find_halt(session.context)
        stop_reason = (
            "" if halt is None else f"{halt.scope} was halted by {halt.by}{': ' + halt.reason if halt.reason else ''}."
        )
        return HookSettlement(None if masked_response == event.response else masked_response, stop_reason)

    def _tool(self, loaded_agent: _LoadedAgent, event: HookEvent) -> HookedTool:
        price = loaded_agent.entry.prices.get(event.tool, 0)
        return HookedTool(
            event.tool,
            event.cwd,
            loaded_agent.protected,
            loaded_agent.agent.policy.allowed_hosts,
            cost=usd_to_micros(price) if price else 0,
        )

    async def _load(self, agent_name: str, program: str) -> _LoadedAgent:
        """Load the agent, and load it again when its file changes."""
        entry = self._folder.find(agent_name)
        if entry.program != program:
            raise UndecidableEvent(f"The hooks of {agent_name} are installed for {entry.program}, not for {program}")
        file_state = _file_state(Path(entry.folder) / AGENT_FILE)
        cached_agent = self._agents.get(agent_name)
        if cached_agent is not None and cached_agent.entry == entry and cached_agent.read == file_state:
            return cached_agent
        folder = Path(entry.folder)
        file = read_agent(folder)
        if file.spec.name != agent_name:
            raise ConfigError(f"{folder / AGENT_FILE} names the agent {file.spec.name!r}; {agent_name!r} is expected")
        resolved_agent = resolve_agent(self._app.fleet, file, folder)
        secrets = read_environment_secrets(self._app.environ)
        assembled_agent = AssembledAgent(**resolved_agent.parts(), tools={}, secrets=secrets)
        protected_paths = list_protected_paths(self._app.settings, file, folder).union(_list_hook_settings(entry))
        guard = make_guard(self._app, resolved_agent.policy, secrets)
        loaded_agent = self._agents[agent_name] = _LoadedAgent(
            entry, assembled_agent, guard, protected_paths, file_state
        )
        # Open sessions continue under the new policy.
        for session in self._sessions.values():
            if session.context.agent == agent_name:
                session.guard, session.runtime.context = guard, assembled_agent.make_context(session.id)
        return loaded_agent

    async def _session(self, loaded_agent: _LoadedAgent, event: HookEvent) -> HookedSession:
        name = _name_session(loaded_agent, event)
        session = self._sessions.find(name)
        if session is None:
            session = await self._sessions.get(name, lambda: self._open(loaded_agent, name, event.cwd))
        else:
            await session.catch_up()
        if session.state.session.ended:
            self._sessions.remove(name)
            raise UndecidableEvent(_explain_unclaimed(await self._host.read_row(name)))
        return session

    async def _open(self, loaded_agent: _LoadedAgent, name: str, cwd: str) -> HookedSession:
        title = DIALECTS[loaded_agent.entry.program].TITLE
        event = SessionStarted(
            session=name, agent=loaded_agent.entry.agent, kind="hooked", started_by=self._app.settings.person
        )
        task_text = f"{title} in {cwd or 'an unknown folder'}"
        policy, guard = loaded_agent.agent.policy, loaded_agent.guard
        lease = await self._host.begin(event, policy, task_text, guard, LEASE_WAIT_TIMEOUT, _REOPENABLE_REASONS)
        if isinstance(lease, SessionRow):
            raise UndecidableEvent(_explain_unclaimed(lease))
        session = HookedSession(self._host, guard, lease, loaded_agent.agent.make_context(name))
        await session.resume()
        return session

    async def _leave(self, session: HookedSession) -> None:
        """End a session, or park it if a decision is pending: the program may resume it after the decision."""
        if not session.state.questions:
            await self._end(session, "COMPLETED", "completed")
            return
        await session.park()
        self._sessions.remove(session.id)

    async def _end(self, session: ExternalSession, state: State, reason: TerminalReason) -> None:
        await session.end(state, reason)
        self._sessions.remove(session.id)

    async def sweep(self) -> None:
        """End sessions that were cancelled, and those that their program left without an end event."""
        for agent, entry in self._folder.agents().items():
            for row in await self._host.list_open(agent, "hooked"):
                await self._sweep_session(await self._load(agent, entry.program), row)

    async def _sweep_session(self, loaded_agent: _LoadedAgent, row: SessionRow) -> None:
        context = loaded_agent.agent.make_context(row.session)
        halt = await loaded_agent.guard.find_halt(context)
        is_cancelled = halt is not None and bool(halt.cancels)
        open_session = self._sessions.find(row.session)
        if open_session is not None and open_session.awaited:
            return
        events = await read_stream(self._host.store, session_stream(row.session))
        if not is_cancelled and self._clock.now() - events[-1].at < IDLE_END:
            return
        session = open_session or await take_over(
            self._host, loaded_agent.guard, row, context, is_cancelled=is_cancelled
        )
        if session is None:
            return
        await session.catch_up()
        if is_cancelled:
            await session.runtime.ensure_running("timer")
            await self._end(session, *CANCELLED)
        elif not await session.has_open_question():
            await session.runtime.ensure_running("timer")
            await self._end(session, "COMPLETED", "idle_timeout")
        elif open_session is None:
            await session.park()


def _list_hook_settings(entry: HookedProgram) -> ProtectedPaths:
    description = f"where the hooks of {entry.agent} are installed"
    return ProtectedPaths(tuple(ProtectedEntry(Path(each.file), description) for each in entry.installed))


def _name_session(loaded_agent: _LoadedAgent, event: HookEvent) -> str:
    if not _ID_PATTERN.fullmatch(event.session) or (event.call and not _ID_PATTERN.fullmatch(event.call)):
        raise UndecidableEvent("The id of the session or the call in the event is not valid")
    return f"{loaded_agent.entry.agent}-{event.session}"


def _explain_unclaimed(row: SessionRow) -> str:
    if row.ended_at is not None:
        end = f"{row.state}: {row.terminal_reason}"
        return f"Session {row.session} has ended ({end}). Start a new one in the program"
    return f"Session {row.session} is owned by another process ({row.owner or 'unknown'})"


def _file_state(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}") from error
    return (status.st_ino, status.st_mtime_ns, status.st_size)


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
