"""Opening a SQLite file: to write durably, or as it stands where it may only be read."""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Self

from halter.core.errors import StoreUnusable
from halter.core.forks import FORKING, ForkLock, let_fork_pass

PAGE_BYTES: Final = 2048
"""SQLite writes whole pages: with small ones, a lone step writes half as much as with the usual 4096."""

LOCK_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.002


def open_connection(path: str, *, uri: bool = False) -> sqlite3.Connection:
    """Open a connection whose commits survive a power cut. A database of another program is left as it is."""
    connection = _connected(path, uri=uri)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        _write_ahead(connection, path)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_read(path: str) -> sqlite3.Connection:
    """Open a file that may only be read.

    Without a write-ahead log the file is whole and is read as it stands, since SQLite could make no files beside it
    to keep others away. What is only in a log must be read with it.
    """
    log = Path(f"{path}-wal")
    whole = not log.exists() or log.stat().st_size == 0
    connection = _connected(f"{Path(path).absolute().as_uri()}?mode=ro{'&immutable=1' if whole else ''}", uri=True)
    try:
        refuse_foreign(connection, path)
    except sqlite3.OperationalError as error:
        connection.close()
        if whole or not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            raise
        raise StoreUnusable(
            f"The store {path} may only be read, and a part of it is still in {log}: copy both into a folder that "
            "may be written to, and use the copy."
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def may_only_be_read(path: str) -> bool:
    """Tell whether a file is there, and may not be written to, or not with the files that SQLite makes beside it."""
    file = Path(path)
    return file.exists() and not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))


def refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    """Leave the database of another program alone."""
    found = tables(connection)
    if found and "meta" not in found:
        raise StoreUnusable(
            f"{path} is a SQLite database, but not a Halter store: it has the table {min(found)} and does not say "
            "what it is. Nothing was touched; name another file."
        )


def tables(connection: sqlite3.Connection) -> set[str]:
    """List the tables, without SQLite's own."""
    named = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
    return {str(row[0]) for row in named}


class Connection(sqlite3.Connection):
    """A connection that is not inside SQLite while the process forks: SQLite's locks would stay locked in the copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inside = ForkLock()
        with self.inside:
            super().__init__(*args, **kwargs)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run a statement up to its first row."""
        cursor = self.cursor(Cursor)
        if FORKING.locked():
            let_fork_pass()
        with self.inside.lock:
            return sqlite3.Cursor.execute(cursor, sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Run a statement for each of the parameters."""
        return self.cursor(Cursor).executemany(sql, parameters)

    def close(self) -> None:
        """Close the file."""
        with self.inside:
            super().close()


class Cursor(sqlite3.Cursor):
    """A cursor whose every step is taken under the lock of its connection."""

    connection: Connection  # pyright: ignore[reportIncompatibleMethodOverride]  no other connection makes one

    def execute(self, sql: str, parameters: Any = (), /) -> Self:
        """Run a statement up to its first row."""
        with self.connection.inside:
            return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Self:
        """Run a statement for each of the parameters."""
        with self.connection.inside:
            return super().executemany(sql, parameters)

    def fetchone(self) -> Any:
        """Take one row."""
        if FORKING.locked():
            let_fork_pass()
        with self.connection.inside.lock:
            return sqlite3.Cursor.fetchone(self)

    def fetchall(self) -> list[Any]:
        """Take all rows that are left."""
        if FORKING.locked():
            let_fork_pass()
        with self.connection.inside.lock:
            return sqlite3.Cursor.fetchall(self)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  all rows, in one go
        return iter(self.fetchall())


def _connected(path: str, *, uri: bool) -> Connection:
    return sqlite3.connect(
        path,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        uri=uri,
        timeout=LOCK_SECONDS,
        factory=Connection,
    )


def _write_ahead(connection: sqlite3.Connection, path: str) -> None:
    """Switch to WAL. Of several processes that do so on a new file at once, SQLite refuses some without waiting."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            refuse_foreign(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)
        else:
            return
