"""The signs of life of a process, for its sentinel.

A process cannot report that its event loop is blocked. Instead it writes to shared memory in advance: its last sign of
life, the deadline of its calls in flight, the worker ids under which it owns sessions, and the processes it started.
"""

import struct
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from mmap import mmap
from typing import Final, NamedTuple

LIVENESS_BYTES: Final = 16384

_HEAD: Final = struct.Struct("=QQQ")
"""Last sign of life and earliest deadline, in nanoseconds of the monotonic clock; size of the text in bytes."""
_COUNT: Final = struct.Struct("=Q")
"""Number of process groups."""
_COUNT_AT: Final = _HEAD.size
_TEXT_AT: Final = _COUNT_AT + _COUNT.size
_GROUPS_AT: Final = 8192
_MAX_TEXT_BYTES: Final = _GROUPS_AT - _TEXT_AT
_MAX_GROUPS: Final = (LIVENESS_BYTES - _GROUPS_AT) // 8
_MAX_CALL_NAME: Final = 200


class LivenessReading(NamedTuple):
    """The signs of life of a process. Times are nanoseconds of the monotonic clock; a deadline of 0 means none."""

    alive_at: int = 0
    deadline: int = 0
    call: str = ""
    workers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()


def read_liveness(memory: mmap) -> LivenessReading:
    """Read the signs of life of a process. During a write, some fields may be old and others new."""
    alive_at, deadline, size = _HEAD.unpack_from(memory)
    (count,) = _COUNT.unpack_from(memory, _COUNT_AT)
    call, *workers = bytes(memory[_TEXT_AT : _TEXT_AT + size]).decode("utf-8", "replace").split("\0")
    groups = struct.unpack_from(f"={min(count, _MAX_GROUPS)}Q", memory, _GROUPS_AT)
    return LivenessReading(alive_at, deadline, call, tuple(workers), groups)


class LivenessWriter:
    """The writer of this process's signs of life. Without shared memory, it does nothing.

    `on_first_session` is called before the process owns its first session.
    """

    def __init__(self, memory: mmap | None = None, on_first_session: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self._on_first_session = on_first_session
        self._deadlines: dict[object, int] = {}
        self._call = ""
        self._workers: tuple[str, ...] = ()
        self._written_at = 0

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers of this process."""
        return self._workers

    def beat(self) -> None:
        self._write()

    def show_groups(self, groups: Collection[int]) -> None:
        """Write the process groups that this process started. Callable from any thread; not a sign of life."""
        if self._memory is not None:
            group_ids = tuple(groups)[:_MAX_GROUPS]
            struct.pack_into(f"={len(group_ids)}Q", self._memory, _GROUPS_AT, *group_ids)
            _COUNT.pack_into(self._memory, _COUNT_AT, len(group_ids))

    def begin_call(self, call: str, max_duration: int) -> object | None:
        """Write that a call is in flight, and its maximum duration; return the handle for `end_call`."""
        if self._memory is None:
            return None
        if call != self._call:
            self._call = call
            self._write_text()
        handle = object()
        self._deadlines[handle] = time.monotonic_ns() + max_duration * 1000
        self._write()
        return handle

    def end_call(self, handle: object) -> None:
        del self._deadlines[handle]
        self._write()

    @contextmanager
    def works_as(self, worker: str) -> Generator[None]:
        self._on_first_session()
        self._workers = (*self._workers, worker)
        self._write_text()
        self._write()
        try:
            yield
        finally:
            self._workers = tuple(each for each in self._workers if each != worker)
            self._write_text()
            self._write()

    def _write_text(self) -> None:
        """Write the call and the workers, before the header that contains their size."""
        if self._memory is not None:
            call = self._call[:_MAX_CALL_NAME].replace("\0", "")
            text = "\0".join((call, *self._workers)).encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
            self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
            self._written_at = len(text)

    def _write(self) -> None:
        if self._memory is not None:
            earliest = min(self._deadlines.values(), default=0)
            _HEAD.pack_into(self._memory, 0, time.monotonic_ns(), earliest, self._written_at)
