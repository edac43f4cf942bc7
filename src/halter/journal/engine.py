"""What the three stores differ in: how rows are loaded, locked, saved and queried.

An engine is synchronous and knows nothing of asyncio; `JournalStore` runs it in threads, or inline. SQL is in `.sql`
files, each query named and described there. Claims and offers are the same for every database, over statements of the
same names. Also: rows cached while no other connection writes, and the store's id and schema version.
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
    split_words,
)
from halter.core.rows import TABLES, AuditRow, HoldRow, StreamRow
from halter.core.text import clean
from halter.core.vocabulary import Row, RowKey
from halter.journal.apply import TIMES, Changes, WorkingSet


class IndexedChunk(msgspec.Struct, frozen=True):
    chunk: Chunk
    words: tuple[str, ...]


def index_chunks(document: str, chunks: Iterable[Chunk]) -> list[IndexedChunk]:
    """Make chunks fit for every database, numbered in order."""
    return [
        IndexedChunk(
            msgspec.structs.replace(chunk, document=document, number=number, text=clean(chunk.text)),
            split_words(chunk.text),
        )
        for number, chunk in enumerate(chunks)
    ]


def to_fts5_query(names: Sequence[str], *, every: bool) -> str:
    """Words as an FTS5 query. They hold letters and digits only, so nothing needs escaping."""
    return (" AND " if every else " OR ").join(f'"{word}"' for word in names)


def to_tsquery(names: Sequence[str], *, every: bool) -> str:
    return (" & " if every else " | ").join(f"'{word}'" for word in names)


def to_tsvector(found: Sequence[str]) -> str:
    return " ".join(f"'{word}':{place}" for place, word in enumerate(found, 1))


PROJECTIONS: Final = tuple(table for table in TABLES if table is not StreamRow)
"""The tables that a rebuild replaces. Heads are part of the chain, and evidence."""


class Conflict(Exception):
    """Another process inserted the same row first: load and decide again."""


class Busy(Exception):
    """The store would have to wait, and the caller does not want to."""


class StoreView(Protocol):
    """A store at one moment: later commits are not visible."""

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]: ...

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run a named query over much data: plain columns, in its order."""
        ...

    def get(self, digest: Digest) -> bytes | None: ...

    def flaws(self) -> Sequence[str]:
        """Damage that the database itself finds, such as an index that does not match its table."""
        ...

    def close(self) -> None: ...


class StreamPage(msgspec.Struct, frozen=True):
    """A question for some events of a stream."""

    stream: StreamId
    after: int
    limit: int

    def ask(self, engine: "Engine") -> Sequence[Stored]:
        return engine.read(self.stream, self.after, self.limit)


class NamedQuery(msgspec.Struct, frozen=True):
    """A question of `queries.sql`."""

    name: str
    params: Mapping[str, Any]

    def ask(self, engine: "Engine") -> Sequence[Mapping[str, Any]]:
        return engine.ask(self.name, self.params)


Question = StreamPage | NamedQuery
AnswerTogether = Callable[[Sequence[Question]], Sequence[Sequence[Any]]]


class Engine(Protocol):
    """One store's way of keeping rows and events."""

    @property
    def look(self) -> AnswerTogether | None:
        """Answers several questions in one round trip; None where a short one takes less time than waking a thread."""
        ...

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        """Open a write transaction, lock rows in one global order, and return them with the transaction's time.

        That is never before the events that precede it, so a clock set back reorders nothing. The result also has the
        events that were committed already under the keys of `writes`. It becomes the caller's. Raises Busy instead of
        waiting if `wait` is False.
        """
        ...

    def save(self, changes: WorkingSet) -> None:
        """Write all changes into the open transaction; Conflict if an inserted row exists by now."""
        ...

    def commit(self) -> None:
        """Make the transaction durable; may raise Conflict too."""
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
        """Take due and orphaned sessions that this program understands, or a named one without an owner."""
        ...

    def offer(self, limit: int, program_format: int, agents: AgentConcurrency, enqueue: EnqueueTickets) -> Offer:
        """Hand out tickets for what could be claimed, unless another process is doing so."""
        ...

    def beat(self, worker: WorkerId, snapshots: Mapping[SessionId, bytes], about: str) -> HeartbeatReply: ...

    def leave(self, worker: WorkerId) -> None: ...

    def release(self, lease: Lease) -> None: ...

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]: ...

    def put(self, digest: Digest, data: bytes) -> None: ...

    def get(self, digest: Digest) -> bytes | None: ...

    def add_chunks(self, document: str, entries: Sequence[IndexedChunk]) -> None:
        """Add some of a document's chunks, not yet visible; existing ones stay."""
        ...

    def show_document(self, document: str, count: int) -> bool:
        """Make a document visible if it has that many chunks; return whether it has."""
        ...

    def drop_chunks(self, document: str, limit: int) -> int:
        """Hide a document and drop at most that many of its chunks; return how many."""
        ...

    def indexed(self, documents: Sequence[str]) -> frozenset[str]: ...

    def chunks(self, document: str) -> Sequence[Chunk]: ...

    def search(
        self, documents: Sequence[str], names: Sequence[str], limit: int, *, every: bool
    ) -> Sequence[FoundChunk]:
        """Chunks of these documents in which every word occurs, or any; the best first."""
        ...

    def view(self) -> StoreView:
        """Open a snapshot that blocks no one until it is closed; usable from any thread."""
        ...

    def replace(self, make: Callable[[StoreView], Iterable[Row]]) -> None:
        """Replace all projections, made from what a transaction sees that keeps other writers out."""
        ...

    def scrub(self) -> bool:
        """Overwrite lingering copies of erased bytes; return whether that is complete."""
        ...

    def wait_for_others(self, timeout: float) -> Sequence[Change]:
        """Wait, at most that many seconds, for other processes to write; return what they changed."""
        ...

    def close(self) -> None: ...


_NAMED: Final = re.compile(r"^-- name: (\w+)\n((?:--[^\n]*\n)*)(.*?);\s*$", re.MULTILINE | re.DOTALL)
PARAMETER: Final = re.compile(r"(?<!:):([a-z_]+)")


@cache
def load_queries(name: str) -> Mapping[str, str]:
    text = files("halter.journal.sql").joinpath(name).read_text("utf-8")
    return {match[1]: match[3].strip() for match in _NAMED.finditer(text)}


@cache
def list_migrations(dialect: str) -> tuple[tuple[int, str], ...]:
    folder = files("halter.journal.sql").joinpath(dialect)
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
    """The queries as PostgreSQL knows them: it has another function for the values of a list in JSON."""
    each = r"json_array_elements_text(CAST(\1 AS json))"
    return {query: _JSON_LIST.sub(each, sql) for query, sql in load_queries(name).items()}


def to_psycopg_parameters(sql: str) -> str:
    return PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))


class RowStatements(msgspec.Struct, frozen=True):
    """The mechanical statements of a table whose columns are the fields of its row type."""

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
    """The statement that adds so many rows. If it fails half-way, only its transaction undoes it: that costs less."""
    names, row = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
    return f"INSERT OR FAIL INTO {table} ({names}) VALUES {', '.join([f'({row})'] * count)}"


def _make_whole_update(row: type[Row]) -> str:
    """The statement that sets all columns but the key: its parameters are the row."""
    columns = [f'"{name}" = ?{place}' for place, name in enumerate(row.__struct_fields__, 1)]
    key = len(row.KEY)
    return f"UPDATE {row.TABLE} SET {', '.join(columns[key:])} WHERE {' AND '.join(columns[:key])}"


@cache
def make_update(row: type[Row], columns: Sequence[str]) -> str:
    """The statement that sets some columns: it takes their values first, then the key."""
    values = ", ".join(f'"{name}" = ?' for name in columns)
    return f"UPDATE {row.TABLE} SET {values} WHERE {_match_key(row)}"


def _match_key(row: type[Row]) -> str:
    return " AND ".join(f'"{name}" = ?' for name in row.KEY)


RunStatement = Callable[[str, Mapping[str, Any]], Sequence[tuple[Any, ...]]]


class Leasing(msgspec.Struct, frozen=True):
    """Claims and offers in one transaction. `names` and `numbers` encode lists for the database."""

    ask: RunStatement
    names: Callable[[Iterable[str]], Any]
    numbers: Callable[[Iterable[int]], Any]
    now: int
    lease: int
    program_format: int

    def claim(self, worker: WorkerId, limit: int, agents: AgentConcurrency | None) -> Sequence[Lease]:
        return [
            Lease(SessionId(row[0]), worker, row[1]) for row in self._find_claimable("claim", limit, agents, worker)
        ]

    def claim_one(self, worker: WorkerId, limit: int, only: SessionId | Ticket) -> Sequence[Lease]:
        """Take the named session; by a ticket, only if its generation is unchanged, and the ticket is used up."""
        session, generation = (only.session, only.generation) if isinstance(only, Ticket) else (only, None)
        params = {"worker": worker, "now": self.now, "format": self.program_format, "limit": limit}
        taken = self.ask("claim_one", params | {"session": session, "generation": generation})
        if generation is not None:
            self.ask("use_up", {"session": session})
        return [Lease(SessionId(row[0]), worker, row[1]) for row in taken]

    def offer(self, limit: int, agents: AgentConcurrency, enqueue: EnqueueTickets, connection: object) -> Offer:
        self.ask("drop_tickets", {"before": self.now - self.lease})
        ((waiting,),) = self.ask("count_tickets", {})
        remaining = max(0, limit - waiting)
        found = self._find_claimable("offer", remaining, agents, WorkerId("")) if remaining else ()
        tickets = tuple(Ticket(SessionId(session), agent, generation) for session, generation, agent in found)
        if tickets:
            offered = {"sessions": self.names(ticket.session for ticket in tickets)}
            offered["generations"] = self.numbers(ticket.generation for ticket in tickets)
            self.ask("offered", offered | {"at": self.now})
            enqueue(connection, tickets)
        return Offer(tickets, more=len(tickets) == remaining)

    def _find_claimable(
        self, verb: str, limit: int, agents: AgentConcurrency | None, worker: WorkerId
    ) -> list[tuple[Any, ...]]:
        """Orphaned and due sessions. Tasks of agents with a concurrency limit come last, each up to its limit."""
        unlimited = None if agents is None else [agent for agent, most in agents.items() if most is None]
        limited = {agent: most for agent, most in (agents or {}).items() if most is not None}
        params = {"worker": worker, "now": self.now, "format": self.program_format}
        mine = {"agents": None if agents is None else self.names(agents)}
        found = list(self.ask(f"{verb}_orphans", params | mine | {"limit": limit}))
        free = {"agents": None if unlimited is None else self.names(unlimited), "limited": self.names(limited)}
        found += self.ask(f"{verb}_due", params | free | {"limit": limit - len(found)})
        for agent, room in self._list_concurrency(limited):
            left = min(room, limit - len(found))
            found += self.ask(f"{verb}_tasks", params | {"agent": agent, "limit": left}) if left > 0 else ()
        return found

    def _list_concurrency(self, limited: Mapping[str, int]) -> Sequence[tuple[Any, ...]]:
        if not limited:
            return ()
        return self.ask("rooms", {"agents": self.names(limited), "most": self.numbers(limited.values())})


MOST_CACHED_ROWS: Final = 10_000
"""Rows cached at once: those of a thousand active sessions, in a few megabytes."""


MOST_CACHED_WRITES: Final = 50_000
"""Keys of writes cached at once, in a few megabytes."""

MADE_ONCE: Final[frozenset[type[Row]]] = frozenset((HoldRow, AuditRow))

_KEY_OF: Final = attrgetter("key")


class RowCache:
    """The rows of a store as one connection knows them. Its own changes are passed in, and count once committed."""

    def __init__(self, look: Callable[[RowKey], Row | None]) -> None:
        self._look = look
        self.version = 0
        """Changes when another connection commits; then the cache is empty."""
        self._at = -1
        self.rows: dict[RowKey, Row | None] = {}
        self.written: Changes | None = None
        """The changes of the open transaction."""
        self._writes: set[str] = set()
        """The keys of all writes to the streams that this connection began."""
        self._others: set[RowKey] = set()
        """The heads of all other streams among the rows."""
        self.latest = 0
        """No row or event that this connection has seen is later."""

    def load(self, keys: Sequence[RowKey], postponed: set[RowKey] | None = None) -> dict[RowKey, Row | None]:
        """The rows with these keys. Given a set, what is made once and not known is added to it, and not looked up."""
        if self.version != self._at or len(self.rows) > MOST_CACHED_ROWS or len(self._writes) > MOST_CACHED_WRITES:
            self.forget()
            self._at = self.version
        find = self.rows.get
        loaded: dict[RowKey, Any] = {}
        for key in keys:
            row = find(key, self)
            if row is self:
                kind = key[0]
                if postponed is not None and kind in MADE_ONCE:
                    postponed.add(key)
                    continue
                row = self._look(key)
                # What is made once, under an id of its own, is not asked for again while it does not exist.
                if row is not None or kind not in MADE_ONCE:
                    self.rows[key] = row
                if row is not None and kind in TIMES:
                    self.latest = max(self.latest, TIMES[kind](row))
                if row is not None and kind is StreamRow:
                    self._others.add(key)
            loaded[key] = row
        return loaded

    def may_repeat(self, rows: Sequence[RowKey], writes: Sequence[str]) -> bool:
        """Whether one of these writes may have been made before, by all that is known of the streams among the rows."""
        others = self._others
        return not (self._writes.isdisjoint(writes) and (not others or others.isdisjoint(rows)))

    def on_commit(self) -> None:
        """Know what was written. Append-only rows are rarely read again, so they are skipped."""
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
            if key[0] in MADE_ONCE:
                rows.pop(key, None)
            else:
                rows[key] = None

    def drop(self, rows: Iterable[RowKey]) -> None:
        """Forget rows that this connection has changed in another way than by writes."""
        for key in rows:
            self.rows.pop(key, None)

    def forget(self) -> None:
        self.rows.clear()
        self.written = None
        self._writes.clear()
        self._others.clear()


_ID: Final = re.compile("[A-Za-z0-9]{1,64}")
_NUMBER: Final = re.compile("[0-9]{1,9}")
_REMEDY: Final = "It was changed by hand: restore the store from a backup, or name another one."


def read_meta_values(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in rows}


def read_schema_version(raw: Mapping[str, Any], known: int, where: str, *, tables: bool) -> int:
    """The last migration applied: 0 for a store without tables. An incompatible store is refused."""
    written = raw.get("schema")
    if written is None and not tables:
        return 0
    if not isinstance(written, str) or not _NUMBER.fullmatch(written) or int(written) == 0:
        raise StoreUnusable(
            f"The store {where} must say which schema it has, and says {_quote_value(written)}. {_REMEDY}"
        )
    version = int(written)
    if version > known:
        raise StoreUnusable(
            f"The store {where} has schema {version}, and this program knows only {known}. "
            "Nothing was touched; use the newer Halter, or another store."
        )
    return version


def read_store_id(raw: Mapping[str, Any], where: str) -> str:
    """The id of a store. It is part of a file name, so it must be a plain word."""
    found = raw.get("store")
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise StoreUnusable(f"The store {where} must say which id it has, and says {_quote_value(found)}. {_REMEDY}")
    return found


def _quote_value(said: Any) -> str:
    return "nothing" if said is None else repr(said)[:80]


UNREFERENCED_BLOB_AGE: Final = DAY
"""Grace period for unreferenced blobs."""


def describe_missing_blob(digest: str, where: str) -> str:
    return (
        f"The store {where} does not hold the blob {digest}, which an event would name. It was never put, or was "
        "erased with the last session that named it. Nothing of the write was kept: put it again and repeat the write."
    )
