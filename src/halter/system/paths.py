"""The identity of paths: a folder has one device and inode, whatever its names, links and mounts."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

FileIdentity = tuple[int, int]
"""Device and inode. Two paths with the same identity are the same file."""

MAX_LINKS: Final = 40
FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOUNTS: Final = "/proc/self/mountinfo"


class Disk:
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
            if link_count > MAX_LINKS or not target:
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
    disk = Disk()
    root_identity = disk.identity(root)
    return root_identity is not None and (root_identity == disk.identity(path) or root_identity in disk.leading(path))


def _read_link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)  # noqa: PTH115, as the lines around it.
    return ""


def identity_of(fd: int) -> FileIdentity:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def walk_ancestors(fd: int) -> Iterator[FileIdentity]:
    """Yield the identities of an open folder and its ancestors, without a path that could be replaced meanwhile."""
    folder, previous = os.dup(fd), None
    try:
        while (identity := identity_of(folder)) != previous:
            yield identity
            previous = identity
            parent = os.open("..", FOLDER_FLAGS, dir_fd=folder)
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


class Mount(msgspec.Struct, frozen=True):
    device: str
    root: str
    point: str


def list_mounts() -> list[Mount]:
    """List the mounts: a sandbox that contains a folder contains the mounts below it as well."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:  # noqa: PTH123, as the lines around it.
            lines = [line.split(" ") for line in mounts.read().splitlines()]
    except OSError:
        return []
    return [Mount(fields[2], _unescape_mount(fields[3]), _unescape_mount(fields[4])) for fields in lines]


def _unescape_mount(text: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text


def list_mount_aliases(path: str, mounts: Sequence[Mount], disk: Disk) -> Iterator[str]:
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
