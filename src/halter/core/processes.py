"""Forks of a threaded process, its signs of life for the sentinel, and masked output of tool code.

A fork copies only the calling thread. A lock that another thread holds at that moment stays locked in the copy forever,
and C libraries such as SQLite have locks that Python code cannot see. So a thread holds a `ForkLock` while it runs in
such a library, and `fork` waits until all of them are free.

A process cannot report that its event loop is blocked. Instead it writes to shared memory in advance: its last sign of
life, the deadline of its calls in flight, the worker ids under which it owns sessions, and the processes it started.

Tool code runs in this process together with code whose output must not be masked. So a mask applies to the context of
one call, with its tasks and threads.
"""

import itertools
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from functools import lru_cache
from mmap import mmap
from typing import Any, Final, NamedTuple, Protocol, TextIO, cast
from weakref import WeakValueDictionary

MAX_FORK_WAIT: Final = 1.0
"""Seconds that a fork waits for the locks. Then it forks anyway: a copy that hangs is killed at its deadline."""


_ENDING: Final = threading.Event()


def note_end() -> None:
    """Note that a signal ends this process in order, so that it leaves its sessions to a later owner."""
    _ENDING.set()


def is_ending() -> bool:
    return _ENDING.is_set()


class ProcessMark(NamedTuple):
    """What tells a process from every other one: its boot and process namespace, and its start time in clock ticks.

    Where the system does not show them, both are empty.
    """

    namespace: str = ""
    start: str = ""


@lru_cache(1)
def _read_namespace() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 Paths load slowly.
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def read_process_mark(pid: int) -> ProcessMark | None:
    """Read the mark of a process of this machine; None if it has ended, also if its parent has not noticed."""
    if not _read_namespace():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return ProcessMark()
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessMark(_read_namespace(), fields[19])


def has_process_ended(host: str, pid: int, mark: ProcessMark) -> bool:
    """Return whether a process is known to have ended. Nothing is known about those of another host or container."""
    if not pid or host != socket.gethostname() or mark.namespace not in ("", _read_namespace()):
        return False
    current_mark = read_process_mark(pid)
    return current_mark is None or (mark != ProcessMark() and current_mark != mark)


class ForkLock:
    """A lock that no thread holds while the process forks. The holder must not wait for anything else.

    Hot paths acquire the plain `lock` after they have checked `FORKING`.
    """

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        with FORKING:
            _LOCKS[next(_NUMBERS)] = self

    def __enter__(self) -> None:
        if FORKING.locked():
            let_fork_pass()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def try_acquire(self, seconds: float) -> bool:
        return self.lock.acquire(timeout=seconds)

    def let_go(self) -> None:
        self.lock.release()


FORKING: Final = threading.Lock()
"""Held while the process forks, or waits to fork."""

_LOCKS: Final = WeakValueDictionary[int, ForkLock]()
_NUMBERS: Final = itertools.count()


def let_fork_pass() -> None:
    """Wait for a pending fork: a thread that immediately acquires its lock again would starve the fork."""
    with FORKING:
        pass


def fork() -> int:
    """Fork when no thread holds a fork lock; return 0 in the copy, and the copy's pid here.

    In the copy all signals are blocked until it installs its own handlers.
    """
    with FORKING, _acquire_all_locks(), _block_signals(), _ignore_fork_warning():
        return os.fork()


@contextmanager
def _block_signals() -> Generator[None]:
    """Block signals in this thread; the copy begins with all of them blocked.

    A handler of the process that ran in the copy would act twice: the copy shares the pipe that wakes the event loop.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


@contextmanager
def _ignore_fork_warning() -> Generator[None]:
    """Ignore Python 3.12's warning that a fork of a threaded process may hang; the locks prevent that.

    Filters are process-wide, so older versions, which do not warn, leave them unchanged.
    """
    if sys.version_info < (3, 12):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def _acquire_all_locks() -> Generator[None]:
    deadline = time.monotonic() + MAX_FORK_WAIT
    locks = [lock for _, lock in sorted(_LOCKS.items()) if lock.try_acquire(max(0.0, deadline - time.monotonic()))]
    try:
        yield
    finally:
        for lock in locks:
            lock.let_go()


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


class PrintMask(Protocol):
    """A mask for secrets in text that arrives in chunks."""

    def feed(self, chunk: str) -> str:
        """Add a chunk and return the text that is certain to contain no partial secret; it may be empty."""
        ...

    def finish(self) -> str: ...


class MaskedPrints:
    """A context manager that masks the output of its block, and of the tasks and threads that it starts.

    The end of each text is held back until the call ends or flushes, since a secret may be printed in parts.
    """

    __slots__ = ("_is_closed", "_lock", "_make", "_masks", "_token")

    def __init__(self, make: Callable[[], PrintMask]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._masks: dict[int, tuple[TextIO, PrintMask]] = {}
        self._is_closed = False

    def __enter__(self) -> None:
        self._token: Token[MaskedPrints | None] = _CALL.set(self)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _CALL.reset(self._token)
        self._is_closed = True
        # Most calls print nothing. `write` checks again whether the call has ended.
        if self._masks:
            with self._lock:
                self._finish()

    def write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            if self._is_closed:
                # A task or a thread that outlived the call.
                stream.write(self.mask_text(text))
                return
            _, mask = self._masks.setdefault(id(stream), (stream, self._make()))
            stream.write(mask.feed(text))
            if self._is_closed:
                self._finish()

    def flush(self, stream: TextIO) -> None:
        with self._lock:
            _, mask = self._masks.pop(id(stream), (stream, None))
            if mask is not None:
                stream.write(mask.finish())
            stream.flush()

    def _finish(self) -> None:
        while self._masks:
            _, (stream, mask) = self._masks.popitem()
            # A closed terminal is not a failure of the call.
            with suppress(OSError, ValueError):
                stream.write(mask.finish())
                stream.flush()

    def mask_text(self, text: str) -> str:
        mask = self._make()
        return mask.feed(text) + mask.finish()


_CALL: Final = ContextVar[MaskedPrints | None]("halter_prints", default=None)


def print_masked_output(text: str) -> None:
    """Print the masked output of a process that the current call started; outside a call, print nothing."""
    call = _CALL.get()
    if text and call is not None:
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")


class _Stream:
    """A standard stream that masks the output of calls."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.users = 0

    def write(self, text: str) -> int:
        call = _CALL.get()
        if call is None:
            return self.stream.write(text)
        call.write(self.stream, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        call = _CALL.get()
        if call is None:
            self.stream.flush()
        else:
            call.flush(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _MaskingRecordFactory:
    """A log record factory that masks the records of calls."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record, call = self.make(*args, **kwargs), _CALL.get()
        return record if call is None else _mask_record(record, call)


def _mask_record(record: logging.LogRecord, call: MaskedPrints) -> logging.LogRecord:
    """Mask the text of a record for all handlers. `logging` itself reports a malformed record."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 The arguments are unknown objects, and `logging` reports the error.
        return record
    record.msg, record.args = call.mask_text(message), None
    if record.exc_info:
        record.exc_text = call.mask_text(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    if record.stack_info:
        record.stack_info = call.mask_text(record.stack_info)
    return record


_LOCK: Final = threading.Lock()


@contextmanager
def install_print_masks() -> Generator[None]:
    """Mask the standard streams and log records of calls while the block runs."""
    with _LOCK:
        streams = {name: _install_stream(name) for name in ("stdout", "stderr") if getattr(sys, name) is not None}
        records = _install_record_factory()
    try:
        yield
    finally:
        with _LOCK:
            for name, stream in streams.items():
                stream.users -= 1
                # A stream that was installed meanwhile by other code is left unchanged.
                if not stream.users and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            records.users -= 1
            if not records.users and logging.getLogRecordFactory() is records:
                logging.setLogRecordFactory(records.make)


def _install_stream(name: str) -> _Stream:
    current = cast("TextIO | _Stream", getattr(sys, name))
    stream = current if isinstance(current, _Stream) else _Stream(current)
    stream.users += 1
    setattr(sys, name, stream)
    return stream


def _install_record_factory() -> _MaskingRecordFactory:
    current = logging.getLogRecordFactory()
    records = current if isinstance(current, _MaskingRecordFactory) else _MaskingRecordFactory(current)
    records.users += 1
    logging.setLogRecordFactory(records)
    return records
