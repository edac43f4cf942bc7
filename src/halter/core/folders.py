"""What a folder holds at one moment, and the paths that no tool of an agent may reach. All of this blocks.

Protected are the folders that agents are loaded from, and Halter's own. A folder is compared by identity, not by
spelling: by the device and the inode of every folder on the way. So `..`, links, another case of the letters and bind
mounts make no difference. A `ProtectedSnapshot` is good for one moment: a tool takes a new one for every call, and
looks at folders that are open already.
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

MOST_FOLDER_ENTRIES: Final = 100_000
MOST_FOLDERS: Final = 1000


class FileEntry(msgspec.Struct, frozen=True):
    """A file, as its folder lists it."""

    size: int
    modified: int
    inode: int


FileEntries = Mapping[str, FileEntry]


class FolderListing(msgspec.Struct, frozen=True):
    """The files that match a pattern, relative to the folder, and the folders in which others could appear.

    A path is as the disk has it; one that is not text must be cleaned before it is shown.
    """

    files: FileEntries
    folders: tuple[Path, ...]


def scan_folder(folder: Path, pattern: str) -> FolderListing | UnreadableFile:
    """List a folder, without ever following a link out of it."""
    wanted = PurePosixPath(pattern).parts
    home = os.path.realpath(folder)
    files: dict[str, FileEntry] = {}
    folders: list[Path] = []
    waiting: list[tuple[str, ...]] = [()]
    entries = 0
    while waiting:
        above = waiting.pop()
        found = _list_folder(folder.joinpath(*above))
        if isinstance(found, UnreadableFile):
            if not above:
                return found
            continue
        folders.append(folder.joinpath(*above))
        entries += len(found)
        for entry in found:
            parts = (*above, entry.name)
            if entry.is_dir(follow_symlinks=False):
                waiting += [parts] if may_contain_match(parts, wanted) else []
            elif matches_pattern(parts, wanted) and (seen := _stat_file(entry.path, home)):
                files["/".join(parts)] = seen
        if entries > MOST_FOLDER_ENTRIES or len(folders) + len(waiting) > MOST_FOLDERS:
            return UnreadableFile(
                f"The folder {folder.name} holds more than {MOST_FOLDER_ENTRIES:,} files or {MOST_FOLDERS:,} folders: "
                "narrow its `pattern`, or name a folder below it."
            )
    return FolderListing(files, tuple(sorted(folders)))


def _list_folder(path: Path) -> list[os.DirEntry[str]] | UnreadableFile:
    """List a folder. A subfolder that has gone, or is not readable, is skipped."""
    try:
        with os.scandir(path) as found:
            return list(islice(found, MOST_FOLDER_ENTRIES + 1))
    except OSError as error:
        return UnreadableFile(f"The folder {path.name} cannot be read: {describe_os_error(error)}.")


def matches_pattern(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern; `**` stands for any number of folders, including none."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return matches_pattern(parts, wanted[1:]) or (bool(parts) and matches_pattern(parts[1:], wanted))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and matches_pattern(parts[1:], wanted[1:])


def may_contain_match(folder: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether anything below a folder could match."""
    if not wanted or not folder:
        return bool(wanted)
    if wanted[0] == "**":
        return True
    return len(wanted) > 1 and fnmatchcase(folder[0], wanted[0]) and may_contain_match(folder[1:], wanted[1:])


def _stat_file(path: str, home: str) -> FileEntry | None:
    """Stat a file; a link only if its target is in the folder as well."""
    try:
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode) and os.path.realpath(path).startswith(home + os.sep):
            about = os.stat(path)  # noqa: PTH116, as the lines around it.
    except OSError:
        return None
    return FileEntry(about.st_size, about.st_mtime_ns, about.st_ino) if stat.S_ISREG(about.st_mode) else None


def describe_os_error(error: OSError) -> str:
    """The system's message without the path, which the caller names better."""
    return error.strerror or type(error).__name__


FileIdentity = tuple[int, int]
"""Device and inode: two paths with the same identity are the same file."""

AGENT_FILE_NAME: Final = "agent.yaml"
CONFIG_FILE_NAMES: Final = frozenset((AGENT_FILE_NAME, "halter.yaml"))
"""Files that make their folder an agent's, or the fleet's: no tool writes one anywhere."""
MOST_PROTECTED_ENTRIES: Final = 200_000
"""How many entries below a root are searched for agents and for other names of protected files."""

_MOST_LINKS: Final = 40
_OPEN_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOUNTS: Final = "/proc/self/mountinfo"


FileRefusal = Callable[[Path, int], bool]
"""Whether an agent may not read a file that was just opened by a path."""


def allow_all(_: Path, __: int) -> bool:
    return False


class ProtectedEntry(msgspec.Struct, frozen=True):
    """One thing that no tool may reach.

    `what` describes it in messages. A `secret` must not be read either. A `folder` must not be reached from inside
    either: a root that lies in it is refused.
    """

    path: Path
    what: str
    secret: bool = False
    folder: bool = False


class ProtectedReach(msgspec.Struct, frozen=True):
    """How a root reaches something protected."""

    how: Literal["holds", "lies in", "is another name of", "may hold another name of"]
    thing: ProtectedEntry

    def __str__(self) -> str:
        return f"{self.how} {self.thing.path}, {self.thing.what}"


class ProtectedPaths(msgspec.Struct, frozen=True):
    """All that is protected from one agent. `home` is that agent's own folder.

    A root may lie in a protected folder if the agent's own folder lies there as well: the operator put it there.
    """

    things: tuple[ProtectedEntry, ...] = ()
    home: Path | None = None

    def union(self, other: "ProtectedPaths") -> "ProtectedPaths":
        return ProtectedPaths(tuple(dict.fromkeys((*self.things, *other.things))), other.home or self.home)

    def sight(self, *, reads: bool = False) -> "ProtectedSnapshot":
        """Take a snapshot; for a tool that only reads, of the secrets alone."""
        disk = _Disk()
        home = set(disk.leading(self.home)) | {disk.identity(self.home)} if self.home else set[FileIdentity | None]()
        leading: dict[FileIdentity, ProtectedEntry] = {}
        folders: dict[FileIdentity, ProtectedEntry] = {}
        files: dict[FileIdentity, ProtectedEntry] = {}
        linked = False
        for thing in self.things:
            if reads and not thing.secret:
                continue
            for each in disk.leading(thing.path):
                leading.setdefault(each, thing)
            about = disk.stat(thing.path)
            if about is None:
                continue
            identity = (about.st_dev, about.st_ino)
            if not thing.folder:
                files.setdefault(identity, thing)
                linked = linked or about.st_nlink > 1
            elif identity not in home:
                folders.setdefault(identity, thing)
        return ProtectedSnapshot(leading, folders, files, linked, reads)

    def reach(self, root: Path, *, reads: bool = False) -> str:
        """What a root would reach, checked when a configuration is read. A missing root reaches nothing.

        A root for writing is also searched: for agents, whose folder it would contain, and for other names of what is
        protected.
        """
        try:
            fd = os.open(root, _OPEN_FLAGS)
        except OSError:
            return ""
        try:
            sight = self.sight(reads=reads)
            found = sight.judge_root(fd)
            below = None if found or reads else sight.search_folder(fd, AGENT_FILE_NAME)
            return str(found or below or "")
        finally:
            os.close(fd)

    def find_reach(self, paths: Iterable[Path]) -> ProtectedReach | None:
        """Find a secret that could be read in one of these folders, or one of these folders in a secret one."""
        sight = self.sight(reads=True)
        for path in paths:
            with suppress(OSError):
                fd = os.open(path, _OPEN_FLAGS)
                try:
                    if found := sight.judge_root(fd):
                        return found
                finally:
                    os.close(fd)
        return None

    def find_match(self, place: Path, pattern: str) -> str:
        """Which secret would be read where a pattern names files of a folder, or a path one file; or nothing."""
        sight, disk = self.sight(reads=True), _Disk()
        found = disk.stat(place)
        if found is None:
            return ""
        identity = (found.st_dev, found.st_ino)
        inside = next((sight.folders[each] for each in (identity, *disk.leading(place)) if each in sight.folders), None)
        if inside is not None:
            return str(ProtectedReach("lies in", inside))
        if not stat.S_ISDIR(found.st_mode):
            return str(sight.judge_file(identity) or "")
        real, wanted = place.resolve(), PurePosixPath(pattern).parts
        for thing in self.things:
            path = thing.path.resolve()
            if thing.secret and path.is_relative_to(real):
                parts = path.relative_to(real).parts
                if may_contain_match(parts, wanted) if thing.folder else matches_pattern(parts, wanted):
                    return str(ProtectedReach("holds", thing))
        return ""


NO_PROTECTED_PATHS: Final = ProtectedPaths()


class WritableFolders(msgspec.Struct, frozen=True):
    """The folders that an agent's tools can write, and the agent's own folder."""

    folder: Path
    roots: tuple[Path, ...] = ()

    def leads_out(self, path: Path, fd: int) -> bool:
        """Whether a file was opened through a root and lies outside of it: a tool may link anything."""
        disk, real = _Disk(), Path(path_of(fd))
        through = [root for root in self.roots if disk.identity(root) in set(disk.leading(path))]
        return any(not real.is_relative_to(root.resolve()) for root in through)


class RootedTool(Protocol):
    """A tool with a root folder, which is told what it must not reach."""

    @property
    def root(self) -> Path: ...

    def protect(self, paths: ProtectedPaths) -> None: ...


class ProtectedSnapshot(msgspec.Struct, frozen=True):
    """What is protected, as it was at one moment, by identity.

    `leading` are the folders in which a name is looked up on the way to something: a writer there could replace it.
    `linked`: one of the `files` has more than one name. `reads`: only secrets were looked at.
    """

    leading: Mapping[FileIdentity, ProtectedEntry]
    folders: Mapping[FileIdentity, ProtectedEntry]
    files: Mapping[FileIdentity, ProtectedEntry]
    linked: bool = False
    reads: bool = False

    def judge_folder(self, identity: FileIdentity) -> ProtectedReach | None:
        if identity in self.folders:
            return ProtectedReach("lies in", self.folders[identity])
        return ProtectedReach("holds", self.leading[identity]) if identity in self.leading else None

    def judge_file(self, identity: FileIdentity) -> ProtectedReach | None:
        """Judge a file: it may be another name of a protected one."""
        return ProtectedReach("is another name of", self.files[identity]) if identity in self.files else None

    def judge_root(self, fd: int) -> ProtectedReach | None:
        """Judge an open folder with all its ancestors and all that is mounted below it."""
        for number, identity in enumerate(_walk_ancestors(fd)):
            if number == 0 and (found := self.judge_folder(identity)):
                return found
            if identity in self.folders:
                return ProtectedReach("lies in", self.folders[identity])
        place, mounts, disk = path_of(fd), _list_mounts(), _Disk()
        below = [mount.point for mount in mounts if mount.point.startswith(f"{place.rstrip('/')}/")]
        for each in below:
            identity = disk.identity(Path(each))
            if identity and (found := self.judge_folder(identity) or self.judge_file(identity)):
                return found
        # What is mounted has another name, and lies in other folders by that.
        others = (Path(name) for each in (place, *below) for name in _list_mount_aliases(each, mounts, disk))
        inside = (identity for other in others for identity in disk.leading(other) if identity in self.folders)
        return next((ProtectedReach("lies in", self.folders[identity]) for identity in inside), None)

    def search_folder(self, fd: int, name: str = "") -> ProtectedReach | None:
        """Search a folder for another name of a protected file, and for a file of this name."""
        if not name and not self.linked:
            return None
        inodes = {inode for _, inode in self.files} if self.linked else set[int]()
        for path, found, inode in _list_entries(fd):
            if not path:
                return (
                    ProtectedReach("may hold another name of", next(iter(self.files.values()))) if self.linked else None
                )
            if name and found.casefold() == name:
                return ProtectedReach("holds", ProtectedEntry(Path(path), "the definition of an agent"))
            if inode in inodes and (reach := self.judge_file(_identity_of(path))):
                return reach
        return None


class _Disk:
    """What paths lead to, each name looked up once."""

    def __init__(self) -> None:
        self._stats: dict[str, os.stat_result | None] = {}

    def leading(self, path: Path) -> Iterator[FileIdentity]:
        """The folders in which names are looked up on the way to a path, through every link."""
        for folder in self._folders(path):
            about = self._stat_uncached(folder)
            if about is not None:
                yield about.st_dev, about.st_ino

    def identity(self, path: Path) -> FileIdentity | None:
        about = self.stat(path)
        return None if about is None else (about.st_dev, about.st_ino)

    def stat(self, path: Path) -> os.stat_result | None:
        with suppress(OSError, ValueError):
            return os.stat(path)  # noqa: PTH116, as the lines around it.
        return None

    def _folders(self, path: Path) -> Iterator[str]:
        here, links = "/", 0
        # A path is not made shorter before it is walked: behind a link, `..` leads elsewhere.
        whole = path if path.is_absolute() else Path.cwd() / path
        waiting = list(reversed(str(whole).split("/")))
        while waiting:
            part = waiting.pop()
            if part in {"", "."}:
                continue
            if part == "..":
                here = os.path.dirname(here)  # noqa: PTH120, as the lines around it.
                continue
            yield here
            there = f"{here.rstrip('/')}/{part}"
            about = self._stat_uncached(there)
            if about is None:
                return
            if not stat.S_ISLNK(about.st_mode):
                here = there
                continue
            links += 1
            target = _read_link(there)
            if links > _MOST_LINKS or not target:
                return
            here = "/" if target.startswith("/") else here
            waiting += reversed(target.split("/"))

    def _stat_uncached(self, path: str) -> os.stat_result | None:
        if path not in self._stats:
            self._stats[path] = None
            with suppress(OSError, ValueError):
                self._stats[path] = os.lstat(path)
        return self._stats[path]


def is_path_within(path: Path, root: Path) -> bool:
    """Whether a place is a folder or lies below it, under any names."""
    disk = _Disk()
    found = disk.identity(root)
    return found is not None and (found == disk.identity(path) or found in disk.leading(path))


def _read_link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)  # noqa: PTH115, as the lines around it.
    return ""


def identity_of(fd: int) -> FileIdentity:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def contains_agent_file(fd: int) -> bool:
    with suppress(OSError):
        os.stat(AGENT_FILE_NAME, dir_fd=fd, follow_symlinks=False)
        return True
    return False


def _identity_of(path: str) -> FileIdentity:
    with suppress(OSError):
        about = os.lstat(path)
        return about.st_dev, about.st_ino
    return (-1, -1)


def _walk_ancestors(fd: int) -> Iterator[FileIdentity]:
    """The identities of an open folder and its ancestors, without any path that could be exchanged."""
    here, before = os.dup(fd), None
    try:
        while (identity := identity_of(here)) != before:
            yield identity
            before = identity
            above = os.open("..", _OPEN_FLAGS, dir_fd=here)
            os.close(here)
            here = above
    except OSError:
        return  # Unreadable above this: nothing there can be protected from us.
    finally:
        os.close(here)


def path_of(fd: int) -> str:
    """Where an open file or folder is now, without links."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115, the name is no path before it is read.
    return ""


class _Mount(msgspec.Struct, frozen=True):
    device: str
    root: str
    point: str


def _list_mounts() -> list[_Mount]:
    """List mounts: a sandbox that shows a folder shows what is mounted below it, too."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:  # noqa: PTH123, as the lines around it.
            found = [line.split(" ") for line in mounts.read().splitlines()]
    except OSError:
        return []
    return [_Mount(words[2], _unescape_mount(words[3]), _unescape_mount(words[4])) for words in found]


def _unescape_mount(text: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text


def _list_mount_aliases(place: str, mounts: Sequence[_Mount], disk: _Disk) -> Iterator[str]:
    """Other paths to a place, since a part of the way to it is mounted elsewhere, too."""
    above = [mount for mount in mounts if _is_below(place, mount.point)]
    if not above:
        return
    # Of several mounts at one point, the last is seen.
    own = max(enumerate(above), key=lambda each: (len(each[1].point), each[0]))[1]
    inside = _rebase_path(own.root, place, own.point)
    for other in mounts:
        if other is not own and other.device == own.device and _is_below(inside, other.root):
            name = _rebase_path(other.point, inside, other.root)
            if disk.identity(Path(name)) == disk.identity(Path(place)):
                yield name


def _is_below(place: str, folder: str) -> bool:
    return place == folder or place.startswith(f"{folder.rstrip('/')}/")


def _rebase_path(folder: str, place: str, above: str) -> str:
    """Move a place from below one folder to below another."""
    return f"{folder.rstrip('/')}/{place[len(above.rstrip('/')) :].lstrip('/')}".rstrip("/") or "/"


def _list_entries(fd: int) -> Iterator[tuple[str, str, int]]:
    """List what is below an open folder, by path, name and inode; an empty path ends it where there is too much."""
    waiting, seen = [path_of(fd)], 0
    while waiting:
        place = waiting.pop()
        with suppress(OSError), os.scandir(place) as found:
            for entry in found:
                seen += 1
                if seen > MOST_PROTECTED_ENTRIES:
                    yield "", "", 0
                    return
                yield entry.path, entry.name, entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
