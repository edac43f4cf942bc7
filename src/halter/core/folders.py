"""Folder listings, and the paths that no tool of an agent may reach. All functions block.

The folders of agents and Halter's own files are protected. Folders are compared by the device and inode of every folder
on the way, not by path, so `..`, links, letter case and bind mounts make no difference. A
`ProtectedSnapshot` is valid for one moment: a tool takes a new one for every call, and checks folders that are already
open.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final, Literal, Protocol

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


FileIdentity = tuple[int, int]
"""Device and inode. Two paths with the same identity are the same file."""

AGENT_FILE_NAME: Final = "agent.yaml"
CONFIG_FILE_NAMES: Final = frozenset((AGENT_FILE_NAME, "halter.yaml"))
"""Files that define an agent or a fleet. No tool may write one, in any folder."""
MAX_PROTECTED_ENTRIES: Final = 200_000
"""Maximum number of entries below a root that are searched for agents and for hard links to protected files."""

_MAX_LINKS: Final = 40
_OPEN_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOUNTS: Final = "/proc/self/mountinfo"


FileRefusal = Callable[[Path, int], bool]
"""Returns whether an agent may not read a file, given its path and its open descriptor."""


def allow_all(_: Path, __: int) -> bool:
    return False


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
        disk = _Disk()
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
            fd = os.open(root, _OPEN_FLAGS)
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
                fd = os.open(path, _OPEN_FLAGS)
                try:
                    if reach := snapshot.judge_root(fd):
                        return reach
                finally:
                    os.close(fd)
        return None

    def find_match(self, path: Path, pattern: str) -> str:
        """Describe the secret that a file, or a pattern of files in a folder, would read; empty if there is none."""
        snapshot, disk = self.take_snapshot(read_only=True), _Disk()
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
        disk, real_path = _Disk(), Path(path_of(fd))
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
        for depth, identity in enumerate(_walk_ancestors(fd)):
            if depth == 0 and (reach := self.judge_folder(identity)):
                return reach
            if identity in self.folders:
                return ProtectedReach("is inside", self.folders[identity])
        path, mounts, disk = path_of(fd), _list_mounts(), _Disk()
        mount_points = [mount.point for mount in mounts if mount.point.startswith(f"{path.rstrip('/')}/")]
        for point in mount_points:
            identity = disk.identity(Path(point))
            if identity and (reach := self.judge_folder(identity) or self.judge_file(identity)):
                return reach
        # A mounted folder has other paths, and so other ancestors.
        aliases = (Path(name) for point in (path, *mount_points) for name in _list_mount_aliases(point, mounts, disk))
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
            if inode in inodes and (reach := self.judge_file(_identity_of(path))):
                return reach
        return None


class _Disk:
    """A resolver of paths that reads the status of each name only once."""

    def __init__(self) -> None:
        self._stats: dict[str, os.stat_result | None] = {}

    def leading(self, path: Path) -> Iterator[FileIdentity]:
        """Yield the folders in which names are looked up on the way to a path, through every link."""
        for folder in self._folders(path):
            status = self._stat_uncached(folder)
            if status is not None:
                yield status.st_dev, status.st_ino

    def identity(self, path: Path) -> FileIdentity | None:
        status = self.stat(path)
        return None if status is None else (status.st_dev, status.st_ino)

    def stat(self, path: Path) -> os.stat_result | None:
        with suppress(OSError, ValueError):
            return os.stat(path)  # noqa: PTH116, as the lines around it.
        return None

    def _folders(self, path: Path) -> Iterator[str]:
        folder, link_count = "/", 0
        # The path is not normalized first: after a link, `..` is the parent of the link's target.
        absolute = path if path.is_absolute() else Path.cwd() / path
        pending = list(reversed(str(absolute).split("/")))
        while pending:
            name = pending.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                folder = os.path.dirname(folder)  # noqa: PTH120, as the lines around it.
                continue
            yield folder
            entry = f"{folder.rstrip('/')}/{name}"
            status = self._stat_uncached(entry)
            if status is None:
                return
            if not stat.S_ISLNK(status.st_mode):
                folder = entry
                continue
            link_count += 1
            target = _read_link(entry)
            if link_count > _MAX_LINKS or not target:
                return
            folder = "/" if target.startswith("/") else folder
            pending += reversed(target.split("/"))

    def _stat_uncached(self, path: str) -> os.stat_result | None:
        if path not in self._stats:
            self._stats[path] = None
            with suppress(OSError, ValueError):
                self._stats[path] = os.lstat(path)
        return self._stats[path]


def is_path_within(path: Path, root: Path) -> bool:
    """Return whether a path is a folder or below it, under any of their names."""
    disk = _Disk()
    root_identity = disk.identity(root)
    return root_identity is not None and (root_identity == disk.identity(path) or root_identity in disk.leading(path))


def _read_link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)  # noqa: PTH115, as the lines around it.
    return ""


def identity_of(fd: int) -> FileIdentity:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def contains_agent_file(fd: int) -> bool:
    with suppress(OSError):
        os.stat(AGENT_FILE_NAME, dir_fd=fd, follow_symlinks=False)
        return True
    return False


def _identity_of(path: str) -> FileIdentity:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return (-1, -1)


def _walk_ancestors(fd: int) -> Iterator[FileIdentity]:
    """Yield the identities of an open folder and its ancestors, without a path that could be replaced meanwhile."""
    folder, previous = os.dup(fd), None
    try:
        while (identity := identity_of(folder)) != previous:
            yield identity
            previous = identity
            parent = os.open("..", _OPEN_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = parent
    except OSError:
        return  # The parents are unreadable, so tools cannot reach anything there.
    finally:
        os.close(folder)


def path_of(fd: int) -> str:
    """Return the current path of an open file or folder, without links."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115, the name is no path before it is read.
    return ""


class _Mount(msgspec.Struct, frozen=True):
    device: str
    root: str
    point: str


def _list_mounts() -> list[_Mount]:
    """List the mounts: a sandbox that contains a folder contains the mounts below it as well."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:  # noqa: PTH123, as the lines around it.
            lines = [line.split(" ") for line in mounts.read().splitlines()]
    except OSError:
        return []
    return [_Mount(fields[2], _unescape_mount(fields[3]), _unescape_mount(fields[4])) for fields in lines]


def _unescape_mount(text: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text


def _list_mount_aliases(path: str, mounts: Sequence[_Mount], disk: _Disk) -> Iterator[str]:
    """Yield other paths to the same folder, through other mounts of the same device."""
    enclosing = [mount for mount in mounts if _is_below(path, mount.point)]
    if not enclosing:
        return
    # Of several mounts at one point, the last one is visible.
    nearest = max(enumerate(enclosing), key=lambda item: (len(item[1].point), item[0]))[1]
    device_path = _rebase_path(nearest.root, path, nearest.point)
    for mount in mounts:
        if mount is not nearest and mount.device == nearest.device and _is_below(device_path, mount.root):
            alias = _rebase_path(mount.point, device_path, mount.root)
            if disk.identity(Path(alias)) == disk.identity(Path(path)):
                yield alias


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _rebase_path(new_folder: str, path: str, old_folder: str) -> str:
    """Replace the leading folder of a path by another one."""
    return f"{new_folder.rstrip('/')}/{path[len(old_folder.rstrip('/')) :].lstrip('/')}".rstrip("/") or "/"


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
