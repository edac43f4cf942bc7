"""What a folder holds at one moment, without what only links lead to. All of this blocks."""

import os
import stat
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from halter.core.library import Unreadable

MOST_ENTRIES: Final = 100_000
MOST_FOLDERS: Final = 1000


class Seen(msgspec.Struct, frozen=True):
    """A file, as far as its folder tells."""

    size: int
    modified: int
    inode: int


Files = Mapping[str, Seen]


class Look(msgspec.Struct, frozen=True):
    """The files that a pattern names, by their paths in the folder, and the folders in which others could appear.

    A path is as the disk has it, for it to be found again: one that is no text has to be cleaned before it is told.
    """

    files: Files
    folders: tuple[Path, ...]


def look(folder: Path, pattern: str) -> Look | Unreadable:
    """Look through a folder, without ever following a link out of it."""
    wanted = PurePosixPath(pattern).parts
    home = os.path.realpath(folder)
    files: dict[str, Seen] = {}
    folders: list[Path] = []
    waiting: list[tuple[str, ...]] = [()]
    entries = 0
    while waiting:
        above = waiting.pop()
        found = _entries(folder.joinpath(*above))
        if isinstance(found, Unreadable):
            if not above:
                return found
            continue
        folders.append(folder.joinpath(*above))
        entries += len(found)
        for entry in found:
            parts = (*above, entry.name)
            if entry.is_dir(follow_symlinks=False):
                waiting += [parts] if may_hold(parts, wanted) else []
            elif fits(parts, wanted) and (seen := _seen(entry.path, home)):
                files["/".join(parts)] = seen
        if entries > MOST_ENTRIES or len(folders) + len(waiting) > MOST_FOLDERS:
            return Unreadable(
                f"The folder {folder.name} holds more than {MOST_ENTRIES:,} files or {MOST_FOLDERS:,} folders: "
                "narrow its `pattern`, or name a folder below it."
            )
    return Look(files, tuple(sorted(folders)))


def _entries(place: Path) -> list[os.DirEntry[str]] | Unreadable:
    """List a folder. Below the first, one that has just gone, or is not ours to read, is passed over."""
    try:
        with os.scandir(place) as found:
            return list(islice(found, MOST_ENTRIES + 1))
    except OSError as error:
        return Unreadable(f"The folder {place.name} cannot be read: {in_words(error)}.")


def fits(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Tell whether a path fits a pattern; `**` stands for any number of folders, none included."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return fits(parts, wanted[1:]) or (bool(parts) and fits(parts[1:], wanted))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and fits(parts[1:], wanted[1:])


def may_hold(folder: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Tell whether anything below a folder could fit."""
    if not wanted or not folder:
        return bool(wanted)
    if wanted[0] == "**":
        return True
    return len(wanted) > 1 and fnmatchcase(folder[0], wanted[0]) and may_hold(folder[1:], wanted[1:])


def _seen(path: str, home: str) -> Seen | None:
    """Look at a file; at one that a link names only if it is in the folder as well."""
    try:
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode) and os.path.realpath(path).startswith(home + os.sep):
            about = os.stat(path)  # noqa: PTH116, as the lines around it.
    except OSError:
        return None
    return Seen(about.st_size, about.st_mtime_ns, about.st_ino) if stat.S_ISREG(about.st_mode) else None


def in_words(error: OSError) -> str:
    """Say what the system said, without the path, which whoever asked names better."""
    return error.strerror or type(error).__name__
