"""PostgreSQL: one schema of any database, shared by any number of processes on any number of machines."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final

import msgspec
import psycopg
from psycopg import sql

from halter.core.errors import BlobMissing, RowRefused, StoreUnavailable, StoreUnusable
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, session_of
from halter.core.library import Chunk, Found
from halter.core.ports import EVERY_STREAM, Agents, Beat, Change, Lease, Offered, Put, Stored, Ticket
from halter.core.row import Row, RowKey, lock_order
from halter.core.rows import TABLES
from halter.journal.apply import Changes
from halter.journal.batches import Bytes, Integers, Texts, append, columns, statements, teach
from halter.journal.blobs import UNNAMED_FOR, named_blobs, without_blob
from halter.journal.connection import Address, Connection, Line, connected, together, translated
from halter.journal.engine import PROJECTIONS, Busy, Conflict, View
from halter.journal.entries import Entry, for_tsquery, for_tsvector
from halter.journal.leasing import Leasing
from halter.journal.meta import schema_version, store_id, words
from halter.journal.postgres_view import PostgresView, answers, blob
from halter.journal.queries import for_psycopg, load, migrations, row_statements
from halter.journal.sqlite import LEASE, event_columns, stored

PATIENCE: Final = "10s"
"""How long a lock is waited for, and how long a writer that stands still may keep its locks."""

NOTIFICATION_BYTES: Final = 7_900
"""PostgreSQL refuses a notification of 8,000."""

STREAMS_TOLD: Final = 1_000
ROWS_AT_ONCE: Final = 1_000


class PostgresEngine:
    """Rows and events in PostgreSQL, over three connections: one writes, one reads, one listens.

    Rows are locked before they are looked at. A row that does not exist cannot be locked: whoever inserts it
    second meets a Conflict and decides anew. Streams are locked first, so that a write sees all that earlier
    writes to the same stream have inserted and removed.
    """

    def __init__(self, url: str, *, new_id: Callable[[], str], lease: int = LEASE, patience: str = PATIENCE) -> None:
        self._address = Address(url)
        self._lease = lease
        self._patience = patience
        self._sql = {name: for_psycopg(text).encode() for name, text in load("postgres/engine.sql").items()}
        self._writer = Line(self._address, self._ready_to_write)
        self._reader = Line(self._address, self._ready_to_read)
        self._listener = Line(self._address, self._ready_to_listen)
        self._now = 0
        self._unsaved: Changes | None = None
        self._deaf_before = False
        try:
            self._migrate(new_id)
        except BaseException:
            self.close()
            raise

    def begin(self, *, wait: bool = True) -> None:
        """Refuse if there is no time to wait, for a server must be waited for; else begin together with `load`."""
        if not wait:
            raise Busy
        self._unsaved = None

    def load(self, keys: Sequence[RowKey]) -> Mapping[RowKey, Row | None]:
        """Lock rows, table by table and each in the order of its keys, and take the time when all are locked."""
        rows: dict[RowKey, Row | None] = dict.fromkeys(keys)
        with self._writer.use() as connection:
            with together(connection):
                connection.execute(self._sql["begin"])
                found = [(table, self._lock(connection, table, wanted)) for table, wanted in _by_table(keys)]
                now = connection.execute(self._sql["now"])
            for table, cursor in found:
                for values in cursor.fetchall():
                    row = table(*values)
                    rows[row.key()] = row
            self._now = _one(now)
        return rows

    def _lock(self, connection: Connection, table: type[Row], keys: Iterable[RowKey]) -> psycopg.Cursor[Any]:
        statement = statements(table)
        return connection.execute(statement.lock, columns(statement.kinds, [key for _, key in keys]), binary=True)

    def committed(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, ...]]:
        """Return the events of writes that were committed before under these keys."""
        found: dict[str, tuple[Stored, ...]] = {}
        with self._writer.use() as connection:
            for row in connection.execute(self._sql["by_keys"], {"keys": Texts(keys)}, binary=True):
                event = stored(row)
                found[event.key] = (*found.get(event.key, ()), event)
        return found

    def now(self) -> int:
        """Tell the server's time, at which the open transaction had its locks."""
        return self._now

    def save(self, changes: Changes) -> None:
        """Keep the changes until the commit, so that all travel together; only blobs must be looked for first."""
        digests = named_blobs(changes.events)
        if digests:
            with self._writer.use() as connection:
                missing = connection.execute(self._sql["missing_blobs"], {"digests": Texts(digests)}).fetchall()
            if missing:
                raise BlobMissing(without_blob(missing[0][0], self._address.place))
        self._unsaved = changes

    def commit(self) -> None:
        """Send the changes and commit them: this returns after the server's disk has them."""
        changes, self._unsaved = self._unsaved, None
        with self._writer.use() as connection:
            begun = self._writer.in_transaction
            with together(connection):
                if not begun:
                    connection.execute(self._sql["begin"])
                if changes is not None:
                    self._write(connection, changes)
                connection.execute(self._sql["commit"])

    def _write(self, connection: Connection, changes: Changes) -> None:
        """Insert in the order of locks too: two processes that insert the same rows wait, but never for each other."""
        inserts = sorted(((row.key(), row) for row in changes.inserts), key=lambda pair: lock_order(pair[0]))
        self._insert(connection, [row for _, row in inserts])
        for table, rows in groupby(sorted(changes.updates, key=_table), type):
            statement = statements(table)
            connection.execute(statement.update, columns(statement.kinds, map(msgspec.structs.astuple, rows)))
        for table, keys in _by_table(changes.deletes):
            statement = statements(table)
            connection.execute(statement.delete, columns(statement.kinds, [key for _, key in keys]))
        told = hints({event.stream: event.seq for event in changes.events})
        events = columns(append().kinds, map(event_columns, changes.events))
        connection.execute(append().insert, [*events, self._address.schema, Texts(told)])
        for erase in changes.erasures:
            params = {"stream": erase.stream, "through": erase.through, "session": session_of(erase.stream)}
            for name in ("keep_blobs", "erase_blobs", "erase_bodies", "erase_snapshot"):
                connection.execute(self._sql[name], params)

    def _insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for table, alike in groupby(rows, type):
            statement = statements(table)
            connection.execute(statement.insert, columns(statement.kinds, map(msgspec.structs.astuple, alike)))

    def rollback(self) -> None:
        """Forget the transaction; without a connection the server has forgotten it already."""
        self._unsaved = None
        if self._writer.in_transaction:
            try:
                with self._writer.use() as connection:
                    connection.execute(self._sql["rollback"])
            except StoreUnavailable:
                self._writer.drop()

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        """Return events of a stream in order."""
        params = {"stream": stream, "after": after, "limit": limit}
        with self._reader.use() as connection:
            return [stored(row) for row in connection.execute(self._sql["read"], params, binary=True)]

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: Agents | None = None,
    ) -> Sequence[Lease]:
        """Take orphaned sessions first, then due ones; or the one that is named."""
        with self._transaction() as connection:
            if agents is not None and any(most is not None for most in agents.values()):
                connection.execute(self._sql["one_at_a_time"], {"schema": self._address.schema})
            now, _ = self._renew(connection, worker)
            leasing = self._leasing(connection, now, program_format)
            return leasing.claim(worker, limit, agents) if only is None else leasing.claim_one(worker, limit, only)

    def offer(self, limit: int, program_format: int, agents: Agents, put: Put) -> Offered:
        """Hand out tickets, unless another process is just doing so."""
        with self._transaction() as connection:
            if not _one(connection.execute(self._sql["unless_another"], {"schema": self._address.schema})):
                return Offered(more=True)
            now = _one(connection.execute(self._sql["now"]))
            return self._leasing(connection, now, program_format).offer(limit, agents, put, connection)

    def _leasing(self, connection: Connection, now: int, program_format: int) -> Leasing:
        def ask(name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
            cursor = connection.execute(self._sql[name], params)
            return cursor.fetchall() if cursor.description else ()

        return Leasing(ask, Texts, Integers, now, self._lease, program_format)

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> Beat:
        """Renew a worker's leases; after a lapse, say which are left."""
        with self._transaction() as connection:
            now, lapsed = self._renew(connection, worker)
            if snapshots:
                kept = {"sessions": Texts(snapshots), "data": Bytes(snapshots.values())}
                connection.execute(self._sql["snapshots"], {"worker": worker, "at": now, **kept})
            if about:
                connection.execute(self._sql["about"], {"worker": worker, "now": now, "about": about})
            if not lapsed:
                return Beat(now)
            owned = connection.execute(self._sql["owned"], {"worker": worker})
            return Beat(now, frozenset(Lease(SessionId(row[0]), worker, row[1]) for row in owned))

    def _renew(self, connection: Connection, worker: WorkerId) -> tuple[int, bool]:
        now, lapsed = connection.execute(self._sql["renew"], {"worker": worker, "lease": self._lease}).fetchall()[0]
        return now, lapsed

    def leave(self, worker: WorkerId) -> None:
        """Let a worker's leases be over."""
        with self._transaction() as connection:
            connection.execute(self._sql["leave"], {"worker": worker})

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query."""
        with self._reader.use() as connection:
            return answers(connection, name, params)

    def put(self, digest: Digest, data: bytes) -> None:
        """Keep a blob."""
        with self._writer.use() as connection:
            connection.execute(self._sql["put"], {"digest": digest, "data": data})

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        with self._reader.use() as connection:
            return blob(connection, digest)

    def add_chunks(self, document: str, entries: Sequence[Entry]) -> None:
        """Add some of a document's chunks and their words."""
        with self._writer.use() as connection:
            connection.execute(self._sql["add_chunks"], {"document": document, **_chunk_columns(entries)})

    def show_document(self, document: str, count: int) -> bool:
        """Let a document be seen if it has so many chunks."""
        with self._transaction() as connection:
            connection.execute(self._sql["show_document"], {"document": document, "count": count})
            return bool(connection.execute(self._sql["indexed"], {"documents": Texts([document])}).fetchall())

    def drop_chunks(self, document: str, limit: int) -> int:
        """Let a document be seen no more, and drop some of its chunks."""
        with self._transaction() as connection:
            connection.execute(self._sql["hide_document"], {"document": document})
            return connection.execute(self._sql["drop_chunks"], {"document": document, "limit": limit}).rowcount

    def indexed(self, documents: Sequence[str]) -> frozenset[str]:
        """Tell which of these documents are there."""
        with self._reader.use() as connection:
            found = connection.execute(self._sql["indexed"], {"documents": Texts(documents)})
            return frozenset(row[0] for row in found)

    def chunks(self, document: str) -> Sequence[Chunk]:
        """Return a document's chunks in order."""
        with self._reader.use() as connection:
            return [Chunk(*row) for row in connection.execute(self._sql["chunks"], {"document": document})]

    def search(self, documents: Sequence[str], wanted: Sequence[str], limit: int, *, every: bool) -> Sequence[Found]:
        """Find chunks in which every word occurs, or any."""
        params = {"documents": Texts(documents), "query": for_tsquery(wanted, every=every), "limit": limit}
        with self._reader.use() as connection:
            return [Found(*row) for row in connection.execute(self._sql["search"], params)]

    def view(self) -> View:
        """Open a transaction that sees one moment only, on a connection of its own."""
        with translated(self._address):
            return PostgresView(connected(self._address, self._ready_to_look), self._address)

    def replace(self, make: Callable[[View], Iterable[Row]]) -> None:
        """Make all projections anew in one transaction, while other writers wait."""
        try:
            with self._transaction() as connection:
                connection.execute(self._sql["take_time"])
                connection.execute(self._sql["keep_out"])
                rows = sorted(make(PostgresView(connection, self._address)), key=_table)
                for table in PROJECTIONS:
                    connection.execute(row_statements(table).clear.encode())
                for start in range(0, len(rows), ROWS_AT_ONCE):
                    self._insert(connection, rows[start : start + ROWS_AT_ONCE])
        except (RowRefused, Conflict, OverflowError) as error:
            message = f"The rows that the events of {self._address.place} make cannot be right. Nothing was changed."
            raise StoreUnusable(message) from error

    def scrub(self) -> bool:
        """Drop blobs that nothing names; the server reuses the room of old rows and of its log in its own time."""
        with self._transaction() as connection:
            now = _one(connection.execute(self._sql["now"]))
            connection.execute(self._sql["keep_blobs"])
            connection.execute(self._sql["sweep_blobs"], {"before": now - UNNAMED_FOR})
        return False

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Listen to what other writers tell; who has just begun to listen may have missed anything."""
        with self._listener.use() as connection:
            if self._deaf_before:
                self._deaf_before = False
                return [Change(EVERY_STREAM, 0)]
            told = list(connection.notifies(timeout=timeout, stop_after=1))
        mine = self._writer.pid
        return [change for notify in told if notify.pid != mine for change in _heard(notify.payload)]

    def close(self) -> None:
        """Let go of the connections."""
        for line in (self._writer, self._reader, self._listener):
            line.drop()

    def _ready(self, connection: Connection) -> None:
        teach(connection)
        connection.execute(self._sql["ready"], {"schema": self._address.schema})

    def _ready_to_write(self, connection: Connection) -> None:
        self._ready(connection)
        connection.execute(self._sql["ready_to_write"], {"patience": self._patience})

    def _ready_to_read(self, connection: Connection) -> None:
        self._ready(connection)
        connection.execute(self._sql["ready_to_read"])

    def _ready_to_listen(self, connection: Connection) -> None:
        self._ready(connection)
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._address.schema)))
        self._deaf_before = True

    def _ready_to_look(self, connection: Connection) -> None:
        self._ready(connection)
        connection.execute(self._sql["look"])
        answers(connection, "meta", {})

    def _migrate(self, new_id: Callable[[], str]) -> None:
        """Bring the schema up to date; of several processes that start together, one does it."""
        known = migrations("postgres")
        schema = self._address.schema
        with self._transaction() as connection:
            self._refuse_encoding(_one(connection.execute(self._sql["encoding"])))
            connection.execute(self._sql["migrating"], {"schema": schema})
            if not _one(connection.execute(self._sql["schema_exists"], {"schema": schema})):
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
            connection.execute(self._sql["meta"])
            version = self._schema_version(connection, known[-1][0])
            for number, script in known:
                if number > version:
                    connection.execute(script.encode(), prepare=False)
            news = {"store": new_id()} if version == 0 else {}
            if version < known[-1][0]:
                news["schema"] = str(known[-1][0])
            for name, value in news.items():
                connection.execute(self._sql["remember"], {"name": name, "value": value})
            store_id(words(answers(connection, "meta", {})), self._address.place)

    def _schema_version(self, connection: Connection, known: int) -> int:
        said = words(answers(connection, "meta", {}))
        others = _one(connection.execute(self._sql["has_tables"], {"schema": self._address.schema}))
        return schema_version(said, known, self._address.place, tables=others)

    def _refuse_encoding(self, encoding: str) -> None:
        if encoding != "UTF8":
            raise StoreUnusable(
                f"The database {self._address.place} is encoded as {encoding}, which cannot hold every text: "
                "make one with createdb --encoding=UTF8 --template=template0, and name that."
            )

    @contextmanager
    def _transaction(self) -> Generator[Connection]:
        try:
            with self._writer.use() as connection:
                connection.execute(self._sql["begin"])
                yield connection
                connection.execute(self._sql["commit"])
        finally:
            self.rollback()


def hints(heads: Mapping[StreamId, int]) -> list[str]:
    """Write where streams stand now, in as many pieces as notifications need; too much is told as `look at all`."""
    text = msgspec.json.encode(heads).decode()
    if len(heads) > STREAMS_TOLD or (len(heads) == 1 and len(text.encode()) > NOTIFICATION_BYTES):
        return hints({EVERY_STREAM: 0})
    if len(text.encode()) <= NOTIFICATION_BYTES:
        return [text]
    pairs, half = list(heads.items()), len(heads) // 2
    return hints(dict(pairs[:half])) + hints(dict(pairs[half:]))


def _heard(hint: str) -> list[Change]:
    heads = msgspec.json.decode(hint, type=dict[str, int])
    return [Change(StreamId(stream), head) for stream, head in heads.items()]


def _chunk_columns(entries: Sequence[Entry]) -> dict[str, Any]:
    chunks = [entry.chunk for entry in entries]
    return {
        "numbers": Integers(chunk.number for chunk in chunks),
        "starts": Integers(chunk.start for chunk in chunks),
        "ends": Integers(chunk.end for chunk in chunks),
        "texts": Texts(chunk.text for chunk in chunks),
        "words": Texts(for_tsvector(entry.words) for entry in entries),
    }


def _by_table(keys: Iterable[RowKey]) -> Iterable[tuple[type[Row], Iterable[RowKey]]]:
    return groupby(sorted(keys, key=lambda key: _ORDER[key[0]]), lambda key: key[0])


_ORDER: Final = {table: place for place, table in enumerate(TABLES)}


def _table(row: Row) -> int:
    return _ORDER[type(row)]


def _one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> Any:
    return cursor.fetchall()[0][0]
