"""The sessions of hooked programs: each session of a program is one of Halter, under a name made of its own id."""

import re
from collections.abc import Sequence
from typing import Final

from halter.core.clock import HOUR
from halter.core.events import SessionStarted
from halter.core.ids import session_stream
from halter.core.ports import Lease, read_stream
from halter.core.rows import SessionRow
from halter.core.vocabulary import State, TerminalReason
from halter.external.host import SessionHost
from halter.external.open_sessions import OpenSessions
from halter.external.session import CANCELLED, ExternalSession, take_over
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.hooks.agents import HookedAgent
from halter.hooks.protocol import DIALECTS, HookEvent, UndecidableEvent
from halter.runtime.agent_runtime import LEASE_WAIT_TIMEOUT
from halter.state.session import InFlight

IDLE_END: Final = 24 * HOUR
"""A session without a pending decision ends after this long without an event."""
_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9_.:-]{1,120}")
_REOPENABLE_REASONS: Final = frozenset({"completed", "idle_timeout"})


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


class HookedSessions:
    """The sessions that one process has open for all programs that are hooked to its store."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host
        self._sessions = OpenSessions[str, HookedSession]()

    async def get(self, agent: HookedAgent, event: HookEvent) -> HookedSession:
        """Return the session of an event; the first event opens it. Raises UndecidableEvent if it has ended."""
        name = _name_session(agent, event)
        session = self._sessions.find(name)
        if session is None:
            session = await self._sessions.get(name, lambda: self._open(agent, name, event.cwd))
        else:
            await session.catch_up()
        if session.state.session.ended:
            self._sessions.remove(name)
            raise _explain_unclaimed(await self._host.read_row(name))
        return session

    async def _open(self, agent: HookedAgent, name: str, cwd: str) -> HookedSession:
        program, person = DIALECTS[agent.entry.program].TITLE, self._host.app.settings.person
        event = SessionStarted(session=name, agent=agent.entry.agent, kind="hooked", started_by=person)
        task = f"{program} in {cwd or 'an unknown folder'}"
        lease = await self._host.begin(event, agent.policy, task, agent.guard, LEASE_WAIT_TIMEOUT, _REOPENABLE_REASONS)
        if isinstance(lease, SessionRow):
            raise _explain_unclaimed(lease)
        session = HookedSession(self._host, agent.guard, lease, agent.make_context(name))
        await session.resume()
        return session

    def forget(self, agent: HookedAgent, event: HookEvent) -> None:
        """Forget the session of an event, because another process took it."""
        self._sessions.remove(_name_session(agent, event))

    def adopt_policy(self, agent: HookedAgent) -> None:
        """Continue the open sessions of an agent under its new policy."""
        for session in self._sessions.values():
            if session.context.agent == agent.entry.agent:
                session.guard, session.runtime.context = agent.guard, agent.make_context(session.id)

    async def leave(self, session: HookedSession) -> None:
        """End a session, or park it if a decision is pending: the program may resume it after the decision."""
        if not session.state.questions:
            await self.end(session, "COMPLETED", "completed")
            return
        await session.park()
        self._sessions.remove(session.id)

    async def end(self, session: ExternalSession, state: State, reason: TerminalReason) -> None:
        await session.end(state, reason)
        self._sessions.remove(session.id)

    async def list_open(self, agent: str) -> Sequence[SessionRow]:
        """List an agent's sessions that have not ended, of all processes."""
        return await self._host.list_open(agent, "hooked")

    async def sweep(self, agent: HookedAgent, row: SessionRow) -> None:
        """End a session that was cancelled, or that its program left without an end event."""
        context, now = agent.make_context(row.session), self._host.app.clock.now()
        halt = await agent.guard.find_halt(context)
        is_cancelled = halt is not None and bool(halt.cancels)
        open_session = self._sessions.find(row.session)
        if open_session is not None and open_session.awaited:
            return
        events = await read_stream(self._host.store, session_stream(row.session))
        if not is_cancelled and now - events[-1].at < IDLE_END:
            return
        session = open_session or await take_over(self._host, agent.guard, row, context, is_cancelled=is_cancelled)
        if session is None:
            return
        await session.catch_up()
        if is_cancelled:
            await session.runtime.ensure_running("timer")
            await self.end(session, *CANCELLED)
        elif not await session.has_open_question():
            await session.runtime.ensure_running("timer")
            await self.end(session, "COMPLETED", "idle_timeout")
        elif open_session is None:
            await session.park()


def _name_session(agent: HookedAgent, event: HookEvent) -> str:
    if not _ID_PATTERN.fullmatch(event.session) or (event.call and not _ID_PATTERN.fullmatch(event.call)):
        raise UndecidableEvent("The id of the session or the call in the event is not valid")
    return f"{agent.entry.agent}-{event.session}"


def _explain_unclaimed(row: SessionRow) -> UndecidableEvent:
    if row.ended_at is not None:
        end = f"{row.state}: {row.terminal_reason}"
        return UndecidableEvent(f"Session {row.session} has ended ({end}). Start a new one in the program")
    return UndecidableEvent(f"Session {row.session} is owned by another process ({row.owner or 'unknown'})")
