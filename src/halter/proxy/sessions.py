"""Sessions of other programs' agents: one for each key and client session, in each process of the proxy.

The client's own session headers are labels, not identities: they only select a session of the client's key. A session
ends after an idle time, or with its process. After a crash, any other process settles the session's effects in doubt at
their holds, and ends it.
"""

from contextlib import suppress
from typing import Final

from halter.core.clock import MINUTE, SECOND, read_monotonic
from halter.core.errors import StoreError, StoreUnavailable
from halter.core.events import SessionStarted
from halter.core.ports import Lease, Query
from halter.core.rows import HaltRow, SessionRow
from halter.external.host import MAX_LISTED_SESSIONS, SessionHost
from halter.external.open_sessions import OpenSessions
from halter.external.session import CANCELLED, ExternalSession, take_over
from halter.guard.guard import GuardRuntime
from halter.guard.halts import read_halts
from halter.proxy.key_terms import KeyTerms

IDLE_LIMIT: Final = 30 * MINUTE
SWEEP_INTERVAL: Final = 15 * SECOND
MAX_SESSIONS_PER_KEY: Final = 200
"""Above this number of labels, a key's further requests share one session."""


class ProxiedSession(ExternalSession):
    """A session of a key's client, with the number of its requests in flight."""

    def __init__(self, host: SessionHost, guard: GuardRuntime, lease: Lease, terms: KeyTerms) -> None:
        super().__init__(host, guard, lease, terms.make_context(host.app, lease.session))
        self.terms = terms
        self.under_way = 0
        self._request_count = 0

    def next_request(self) -> str:
        self._request_count += 1
        return f"{self.id}.r{self._request_count}"

    async def close(self) -> None:
        """End the session, for the reason of its halt if a person has stopped it."""
        if self.end_reason:
            return
        self.end_reason = "The session has ended."
        with suppress(StoreError):
            halt = await self._find_own_halt()
            if halt is None:
                await self.end("COMPLETED", "completed")
            else:
                await self.end(*(CANCELLED if halt.cancels else ("HALTED", "external_halt")))

    async def end_if_cancelled(self) -> None:
        """End a session that a person cancelled. It keeps its label, so that no new session replaces it."""
        halt = await self._find_own_halt()
        if halt is None or not halt.cancels:
            return
        if not self.end_reason and self.under_way <= 1:
            with suppress(StoreError):
                await self.end(*CANCELLED)
        self.end_reason = f"Session {self.id} was cancelled."

    async def _find_own_halt(self) -> HaltRow | None:
        halts = await read_halts(self.host.store, [self.lease.stream])
        return next((row for row in halts.values() if row.halted), None)


class ProxiedSessions:
    """The open sessions of one process. `terms` are those of a key without limits, for what other processes left."""

    def __init__(self, host: SessionHost, guard: GuardRuntime, terms: KeyTerms) -> None:
        self._app = host.app
        self._host = host
        self._guard = guard
        self._terms = terms
        self._sessions = OpenSessions[tuple[str, str], ProxiedSession]()

    async def get_session(self, terms: KeyTerms, label: str, task_text: str) -> ProxiedSession:
        """Return the session of a key and a label; start one if there is none."""
        digest, keys = terms.key.digest, self._sessions.keys()
        is_new = (digest, label) not in keys
        if is_new and sum(key == digest for key, _ in keys) >= MAX_SESSIONS_PER_KEY:
            label = ""
        session = await self._sessions.get((digest, label), lambda: self._begin(terms, task_text))
        if session.terms is not terms and session.terms != terms:
            # The key or the fleet's policy has changed: the session with the old policy ends.
            self._sessions.remove((digest, label))
            await session.close()
            return await self.get_session(terms, label, task_text)
        session.used_at = read_monotonic(self._app.clock)
        return session

    def drop(self, lost_session: ProxiedSession) -> None:
        """Forget a session that another process owns now."""
        for key, session in self._sessions.items():
            if session is lost_session:
                self._sessions.remove(key)

    async def _begin(self, terms: KeyTerms, task_text: str) -> ProxiedSession:
        event = SessionStarted(
            session=self._app.ids.make(),
            agent=terms.policy.name,
            kind="proxied",
            started_by=f"key:{terms.key.name}",
            origin="agent",
            trusted=False,
        )
        lease = await self._host.begin_new(event, terms.policy, task_text, self._guard)
        return ProxiedSession(self._host, self._guard, lease, terms)

    async def run(self) -> None:
        """End idle sessions, and those that crashed processes left, until cancelled."""
        while True:
            with suppress(StoreUnavailable):
                await self.recover()
            await self.end_idle(read_monotonic(self._app.clock) - IDLE_LIMIT)
            await self._app.clock.sleep(SWEEP_INTERVAL)

    async def end_idle(self, used_before: int) -> None:
        """End the sessions without a request in flight that were last used before a moment."""
        for key, session in self._sessions.items():
            if not session.under_way and session.used_at < used_before:
                self._sessions.remove(key)
                await session.close()

    async def close(self) -> None:
        await self._sessions.stop_opening()
        await self.end_idle(read_monotonic(self._app.clock) + 1)

    async def recover(self) -> int:
        """End the sessions of dead processes, and settle their effects in doubt. Return their number."""
        params = {"agent": "", "state": "RUNNING", "since": 0, "limit": MAX_LISTED_SESSIONS}
        rows = await self._host.store.ask(Query("sessions_in_state", SessionRow, params))
        ended_count = 0
        for row in await self._host.without_owner([row for row in rows if row.kind == "proxied"]):
            context = self._terms.make_context(self._app, row.session)
            session = await take_over(self._host, self._guard, row, context)
            ended_count += session is not None and await session.sweep()
        return ended_count
