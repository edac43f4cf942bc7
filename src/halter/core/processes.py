"""Forks of a process with threads, its signs of life for a sentinel, and masked output of tool code.

A fork copies only the calling thread. A lock that another thread holds at that moment stays locked in the copy forever,
and C libraries such as SQLite have locks that no Python code sees. So a thread that works in such a library holds a
`ForkLock` meanwhile, and `fork` waits until all of them are free.

A process whose event loop is blocked cannot say so. It writes to shared memory beforehand: when it was last alive,
until when its calls in flight may take, under which names it owns sessions, and which processes it has started.

Tool code runs in this process beside code whose output must not be masked. So a mask belongs to a context: that of one
call, and of its tasks and threads.
"""

import itertools
import logging
import os
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from mmap import mmap
from typing import Any, Final, NamedTuple, Protocol, TextIO, cast
from weakref import WeakValueDictionary

LONGEST_WAIT: Final = 1.0
"""Seconds that a fork waits for the threads. Then it goes on: a copy that hangs is killed at its deadline."""


class ForkLock:
    """A lock that no thread holds while the process forks. Nothing else may be waited for under it.

    Hot paths take the plain `lock`, after a look at `FORKING`.
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
"""Held while the process forks, or waits to."""

_LOCKS: Final = WeakValueDictionary[int, ForkLock]()
_NUMBERS: Final = itertools.count()


def let_fork_pass() -> None:
    """Let a waiting fork go first: a thread that retakes its lock at once would starve it."""
    with FORKING:
        pass


def fork() -> int:
    """Fork when no thread holds a fork lock; return 0 in the copy, and the copy's pid here.

    In the copy all signals are blocked until it has handlers of its own.
    """
    with FORKING, _take_all_locks(), _block_signals(), _ignore_fork_warning():
        return os.fork()


@contextmanager
def _block_signals() -> Generator[None]:
    """Block signals in this thread; the copy begins with all of them blocked.

    A handler of the process that ran in the copy would act twice: the copy shares the pipe that wakes the event loop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ignore_fork_warning() -> Generator[None]:
    """Silence Python 3.12's warning that a fork beside threads may hang; the locks prevent that.

    Filters are process-wide, so they are left alone where no warning comes.
    """
    if sys.version_info < (3, 12):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def _take_all_locks() -> Generator[None]:
    deadline = time.monotonic() + LONGEST_WAIT
    held = [lock for _, lock in sorted(_LOCKS.items()) if lock.try_acquire(max(0.0, deadline - time.monotonic()))]
    try:
        yield
    finally:
        for lock in held:
            lock.let_go()


LIVENESS_BYTES: Final = 16384

_HEAD: Final = struct.Struct("=QQQ")
"""Last sign of life and earliest deadline, in nanoseconds of the monotonic clock; bytes of text."""
_COUNT: Final = struct.Struct("=Q")
"""How many process groups there are."""
_COUNT_AT: Final = _HEAD.size
_TEXT_AT: Final = _COUNT_AT + _COUNT.size
_GROUPS_AT: Final = 8192
_MOST_TEXT: Final = _GROUPS_AT - _TEXT_AT
_MOST_GROUPS: Final = (LIVENESS_BYTES - _GROUPS_AT) // 8
_LONGEST_NAME: Final = 200


class LivenessReading(NamedTuple):
    """What a process has written. Times are nanoseconds of the monotonic clock; a deadline of 0 is none."""

    alive_at: int = 0
    deadline: int = 0
    call: str = ""
    workers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()


def read_liveness(memory: mmap) -> LivenessReading:
    """Read what a process has written. While it writes, parts may be old and others new."""
    alive_at, deadline, size = _HEAD.unpack_from(memory)
    (count,) = _COUNT.unpack_from(memory, _COUNT_AT)
    call, *workers = bytes(memory[_TEXT_AT : _TEXT_AT + size]).decode("utf-8", "replace").split("\0")
    groups = struct.unpack_from(f"={min(count, _MOST_GROUPS)}Q", memory, _GROUPS_AT)
    return LivenessReading(alive_at, deadline, call, tuple(workers), groups)


class LivenessWriter:
    """Writes the signs of life of this process. Without shared memory, it does nothing.

    `begin` is called before the process owns its first session.
    """

    def __init__(self, memory: mmap | None = None, begin: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self._begin = begin
        self._deadlines: dict[object, int] = {}
        self._call = ""
        self._workers: tuple[str, ...] = ()
        self._written_at = 0

    def beat(self) -> None:
        self._write()

    def show_groups(self, groups: Collection[int]) -> None:
        """Record the process groups it has started: from any thread, and no sign of life of the event loop."""
        if self._memory is not None:
            shown = tuple(groups)[:_MOST_GROUPS]
            struct.pack_into(f"={len(shown)}Q", self._memory, _GROUPS_AT, *shown)
            _COUNT.pack_into(self._memory, _COUNT_AT, len(shown))

    def begin_call(self, call: str, allowed: int) -> object | None:
        """Record that a call is in flight, and how long it may take; returns the mark that `end_call` takes."""
        if self._memory is None:
            return None
        if call != self._call:
            self._call = call
            self._write_text()
        mark = object()
        self._deadlines[mark] = time.monotonic_ns() + allowed * 1000
        self._write()
        return mark

    def end_call(self, mark: object) -> None:
        del self._deadlines[mark]
        self._write()

    @contextmanager
    def works_as(self, worker: str) -> Generator[None]:
        self._begin()
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
        """Write what changes rarely, before the sign of life that tells how long it is."""
        if self._memory is not None:
            call = self._call[:_LONGEST_NAME].replace("\0", "")
            text = "\0".join((call, *self._workers)).encode("utf-8", "replace")[:_MOST_TEXT]
            self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
            self._written_at = len(text)

    def _write(self) -> None:
        if self._memory is not None:
            earliest = min(self._deadlines.values(), default=0)
            _HEAD.pack_into(self._memory, 0, time.monotonic_ns(), earliest, self._written_at)


class PrintMask(Protocol):
    """Masks secrets in text that comes in chunks."""

    def feed(self, chunk: str) -> str:
        """Take a chunk and return what is certain by now, which may be nothing."""
        ...

    def finish(self) -> str: ...


class MaskedPrints:
    """While the block runs, masks what its code prints, and what that starts.

    The end of each text is held back, since a secret may be printed in pieces, until the call ends or flushes.
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
        # Most calls print nothing. A thread that is about to looks once more whether the call is over.
        if self._masks:
            with self._lock:
                self._finish()

    def write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            if self._is_closed:
                # A task or a thread that the call left behind.
                stream.write(self.masked(text))
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
            # A terminal that is gone is no failure of the call.
            with suppress(OSError, ValueError):
                stream.write(mask.finish())
                stream.flush()

    def masked(self, text: str) -> str:
        mask = self._make()
        return mask.feed(text) + mask.finish()


_CALL: Final = ContextVar[MaskedPrints | None]("halter_prints", default=None)


def print_masked_output(text: str) -> None:
    """Show the output of a process made for the call of this context; without a call, show nothing."""
    call = _CALL.get()
    if text and call is not None:
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")


class _Stream:
    """A standard stream that masks what is written in the context of a call."""

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
    """Makes log records as before, and masks those of a call."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make
        self.users = 0

    def __call__(self, *args: Any, **more: Any) -> logging.LogRecord:
        record, call = self.make(*args, **more), _CALL.get()
        return record if call is None else _mask_record(record, call)


def _mask_record(record: logging.LogRecord, call: MaskedPrints) -> logging.LogRecord:
    """Mask the text of a record for all handlers. A malformed one is reported by logging itself."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 Its arguments are a stranger's, and logging says what is wrong with them.
        return record
    record.msg, record.args = call.masked(message), None
    if record.exc_info:
        record.exc_text = call.masked(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    if record.stack_info:
        record.stack_info = call.masked(record.stack_info)
    return record


_LOCK: Final = threading.Lock()


@contextmanager
def install_print_masks() -> Generator[None]:
    """Install masks over the current standard streams while the block runs."""
    with _LOCK:
        streams = {name: _install_stream(name) for name in ("stdout", "stderr") if getattr(sys, name) is not None}
        records = _install_record_factory()
    try:
        yield
    finally:
        with _LOCK:
            for name, stream in streams.items():
                stream.users -= 1
                # What another has put there meanwhile is left alone.
                if not stream.users and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            records.users -= 1
            if not records.users and logging.getLogRecordFactory() is records:
                logging.setLogRecordFactory(records.make)


def _install_stream(name: str) -> _Stream:
    now = cast("TextIO | _Stream", getattr(sys, name))
    stream = now if isinstance(now, _Stream) else _Stream(now)
    stream.users += 1
    setattr(sys, name, stream)
    return stream


def _install_record_factory() -> _MaskingRecordFactory:
    now = logging.getLogRecordFactory()
    records = now if isinstance(now, _MaskingRecordFactory) else _MaskingRecordFactory(now)
    records.users += 1
    logging.setLogRecordFactory(records)
    return records
