"""Possible contents of a disk if the power fails while SQLite writes a database.

The images are computed from the log of SQLite's writes and syncs: for each point, possible contents of the disk. Synced
data is certain; later writes may be present, missing, torn or reordered.
"""

import ctypes
import hashlib
import importlib.util
import os
import random
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import CFUNCTYPE, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, Self, TypeGuard

# The content that a correct recovery must find in the files of a SQLite database, computed without SQLite.

JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
WAL_MAGIC = 0x377F0682
WAL_VERSION = 3007000
WAL_HEADER = struct.Struct(">8I")
FRAME_HEADER = struct.Struct(">6I")
JOURNAL_HEADER = struct.Struct(">8s5I")
UNCOUNTED = 0xFFFFFFFF
"""The record count of a journal that was written without syncs."""
PAGE_SIZES = tuple(512 << shift for shift in range(8))

Sums = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WalFrame:
    page: int
    size: int
    """The pages of the database after the commit that this frame ends, or 0 when it ends none."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Wal:
    page_size: int
    frames: tuple[WalFrame, ...]
    """The valid frames: those whose salts and cumulative checksums match."""

    @property
    def commits(self) -> int:
        return sum(frame.size > 0 for frame in self.frames)

    @property
    def committed(self) -> tuple[WalFrame, ...]:
        ends = (number for number, frame in enumerate(self.frames, 1) if frame.size)
        return self.frames[: max(ends, default=0)]


@dataclass(frozen=True, slots=True)
class Content:
    """The database as a reader sees it: its size in pages, and each page by number."""

    size: int
    pages: Mapping[int, bytes]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(self.pages[number] for number in range(1, self.size + 1))).digest()


def find_committed(content: Content, states: Sequence[bytes]) -> int | None:
    """Return the index of a content among the digests of all states. None means no single match, a violation."""
    digest = content.digest
    return states.index(digest) if states.count(digest) == 1 else None


def pages(db: bytes, wal: bytes = b"", journal: bytes = b"") -> Content:
    db = roll_back(db, journal)
    if not db:  # SQLite deletes the WAL of an empty database.
        return Content(0, {})
    log = parse(wal)
    frames = log.committed
    step = log.page_size if frames else _page_size(db)
    size = frames[-1].size if frames else _size(db, step)
    read = {number: db[(number - 1) * step : number * step].ljust(step, b"\0") for number in range(1, size + 1)}
    return Content(size, read | {frame.page: frame.data for frame in frames if frame.page <= size})


def parse(wal: bytes) -> Wal:
    if len(wal) < WAL_HEADER.size:
        return Wal(0, ())
    magic, version, page_size, _, salt, second_salt, first, second = WAL_HEADER.unpack_from(wal)
    big_endian = magic == WAL_MAGIC | 1
    sums = _checksum((0, 0), wal[:24], big_endian=big_endian)
    is_valid = magic | 1 == WAL_MAGIC | 1 and version == WAL_VERSION and page_size in PAGE_SIZES
    if not is_valid or sums != (first, second):
        return Wal(0, ())
    return Wal(page_size, tuple(_frames(wal, page_size, (salt, second_salt), sums, big_endian=big_endian)))


def ends_commit(wal: bytes | bytearray, offset: int) -> bool:
    """Return True if the frame at an offset ends a commit. Its checksum is not checked."""
    if offset < WAL_HEADER.size or len(wal) < WAL_HEADER.size:
        return False
    step = FRAME_HEADER.size + WAL_HEADER.unpack_from(wal)[2]
    start = offset - (offset - WAL_HEADER.size) % step
    return len(wal) >= start + step and FRAME_HEADER.unpack_from(wal, start)[1] > 0


def roll_back(db: bytes, journal: bytes) -> bytes:
    """Return the database file after the rollback of a hot journal."""
    if not db or len(journal) < JOURNAL_HEADER.size or not journal.startswith(JOURNAL_MAGIC):
        return db
    _, _, _, size, sector, step = JOURNAL_HEADER.unpack_from(journal)
    if step not in PAGE_SIZES or not JOURNAL_HEADER.size <= sector <= len(journal):
        return db
    restored_db = bytearray(db[: size * step].ljust(size * step, b"\0"))
    for page, data in _originals(journal, sector, step):
        if page <= size:
            restored_db[(page - 1) * step : page * step] = data
    return bytes(restored_db)


def _frames(wal: bytes, page_size: int, salts: Sums, sums: Sums, *, big_endian: bool) -> Iterator[WalFrame]:
    step = FRAME_HEADER.size + page_size
    for start in range(WAL_HEADER.size, len(wal) - step + 1, step):
        page, size, salt, second_salt, first, second = FRAME_HEADER.unpack_from(wal, start)
        data = wal[start + FRAME_HEADER.size : start + step]
        if (salt, second_salt) != salts or not page:
            return
        sums = _checksum(sums, wal[start : start + 8] + data, big_endian=big_endian)
        if sums != (first, second):
            return
        yield WalFrame(page, size, data)


# Thousands of images share almost all their frames. 4096 frames are more than a WAL has with default checkpoints, and
# take 16 MiB.
@lru_cache(maxsize=4096)
def _checksum(sums: Sums, data: bytes, *, big_endian: bool) -> Sums:
    first, second = sums
    words = struct.unpack(f"{'>' if big_endian else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _originals(journal: bytes, sector: int, step: int) -> Iterator[tuple[int, bytes]]:
    """Yield the original pages, up to the first record that is cut off or has a wrong checksum."""
    start = 0
    while start + sector <= len(journal) and journal.startswith(JOURNAL_MAGIC, start):
        _, count, nonce, *_ = JOURNAL_HEADER.unpack_from(journal, start)
        start += sector
        if count == UNCOUNTED:
            count = (len(journal) - start) // (step + 8)
        for _ in range(count):
            page, data = int.from_bytes(journal[start : start + 4]), journal[start + 4 : start + 4 + step]
            check = (nonce + sum(data[step - 200 : 0 : -200])) & 0xFFFFFFFF
            if not page or journal[start + 4 + step : start + 8 + step] != check.to_bytes(4):
                return
            yield page, data
            start += step + 8
        start = -(-start // sector) * sector


def _page_size(db: bytes) -> int:
    """Read the page size from the header. An invalid header yields a content that equals no state."""
    (size,) = struct.unpack_from(">H", db.ljust(18, b"\0"), 16)
    return {1: 65536}.get(size, size if size in PAGE_SIZES else 4096)


def _size(db: bytes, step: int) -> int:
    """Read the page count from the header if it is valid, else from the size of the file."""
    header = db[:100].ljust(100, b"\0")
    file_pages, header_pages = -(-len(db) // step), int.from_bytes(header[28:32])
    return header_pages if 0 < header_pages <= file_pages and header[24:28] == header[92:96] else file_pages


File = Literal["db", "wal", "journal"]
Kind = Literal["all", "none", "torn", "subset", "prefix"]

SUFFIXES: Mapping[File, str] = {"db": "", "wal": "-wal", "journal": "-journal"}
ACKNOWLEDGED = "acknowledged"
SECTOR = 512
"""The bytes that a disk writes atomically."""


@dataclass(frozen=True, slots=True)
class Wrote:
    file: File
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncated:
    file: File
    size: int


@dataclass(frozen=True, slots=True)
class Deleted:
    file: File


@dataclass(frozen=True, slots=True)
class Synced:
    """From this point on, the whole file is certain; for the folder, all deletions are."""

    file: File | Literal["folder"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A note of the drill; a label that begins with "acknowledged" covers all commits before it."""

    label: str


Change = Wrote | Truncated | Deleted
Operation = Change | Synced | Marked
ImageDraw = tuple[Kind, dict[int, Change]]
ImageKeys = set[tuple[bool, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Log:
    base: Mapping[File, bytes]
    """The files at the start of the recording; they count as synced."""
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    point: int
    """The number of operations after which the commit was written, synced or not."""
    digest: bytes
    label: str = ""
    """The acknowledgment before the next commit, if any."""


@dataclass(frozen=True, slots=True)
class Image:
    point: int
    """The number of operations before the power cut."""
    moment: str
    kind: Kind
    """The unsynced changes that reached the disk."""
    files: Mapping[File, bytes]
    """All three; a missing file is empty, which is the same to SQLite."""
    acknowledged: int
    """The number of acknowledged commits: the image must contain at least these."""
    written: int
    """The number of written commits, synced or not: the image cannot contain more."""

    @property
    def blank(self) -> bool:
        """True before the first commit: the image proves nothing."""
        return self.written == 0


def write_out(files: Mapping[File, bytes], path: Path) -> None:
    """Write the files of an image, and no others, to a path where SQLite can open them."""
    Path(f"{path}-shm").unlink(missing_ok=True)
    for file, suffix in SUFFIXES.items():
        target = Path(f"{path}{suffix}")
        target.unlink(missing_ok=True)
        if files[file]:
            target.write_bytes(files[file])


def commits(log: Log) -> tuple[Commit, ...]:
    """List the states of the database in order: the first one, and one per commit."""
    files: dict[File, bytearray] = {file: bytearray(log.base[file]) for file in SUFFIXES}
    states = [Commit(0, _digest(files))]
    for point, operation in enumerate(log.operations, 1):
        if isinstance(operation, Change):
            _apply(files[operation.file], operation)
            if _can_commit(operation, files["wal"]) and (digest := _digest(files)) != states[-1].digest:
                states.append(Commit(point, digest))
        elif _acknowledges(operation) and not states[-1].label:
            states[-1] = replace(states[-1], label=operation.label)
    return tuple(states)


def images(log: Log, seed: int, per_point: int = 4) -> Iterator[Image]:
    """Generate up to `per_point` contents of the disk at every point of the log, the same ones for the same seed.

    The points are before and after each operation, so also within every commit and checkpoint. Duplicates since the
    same sync and acknowledgment are omitted.
    """
    rng, disk = random.Random(seed), _Disk(log.base)
    points = [commit.point for commit in commits(log)[1:]]
    acknowledged_count, yielded_keys = 0, ImageKeys()
    for point, (before, after) in enumerate(pairwise((None, *log.operations, None))):
        moment = _moment(before, after, len(disk.certain["wal"]))
        written_count = bisect_right(points, point)
        if before is not None:
            disk.apply(point, before)
            acknowledged_count = written_count if _acknowledges(before) else acknowledged_count
            yielded_keys = ImageKeys() if isinstance(before, Synced) or _acknowledges(before) else yielded_keys
        draws = _skip_duplicates(_survivors(disk.find_unsynced(), rng, per_point), yielded_keys)
        for kind, survivors in islice(draws, per_point):
            yield Image(point, moment, kind, disk.files(survivors), acknowledged_count, written_count)


class _Disk:
    """The files at a point of a log: their synced content, and the numbered changes since."""

    def __init__(self, base: Mapping[File, bytes]) -> None:
        self.certain = dict(base)
        self._pending: dict[File, dict[int, Change]] = {file: {} for file in SUFFIXES}

    def apply(self, number: int, operation: Operation) -> None:
        match operation:
            case Marked():
                pass
            case Synced(place):
                if place == "folder":
                    for file, pending in self._pending.items():
                        deletions = [at for at, change in pending.items() if isinstance(change, Deleted)]
                        self._settle(file, max(deletions, default=0))
                else:
                    self._settle(place, number)
            case Wrote() | Truncated() | Deleted():
                self._pending[operation.file][number] = operation

    def find_unsynced(self) -> dict[int, Change]:
        return dict(sorted(item for pending in self._pending.values() for item in pending.items()))

    def files(self, survivors: Mapping[int, Change]) -> dict[File, bytes]:
        return {
            file: _apply_changes(self.certain[file], _find_visible(pending, survivors))
            for file, pending in self._pending.items()
        }

    def _settle(self, file: File, last_number: int) -> None:
        pending = self._pending[file]
        settled_changes = [change for number, change in pending.items() if number <= last_number]
        self.certain[file] = _apply_changes(self.certain[file], settled_changes)
        self._pending[file] = {number: change for number, change in pending.items() if number > last_number}


def _survivors(unsynced: Mapping[int, Change], rng: random.Random, draws: int) -> Iterator[ImageDraw]:
    """Draw sets of changes that may have reached the disk, the most revealing first."""
    yield "all", dict(unsynced)
    if not unsynced:
        return
    yield "none", {}
    last = max(unsynced)
    if torn_write := _tear(unsynced[last], rng):
        yield "torn", {**unsynced, last: torn_write}
    for _ in range(draws):
        yield "subset", {number: change for number, change in unsynced.items() if rng.random() < 1 / 2}
        yield "prefix", dict(islice(unsynced.items(), rng.randrange(len(unsynced))))


def _tear(change: Change, rng: random.Random) -> Wrote | None:
    """Tear a write at a sector boundary, if it crosses one."""
    if not isinstance(change, Wrote):
        return None
    cuts = range(SECTOR - change.offset % SECTOR, len(change.data), SECTOR)
    return replace(change, data=change.data[: rng.choice(cuts)]) if cuts else None


def _find_visible(pending: Mapping[int, Change], survivors: Mapping[int, Change]) -> Iterator[Change]:
    """Yield the visible changes of one file. Without its deletion, the folder still has the old file."""
    for number, change in pending.items():
        if number in survivors:
            yield survivors[number]
        elif isinstance(change, Deleted):
            return


def _skip_duplicates(draws: Iterable[ImageDraw], yielded_keys: ImageKeys) -> Iterator[ImageDraw]:
    for kind, survivors in draws:
        key = (kind == "torn", tuple(survivors))
        if key not in yielded_keys:
            yielded_keys.add(key)
            yield kind, survivors


def _apply_changes(content: bytes, changes: Iterable[Change]) -> bytes:
    buffer: bytearray | None = None
    for change in changes:
        buffer = bytearray(content) if buffer is None else buffer
        _apply(buffer, change)
    return content if buffer is None else bytes(buffer)


def _apply(buffer: bytearray, change: Change) -> None:
    match change:
        case Wrote(_, offset, data):
            buffer.extend(bytes(max(0, offset - len(buffer))))
            buffer[offset : offset + len(data)] = data
        case Truncated(_, size):
            buffer[size:] = bytes(max(0, size - len(buffer)))
        case Deleted():
            buffer.clear()


def _digest(files: Mapping[File, bytearray]) -> bytes:
    return pages(bytes(files["db"]), bytes(files["wal"]), bytes(files["journal"])).digest


def _can_commit(change: Change, wal: bytearray) -> bool:
    """Return True if the change may complete a commit: a fast approximation."""
    match change:
        case Wrote("wal", offset, data):
            return ends_commit(wal, offset + len(data) - 1)
        case Wrote("journal", 0, data):
            return data.startswith(b"\0")
        case Wrote():
            return False
        case Truncated() | Deleted():
            return change.file == "journal"


def _acknowledges(operation: Operation) -> TypeGuard[Marked]:
    return isinstance(operation, Marked) and operation.label.startswith(ACKNOWLEDGED)


def _moment(before: Operation | None, after: Operation | None, old_wal: int) -> str:
    match before, after:
        case Marked(), _:
            return "at a mark"
        case _, Synced(file):
            return f"before the {file} sync"
        case Synced(file), _:
            return f"after the {file} sync"
        case Wrote("wal", offset), _ if offset < old_wal:
            return "overwriting the wal"
        case ((Wrote(file) | Truncated(file)), _):
            return f"writing the {file}"
        case Deleted(file), _:
            return f"after the {file} deletion"
        case None, _:
            return "at the start"


# A recorder of SQLite's writes and syncs, as a VFS.


class RecorderUnusable(RuntimeError):
    """The recorder cannot be registered or unregistered."""


def _addresses(names: str) -> tuple[tuple[str, type[c_void_p]], ...]:
    return tuple((name, c_void_p) for name in names.split())


# SQLite's own structures, up to their second version: without the third version of the file methods, SQLite maps
# nothing into memory, so no write is missed.
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
    """Records the writes of one database inside its block. Open every connection with its `uri`, and close it.

    The database must not be open when the recorder is made. Threads may write at the same time, each with its own
    connection; a shared connection could deadlock.
    """

    def __init__(self, path: Path) -> None:
        real_path = os.path.realpath(path)
        self._paths: dict[str, File] = {f"{real_path}{suffix}": file for file, suffix in SUFFIXES.items()}
        self._base: dict[File, bytes] = {
            file: Path(name).read_bytes() if Path(name).exists() else b"" for name, file in self._paths.items()
        }
        self._operations: list[Operation] = []
        self._lock = threading.Lock()
        self._open: dict[int, File] = {}
        self._unlisted: set[int] = set()
        self._methods: dict[int, _Methods] = {}
        self._hooks: list[object] = []
        self._name = f"halter_recorder_{id(self):x}"
        spec = importlib.util.find_spec("_sqlite3")
        self._library = sqlite_library(spec.origin if spec and spec.has_location else None)
        self._vfs = _Vfs.from_buffer_copy(_Vfs.from_address(self._library.sqlite3_vfs_find(None)))
        self._vfs.version, self._vfs.name = 2, self._name.encode()
        self._vfs.open = self._hook(_OPEN, self._vfs.open, self._on_open)
        self._vfs.delete = self._hook(_DELETE, self._vfs.delete, self._on_delete)
        self.uri = f"{Path(real_path).as_uri()}?vfs={self._name}"

    def __enter__(self) -> Self:
        # SQLite points into this object, so the object must outlive every Python reference.
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
        """Add a note between two operations."""
        with self._lock:
            self._operations.append(Marked(label))

    def log(self) -> Log:
        with self._lock:
            return Log(self._base, tuple(self._operations))

    def _hook(self, kind: Callable[..., Any], original: int, note: Callable[..., Iterable[Operation]]) -> int:
        """Return the address of a function that calls SQLite's own, and records the call if it succeeds."""
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

    def _on_open(self, _vfs: int, name: int | None, handle: int, flags: int, _out: int) -> Iterable[Operation]:
        file = self._paths.get(_path(name))
        if file:
            self._open[handle] = file
            methods = c_void_p.from_address(handle)
            methods.value = ctypes.addressof(self._hook_methods(methods.value or 0))
            if flags & _OPEN_CREATE and file != "db":
                self._unlisted.add(handle)
        return ()

    def _hook_methods(self, original: int) -> _Methods:
        """Return SQLite's file methods, with hooks in those that change the disk."""
        if original not in self._methods:
            methods = _Methods.from_buffer_copy(_Methods.from_address(original))
            methods.version = min(methods.version, 2)
            methods.close = self._hook(_CLOSE, methods.close, self._on_close)
            methods.write = self._hook(_WRITE, methods.write, self._wrote)
            methods.truncate = self._hook(_TRUNCATE, methods.truncate, self._on_truncate)
            methods.sync = self._hook(_SYNC, methods.sync, self._on_sync)
            self._methods[original] = methods
        return self._methods[original]

    def _on_close(self, handle: int) -> Iterable[Operation]:
        del self._open[handle]
        self._unlisted.discard(handle)
        return ()

    def _wrote(self, handle: int, data: int, amount: int, offset: int) -> Iterable[Operation]:
        return (Wrote(self._open[handle], offset, ctypes.string_at(data, amount)),)

    def _on_truncate(self, handle: int, size: int) -> Iterable[Operation]:
        return (Truncated(self._open[handle], size),)

    def _on_sync(self, handle: int, _flags: int) -> Iterable[Operation]:
        """The first sync of a new journal or WAL also syncs its folder."""
        yield Synced(self._open[handle])
        if handle in self._unlisted:
            self._unlisted.discard(handle)
            yield Synced("folder")

    def _on_delete(self, _vfs: int, name: int, sync_folder: int) -> Iterable[Operation]:
        file = self._paths.get(_path(name))
        if file:
            yield Deleted(file)
        if sync_folder:
            yield Synced("folder")


def _path(name: int | None) -> str:
    return os.path.realpath(os.fsdecode(ctypes.string_at(name))) if name else ""


def sqlite_library(origin: str | None) -> ctypes.CDLL:
    """Load the library behind Python's sqlite3 module, or the one built into Python."""
    try:
        library = ctypes.CDLL(origin)
        library.sqlite3_vfs_find.restype = c_void_p
    except (OSError, AttributeError) as error:
        raise RecorderUnusable(
            f"The SQLite library of this Python ({origin or 'built in'}) cannot be loaded, so writes "
            "cannot be recorded. Use a Python whose sqlite3 module is linked to a shared libsqlite3."
        ) from error
    return library
