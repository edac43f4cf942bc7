"""Signs of life of a process that runs sessions, kept in memory that a sentinel outside reads.

A process whose event loop is blocked cannot say so. What it wrote before is there all the same: when it was last alive,
until when the calls in flight may take, under which names it owns sessions, and which processes it has started.
"""

import struct
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from mmap import mmap
from typing import Final, NamedTuple

SIZE: Final = 16384

_HEAD: Final = struct.Struct("=QQQ")
"""When it was last alive and the earliest deadline, in nanoseconds of the monotonic clock; bytes of text."""
_COUNT: Final = struct.Struct("=Q")
"""How many groups there are."""
_COUNT_AT: Final = _HEAD.size
_TEXT_AT: Final = _COUNT_AT + _COUNT.size
_GROUPS_AT: Final = 8192
_MOST_TEXT: Final = _GROUPS_AT - _TEXT_AT
_MOST_GROUPS: Final = (SIZE - _GROUPS_AT) // 8
_LONGEST_NAME: Final = 200


class Signs(NamedTuple):
    """What a process has written of itself. Times are nanoseconds of the monotonic clock; a deadline of 0 is none."""

    alive_at: int = 0
    deadline: int = 0
    call: str = ""
    workers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()


def read_signs(memory: mmap) -> Signs:
    """Read what a process has written. While it writes, a part may be old and another new."""
    alive_at, deadline, size = _HEAD.unpack_from(memory)
    (count,) = _COUNT.unpack_from(memory, _COUNT_AT)
    call, *workers = bytes(memory[_TEXT_AT : _TEXT_AT + size]).decode("utf-8", "replace").split("\0")
    groups = struct.unpack_from(f"={min(count, _MOST_GROUPS)}Q", memory, _GROUPS_AT)
    return Signs(alive_at, deadline, call, tuple(workers), groups)


class Pulse:
    """Writes the signs of life of this process. Without memory that another process reads, it does nothing.

    `begin` is called when there is something to watch: before the process owns its first session.
    """

    def __init__(self, memory: mmap | None = None, begin: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self._begin = begin
        self._deadlines: dict[object, int] = {}
        self._call = ""
        self._workers: tuple[str, ...] = ()

    def beat(self) -> None:
        """Say that the process is alive."""
        self._write()

    def show_groups(self, groups: Collection[int]) -> None:
        """Say which groups of processes it has started: from any thread, and no sign of life of the event loop."""
        if self._memory is not None:
            shown = tuple(groups)[:_MOST_GROUPS]
            struct.pack_into(f"={len(shown)}Q", self._memory, _GROUPS_AT, *shown)
            _COUNT.pack_into(self._memory, _COUNT_AT, len(shown))

    @contextmanager
    def in_flight(self, call: str, allowed: int) -> Generator[None]:
        """Have something in flight that may take so many microseconds."""
        if self._memory is None:
            yield
            return
        mark, self._call = object(), call[:_LONGEST_NAME].replace("\0", "")
        self._deadlines[mark] = time.monotonic_ns() + allowed * 1000
        self._write()
        try:
            yield
        finally:
            del self._deadlines[mark]
            self._write()

    @contextmanager
    def works_as(self, worker: str) -> Generator[None]:
        """Own sessions under a name."""
        self._begin()
        self._workers = (*self._workers, worker)
        self._write()
        try:
            yield
        finally:
            self._workers = tuple(each for each in self._workers if each != worker)
            self._write()

    def _write(self) -> None:
        if self._memory is None:
            return
        text = "\0".join((self._call, *self._workers)).encode("utf-8", "replace")[:_MOST_TEXT]
        self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        earliest = min(self._deadlines.values(), default=0)
        _HEAD.pack_into(self._memory, 0, time.monotonic_ns(), earliest, len(text))
