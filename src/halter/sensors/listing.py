"""What a file or a folder looks like at one moment, and what has changed since another. All of this blocks."""

import codecs
import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from halter.core.sensing import SensorFailed
from halter.core.text import clean

MOST_TEXT: Final = 64 * 1024
MOST_TOLD: Final = 1000
"""So many files and so many changes one reading tells of."""
MOST_ENTRIES: Final = 100_000
MOST_FOLDERS: Final = 1000


class Seen(msgspec.Struct, frozen=True):
    """A file, as far as its folder tells."""

    size: int
    modified: int
    inode: int


Files = Mapping[str, Seen]


class Look(msgspec.Struct, frozen=True):
    """The files that a pattern names, by their paths in the folder, and the folders in which others could appear."""

    files: Files
    folders: tuple[Path, ...]


def look(folder: Path, pattern: str) -> Look:
    """Look through a folder, without ever following a link to another. Raises SensorFailed."""
    wanted = PurePosixPath(pattern).parts
    home = os.path.realpath(folder)
    files: dict[str, Seen] = {}
    folders: list[Path] = []
    waiting: list[tuple[str, ...]] = [()]
    entries = 0
    while waiting:
        above = waiting.pop()
        found = _entries(folder.joinpath(*above), needed=not above)
        if found is None:
            continue
        folders.append(folder.joinpath(*above))
        entries += len(found)
        for entry in found:
            parts = (*above, entry.name)
            if entry.is_dir(follow_symlinks=False):
                waiting += [parts] if _may_hold(parts, wanted) else []
            elif fits(parts, wanted) and (seen := _seen(entry.path, home)):
                files[clean("/".join(parts))] = seen
        if entries > MOST_ENTRIES or len(folders) + len(waiting) > MOST_FOLDERS:
            raise SensorFailed(
                f"The folder {folder.name} holds more than {MOST_ENTRIES:,} files or {MOST_FOLDERS:,} folders: "
                "narrow its `pattern`, or watch a folder below it."
            )
    return Look(files, tuple(sorted(folders)))


def _entries(place: Path, *, needed: bool) -> list[os.DirEntry[str]] | None:
    """List a folder. One below that has just gone, or is not ours to read, is passed over."""
    try:
        with os.scandir(place) as found:
            return list(islice(found, MOST_ENTRIES + 1))
    except OSError as error:
        if needed:
            raise SensorFailed(f"The folder {place.name} cannot be read: {_told(error)}.") from error
        return None


def fits(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Tell whether a path fits a pattern; `**` stands for any number of folders, none included."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return fits(parts, wanted[1:]) or (bool(parts) and fits(parts[1:], wanted))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and fits(parts[1:], wanted[1:])


def _may_hold(folder: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Tell whether anything below a folder could fit."""
    if not wanted or not folder:
        return bool(wanted)
    if wanted[0] == "**":
        return True
    return len(wanted) > 1 and fnmatchcase(folder[0], wanted[0]) and _may_hold(folder[1:], wanted[1:])


def _seen(path: str, home: str) -> Seen | None:
    """Look at a file; at one that a link names only if it is in the folder as well."""
    try:
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode) and os.path.realpath(path).startswith(home + os.sep):
            about = os.stat(path)  # noqa: PTH116, as the lines around it.
    except OSError:
        return None
    return Seen(about.st_size, about.st_mtime_ns, about.st_ino) if stat.S_ISREG(about.st_mode) else None


def changes(before: Files, after: Files) -> list[dict[str, str]]:
    """List what has happened to files in between. A renamed one was deleted here and added there."""
    told = [("deleted", path) for path in sorted(before.keys() - after.keys())]
    told += [("added", path) for path in sorted(after.keys() - before.keys())]
    told += [("modified", path) for path in sorted(after.keys() & before.keys()) if after[path] != before[path]]
    return [{"change": change, "path": path} for change, path in told[:MOST_TOLD]]


def folder_value(files: Files, changed: list[dict[str, str]]) -> dict[str, Any]:
    """Say what a folder holds, the newest files first."""
    newest = sorted(files.items(), key=lambda each: (-each[1].modified, each[0]))[:MOST_TOLD]
    listed = [{"path": path, "size": seen.size, "modified_at": _moment(seen.modified)} for path, seen in newest]
    return {"files": listed, "changes": changed}


def file_value(path: Path, shown: str) -> dict[str, Any]:
    """Say what a file is, and how it begins. Raises SensorFailed for what is there and cannot be read."""
    try:
        # A pipe that nobody writes to would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise SensorFailed(f"{shown} is no plain file.")
            text = _text(file.read(MOST_TEXT), whole=about.st_size <= MOST_TEXT)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": shown, "exists": False, "size": 0, "modified_at": None, "text": None}
    except OSError as error:
        raise SensorFailed(f"{shown} cannot be read: {_told(error)}.") from error
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


def _told(error: OSError) -> str:
    return error.strerror or type(error).__name__
