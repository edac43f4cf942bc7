"""The in-memory store, for tests and simulations. It keeps every promise except durability."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.errors import BlobMissing
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, parse_session_id
from halter.core.money import BudgetRow
from halter.core.ports import (
    AgentConcurrency,
    Change,
    Chunk,
    EnqueueTickets,
    FoundChunk,
    HeartbeatReply,
    Lease,
    Offer,
    Stored,
    Ticket,
)
from halter.core.project.projection import EraseBodies
from halter.core.rows import (
    NO_OWNER,
    AgentRow,
    DecisionRow,
    FleetPolicyRow,
    HaltRow,
    HoldRow,
    ItemRow,
    MemoryRow,
    NotificationRow,
    PinRow,
    PrecedentRow,
    RuleRow,
    SessionRow,
    TriggerRow,
)
from halter.core.vocabulary import Row, RowKey, lock_order
from halter.journal.apply import Changes, WorkingSet, find_latest_time
from halter.journal.engine import (
    PROJECTIONS,
    UNREFERENCED_BLOB_AGE,
    IndexedChunk,
    StoreView,
    describe_missing_blob,
    list_migrations,
)
from halter.journal.sqlite import LEASE_DURATION, SqliteEngine


class MemoryLeasing:
    """Workers and tickets. It selects from the rows that it is passed, and changes none."""

    def __init__(self, now: Callable[[], int], lease: int) -> None:
        self._now = now
        self._lease = lease
        self._alive: dict[WorkerId, int] = {}
        self._lapsed: dict[WorkerId, int] = {}
        self._about: dict[WorkerId, str] = {}
        self._tickets: dict[str, tuple[int, int]] = {}

    def renew(self, worker: WorkerId, about: str = "") -> int:
        now = self._now()
        if self._alive.get(worker, now) < now:
            self._lapsed[worker] = now
        self._alive[worker] = now + self._lease
        if about:
            self._about[worker] = about
        return now

    def leave(self, worker: WorkerId) -> None:
        if worker in self._alive:
            self._alive[worker] = 0

    def has_lapsed(self, worker: WorkerId, now: int) -> bool:
        """Return True if the leases of a worker expired within the last lease duration."""
        return self._lapsed.get(worker, 0) + self._lease >= now

    def workers(self) -> Sequence[Mapping[str, Any]]:
        alive = sorted(self._alive.items())
        return [
            {"worker": name, "alive_until": alive_until, "about": self._about.get(name, "")}
            for name, alive_until in alive
        ]

    def next_lapse(self, rows: Sequence[SessionRow], worker: str, now: int) -> int | None:
        """Find the time at which the next lease of another worker expires."""
        owners = {row.owner for row in rows} - {NO_OWNER, worker}
        return min(
            (alive_until for name, alive_until in self._alive.items() if name in owners and alive_until >= now),
            default=None,
        )

    def can_claim(self, row: SessionRow, only: SessionId | Ticket, worker: WorkerId, now: int) -> bool:
        """Return True if the worker can claim one session. A ticket is used up in any case."""
        if isinstance(only, Ticket):
            self._tickets.pop(row.session, None)
            if row.generation != only.generation:
                return False
        is_open = row.started_at > 0 and row.ended_at is None
        return is_open and (row.owner == NO_OWNER or self._is_orphaned(row, worker, now))

    def claimable(
        self, rows: Sequence[SessionRow], agents: AgentConcurrency | None, worker: WorkerId, now: int
    ) -> list[SessionRow]:
        """List orphaned, then due sessions. Tasks of agents with a limit come last, up to each limit."""
        candidates = rows if agents is None else [row for row in rows if row.agent in agents and row.unattended]
        due = [row for row in candidates if row.owner == NO_OWNER and row.due_at is not None and row.due_at <= now]
        due.sort(key=lambda row: (row.due_at, row.session))
        free_slots = Counter({agent: limit for agent, limit in (agents or {}).items() if limit is not None})
        limited_sessions = {row.session for row in due if row.agent in free_slots and row.kind != "autonomous"}
        awake_rows = (
            row for row in rows if row.kind != "autonomous" and (row.owner != NO_OWNER or self.is_offered(row))
        )
        free_slots.subtract(row.agent for row in awake_rows if row.agent in free_slots)
        sessions = [row for row in candidates if self._is_orphaned(row, worker, now)]
        sessions += [row for row in due if row.session not in limited_sessions]
        for row in due:
            if row.session in limited_sessions and free_slots[row.agent] > 0 and not self.is_offered(row):
                free_slots[row.agent] -= 1
                sessions.append(row)
        return sessions

    def offer(self, rows: Sequence[SessionRow], agents: AgentConcurrency, limit: int) -> Offer:
        now = self._now()
        self._tickets = {session: ticket for session, ticket in self._tickets.items() if ticket[1] >= now - self._lease}
        remaining = max(0, limit - len(self._tickets))
        sessions = [row for row in self.claimable(rows, agents, WorkerId(""), now) if not self.is_offered(row)][
            :remaining
        ]
        tickets = tuple(Ticket(SessionId(row.session), row.agent, row.generation) for row in sessions)
        return Offer(tickets, has_more=len(tickets) == remaining)

    def add_offers(self, tickets: Sequence[Ticket]) -> None:
        self._tickets |= {ticket.session: (ticket.generation, self._now()) for ticket in tickets}

    def is_offered(self, row: SessionRow) -> bool:
        return self._tickets.get(row.session, (None, 0))[0] == row.generation

    def _is_orphaned(self, row: SessionRow, worker: WorkerId, now: int) -> bool:
        return row.owner not in (NO_OWNER, worker) and self._alive.get(WorkerId(row.owner), now) < now


QUERIES_BY_KEY: Final[Mapping[str, type[Row]]] = MappingProxyType(
    {"session": SessionRow, "decision": DecisionRow, "hold": HoldRow, "budget": BudgetRow}
)
WHOLE_TABLE_QUERIES: Final[Mapping[str, type[Row]]] = MappingProxyType(
    {"all_agents": AgentRow, "all_fleet_policy": FleetPolicyRow, "all_pins": PinRow}
)
"""Frequent queries of one row or a short table, answered from the dictionaries."""

SPARSE_TABLE_QUERIES: Final[Mapping[str, tuple[type[Row], ...]]] = MappingProxyType(
    {
        "triggers_of": (TriggerRow,),
        "trigger": (TriggerRow,),
        "open_tasks": (TriggerRow,),
        "items_of": (ItemRow,),
        "items_open": (ItemRow,),
        "items_of_session": (ItemRow,),
        "untold_items": (ItemRow,),
        "kept_context": (MemoryRow, PrecedentRow),
        "notifications_due": (NotificationRow,),
        "notification": (NotificationRow,),
        "questions_of": (DecisionRow,),
        "expired_holds": (DecisionRow,),
        "halts_of": (HaltRow,),
        "rules_of": (RuleRow,),
    }
)
"""Queries of tables that are empty for most agents, and the tables: while these are empty, so is the result."""


class MemoryEngine:
    """Rows and events in dictionaries.

    Queries run on an in-memory SQLite mirror that is updated on demand, so that each query is written once, in SQL.
    Only the most frequent ones are answered from the dictionaries.
    """

    answer_questions = None

    def __init__(self, *, now: Callable[[], int], new_id: Callable[[], str], lease: int = LEASE_DURATION) -> None:
        self._clock = now
        self._store = new_id()
        self._rows: dict[RowKey, Row] = {}
        self._tables: dict[type[Row], dict[RowKey, None]] = {
            kind: {} for kind in (SessionRow, *WHOLE_TABLE_QUERIES.values(), *chain(*SPARSE_TABLE_QUERIES.values()))
        }
        self._latest = 0
        self._streams: defaultdict[StreamId, list[Stored]] = defaultdict(list)
        # Most writes have one event, which is stored without a tuple to save memory.
        self._by_write: dict[str, Stored | tuple[Stored, ...]] = {}
        self._blobs: dict[Digest, bytes] = {}
        self._saved_at_by_digest: dict[Digest, int] = {}
        self._erased: dict[StreamId, int] = {}
        self._leasing = MemoryLeasing(now, lease)
        self._snapshots: dict[SessionId, tuple[int, bytes]] = {}
        self._mirror: SqliteEngine | None = None
        self._unmirrored = MirrorBacklog()
        self._mirroring = threading.RLock()
        self._library: SqliteEngine | None = None

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        now, events_by_write, find_row = self._clock(), self._by_write, self._rows.get
        # Loops instead of comprehensions, which would add a frame to every write.
        loaded: dict[RowKey, Row | None] = {}
        for key in keys:
            loaded[key] = find_row(key)
        earlier: dict[str, tuple[Stored, ...]] = {}
        for write_key in writes:
            if write_key in events_by_write:
                earlier[write_key] = self._find_written(write_key)
        now = now if self._latest <= now else find_latest_time(loaded, now)
        return WorkingSet(loaded=loaded, now=now, earlier_by_key=earlier)

    def save(self, changes: WorkingSet) -> None:
        """Apply all changes. Blobs are checked first; after that, nothing can fail."""
        inserts, deletes = changes.inserts, changes.deletes
        rows, tables = self._rows, self._tables
        for digest in changes.blobs:
            if digest not in self._blobs:
                raise BlobMissing(describe_missing_blob(digest, "in memory"))
        with self._mirroring:
            rows |= changes.updates
            if inserts:
                rows |= inserts
                for key in inserts:
                    if key[0] in tables:
                        tables[key[0]][key] = None
            if deletes:
                for key in deletes:
                    del rows[key]
                    if key[0] in tables:
                        tables[key[0]].pop(key, None)
            streams, by_write = self._streams, self._by_write
            for event in changes.events:
                streams[event.stream].append(event)
            for key, events in changes.earlier_by_key.items():
                by_write[key] = events[0] if len(events) == 1 else events
            self._latest = max(self._latest, changes.now)
            if self._mirror is not None:
                self._unmirrored.add(changes)
            if changes.erasures:
                self._erase_all(changes.erasures)

    def _find_written(self, key: str) -> tuple[Stored, ...]:
        events = self._by_write[key]
        return events if isinstance(events, tuple) else (events,)

    def _save_row(self, row: Row) -> None:
        with self._mirroring:
            self._index_row(row)

    def _index_row(self, row: Row) -> None:
        key = row.key()
        self._rows[key] = row
        if self._mirror is not None:
            self._unmirrored.rows[key] = None
        if key[0] in self._tables:
            self._tables[key[0]][key] = None

    def _erase_all(self, erasures: Sequence[EraseBodies]) -> None:
        for erase in erasures:
            self._erased[erase.stream] = max(erase.through, self._erased.get(erase.stream, 0))
        for erase in erasures:
            self._erase(erase.stream, erase.through)

    def _erase(self, stream: StreamId, through: int) -> None:
        events = self._streams.get(stream, [])
        unreferenced_blobs = {
            event.blob for event in events if event.seq <= through and event.blob
        } - self._list_named_blobs()
        for digest in unreferenced_blobs:
            self._blobs.pop(digest, None)
        self._snapshots.pop(parse_session_id(stream) or SessionId(""), None)
        self._streams[stream] = [
            msgspec.structs.replace(event, body=None, salt=None) if event.seq <= through else event for event in events
        ]
        for key in {event.key for event in events[:through]}:
            write_events = self._find_written(key)
            self._by_write[key] = tuple([self._streams[event.stream][event.seq - 1] for event in write_events])
        self._forget_mirror()

    def _list_named_blobs(self) -> set[Digest]:
        """List the blobs that unerased events and the definitions of sessions refer to."""
        definitions = {Digest(row.definition) for row in self._session_rows()}
        return definitions | {
            event.blob
            for stream, events in self._streams.items()
            for event in events[self._erased.get(stream, 0) :]
            if event.blob is not None
        }

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        return self._streams.get(stream, [])[after : after + limit]

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        now = self._leasing.renew(worker)
        if only is None:
            rows = [row for row in self._session_rows() if row.format <= program_format]
            return [
                self._assign_lease(row, worker) for row in self._leasing.claimable(rows, agents, worker, now)[:limit]
            ]
        row = self._rows.get((SessionRow, only.session if isinstance(only, Ticket) else only))
        if not isinstance(row, SessionRow) or row.format > program_format:
            return []
        # The ticket is used up even if nothing is claimed.
        sessions = [row] if self._leasing.can_claim(row, only, worker, now) else []
        return [self._assign_lease(row, worker) for row in sessions[:limit]]

    def offer(self, limit: int, program_format: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        rows = [row for row in self._session_rows() if row.format <= program_format]
        result = self._leasing.offer(rows, agents, limit)
        if result.tickets:
            enqueue(None, result.tickets)
        self._leasing.add_offers(result.tickets)
        return result

    def _session_rows(self) -> list[SessionRow]:
        rows = (self._rows[key] for key in self._tables[SessionRow])
        return [row for row in rows if isinstance(row, SessionRow)]

    def _assign_lease(self, row: SessionRow, worker: WorkerId) -> Lease:
        self._save_row(msgspec.structs.replace(row, owner=worker, generation=row.generation + 1))
        return Lease(SessionId(row.session), worker, row.generation + 1)

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> HeartbeatReply:
        now = self._leasing.renew(worker, about)
        owned_rows = {SessionId(row.session): row for row in self._session_rows() if row.owner == worker}
        self._snapshots.update({session: (now, snapshots[session]) for session in owned_rows if session in snapshots})
        if not self._leasing.has_lapsed(worker, now):
            return HeartbeatReply(now)
        return HeartbeatReply(
            now, frozenset(Lease(session, worker, row.generation) for session, row in owned_rows.items())
        )

    def leave(self, worker: WorkerId) -> None:
        self._leasing.leave(worker)

    def release(self, lease: Lease) -> None:
        row = self._rows.get((SessionRow, lease.session))
        if isinstance(row, SessionRow) and (row.owner, row.generation) == (lease.worker, lease.generation):
            self._save_row(msgspec.structs.replace(row, owner=NO_OWNER))

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query. Can be called from any thread."""
        with self._mirroring:
            if name in SPARSE_TABLE_QUERIES and not any(map(self._tables.get, SPARSE_TABLE_QUERIES[name])):
                return []
            answer = self._answer_from_memory(name, params)
            if answer is not None:
                return [msgspec.structs.asdict(row) for row in answer]
            if name == "owned_by":
                session_rows = [row for row in self._session_rows() if row.owner == params["worker"]]
                return [{"session": row.session, "generation": row.generation} for row in session_rows]
            if name == "sessions_of":
                session_rows = [
                    row for row in self._session_rows() if (row.agent, row.kind) == (params["agent"], params["kind"])
                ]
                session_rows.sort(key=lambda row: (row.started_at, row.session), reverse=True)
                return [msgspec.structs.asdict(row) for row in session_rows[: params["limit"]]]
            if name == "snapshot":
                snapshot = self._snapshots.get(SessionId(params["session"]))
                return [] if snapshot is None else [{"at": snapshot[0], "data": snapshot[1]}]
            if name == "all_workers":
                return self._leasing.workers()
            if name == "meta":
                raw = {"schema": str(list_migrations("sqlite")[-1][0]), "store": self._store}
                return [{"name": key, "value": value} for key, value in raw.items()]
            if name == "next_look":
                rows, now = self._session_rows(), params["now"]
                due_times = (row.due_at for row in rows if row.owner == NO_OWNER and row.due_at is not None)
                lapse = self._leasing.next_lapse(rows, params["worker"], now)
                return [{"due_at": min((at for at in due_times if at > now), default=None), "lapses_at": lapse}]
            if self._mirror is None:
                self._mirror = self._get_full_mirror()
            else:
                self._mirror_into(self._mirror, self._unmirrored)
            self._unmirrored = MirrorBacklog()
            return self._mirror.ask(name, params)

    def _answer_from_memory(self, name: str, params: Mapping[str, Any]) -> Sequence[Row] | None:
        if name in WHOLE_TABLE_QUERIES:
            return [self._rows[key] for key in sorted(self._tables[WHOLE_TABLE_QUERIES[name]], key=lock_order)]
        if name == "halts_of":
            rows = [self._rows.get((HaltRow, scope)) for scope in sorted(msgspec.json.decode(params["scopes"]))]
            return [row for row in rows if row is not None]
        if name not in QUERIES_BY_KEY:
            return None
        kind = QUERIES_BY_KEY[name]
        row = self._rows.get((kind, *(params[column] for column in kind.KEY)))
        return [] if row is None else [row]

    def _get_full_mirror(self) -> SqliteEngine:
        mirror = SqliteEngine(":memory:", now=self._clock, new_id=lambda: self._store)
        for digest, data in self._blobs.items():
            mirror.put(digest, data)
        events = [event for stream_events in self._streams.values() for event in stream_events]
        self._mirror_into(mirror, MirrorBacklog(dict.fromkeys(self._rows), events))
        return mirror

    def _mirror_into(self, mirror: SqliteEngine, pending: "MirrorBacklog") -> None:
        changes = Changes(events=pending.events)
        for key, old_row in mirror.begin(list(pending.rows)).loaded.items():
            new_row = self._rows.get(key)
            if new_row is not None:
                (changes.inserts if old_row is None else changes.updates)[key] = new_row
            elif old_row is not None:
                changes.deletes[key] = None
        mirror.write(changes)
        mirror.commit()

    def put(self, digest: Digest, data: bytes) -> None:
        with self._mirroring:
            self._blobs[digest] = data
            self._saved_at_by_digest[digest] = self._clock()
            if self._mirror is not None:
                self._mirror.put(digest, data)

    def get(self, digest: Digest) -> bytes | None:
        return self._blobs.get(digest)

    def add_chunks(self, document: str, entries: Sequence[IndexedChunk]) -> None:
        """Add chunks to a separate SQLite database, for its full-text search."""
        with self._mirroring:
            self._get_text_index().add_chunks(document, entries)

    def show_document(self, document: str, count: int) -> bool:
        with self._mirroring:
            return self._get_text_index().show_document(document, count)

    def drop_chunks(self, document: str, limit: int) -> int:
        with self._mirroring:
            return self._get_text_index().drop_chunks(document, limit)

    def find_indexed(self, documents: Sequence[str]) -> frozenset[str]:
        with self._mirroring:
            return self._get_text_index().find_indexed(documents)

    def chunks(self, document: str) -> Sequence[Chunk]:
        with self._mirroring:
            return self._get_text_index().chunks(document)

    def search(
        self, documents: Sequence[str], names: Sequence[str], limit: int, *, match_all: bool
    ) -> Sequence[FoundChunk]:
        with self._mirroring:
            return self._get_text_index().search(documents, names, limit, match_all=match_all)

    def _get_text_index(self) -> SqliteEngine:
        if self._library is None:
            self._library = SqliteEngine(":memory:", now=self._clock, new_id=lambda: self._store)
        return self._library

    def view(self) -> StoreView:
        """Copy everything. The copy is discarded when the view is closed."""
        return self._get_full_mirror().view()

    def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        """Replace all projections. On failure, nothing changes."""
        view = self.view()
        try:
            rows = list(make(view))
        finally:
            view.close()
        self._rows = {key: row for key, row in self._rows.items() if key[0] not in PROJECTIONS}
        for table in self._tables.values():
            table.clear()
        for row in rows:
            self._save_row(row)
        self._forget_mirror()

    def scrub(self) -> bool:
        referenced_blobs, cutoff = self._list_named_blobs(), self._clock() - UNREFERENCED_BLOB_AGE
        for digest in [
            digest
            for digest in self._blobs
            if digest not in referenced_blobs and self._saved_at_by_digest[digest] < cutoff
        ]:
            del self._blobs[digest]
        self._forget_mirror()
        return True

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        return []

    def close(self) -> None:
        self._forget_mirror()
        if self._library is not None:
            self._library.close()
            self._library = None

    def _forget_mirror(self) -> None:
        with self._mirroring:
            if self._mirror is not None:
                self._mirror.close()
            self._mirror, self._unmirrored = None, MirrorBacklog()


class MirrorBacklog(msgspec.Struct):
    """Changes that the mirror lacks: the keys of rows (values are ignored), and events."""

    rows: dict[RowKey, Row | None] = {}
    events: list[Stored] = []

    def add(self, changes: Changes) -> None:
        for keys in (changes.inserts, changes.updates, changes.deletes):
            self.rows.update(keys)
        self.events += changes.events
