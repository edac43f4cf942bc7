"""What one connection to a SQLite file sees."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from halter.core.ids import Digest
from halter.journal.queries import load
from halter.journal.sqlite_words import InWords

T = TypeVar("T")

FLAWS_TOLD: Final = 20
"""A damaged index misses many rows, and a few of them tell as much as all."""


class SqliteView:
    """The store as a transaction of this connection sees it."""

    def __init__(self, connection: sqlite3.Connection, in_words: InWords) -> None:
        self._connection = connection
        self._in_words = in_words

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query."""
        return self._read(lambda: answers(self._connection, name, params))

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run a named query, for its plain columns."""
        return self._read(lambda: asked(self._connection, name, params).fetchall())

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        return self._read(lambda: blob(self._connection, digest))

    def flaws(self) -> Sequence[str]:
        """Let SQLite compare its pages and indexes with each other."""
        found = self._read(lambda: self._connection.execute(f"PRAGMA integrity_check({FLAWS_TOLD})").fetchall())
        return [str(row[0]) for row in found if row != ("ok",)]

    def close(self) -> None:
        """End the transaction with the connection."""
        self._connection.close()

    def _read(self, job: Callable[[], T]) -> T:
        """Read, also text that somebody damaged: whoever examines a store must not stumble over it."""
        with self._in_words:
            try:
                return job()
            except sqlite3.OperationalError as error:
                if "decode" not in str(error):
                    raise
                self._connection.text_factory = _lenient
                return job()


def asked(connection: sqlite3.Connection, name: str, params: Mapping[str, Any]) -> sqlite3.Cursor:
    """Begin to run a named query."""
    return connection.execute(load("queries.sql")[name], dict(params))


def answers(connection: sqlite3.Connection, name: str, params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Run a named query."""
    cursor = asked(connection, name, params)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def blob(connection: sqlite3.Connection, digest: Digest) -> bytes | None:
    """Return a blob, if it is there."""
    row = connection.execute(load("sqlite/engine.sql")["get"], {"digest": digest}).fetchone()
    return None if row is None else row[0]


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace")
