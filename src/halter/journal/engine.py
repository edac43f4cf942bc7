"""The interface of a storage engine: how rows are loaded, locked, saved and queried.

An engine is synchronous; `JournalStore` runs it in threads, or inline. SQL is in `.sql` files, each query named and
described there. Claims and offers are the same for every database, over statements of the same names. Also: the cache
of rows while no other connection writes, and the store's id and schema version.
"""

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec

from halter.core.clock import DAY
from halter.core.errors import StoreUnusable
from halter.core.ids import Digest, SessionId, StreamId, WorkerId
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
from halter.core.rows import TABLES, AuditRow, HoldRow, StreamRow
from halter.core.text import clean
from halter.core.vocabulary import Row, RowKey
from halter.core.words import split_words
from halter.journal.apply import TIMES, Changes, WorkingSet


class IndexedChunk(msgspec.Struct, frozen=True):
    chunk: Chunk
    words: tuple[str, ...]


def index_chunks(document: str, chunks: Iterable[Chunk]) -> list[IndexedChunk]:
    """Clean and number the chunks of a document for storage in any database."""
    return [
        IndexedChunk(
            msgspec.structs.replace(chunk, document=document, number=number, text=clean(chunk.text)),
            split_words(chunk.text),
        )
        for number, chunk in enumerate(chunks)
    ]


def to_fts5_query(words: Sequence[str], *, match_all: bool) -> str:
    """Convert words to an FTS5 query. They consist of letters and digits, so nothing needs escaping."""
    return (" AND " if match_all else " OR ").join(f'"{word}"' for word in words)


def to_tsquery(words: Sequence[str], *, match_all: bool) -> str:
    return (" & " if match_all else " | ").join(f"'{word}'" for word in words)


def to_tsvector(words: Sequence[str]) -> str:
    return " ".join(f"'{word}':{position}" for position, word in enumerate(words, 1))


PROJECTIONS: Final = tuple(table for table in TABLES if table is not StreamRow)
"""The tables that a rebuild replaces. Heads are part of the chain, and evidence."""


class Conflict(Exception):
    """Another process inserted the same row first. Load the rows and decide again."""


class Busy(Exception):
    """The store is locked, and the caller asked not to wait."""


class StoreView(Protocol):
    """A snapshot of a store: later commits are not visible."""

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]: ...

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run a named query over much data. Returns tuples in the order of its columns."""
        ...

    def get(self, digest: Digest) -> bytes | None: ...

    def flaws(self) -> Sequence[str]:
        """List the damage that the database itself finds, such as an index that does not match its table."""
        ...

    def close(self) -> None: ...


class StreamPage(msgspec.Struct, frozen=True):
    """A read of some events of a stream."""

    stream: StreamId
    after: int
    limit: int

    def ask(self, engine: "Engine") -> Sequence[Stored]:
        return engine.read(self.stream, self.after, self.limit)


class NamedQuery(msgspec.Struct, frozen=True):
    """A query of `queries.sql` with its parameters."""

    name: str
    params: Mapping[str, Any]

    def ask(self, engine: "Engine") -> Sequence[Mapping[str, Any]]:
        return engine.ask(self.name, self.params)


Question = StreamPage | NamedQuery
AnswerTogether = Callable[[Sequence[Question]], Sequence[Sequence[Any]]]


class Engine(Protocol):
    """The storage of rows and events. All methods block."""

    @property
    def answer_questions(self) -> AnswerTogether | None:
        """Answers several questions in one round trip. None if a short query takes less time than waking a thread."""
        ...

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        """Open a write transaction, lock rows in one global order, and return them with the transaction's time.

        That time is never before the preceding events, so a clock set back reorders nothing. The result also has the
        events that were committed before under the keys of `writes`. The caller owns it. Raises Busy instead of
        waiting if `wait` is False.
        """
        ...

    def save(self, changes: WorkingSet) -> None:
        """Write all changes into the open transaction. Raises Conflict if another process inserted the same row."""
        ...

    def commit(self) -> None:
        """Make the transaction durable. Can raise Conflict too."""
        ...

    def rollback(self) -> None: ...

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]: ...

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        """Claim due and orphaned sessions up to this program's format, or the one session of `only`."""
        ...

    def offer(self, limit: int, program_format: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        """Enqueue tickets for sessions that can be claimed, unless another process is doing so."""
        ...

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> HeartbeatReply: ...

    def leave(self, worker: WorkerId) -> None: ...

    def release(self, lease: Lease) -> None: ...

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]: ...

    def put(self, digest: Digest, data: bytes) -> None: ...

    def get(self, digest: Digest) -> bytes | None: ...

    def add_chunks(self, document: str, entries: Sequence[IndexedChunk]) -> None:
        """Add some of a document's chunks, which are not visible yet. Existing ones stay."""
        ...

    def show_document(self, document: str, count: int) -> bool:
        """Make a document visible if it has that many chunks. Returns False if it has not."""
        ...

    def drop_chunks(self, document: str, limit: int) -> int:
        """Hide a document and drop at most that many of its chunks. Returns their number."""
        ...

    def find_indexed(self, documents: Sequence[str]) -> frozenset[str]: ...

    def chunks(self, document: str) -> Sequence[Chunk]: ...

    def search(
        self, documents: Sequence[str], names: Sequence[str], limit: int, *, match_all: bool
    ) -> Sequence[FoundChunk]:
        """Search these documents for chunks with every word, or any. Returns the best first."""
        ...

    def view(self) -> StoreView:
        """Open a snapshot that blocks no other connection. It can be used from any thread; close it."""
        ...

    def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        """Replace all projections with rows made from a view, while other writers are locked out."""
        ...

    def scrub(self) -> bool:
        """Overwrite lingering copies of erased bytes. Returns False if some remain."""
        ...

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Wait up to `timeout` seconds for other processes to write. Returns their changes."""
        ...

    def close(self) -> None: ...


_NAMED: Final = re.compile(r"^-- name: (\w+)\n((?:--[^\n]*\n)*)(.*?);\s*$", re.MULTILINE | re.DOTALL)
PARAMETER: Final = re.compile(r"(?<!:):([a-z_]+)")


@cache
def load_queries(name: str) -> Mapping[str, str]:
    text = files("halter.journal").joinpath("sql", name).read_text("utf-8")
    return {match[1]: match[3].strip() for match in _NAMED.finditer(text)}


@cache
def list_migrations(dialect: str) -> tuple[tuple[int, str], ...]:
    folder = files("halter.journal").joinpath("sql", dialect)
    names = sorted(entry.name for entry in folder.iterdir() if re.match(r"\d{4}_", entry.name))
    return tuple((int(name[:4]), folder.joinpath(name).read_text("utf-8")) for name in names)


def split_statements(script: str) -> Iterator[str]:
    """Split a migration at its semicolons."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


_JSON_LIST: Final = re.compile(r"\bjson_each\((:[a-z_]+)\)")


@cache
def load_postgres_queries(name: str) -> Mapping[str, str]:
    """Load queries in PostgreSQL's dialect, which has another function for the values of a JSON list."""
    replacement = r"json_array_elements_text(CAST(\1 AS json))"
    return {query: _JSON_LIST.sub(replacement, sql) for query, sql in load_queries(name).items()}


def to_psycopg_parameters(sql: str) -> str:
    return PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))


class RowStatements(msgspec.Struct, frozen=True):
    """The generated statements of a table whose columns are the fields of its row type."""

    select: str
    insert: str
    update: str
    delete: str
    clear: str


@cache
def make_row_statements(row: type[Row]) -> RowStatements:
    """Derive the statements with `?` parameters."""
    names, key = row.__struct_fields__, _match_key(row)
    columns = [f'"{name}"' for name in names]
    return RowStatements(
        select=f"SELECT {', '.join(columns)} FROM {row.TABLE} WHERE {key}",
        insert=make_insert(row.TABLE, names, 1),
        update=_make_whole_update(row),
        delete=f"DELETE FROM {row.TABLE} WHERE {key}",
        clear=f"DELETE FROM {row.TABLE}",
    )


@cache
def make_insert(table: str, columns: Sequence[str], count: int) -> str:
    """Make the statement that inserts `count` rows. If it fails, roll back: OR FAIL costs less, but undoes nothing."""
    names, row = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
    return f"INSERT OR FAIL INTO {table} ({names}) VALUES {', '.join([f'({row})'] * count)}"


def _make_whole_update(row: type[Row]) -> str:
    """Make the statement that sets all columns but the key. Its parameters are the fields of the row."""
    columns = [f'"{name}" = ?{position}' for position, name in enumerate(row.__struct_fields__, 1)]
    key = len(row.KEY)
    return f"UPDATE {row.TABLE} SET {', '.join(columns[key:])} WHERE {' AND '.join(columns[:key])}"


@cache
def make_update(row: type[Row], columns: Sequence[str]) -> str:
    """Make the statement that sets some columns. It takes their values first, then the key."""
    values = ", ".join(f'"{name}" = ?' for name in columns)
    return f"UPDATE {row.TABLE} SET {values} WHERE {_match_key(row)}"


def _match_key(row: type[Row]) -> str:
    return " AND ".join(f'"{name}" = ?' for name in row.KEY)


RunStatement = Callable[[str, Mapping[str, Any]], Sequence[tuple[Any, ...]]]


class Leasing(msgspec.Struct, frozen=True):
    """Claims and offers in one transaction. `encode_names` and `encode_numbers` encode lists for the database."""

    ask: RunStatement
    encode_names: Callable[[Iterable[str]], Any]
    encode_numbers: Callable[[Iterable[int]], Any]
    now: int
    lease: int
    program_format: int

    def claim(self, worker: WorkerId, limit: int, agents: AgentConcurrency | None) -> Sequence[Lease]:
        return [
            Lease(SessionId(row[0]), worker, row[1]) for row in self._find_claimable("claim", limit, agents, worker)
        ]

    def claim_one(self, worker: WorkerId, limit: int, only: SessionId | Ticket) -> Sequence[Lease]:
        """Claim one session. With a ticket, its generation must be unchanged; the ticket is used up in any case."""
        session, generation = (only.session, only.generation) if isinstance(only, Ticket) else (only, None)
        params = {"worker": worker, "now": self.now, "format": self.program_format, "limit": limit}
        rows = self.ask("claim_one", params | {"session": session, "generation": generation})
        if generation is not None:
            self.ask("drop_ticket", {"session": session})
        return [Lease(SessionId(row[0]), worker, row[1]) for row in rows]

    def offer(self, limit: int, agents: AgentConcurrency, enqueue: EnqueueTickets, connection: object) -> Offer:
        self.ask("drop_tickets", {"before": self.now - self.lease})
        ((open_count,),) = self.ask("count_tickets", {})
        remaining = max(0, limit - open_count)
        rows = self._find_claimable("offer", remaining, agents, WorkerId("")) if remaining else ()
        tickets = tuple(Ticket(SessionId(session), agent, generation) for session, generation, agent in rows)
        if tickets:
            ticket_columns = {"sessions": self.encode_names(ticket.session for ticket in tickets)}
            ticket_columns["generations"] = self.encode_numbers(ticket.generation for ticket in tickets)
            self.ask("save_tickets", ticket_columns | {"at": self.now})
            enqueue(connection, tickets)
        return Offer(tickets, has_more=len(tickets) == remaining)

    def _find_claimable(
        self, verb: str, limit: int, agents: AgentConcurrency | None, worker: WorkerId
    ) -> list[tuple[Any, ...]]:
        """Find orphaned and due sessions. Tasks of agents with a concurrency limit come last, up to each limit."""
        unlimited_agents = (
            None if agents is None else [agent for agent, task_limit in agents.items() if task_limit is None]
        )
        limit_by_agent = {agent: task_limit for agent, task_limit in (agents or {}).items() if task_limit is not None}
        params = {"worker": worker, "now": self.now, "format": self.program_format}
        agent_params = {"agents": None if agents is None else self.encode_names(agents)}
        rows = list(self.ask(f"{verb}_orphans", params | agent_params | {"limit": limit}))
        due_params = {
            "agents": None if unlimited_agents is None else self.encode_names(unlimited_agents),
            "limited": self.encode_names(limit_by_agent),
        }
        rows += self.ask(f"{verb}_due", params | due_params | {"limit": limit - len(rows)})
        for agent, free_slots in self._list_concurrency(limit_by_agent):
            remaining = min(free_slots, limit - len(rows))
            rows += self.ask(f"{verb}_tasks", params | {"agent": agent, "limit": remaining}) if remaining > 0 else ()
        return rows

    def _list_concurrency(self, limit_by_agent: Mapping[str, int]) -> Sequence[tuple[Any, ...]]:
        if not limit_by_agent:
            return ()
        return self.ask(
            "free_slots",
            {"agents": self.encode_names(limit_by_agent), "most": self.encode_numbers(limit_by_agent.values())},
        )


MAX_CACHED_ROWS: Final = 10_000
"""Maximum number of cached rows: those of a thousand active sessions, in a few megabytes."""


MAX_CACHED_WRITES: Final = 50_000
"""Maximum number of cached write keys, in a few megabytes."""

WRITE_ONCE_ROWS: Final[frozenset[type[Row]]] = frozenset((HoldRow, AuditRow))

_KEY_OF: Final = attrgetter("key")


class RowCache:
    """The rows of a store that one connection has read. Its own changes are added when they are committed."""

    def __init__(self, read_row: Callable[[RowKey], Row | None]) -> None:
        self._read_row = read_row
        self.version = 0
        """Changes when another connection commits, which invalidates the cache."""
        self._at = -1
        self.rows: dict[RowKey, Row | None] = {}
        self.written: Changes | None = None
        """The changes of the open transaction."""
        self._writes: set[str] = set()
        """The keys of all writes to streams that this connection created."""
        self._foreign_heads: set[RowKey] = set()
        """The keys of the head rows of all other streams in the cache."""
        self.latest = 0
        """The latest time of a row or event that this connection has seen."""

    def load(self, keys: Sequence[RowKey], unread: set[RowKey] | None = None) -> dict[RowKey, Row | None]:
        """Return the rows with these keys. With `unread`, uncached write-once rows are only added to it."""
        if self.version != self._at or len(self.rows) > MAX_CACHED_ROWS or len(self._writes) > MAX_CACHED_WRITES:
            self.forget()
            self._at = self.version
        find = self.rows.get
        loaded: dict[RowKey, Any] = {}
        for key in keys:
            row = find(key, self)
            if row is self:
                kind = key[0]
                if unread is not None and kind in WRITE_ONCE_ROWS:
                    unread.add(key)
                    continue
                row = self._read_row(key)
                # A missing row that is written once, under a new id, is not read again, so it is not cached.
                if row is not None or kind not in WRITE_ONCE_ROWS:
                    self.rows[key] = row
                if row is not None and kind in TIMES:
                    self.latest = max(self.latest, TIMES[kind](row))
                if row is not None and kind is StreamRow:
                    self._foreign_heads.add(key)
            loaded[key] = row
        return loaded

    def can_repeat(self, rows: Sequence[RowKey], writes: Sequence[str]) -> bool:
        """Return False if the cached streams prove that none of these writes was committed before."""
        foreign_heads = self._foreign_heads
        return not (self._writes.isdisjoint(writes) and (not foreign_heads or foreign_heads.isdisjoint(rows)))

    def on_commit(self) -> None:
        """Add the committed changes. Append-only rows are rarely read again, so they are skipped."""
        changes, self.written, rows = self.written, None, self.rows
        if changes is None:
            return
        if changes.events:
            self.latest = max(self.latest, changes.events[-1].at)
            self._writes.update(map(_KEY_OF, changes.events))
        rows |= changes.updates
        for key, row in changes.inserts.items():
            if not row.APPEND_ONLY or key in rows:
                rows[key] = row
        for key in changes.deletes:
            if key[0] in WRITE_ONCE_ROWS:
                rows.pop(key, None)
            else:
                rows[key] = None

    def drop(self, rows: Iterable[RowKey]) -> None:
        """Drop rows that this connection has changed by other means than writes."""
        for key in rows:
            self.rows.pop(key, None)

    def forget(self) -> None:
        self.rows.clear()
        self.written = None
        self._writes.clear()
        self._foreign_heads.clear()


_ID: Final = re.compile("[A-Za-z0-9]{1,64}")
_NUMBER: Final = re.compile("[0-9]{1,9}")
_REMEDY: Final = "The store was edited by hand. Restore it from a backup, or use another one."


def read_meta_values(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in rows}


def read_schema_version(raw: Mapping[str, Any], newest: int, location: str, *, tables: bool) -> int:
    """Read the number of the last migration; 0 for a store without tables. Raises StoreUnusable if unsupported."""
    version_text = raw.get("schema")
    if version_text is None and not tables:
        return 0
    if not isinstance(version_text, str) or not _NUMBER.fullmatch(version_text) or int(version_text) == 0:
        raise StoreUnusable(
            f"The store {location} has an invalid schema version: {_quote_value(version_text)}. {_REMEDY}"
        )
    version = int(version_text)
    if version > newest:
        raise StoreUnusable(
            f"The store {location} has schema version {version}, but this version of Halter supports up to {newest}. "
            "Nothing was changed. Use the newer Halter, or another store."
        )
    return version


def read_store_id(raw: Mapping[str, Any], location: str) -> str:
    """Read the id of a store. It becomes part of a file name, so it must consist of letters and digits."""
    store_id = raw.get("store")
    if not isinstance(store_id, str) or not _ID.fullmatch(store_id):
        raise StoreUnusable(f"The store {location} has an invalid id: {_quote_value(store_id)}. {_REMEDY}")
    return store_id


def _quote_value(value: Any) -> str:
    return "none" if value is None else repr(value)[:80]


UNREFERENCED_BLOB_AGE: Final = DAY
"""The age at which an unreferenced blob is deleted."""


def describe_missing_blob(digest: str, location: str) -> str:
    return (
        f"Blob {digest} is missing from the store {location}, so no event can refer to it. It was never saved, or was "
        "erased with the last session that referred to it. Nothing was written. Save the blob again, then repeat the "
        "write."
    )
