"""The hand of somebody who has the password of the database, knows its tables, and goes past all of Halter."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from halter_drills.drill import Connection, StoreKind

TABLES: Final = (
    *("events", "streams", "sessions", "budgets", "holds", "spends", "audit", "blobs", "workers", "snapshots"),
)
"""All tables but the one that says which store it is."""

SELECT: Final = (
    "SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash FROM events"
)
INSERT: Final = (
    "INSERT INTO events (stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
CHANGE: Final = "UPDATE events SET {column} = ? WHERE stream = ? AND seq = ?"
SAVE: Final = "CREATE TABLE saved_{table} AS SELECT * FROM {table}"
EMPTY: Final = "DELETE FROM {table}"
REFILL: Final = "INSERT INTO {table} {numbered} SELECT * FROM saved_{table}"


class Entry(NamedTuple):
    """One event, column by column."""

    stream: str
    seq: int
    kind: str
    version: int
    at: int
    generation: int
    key: str
    blob: str | None
    facts: bytes
    body: bytes | None
    salt: bytes | None
    digest: bytes
    hash: bytes


class Hand:
    """Changes a store with plain SQL, and puts everything back as it was."""

    def __init__(self, database: Connection, kind: StoreKind) -> None:
        self._database = database
        self._kind = kind

    def do(self, statement: str, *values: Any) -> None:
        """Run a statement whose parameters are written as `?`."""
        self._execute(statement, values)

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Ask for rows."""
        return self._execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Sequence[Any]) -> Any:
        return self._database.execute(statement.replace("?", "%s") if self._kind == "postgresql" else statement, values)

    def entries(self, stream: str) -> list[Entry]:
        """Read a stream."""
        return [Entry(*row) for row in self.rows(f"{SELECT} WHERE stream = ? ORDER BY seq", stream)]

    def add(self, entry: Entry) -> None:
        """Put an event where it says that it stands."""
        self.do(INSERT, *entry)

    def change(self, entry: Entry, **columns: Any) -> None:
        """Change some columns of an event."""
        for column, value in columns.items():
            self.do(CHANGE.format(column=column), value, entry.stream, entry.seq)

    def remove(self, entry: Entry) -> None:
        """Delete an event."""
        self.do("DELETE FROM events WHERE stream = ? AND seq = ?", entry.stream, entry.seq)

    def renumber(self, stream: str, after: int, by: int) -> None:
        """Shift the numbers of all events that follow; through negative ones, since no number may stand twice."""
        self.do("UPDATE events SET seq = -(seq + ?) WHERE stream = ? AND seq > ?", by, stream, after)
        self.do("UPDATE events SET seq = -seq WHERE stream = ? AND seq < 0", stream)

    def set_head(self, stream: str) -> None:
        """Make the head of a stream fit its last event."""
        last = self.entries(stream)[-1]
        self.do("UPDATE streams SET head = ?, hash = ?, at = ? WHERE stream = ?", last.seq, last.hash, last.at, stream)

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Let all statements take effect together."""
        self.do("BEGIN")
        yield
        self.do("COMMIT")

    def save(self) -> None:
        """Keep a copy of everything."""
        for table in TABLES:
            self.do(SAVE.format(table=table))

    def restore(self) -> None:
        """Put everything back as it was when it was saved."""
        with self.at_once():
            for table in TABLES:
                numbered = "OVERRIDING SYSTEM VALUE" if (self._kind, table) == ("postgresql", "events") else ""
                self.do(EMPTY.format(table=table))
                self.do(REFILL.format(table=table, numbered=numbered))
