"""Programs in process groups of their own: drained while they run, and killed with all their children.

A thread of its own sees to each program: it reads, waits, kills and reaps, so that no signal can ever reach a process
that has another's number. Cancelling the caller tells that thread to kill.
"""

import asyncio
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, ParamSpec, TypeVar

from halter.core.tools import Failed, Unstoppable
from halter.tools.result import bytes_to_text, joined

P = ParamSpec("P")
T = TypeVar("T")

PROGRAMS: Final = ("/usr/local/bin", "/usr/bin", "/bin")
"""Where commands of agents, and the sandbox around them, are looked for."""

_CHUNK: Final = 1 << 18
_ESCAPED: Final = 16
"""An answer is JSON, where a character may take so many bytes; half of the room must do."""

_GRACE: Final = 5.0
"""Seconds within which a killed program must be gone; only one that the kernel itself holds fast is not."""


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


async def run_group(program: Program) -> Ended:
    """Run a program to its end; cancelled, kill its whole group and wait until it is gone."""
    stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    future = asyncio.get_running_loop().run_in_executor(Threads(), _run, program, stop)
    future.add_done_callback(lambda _: os.close(stop))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.done():
            os.eventfd_write(stop, 1)
        await asyncio.wait([future], timeout=_GRACE)
        if not future.done():
            raise Unstoppable(f"{program.argv[0]} was killed and still has not ended.") from None
        future.exception()
        raise


def _run(program: Program, stop: int) -> Ended:
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
            return _Attendant(process, program, answer).attend(stop)
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
    """Reads, writes and waits for one program, and leaves nothing of it behind."""

    def __init__(self, process: "subprocess.Popen[bytes]", program: Program, answer: int) -> None:
        self._process = process
        self._hold_stdin = program.answers
        self._unwritten = memoryview(program.stdin)
        self._output = _Kept(program.max_output)
        self._answer = _Kept(program.max_output * _ESCAPED)
        self._sinks = {_fd(process.stdout): self._output, answer: self._answer}
        self._sinks.pop(-1, None)
        self._selector = selectors.DefaultSelector()
        self._over = False

    def attend(self, stop: int) -> Ended:
        """Go on until the program itself has ended, whoever else still holds its pipes, or until told to stop."""
        exited = os.pidfd_open(self._process.pid)
        try:
            with self._selector:
                self._watch(exited, stop)
                while not self._over:
                    for key, _ in self._selector.select():
                        key.data(key.fd)
        finally:
            _kill_group(self._process.pid)
            os.close(exited)
            self._process.wait()
        self._read_rest()
        return Ended(self._process.returncode, self._output.text(), bytes(self._answer.head + self._answer.tail))

    def _watch(self, exited: int, stop: int) -> None:
        stdin = _fd(self._process.stdin)
        os.set_blocking(stdin, False)
        self._selector.register(stdin, selectors.EVENT_WRITE, self._write)
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
        """Write what the program reads; one that does not care to read it is no failure."""
        try:
            written = os.write(fd, self._unwritten)
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._unwritten)
        self._unwritten = self._unwritten[written:]
        if not self._unwritten:
            self._selector.unregister(fd)
            if self._process.stdin and not self._hold_stdin:
                self._process.stdin.close()

    def _read_rest(self) -> None:
        """Read what the pipes still hold, but wait for nobody who escaped with one of them."""
        for fd, sink in self._sinks.items():
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while data := os.read(fd, _CHUNK):
                    sink.add(data)


def _kill_group(leader: int) -> None:
    """Kill all of a group whose leader is not reaped yet, so that its number cannot be another's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _fd(pipe: IO[bytes] | None) -> int:
    return pipe.fileno() if pipe else -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
