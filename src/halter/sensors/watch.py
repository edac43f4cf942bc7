"""A sensor that watches a file or a folder. What the system tells only says when to look; the look says the rest.

So a burst is one reading, a rename is what it is, and nothing depends on how the system tells of either.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core import pacing
from halter.core.clock import Clock
from halter.core.protected import Refuses, unrefused
from halter.core.sensing import Reading, Sensor, SensorFailed
from halter.sensors.listing import Files, changes, file_value, folder_value, look
from halter.sensors.values import reading

MILLISECOND: Final = 1_000
BURST: Final = 1_600
"""The longest time, in milliseconds, for which changes are gathered into one reading."""
PAUSE: Final = 100
"""A burst is over when so many milliseconds pass without a change."""
CHECK: Final = 1_000
"""So often, in milliseconds, it is made sure that what is watched still stands at its path."""
ANYWAY: Final = 60
"""After so many checks somebody looks anyway: not every file system tells of what another machine did."""

Places = tuple[Path, ...]


def watch(spec: pacing.Sensor, root: Path, clock: Clock, refuses: Refuses = unrefused) -> Sensor:
    """Make a sensor that watches the file or folder of a spec, whose path is seen from `root`."""
    return _Watch(spec, root, clock, refuses)


class _Look(msgspec.Struct, frozen=True):
    """Which folders are to be watched, and what there is to tell."""

    places: Places
    value: dict[str, Any] | None


class _Watch:
    def __init__(self, spec: pacing.Sensor, root: Path, clock: Clock, refuses: Refuses) -> None:
        self._refuses = refuses
        self.name = spec.name
        self.retry_after: int | None = None
        self._shown = spec.source.path if isinstance(spec.source.path, str) else "."
        self._path = root / self._shown
        self._pattern = spec.source.pattern
        self._clock = clock
        self._is_folder = self._shown.endswith("/") or self._pattern != "*"
        self._files: Files | None = None
        self._value: dict[str, Any] | None = None

    async def readings(self) -> AsyncGenerator[Reading]:
        """Read at once, and after each change."""
        self._value = None
        while True:
            places = await asyncio.to_thread(self._places)
            with watching(places) as watched:
                while True:
                    seen = await asyncio.to_thread(self._look)
                    if seen.value is not None:
                        yield reading(seen.value, self._clock.now())
                    if seen.places != places or not await watched.changed():
                        break
            # Where folders come and go all the time, nobody begins anew all the time.
            await self._clock.sleep(PAUSE * MILLISECOND)

    def _places(self) -> Places:
        """Find out what stands there. What is gone is taken for what it was."""
        self._is_folder = self._path.is_dir() or (self._is_folder and not self._path.exists())
        if self._is_folder:
            return look(self._path, self._pattern).folders
        # An editor puts a new file in the place of the old one, which only the folder around it tells.
        if not self._path.parent.is_dir():
            raise SensorFailed(f"The folder of {self._shown} is not there.")
        return (self._path.parent,)

    def _look(self) -> _Look:
        return self._folder() if self._is_folder else self._file()

    def _folder(self) -> _Look:
        seen = look(self._path, self._pattern)
        changed = [] if self._files is None else changes(self._files, seen.files)
        nothing_new = self._value is not None and not changed
        self._files, self._value = seen.files, folder_value(seen.files, changed)
        return _Look(seen.folders, None if nothing_new else self._value)

    def _file(self) -> _Look:
        before, self._value = self._value, file_value(self._path, self._shown, self._refuses)
        return _Look((self._path.parent,), None if self._value == before else self._value)


class Watched:
    """What the thread that watches has told."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._over = False
        self._trouble = ""

    def tell(self, *, over: bool = False, trouble: str = "") -> None:
        """Have it known that something happened, that the watch is over, and why."""
        self._over, self._trouble = over, trouble
        self._news.set()

    async def changed(self) -> bool:
        """Wait until something has happened; False says that the watch is over and has to begin anew."""
        await self._news.wait()
        self._news.clear()
        if self._trouble:
            raise SensorFailed(self._trouble)
        return not self._over


@contextmanager
def watching(places: Places) -> Generator[Watched]:
    """Watch folders in a thread of its own, since any pool would be used up by those who wait for ever.

    The thread ends a moment after this does, and keeps nobody waiting.
    """
    watched, stop, loop = Watched(), threading.Event(), asyncio.get_running_loop()

    def tell(*, over: bool = False, trouble: str = "") -> None:
        with suppress(RuntimeError):  # The loop has closed, and nobody listens any more.
            loop.call_soon_threadsafe(partial(watched.tell, over=over, trouble=trouble))

    threading.Thread(target=_watch, args=(places, stop, tell), name="halter-watch", daemon=True).start()
    try:
        yield watched
    finally:
        stop.set()


def _watch(places: Places, stop: threading.Event, tell: Callable[..., None]) -> None:
    trouble = ""
    try:
        _watch_while_the_same(places, stop, tell)
    except FileNotFoundError:
        pass  # One of them has just gone, as whoever begins anew will see.
    except OSError as error:
        trouble = f"The folder cannot be watched: {error.strerror or error}."
    except RuntimeError as error:
        trouble = f"The folder cannot be watched: {error}."
    finally:
        tell(over=True, trouble=trouble)


def _watch_while_the_same(places: Places, stop: threading.Event, tell: Callable[..., None]) -> None:
    import watchfiles

    began = [_identity(place) for place in places]
    told = watchfiles.watch(
        *places,
        watch_filter=None,
        debounce=BURST,
        step=PAUSE,
        stop_event=stop,
        rust_timeout=CHECK,
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
        if changed or turn % ANYWAY == 0:
            tell()


def _identity(place: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        about = os.stat(place)  # noqa: PTH116, the same in one line of many thousands that are run.
        return about.st_dev, about.st_ino
    return None
