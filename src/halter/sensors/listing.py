"""What a file or a folder looks like at one moment, and what has changed since another. All of this blocks."""

import codecs
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from halter.core import folders
from halter.core.folders import Files, Look, in_words
from halter.core.library import Unreadable
from halter.core.protected import Refuses, unrefused
from halter.core.sensing import SensorFailed
from halter.core.text import clean

MOST_TEXT: Final = 64 * 1024
MOST_TOLD: Final = 1000
"""So many files and so many changes one reading tells of."""


def look(folder: Path, pattern: str) -> Look:
    """Look through a folder, without ever following a link to another. Raises SensorFailed."""
    found = folders.look(folder, pattern)
    if isinstance(found, Unreadable):
        raise SensorFailed(found.sentence)
    return found


def changes(before: Files, after: Files) -> list[dict[str, str]]:
    """List what has happened to files in between. A renamed one was deleted here and added there."""
    told = [("deleted", path) for path in sorted(before.keys() - after.keys())]
    told += [("added", path) for path in sorted(after.keys() - before.keys())]
    told += [("modified", path) for path in sorted(after.keys() & before.keys()) if after[path] != before[path]]
    return [{"change": change, "path": clean(path)} for change, path in told[:MOST_TOLD]]


def folder_value(files: Files, changed: list[dict[str, str]]) -> dict[str, Any]:
    """Say what a folder holds, the newest files first."""
    newest = sorted(files.items(), key=lambda each: (-each[1].modified, each[0]))[:MOST_TOLD]
    listed = [{"path": clean(path), "size": seen.size, "modified_at": _moment(seen.modified)} for path, seen in newest]
    return {"files": listed, "changes": changed}


def file_value(path: Path, shown: str, refuses: Refuses = unrefused) -> dict[str, Any]:
    """Say what a file is, and how it begins. Raises SensorFailed for what is there and cannot be read."""
    try:
        # A pipe that nobody writes to would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            if refuses(path, file.fileno()):
                raise SensorFailed(f"{shown} leads to what an agent may not read.")
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise SensorFailed(f"{shown} is no plain file.")
            text = _text(file.read(MOST_TEXT), whole=about.st_size <= MOST_TEXT)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": shown, "exists": False, "size": 0, "modified_at": None, "text": None}
    except OSError as error:
        raise SensorFailed(f"{shown} cannot be read: {in_words(error)}.") from error
    moment = _moment(about.st_mtime_ns)
    return {"path": shown, "exists": True, "size": about.st_size, "modified_at": moment, "text": text}


def _text(data: bytes, *, whole: bool) -> str | None:
    """Decode the beginning of a file, which may end within a letter; what is no text is None."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _moment(nanoseconds: int) -> str:
    """Write a time down as people do; one beyond all calendars as the last there is."""
    try:
        moment = datetime.fromtimestamp(nanoseconds / 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        moment = datetime.max.replace(tzinfo=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
