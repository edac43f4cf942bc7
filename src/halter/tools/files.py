"""Files below one folder. No path leads out of it, not even through a link that is created at the last moment.

Each part of a path is opened relative to the open folder before it, and never through a link, so the checked file is
the one that is used. Each opened folder is compared with the protected ones.
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
from halter.core.tools import OFFICE_TYPES, Failed, File
from halter.system.paths import identity_of
from halter.system.protected_paths import (
    CONFIG_FILE_NAMES,
    NO_PROTECTED_PATHS,
    ProtectedPaths,
    ProtectedReach,
    ProtectedSnapshot,
    contains_agent_file,
)
from halter.tools.function_tool import FunctionTool, tool
from halter.tools.process import MAX_FILES_BYTES, bytes_to_text, detect_media_type

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe without a writer blocks forever without O_NONBLOCK.
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_DEPTH: Final = 64
_MODE_MASK: Final = 0o666


def make_file_tools(
    root: str | Path, *, max_read: int = 1_000_000, max_write: int = 10_000_000, max_entries: int = 1000
) -> tuple[FunctionTool, ...]:
    """Make tools that read, write, list, find and delete files below a folder.

    All of them block briefly; a call on a hanging disk is reported as one that could not be stopped.
    """
    folder = Folder(Path(root))

    def read_file(path: str, offset: int = 0) -> Any:
        """Read a file below the root, starting at an offset in bytes. Pictures, PDFs and documents are read whole."""
        return folder.read(path, max(offset, 0), max_read)

    def write_file(path: str, text: str) -> str:
        """Write text to a file below the root. Missing folders are created; an existing file is replaced atomically."""
        return folder.write(path, text.encode("utf-8", "surrogatepass"), max_write)

    def list_folder(path: str = ".") -> list[dict[str, Any]]:
        """List the entries of a folder below the root."""
        return folder.entries(path, max_entries)

    def find_files(pattern: str, path: str = ".") -> list[str]:
        """Find files below a folder whose name matches a pattern such as *.txt."""
        return folder.matching(pattern, path, max_entries)

    def delete_file(path: str) -> str:
        """Delete a file, a link or an empty folder below the root. Links are not followed."""
        return folder.delete(path)

    # A file below the root, and its name, may be written by anyone with access to the folder.
    reading_tool = partial(tool, level="SAFE", effect="read", idempotent=True, reads="anyone", reach="none")
    return (
        reading_tool(read_file, arguments={"path": "detail", "offset": "detail"}).at(folder),
        reading_tool(list_folder, arguments={"path": "detail"}).at(folder),
        reading_tool(find_files, arguments={"pattern": "detail", "path": "detail"}).at(folder),
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
            raise ConfigError(f"The root of the file tools, {root}, is not a folder. Create it, or set another root.")
        self.root = root
        self._protected = NO_PROTECTED_PATHS

    def protect(self, paths: ProtectedPaths) -> None:
        self._protected = self._protected.union(paths)

    def read(self, path: str, offset: int, limit: int) -> str | File:
        sight = self._protected.take_snapshot(read_only=True)
        with self._parent(path, sight) as (parent, name), _open_file(name, _FILE_FLAGS, parent, path) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Failed("NotAFile", f"{path} is a {_kind(status.st_mode)}; only files can be read and written.")
            size = status.st_size
            _refuse(sight.judge_file(identity_of(fd)), path)
            kind = detect_media_type(os.pread(fd, 16, 0)) or OFFICE_TYPES.get(Path(name).suffix.lower(), "")
            if kind and not offset and size <= MAX_FILES_BYTES:
                return File(_read(fd, 0, size), kind, name)
            data = _read(fd, offset, limit)
        end = offset + len(data)
        note = f"\n[{size - end:,} more bytes; continue with offset={end}]" if end < size else ""
        return bytes_to_text(data, 2 * limit) + note

    def write(self, path: str, data: bytes, limit: int) -> str:
        """Replace a file atomically: readers see the old or the new content, also after a power failure."""
        if len(data) > limit:
            raise Failed("TooLarge", f"{path} would have {len(data):,} bytes; the maximum is {limit:,}.")
        sight = self._protected.take_snapshot()
        with self._parent(path, sight, make=True) as (parent, name):
            _reject_target(name, parent, path, sight)
            _replace(name, parent, data, _mode_of_replaced(name, parent, path))
        return f"Wrote {len(data):,} bytes to {path}."

    def entries(self, path: str, limit: int) -> list[dict[str, Any]]:
        with self._folder(path, self._protected.take_snapshot(read_only=True)) as fd, _translate_errors(path):
            with os.scandir(fd) as scan:
                names = sorted(entry.name for entry in scan)
            listed = [_entry(name, fd) for name in names[:limit]]
        remaining = len(names) - len(listed)
        return [*listed, {"note": f"{remaining:,} more are not shown"}] if remaining else listed

    def matching(self, pattern: str, path: str, limit: int) -> list[str]:
        from fnmatch import fnmatchcase

        paths: list[str] = []
        with self._folder(path, self._protected.take_snapshot(read_only=True)) as fd:
            for subfolder, _, names, _ in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
                paths += [
                    os.path.normpath(f"{path}/{subfolder}/{name}") for name in names if fnmatchcase(name, pattern)
                ]
                if len(paths) > limit:
                    return [*sorted(paths)[:limit], "[more files match]"]
        return sorted(paths)

    def delete(self, path: str) -> str:
        """Delete one file, link or empty folder; a link is not followed."""
        sight = self._protected.take_snapshot()
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
            raise Failed("BadPath", f"{path!r} is the root itself. Use a path below it.")
        with self._walk(parts[:-1], path, sight, make=make) as fd:
            yield fd, parts[-1]

    @contextmanager
    def _folder(self, path: str, sight: ProtectedSnapshot) -> Generator[int]:
        with self._walk(split_path(path), path, sight, make=False) as fd:
            yield fd

    @contextmanager
    def _walk(self, parts: tuple[str, ...], path: str, sight: ProtectedSnapshot, *, make: bool) -> Generator[int]:
        """Open one folder after another, each relative to the one before. The root itself may be a link.

        Its target is checked once it is open, not when the agent was loaded.
        """
        with _translate_errors(path):
            fd = os.open(self.root, _FOLDER_FLAGS & ~os.O_NOFOLLOW)
        try:
            _refuse(sight.judge_root(fd), path)
            _reject_agent_folder(fd, path, sight)
            for part in parts:
                with _translate_errors(path):
                    if make:
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=fd)
                    child = os.open(part, _FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = child
                _refuse(sight.judge_folder(identity_of(fd)), path)
                _reject_agent_folder(fd, path, sight)
            yield fd
        finally:
            os.close(fd)


def _refuse(reach: ProtectedReach | None, path: str) -> None:
    if reach is not None:
        raise Failed("Protected", f"{path} is protected from tools: {reach.entry.description}.")


def _reject_agent_folder(fd: int, path: str, sight: ProtectedSnapshot) -> None:
    """Reject writes below the folder of any agent, even a new one."""
    if not sight.read_only and contains_agent_file(fd):
        raise Failed("Protected", f"{path} is in the folder of an agent, which tools cannot change.")


def _reject_target(name: str, parent: int, path: str, sight: ProtectedSnapshot) -> None:
    """Reject a file that would define an agent, and other names of a protected file."""
    if name.casefold() in CONFIG_FILE_NAMES:
        raise Failed("Protected", f"{path}: only a person may write a file with this name.")
    with _translate_errors(path), suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        _refuse(sight.judge_file((status.st_dev, status.st_ino)), path)


def split_path(path: str) -> tuple[str, ...]:
    """Split a path; reject every form that could lead out of the root."""
    if "\0" in path:
        raise Failed("BadPath", "a path cannot contain a NUL character.")
    if path.startswith("/"):
        raise Failed("BadPath", f"{path} is absolute. Use a path relative to the root.")
    parts = tuple(part for part in path.split("/") if part not in {"", "."})
    if ".." in parts:
        raise Failed("BadPath", f"{path} contains '..'. Use a path without it.")
    if len(parts) > _MAX_DEPTH:
        raise Failed("BadPath", f"the path is {len(parts)} folders deep; the maximum is {_MAX_DEPTH}.")
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
        # A link fails with one of these errors, depending on whether a folder was to be opened.
        link = error.errno in {errno.ELOOP, errno.ENOTDIR}
        reason = f"{error.strerror}; links are not followed." if link else f"{error.strerror}."
        raise Failed(type(error).__name__, f"{path}: {reason}") from error
    except ValueError as error:
        raise Failed("BadPath", f"{path!r}: {error}.") from error


def _read(fd: int, offset: int, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit and (chunk := os.pread(fd, limit - len(data), offset + len(data))):
        data += chunk
    return bytes(data)


def _mode_of_replaced(name: str, parent: int, path: str) -> int | None:
    """Read the permissions of the file to replace, without execute permission.

    A link is rejected: it would be replaced and not followed, which is not what the caller wants.
    """
    with _translate_errors(path), suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise Failed("NotAFile", f"{path} is a {_kind(mode)}; only files can be read and written.")
        return stat.S_IMODE(mode) & _MODE_MASK
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
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    return {"name": name, "kind": _kind(status.st_mode), "size": status.st_size}


def _kind(mode: int) -> str:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
    return kinds.get(stat.S_IFMT(mode), "special file")
