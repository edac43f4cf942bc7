"""Memory: for tests and simulations. It keeps every promise but durability."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.errors import BlobMissing
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, session_of
from halter.core.library import Chunk, Found
from halter.core.money import BudgetRow
from halter.core.ports import Agents, Beat, Change, Lease, Offered, Put, Stored, Ticket
from halter.core.row import Row, RowKey, lock_order
from halter.core.rows import FREE, AgentRow, DecisionRow, HaltRow, RuleRow, SessionRow
from halter.core.task_rows import ItemRow, MemoryRow, NotificationRow, PrecedentRow, TriggerRow
from halter.journal.apply import Changes
from halter.journal.blobs import UNNAMED_FOR, named_blobs, without_blob
from halter.journal.engine import PROJECTIONS, View
from halter.journal.entries import Entry
from halter.journal.memory_leasing import MemoryLeasing
from halter.journal.sqlite import LEASE, SqliteEngine

BY_KEY: Final[Mapping[str, type[Row]]] = MappingProxyType(
    {"session": SessionRow, "decision": DecisionRow, "budget": BudgetRow}
)
WHOLE: Final[Mapping[str, type[Row]]] = MappingProxyType(
    {"all_halts": HaltRow, "all_rules": RuleRow, "all_agents": AgentRow}
)
"""Questions that every step of every session asks, and that are no more than a look at a row or at a short table."""

OF_ONE: Final[Mapping[str, type[Row]]] = MappingProxyType(
    {
        "triggers_of": TriggerRow,
        "trigger": TriggerRow,
        "open_tasks": TriggerRow,
        "items_of": ItemRow,
        "items_open": ItemRow,
        "items_of_session": ItemRow,
        "untold_items": ItemRow,
        "kept_memories": MemoryRow,
        "kept_precedents": PrecedentRow,
        "notifications_due": NotificationRow,
        "notification": NotificationRow,
    }
)
"""Questions about tables that are empty for most agents: then there is nothing to look for."""


class MemoryEngine:
    """Rows and events in dictionaries.

    Questions are answered by a private in-memory SQLite that is brought up to date when somebody asks: so each query
    is written once, in SQL. Only the plainest and most frequent ones are answered by the dictionaries themselves.
    """

    def __init__(self, *, now: Callable[[], int], new_id: Callable[[], str], lease: int = LEASE) -> None:
        self._clock = now
        self._store = new_id()
        self._rows: dict[RowKey, Row] = {}
        self._sessions: dict[str, RowKey] = {}
        self._tables: dict[type[Row], dict[RowKey, None]] = {kind: {} for kind in (*WHOLE.values(), *OF_ONE.values())}
        self._streams: dict[StreamId, list[Stored]] = {}
        self._keys: dict[str, list[tuple[StreamId, int]]] = {}
        self._blobs: dict[Digest, bytes] = {}
        self._put_at: dict[Digest, int] = {}
        self._erased: dict[StreamId, int] = {}
        self._leasing = MemoryLeasing(now, lease)
        self._snapshots: dict[SessionId, tuple[int, bytes]] = {}
        self._mirror: SqliteEngine | None = None
        self._unmirrored = Unmirrored()
        self._mirroring = threading.RLock()
        self._library: SqliteEngine | None = None

    def begin(self, *, wait: bool = True) -> None:
        """Nothing to lock: one thread at a time writes here."""

    def load(self, keys: Sequence[RowKey]) -> Mapping[RowKey, Row | None]:
        """Return rows."""
        rows = self._rows
        return {key: rows.get(key) for key in keys}

    def committed(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, ...]]:
        """Return the events of writes that were committed before under these keys."""
        return {
            key: tuple(self._streams[stream][seq - 1] for stream, seq in self._keys[key])
            for key in keys
            if key in self._keys
        }

    def now(self) -> int:
        """Tell the time of the clock it was given."""
        return self._clock()

    def save(self, changes: Changes) -> None:
        """Put all changes in place; nothing can fail half-way."""
        for digest in named_blobs(changes.events):
            if digest not in self._blobs:
                raise BlobMissing(without_blob(digest, "in memory"))
        with self._mirroring:
            self._apply(changes)

    def _apply(self, changes: Changes) -> None:
        for row in (*changes.inserts, *changes.updates):
            self._place(row)
        for key in changes.deletes:
            del self._rows[key]
            self._tables.get(key[0], {}).pop(key, None)
            self._unmirrored.rows[key] = None
        for event in changes.events:
            self._streams.setdefault(event.stream, []).append(event)
            self._keys.setdefault(event.key, []).append((event.stream, event.seq))
        self._unmirrored.events.extend(changes.events)
        for erase in changes.erasures:
            self._erased[erase.stream] = max(erase.through, self._erased.get(erase.stream, 0))
        for erase in changes.erasures:
            self._erase(erase.stream, erase.through)

    def _put(self, row: Row) -> None:
        with self._mirroring:
            self._place(row)

    def _place(self, row: Row) -> None:
        key = row.key()
        self._rows[key] = row
        self._unmirrored.rows[key] = None
        if key[0] is SessionRow:
            self._sessions[key[1][0]] = key
        elif key[0] in self._tables:
            self._tables[key[0]][key] = None

    def _erase(self, stream: StreamId, through: int) -> None:
        events = self._streams.get(stream, [])
        gone = {event.blob for event in events if event.seq <= through and event.blob} - self._named()
        for digest in gone:
            self._blobs.pop(digest, None)
        self._snapshots.pop(session_of(stream) or SessionId(""), None)
        self._streams[stream] = [
            msgspec.structs.replace(event, body=None, salt=None) if event.seq <= through else event for event in events
        ]
        self._forget_mirror()

    def _named(self) -> set[Digest]:
        """Tell which blobs an event names whose body is not erased, or a session as its definition."""
        by_sessions = {Digest(row.definition) for row in self._session_rows()}
        return by_sessions | {
            event.blob
            for stream, kept in self._streams.items()
            for event in kept[self._erased.get(stream, 0) :]
            if event.blob is not None
        }

    def commit(self) -> None:
        """Nothing to sync."""

    def rollback(self) -> None:
        """Nothing was put in place yet."""

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        """Return events of a stream in order."""
        return self._streams.get(stream, [])[after : after + limit]

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: Agents | None = None,
    ) -> Sequence[Lease]:
        """Take orphaned sessions first, then due ones; or the one that is named."""
        now = self._leasing.renew(worker)
        if only is None:
            rows = [row for row in self._session_rows() if row.format <= program_format]
            return [self._take(row, worker) for row in self._leasing.claimable(rows, agents, worker, now)[:limit]]
        row = self._rows.get((SessionRow, (only.session if isinstance(only, Ticket) else only,)))
        if not isinstance(row, SessionRow) or row.format > program_format:
            return []
        # Also whoever takes none of it uses up the ticket.
        found = [row] if self._leasing.may_have(row, only, worker, now) else []
        return [self._take(row, worker) for row in found[:limit]]

    def offer(self, limit: int, program_format: int, agents: Agents, put: Put) -> Offered:
        """Hand out tickets for what could be claimed and is not on offer already."""
        rows = [row for row in self._session_rows() if row.format <= program_format]
        offered = self._leasing.offer(rows, agents, limit)
        if offered.tickets:
            put(None, offered.tickets)
        self._leasing.offered(offered.tickets)
        return offered

    def _session_rows(self) -> list[SessionRow]:
        rows = (self._rows[key] for key in self._sessions.values())
        return [row for row in rows if isinstance(row, SessionRow)]

    def _take(self, row: SessionRow, worker: WorkerId) -> Lease:
        self._put(msgspec.structs.replace(row, owner=worker, generation=row.generation + 1))
        return Lease(SessionId(row.session), worker, row.generation + 1)

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> Beat:
        """Renew a worker's leases; after a lapse, say which are left."""
        now = self._leasing.renew(worker, about)
        owned = {SessionId(row.session): row for row in self._session_rows() if row.owner == worker}
        self._snapshots.update({session: (now, snapshots[session]) for session in owned if session in snapshots})
        if not self._leasing.lapsed(worker, now):
            return Beat(now)
        return Beat(now, frozenset(Lease(session, worker, row.generation) for session, row in owned.items()))

    def leave(self, worker: WorkerId) -> None:
        """Let a worker's leases be over."""
        self._leasing.leave(worker)

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Answer a named query. Whoever asks may do so in another thread than those that write."""
        with self._mirroring:
            if name in OF_ONE and not self._tables[OF_ONE[name]]:
                return []
            found = self._at_hand(name, params)
            if found is not None:
                return [msgspec.structs.asdict(row) for row in found]
            if name == "owned_by":
                mine = [row for row in self._session_rows() if row.owner == params["worker"]]
                return [{"session": row.session, "generation": row.generation} for row in mine]
            if name == "sessions_of":
                mine = [
                    row for row in self._session_rows() if (row.agent, row.kind) == (params["agent"], params["kind"])
                ]
                mine.sort(key=lambda row: (row.started_at, row.session), reverse=True)
                return [msgspec.structs.asdict(row) for row in mine[: params["limit"]]]
            if name == "snapshot":
                kept = self._snapshots.get(SessionId(params["session"]))
                return [] if kept is None else [{"at": kept[0], "data": kept[1]}]
            if name == "all_workers":
                return self._leasing.workers()
            if name == "next_lapse":
                lapse = self._leasing.next_lapse(self._session_rows(), params["worker"], params["now"])
                return [{"due_at": lapse}]
            if name == "next_due":
                due = (row.due_at for row in self._session_rows() if row.owner == FREE and row.due_at is not None)
                return [{"due_at": min((at for at in due if at > params["now"]), default=None)}]
            if self._mirror is None:
                self._mirror = self._whole_mirror()
            else:
                self._mirror_into(self._mirror, self._unmirrored)
            self._unmirrored = Unmirrored()
            return self._mirror.ask(name, params)

    def _at_hand(self, name: str, params: Mapping[str, Any]) -> Sequence[Row] | None:
        if name in WHOLE:
            return [self._rows[key] for key in sorted(self._tables[WHOLE[name]], key=lock_order)]
        if name not in BY_KEY:
            return None
        kind = BY_KEY[name]
        row = self._rows.get((kind, tuple(params[column] for column in kind.KEY)))
        return [] if row is None else [row]

    def _whole_mirror(self) -> SqliteEngine:
        mirror = SqliteEngine(":memory:", now=self._clock, new_id=lambda: self._store)
        for digest, data in self._blobs.items():
            mirror.put(digest, data)
        events = [event for kept in self._streams.values() for event in kept]
        self._mirror_into(mirror, Unmirrored(dict.fromkeys(self._rows), events))
        return mirror

    def _mirror_into(self, mirror: SqliteEngine, pending: "Unmirrored") -> None:
        mirror.begin()
        before = mirror.load(list(pending.rows))
        changes = Changes([], [], [], pending.events, [])
        for key, old in before.items():
            new = self._rows.get(key)
            if new is not None:
                (changes.inserts if old is None else changes.updates).append(new)
            elif old is not None:
                changes.deletes.append(key)
        mirror.write(changes)
        mirror.commit()

    def put(self, digest: Digest, data: bytes) -> None:
        """Keep a blob."""
        with self._mirroring:
            self._blobs[digest] = data
            self._put_at[digest] = self.now()
            if self._mirror is not None:
                self._mirror.put(digest, data)

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        return self._blobs.get(digest)

    def add_chunks(self, document: str, entries: Sequence[Entry]) -> None:
        """Keep chunks in a SQLite of their own: nothing else finds words as it does."""
        with self._mirroring:
            self._shelf().add_chunks(document, entries)

    def show_document(self, document: str, count: int) -> bool:
        """Let a document be seen if it has so many chunks."""
        with self._mirroring:
            return self._shelf().show_document(document, count)

    def drop_chunks(self, document: str, limit: int) -> int:
        """Let a document be seen no more, and drop some of its chunks."""
        with self._mirroring:
            return self._shelf().drop_chunks(document, limit)

    def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Tell which of these documents are there."""
        with self._mirroring:
            return self._shelf().indexed(documents)

    def chunks(self, document: str) -> Sequence[Chunk]:
        """Return a document's chunks in order."""
        with self._mirroring:
            return self._shelf().chunks(document)

    def search(self, documents: Sequence[str], wanted: Sequence[str], limit: int, *, every: bool) -> Sequence[Found]:
        """Find chunks in which every word occurs, or any."""
        with self._mirroring:
            return self._shelf().search(documents, wanted, limit, every=every)

    def _shelf(self) -> SqliteEngine:
        if self._library is None:
            self._library = SqliteEngine(":memory:", now=self._clock, new_id=lambda: self._store)
        return self._library

    def view(self) -> View:
        """Copy everything; the copy is thrown away with the view."""
        return self._whole_mirror().view()

    def replace(self, make: Callable[[View], Iterable[Row]]) -> None:
        """Make all projections anew; nothing is touched unless that succeeds."""
        view = self.view()
        try:
            rows = list(make(view))
        finally:
            view.close()
        self._rows = {key: row for key, row in self._rows.items() if key[0] not in PROJECTIONS}
        self._sessions = {}
        for table in self._tables.values():
            table.clear()
        for row in rows:
            self._put(row)
        self._forget_mirror()

    def scrub(self) -> bool:
        """Drop blobs that nothing names; nothing else lingers in memory."""
        named, before = self._named(), self.now() - UNNAMED_FOR
        for digest in [digest for digest in self._blobs if digest not in named and self._put_at[digest] < before]:
            del self._blobs[digest]
        self._forget_mirror()
        return True

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """There are no others."""
        return []

    def close(self) -> None:
        """Forget the mirror and the library; the rows go with the engine."""
        self._forget_mirror()
        if self._library is not None:
            self._library.close()
            self._library = None

    def _forget_mirror(self) -> None:
        with self._mirroring:
            if self._mirror is not None:
                self._mirror.close()
            self._mirror = None


class Unmirrored(msgspec.Struct):
    """What the mirror has not seen yet."""

    rows: dict[RowKey, None] = {}
    events: list[Stored] = []
