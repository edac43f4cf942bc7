"""Processes in groups of their own: drained while they run, and killed with all their children.

A thread of its own sees to each process: it reads, waits, kills and reaps, so that no signal can ever reach a process
that has another's number. Cancelling the caller tells that thread to kill.
"""

import asyncio
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, ParamSpec, TypeVar

from halter.core.forks import ForkLock
from halter.core.tools import Failed, Unstoppable
from halter.tools.result import bytes_to_text, joined

P = ParamSpec("P")
T = TypeVar("T")

PROGRAMS: Final = ("/usr/local/bin", "/usr/bin", "/bin")
"""Where commands of agents, and the sandbox around them, are looked for."""

_CHUNK: Final = 1 << 18
_WIDE: Final = 16
"""So many bytes an answer may have for each character of output: a failure has two texts, of up to 4 bytes each."""

_GRACE: Final = 5.0
"""Seconds within which a killed program must be gone; only one that the kernel itself holds fast is not."""


class _Groups:
    """The groups that run in the name of this process, by their leaders."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._leaders = set[int]()
        self.heard_by: Callable[[Collection[int]], None] | None = None

    def add(self, leader: int) -> None:
        with self._lock:
            self._leaders.add(leader)
            self._tell()

    def remove(self, leader: int) -> None:
        """Forget a group before its leader is reaped, since the number may be another's after that."""
        with self._lock:
            self._leaders.discard(leader)
            self._tell()

    def forget(self) -> None:
        with self._lock:
            self._leaders.clear()
            self.heard_by = None

    def _tell(self) -> None:
        if self.heard_by is not None:
            self.heard_by(self._leaders)


_GROUPS: Final = _Groups()


@contextmanager
def groups_heard_by(hear: Callable[[Collection[int]], None]) -> Generator[None]:
    """Tell of every change which groups run, in any thread: whoever ends this process must end them, too."""
    _GROUPS.heard_by = hear
    try:
        yield
    finally:
        _GROUPS.heard_by = None


def forget_groups() -> None:
    """Begin anew in a copy of the process: what the process has started is not the copy's."""
    _GROUPS.forget()


class Threads(Executor):
    """Runs each piece of work in a thread of its own, which does not keep the program from ending.

    A pool would be used up by work that hangs, and would be waited for at the end.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        threading.Thread(target=_fulfil, args=(future, partial(fn, *args, **kwargs)), daemon=True).start()
        return future


def _fulfil(future: "Future[Any]", work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 A future carries whatever was raised to the one who waits.
        future.set_exception(error)
    else:
        future.set_result(result)


@dataclass(frozen=True)
class Program:
    """What to start. `stdin` is written to it.

    With `answers`, the last argument is the number of a pipe to answer on, and standard input ends with the starter.
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    stdin: bytes = b""
    answers: bool = False
    max_output: int = 1_000_000


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, negative for a signal, and what it put out."""

    code: int
    text: str
    answer: bytes = b""


@dataclass
class _Kept:
    """The beginning and the end of a stream of any length, in bounded memory."""

    limit: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, data: bytes) -> None:
        room = self.limit // 2 - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        excess = len(self.tail) - self.limit // 2
        if excess > self.limit // 2 + _CHUNK:
            self._shorten(excess)

    def text(self) -> str:
        self._shorten(len(self.tail) - self.limit // 2)
        if b"\0" in self.head or b"\0" in self.tail:
            return self._marker() + bytes_to_text(bytes(self.head + self.tail), self.limit)
        if not self.dropped:
            return (self.head + self.tail).decode(errors="replace")
        return joined(self.head.decode(errors="replace"), self.dropped, self.tail.decode(errors="replace"), "bytes")

    def _shorten(self, excess: int) -> None:
        if excess > 0:
            del self.tail[:excess]
            self.dropped += excess

    def _marker(self) -> str:
        return f"[{self.dropped:,} bytes are left out of the middle]\n" if self.dropped else ""


@dataclass(frozen=True)
class Started:
    """A process that runs in a group of its own: its number, and this end of its pipes, -1 for none.

    `stdin` is written to it; then its input is closed, unless it is held until the end. `reap` waits for its end and
    returns its exit code.
    """

    pid: int
    output: int
    answer: int
    reap: Callable[[], int]
    max_output: int
    input: int = -1
    stdin: bytes = b""
    close_input: Callable[[], None] | None = None


Start = Callable[[], AbstractContextManager[Started]]
"""Starts a process; leaving the context closes the pipes."""


async def run_group(program: Program) -> Ended:
    """Run a program to its end; cancelled, kill its whole group and wait until it is gone."""
    return await attend(partial(_started, program), program.argv[0])


async def attend(start: Start, name: str) -> Ended:
    """Start a process and see it to its end; cancelled, kill its whole group and wait until it is gone."""
    future, stop = _attended(start)
    future.add_done_callback(lambda _: os.close(stop))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.done():
            os.eventfd_write(stop, 1)
        await asyncio.wait([future], timeout=_GRACE)
        if not future.done():
            raise Unstoppable(f"{name} was killed and still has not ended.") from None
        future.exception()
        raise


def _attended(start: Start) -> tuple["asyncio.Future[Ended]", int]:
    """Begin in a thread; what is written to the returned number tells it to stop."""
    try:
        stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise Failed(type(error).__name__, f"no process could be made for the call: {error}") from error
    try:
        return asyncio.get_running_loop().run_in_executor(Threads(), _run, start, stop), stop
    except RuntimeError as error:
        os.close(stop)
        raise Failed(type(error).__name__, f"no process could be made for the call: {error}") from error


def _run(start: Start, stop: int) -> Ended:
    try:
        with start() as started:
            return _Attendant(started).attend(stop)
    except OSError as error:
        # There is room for no more files: what was started has been killed.
        raise Failed(type(error).__name__, f"no process could be kept for the call: {error}") from error


@contextmanager
def _started(program: Program) -> Generator[Started]:
    answer, answer_end = os.pipe() if program.answers else (-1, -1)
    try:
        process = _start(program, answer_end)
    except (OSError, ValueError) as error:
        _close(answer)
        raise Failed(type(error).__name__, f"{program.argv[0]} could not be started: {error}") from error
    finally:
        _close(answer_end)
    try:
        with process:
            yield Started(
                pid=process.pid,
                output=_fd(process.stdout),
                answer=answer,
                reap=process.wait,
                max_output=program.max_output,
                input=_fd(process.stdin),
                stdin=program.stdin,
                close_input=None if program.answers or process.stdin is None else process.stdin.close,
            )
    finally:
        _close(answer)


def _start(program: Program, answer_end: int) -> "subprocess.Popen[bytes]":
    answering = (answer_end,) if program.answers else ()
    return subprocess.Popen(
        [*program.argv, *map(str, answering)],
        cwd=program.cwd,
        env=program.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=answering,
        start_new_session=True,
    )


class _Attendant:
    """Reads, writes and waits for one process, and leaves nothing of it behind."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._unwritten = memoryview(started.stdin)
        self._output = _Kept(started.max_output)
        self._answer = _Kept(started.max_output * _WIDE)
        self._sinks = {started.output: self._output, started.answer: self._answer}
        self._sinks.pop(-1, None)
        self._over = False

    def attend(self, stop: int) -> Ended:
        """Go on until the process itself has ended, whoever else still holds its pipes, or until told to stop."""
        _GROUPS.add(self._started.pid)
        try:
            self._wait_for_end(stop)
        finally:
            _kill_group(self._started.pid)
            _GROUPS.remove(self._started.pid)
            code = self._started.reap()
        self._read_rest()
        return Ended(code, self._output.text(), bytes(self._answer.head + self._answer.tail))

    def _wait_for_end(self, stop: int) -> None:
        """Wait. Where SIGCHLD is ignored, a process that has ended is already forgotten, and there is no waiting."""
        with (
            suppress(ProcessLookupError),
            _opened_process(self._started.pid) as exited,
            selectors.DefaultSelector() as self._selector,
        ):
            self._watch(exited, stop)
            while not self._over:
                for key, _ in self._selector.select():
                    key.data(key.fd)

    def _watch(self, exited: int, stop: int) -> None:
        if self._started.input >= 0:
            os.set_blocking(self._started.input, False)
            self._selector.register(self._started.input, selectors.EVENT_WRITE, self._write)
        for fd in self._sinks:
            self._selector.register(fd, selectors.EVENT_READ, self._read)
        for fd in (exited, stop):
            self._selector.register(fd, selectors.EVENT_READ, self._end)

    def _end(self, _: int) -> None:
        self._over = True

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK)
        self._sinks[fd].add(data)
        if not data:
            self._selector.unregister(fd)

    def _write(self, fd: int) -> None:
        """Write what the process reads; one that does not care to read it is no failure."""
        try:
            written = os.write(fd, self._unwritten)
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._unwritten)
        self._unwritten = self._unwritten[written:]
        if not self._unwritten:
            self._selector.unregister(fd)
            if self._started.close_input is not None:
                self._started.close_input()

    def _read_rest(self) -> None:
        """Read what the pipes still hold, but wait for nobody who escaped with one of them."""
        for fd, sink in self._sinks.items():
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while data := os.read(fd, _CHUNK):
                    sink.add(data)


def _kill_group(leader: int) -> None:
    """Kill all of a group whose leader is not reaped yet, so that its number cannot be another's.

    A copy that has just been forked does not lead a group yet, and is killed by itself.
    """
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


@contextmanager
def _opened_process(pid: int) -> Generator[int]:
    exited = os.pidfd_open(pid)
    try:
        yield exited
    finally:
        os.close(exited)


def _fd(pipe: IO[bytes] | None) -> int:
    return pipe.fileno() if pipe else -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
