"""What a session in somebody's hands reads and writes: its own stream, its inbox, and what is kept beside them."""

from collections.abc import Sequence

from halter.core.events import AnyEvent, CallStarted, Unknown, WakePosted
from halter.core.ids import inbox_stream, session_stream
from halter.core.ports import Committed, Draft, Lease, Query, Store, Stored, Write, kept, said, whole
from halter.core.rows import SessionRow, Snapshot
from halter.core.task_project import rows_of_event
from halter.core.text import to_body
from halter.guard.gatehouse import Gatehouse
from halter.state import life
from halter.state.session import not_known


class Book:
    """The pages of one session. What is written there has no secrets in it."""

    def __init__(self, store: Store, gatehouse: Gatehouse, lease: Lease) -> None:
        self.lease = lease
        self._store = store
        self._gatehouse = gatehouse

    async def events(self, after: int = 0) -> list[Stored]:
        """Read all that the session did, or did after a place in its stream."""
        return await whole(self._store, session_stream(self.lease.session), after)

    async def commit(self, write: Write) -> Committed:
        """Commit a write of the session, and just before it what was left for whatever would follow."""
        return await self._gatehouse.purse.commit(write)

    async def write(self, key: str, event: AnyEvent, body: bytes | None = None) -> None:
        """Write down something that happened in the session."""
        await self.write_all(key, [(event, body)])

    async def write_all(
        self, key: str, happened: Sequence[tuple[AnyEvent, bytes | None]], *, goes_on: bool = False
    ) -> None:
        """Write down several things that happened at once; where the session `goes_on`, with what follows."""
        drafts = [Draft(event, *await kept(self._store, body)) for event, body in happened]
        rows = [row for event, _ in happened for row in rows_of_event(event)]
        write = Write(session_stream(self.lease.session), key, lambda _: drafts, rows, self.lease)
        if goes_on:
            self._gatehouse.purse.put_off(self.lease, write)
        else:
            await self.commit(write)

    async def post(self, key: str, event: WakePosted, text: str) -> bool:
        """Put something into the session's own inbox; tell whether it wakes it."""
        body, blob = await kept(self._store, to_body(self.redacted(text)))
        committed = await self._store.commit(life.post(self.lease.session, key, event, body, blob, self.lease))
        return any(isinstance(stored.event, WakePosted) and stored.event.wakes for stored in committed.events)

    async def keep(self, snapshot: bytes) -> None:
        """Keep the hot state for whoever takes the session up next, and for screens elsewhere."""
        await self._store.beat(self.lease.worker, {self.lease.session: snapshot})

    async def kept(self) -> bytes:
        """Read the hot state that was kept last; nothing, if there is none."""
        rows = await self._store.ask(Query("snapshot", Snapshot, {"session": self.lease.session}))
        return rows[0].data if rows else b""

    async def inbox(self, after: int) -> Sequence[Stored]:
        """Read what reached the session after a place in its inbox.

        What a newer program put there is not passed over: it would count as read, and nobody would ever have seen it.
        """
        found = await whole(self._store, inbox_stream(self.lease.session), after)
        for stored in found:
            if isinstance(stored.event, Unknown):
                raise not_known(stored)
        return found

    async def said(self, stored: Stored) -> bytes:
        """Read what an event says."""
        return await said(self._store, stored)

    async def _row(self) -> SessionRow:
        (row,) = await self._store.ask(Query("session", SessionRow, {"session": self.lease.session}))
        return row

    async def _arguments(self, events: Sequence[Stored], call: str) -> bytes:
        for stored in events:
            if isinstance(stored.event, CallStarted) and stored.event.call == call:
                return await said(self._store, stored)
        return b""

    def redacted(self, text: str) -> str:
        """Take secrets out of a text."""
        return self._gatehouse.redacted(text)
