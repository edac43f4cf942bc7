"""The stream and the inbox of one session: what its owner reads and writes."""

from collections.abc import Callable, Sequence

from halter.core.clock import Clock
from halter.core.events import AnyEvent, CallStarted, Unknown, WakePosted
from halter.core.ids import inbox_stream
from halter.core.ports import Committed, Draft, Lease, Query, Store, Stored, Write, offload_body, read_body, read_stream
from halter.core.project import rows_of_event
from halter.core.rows import SavedHotState, SessionRow, StreamRow
from halter.core.text import encode_body
from halter.core.vocabulary import RowKey
from halter.guard.guard import GuardRuntime
from halter.guard.halts import run_shielded
from halter.state import lifecycle
from halter.state.session import make_unknown_event_error


class SessionJournal:
    """Reads and writes the events of a session under its lease. Texts are redacted before they are written."""

    __slots__ = ("_clock", "_guard", "_head", "lease", "redact", "store")

    def __init__(self, store: Store, clock: Clock, guard: GuardRuntime, lease: Lease) -> None:
        self.store = store
        self._clock = clock
        self._guard = guard
        self.lease = lease
        self.redact = guard.redact
        self._head = 0

    async def events(self, after_seq: int = 0) -> list[Stored]:
        return await read_stream(self.store, self.lease.stream, after_seq)

    async def read_later(self) -> Callable[[], Sequence[Stored]]:
        """Return a function that reads all events up to now, or up to the end of an ended session."""
        stream = self.lease.stream
        head = self._head or (await self.store.ask(Query("head", StreamRow, {"stream": stream})))[0].head
        return await self.store.read_later(stream, head)

    async def read_body(self, stored: Stored) -> bytes:
        return await read_body(self.store, stored)

    async def inbox(self, after_seq: int) -> Sequence[Stored]:
        """Read the inbox after a position.

        Raises an error for an event of a newer version: a skipped event would count as read without being handled.
        """
        events = await read_stream(self.store, inbox_stream(self.lease.session), after_seq)
        for stored in events:
            if isinstance(stored.event, Unknown):
                raise make_unknown_event_error(stored)
        return events

    async def write(self, key: str, event: AnyEvent, body: bytes | None = None) -> None:
        await self.write_all(key, [(event, body)])

    async def write_all(
        self, key: str, entries: Sequence[tuple[AnyEvent, bytes | None]], *, is_deferred: bool = False
    ) -> None:
        """Record several events in one write, which `is_deferred` defers to the session's next commit."""
        drafts: list[Draft] = []
        rows: list[RowKey] = []
        for event, body in entries:
            drafts.append(Draft(event, *await offload_body(self.store, body)))
            rows += rows_of_event(event)
        write = Write(self.lease.stream, key, lambda _: drafts, rows, self.lease)
        if is_deferred:
            self._guard.ledger.defer(self.lease, write)
        else:
            await self.commit(write)

    async def commit(self, write: Write) -> Committed:
        """Commit a write of the session, preceded by its deferred writes."""
        return await self._guard.ledger.commit(write)

    def defer(self, write: Write) -> None:
        """Defer a write to the session's next commit."""
        self._guard.ledger.defer(self.lease, write)

    async def flush_deferred(self) -> None:
        """Commit deferred writes, even if the caller is cancelled."""
        if self._guard.ledger.has_deferred(self.lease):
            await run_shielded(self._guard.ledger.flush_deferred(self.lease))

    async def release(self) -> None:
        """Release the session's lease, even if the caller is cancelled."""
        await run_shielded(self.store.release(self.lease))

    async def post(self, key: str, event: WakePosted, text: str) -> bool:
        """Post to the session's own inbox; return whether the post wakes it."""
        body, blob = await offload_body(self.store, encode_body(self.redact(text)))
        committed = await self.store.commit(lifecycle.post_wake(self.lease.session, key, event, body, blob, self.lease))
        return any(isinstance(stored.event, WakePosted) and stored.event.wakes for stored in committed.events)

    async def save_snapshot(self, snapshot: bytes) -> None:
        """Save the hot state for the next owner and for dashboards on other machines."""
        await self.store.beat(self.lease.worker, {self.lease.session: snapshot})

    async def load_snapshot(self) -> bytes:
        rows = await self.store.ask(Query("snapshot", SavedHotState, {"session": self.lease.session}))
        return rows[0].data if rows else b""

    async def _row(self) -> SessionRow:
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": self.lease.session}))
        return row

    async def _arguments(self, events: Sequence[Stored], call: str) -> bytes:
        for stored in events:
            if isinstance(stored.event, CallStarted) and stored.event.call == call:
                return await read_body(self.store, stored)
        return b""
