"""The SQLite store: one file, WAL, synchronous=FULL. The default."""

import math
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter, ne
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from halter.core.clock import SECOND
from halter.core.codec import decode
from halter.core.errors import BlobMissing, RowRefused, StoreUnusable
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
from halter.core.rows import HoldRow, SessionRow, StreamRow
from halter.core.vocabulary import Row, RowKey
from halter.journal.apply import Changes, WorkingSet, find_latest_time
from halter.journal.engine import (
    PROJECTIONS,
    UNREFERENCED_BLOB_AGE,
    Busy,
    IndexedChunk,
    Leasing,
    RowCache,
    StoreView,
    describe_missing_blob,
    list_migrations,
    load_queries,
    make_insert,
    make_row_statements,
    make_update,
    read_meta_values,
    read_schema_version,
    read_store_id,
    split_statements,
    to_fts5_query,
)
from halter.journal.sqlite_connection import (
    DATA_VERSION,
    LOCK_SECONDS,
    SQLITE_ERRORS,
    WAL_POLL_SECONDS,
    ForkSafeConnection,
    SqliteErrorScope,
    is_read_only,
    list_tables,
    make_unwritable_error,
    open_connection,
    open_read_only,
    translate_sqlite_error,
)
from halter.journal.sqlite_view import SqliteView, read_sqlite_blob, run_sqlite_query, select_by_keys

MIN_SQLITE_VERSION: Final = (3, 37, 0)
TRUNCATE_ATTEMPTS: Final = 50
"""Attempts to truncate the log while others read it, over a tenth of a second, since this holds the write lock."""

LEASE_DURATION: Final = 15 * SECOND

WITHOUT_INDEX: Final = frozenset((StreamRow, BudgetRow))
"""Rows that every step changes, in columns without an index: comparing them would take longer than writing them."""


class SqliteEngine:
    """Rows and events in one SQLite file, shared by any number of processes on one machine."""

    answer_questions = None

    def __init__(
        self,
        path: str,
        *,
        now: Callable[[], int],
        new_id: Callable[[], str],
        lease: int = LEASE_DURATION,
        lock_seconds: float = LOCK_SECONDS,
        connect: Callable[[str], ForkSafeConnection] = open_connection,
    ) -> None:
        self._path = path
        self._in_words = SqliteErrorScope(path)
        self._read_only = is_read_only(path)
        self._connect = open_read_only if self._read_only else connect
        self._clock = now
        self._lock_seconds = lock_seconds
        self._lease = lease
        self._sql = load_queries("sqlite/engine.sql")
        if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
            message = f"SQLite {sqlite3.sqlite_version} is too old. Use a Python build with SQLite 3.37 or later."
            raise StoreUnusable(message)
        with self._in_words:
            self._connection = self._reader = self._connect(path)
        self._looks_first = False
        self._row_cache = RowCache(self._row)
        try:
            self._make_ready(new_id)
        except BaseException:
            self.close()
            raise

    def _make_ready(self, new_id: Callable[[], str]) -> None:
        with self._in_words:
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._migrate(new_id)
            read_store_id(read_meta_values(run_sqlite_query(self._connection, "meta", {})), self._path)
            if self._path != ":memory:":
                self._reader = self._connect(self._path)
        self._version = self._data_version(self._reader)
        self._position = self._last_position()

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        """Take the file's write lock, which covers all rows. With `wait`, waits for other processes."""
        self._lock(wait=wait)
        cache = self._row_cache
        unread: set[RowKey] = set()
        try:
            loaded = cache.load(keys, unread if writes and not self._looks_first else None)
            has_repeats = writes and cache.can_repeat(keys, writes)
            earlier_rows = self._connection.fetch(select_by_keys(len(writes)), writes) if has_repeats else ()
        except SQLITE_ERRORS as error:
            raise translate_sqlite_error(error, self._path) from error
        now = self._clock()
        return WorkingSet(
            loaded=loaded,
            now=now if cache.latest <= now else find_latest_time(loaded, now),
            earlier_by_key=group_by_write(earlier_rows) if earlier_rows else {},
            unread=unread,
            read_row=self._row,
        )

    def _lock(self, *, wait: bool = True) -> None:
        if self._read_only:
            raise make_unwritable_error(self._path)
        pauses = 0
        while True:
            try:
                self._row_cache.version = self._connection.begin_write()
            except sqlite3.Error as error:
                if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                    raise translate_sqlite_error(error, self._path) from error
                if not wait:
                    raise Busy from error
                if pauses >= round(self._lock_seconds / WAL_POLL_SECONDS):
                    raise translate_sqlite_error(error, self._path) from error
            else:
                return
            pauses += 1
            time.sleep(WAL_POLL_SECONDS)

    def _row(self, key: RowKey) -> Row | None:
        kind = key[0]
        try:
            rows = self._connection.fetch(make_row_statements(kind).select, key[1:])
        except SQLITE_ERRORS as error:
            raise translate_sqlite_error(error, self._path) from error
        return kind(*rows[0]) if rows else None

    def save(self, changes: Changes) -> None:
        """Write all changes into the open transaction. Raises BlobMissing if one of their blobs does not exist."""
        if changes.blobs:
            with self._in_words:
                for digest in changes.blobs:
                    if self._connection.execute(self._sql["has_blob"], {"digest": digest}).fetchone() == (0,):
                        raise BlobMissing(describe_missing_blob(digest, self._path))
        self.write(changes)

    def write(self, changes: Changes) -> None:
        """Write all changes without checking blobs, for a mirror of changes that were checked before."""
        try:
            statements = _group_row_statements(changes, self._row_cache.rows)
            if changes.events:
                _add_event_statements(statements, changes.events)
            self._connection.execute_all(statements.items())
            if changes.erasures:
                self._connection.execute_all(self._list_erasures(changes.erasures))
        except SQLITE_ERRORS as error:
            raise translate_sqlite_error(error, self._path) from error
        self._row_cache.written = changes

    def _list_erasures(self, erasures: Sequence[EraseBodies]) -> Iterator[tuple[str, Iterable[Any]]]:
        for erase in erasures:
            params = [{"stream": erase.stream, "through": erase.through}]
            yield self._sql["erase_blobs"], params
            yield self._sql["erase_bodies"], params
            yield self._sql["erase_snapshot"], [{"session": parse_session_id(erase.stream)}]

    def commit(self) -> None:
        try:
            self._connection.fetch("COMMIT")
        except SQLITE_ERRORS as error:
            raise translate_sqlite_error(error, self._path) from error
        self._row_cache.on_commit()
        self._looks_first = False

    def rollback(self) -> None:
        self._row_cache.forget()
        # A row that was saved without being read may have existed.
        self._looks_first = True
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        params = {"stream": stream, "after": after, "limit": limit}
        with self._in_words:
            return [read_stored_event(row) for row in self._reader.query(self._sql["read"], params)[1]]

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        with self._leasing(program_format) as leasing:
            leasing.ask("renew", {"worker": worker, "now": leasing.now, "lease": self._lease})
            leases = leasing.claim(worker, limit, agents) if only is None else leasing.claim_one(worker, limit, only)
        self._row_cache.drop([(SessionRow, lease.session) for lease in leases])
        return leases

    def offer(self, limit: int, program_format: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        with self._leasing(program_format) as leasing:
            return leasing.offer(limit, agents, enqueue, self._connection)

    @contextmanager
    def _leasing(self, program_format: int) -> Generator[Leasing]:
        with self._transaction() as execute:

            def ask(name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
                return execute(self._sql[name], params).fetchall()

            yield Leasing(ask, _encode_values, _encode_values, self._clock(), self._lease, program_format)

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> HeartbeatReply:
        with self._transaction() as execute:
            now = self._clock()
            renewed_rows = execute(self._sql["renew"], {"worker": worker, "now": now, "lease": self._lease}).fetchall()
            for session, data in snapshots.items():
                execute(self._sql["save_snapshot"], {"worker": worker, "session": session, "at": now, "data": data})
            if about:
                execute(self._sql["save_about"], {"worker": worker, "about": about})
                execute(self._sql["forget_workers"], {"worker": worker, "now": now})
                execute(self._sql["restore_owners"], {"now": now, "lease": self._lease})
            if renewed_rows == [(0,)]:
                return HeartbeatReply(now)
            owned_rows = execute(self._sql["owned"], {"worker": worker}).fetchall()
            return HeartbeatReply(now, frozenset(Lease(SessionId(row[0]), worker, row[1]) for row in owned_rows))

    def leave(self, worker: WorkerId) -> None:
        with self._transaction() as execute:
            execute(self._sql["leave"], {"worker": worker})

    def release(self, lease: Lease) -> None:
        with self._transaction() as execute:
            execute(self._sql["release"], msgspec.structs.asdict(lease))
        self._row_cache.drop([(SessionRow, lease.session)])

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        try:
            return run_sqlite_query(self._reader, name, params)
        except SQLITE_ERRORS as error:
            raise translate_sqlite_error(error, self._path) from error

    def put(self, digest: Digest, data: bytes) -> None:
        with self._transaction() as execute:
            execute(self._sql["save_blob"], {"digest": digest, "data": data, "at": self._clock()})

    def get(self, digest: Digest) -> bytes | None:
        with self._in_words:
            return read_sqlite_blob(self._reader, digest)

    def add_chunks(self, document: str, entries: Sequence[IndexedChunk]) -> None:
        with self._transaction() as execute:
            for entry in entries:
                cursor = execute(self._sql["add_chunk"], msgspec.structs.asdict(entry.chunk))
                if cursor.rowcount:
                    execute(self._sql["add_words"], {"id": cursor.lastrowid, "words": " ".join(entry.words)})

    def show_document(self, document: str, count: int) -> bool:
        with self._transaction() as execute:
            execute(self._sql["show_document"], {"document": document, "count": count})
            return execute(self._sql["indexed"], {"documents": _encode_values([document])}).fetchone() is not None

    def drop_chunks(self, document: str, limit: int) -> int:
        params = {"document": document, "limit": limit}
        with self._transaction() as execute:
            execute(self._sql["hide_document"], {"document": document})
            execute(self._sql["drop_words"], params)
            return execute(self._sql["drop_chunks"], params).rowcount

    def find_indexed(self, documents: Sequence[str]) -> frozenset[str]:
        with self._in_words:
            _, rows = self._reader.query(self._sql["indexed"], {"documents": _encode_values(documents)})
            return frozenset(row[0] for row in rows)

    def chunks(self, document: str) -> Sequence[Chunk]:
        with self._in_words:
            return [Chunk(*row) for row in self._reader.query(self._sql["chunks"], {"document": document})[1]]

    def search(
        self, documents: Sequence[str], names: Sequence[str], limit: int, *, match_all: bool
    ) -> Sequence[FoundChunk]:
        params = {
            "documents": _encode_values(documents),
            "query": to_fts5_query(names, match_all=match_all),
            "limit": limit,
        }
        with self._in_words:
            return [FoundChunk(*row) for row in self._reader.query(self._sql["search"], params)[1]]

    def view(self) -> StoreView:
        """Open a snapshot on a separate connection; an in-memory database has only one.

        A first query runs here, since SQLite fixes the snapshot at the first read.
        """
        with self._in_words:
            connection = self._connection if self._path == ":memory:" else self._connect(self._path)
            connection.execute("BEGIN")
        view = SqliteView(connection, self._in_words)
        view.ask("meta", {})
        return view

    def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        try:
            with self._transaction() as execute:
                rows = list(make(SqliteView(self._connection, self._in_words)))
                for table in PROJECTIONS:
                    execute(make_row_statements(table).clear)
                for row in rows:
                    execute(make_row_statements(type(row)).insert, astuple(row))
            self._row_cache.forget()
        except (RowRefused, OverflowError) as error:
            message = f"The events of {self._path} produce invalid rows ({error}). Nothing was changed."
            raise StoreUnusable(message) from error

    def scrub(self) -> bool:
        """Drop unreferenced blobs and deleted words, and truncate the write-ahead log, which a reader can prevent."""
        with self._transaction() as execute:
            execute(self._sql["sweep_blobs"], {"before": self._clock() - UNREFERENCED_BLOB_AGE})
            execute(self._sql["merge_words"])
        with self._in_words:
            for _ in range(TRUNCATE_ATTEMPTS):
                busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy:
                    return True
                time.sleep(WAL_POLL_SECONDS)
        return False

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Sleep for `timeout` seconds, then read what other connections have committed since the last call."""
        time.sleep(timeout)
        version = self._data_version(self._reader)
        if version == self._version:
            return []
        self._version = version
        with self._in_words:
            _, rows = self._reader.query(self._sql["grown_streams"], {"position": self._position})
        self._position = max((row[2] for row in rows), default=self._position)
        return [Change(StreamId(row[0]), row[1]) for row in rows]

    def close(self) -> None:
        with self._in_words:
            if self._reader is not self._connection:
                self._reader.close()
            self._connection.close()

    def _data_version(self, connection: ForkSafeConnection) -> int:
        """Read a number that changes when another connection commits."""
        with self._in_words:
            return connection.query(DATA_VERSION)[1][0][0]

    def _last_position(self) -> int:
        with self._in_words:
            return self._reader.query("SELECT COALESCE(MAX(position), 0) FROM events")[1][0][0]

    def _migrate(self, new_id: Callable[[], str]) -> None:
        migrations = list_migrations("sqlite")
        newest = migrations[-1][0]
        if self._read_only:
            self._reject_older(newest)
            return
        with self._transaction() as execute:
            execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
            version = self._schema_version(newest)
            for number, script in migrations:
                if number > version:
                    for statement in split_statements(script):
                        execute(statement)
            if version == 0:
                execute("INSERT INTO meta VALUES ('store', ?)", (new_id(),))
            if version < newest:
                execute("INSERT OR REPLACE INTO meta VALUES ('schema', ?)", (str(newest),))

    def _schema_version(self, newest: int) -> int:
        raw = read_meta_values(run_sqlite_query(self._connection, "meta", {}))
        return read_schema_version(raw, newest, self._path, tables=list_tables(self._connection) != {"meta"})

    def _reject_older(self, newest: int) -> None:
        version = self._schema_version(newest)
        if version < newest:
            raise StoreUnusable(
                f"The store {self._path} has schema version {version} and is read-only, so it cannot be migrated to "
                f"version {newest}. Copy it into a writable folder, and use the copy."
            )

    @contextmanager
    def _transaction(self) -> Generator[Callable[..., sqlite3.Cursor]]:
        """Open a transaction other than those of writes. If it changes cached rows, drop them from the cache."""
        with self._in_words:
            try:
                self._lock()
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                self.rollback()
                raise


def _group_row_statements(changes: Changes, cached_rows: Mapping[RowKey, Row | None]) -> dict[str, Iterable[Any]]:
    """Group parameters by statement, since preparing a statement costs as much as executing it.

    For a cached row, only changed columns are set: SQLite writes every index of a column that is set.
    """
    statements: dict[str, Any] = {}
    for row in changes.inserts.values():
        kind = type(row)
        values = TO_PARAMETERS.get(kind, astuple)(row)
        statements.setdefault(make_row_statements(kind).insert, []).append(values)
    for key, row in changes.updates.items():
        kind = key[0]
        values = TO_PARAMETERS.get(kind, astuple)(row)
        cached_row = None if kind in WITHOUT_INDEX else cached_rows.get(key)
        if cached_row is None:
            statements.setdefault(make_row_statements(kind).update, []).append(values)
        elif any(differences := [*map(ne, values, astuple(cached_row))]):
            columns = tuple(compress(kind.__struct_fields__, differences))
            statements.setdefault(make_update(kind, columns), []).append((*compress(values, differences), *key[1:]))
    for key in changes.deletes:
        statements.setdefault(make_row_statements(key[0]).delete, []).append(key[1:])
    return statements


def read_stored_event(row: Sequence[Any]) -> Stored:
    return Stored(*row, event=decode(row[2], row[3], row[8]))


def group_by_write(rows: Iterable[Sequence[Any]]) -> dict[str, tuple[Stored, ...]]:
    events_by_key: dict[str, tuple[Stored, ...]] = {}
    for row in rows:
        event = read_stored_event(row)
        events_by_key[event.key] = (*events_by_key.get(event.key, ()), event)
    return events_by_key


def _encode_values(values: Iterable[str | int]) -> str:
    return msgspec.json.encode(list(values)).decode()


def to_event_columns(event: Stored) -> tuple[Any, ...]:
    """Return all fields except the decoded event, in the order of the columns."""
    return astuple(event)[:-1]


NULL: Final = math.nan
"""SQLite stores NaN as NULL. Binding None or `bytes` is slower, since Python looks for an adapter first."""


def _to_head_parameters(row: StreamRow) -> tuple[Any, ...]:
    return row.stream, row.head, bytearray(row.hash), row.at


def _to_hold_parameters(row: HoldRow) -> tuple[Any, ...]:
    return row.hold, row.session, row.at, row.purpose, row.name, bytearray(row.legs)


def _to_budget_parameters(row: BudgetRow) -> tuple[Any, ...]:
    cap = NULL if row.cap is None else row.cap
    return row.scope, row.window, row.unit, cap, row.cap_at, row.cap_by, row.spent, row.held, row.overrun


TO_PARAMETERS: Final[Mapping[type[Row], Callable[[Any], tuple[Any, ...]]]] = {
    StreamRow: _to_head_parameters,
    HoldRow: _to_hold_parameters,
    BudgetRow: _to_budget_parameters,
}
"""Conversions for the rows of every step that have `bytes` or None, which are slow to bind."""

EVENTS_PER_STATEMENT: Final = 16
EVENT_COLUMNS: Final = Stored.__struct_fields__[:-1]
COLUMNS_WITHOUT_BLOB: Final = tuple(name for name in EVENT_COLUMNS if name != "blob")
_BLOB_OF: Final = attrgetter("blob")


def _add_event_statements(statements: dict[str, Any], events: Sequence[Stored]) -> None:
    """Add statements that insert several events each, in order. Binding None or `bytes` costs more than a copy."""
    has_blobs = any(map(_BLOB_OF, events))
    values: list[Any] = []
    for event in events:
        body, salt = event.body, event.salt
        values += event.stream, event.seq, event.kind, event.version, event.at, event.generation, event.key
        if has_blobs:
            values.append(event.blob)
        values += bytearray(event.facts), NULL if body is None else bytearray(body)
        values += NULL if salt is None else bytearray(salt), bytearray(event.digest), bytearray(event.hash)
    columns = EVENT_COLUMNS if has_blobs else COLUMNS_WITHOUT_BLOB
    limit = EVENTS_PER_STATEMENT * len(columns)
    for start in range(0, len(values), limit):
        statement_values = values[start : start + limit]
        statements.setdefault(make_insert("events", columns, len(statement_values) // len(columns)), []).append(
            statement_values
        )
