"""A read-only view of a store in SQLite."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from halter.core.ids import Digest
from halter.journal.engine import load_queries
from halter.journal.sqlite_connection import ForkSafeConnection, SqliteErrorScope

MAX_REPORTED_FLAWS: Final = 20
"""Maximum number of flaws reported: a damaged index can miss many rows."""

T = TypeVar("T")


class SqliteView:
    def __init__(self, connection: ForkSafeConnection, error_scope: SqliteErrorScope) -> None:
        self._connection = connection
        self._error_scope = error_scope

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return self._read_tolerantly(lambda: run_sqlite_query(self._connection, name, params))

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        return self._read_tolerantly(lambda: self._connection.query(load_queries("queries.sql")[name], dict(params))[1])

    def get(self, digest: Digest) -> bytes | None:
        return self._read_tolerantly(lambda: read_sqlite_blob(self._connection, digest))

    def flaws(self) -> Sequence[str]:
        rows = self._read_tolerantly(
            lambda: self._connection.execute(f"PRAGMA integrity_check({MAX_REPORTED_FLAWS})").fetchall()
        )
        return [str(row[0]) for row in rows if row != ("ok",)]

    def close(self) -> None:
        self._connection.close()

    def _read_tolerantly(self, read: Callable[[], T]) -> T:
        """Read with invalid UTF-8 replaced if necessary: verification must not stop at damaged text."""
        with self._error_scope:
            try:
                return read()
            except sqlite3.OperationalError as error:
                if "decode" not in str(error):
                    raise
                self._connection.text_factory = _decode_lenient
                return read()


def run_sqlite_query(connection: ForkSafeConnection, name: str, params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    columns, rows = connection.query(load_queries("queries.sql")[name], dict(params))
    if not rows:
        return []
    names = [column[0] for column in columns]
    return [dict(zip(names, row, strict=True)) for row in rows]


def read_sqlite_blob(connection: ForkSafeConnection, digest: Digest) -> bytes | None:
    _, rows = connection.query(load_queries("sqlite/engine.sql")["find_blob"], {"digest": digest})
    return rows[0][0] if rows else None


def _decode_lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace")


@cache
def select_by_keys(count: int) -> str:
    """Make the statement that selects the events of earlier writes with `count` keys."""
    return load_queries("sqlite/engine.sql")["by_key"].replace("= :key", f"IN ({', '.join('?' * count)})")
