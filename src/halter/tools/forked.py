"""A plain function in a copy of this process, which can be killed.

The copy has all that the process has at that moment: closures, globals, what the program gave to its tools. What the
function changes stays in the copy; what it returns comes back as text. Nothing of the copy reaches what it shares with
the process: connections are closed there, what it prints is kept apart, and it ends without any clean-up.
"""

import ctypes
import gc
import os
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NoReturn, TextIO, cast

from halter.core.forks import fork
from halter.core.prints import show_printed
from halter.core.tools import STARTED_BY_AGENT, Failed, Output
from halter.tools.done import ANSWER_MORE, perform, read_answer
from halter.tools.group import Started, attend, forget_groups

_PRCTL: Final = ctypes.CDLL(None).prctl
_SET_PARENT_DEATH_SIGNAL: Final = 1


async def run_forked(call: Callable[[], Any], name: str, max_output: int) -> Output:
    """Call a function in a copy of this process; its group is killed at the end, or when this is cancelled."""
    ended = await attend(partial(_started, call, max_output), name)
    show_printed(ended.text)
    return read_answer(ended)


@contextmanager
def _started(call: Callable[[], Any], max_output: int) -> Generator[Started]:
    """Fork in the thread that attends to the copy: the kernel ends the copy when that thread is gone."""
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        pid = _forked(call, max_output, output=pipes[1], answer=pipes[3])
    except OSError as error:
        _close_all(pipes)
        raise Failed(type(error).__name__, f"no process could be made for the call: {error}") from error
    _close_all((pipes[1], pipes[3]))
    try:
        yield Started(pid, pipes[0], pipes[2], partial(_reap, pid), max_output + ANSWER_MORE)
    finally:
        _close_all((pipes[0], pipes[2]))


def _forked(call: Callable[[], Any], max_output: int, *, output: int, answer: int) -> int:
    parent, handled = os.getpid(), _handled_signals()
    pid = fork()
    if pid == 0:
        _be_the_copy(partial(perform, call, max_output), parent, handled, output, answer)
    return pid


def _close_all(pipes: Iterable[int]) -> None:
    for fd in pipes:
        os.close(fd)


def _reap(pid: int) -> int:
    """Wait for the end of a copy. A program that ignores SIGCHLD, or waits for any child, may have taken its code."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _handled_signals() -> list[int]:
    """List the signals that the process handles in Python; the copy has more to do for each page that it touches."""
    return [int(number) for number in signal.valid_signals() if callable(signal.getsignal(number))]


def _be_the_copy(work: Callable[[], bytes], parent: int, handled: list[int], output: int, answer: int) -> NoReturn:
    """Do the work and end, whatever happens: this must never return into the code of the process."""
    code = 1
    try:
        _set_apart(parent, handled)
        _let_go_of_connections({answer, *_redirect(output)})
        done = memoryview(work())
        _flush()
        while done:
            done = done[os.write(answer, done) :]
        code = 0
    except BaseException:  # noqa: BLE001 Nobody is above this, and what it was must be told.
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _flush() -> None:
    """Print what is buffered. The function may have closed the streams, or put something else in their place."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _set_apart(parent: int, handled: list[int]) -> None:
    """Be a group of its own that ends with its parent, with no signal handled as the process handles it."""
    os.setsid()
    _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # What the process left for the collector, a connection perhaps, is not the copy's to finish.
    gc.freeze()
    forget_groups()
    os.environ[STARTED_BY_AGENT] = "tool"


def _let_go_of_connections(kept: set[int]) -> None:
    """Put a closed connection in the place of everything that has another end.

    Two processes that speak over one connection destroy it for both. Only to close it would not do: the next file that
    is opened would get its number, and be written to by whoever had the connection.
    """
    dead, other = socket.socketpair()
    other.close()
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 A path for each of them takes ten times as long.
        if fd not in kept and fd != dead.fileno() and _has_another_end(fd):
            os.dup2(dead.fileno(), fd, inheritable=False)


def _has_another_end(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False  # The list of the files was one of them.
    if stat.S_ISCHR(mode):
        return os.isatty(fd)
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode))


def _redirect(output: int) -> set[int]:
    """Read nothing, and print into the pipe, past whatever the process has buffered; return what leads there.

    A logger may have kept the streams of the process, so what stands behind those is exchanged too.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    places = {1, 2, *_numbers(sys.stdout, sys.stderr)}
    for place in places:
        os.dup2(output, place)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 It is open until the end.
    sys.stdout = sys.__stdout__ = _printing(1)
    sys.stderr = sys.__stderr__ = _printing(2)
    return {output, *places}


def _numbers(*streams: TextIO | None) -> Iterator[int]:
    for stream in streams:
        # A stream may be none, closed, or no file at all.
        with suppress(AttributeError, OSError, ValueError):
            yield cast("TextIO", stream).fileno()


def _printing(fd: int) -> Any:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
