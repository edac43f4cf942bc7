"""Connections to SQLite that survive forks, and its errors as those of the store."""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from halter.core.errors import RowRefused, StoreError, StoreUnavailable, StoreUnusable
from halter.system.forks import FORKING, ForkLock, let_fork_pass

PAGE_BYTES: Final = 2048
"""SQLite writes whole pages: with small ones, a single step writes half as much as with the default of 4096."""

LOCK_SECONDS: Final = 10.0
DATA_VERSION: Final = "PRAGMA data_version"
WAL_POLL_SECONDS: Final = 0.002


def open_connection(path: str, *, uri: bool = False) -> "ForkSafeConnection":
    """Open a connection whose commits survive a power failure. Rejects a database of another program."""
    connection = _connect(path, uri=uri)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        _enable_wal(connection, path)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def open_read_only(path: str) -> "ForkSafeConnection":
    """Open a file that is read-only for this user.

    Without a write-ahead log the file is complete and is opened as immutable, since SQLite cannot create its lock
    files. With a log, SQLite must be able to read both.
    """
    log = Path(f"{path}-wal")
    is_complete = not log.exists() or log.stat().st_size == 0
    connection = _connect(f"{Path(path).absolute().as_uri()}?mode=ro{'&immutable=1' if is_complete else ''}", uri=True)
    try:
        reject_foreign_database(connection, path)
    except sqlite3.OperationalError as error:
        connection.close()
        if is_complete or not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            raise
        raise StoreUnusable(
            f"The store {path} is read-only, and a part of it is still in {log}. Copy both into a writable folder, "
            "and use the copy."
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def is_read_only(path: str) -> bool:
    """Return True if a file exists, and it or its folder is not writable: SQLite creates files in the same folder."""
    file = Path(path)
    return file.exists() and not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))


def reject_foreign_database(connection: sqlite3.Connection, path: str) -> None:
    tables = list_tables(connection)
    if tables and "meta" not in tables:
        raise StoreUnusable(
            f"{path} is a SQLite database, but not a Halter store: it has the table {min(tables)}, but no table meta. "
            "Nothing was changed. Use another file."
        )


def list_tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
    return {str(row[0]) for row in rows}


class ForkSafeConnection(sqlite3.Connection):
    """A connection that is never inside SQLite when the process forks: its locks would stay locked in the child."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inside = ForkLock()
        with self.inside:
            super().__init__(*args, **kwargs)
            self._cursor = self.cursor()

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        cursor = self.cursor(ForkSafeCursor)
        if FORKING.locked():
            let_fork_pass()
        with self.inside.lock:
            return sqlite3.Cursor.execute(cursor, sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        return self.cursor(ForkSafeCursor).executemany(sql, parameters)

    def query(self, sql: str, parameters: Any = ()) -> tuple[Any, list[Any]]:
        """Run a query and fetch the description of its columns and all rows.

        A statement that is not fully read keeps its snapshot open, and another thread that reads on this connection
        meanwhile would see the same old snapshot.
        """
        cursor = self.cursor(ForkSafeCursor)
        if FORKING.locked():
            let_fork_pass()
        with self.inside.lock:
            sqlite3.Cursor.execute(cursor, sql, parameters)
            return cursor.description, sqlite3.Cursor.fetchall(cursor)

    def fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
        """Fetch all rows of a statement with the connection's one cursor."""
        if FORKING.locked():
            let_fork_pass()
        with self.inside.lock:
            return self._cursor.execute(sql, parameters).fetchall()

    def begin_write(self) -> int:
        """Begin a write transaction. Returns a number that changes when another connection commits.

        Raises sqlite3.OperationalError if another connection is writing.
        """
        if FORKING.locked():
            let_fork_pass()
        with self.inside.lock:
            execute = self._cursor.execute
            execute("BEGIN IMMEDIATE")
            return execute(DATA_VERSION).fetchone()[0]

    def execute_all(self, statements: Iterable[tuple[str, Iterable[Any]]]) -> None:
        """Execute statements that return no rows, each with all of its parameters, under one lock."""
        if FORKING.locked():
            let_fork_pass()
        with self.inside.lock:
            execute = self._cursor.executemany
            for sql, parameters in statements:
                execute(sql, parameters)

    def close(self) -> None:
        with self.inside:
            super().close()


class ForkSafeCursor(sqlite3.Cursor):
    """A cursor that holds the lock of its connection during each call."""

    connection: ForkSafeConnection  # pyright: ignore[reportIncompatibleMethodOverride]  only that class makes cursors

    def execute(self, sql: str, parameters: Any = (), /) -> Self:
        with self.connection.inside:
            return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Self:
        with self.connection.inside:
            return super().executemany(sql, parameters)

    def fetchone(self) -> Any:
        if FORKING.locked():
            let_fork_pass()
        with self.connection.inside.lock:
            return sqlite3.Cursor.fetchone(self)

    def fetchall(self) -> list[Any]:
        if FORKING.locked():
            let_fork_pass()
        with self.connection.inside.lock:
            return sqlite3.Cursor.fetchall(self)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  all rows, in one go
        return iter(self.fetchall())


def _connect(path: str, *, uri: bool) -> ForkSafeConnection:
    return sqlite3.connect(
        path,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        uri=uri,
        timeout=LOCK_SECONDS,
        factory=ForkSafeConnection,
    )


def _enable_wal(connection: sqlite3.Connection, path: str) -> None:
    """Switch to WAL. If several processes do so on a new file, SQLite rejects some without waiting: retry."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            reject_foreign_database(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(WAL_POLL_SECONDS)
        else:
            return


CONSTRAINT_ADVICE: Final = "Its write was rolled back. Halter has a bug, or rows were changed by hand."

LOW_DISK_BYTES: Final = 128 * 1024
"""With less free space, SQLite can fail to create its files and report only a disk error."""


class SqliteErrorScope:
    """A context manager that translates SQLite's errors."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SQLITE_ERRORS):
            raise translate_sqlite_error(error, self._path) from error


SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)


def translate_sqlite_error(error: sqlite3.Error | UnicodeDecodeError, path: str) -> StoreError:
    if isinstance(error, UnicodeDecodeError):
        # Python cannot decode SQLite's message about a damaged table whose name is not valid UTF-8.
        return make_damaged_error(error.object.decode("utf-8", "replace"), path)
    name = getattr(error, "sqlite_errorname", "")
    text = str(error)
    if isinstance(error, sqlite3.IntegrityError):
        return RowRefused(f"The store {path} refused a row ({text}). {CONSTRAINT_ADVICE}")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnavailable(
            f"The store {path} is locked by another process. Nothing was written. "
            "If this persists, look for a program that keeps it open."
        )
    if name.startswith("SQLITE_FULL") or (name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")) and is_disk_full(path)):
        return StoreUnavailable(f"The disk of {path} is full. Nothing was written. Free some space.")
    if name.startswith("SQLITE_READONLY"):
        return make_unwritable_error(path)
    if name.startswith("SQLITE_CANTOPEN"):
        folder = Path(path).parent
        return StoreUnusable(f"Cannot open the store {path}. Check that {folder} exists and is writable.")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return make_damaged_error(text, path)
    if name.startswith("SQLITE_IOERR"):
        return StoreUnavailable(f"The disk of {path} failed ({text}). Nothing was written. Check the disk.")
    if text == "no such module: fts5":
        return StoreUnusable(
            f"SQLite {sqlite3.sqlite_version} of this Python lacks full-text search (FTS5), which the store {path} "
            "needs. Use a Python build whose SQLite includes FTS5."
        )
    return StoreUnusable(
        f"The store {path} rejected a query ({text}). If its tables were changed by hand, restore it from a backup."
    )


def make_damaged_error(text: str, path: str) -> StoreUnusable:
    return StoreUnusable(
        f"The store {path} is damaged or not a Halter store ({text}). Restore it from a backup, or use another file."
    )


def make_unwritable_error(path: str) -> StoreUnusable:
    return StoreUnusable(f"The store {path} is not writable. Make the file and its folder writable for this user.")


def is_disk_full(path: str) -> bool:
    try:
        stats = os.statvfs(Path(path).parent)
    except (OSError, ValueError):
        return False
    # A file system without blocks, as /proc, holds no files of anybody.
    return stats.f_blocks > 0 and stats.f_bavail * stats.f_frsize < LOW_DISK_BYTES
