"""Opening a SQLite file: to write durably, or as it stands where it may only be read."""

import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from halter.core.errors import StoreUnusable

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


def _connected(path: str, *, uri: bool) -> sqlite3.Connection:
    return sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=256, uri=uri, timeout=LOCK_SECONDS
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
