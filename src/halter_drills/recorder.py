"""A recorder of what SQLite asks of the disk.

It stands between SQLite and the files of one database. Every write, truncation, deletion and sync is done by
SQLite's own code, and then noted.
"""

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable
from ctypes import CFUNCTYPE, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Self

from halter_drills.disk import SUFFIXES, Deleted, File, Log, Marked, Operation, Synced, Truncated, Wrote


class RecorderUnusable(RuntimeError):
    """The recorder cannot be put before SQLite, or not be taken away again."""


def _addresses(names: str) -> tuple[tuple[str, type[c_void_p]], ...]:
    return tuple((name, c_void_p) for name in names.split())


# The beginnings of SQLite's own structures, up to their second version. What is not replaced here is copied
# as it is. Without the third version of the file methods nothing is mapped into memory and no write is missed.
class _Methods(ctypes.Structure):
    _fields_ = (
        ("version", c_int),
        *_addresses("close read write truncate sync file_size lock unlock check_reserved_lock file_control"),
        *_addresses("sector_size device_characteristics shm_map shm_lock shm_barrier shm_unmap"),
    )


class _Vfs(ctypes.Structure):
    _fields_ = (
        ("version", c_int),
        ("file_bytes", c_int),
        ("longest_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        *_addresses("app_data open delete access full_pathname dl_open dl_error dl_sym dl_close"),
        *_addresses("randomness sleep current_time last_error current_time_64"),
    )


_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_DELETE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_CLOSE = CFUNCTYPE(c_int, c_void_p)
_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)
_OPEN_CREATE = 0x4


class Recorder:
    """Records one database while it is entered. Every connection has to be opened by its `uri`, and closed.

    Nothing may have the database open when the recorder is made, since it reads the files as they are then.
    Threads may write at the same time, each with its own connection; sharing one could block both for ever.
    """

    def __init__(self, path: Path) -> None:
        place = os.path.realpath(path)
        self._paths: dict[str, File] = {f"{place}{suffix}": file for file, suffix in SUFFIXES.items()}
        self._base: dict[File, bytes] = {file: _content(Path(name)) for name, file in self._paths.items()}
        self._operations: list[Operation] = []
        self._lock = threading.Lock()
        self._open: dict[int, File] = {}
        self._unlisted: set[int] = set()
        self._methods: dict[int, _Methods] = {}
        self._hooks: list[object] = []
        self._name = f"halter_recorder_{id(self):x}"
        self._library = sqlite_library(_origin())
        self._vfs = _Vfs.from_buffer_copy(_Vfs.from_address(self._library.sqlite3_vfs_find(None)))
        self._vfs.version, self._vfs.name = 2, self._name.encode()
        self._vfs.open = self._hook(_OPEN, self._vfs.open, self._opened)
        self._vfs.delete = self._hook(_DELETE, self._vfs.delete, self._deleted)
        self.uri = f"{Path(place).as_uri()}?vfs={self._name}"

    def __enter__(self) -> Self:
        # SQLite now points into this object, so it must outlive every reference that Python knows of.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            raise RecorderUnusable(
                f"{len(self._open)} files of {self.uri} are still open. "
                "Close every connection to the database before its recorder."
            )
        self._library.sqlite3_vfs_unregister(ctypes.byref(self._vfs))
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))

    def mark(self, label: str) -> None:
        """Notes something between two operations; an acknowledgment, before the next commit may begin."""
        with self._lock:
            self._operations.append(Marked(label))

    def log(self) -> Log:
        with self._lock:
            return Log(self._base, tuple(self._operations))

    def _hook(self, kind: Callable[..., Any], original: int, note: Callable[..., Iterable[Operation]]) -> int:
        """The address of a function that lets SQLite's own do the work, and notes it if it succeeded."""
        do = kind(original)

        def callback(*arguments: int) -> int:
            with self._lock:
                code: int = do(*arguments)
                if code == 0:
                    self._operations.extend(note(*arguments))
                return code

        hook = kind(callback)
        self._hooks.append(hook)
        return ctypes.cast(hook, c_void_p).value or 0

    def _opened(self, _vfs: int, name: int | None, handle: int, flags: int, _out: int) -> Iterable[Operation]:
        file = self._paths.get(_path(name))
        if file:
            self._open[handle] = file
            methods = c_void_p.from_address(handle)
            methods.value = ctypes.addressof(self._hooked(methods.value or 0))
            if flags & _OPEN_CREATE and file != "db":
                self._unlisted.add(handle)
        return ()

    def _hooked(self, original: int) -> _Methods:
        """SQLite's methods of a file, with the few replaced that change what is on the disk."""
        if original not in self._methods:
            methods = _Methods.from_buffer_copy(_Methods.from_address(original))
            methods.version = min(methods.version, 2)
            methods.close = self._hook(_CLOSE, methods.close, self._closed)
            methods.write = self._hook(_WRITE, methods.write, self._wrote)
            methods.truncate = self._hook(_TRUNCATE, methods.truncate, self._truncated)
            methods.sync = self._hook(_SYNC, methods.sync, self._synced)
            self._methods[original] = methods
        return self._methods[original]

    def _closed(self, handle: int) -> Iterable[Operation]:
        del self._open[handle]
        self._unlisted.discard(handle)
        return ()

    def _wrote(self, handle: int, data: int, amount: int, offset: int) -> Iterable[Operation]:
        return (Wrote(self._open[handle], offset, ctypes.string_at(data, amount)),)

    def _truncated(self, handle: int, size: int) -> Iterable[Operation]:
        return (Truncated(self._open[handle], size),)

    def _synced(self, handle: int, _flags: int) -> Iterable[Operation]:
        """Of a journal or a WAL, the first sync after it was opened goes on to the folder that lists it."""
        yield Synced(self._open[handle])
        if handle in self._unlisted:
            self._unlisted.discard(handle)
            yield Synced("folder")

    def _deleted(self, _vfs: int, name: int, sync_folder: int) -> Iterable[Operation]:
        file = self._paths.get(_path(name))
        if file:
            yield Deleted(file)
        if sync_folder:
            yield Synced("folder")


def _path(name: int | None) -> str:
    return os.path.realpath(os.fsdecode(ctypes.string_at(name))) if name else ""


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def sqlite_library(origin: str | None) -> ctypes.CDLL:
    """The library behind a file of Python's sqlite3 module, or the one that is built into Python."""
    try:
        library = ctypes.CDLL(origin)
        library.sqlite3_vfs_find.restype = c_void_p
    except (OSError, AttributeError) as error:
        raise RecorderUnusable(
            f"The SQLite library of this Python ({origin or 'built in'}) cannot be reached, so that writes "
            "cannot be recorded. Use a Python whose sqlite3 module is linked to a shared libsqlite3."
        ) from error
    return library


def _origin() -> str | None:
    spec = importlib.util.find_spec("_sqlite3")
    return spec.origin if spec and spec.has_location else None
