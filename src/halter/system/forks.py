"""Forks of a threaded process.

A fork copies only the calling thread. A lock that another thread holds at that moment stays locked in the copy forever,
and C libraries such as SQLite have locks that Python code cannot see. So a thread holds a `ForkLock` while it runs in
such a library, and `fork` waits until all of them are free.
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

MAX_FORK_WAIT: Final = 1.0
"""Seconds that a fork waits for the locks. Then it forks anyway: a copy that hangs is killed at its deadline."""


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
