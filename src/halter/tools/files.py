"""Files below one folder. No path leads out of it, not even through a link that is created at the last moment.

Every part of a path is opened below the folder that was opened before it, and never through a link. So what is checked
is what is used. Each opened folder is compared with the protected ones.
"""

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from halter.core.errors import ConfigError
from halter.core.folders import (
    CONFIG_FILE_NAMES,
    NO_PROTECTED_PATHS,
    ProtectedPaths,
    ProtectedReach,
    ProtectedSnapshot,
    contains_agent_file,
    identity_of,
)
from halter.core.tools import Failed
from halter.tools.function_tool import FunctionTool, tool
from halter.tools.process import bytes_to_text

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe without a writer would block for ever; with this flag it does not.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DEEPEST: Final = 64
_MODE: Final = 0o666


def make_file_tools(
    root: str | Path, *, max_read: int = 1_000_000, max_write: int = 10_000_000, max_entries: int = 1000
) -> tuple[FunctionTool, ...]:
    """Tools that read, write, list, find and delete files below a folder.

    All of them block briefly: a disk that hangs is reported as a call that could not be stopped.
    """
    folder = Folder(Path(root))

    def read_file(path: str, offset: int = 0) -> str:
        """Read a file below the root as text, from an offset in bytes on."""
        return folder.read(path, max(offset, 0), max_read)

    def write_file(path: str, text: str) -> str:
        """Write text into a file below the root. Its folders are made; an existing file is replaced at once or not."""
        return folder.write(path, text.encode("utf-8", "surrogatepass"), max_write)

    def list_folder(path: str = ".") -> list[dict[str, Any]]:
        """List what a folder below the root holds."""
        return folder.entries(path, max_entries)

    def find_files(pattern: str, path: str = ".") -> list[str]:
        """Find files below a folder whose name matches a pattern such as *.txt."""
        return folder.matching(pattern, path, max_entries)

    def delete_file(path: str) -> str:
        """Delete one file below the root, or a link itself, or an empty folder."""
        return folder.delete(path)

    # A file below the root, and its name, may be written by anyone who can put it there.
    look = partial(tool, level="SAFE", effect="read", idempotent=True, reads="anyone", reach="none")
    return (
        look(read_file, arguments={"path": "detail", "offset": "detail"}).at(folder),
        look(list_folder, arguments={"path": "detail"}).at(folder),
        look(find_files, arguments={"pattern": "detail", "path": "detail"}).at(folder),
        tool(
            write_file,
            level="CONTROLLED",
            effect="write",
            idempotent=True,
            writes="text",
            reads="nothing",
            reach="own",
            arguments={"path": "target:file", "text": "content"},
        ).at(folder),
        tool(
            delete_file,
            level="RESTRICTED",
            effect="write",
            reads="nothing",
            reach="final",
            arguments={"path": "target:file"},
        ).at(folder),
    )


class Folder:
    """One folder and everything below it that is reachable without following a link."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(f"The root of the file tools, {root}, is no folder: make it, or name another one.")
        self.root = root
        self._protected = NO_PROTECTED_PATHS

    def protect(self, paths: ProtectedPaths) -> None:
        self._protected = self._protected.union(paths)

    def read(self, path: str, offset: int, limit: int) -> str:
        sight = self._protected.sight(reads=True)
        with self._parent(path, sight) as (parent, name), _open_file(name, _FILE, parent, path) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Failed("NotAFile", f"{path} is a {_kind(found.st_mode)}, and only files are read and written.")
            size = found.st_size
            _refuse(sight.judge_file(identity_of(fd)), path)
            data = _read(fd, offset, limit)
        end = offset + len(data)
        more = f"\n[{size - end:,} more bytes: read on with offset={end}]" if end < size else ""
        return bytes_to_text(data, 2 * limit) + more

    def write(self, path: str, data: bytes, limit: int) -> str:
        """Replace a file atomically: readers see the old content or the new, also after a power cut."""
        if len(data) > limit:
            raise Failed("TooLarge", f"{path} would have {len(data):,} bytes; at most {limit:,} are allowed.")
        sight = self._protected.sight()
        with self._parent(path, sight, make=True) as (parent, name):
            _reject_target(name, parent, path, sight)
            _replace(name, parent, data, _mode_of_replaced(name, parent, path))
        return f"Wrote {len(data):,} bytes to {path}."

    def entries(self, path: str, limit: int) -> list[dict[str, Any]]:
        with self._folder(path, self._protected.sight(reads=True)) as fd, _translate_errors(path):
            with os.scandir(fd) as found:
                names = sorted(each.name for each in found)
            shown = [_entry(name, fd) for name in names[:limit]]
        remaining = len(names) - len(shown)
        return [*shown, {"note": f"{remaining:,} more are not shown"}] if remaining else shown

    def matching(self, pattern: str, path: str, limit: int) -> list[str]:
        from fnmatch import fnmatchcase

        found: list[str] = []
        with self._folder(path, self._protected.sight(reads=True)) as fd:
            for below, _, names, _ in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
                found += [os.path.normpath(f"{path}/{below}/{each}") for each in names if fnmatchcase(each, pattern)]
                if len(found) > limit:
                    return [*sorted(found)[:limit], "[more files match than are shown]"]
        return sorted(found)

    def delete(self, path: str) -> str:
        """Delete one file, link or empty folder; a link is not followed."""
        sight = self._protected.sight()
        with self._parent(path, sight) as (parent, name), _translate_errors(path):
            _reject_target(name, parent, path, sight)
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.rmdir(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)
        return f"Deleted {path}."

    @contextmanager
    def _parent(self, path: str, sight: ProtectedSnapshot, *, make: bool = False) -> Generator[tuple[int, str]]:
        parts = split_path(path)
        if not parts:
            raise Failed("BadPath", f"{path!r} is the root itself: name something below it.")
        with self._walk(parts[:-1], path, sight, make=make) as fd:
            yield fd, parts[-1]

    @contextmanager
    def _folder(self, path: str, sight: ProtectedSnapshot) -> Generator[int]:
        with self._walk(split_path(path), path, sight, make=False) as fd:
            yield fd

    @contextmanager
    def _walk(self, parts: tuple[str, ...], path: str, sight: ProtectedSnapshot, *, make: bool) -> Generator[int]:
        """Open folder after folder, each below the one before. The root itself may be a link.

        Its target is checked once it is open, not when the agent was loaded.
        """
        with _translate_errors(path):
            fd = os.open(self.root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            _refuse(sight.judge_root(fd), path)
            _reject_agent_folder(fd, path, sight)
            for part in parts:
                with _translate_errors(path):
                    if make:
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=fd)
                    below = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = below
                _refuse(sight.judge_folder(identity_of(fd)), path)
                _reject_agent_folder(fd, path, sight)
            yield fd
        finally:
            os.close(fd)


def _refuse(reach: ProtectedReach | None, path: str) -> None:
    if reach is not None:
        raise Failed("Protected", f"{path} leads to what no tool may reach: {reach.thing.what}.")


def _reject_agent_folder(fd: int, path: str, sight: ProtectedSnapshot) -> None:
    """Refuse to write below the folder of any agent, even a new one."""
    if not sight.reads and contains_agent_file(fd):
        raise Failed("Protected", f"{path} leads into the folder of an agent, which no tool may change.")


def _reject_target(name: str, parent: int, path: str, sight: ProtectedSnapshot) -> None:
    """Refuse a file that makes a folder an agent's, or another name of a protected file."""
    if name.casefold() in CONFIG_FILE_NAMES:
        raise Failed("Protected", f"{path}: only a person may write a file of this name.")
    with _translate_errors(path), suppress(FileNotFoundError):
        about = os.stat(name, dir_fd=parent, follow_symlinks=False)
        _refuse(sight.judge_file((about.st_dev, about.st_ino)), path)


def split_path(path: str) -> tuple[str, ...]:
    """Split a path; refuse every form that could lead out of the root."""
    if "\0" in path:
        raise Failed("BadPath", "a path cannot hold a NUL character.")
    if path.startswith("/"):
        raise Failed("BadPath", f"{path} is absolute: paths are relative to the root.")
    parts = tuple(part for part in path.split("/") if part not in {"", "."})
    if ".." in parts:
        raise Failed("BadPath", f"{path} holds '..': name the place itself.")
    if len(parts) > _DEEPEST:
        raise Failed("BadPath", f"a path can be {_DEEPEST} folders deep, and this one is {len(parts)}.")
    return parts


@contextmanager
def _open_file(name: str, flags: int, parent: int, path: str) -> Generator[int]:
    with _translate_errors(path):
        fd = os.open(name, flags, 0o666, dir_fd=parent)
    try:
        with _translate_errors(path):
            yield fd
    finally:
        os.close(fd)


@contextmanager
def _translate_errors(path: str) -> Generator[None]:
    """Report errors with the requested path, not a part of it."""
    try:
        yield
    except OSError as error:
        # A link is refused with either of these, depending on whether a folder was to be opened.
        link = error.errno in {errno.ELOOP, errno.ENOTDIR}
        reason = f"{error.strerror}; links are not followed." if link else f"{error.strerror}."
        raise Failed(type(error).__name__, f"{path}: {reason}") from error
    except ValueError as error:
        raise Failed("BadPath", f"{path!r}: {error}.") from error


def _read(fd: int, offset: int, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit and (more := os.pread(fd, limit - len(data), offset + len(data))):
        data += more
    return bytes(data)


def _mode_of_replaced(name: str, parent: int, path: str) -> int | None:
    """The permissions of the file that is replaced; what an agent wrote is never executable.

    A link would be replaced and not followed, which is not what the caller meant.
    """
    with _translate_errors(path), suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise Failed("NotAFile", f"{path} is a {_kind(mode)}, and only files are read and written.")
        return stat.S_IMODE(mode) & _MODE
    return None


def _replace(name: str, parent: int, data: bytes, mode: int | None) -> None:
    temporary = f".{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with _open_file(temporary, flags, parent, name) as fd:
            unwritten = memoryview(data)
            while unwritten:
                unwritten = unwritten[os.write(fd, unwritten) :]
            if mode is not None:
                os.fchmod(fd, mode)
            os.fsync(fd)
        with _translate_errors(name):
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)
    except Failed:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _entry(name: str, parent: int) -> dict[str, Any]:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    return {"name": name, "kind": _kind(found.st_mode), "size": found.st_size}


def _kind(mode: int) -> str:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
    return kinds.get(stat.S_IFMT(mode), "special file")
