"""A sensor that watches a file or a folder. System events only trigger a listing, which determines what changed.

So a burst of changes is one reading, and nothing depends on how the system reports a rename. Listings block. What was
seen of a folder is its *look*. A reading carries it, and a later process continues with it.
"""

import asyncio
import codecs
import os
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.clock import Clock
from halter.core.ports import UnreadableFile
from halter.core.text import clean
from halter.core.tools import Reading, Sensor, SensorFailed
from halter.sensors.poll import make_reading
from halter.spec.sensors import FilesSensor
from halter.system.folders import FileEntries, FileRefusal, FolderListing, allow_all, describe_os_error, scan_folder

MAX_TEXT_BYTES: Final = 64 * 1024
MAX_FILES_REPORTED: Final = 1000


def list_folder(folder: Path, pattern: str) -> FolderListing:
    """List a folder without following links. Raises SensorFailed."""
    listing = scan_folder(folder, pattern)
    if isinstance(listing, UnreadableFile):
        raise SensorFailed(listing.sentence)
    return listing


class SeenFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a look. `path` may be masked: `key`, a number made of the true path, identifies the file."""

    key: int
    path: str
    size: int
    modified: int
    inode: int


SeenFiles = Mapping[int, SeenFile]


class Look(msgspec.Struct, frozen=True):
    """The files that a sensor has seen, and where."""

    path: str
    pattern: str
    files: tuple[SeenFile, ...] = ()


def make_seen_files(files: FileEntries) -> dict[int, SeenFile]:
    seen_files = (
        SeenFile(_make_key(path), clean(path), entry.size, entry.modified, entry.inode) for path, entry in files.items()
    )
    return {file.key: file for file in seen_files}


def _make_key(path: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=7).digest())


def list_file_changes(old_files: SeenFiles, new_files: SeenFiles) -> list[tuple[str, SeenFile]]:
    """List the changes between two listings. A renamed file is deleted and added."""
    changes = [("deleted", old_files[key]) for key in old_files.keys() - new_files.keys()]
    changes += [("added", new_files[key]) for key in new_files.keys() - old_files.keys()]
    changes += [("modified", file) for key, file in new_files.items() if key in old_files and _differs(file, old_files)]
    return sorted(changes, key=lambda change: (_ORDER.index(change[0]), change[1].path))


_ORDER: Final = ("deleted", "added", "modified")


def _differs(file: SeenFile, old_files: SeenFiles) -> bool:
    old_file = old_files[file.key]
    return (file.size, file.modified, file.inode) != (old_file.size, old_file.modified, old_file.inode)


def apply_file_changes(files: SeenFiles, changes: Sequence[tuple[str, SeenFile]]) -> dict[int, SeenFile]:
    new_files = dict(files)
    for change, file in changes:
        if change == "deleted":
            del new_files[file.key]
        else:
            new_files[file.key] = file
    return new_files


def build_folder_value(files: FileEntries, changes: Sequence[tuple[str, SeenFile]]) -> dict[str, Any]:
    """Build the value of a folder, the newest files first."""
    newest = sorted(files.items(), key=lambda item: (-item[1].modified, item[0]))[:MAX_FILES_REPORTED]
    entries = [
        {"path": clean(path), "size": entry.size, "modified_at": _moment(entry.modified)} for path, entry in newest
    ]
    return {"files": entries, "changes": [{"change": change, "path": file.path} for change, file in changes]}


def read_file_value(path: Path, display_path: str, refuses: FileRefusal = allow_all) -> dict[str, Any]:
    """Read the value of a file, with the start of its text. Raises SensorFailed if it cannot be read."""
    try:
        # Opening a pipe without a writer would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            if refuses(path, file.fileno()):
                raise SensorFailed(f"{display_path} leads to a file that the agent may not read.")
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SensorFailed(f"{display_path} is not a regular file.")
            text = _text(file.read(MAX_TEXT_BYTES), is_complete=status.st_size <= MAX_TEXT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": display_path, "exists": False, "size": 0, "modified_at": None, "text": None}
    except OSError as error:
        raise SensorFailed(f"{display_path} cannot be read: {describe_os_error(error)}.") from error
    moment = _moment(status.st_mtime_ns)
    return {"path": display_path, "exists": True, "size": status.st_size, "modified_at": moment, "text": text}


def _text(data: bytes, *, is_complete: bool) -> str | None:
    """Decode the start of a file, which may end within a character; None if it is not text."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=is_complete)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _moment(nanoseconds: int) -> str:
    """Format a time; a time beyond the calendar as the last valid one."""
    try:
        moment = datetime.fromtimestamp(nanoseconds / 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        moment = datetime.max.replace(tzinfo=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


MILLISECOND: Final = 1_000
MAX_BURST_MS: Final = 1_600
BURST_PAUSE_MS: Final = 100
IDENTITY_CHECK_MS: Final = 1_000
"""Interval at which the identity of the watched folders is checked."""
CHECKS_PER_LISTING: Final = 60
"""Number of identity checks after which the files are listed anyway: not every file system reports remote changes."""

WatchedFolders = tuple[Path, ...]


def make_watch_sensor(
    spec: FilesSensor, root: Path, clock: Clock, refuses: FileRefusal = allow_all, look: Any = None
) -> Sensor:
    """Make a sensor that continues after a look; without one, what its first listing finds is not news."""
    return _Watch(spec, root, clock, refuses, look)


def read_first_look(spec: FilesSensor, root: Path) -> Any:
    """Return the look of a sensor that has none: what is there now is not news. None for a file or an error."""
    watched_path, pattern = spec.source.path, spec.source.pattern
    if not (root / watched_path).exists():
        return msgspec.to_builtins(Look(watched_path, pattern))
    listing = scan_folder(root / watched_path, pattern) if (root / watched_path).is_dir() else None
    if not isinstance(listing, FolderListing):
        return None
    return msgspec.to_builtins(Look(watched_path, pattern, tuple(make_seen_files(listing.files).values())))


class _Listing(msgspec.Struct, frozen=True):
    """A listing; without a value nothing has changed. `is_complete`: no changes are left for the next listing."""

    places: WatchedFolders
    value: dict[str, Any] | None
    files: SeenFiles | None = None
    is_complete: bool = True


class _Watch:
    def __init__(self, spec: FilesSensor, root: Path, clock: Clock, refuses: FileRefusal, look: Any) -> None:
        self._refuses = refuses
        self.name = spec.name
        self.retry_after: int | None = None
        self._display_path = spec.source.path
        self._path = root / self._display_path
        self._pattern = spec.source.pattern
        self._clock = clock
        self._is_folder = self._display_path.endswith("/") or self._pattern != "*"
        self._files = self._parse_look(look)
        self._value: dict[str, Any] | None = None

    def _parse_look(self, look: Any) -> SeenFiles | None:
        """Return the files of a look; None if it is not of this path and pattern."""
        try:
            parsed_look = msgspec.convert(look, Look)
        except msgspec.ValidationError:
            return None
        if (parsed_look.path, parsed_look.pattern) != (self._display_path, self._pattern):
            return None
        return {file.key: file for file in parsed_look.files}

    async def readings(self) -> AsyncGenerator[Reading]:
        self._value = None
        while True:
            folders = await asyncio.to_thread(self._find_folders)
            with watch_folders(folders) as events:
                while True:
                    listing = await asyncio.to_thread(self._list_files)
                    if listing.value is not None:
                        reading = make_reading(listing.value, self._clock.now())
                        self._files, self._value = listing.files, listing.value
                        yield msgspec.structs.replace(reading, look=self._make_look())
                    if not listing.is_complete:
                        continue
                    if listing.places != folders or not await events.wait_for_change():
                        break
            # Limits the rate of restarts if folders are created and deleted continuously.
            await self._clock.sleep(BURST_PAUSE_MS * MILLISECOND)

    def _find_folders(self) -> WatchedFolders:
        """Find the folders to watch. A missing path keeps its kind, file or folder."""
        self._is_folder = self._path.is_dir() or (self._is_folder and not self._path.exists())
        if self._is_folder:
            return list_folder(self._path, self._pattern).folders
        # An editor replaces a file by a new one, which only a watch on the folder reports.
        if not self._path.parent.is_dir():
            raise SensorFailed(f"The folder of {self._display_path} does not exist.")
        return (self._path.parent,)

    def _list_files(self) -> _Listing:
        return self._folder() if self._is_folder else self._file()

    def _folder(self) -> _Listing:
        listing = list_folder(self._path, self._pattern)
        seen_files = make_seen_files(listing.files)
        old_files = seen_files if self._files is None else self._files
        changes = list_file_changes(old_files, seen_files)
        if self._value is not None and not changes:
            return _Listing(listing.folders, None)
        # The other changes are in the next reading.
        reported_changes = changes[:MAX_FILES_REPORTED]
        value = build_folder_value(listing.files, reported_changes)
        files = apply_file_changes(old_files, reported_changes)
        return _Listing(listing.folders, value, files, len(changes) == len(reported_changes))

    def _file(self) -> _Listing:
        value = read_file_value(self._path, self._display_path, self._refuses)
        return _Listing((self._path.parent,), None if value == self._value else value, self._files)

    def _make_look(self) -> Any:
        """Return the look as JSON; None for a file, whose every reading is its whole value."""
        if not self._is_folder or self._files is None:
            return None
        return msgspec.to_builtins(Look(self._display_path, self._pattern, tuple(self._files.values())))


class WatchEvents:
    def __init__(self) -> None:
        self._change_event = asyncio.Event()
        self._has_ended = False
        self._trouble = ""

    def set_state(self, *, has_ended: bool = False, trouble: str = "") -> None:
        self._has_ended, self._trouble = has_ended, trouble
        self._change_event.set()

    async def wait_for_change(self) -> bool:
        """Wait for a change; return False if the watch has ended and must be restarted."""
        await self._change_event.wait()
        self._change_event.clear()
        if self._trouble:
            raise SensorFailed(self._trouble)
        return not self._has_ended


@contextmanager
def watch_folders(folders: WatchedFolders) -> Generator[WatchEvents]:
    """Watch folders in a separate thread: waiting threads would exhaust a pool.

    The thread ends shortly after this context, which does not wait for it.
    """
    events, stop, loop = WatchEvents(), threading.Event(), asyncio.get_running_loop()

    def on_state(*, has_ended: bool = False, trouble: str = "") -> None:
        with suppress(RuntimeError):  # The loop is closed, so there is no listener.
            loop.call_soon_threadsafe(partial(events.set_state, has_ended=has_ended, trouble=trouble))

    threading.Thread(target=_watch, args=(folders, stop, on_state), name="halter-watch", daemon=True).start()
    try:
        yield events
    finally:
        stop.set()


def _watch(folders: WatchedFolders, stop: threading.Event, on_state: Callable[..., None]) -> None:
    trouble = ""
    try:
        _watch_until_replaced(folders, stop, on_state)
    except FileNotFoundError:
        pass  # A folder was just deleted; the next listing finds out.
    except OSError as error:
        trouble = f"The folder cannot be watched: {error.strerror or error}."
    except RuntimeError as error:
        trouble = f"The folder cannot be watched: {error}."
    finally:
        on_state(has_ended=True, trouble=trouble)


def _watch_until_replaced(folders: WatchedFolders, stop: threading.Event, on_change: Callable[..., None]) -> None:
    import watchfiles

    identities = [_identity(folder) for folder in folders]
    batches = watchfiles.watch(
        *folders,
        watch_filter=None,
        debounce=MAX_BURST_MS,
        step=BURST_PAUSE_MS,
        stop_event=stop,
        rust_timeout=IDENTITY_CHECK_MS,
        yield_on_timeout=True,
        debug=False,
        raise_interrupt=False,
        force_polling=False,
        recursive=False,
        ignore_permission_denied=False,
    )
    for number, changes in enumerate(batches):
        deleted_paths = {path for change, path in changes if change == watchfiles.Change.deleted}
        if any(str(folder) in deleted_paths for folder in folders) or identities != [
            _identity(folder) for folder in folders
        ]:
            return
        # The first timeout also triggers a listing, for changes before the system started to watch.
        if changes or number % CHECKS_PER_LISTING == 0:
            on_change()


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(path)  # noqa: PTH116, faster, and called very often.
        return status.st_dev, status.st_ino
    return None
