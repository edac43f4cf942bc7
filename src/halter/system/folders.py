"""Folder listings, by patterns. All functions block."""

import os
import stat
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from halter.core.ports import UnreadableFile

MAX_FOLDER_ENTRIES: Final = 100_000
MAX_FOLDERS: Final = 1000


class FileEntry(msgspec.Struct, frozen=True):
    """A file in a folder listing."""

    size: int
    modified: int
    inode: int


FileEntries = Mapping[str, FileEntry]


class FolderListing(msgspec.Struct, frozen=True):
    """The files that match a pattern, relative to the folder, and the folders in which others could appear.

    Paths are as on the disk. A path that is not valid text must be cleaned before it is shown.
    """

    files: FileEntries
    folders: tuple[Path, ...]


def scan_folder(folder: Path, pattern: str) -> FolderListing | UnreadableFile:
    """List the files below a folder that match a pattern. Links that lead out of the folder are not followed.

    A subfolder that is gone or unreadable is skipped.
    """
    pattern_parts = PurePosixPath(pattern).parts
    home = os.path.realpath(folder)
    files: dict[str, FileEntry] = {}
    folders: list[Path] = []
    pending: list[tuple[str, ...]] = [()]
    entry_count = 0
    while pending:
        parent = pending.pop()
        listing = _list_folder(folder.joinpath(*parent))
        if isinstance(listing, UnreadableFile):
            if not parent:
                return listing
            continue
        folders.append(folder.joinpath(*parent))
        entry_count += len(listing)
        for entry in listing:
            path_parts = (*parent, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending += [path_parts] if can_contain_match(path_parts, pattern_parts) else []
            elif matches_pattern(path_parts, pattern_parts) and (file_entry := _stat_file(entry.path, home)):
                files["/".join(path_parts)] = file_entry
        if entry_count > MAX_FOLDER_ENTRIES or len(folders) + len(pending) > MAX_FOLDERS:
            return UnreadableFile(
                f"The folder {folder.name} has more than {MAX_FOLDER_ENTRIES:,} files or {MAX_FOLDERS:,} folders. "
                "Narrow its `pattern`, or name a subfolder."
            )
    return FolderListing(files, tuple(sorted(folders)))


def _list_folder(path: Path) -> list[os.DirEntry[str]] | UnreadableFile:
    """List the entries of one folder, or describe why it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return list(islice(entries, MAX_FOLDER_ENTRIES + 1))
    except OSError as error:
        return UnreadableFile(f"The folder {path.name} cannot be read: {describe_os_error(error)}.")


def matches_pattern(path_parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a path matches a pattern; `**` matches any number of folders, including none."""
    if not pattern:
        return not path_parts
    if pattern[0] == "**":
        return matches_pattern(path_parts, pattern[1:]) or (
            bool(path_parts) and matches_pattern(path_parts[1:], pattern)
        )
    return bool(path_parts) and fnmatchcase(path_parts[0], pattern[0]) and matches_pattern(path_parts[1:], pattern[1:])


def can_contain_match(folder: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a path below a folder could match."""
    if not pattern or not folder:
        return bool(pattern)
    if pattern[0] == "**":
        return True
    return len(pattern) > 1 and fnmatchcase(folder[0], pattern[0]) and can_contain_match(folder[1:], pattern[1:])


def _stat_file(path: str, home: str) -> FileEntry | None:
    """Read the entry of a regular file, or of a link to one whose target is also below `home`."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and os.path.realpath(path).startswith(home + os.sep):
            status = os.stat(path)  # noqa: PTH116, as the lines around it.
    except OSError:
        return None
    return FileEntry(status.st_size, status.st_mtime_ns, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def describe_os_error(error: OSError) -> str:
    """Return the system's message without the path, which the caller states in its own form."""
    return error.strerror or type(error).__name__


FileRefusal = Callable[[Path, int], bool]
"""Returns whether an agent may not read a file, given its path and its open descriptor."""


def allow_all(_: Path, __: int) -> bool:
    return False
