"""The paths that no tool of an agent may reach: the folders of agents, and Halter's own files.

Folders are compared by the device and inode of every folder on the way, not by path, so `..`, links, letter case and
bind mounts make no difference. A `ProtectedSnapshot` is valid for one moment: a tool takes a new one for every call,
and checks folders that are already open. All functions block.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, Literal, Protocol

import msgspec

from halter.system.folders import can_contain_match, matches_pattern
from halter.system.paths import (
    FOLDER_FLAGS,
    Disk,
    FileIdentity,
    list_mount_aliases,
    list_mounts,
    path_of,
    walk_ancestors,
)

AGENT_FILE_NAME: Final = "agent.yaml"
CONFIG_FILE_NAMES: Final = frozenset((AGENT_FILE_NAME, "halter.yaml"))
"""Files that define an agent or a fleet. No tool may write one, in any folder."""
MAX_PROTECTED_ENTRIES: Final = 200_000
"""Maximum number of entries below a root that are searched for agents and for hard links to protected files."""


class ProtectedEntry(msgspec.Struct, frozen=True):
    """A file or folder that no tool may write to.

    `description` is used in messages. If it `is_secret`, it must not be read either. If it `is_folder`, a root inside
    it is refused as well.
    """

    path: Path
    description: str
    is_secret: bool = False
    is_folder: bool = False


class ProtectedReach(msgspec.Struct, frozen=True):
    """The relation of a root to a protected file or folder that it reaches."""

    how: Literal["contains", "is inside", "is another name of", "may contain another name of"]
    entry: ProtectedEntry

    def __str__(self) -> str:
        return f"{self.how} {self.entry.path}, {self.entry.description}"


class ProtectedPaths(msgspec.Struct, frozen=True):
    """The files and folders that are protected from one agent. `home` is the agent's own folder.

    A root inside a protected folder is allowed if `home` is inside the same folder: the operator put it there.
    """

    entries: tuple[ProtectedEntry, ...] = ()
    home: Path | None = None

    def union(self, paths: "ProtectedPaths") -> "ProtectedPaths":
        return ProtectedPaths(tuple(dict.fromkeys((*self.entries, *paths.entries))), paths.home or self.home)

    def take_snapshot(self, *, read_only: bool = False) -> "ProtectedSnapshot":
        """Take a snapshot; with `read_only`, of the secrets only, for a tool that does not write."""
        disk = Disk()
        home = set(disk.leading(self.home)) | {disk.identity(self.home)} if self.home else set[FileIdentity | None]()
        leading: dict[FileIdentity, ProtectedEntry] = {}
        folders: dict[FileIdentity, ProtectedEntry] = {}
        files: dict[FileIdentity, ProtectedEntry] = {}
        has_hard_links = False
        for entry in self.entries:
            if read_only and not entry.is_secret:
                continue
            for ancestor in disk.leading(entry.path):
                leading.setdefault(ancestor, entry)
            status = disk.stat(entry.path)
            if status is None:
                continue
            identity = (status.st_dev, status.st_ino)
            if not entry.is_folder:
                files.setdefault(identity, entry)
                has_hard_links = has_hard_links or status.st_nlink > 1
            elif identity not in home:
                folders.setdefault(identity, entry)
        return ProtectedSnapshot(leading, folders, files, has_hard_links, read_only)

    def reach(self, root: Path, *, read_only: bool = False) -> str:
        """Describe the protected path that a root reaches; empty if there is none, or if the root is missing.

        A root for writing is also searched for the folders of agents and for hard links to protected files.
        """
        try:
            fd = os.open(root, FOLDER_FLAGS)
        except OSError:
            return ""
        try:
            snapshot = self.take_snapshot(read_only=read_only)
            root_reach = snapshot.judge_root(fd)
            entry_below = None if root_reach or read_only else snapshot.search_folder(fd, AGENT_FILE_NAME)
            return str(root_reach or entry_below or "")
        finally:
            os.close(fd)

    def find_reach(self, paths: Iterable[Path]) -> ProtectedReach | None:
        """Find a secret that one of these folders contains, or a secret folder that contains one of them."""
        snapshot = self.take_snapshot(read_only=True)
        for path in paths:
            with suppress(OSError):
                fd = os.open(path, FOLDER_FLAGS)
                try:
                    if reach := snapshot.judge_root(fd):
                        return reach
                finally:
                    os.close(fd)
        return None

    def find_match(self, path: Path, pattern: str) -> str:
        """Describe the secret that a file, or a pattern of files in a folder, would read; empty if there is none."""
        snapshot, disk = self.take_snapshot(read_only=True), Disk()
        status = disk.stat(path)
        if status is None:
            return ""
        identity = (status.st_dev, status.st_ino)
        folder = next(
            (snapshot.folders[each] for each in (identity, *disk.leading(path)) if each in snapshot.folders), None
        )
        if folder is not None:
            return str(ProtectedReach("is inside", folder))
        if not stat.S_ISDIR(status.st_mode):
            return str(snapshot.judge_file(identity) or "")
        resolved_path, pattern_parts = path.resolve(), PurePosixPath(pattern).parts
        for entry in self.entries:
            protected_path = entry.path.resolve()
            if entry.is_secret and protected_path.is_relative_to(resolved_path):
                relative_parts = protected_path.relative_to(resolved_path).parts
                if (
                    can_contain_match(relative_parts, pattern_parts)
                    if entry.is_folder
                    else matches_pattern(relative_parts, pattern_parts)
                ):
                    return str(ProtectedReach("contains", entry))
        return ""


NO_PROTECTED_PATHS: Final = ProtectedPaths()


class WritableFolders(msgspec.Struct, frozen=True):
    """The folders that an agent's tools can write, and the agent's own folder."""

    folder: Path
    roots: tuple[Path, ...] = ()

    def leads_out(self, path: Path, fd: int) -> bool:
        """Return whether a file opened through a root is outside that root: a tool can create any link."""
        disk, real_path = Disk(), Path(path_of(fd))
        roots = [root for root in self.roots if disk.identity(root) in set(disk.leading(path))]
        return any(not real_path.is_relative_to(root.resolve()) for root in roots)


class RootedTool(Protocol):
    """A tool with a root folder, which receives the paths that it must not reach."""

    @property
    def root(self) -> Path: ...

    def protect(self, paths: ProtectedPaths) -> None: ...


class ProtectedSnapshot(msgspec.Struct, frozen=True):
    """The protected files and folders at one moment, by identity.

    `ancestors` are the folders on the way to a protected path: a writer there could replace it. With `has_hard_links`,
    one of the `files` has more than one hard link. With `read_only`, the snapshot has only secrets.
    """

    ancestors: Mapping[FileIdentity, ProtectedEntry]
    folders: Mapping[FileIdentity, ProtectedEntry]
    files: Mapping[FileIdentity, ProtectedEntry]
    has_hard_links: bool = False
    read_only: bool = False

    def judge_folder(self, identity: FileIdentity) -> ProtectedReach | None:
        if identity in self.folders:
            return ProtectedReach("is inside", self.folders[identity])
        return ProtectedReach("contains", self.ancestors[identity]) if identity in self.ancestors else None

    def judge_file(self, identity: FileIdentity) -> ProtectedReach | None:
        """Judge a file: it may be a hard link to a protected one."""
        return ProtectedReach("is another name of", self.files[identity]) if identity in self.files else None

    def judge_root(self, fd: int) -> ProtectedReach | None:
        """Judge an open folder with its ancestors and the mounts below it."""
        for depth, identity in enumerate(walk_ancestors(fd)):
            if depth == 0 and (reach := self.judge_folder(identity)):
                return reach
            if identity in self.folders:
                return ProtectedReach("is inside", self.folders[identity])
        path, mounts, disk = path_of(fd), list_mounts(), Disk()
        mount_points = [mount.point for mount in mounts if mount.point.startswith(f"{path.rstrip('/')}/")]
        for point in mount_points:
            identity = disk.identity(Path(point))
            if identity and (reach := self.judge_folder(identity) or self.judge_file(identity)):
                return reach
        # A mounted folder has other paths, and so other ancestors.
        aliases = (Path(name) for point in (path, *mount_points) for name in list_mount_aliases(point, mounts, disk))
        identities = (identity for alias in aliases for identity in disk.leading(alias) if identity in self.folders)
        return next((ProtectedReach("is inside", self.folders[identity]) for identity in identities), None)

    def search_folder(self, fd: int, name: str = "") -> ProtectedReach | None:
        """Search a folder for hard links to protected files, and for files with this name."""
        if not name and not self.has_hard_links:
            return None
        inodes = {inode for _, inode in self.files} if self.has_hard_links else set[int]()
        for path, file_name, inode in _list_entries(fd):
            if not path:
                return (
                    ProtectedReach("may contain another name of", next(iter(self.files.values())))
                    if self.has_hard_links
                    else None
                )
            if name and file_name.casefold() == name:
                return ProtectedReach("contains", ProtectedEntry(Path(path), "the definition of an agent"))
            if inode in inodes and (reach := self.judge_file(_read_identity(path))):
                return reach
        return None


def _read_identity(path: str) -> FileIdentity:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return (-1, -1)


def contains_agent_file(fd: int) -> bool:
    with suppress(OSError):
        os.stat(AGENT_FILE_NAME, dir_fd=fd, follow_symlinks=False)
        return True
    return False


def _list_entries(fd: int) -> Iterator[tuple[str, str, int]]:
    """Yield path, name and inode of the entries below an open folder; an empty path if there are too many."""
    pending, entry_count = [path_of(fd)], 0
    while pending:
        folder = pending.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                entry_count += 1
                if entry_count > MAX_PROTECTED_ENTRIES:
                    yield "", "", 0
                    return
                yield entry.path, entry.name, entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
