"""The PostgreSQL store: one schema of a database, shared by processes on any number of machines.

Any number of rows go in one statement, each column as one array, so a batch of writes costs two round trips.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any, Final

import msgspec
import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from halter.core.errors import BlobMissing, RowRefused, StoreUnavailable, StoreUnusable
from halter.core.ids import Digest, SessionId, StreamId, WorkerId, parse_session_id
from halter.core.ports import (
    ALL_STREAMS,
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
from halter.core.rows import TABLES
from halter.core.vocabulary import Row, RowKey, lock_order
from halter.journal.apply import TIMES, Changes, WorkingSet
from halter.journal.connection import (
    ConnectionSlot,
    PgConnection,
    PostgresAddress,
    Request,
    Statement,
    open_greeted_connection,
    translate_errors,
)
from halter.journal.engine import (
    PARAMETER,
    PROJECTIONS,
    UNREFERENCED_BLOB_AGE,
    Busy,
    Conflict,
    IndexedChunk,
    Leasing,
    NamedQuery,
    Question,
    StoreView,
    StreamPage,
    describe_missing_blob,
    list_migrations,
    load_postgres_queries,
    load_queries,
    make_row_statements,
    read_meta_values,
    read_schema_version,
    read_store_id,
    to_psycopg_parameters,
    to_tsquery,
    to_tsvector,
)
from halter.journal.postgres_columns import (
    BIGINT,
    BYTEA,
    TEXT,
    BytesColumn,
    IntegerColumn,
    TextColumn,
    Value,
    encode_columns,
    encode_integer,
    make_append_statement,
    make_batch_statements,
    register_dumpers,
)
from halter.journal.sqlite import LEASE_DURATION, group_by_write, read_stored_event, to_event_columns


class PostgresView:
    """The snapshot of one connection until its transaction ends."""

    def __init__(self, connection: PgConnection, address: PostgresAddress) -> None:
        self._connection = connection
        self._address = address

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        with translate_errors(self._address):
            return run_postgres_query(self._connection, name, params)

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        with translate_errors(self._address):
            return self._connection.execute(_get_query(name), params, binary=True).fetchall()

    def get(self, digest: Digest) -> bytes | None:
        with translate_errors(self._address):
            return read_postgres_blob(self._connection, digest)

    def flaws(self) -> Sequence[str]:
        """Return nothing: the server checks its pages when it reads them."""
        return []

    def close(self) -> None:
        self._connection.close()


def run_postgres_query(connection: PgConnection, name: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row, binary=True) as cursor:
        return cursor.execute(_get_query(name), params).fetchall()


@cache
def _get_query(name: str) -> bytes:
    return to_psycopg_parameters(load_postgres_queries("queries.sql")[name]).encode()


def read_postgres_blob(connection: PgConnection, digest: Digest) -> bytes | None:
    rows = connection.execute(
        to_psycopg_parameters(load_queries("postgres/engine.sql")["find_blob"]).encode(),
        {"digest": digest},
        binary=True,
    )
    return next((row[0] for row in rows), None)


LOCK_TIMEOUT: Final = "10s"
"""The maximum wait for a lock, and the maximum time that an idle writer keeps its locks."""

NOTIFICATION_BYTES: Final = 7_900
"""PostgreSQL refuses a notification of 8,000 bytes."""

MAX_HINTED_STREAMS: Final = 1_000
ROWS_AT_ONCE: Final = 1_000


class PostgresEngine:
    """Rows and events in PostgreSQL, over three connections: one writes, one reads, one listens.

    Rows are locked before they are read. A missing row cannot be locked: the second process to insert it gets a
    Conflict and decides again. Streams are locked first, so that a write sees every insert and delete of earlier writes
    to the same stream.
    """

    def __init__(
        self, url: str, *, new_id: Callable[[], str], lease: int = LEASE_DURATION, lock_timeout: str = LOCK_TIMEOUT
    ) -> None:
        self._address = PostgresAddress(url)
        self._lease = lease
        self._lock_timeout = lock_timeout
        self._sql = {
            name: to_psycopg_parameters(text).encode() for name, text in load_queries("postgres/engine.sql").items()
        }
        self._writer = ConnectionSlot(self._address, self._prepare_writer)
        self._reader = ConnectionSlot(self._address, self._prepare_reader)
        self._listener = ConnectionSlot(self._address, self._prepare_listener, listens=True)
        self._unsaved: Changes | None = None
        self._deaf_before = False
        try:
            self._migrate(new_id)
        except BaseException:
            self.close()
            raise

    @property
    def round_trips(self) -> int:
        """The number of round trips of commits and claims."""
        return self._writer.round_trips

    @property
    def read_round_trips(self) -> int:
        """The number of round trips of queries."""
        return self._reader.round_trips

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        """Lock rows, table by table in key order; then read earlier events of the writes, and the time.

        Without `wait` it raises Busy, since a server always takes time.
        """
        if not wait:
            raise Busy
        self._unsaved = None
        rows: dict[RowKey, Row | None] = dict.fromkeys(keys)
        tables: list[type[Row]] = []
        requests = [self._list_named_blobs("begin")]
        for table, key_values in _group_by_table(rows):
            statement = make_batch_statements(table)
            tables.append(table)
            requests.append((statement.lock, encode_columns(statement.kinds, key_values)))
        requests.append(self._list_named_blobs("by_keys", keys=TextColumn(writes)))
        *results, earlier_rows, ((now,),) = self._writer.run([*requests, self._list_named_blobs("now")])
        for table, values in zip(tables, results[1:], strict=True):
            width = len(table.KEY)
            loaded_rows = {(table, *each[:width]): table(*each) for each in values}
            rows |= loaded_rows
            if (read_time := TIMES.get(table)) is not None:
                now = max([now, *map(read_time, loaded_rows.values())])
        return WorkingSet(loaded=rows, now=now, earlier_by_key=group_by_write(earlier_rows))

    def _list_named_blobs(self, name: str, **values: Value) -> Request:
        """Make a request from a named statement of `engine.sql`."""
        return _make_request("postgres/engine.sql", name, values)

    def save(self, changes: Changes) -> None:
        """Keep the changes until the commit, which sends them in one round trip. Only blobs are checked here."""
        digests = list(dict.fromkeys(changes.blobs))
        if digests:
            (missing,) = self._writer.run([self._list_named_blobs("missing_blobs", digests=TextColumn(digests))])
            if missing:
                raise BlobMissing(describe_missing_blob(missing[0][0], self._address.location))
        self._unsaved = changes

    def commit(self) -> None:
        changes, self._unsaved = self._unsaved, None
        requests = [] if self._writer.in_transaction else [self._list_named_blobs("begin")]
        if changes is not None:
            requests += self._list_changes(changes)
        self._writer.run([*requests, self._list_named_blobs("commit")])

    def _list_changes(self, changes: Changes) -> list[Request]:
        """Build the requests of a commit. Inserts are in lock order too: processes may wait, but never deadlock."""
        requests = _list_inserts([changes.inserts[key] for key in sorted(changes.inserts, key=lock_order)])
        for table, rows in groupby(sorted(changes.updates.values(), key=_table_order), type):
            statement = make_batch_statements(table)
            requests.append((statement.update, encode_columns(statement.kinds, map(msgspec.structs.astuple, rows))))
        for table, keys in _group_by_table(changes.deletes):
            statement = make_batch_statements(table)
            requests.append((statement.delete, encode_columns(statement.kinds, keys)))
        hints = TextColumn(format_hints({event.stream: event.seq for event in changes.events}))
        append = make_append_statement()
        events = encode_columns(append.kinds, map(to_event_columns, changes.events))
        requests.append((append.insert, [*events, self._address.schema.encode(), hints.encode()]))
        for erase in changes.erasures:
            stream, through = erase.stream, erase.through
            requests += [
                self._list_named_blobs("lock_blobs"),
                self._list_named_blobs("erase_blobs", stream=stream, through=through),
                self._list_named_blobs("erase_bodies", stream=stream, through=through),
                self._list_named_blobs("erase_snapshot", session=parse_session_id(stream)),
            ]
        return requests

    def rollback(self) -> None:
        self._unsaved = None
        if self._writer.in_transaction:
            try:
                # Not with psycopg's rollback, which forgets the prepared statements.
                self._writer.run([self._list_named_blobs("rollback")])
            except StoreUnavailable:
                self._writer.drop()

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        return self.answer_questions([StreamPage(stream, after, limit)])[0]

    def answer_questions(self, questions: Sequence[Question]) -> list[Sequence[Any]]:
        requests: list[Request] = []
        for query in questions:
            if isinstance(query, NamedQuery):
                requests.append(_make_request("queries.sql", query.name, query.params))
            else:
                requests.append(
                    self._list_named_blobs("read", stream=query.stream, after=query.after, limit=query.limit)
                )
        answers: list[Sequence[Any]] = []
        for question, (statement, _), rows in zip(questions, requests, self._reader.run(requests), strict=True):
            if isinstance(question, NamedQuery):
                names = self._reader.columns[statement]
                answers.append([dict(zip(names, row, strict=True)) for row in rows])
            else:
                answers.append([read_stored_event(row) for row in rows])
        return answers

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        has_limits = agents is not None and any(task_limit is not None for task_limit in agents.values())
        if only is None and not has_limits:
            return self._claim_ready(worker, limit, program_format, agents)
        with self._transaction() as connection:
            if has_limits:
                connection.execute(self._sql["lock_claims"], {"schema": self._address.schema})
            now, _ = self._renew(connection, worker)
            leasing = self._leasing(connection, now, program_format)
            return leasing.claim(worker, limit, agents) if only is None else leasing.claim_one(worker, limit, only)

    def _claim_ready(
        self, worker: WorkerId, limit: int, program_format: int, agents: AgentConcurrency | None
    ) -> Sequence[Lease]:
        """Claim in one round trip. If nothing is due, nothing is written."""
        agent_names = None if agents is None else TextColumn(agents)
        claim = self._list_named_blobs(
            "claim_ready", worker=worker, format=program_format, agents=agent_names, limit=limit
        )
        renew = self._list_named_blobs("renew_before_claim", worker=worker, lease=self._lease)
        try:
            _, _, rows, _ = self._writer.run(
                [self._list_named_blobs("begin"), renew, claim, self._list_named_blobs("commit")]
            )
        finally:
            self.rollback()
        return [Lease(SessionId(session), worker, generation) for session, generation in rows]

    def offer(self, limit: int, program_format: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        with self._transaction() as connection:
            if not _fetch_value(connection.execute(self._sql["try_lock_claims"], {"schema": self._address.schema})):
                return Offer(has_more=True)
            now = _fetch_value(connection.execute(self._sql["now"]))
            return self._leasing(connection, now, program_format).offer(limit, agents, enqueue, connection)

    def _leasing(self, connection: PgConnection, now: int, program_format: int) -> Leasing:
        def ask(name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
            cursor = connection.execute(self._sql[name], params)
            return cursor.fetchall() if cursor.description else ()

        return Leasing(ask, TextColumn, IntegerColumn, now, self._lease, program_format)

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> HeartbeatReply:
        with self._transaction() as connection:
            now, has_lapsed = self._renew(connection, worker)
            if snapshots:
                columns = {"sessions": TextColumn(snapshots), "data": BytesColumn(snapshots.values())}
                connection.execute(self._sql["save_snapshots"], {"worker": worker, "at": now, **columns})
            if about:
                params = {"worker": worker, "now": now, "lease": self._lease, "about": about}
                connection.execute(self._sql["save_about"], params)
            if not has_lapsed:
                return HeartbeatReply(now)
            owned_rows = connection.execute(self._sql["owned"], {"worker": worker})
            return HeartbeatReply(now, frozenset(Lease(SessionId(row[0]), worker, row[1]) for row in owned_rows))

    def _renew(self, connection: PgConnection, worker: WorkerId) -> tuple[int, bool]:
        now, has_lapsed = connection.execute(self._sql["renew"], {"worker": worker, "lease": self._lease}).fetchall()[0]
        return now, has_lapsed

    def leave(self, worker: WorkerId) -> None:
        with self._transaction() as connection:
            connection.execute(self._sql["leave"], {"worker": worker})

    def release(self, lease: Lease) -> None:
        with self._transaction() as connection:
            connection.execute(self._sql["release"], msgspec.structs.asdict(lease))

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return self.answer_questions([NamedQuery(name, params)])[0]

    def put(self, digest: Digest, data: bytes) -> None:
        with self._writer.use() as connection:
            connection.execute(self._sql["save_blob"], {"digest": digest, "data": data})

    def get(self, digest: Digest) -> bytes | None:
        with self._reader.use() as connection:
            return read_postgres_blob(connection, digest)

    def add_chunks(self, document: str, entries: Sequence[IndexedChunk]) -> None:
        with self._writer.use() as connection:
            connection.execute(self._sql["add_chunks"], {"document": document, **_chunk_columns(entries)})

    def show_document(self, document: str, count: int) -> bool:
        with self._transaction() as connection:
            connection.execute(self._sql["show_document"], {"document": document, "count": count})
            return bool(connection.execute(self._sql["indexed"], {"documents": TextColumn([document])}).fetchall())

    def drop_chunks(self, document: str, limit: int) -> int:
        with self._transaction() as connection:
            connection.execute(self._sql["hide_document"], {"document": document})
            return connection.execute(self._sql["drop_chunks"], {"document": document, "limit": limit}).rowcount

    def find_indexed(self, documents: Sequence[str]) -> frozenset[str]:
        with self._reader.use() as connection:
            rows = connection.execute(self._sql["indexed"], {"documents": TextColumn(documents)})
            return frozenset(row[0] for row in rows)

    def chunks(self, document: str) -> Sequence[Chunk]:
        with self._reader.use() as connection:
            return [Chunk(*row) for row in connection.execute(self._sql["chunks"], {"document": document})]

    def search(
        self, documents: Sequence[str], names: Sequence[str], limit: int, *, match_all: bool
    ) -> Sequence[FoundChunk]:
        params = {"documents": TextColumn(documents), "query": to_tsquery(names, match_all=match_all), "limit": limit}
        with self._reader.use() as connection:
            return [FoundChunk(*row) for row in connection.execute(self._sql["search"], params)]

    def view(self) -> StoreView:
        with translate_errors(self._address):
            return PostgresView(open_greeted_connection(self._address, self._prepare_pooled_reader), self._address)

    def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        try:
            with self._transaction() as connection:
                connection.execute(self._sql["disable_idle_timeout"])
                connection.execute(self._sql["lock_tables"])
                rows = sorted(make(PostgresView(connection, self._address)), key=_table_order)
                for table in PROJECTIONS:
                    connection.execute(make_row_statements(table).clear.encode())
                for start in range(0, len(rows), ROWS_AT_ONCE):
                    self._writer.run(_list_inserts(rows[start : start + ROWS_AT_ONCE]))
        except (RowRefused, Conflict, OverflowError) as error:
            message = f"The events of {self._address.location} produce invalid rows. Nothing was changed."
            raise StoreUnusable(message) from error

    def scrub(self) -> bool:
        """Drop unreferenced blobs. The server overwrites old rows and its log later."""
        with self._transaction() as connection:
            now = _fetch_value(connection.execute(self._sql["now"]))
            connection.execute(self._sql["lock_blobs"])
            connection.execute(self._sql["sweep_blobs"], {"before": now - UNREFERENCED_BLOB_AGE})
        return False

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Listen for other writers. After a reconnect, reports every stream as changed."""
        with self._listener.use() as connection:
            if self._deaf_before:
                self._deaf_before = False
                return [Change(ALL_STREAMS, 0)]
            deadline = time.monotonic() + timeout
            while notifications := list(
                connection.notifies(timeout=max(0.0, deadline - time.monotonic()), stop_after=1)
            ):
                others = [notify for notify in notifications if notify.pid != self._writer.pid]
                if others:
                    return [change for notify in others for change in _parse_hint(notify.payload)]
        return []

    def close(self) -> None:
        for slot in (self._writer, self._reader, self._listener):
            slot.drop()

    def _prepare(self, connection: PgConnection) -> None:
        register_dumpers(connection)
        connection.execute(self._sql["configure"], {"schema": self._address.schema})

    def _prepare_writer(self, connection: PgConnection) -> None:
        self._prepare(connection)
        connection.execute(self._sql["configure_writer"], {"lock_timeout": self._lock_timeout})

    def _prepare_reader(self, connection: PgConnection) -> None:
        self._prepare(connection)
        connection.execute(self._sql["configure_reader"])

    def _prepare_listener(self, connection: PgConnection) -> None:
        self._prepare(connection)
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._address.schema)))
        self._deaf_before = True

    def _prepare_pooled_reader(self, connection: PgConnection) -> None:
        self._prepare(connection)
        connection.execute(self._sql["begin_snapshot"])
        run_postgres_query(connection, "meta", {})

    def _migrate(self, new_id: Callable[[], str]) -> None:
        """Migrate the schema. If several processes start together, one does it and the others wait."""
        migrations = list_migrations("postgres")
        schema = self._address.schema
        with self._transaction() as connection:
            self._reject_encoding(_fetch_value(connection.execute(self._sql["encoding"])))
            connection.execute(self._sql["lock_migration"], {"schema": schema})
            if not _fetch_value(connection.execute(self._sql["schema_exists"], {"schema": schema})):
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
            connection.execute(self._sql["create_meta"])
            version = self._schema_version(connection, migrations[-1][0])
            for number, script in migrations:
                if number > version:
                    connection.execute(script.encode(), prepare=False)
            meta_values = {"store": new_id()} if version == 0 else {}
            if version < migrations[-1][0]:
                meta_values["schema"] = str(migrations[-1][0])
            for name, value in meta_values.items():
                connection.execute(self._sql["save_meta"], {"name": name, "value": value})
            read_store_id(read_meta_values(run_postgres_query(connection, "meta", {})), self._address.location)

    def _schema_version(self, connection: PgConnection, newest: int) -> int:
        raw = read_meta_values(run_postgres_query(connection, "meta", {}))
        has_tables = _fetch_value(connection.execute(self._sql["has_tables"], {"schema": self._address.schema}))
        return read_schema_version(raw, newest, self._address.location, tables=has_tables)

    def _reject_encoding(self, encoding: str) -> None:
        if encoding != "UTF8":
            raise StoreUnusable(
                f"The database {self._address.location} has the encoding {encoding}, not UTF8. "
                "Create one with createdb --encoding=UTF8 --template=template0, and use that."
            )

    @contextmanager
    def _transaction(self) -> Generator[PgConnection]:
        try:
            with self._writer.use() as connection:
                connection.execute(self._sql["begin"])
                yield connection
                connection.execute(self._sql["commit"])
        finally:
            self.rollback()


def _list_inserts(rows: Sequence[Row]) -> list[Request]:
    requests: list[Request] = []
    for table, table_rows in groupby(rows, type):
        statement = make_batch_statements(table)
        requests.append((statement.insert, encode_columns(statement.kinds, map(msgspec.structs.astuple, table_rows))))
    return requests


def _make_request(file: str, name: str, values: Mapping[str, Value]) -> Request:
    statement, order = make_named_statement(file, name, *[(each, _type_of(value)) for each, value in values.items()])
    return statement, [_encode(values[each]) for each in order]


@cache
def make_named_statement(file: str, name: str, *types: tuple[str, int]) -> tuple[Statement, tuple[str, ...]]:
    """Make a statement of a file for values of these types. Also returns the order of its parameters."""
    type_by_name, order = dict(types), list[str]()

    def number(match: re.Match[str]) -> str:
        if match[1] not in order:
            order.append(match[1])
        return f"${order.index(match[1]) + 1}"

    text = PARAMETER.sub(number, load_postgres_queries(file)[name])
    return Statement(text.encode(), tuple(type_by_name[each] for each in order)), tuple(order)


def _type_of(value: Value) -> int:
    match value:
        case None:
            return 0
        case str():
            return TEXT
        case int():
            return BIGINT
        case bytes():
            return BYTEA
        case _:
            return value.OID


def _encode(value: Value) -> bytes | None:
    if isinstance(value, int):
        return encode_integer(value)
    return value if value is None or isinstance(value, bytes) else value.encode()


def format_hints(heads: Mapping[StreamId, int]) -> list[str]:
    """Format the heads of streams as texts that fit into notifications. For too many, one that means every stream."""
    text = msgspec.json.encode(heads).decode()
    if len(heads) > MAX_HINTED_STREAMS or (len(heads) == 1 and len(text.encode()) > NOTIFICATION_BYTES):
        return format_hints({ALL_STREAMS: 0})
    if len(text.encode()) <= NOTIFICATION_BYTES:
        return [text]
    pairs, half = list(heads.items()), len(heads) // 2
    return format_hints(dict(pairs[:half])) + format_hints(dict(pairs[half:]))


def _parse_hint(hint: str) -> list[Change]:
    heads = msgspec.json.decode(hint, type=dict[str, int])
    return [Change(StreamId(stream), head) for stream, head in heads.items()]


def _chunk_columns(entries: Sequence[IndexedChunk]) -> dict[str, Any]:
    chunks = [entry.chunk for entry in entries]
    return {
        "numbers": IntegerColumn(chunk.number for chunk in chunks),
        "starts": IntegerColumn(chunk.start for chunk in chunks),
        "ends": IntegerColumn(chunk.end for chunk in chunks),
        "texts": TextColumn(chunk.text for chunk in chunks),
        "words": TextColumn(to_tsvector(entry.words) for entry in entries),
    }


def _group_by_table(keys: Iterable[RowKey]) -> list[tuple[type[Row], list[tuple[Any, ...]]]]:
    """Group keys by table in lock order, sorted within each table, so that rows are always locked in one order."""
    keys_by_table = defaultdict[type[Row], list[tuple[Any, ...]]](list)
    for key in keys:
        keys_by_table[key[0]].append(key[1:])
    return [(table, sorted(keys_by_table[table])) for table in sorted(keys_by_table, key=_ORDER.__getitem__)]


_ORDER: Final = {table: place for place, table in enumerate(TABLES)}


def _table_order(row: Row) -> int:
    return _ORDER[type(row)]


def _fetch_value(cursor: psycopg.Cursor[tuple[Any, ...]]) -> Any:
    return cursor.fetchall()[0][0]
