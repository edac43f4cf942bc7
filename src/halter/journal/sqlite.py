"""SQLite: one file, WAL, synchronous=FULL. The default store."""

import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND
from halter.core.codec import decode
from halter.core.errors import BlobMissing, RowRefused, StoreUnusable
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, session_of
from halter.core.library import Chunk, Found
from halter.core.ports import Agents, Beat, Change, Lease, Offered, Put, Stored, Ticket
from halter.core.row import Row, RowKey
from halter.journal.apply import Changes
from halter.journal.blobs import UNNAMED_FOR, named_blobs, without_blob
from halter.journal.engine import PROJECTIONS, Busy, View
from halter.journal.entries import Entry, for_fts5
from halter.journal.known import KnownRows
from halter.journal.leasing import Leasing
from halter.journal.meta import schema_version, store_id, words
from halter.journal.queries import load, migrations, row_statements, statements
from halter.journal.sqlite_file import (
    LOCK_SECONDS,
    LOOK_SECONDS,
    may_only_be_read,
    open_connection,
    open_to_read,
    tables,
)
from halter.journal.sqlite_view import SqliteView, answers, blob
from halter.journal.sqlite_words import InWords, in_words, unwritable

OLDEST_SQLITE: Final = (3, 37, 0)
SCRUBS: Final = 50
"""How often the log is tried to be cut off while others read it: for a tenth of a second, since nobody else writes."""

LEASE: Final = 15 * SECOND


class SqliteEngine:
    """Rows and events in one SQLite file, shared by any number of processes on one machine."""

    def __init__(
        self,
        path: str,
        *,
        now: Callable[[], int],
        new_id: Callable[[], str],
        lease: int = LEASE,
        lock_seconds: float = LOCK_SECONDS,
        connect: Callable[[str], sqlite3.Connection] = open_connection,
    ) -> None:
        self._path = path
        self._in_words = InWords(path)
        self._read_only = may_only_be_read(path)
        self._connect = open_to_read if self._read_only else connect
        self._clock = now
        self._lock_seconds = lock_seconds
        self._lease = lease
        self._sql = load("sqlite/engine.sql")
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            message = f"SQLite {sqlite3.sqlite_version} is too old: Halter needs 3.37. Use a newer Python build."
            raise StoreUnusable(message)
        with self._in_words:
            self._connection = self._reader = self._connect(path)
        self._known = KnownRows(self._row, lambda: self._data_version(self._connection))
        try:
            self._make_ready(new_id)
        except BaseException:
            self.close()
            raise

    def _make_ready(self, new_id: Callable[[], str]) -> None:
        with self._in_words:
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._migrate(new_id)
            store_id(words(answers(self._connection, "meta", {})), self._path)
            if self._path != ":memory:":
                self._reader = self._connect(self._path)
        self._version = self._data_version(self._reader)
        self._position = self._last_position()

    def begin(self, *, wait: bool = True) -> None:
        """Take the one write lock of the file, waiting for other processes if that is wanted."""
        if self._read_only:
            raise unwritable(self._path)
        looks = round(self._lock_seconds / LOOK_SECONDS) if wait else 0
        for _ in range(looks):
            if self._locked() is None:
                return
            time.sleep(LOOK_SECONDS)
        refusal = self._locked()
        if refusal is not None:
            raise in_words(refusal, self._path) if wait else Busy from refusal

    def _locked(self) -> sqlite3.Error | None:
        """Try to take the write lock; return what SQLite said if another process has it."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise in_words(error, self._path) from error
            return error
        except sqlite3.Error as error:
            raise in_words(error, self._path) from error
        return None

    def load(self, keys: Sequence[RowKey]) -> Mapping[RowKey, Row | None]:
        """Return rows; the write lock of the file is the lock on all of them."""
        with self._in_words:
            return self._known.load(keys)

    def _row(self, key: RowKey) -> Row | None:
        kind, values = key
        found = self._connection.execute(row_statements(kind).select, values).fetchone()
        return None if found is None else kind(*found)

    def committed(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, ...]]:
        """Return the events of writes that were committed before under these keys."""
        found: dict[str, tuple[Stored, ...]] = {}
        with self._in_words:
            for key in keys:
                rows = self._connection.execute(self._sql["by_key"], {"key": key}).fetchall()
                if rows:
                    found[key] = tuple(stored(row) for row in rows)
        return found

    def now(self) -> int:
        """Tell the time of this machine: all processes of a file share it."""
        return self._clock()

    def save(self, changes: Changes) -> None:
        """Write all changes into the open transaction, if the blobs that they name are there."""
        with self._in_words:
            for digest in named_blobs(changes.events):
                if self._connection.execute(self._sql["has_blob"], {"digest": digest}).fetchone() == (0,):
                    raise BlobMissing(without_blob(digest, self._path))
        self.write(changes)

    def write(self, changes: Changes) -> None:
        """Write all changes as they are: a mirror is given what was accepted elsewhere."""
        with self._in_words:
            execute = self._connection.execute
            for row in changes.inserts:
                execute(row_statements(type(row)).insert, msgspec.structs.astuple(row))
            for row in changes.updates:
                values = msgspec.structs.astuple(row)
                size = len(row.KEY)
                execute(row_statements(type(row)).update, values[size:] + values[:size])
            for kind, values in changes.deletes:
                execute(row_statements(kind).delete, values)
            self._known.wrote(changes)
            self._connection.executemany(self._sql["append"], [event_columns(event) for event in changes.events])
            for erase in changes.erasures:
                params = {"stream": erase.stream, "through": erase.through}
                execute(self._sql["erase_blobs"], params)
                execute(self._sql["erase_bodies"], params)
                execute(self._sql["erase_snapshot"], {"session": session_of(erase.stream)})

    def commit(self) -> None:
        """Make the transaction durable: this returns after the disk has it."""
        with self._in_words:
            self._connection.execute("COMMIT")
        self._known.committed()

    def rollback(self) -> None:
        """Forget the transaction."""
        self._known.forget()
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        """Return events of a stream in order."""
        params = {"stream": stream, "after": after, "limit": limit}
        with self._in_words:
            return [stored(row) for row in self._reader.execute(self._sql["read"], params)]

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: Agents | None = None,
    ) -> Sequence[Lease]:
        """Take orphaned sessions first, then due ones; or the one that is named."""
        with self._leasing(program_format) as leasing:
            leasing.ask("renew", {"worker": worker, "now": leasing.now, "lease": self._lease})
            return leasing.claim(worker, limit, agents) if only is None else leasing.claim_one(worker, limit, only)

    def offer(self, limit: int, program_format: int, agents: Agents, put: Put) -> Offered:
        """Hand out tickets; one process writes at a time, so none is in another's way."""
        with self._leasing(program_format) as leasing:
            return leasing.offer(limit, agents, put, self._connection)

    @contextmanager
    def _leasing(self, program_format: int) -> Generator[Leasing]:
        with self._transaction() as execute:

            def ask(name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
                return execute(self._sql[name], params).fetchall()

            yield Leasing(ask, _json, _json, self.now(), self._lease, program_format)

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> Beat:
        """Renew a worker's leases; after a lapse, say which are left."""
        with self._transaction() as execute:
            now = self.now()
            renewed = execute(self._sql["renew"], {"worker": worker, "now": now, "lease": self._lease}).fetchall()
            for session, data in snapshots.items():
                execute(self._sql["snapshot"], {"worker": worker, "session": session, "at": now, "data": data})
            if about:
                execute(self._sql["about"], {"worker": worker, "about": about})
                execute(self._sql["forget_workers"], {"worker": worker, "now": now})
            if renewed == [(0,)]:
                return Beat(now)
            owned = execute(self._sql["owned"], {"worker": worker}).fetchall()
            return Beat(now, frozenset(Lease(SessionId(row[0]), worker, row[1]) for row in owned))

    def leave(self, worker: WorkerId) -> None:
        """Let a worker's leases be over."""
        with self._transaction() as execute:
            execute(self._sql["leave"], {"worker": worker})

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query."""
        with self._in_words:
            return answers(self._reader, name, params)

    def put(self, digest: Digest, data: bytes) -> None:
        """Keep a blob."""
        with self._transaction() as execute:
            execute(self._sql["put"], {"digest": digest, "data": data, "at": self.now()})

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        with self._in_words:
            return blob(self._reader, digest)

    def add_chunks(self, document: str, entries: Sequence[Entry]) -> None:
        """Add some of a document's chunks and their words."""
        with self._transaction() as execute:
            for entry in entries:
                added = execute(self._sql["add_chunk"], msgspec.structs.asdict(entry.chunk))
                if added.rowcount:
                    execute(self._sql["add_words"], {"id": added.lastrowid, "words": " ".join(entry.words)})

    def show_document(self, document: str, count: int) -> bool:
        """Let a document be seen if it has so many chunks."""
        with self._transaction() as execute:
            execute(self._sql["show_document"], {"document": document, "count": count})
            return execute(self._sql["indexed"], {"documents": _json([document])}).fetchone() is not None

    def drop_chunks(self, document: str, limit: int) -> int:
        """Let a document be seen no more, and drop some of its chunks."""
        params = {"document": document, "limit": limit}
        with self._transaction() as execute:
            execute(self._sql["hide_document"], {"document": document})
            execute(self._sql["drop_words"], params)
            return execute(self._sql["drop_chunks"], params).rowcount

    def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Tell which of these documents are there."""
        with self._in_words:
            found = self._reader.execute(self._sql["indexed"], {"documents": _json(documents)})
            return frozenset(row[0] for row in found)

    def chunks(self, document: str) -> Sequence[Chunk]:
        """Return a document's chunks in order."""
        with self._in_words:
            return [Chunk(*row) for row in self._reader.execute(self._sql["chunks"], {"document": document})]

    def search(self, documents: Sequence[str], wanted: Sequence[str], limit: int, *, every: bool) -> Sequence[Found]:
        """Find chunks in which every word occurs, or any."""
        params = {"documents": _json(documents), "query": for_fts5(wanted, every=every), "limit": limit}
        with self._in_words:
            return [Found(*row) for row in self._reader.execute(self._sql["search"], params)]

    def view(self) -> View:
        """Begin to read on a connection of its own; what is kept in memory has only one.

        A first question is asked at once, since SQLite fixes what a transaction sees when it first reads.
        """
        with self._in_words:
            connection = self._connection if self._path == ":memory:" else self._connect(self._path)
            connection.execute("BEGIN")
        view = SqliteView(connection, self._in_words)
        view.ask("meta", {})
        return view

    def replace(self, make: Callable[[View], Iterable[Row]]) -> None:
        """Make all projections anew in one transaction."""
        try:
            with self._transaction() as execute:
                rows = list(make(SqliteView(self._connection, self._in_words)))
                for table in PROJECTIONS:
                    execute(row_statements(table).clear)
                for row in rows:
                    execute(row_statements(type(row)).insert, msgspec.structs.astuple(row))
        except (RowRefused, OverflowError) as error:
            message = f"The rows that the events of {self._path} make cannot be right ({error}). Nothing was changed."
            raise StoreUnusable(message) from error

    def scrub(self) -> bool:
        """Drop blobs that nothing names and words that are deleted, and cut off the write-ahead log.

        A reader elsewhere can be in its way.
        """
        with self._transaction() as execute:
            execute(self._sql["sweep_blobs"], {"before": self.now() - UNNAMED_FOR})
            execute(self._sql["merge_words"])
        with self._in_words:
            for _ in range(SCRUBS):
                busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy:
                    return True
                time.sleep(LOOK_SECONDS)
        return False

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Wait, then look whether any other connection has committed since the last look."""
        time.sleep(timeout)
        version = self._data_version(self._reader)
        if version == self._version:
            return []
        self._version = version
        with self._in_words:
            rows = self._reader.execute(self._sql["grown"], {"position": self._position}).fetchall()
        self._position = max((row[2] for row in rows), default=self._position)
        return [Change(StreamId(row[0]), row[1]) for row in rows]

    def close(self) -> None:
        """Close the file."""
        with self._in_words:
            if self._reader is not self._connection:
                self._reader.close()
            self._connection.close()

    def _data_version(self, connection: sqlite3.Connection) -> int:
        """Tell by a number whether any other connection has committed anything."""
        with self._in_words:
            return connection.execute("PRAGMA data_version").fetchone()[0]

    def _last_position(self) -> int:
        with self._in_words:
            return self._reader.execute("SELECT COALESCE(MAX(position), 0) FROM events").fetchone()[0]

    def _migrate(self, new_id: Callable[[], str]) -> None:
        known = migrations("sqlite")
        last = known[-1][0]
        if self._read_only:
            self._refuse_older(last)
            return
        with self._transaction() as execute:
            execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
            version = self._schema_version(last)
            for number, script in known:
                if number > version:
                    for statement in statements(script):
                        execute(statement)
            if version == 0:
                execute("INSERT INTO meta VALUES ('store', ?)", (new_id(),))
            if version < last:
                execute("INSERT OR REPLACE INTO meta VALUES ('schema', ?)", (str(last),))

    def _schema_version(self, known: int) -> int:
        said = words(answers(self._connection, "meta", {}))
        return schema_version(said, known, self._path, tables=tables(self._connection) != {"meta"})

    def _refuse_older(self, known: int) -> None:
        version = self._schema_version(known)
        if version < known:
            raise StoreUnusable(
                f"The store {self._path} has schema {version}, and cannot be brought to {known} where it may only be "
                "read: copy it into a folder that may be written to, and use the copy."
            )

    @contextmanager
    def _transaction(self) -> Generator[Callable[..., sqlite3.Cursor]]:
        with self._in_words:
            self.begin()
            self._known.forget()
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            finally:
                self.rollback()


def stored(row: Sequence[Any]) -> Stored:
    """Read an event from its columns."""
    return Stored(*row, event=decode(row[2], row[3], row[8]))


def _json(values: Iterable[str | int]) -> str:
    return msgspec.json.encode(list(values)).decode()


def event_columns(event: Stored) -> tuple[Any, ...]:
    """Write an event as its columns."""
    return (
        event.stream,
        event.seq,
        event.kind,
        event.version,
        event.at,
        event.generation,
        event.key,
        event.blob,
        event.facts,
        event.body,
        event.salt,
        event.digest,
        event.hash,
    )
