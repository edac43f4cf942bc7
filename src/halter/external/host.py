"""The process that runs external sessions: it begins them, and claims those that another process left."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Lease, Query, offload_body
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.text import encode_body
from halter.core.vocabulary import SessionKind
from halter.dispatch.heartbeat import acquire_lease
from halter.dispatch.workers import WorkerRow
from halter.guard.guard import GuardRuntime
from halter.guard.halts import run_shielded
from halter.journal.store import JournalStore
from halter.policy.evaluation import ResolvedPolicy
from halter.runtime.agent_runtime import store_policy
from halter.runtime.runtime import Runtime
from halter.state import lifecycle

MAX_LISTED_SESSIONS: Final = 10_000
NO_REASONS: Final = frozenset[str]()


class SessionHost(msgspec.Struct, frozen=True):
    """A process with an open store. The leases of its sessions belong to its worker id."""

    app: Runtime
    worker: WorkerId

    @property
    def store(self) -> JournalStore:
        """The store, with retries while it is unavailable."""
        return self.app.patient()

    async def begin_new(self, event: SessionStarted, policy: ResolvedPolicy, task: str, guard: GuardRuntime) -> Lease:
        """Record that a session with a new id starts, and own it from the same commit on.

        The worker must have sent its first heartbeat: see `lifecycle.start_session`.
        """
        lease = Lease(SessionId(event.session), self.worker, 1)
        try:
            await self._record_start(event, policy, task, guard, lease)
        except asyncio.CancelledError:
            await run_shielded(self.store.release(lease))
            raise
        return lease

    async def begin(
        self,
        event: SessionStarted,
        policy: ResolvedPolicy,
        task: str,
        guard: GuardRuntime,
        max_wait: int,
        reopened: Collection[str] = NO_REASONS,
    ) -> Lease | SessionRow:
        """Record that a session starts, and claim it. A session that has started keeps its first start.

        It waits for the lease of an owner that may have died. A session that ended for a reason in `reopened` is opened
        again. Returns the session's row if it has ended, or if another process runs it.
        """
        await self._record_start(event, policy, task, guard)
        row = await self.read_row(event.session)
        if row.ended_at is not None and row.terminal_reason in reopened:
            row = await self.reopen(row)
        is_over = row.ended_at is not None or explain_newer_format(row)
        lease = await self.claim(event.session, 0 if is_over else max_wait)
        return lease or await self.read_row(event.session)

    async def _record_start(
        self, event: SessionStarted, policy: ResolvedPolicy, task: str, guard: GuardRuntime, owner: Lease | None = None
    ) -> None:
        definition = await store_policy(self.store, policy, guard.redact)
        body, blob = await offload_body(self.store, encode_body(guard.redact(task)))
        await self.app.adopt_policy()
        start = msgspec.structs.replace(event, definition=definition)
        await self.store.commit(lifecycle.start_session(start, body, blob, owner=owner))

    async def reopen(self, row: SessionRow) -> SessionRow:
        """Reopen a session that has ended. A person's cancellation stays."""
        key, person = f"{row.session}/{row.generation}/reopened", self.app.settings.person
        await self.store.commit(lifecycle.reopen_session(row.session, key, person))
        return await self.read_row(row.session)

    async def claim(self, session: str, max_wait: int = 0) -> Lease | None:
        """Claim a session, and wait for the lease of an owner that may have died."""
        return await acquire_lease(self.store, self.app.clock, self.worker, SessionId(session), max_wait)

    async def find_row(self, session: str) -> SessionRow | None:
        rows = await self.store.ask(Query("session", SessionRow, {"session": session}))
        return next(iter(rows), None)

    async def read_row(self, session: str) -> SessionRow:
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": session}))
        return row

    async def list_open(self, agent: str, kind: SessionKind) -> Sequence[SessionRow]:
        """List an agent's sessions of a kind that have not ended."""
        params = {"agent": agent, "kind": kind, "limit": MAX_LISTED_SESSIONS}
        rows = await self.store.ask(Query("sessions_of", SessionRow, params))
        return [row for row in rows if row.ended_at is None]

    async def without_owner(self, rows: Sequence[SessionRow]) -> Sequence[SessionRow]:
        """Keep the sessions that no living process runs."""
        now = self.app.clock.now()
        workers = await self.store.ask(Query("all_workers", WorkerRow))
        alive = {each.worker for each in workers if each.alive(now)}
        return [row for row in rows if row.owner not in alive]
