"""Forks of a process that has threads.

A fork copies the thread that asks for it, and no other. A lock that another thread holds at that moment stays locked in
the copy for ever, and C libraries have locks that no Python code sees: SQLite has some for the whole process. So a
thread that works in such a library holds a `ForkLock` meanwhile, and `fork` waits until every one of them is free.
"""

import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

LONGEST_WAIT: Final = 1.0
"""Seconds that a fork waits for the threads. After this it goes on: a copy that hangs is killed at its deadline."""


class ForkLock:
    """A lock that no thread holds while the process forks. Nothing else may be waited for under it.

    What runs for every statement takes the plain `lock`, after a look at `FORKING`.
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

    def take(self, seconds: float) -> bool:
        """Take the lock for a fork, if it gets free in time."""
        return self.lock.acquire(timeout=seconds)

    def let_go(self) -> None:
        """Give the lock back after a fork, in the process and in its copy."""
        self.lock.release()


FORKING: Final = threading.Lock()
"""Held while the process forks, or waits to."""

_LOCKS: Final = WeakValueDictionary[int, ForkLock]()
_NUMBERS: Final = itertools.count()


def let_fork_pass() -> None:
    """Wait for a fork that waits: a thread that lets go only to take its lock again would keep it waiting."""
    with FORKING:
        pass


def fork() -> int:
    """Fork at a moment when no thread holds a fork lock; return 0 in the copy, and the copy's number here.

    In the copy all signals are blocked until it has handlers of its own.
    """
    with FORKING, _all_free(), _no_signal(), _unwarned():
        return os.fork()


@contextmanager
def _no_signal() -> Generator[None]:
    """Let other threads take the signals meanwhile. The copy begins with all of them blocked.

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
def _unwarned() -> Generator[None]:
    """Silence the warning that Python gives from 3.12 on: a fork beside threads may hang, and the locks prevent that.

    Filters belong to the whole process, so they are left alone where no warning comes.
    """
    if sys.version_info < (3, 12):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def _all_free() -> Generator[None]:
    deadline = time.monotonic() + LONGEST_WAIT
    held = [lock for _, lock in sorted(_LOCKS.items()) if lock.take(max(0.0, deadline - time.monotonic()))]
    try:
        yield
    finally:
        for lock in held:
            lock.let_go()
