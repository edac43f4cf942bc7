"""Process groups, isolated interpreters and forked functions: drained while they run, killed with all their children.

A thread of its own attends to each process: it reads, waits, kills and reaps, so that no signal can reach a process
with a recycled pid. Cancelling the caller tells that thread to kill. Only text and numbers cross the border.

A forked function has all that the process has at that moment: closures, globals, the program's values. What it changes
stays in the fork; what it returns comes back as text. Shared connections are closed there, its output is kept apart,
and it ends without any clean-up.
"""

import asyncio
import base64
import ctypes
import gc
import inspect
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Final, NoReturn, ParamSpec, TextIO, TypeVar, cast

import msgspec

from halter.core.errors import ConfigError
from halter.core.processes import ForkLock, fork, print_masked_output
from halter.core.text import from_body, to_body
from halter.core.tools import AGENT_VARIABLE, Failed, Output, Unstoppable

MAX_OUTPUT: Final = 10_000_000

_JSON_TYPES: Final = frozenset((dict, list, int, float, bool, type(None)))
"""Of what most results are: to tell these from others takes no look at their classes."""

_WORD: Final = 4096
"""How far from a cut its edge is searched for, so that no recognisable key is cut in two."""


def to_output(result: Any, max_output: int) -> Output:
    """Text stays as it is, bytes become text or base64, anything else JSON."""
    if isinstance(result, str):
        text: str = result
    elif type(result) in _JSON_TYPES:
        text = _json(result)
    elif isinstance(result, Output):
        return Output(truncate_middle(result.text, max_output), result.cost_micros, result.happened)
    elif isinstance(result, (bytes, bytearray)):
        return Output(bytes_to_text(bytes(result), max_output))
    else:
        text = _json(result)
    return Output(text if len(text) <= max_output else truncate_middle(text, max_output))


def bytes_to_text(data: bytes, max_output: int) -> str:
    if b"\0" not in data:
        try:
            return truncate_middle(data.decode(), max_output)
        except UnicodeDecodeError:
            pass
    kept = data[: max_output * 3 // 4]
    left_out = f", the first {len(kept):,} of them" if len(kept) < len(data) else ""
    return f"[{len(data):,} bytes that are not text, in base64{left_out}]\n{base64.b64encode(kept).decode()}"


def truncate_middle(text: str, max_output: int) -> str:
    """Keep the beginning and the end, and say in between how much is missing."""
    if len(text) <= max_output:
        return text
    half = max_output // 2
    return join_ends(text[:half], len(text) - 2 * half, text[len(text) - half :], "characters")


def join_ends(head: str, missing: int, tail: str, unit: str) -> str:
    """Join the two ends of a cut text, both shortened to whole words."""
    first = max(head.rfind(space, max(0, len(head) - _WORD)) for space in " \n") + 1 or len(head)
    last = min((at for space in " \n" if (at := tail.find(space, 0, _WORD)) >= 0), default=0)
    missing += len(head) - first + last
    return f"{head[:first]}\n[{missing:,} {unit} are left out here]\n{tail[last:]}"


@cache
def _load_json_writer() -> Callable[[Any], bytes]:
    """Imported when the first result is written: most programs that list tools write none."""
    from pydantic_core import to_json

    return to_json


def _json(result: Any) -> str:
    try:
        return _load_json_writer()(result).decode()
    except (ValueError, TypeError) as error:
        raise Failed(type(error).__name__, f"the tool returned what cannot be written as JSON: {error}") from error


P = ParamSpec("P")
T = TypeVar("T")

PROGRAM_FOLDERS: Final = ("/usr/local/bin", "/usr/bin", "/bin")
"""Where commands of agents, and the sandbox, are searched for."""

_CHUNK: Final = 1 << 18
_WIDE: Final = 16
"""Bytes of an answer per character of output: a failure has two texts, of up to 4 bytes each."""

_GRACE: Final = 5.0
"""Seconds within which a killed program must be gone; only the kernel can hold it longer."""


class _Groups:
    def __init__(self) -> None:
        self._lock = ForkLock()
        self._leaders = set[int]()
        self.heard_by: Callable[[Collection[int]], None] | None = None

    def add(self, leader: int) -> None:
        with self._lock:
            self._leaders.add(leader)
            self._notify()

    def remove(self, leader: int) -> None:
        """Forget a group before its leader is reaped: the pid may be reused after that."""
        with self._lock:
            self._leaders.discard(leader)
            self._notify()

    def forget(self) -> None:
        with self._lock:
            self._leaders.clear()
            self.heard_by = None

    def _notify(self) -> None:
        if self.heard_by is not None:
            self.heard_by(self._leaders)


_GROUPS: Final = _Groups()


@contextmanager
def observe_groups(hear: Callable[[Collection[int]], None]) -> Generator[None]:
    """Report every change of the running groups, in any thread: a supervisor that ends this process must end them."""
    _GROUPS.heard_by = hear
    try:
        yield
    finally:
        _GROUPS.heard_by = None


def forget_groups() -> None:
    """Start anew in a fork: the parent's groups are not the fork's."""
    _GROUPS.forget()


class ThreadPerTaskExecutor(Executor):
    """Runs each task in a daemon thread of its own.

    A pool would be exhausted by tasks that hang, and would be joined at exit.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        threading.Thread(target=_fulfil_future, args=(future, partial(fn, *args, **kwargs)), daemon=True).start()
        return future


def _fulfil_future(future: "Future[Any]", work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 A future carries every exception to its waiter.
        future.set_exception(error)
    else:
        future.set_result(result)


class ProcessSpec(msgspec.Struct, frozen=True):
    """What to start. `stdin` is written to it.

    With `answers`, the last argument is the number of a pipe to answer on, and standard input ends with the parent.
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    stdin: bytes = b""
    answers: bool = False
    max_output: int = 1_000_000


class ProcessExit(msgspec.Struct, frozen=True):
    """The exit code, negative for a signal, and the output."""

    code: int
    text: str
    answer: bytes = b""


class _HeadAndTail(msgspec.Struct):
    """The beginning and the end of a stream of any length, in bounded memory."""

    limit: int
    head: bytearray = msgspec.field(default_factory=bytearray)
    tail: bytearray = msgspec.field(default_factory=bytearray)
    dropped: int = 0

    def add(self, data: bytes) -> None:
        capacity = self.limit // 2 - len(self.head)
        self.head += data[:capacity]
        self.tail += data[capacity:]
        excess = len(self.tail) - self.limit // 2
        if excess > self.limit // 2 + _CHUNK:
            self._shorten(excess)

    def text(self) -> str:
        self._shorten(len(self.tail) - self.limit // 2)
        if b"\0" in self.head or b"\0" in self.tail:
            return (f"[{self.dropped:,} bytes are left out of the middle]\n" if self.dropped else "") + bytes_to_text(
                bytes(self.head + self.tail), self.limit
            )
        if not self.dropped:
            return (self.head + self.tail).decode(errors="replace")
        return join_ends(self.head.decode(errors="replace"), self.dropped, self.tail.decode(errors="replace"), "bytes")

    def _shorten(self, excess: int) -> None:
        if excess > 0:
            del self.tail[:excess]
            self.dropped += excess


class StartedProcess(msgspec.Struct, frozen=True):
    """A process in a group of its own: its pid, and this end of its pipes, -1 for none.

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


StartProcess = Callable[[], AbstractContextManager[StartedProcess]]
"""Starts a process; leaving the context closes the pipes."""


async def run_group(program: ProcessSpec) -> ProcessExit:
    return await attend_process(partial(_start_program, program), program.argv[0])


async def attend_process(start: StartProcess, name: str) -> ProcessExit:
    """Start a process and attend to it until its end; cancelled, kill its whole group and wait until it is gone."""
    future, stop = _attend_in_thread(start)
    future.add_done_callback(lambda _: os.close(stop))
    try:
        await asyncio.wait([future])
        return future.result()
    except asyncio.CancelledError:
        if not future.done():
            os.eventfd_write(stop, 1)
        await asyncio.wait([future], timeout=_GRACE)
        if not future.done():
            raise Unstoppable(f"{name} was killed and still has not ended.") from None
        future.exception()
        raise


def _attend_in_thread(start: StartProcess) -> tuple["asyncio.Future[ProcessExit]", int]:
    """Start in a thread; a write to the returned descriptor tells it to stop."""
    try:
        stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise Failed(type(error).__name__, f"no process could be made for the call: {error}") from error
    try:
        return asyncio.get_running_loop().run_in_executor(ThreadPerTaskExecutor(), _run, start, stop), stop
    except RuntimeError as error:
        os.close(stop)
        raise Failed(type(error).__name__, f"no process could be made for the call: {error}") from error


def _run(start: StartProcess, stop: int) -> ProcessExit:
    try:
        with start() as started:
            return _Attendant(started).run(stop)
    except OSError as error:
        # There is room for no more files: what was started has been killed.
        raise Failed(type(error).__name__, f"no process could be kept for the call: {error}") from error


@contextmanager
def _start_program(program: ProcessSpec) -> Generator[StartedProcess]:
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
            yield StartedProcess(
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


def _start(program: ProcessSpec, answer_end: int) -> "subprocess.Popen[bytes]":
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
    def __init__(self, started: StartedProcess) -> None:
        self._started = started
        self._unwritten = memoryview(started.stdin)
        self._output = _HeadAndTail(started.max_output)
        self._answer = _HeadAndTail(started.max_output * _WIDE)
        self._sinks = {started.output: self._output, started.answer: self._answer}
        self._sinks.pop(-1, None)
        self._is_over = False

    def run(self, stop: int) -> ProcessExit:
        """Continue until the process itself has ended, even if its pipes are still open, or until told to stop."""
        _GROUPS.add(self._started.pid)
        try:
            # Where SIGCHLD is ignored, an ended process is already reaped.
            with (
                suppress(ProcessLookupError),
                _open_pidfd(self._started.pid) as exited,
                selectors.DefaultSelector() as self._selector,
            ):
                if self._started.input >= 0:
                    os.set_blocking(self._started.input, False)
                    self._selector.register(self._started.input, selectors.EVENT_WRITE, self._write)
                for fd in self._sinks:
                    self._selector.register(fd, selectors.EVENT_READ, self._read)
                for fd in (exited, stop):
                    self._selector.register(fd, selectors.EVENT_READ, self._end)
                while not self._is_over:
                    for key, _ in self._selector.select():
                        key.data(key.fd)
        finally:
            # Not reaped yet, so the pid cannot be reused. A fork that has just started does not lead a group yet.
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(self._started.pid, signal.SIGKILL)
            _GROUPS.remove(self._started.pid)
            code = self._started.reap()
        self._read_rest()
        return ProcessExit(code, self._output.text(), bytes(self._answer.head + self._answer.tail))

    def _end(self, _: int) -> None:
        self._is_over = True

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK)
        self._sinks[fd].add(data)
        if not data:
            self._selector.unregister(fd)

    def _write(self, fd: int) -> None:
        """Write standard input; a process that does not read it is no failure."""
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
        """Read what the pipes still hold, without waiting for escaped children."""
        for fd, sink in self._sinks.items():
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while data := os.read(fd, _CHUNK):
                    sink.add(data)


@contextmanager
def _open_pidfd(pid: int) -> Generator[int]:
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


ANSWER_MORE: Final = 1000
"""Characters of an answer beside the output itself."""


class ToolOutcome(msgspec.Struct, frozen=True):
    """The result of a call: text and perhaps a cost, a failure, or a doubt. Texts are bytes, since any is possible."""

    text: bytes = b""
    cost: int | None = None
    kind: bytes = b""
    message: bytes = b""
    partial: bytes = b""
    doubt: bytes = b""


def perform_call(call: Callable[[], Any], max_output: int) -> bytes:
    """Call a function and record its outcome; only `Failed` and `Unstoppable` are expected."""
    return msgspec.msgpack.encode(_run_call(call, max_output))


def _run_call(call: Callable[[], Any], max_output: int) -> ToolOutcome:
    try:
        output = to_output(call(), max_output)
    except Failed as failed:
        kind, _, message = str(failed).partition(": ")
        text, partial = truncate_middle(message, max_output), truncate_middle(failed.partial, max_output)
        return ToolOutcome(kind=to_body(kind), message=to_body(text), partial=to_body(partial))
    except Unstoppable as doubt:
        return ToolOutcome(doubt=to_body(str(doubt)))
    if output.happened:
        return ToolOutcome(kind=b"NotCarried", message=b"events can be written down by an async tool only.")
    return ToolOutcome(to_body(output.text), output.cost_micros)


def read_answer(ended: ProcessExit) -> Output:
    """Decode a process's answer. Its output is kept where it failed."""
    try:
        done = msgspec.msgpack.decode(ended.answer, type=ToolOutcome)
    except msgspec.DecodeError:
        raise Failed(
            "Crashed", f"the tool's process ended without an answer: {_explain_exit(ended.code)}", ended.text
        ) from None
    if done.doubt:
        raise Unstoppable(from_body(done.doubt))
    if done.kind:
        raise Failed(from_body(done.kind), from_body(done.message), ended.text + from_body(done.partial))
    return Output(from_body(done.text), done.cost)


def _explain_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}." if code < 0 else f"exit code {code}."


_PROGRAM: Final = "halter.tools.isolated_program"


class IsolatedJob(msgspec.Struct, frozen=True):
    module: str
    name: str
    file: str
    path: list[str]
    arguments: str
    key: str
    max_output: int


def check_findable(tool: str, function: Callable[..., Any]) -> None:
    """Refuse a function that another process could not import."""
    if "<" in function.__qualname__ or inspect.getsourcefile(function) is None:
        raise ConfigError(
            f"The tool {tool} is to run isolated, but {function.__qualname__} stands inside another function: "
            "write it at the top of a module, so that another process can import it."
        )


async def run_isolated(function: Callable[..., Any], arguments: bytes, key: str, max_output: int) -> Output:
    file = inspect.getsourcefile(function) or ""
    job = IsolatedJob(function.__module__, function.__qualname__, file, sys.path, arguments.decode(), key, max_output)
    # Compiled code beside an agent's own would be untrusted code.
    argv = [sys.executable, "-P", "-B", "-m", _PROGRAM]
    stdin = msgspec.json.encode(job) + b"\n"
    environment = {**os.environ, AGENT_VARIABLE: "tool"}
    program = ProcessSpec(argv, Path.cwd(), environment, stdin, answers=True, max_output=max_output + ANSWER_MORE)
    return read_answer(await run_group(program))


_PRCTL: Final = ctypes.CDLL(None).prctl
_SIGNALS: Final = tuple(map(int, signal.valid_signals()))
_SET_PARENT_DEATH_SIGNAL: Final = 1


async def run_forked(call: Callable[[], Any], name: str, max_output: int) -> Output:
    ended = await attend_process(partial(_start_fork, call, max_output), name)
    print_masked_output(ended.text)
    return read_answer(ended)


@contextmanager
def _start_fork(call: Callable[[], Any], max_output: int) -> Generator[StartedProcess]:
    """Fork in the attending thread: the kernel ends the fork when that thread is gone."""
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        pid = _fork_child(call, max_output, output=pipes[1], answer=pipes[3])
    except OSError as error:
        _close_all(pipes)
        raise Failed(type(error).__name__, f"no process could be made for the call: {error}") from error
    _close_all((pipes[1], pipes[3]))
    try:
        yield StartedProcess(pid, pipes[0], pipes[2], partial(_reap, pid), max_output + ANSWER_MORE)
    finally:
        _close_all((pipes[0], pipes[2]))


def _fork_child(call: Callable[[], Any], max_output: int, *, output: int, answer: int) -> int:
    parent, handled = os.getpid(), [number for number in _SIGNALS if callable(signal.getsignal(number))]
    pid = fork()
    if pid == 0:
        _run_as_child(partial(perform_call, call, max_output), parent, handled, output, answer)
    return pid


def _close_all(pipes: Iterable[int]) -> None:
    for fd in pipes:
        os.close(fd)


def _reap(pid: int) -> int:
    """Wait for a fork. A program that ignores SIGCHLD, or waits for any child, may have taken its exit code."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _run_as_child(work: Callable[[], bytes], parent: int, handled: list[int], output: int, answer: int) -> NoReturn:
    """Do the work and exit, always: this must never return into the code of the process."""
    code = 1
    try:
        _isolate_child(parent, handled)
        kept = {answer, *_redirect(output)}
        # Two processes that use one connection corrupt it for both. Closing alone is not enough: the next opened file
        # would get the descriptor and the connection's writes.
        dead, other = socket.socketpair()
        other.close()
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 A path for each of them takes ten times as long.
            if fd not in kept and fd != dead.fileno() and _has_another_end(fd):
                os.dup2(dead.fileno(), fd, inheritable=False)
        done = memoryview(work())
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        while done:
            done = done[os.write(answer, done) :]
        code = 0
    except BaseException:  # noqa: BLE001 There is no caller above, and the error must be reported.
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _isolate_child(parent: int, handled: list[int]) -> None:
    """Lead a process group that ends with its parent, with default signal handlers."""
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
    os.environ[AGENT_VARIABLE] = "tool"


def _has_another_end(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False  # The list of the files was one of them.
    if stat.S_ISCHR(mode):
        return os.isatty(fd)
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode))


def _redirect(output: int) -> set[int]:
    """Read nothing, and print into the pipe, past the process's buffers; returns the new streams.

    A logger may have kept the old streams, so their descriptors are replaced, too.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    places = {1, 2, *_numbers(sys.stdout, sys.stderr)}
    for place in places:
        os.dup2(output, place)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 It is open until the end.
    sys.stdout = sys.__stdout__ = _open_printer(1)
    sys.stderr = sys.__stderr__ = _open_printer(2)
    return {output, *places}


def _numbers(*streams: TextIO | None) -> Iterator[int]:
    for stream in streams:
        # A stream may be none, closed, or no file at all.
        with suppress(AttributeError, OSError, ValueError):
            yield cast("TextIO", stream).fileno()


def _open_printer(fd: int) -> Any:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
