"""What SQLite's errors mean, as sentences for the person who can act."""

import os
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Final

from halter.core.errors import RowRefused, StoreError, StoreUnavailable, StoreUnusable

REFUSED: Final = "Nothing of its write was kept; the program has a mistake, or somebody changed rows by hand."

LITTLE_ROOM: Final = 128 * 1024
"""With less room than this, SQLite may fail to make its files, and then it says only that the disk failed."""


class InWords:
    """A block in which SQLite's errors become sentences."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say what went wrong."""
        if isinstance(error, sqlite3.Error):
            raise in_words(error, self._path) from error
        if isinstance(error, UnicodeDecodeError):
            # Python stumbles over what SQLite says of a damaged table whose name is no text any more.
            raise damaged(error.object.decode("utf-8", "replace"), self._path) from error


def in_words(error: sqlite3.Error, path: str) -> StoreError:
    """Turn SQLite's error into a sentence."""
    name = getattr(error, "sqlite_errorname", "")
    text = str(error)
    if isinstance(error, sqlite3.IntegrityError):
        return RowRefused(f"The store {path} refused a row ({text}). {REFUSED}")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnavailable(
            f"The store {path} is locked by another process. "
            "Nothing was written; it will be tried again. If it stays so, look for a program that keeps it open."
        )
    if name.startswith("SQLITE_FULL") or (name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")) and is_full(path)):
        return StoreUnavailable(f"The disk of {path} is full. Nothing was written; free some space and it goes on.")
    if name.startswith("SQLITE_READONLY"):
        return unwritable(path)
    if name.startswith("SQLITE_CANTOPEN"):
        folder = Path(path).parent
        return StoreUnusable(f"The store {path} cannot be opened: check that {folder} exists and may be written to.")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return damaged(text, path)
    if name.startswith("SQLITE_IOERR"):
        return StoreUnavailable(f"The disk of {path} failed ({text}). Nothing was written; check the disk.")
    if text == "no such module: fts5":
        return StoreUnusable(
            f"SQLite {sqlite3.sqlite_version} of this Python has no full-text search (FTS5), which the store {path} "
            "needs: use a Python whose SQLite has it."
        )
    return StoreUnusable(
        f"The store {path} did not understand what was asked of it ({text}). If somebody changed its tables by hand, "
        "restore it from a backup."
    )


def damaged(text: str, path: str) -> StoreUnusable:
    """Say that a file cannot be read, for this reason."""
    return StoreUnusable(
        f"The store {path} is damaged or not a Halter store ({text}). Restore it from a backup, or name another file."
    )


def unwritable(path: str) -> StoreUnusable:
    """Say that a file may only be read."""
    return StoreUnusable(f"The store {path} cannot be written to: make the file and its folder writable for this user.")


def is_full(path: str) -> bool:
    """Tell whether the disk of a file has next to no room left for this user."""
    try:
        disk = os.statvfs(Path(path).parent)
    except (OSError, ValueError):
        return False
    return disk.f_bavail * disk.f_frsize < LITTLE_ROOM
