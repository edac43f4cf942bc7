"""Sessions of other programs' agents: one for each key and client session, in each process that serves them.

The client's own session headers are labels and no identity: they only choose which session of its key a request
belongs to. A session ends when it was idle for a while, or with its process. One that a crashed process left is ended
by any other, after what it holds in doubt was settled at its maximum.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec

from halter.config.resolve import read_model_rates, resolve_agent
from halter.core.agent_spec import Provider
from halter.core.clock import MINUTE, SECOND
from halter.core.errors import LeaseLost, StoreError, StoreUnavailable
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import Lease, Query, read_stream
from halter.core.rows import HaltRow, SessionRow, WorkerRow
from halter.core.spec import ResolvedPolicy
from halter.core.text import to_body
from halter.core.vocabulary import State, TerminalReason
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.halts import read_halts
from halter.guard.ledger import Ledger
from halter.guard.prepare import SessionContext
from halter.proxy.keys import VirtualKey
from halter.redaction.redact import Redact
from halter.runtime.agent import agent_said
from halter.runtime.agent_context import store_policy
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.session import replay

IDLE_LIMIT: Final = 30 * MINUTE
SWEEP_INTERVAL: Final = 15 * SECOND
MAX_SESSIONS_PER_KEY: Final = 200
"""With more labels at once, a key's further requests share one session."""
MAX_RECOVERED: Final = 10_000


class KeyTerms(msgspec.Struct, frozen=True):
    """A key's policy, resolved with that of the fleet, and the providers that the fleet describes."""

    key: VirtualKey
    policy: ResolvedPolicy
    digest: str
    providers: Mapping[str, Provider]


def resolve_key(app: Runtime, key: VirtualKey) -> KeyTerms:
    """Resolve a key as an agent's file that says the same. Raises ConfigError where the fleet allows less."""
    capped = app.fleet.spec.agents.limits.max_cost_usd is not msgspec.UNSET
    file = agent_said(key.agent, {"policy": key.agent_keys(session_capped=capped)}, f"the key {key.name}", {}, {})
    agent = resolve_agent(app.fleet, file, None)
    return KeyTerms(key, agent.policy, agent.policy.digest(), agent.model_settings.providers)


class ProxiedSession:
    """A session at work, and what is under way in it."""

    def __init__(self, terms: KeyTerms, lease: Lease, context: SessionContext, now: int) -> None:
        self.terms = terms
        self.lease = lease
        self._standing = context
        self.used_at = now
        self.under_way = 0
        self.ended = ""
        self._request_count = 0

    @property
    def id(self) -> str:
        return self.lease.session

    def next_request(self) -> str:
        self._request_count += 1
        return f"{self.lease.session}.r{self._request_count}"

    def make_context(self) -> SessionContext:
        """A context of its own for each request: what is worked out for one model is no other's."""
        return msgspec.structs.replace(self._standing)


class ProxiedSessions:
    def __init__(self, app: Runtime, worker: WorkerId, ledger: Ledger, redact: Redact) -> None:
        self._app = app
        self._store = app.patient()
        self._worker = worker
        self._ledger = ledger
        self._redact = redact
        self._sessions: dict[tuple[str, str], asyncio.Future[ProxiedSession]] = {}

    async def get_session(self, terms: KeyTerms, label: str, about: str) -> ProxiedSession:
        """The session of a key and label, begun where there is none."""
        digest = terms.key.digest
        if len(self._sessions) >= MAX_SESSIONS_PER_KEY and (digest, label) not in self._sessions:
            label = label if sum(key == digest for key, _ in self._sessions) < MAX_SESSIONS_PER_KEY else ""
        place = (digest, label)
        found = self._sessions.get(place)
        if found is None:
            found = self._sessions[place] = asyncio.ensure_future(self._begin(terms, about))
            found.add_done_callback(lambda done: self._forget_failed(place, done))
        session = await asyncio.shield(found)
        if session.terms is not terms and session.terms != terms:
            # The key or the fleet's policy has changed: what began under the old one ends under it.
            self._sessions.pop(place, None)
            await self._end(session)
            return await self.get_session(terms, label, about)
        session.used_at = self._app.clock.now()
        return session

    def _forget_failed(self, place: tuple[str, str], done: asyncio.Future[ProxiedSession]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._sessions.pop(place, None)

    def drop(self, session: ProxiedSession) -> None:
        """Forget a session that another process has now."""
        for place, found in list(self._sessions.items()):
            if found.done() and not found.cancelled() and not found.exception() and found.result() is session:
                del self._sessions[place]

    async def _begin(self, terms: KeyTerms, about: str) -> ProxiedSession:
        app = self._app
        session = SessionId(app.ids.make())
        event = SessionStarted(
            session=session,
            agent=terms.policy.name,
            kind="proxied",
            started_by=f"key:{terms.key.name}",
            origin="agent",
            trusted=False,
            definition=await store_policy(self._store, terms.policy, self._redact),
        )
        await self._store.commit(lifecycle.start_session(event, to_body(self._redact(about))))
        lease = await acquire_lease(self._store, app.clock, self._worker, session, SECOND)
        if lease is None:
            raise LeaseLost(f"Session {session} was taken by another process before it began.")
        context = SessionContext(
            session=session,
            agent=terms.policy.name,
            phase=terms.policy.phases[0],
            policy=terms.policy,
            policy_digest=terms.digest,
            tokens_per_hour=terms.key.limits.tokens_per_hour,
            rates=read_model_rates(app.fleet),
        )
        return ProxiedSession(terms, lease, context, app.clock.now())

    async def run(self) -> None:
        """End idle sessions, and those that crashed processes left, until cancelled."""
        while True:
            with suppress(StoreUnavailable):
                await self.recover()
            await self.end_idle(self._app.clock.now() - IDLE_LIMIT)
            await self._app.clock.sleep(SWEEP_INTERVAL)

    async def end_idle(self, before: int) -> None:
        """End the sessions that nothing is under way in, and that were last used before a moment."""
        for place, found in list(self._sessions.items()):
            if not found.done() or found.cancelled() or found.exception() is not None:
                continue
            session = found.result()
            if not session.under_way and session.used_at < before:
                self._sessions.pop(place, None)
                await self._end(session)

    async def close(self) -> None:
        await self.end_idle(self._app.clock.now() + 1)

    async def recover(self) -> int:
        """End the sessions whose process died; what they hold in doubt may have been spent."""
        params = {"agent": "", "state": "RUNNING", "since": 0, "limit": MAX_RECOVERED}
        rows = await self._store.ask(Query("sessions_in_state", SessionRow, params))
        now = self._app.clock.now()
        alive = {each.worker for each in await self._store.ask(Query("all_workers", WorkerRow)) if each.alive(now)}
        left = [row for row in rows if row.kind == "proxied" and row.owner not in alive]
        ended = 0
        for row in left:
            leases = await self._store.claim(self._worker, 1, SessionId(row.session))
            if leases:
                await self._settle_and_end(leases[0])
                ended += 1
        return ended

    async def _settle_and_end(self, lease: Lease) -> None:
        with suppress(LeaseLost):
            state = replay(await read_stream(self._store, lease.stream))
            await self._ledger.settle_in_doubt(lease, tuple(state.in_flight.values()))
            await self._store.commit(lifecycle.end_session(lease, "ERROR", "error"))

    async def _end(self, session: ProxiedSession) -> None:
        if session.ended:
            return
        session.ended = "ended"
        with suppress(StoreError):
            state, reason = await self._find_end(session)
            await self._store.commit(lifecycle.end_session(session.lease, state, reason))

    async def _halt_of(self, session: ProxiedSession) -> HaltRow | None:
        halts = await read_halts(self._store, [session_stream(session.id)])
        return next((row for row in halts.values() if row.halted), None)

    async def _find_end(self, session: ProxiedSession) -> tuple[State, TerminalReason]:
        own = await self._halt_of(session)
        if own is None:
            return "COMPLETED", "completed"
        return ("CANCELLED", "cancelled") if own.cancels else ("HALTED", "external_halt")

    async def end_cancelled(self, session: ProxiedSession) -> None:
        """End a session that a person cancelled. Its label stays with it: no new one begins in its place."""
        own = await self._halt_of(session)
        if own is not None and own.cancels:
            if not session.ended and session.under_way <= 1:
                with suppress(StoreError):
                    await self._store.commit(lifecycle.end_session(session.lease, "CANCELLED", "cancelled"))
            session.ended = f"Session {session.id} was cancelled."
