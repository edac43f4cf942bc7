"""A sensor that watches a file or a folder. System events only trigger a look; the look determines what changed.

So a burst is one reading, and nothing depends on how the system reports a rename. All looks block.
"""

import asyncio
import codecs
import os
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core import agent_spec, folders
from halter.core.clock import Clock
from halter.core.folders import FileEntries, FileRefusal, FolderListing, allow_all, describe_os_error
from halter.core.ports import UnreadableFile
from halter.core.text import clean
from halter.core.tools import Reading, Sensor, SensorFailed
from halter.sensors.poll import make_reading

MOST_TEXT: Final = 64 * 1024
MAX_FILES_REPORTED: Final = 1000


def list_folder(folder: Path, pattern: str) -> FolderListing:
    """List a folder without following links. Raises SensorFailed."""
    found = folders.scan_folder(folder, pattern)
    if isinstance(found, UnreadableFile):
        raise SensorFailed(found.sentence)
    return found


def list_file_changes(before: FileEntries, after: FileEntries) -> list[dict[str, str]]:
    """List the changes between two looks. A renamed file was deleted and added."""
    told = [("deleted", path) for path in sorted(before.keys() - after.keys())]
    told += [("added", path) for path in sorted(after.keys() - before.keys())]
    told += [("modified", path) for path in sorted(after.keys() & before.keys()) if after[path] != before[path]]
    return [{"change": change, "path": clean(path)} for change, path in told[:MAX_FILES_REPORTED]]


def describe_folder(files: FileEntries, changed: list[dict[str, str]]) -> dict[str, Any]:
    """Describe a folder, the newest files first."""
    newest = sorted(files.items(), key=lambda each: (-each[1].modified, each[0]))[:MAX_FILES_REPORTED]
    listed = [
        {"path": clean(path), "size": entry.size, "modified_at": _moment(entry.modified)} for path, entry in newest
    ]
    return {"files": listed, "changes": changed}


def describe_file(path: Path, shown: str, refuses: FileRefusal = allow_all) -> dict[str, Any]:
    """Describe a file and its beginning. Raises SensorFailed for one that cannot be read."""
    try:
        # Opening a pipe without a writer would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            if refuses(path, file.fileno()):
                raise SensorFailed(f"{shown} leads to what an agent may not read.")
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise SensorFailed(f"{shown} is no plain file.")
            text = _text(file.read(MOST_TEXT), whole=about.st_size <= MOST_TEXT)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": shown, "exists": False, "size": 0, "modified_at": None, "text": None}
    except OSError as error:
        raise SensorFailed(f"{shown} cannot be read: {describe_os_error(error)}.") from error
    moment = _moment(about.st_mtime_ns)
    return {"path": shown, "exists": True, "size": about.st_size, "modified_at": moment, "text": text}


def _text(data: bytes, *, whole: bool) -> str | None:
    """Decode the beginning of a file, which may end within a character; None if it is no text."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _moment(nanoseconds: int) -> str:
    """Format a time; one beyond all calendars as the last there is."""
    try:
        moment = datetime.fromtimestamp(nanoseconds / 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        moment = datetime.max.replace(tzinfo=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


MILLISECOND: Final = 1_000
MAX_BURST_MS: Final = 1_600
BURST_PAUSE_MS: Final = 100
IDENTITY_CHECK_MS: Final = 1_000
"""How often it is checked that the watched folder is still at its path."""
CHECKS_BEFORE_LOOK: Final = 60
"""After so many checks, look anyway: not every file system reports remote changes."""

WatchedFolders = tuple[Path, ...]


def make_watch_sensor(
    spec: agent_spec.SensorSpec, root: Path, clock: Clock, refuses: FileRefusal = allow_all
) -> Sensor:
    return _Watch(spec, root, clock, refuses)


class _Listing(msgspec.Struct, frozen=True):
    places: WatchedFolders
    value: dict[str, Any] | None


class _Watch:
    def __init__(self, spec: agent_spec.SensorSpec, root: Path, clock: Clock, refuses: FileRefusal) -> None:
        self._refuses = refuses
        self.name = spec.name
        self.retry_after: int | None = None
        self._display_path = spec.source.path if isinstance(spec.source.path, str) else "."
        self._path = root / self._display_path
        self._pattern = spec.source.pattern
        self._clock = clock
        self._is_folder = self._display_path.endswith("/") or self._pattern != "*"
        self._files: FileEntries | None = None
        self._value: dict[str, Any] | None = None

    async def readings(self) -> AsyncGenerator[Reading]:
        self._value = None
        while True:
            places = await asyncio.to_thread(self._find_folders)
            with watch_folders(places) as watched:
                while True:
                    seen = await asyncio.to_thread(self._list_files)
                    if seen.value is not None:
                        yield make_reading(seen.value, self._clock.now())
                    if seen.places != places or not await watched.wait_for_change():
                        break
            # Where folders come and go all the time, restarts are limited.
            await self._clock.sleep(BURST_PAUSE_MS * MILLISECOND)

    def _find_folders(self) -> WatchedFolders:
        """Find what is at the path. A missing one keeps its kind."""
        self._is_folder = self._path.is_dir() or (self._is_folder and not self._path.exists())
        if self._is_folder:
            return list_folder(self._path, self._pattern).folders
        # An editor puts a new file in the place of the old one, which only the folder around it tells.
        if not self._path.parent.is_dir():
            raise SensorFailed(f"The folder of {self._display_path} is not there.")
        return (self._path.parent,)

    def _list_files(self) -> _Listing:
        return self._folder() if self._is_folder else self._file()

    def _folder(self) -> _Listing:
        seen = list_folder(self._path, self._pattern)
        changed = [] if self._files is None else list_file_changes(self._files, seen.files)
        nothing_new = self._value is not None and not changed
        self._files, self._value = seen.files, describe_folder(seen.files, changed)
        return _Listing(seen.folders, None if nothing_new else self._value)

    def _file(self) -> _Listing:
        before, self._value = self._value, describe_file(self._path, self._display_path, self._refuses)
        return _Listing((self._path.parent,), None if self._value == before else self._value)


class WatchEvents:
    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._is_over = False
        self._trouble = ""

    def set_state(self, *, over: bool = False, trouble: str = "") -> None:
        self._is_over, self._trouble = over, trouble
        self._news.set()

    async def wait_for_change(self) -> bool:
        """Wait for a change; False says that the watch is over and must start again."""
        await self._news.wait()
        self._news.clear()
        if self._trouble:
            raise SensorFailed(self._trouble)
        return not self._is_over


@contextmanager
def watch_folders(places: WatchedFolders) -> Generator[WatchEvents]:
    """Watch folders in a thread of its own: a pool would be exhausted by waiting threads.

    The thread ends a moment after this does, and is not waited for.
    """
    watched, stop, loop = WatchEvents(), threading.Event(), asyncio.get_running_loop()

    def on_state(*, over: bool = False, trouble: str = "") -> None:
        with suppress(RuntimeError):  # The loop has closed, and there is no listener.
            loop.call_soon_threadsafe(partial(watched.set_state, over=over, trouble=trouble))

    threading.Thread(target=_watch, args=(places, stop, on_state), name="halter-watch", daemon=True).start()
    try:
        yield watched
    finally:
        stop.set()


def _watch(places: WatchedFolders, stop: threading.Event, tell: Callable[..., None]) -> None:
    trouble = ""
    try:
        _watch_until_replaced(places, stop, tell)
    except FileNotFoundError:
        pass  # One of them has just gone; the next look finds out.
    except OSError as error:
        trouble = f"The folder cannot be watched: {error.strerror or error}."
    except RuntimeError as error:
        trouble = f"The folder cannot be watched: {error}."
    finally:
        tell(over=True, trouble=trouble)


def _watch_until_replaced(places: WatchedFolders, stop: threading.Event, tell: Callable[..., None]) -> None:
    import watchfiles

    began = [_identity(place) for place in places]
    told = watchfiles.watch(
        *places,
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
    for turn, changed in enumerate(told):
        gone = {path for change, path in changed if change == watchfiles.Change.deleted}
        if any(str(place) in gone for place in places) or began != [_identity(place) for place in places]:
            return
        # What happened before the system had begun to watch is seen by looking once more.
        if changed or turn % CHECKS_BEFORE_LOOK == 0:
            tell()


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        about = os.stat(path)  # noqa: PTH116, the same in one line of many thousands that are run.
        return about.st_dev, about.st_ino
    return None
