"""Process groups, isolated interpreters and forked functions: drained while they run, killed with all their children.

Each process has its own thread, which reads, waits, kills and reaps, so that no signal can reach a process with a
recycled pid. Cancelling the caller makes that thread kill the process. Only text, numbers and files pass between
processes.

A forked function has all that the process has at that moment: closures, globals, the program's values. Its changes
stay in the fork; its result is returned as text. Shared connections are closed in the fork, its output is captured
separately, and it exits without clean-up.
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
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from mimetypes import guess_extension
from pathlib import Path
from typing import IO, Any, Final, NoReturn, TextIO, cast

import msgspec

from halter.core.errors import ConfigError
from halter.core.text import decode_body, encode_body
from halter.core.threads import ThreadPerTaskExecutor
from halter.core.tools import AGENT_VARIABLE, Failed, File, Output, Unstoppable
from halter.system.forks import ForkLock, fork
from halter.system.prints import print_masked_output
from halter.tools.trusted_code import TrustedFiles

MAX_OUTPUT: Final = 10_000_000

_SCALAR_TYPES: Final = frozenset((str, int, float, bool, type(None)))
"""The types of values that are no files and have none."""

_MAX_WORD_LENGTH: Final = 4096
"""Distance in which a word boundary is searched for, so that no recognisable key is cut in two."""


def to_output(result: Any, max_output: int) -> Output:
    """Convert a result: text is unchanged, files stay files, bytes become a file, text or base64, other values JSON."""
    if isinstance(result, str):
        text: str = result
    elif isinstance(result, Output):
        text = truncate_middle(result.text, max_output)
        return Output(text, result.cost_micros, result.happened, result.files)
    elif type(result) in _SCALAR_TYPES:
        text = _json(result)
    else:
        files: list[File] = []
        rest = _split_files(result, "", files)
        if files:
            return _join_files(rest, files, max_output)
        text = bytes_to_text(bytes(result), max_output) if isinstance(result, bytes | bytearray) else _json(result)
    return Output(text if len(text) <= max_output else truncate_middle(text, max_output))


_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
)


def detect_media_type(data: bytes) -> str:
    """Detect a picture or a PDF by its first bytes; empty for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((media_type for signature, media_type in _SIGNATURES if data.startswith(signature)), "")


_MAX_FILE_DEPTH: Final = 4
"""Levels of lists and mappings in which files are searched for."""


def _split_files(value: Any, name: str, files: list[File], depth: int = 0) -> Any:
    """Replace each file in a result by its name, and collect it. Returns the same object if there are none."""
    count = len(files)
    rest: Any = value
    unchanged: Any = value
    if type(value) in _SCALAR_TYPES or depth > _MAX_FILE_DEPTH:
        return value
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)
        rest = {key: _split_files(each, str(key), files, depth + 1) for key, each in members.items()}
    elif isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        rest = [_split_files(each, f"file {index}", files, depth + 1) for index, each in enumerate(items, 1)]
    elif hasattr(value, "return_value") and isinstance(getattr(value, "content", None), Sequence):
        # What Pydantic AI calls a tool return: a value, and what the model sees beside it.
        return _split_files([value.return_value, *value.content], name, files, depth)
    elif (file := _read_file(value, name or "file 1")) is not None:
        files.append(file)
        return file.name
    return rest if len(files) > count else unchanged


def _read_file(value: Any, name: str) -> File | None:
    """Read a value as a file: Halter's own, a framework's binary content, what a notebook shows as a picture, bytes."""
    if isinstance(value, File):
        return value
    media_type = getattr(value, "media_type", "")
    data = getattr(value, "data", None) if media_type else value
    if callable(display := getattr(value, "_repr_png_", None)):
        try:
            data = display()
        except Exception as error:
            raise Failed(type(error).__name__, f"the tool returned a picture that cannot be shown: {error}") from error
    if not isinstance(data, bytes | bytearray):
        return None
    kind = media_type if media_type and isinstance(media_type, str) else detect_media_type(bytes(data[:16]))
    return File(bytes(data), kind, f"{name}{guess_extension(kind) or ''}") if kind else None


def _join_files(rest: Any, files: Sequence[File], max_output: int) -> Output:
    """Make an output of files and the rest of a result, in which their names stand. The output lists them after it."""
    names = {file.name for file in files}
    lines = cast("list[Any]", rest) if isinstance(rest, list) else [rest]
    if all(isinstance(line, str) for line in lines):
        text = "\n".join(line for line in lines if line not in names)
    else:
        text = _json(rest)
    return Output(truncate_middle(text, max_output), files=tuple(files))


def bytes_to_text(data: bytes, max_output: int) -> str:
    if b"\0" not in data:
        try:
            return truncate_middle(data.decode(), max_output)
        except UnicodeDecodeError:
            pass
    encoded_bytes = data[: max_output * 3 // 4]
    note = f", the first {len(encoded_bytes):,} of them" if len(encoded_bytes) < len(data) else ""
    return f"[{len(data):,} bytes that are not text, in base64{note}]\n{base64.b64encode(encoded_bytes).decode()}"


def truncate_middle(text: str, max_output: int) -> str:
    """Keep the start and the end of a text; note the number of missing characters in between."""
    if len(text) <= max_output:
        return text
    half = max_output // 2
    return join_ends(text[:half], len(text) - 2 * half, text[len(text) - half :], "characters")


def join_ends(head: str, missing: int, tail: str, unit: str) -> str:
    """Join the two ends of a cut text, each shortened to whole words."""
    head_end = max(head.rfind(space, max(0, len(head) - _MAX_WORD_LENGTH)) for space in " \n") + 1 or len(head)
    tail_start = min((index for space in " \n" if (index := tail.find(space, 0, _MAX_WORD_LENGTH)) >= 0), default=0)
    missing += len(head) - head_end + tail_start
    return f"{head[:head_end]}\n[{missing:,} {unit} omitted]\n{tail[tail_start:]}"


@cache
def _load_json_writer() -> Callable[[Any], bytes]:
    """Import the JSON writer at the first result: most programs that list tools write none."""
    from pydantic_core import to_json

    return to_json


def _json(result: Any) -> str:
    try:
        return _load_json_writer()(result).decode()
    except (ValueError, TypeError) as error:
        raise Failed(
            type(error).__name__, f"the tool returned a value that cannot be encoded as JSON: {error}"
        ) from error


PROGRAM_FOLDERS: Final = ("/usr/local/bin", "/usr/bin", "/bin")
"""The folders in which the sandbox, and commands of agents, are searched for."""

_CHUNK_SIZE: Final = 1 << 18
MAX_FILES_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of the files of an answer."""
_BYTES_PER_CHARACTER: Final = 16
"""Maximum bytes of an answer per character of output: a failure has two texts, with up to 4 bytes per character."""

_KILL_TIMEOUT: Final = 5.0
"""Seconds within which a killed program must exit; only the kernel can delay it."""


class _Groups:
    def __init__(self) -> None:
        self._lock = ForkLock()
        self._leaders = set[int]()
        self.on_change: Callable[[Collection[int]], None] | None = None

    def add(self, leader: int) -> None:
        with self._lock:
            self._leaders.add(leader)
            self._notify()

    def remove(self, leader: int) -> None:
        """Remove a group before its leader is reaped, since the pid may be reused after that."""
        with self._lock:
            self._leaders.discard(leader)
            self._notify()

    def forget(self) -> None:
        with self._lock:
            self._leaders.clear()
            self.on_change = None

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change(self._leaders)


_GROUPS: Final = _Groups()


@contextmanager
def observe_groups(on_change: Callable[[Collection[int]], None]) -> Generator[None]:
    """Report each change of the running groups, in any thread: a supervisor that kills this process must kill them."""
    _GROUPS.on_change = on_change
    try:
        yield
    finally:
        _GROUPS.on_change = None


def forget_groups() -> None:
    """Clear the groups in a fork: those of the parent do not belong to it."""
    _GROUPS.forget()


class ProcessSpec(msgspec.Struct, frozen=True):
    """A program to start. `stdin` is written to its standard input.

    With `has_answer_pipe`, its last argument is the number of a pipe to answer on, and its standard input stays open
    until the parent exits.
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    stdin: bytes = b""
    has_answer_pipe: bool = False
    max_output: int = 1_000_000


class ProcessExit(msgspec.Struct, frozen=True):
    """The exit code of a process (negative for a signal), its output and its answer."""

    code: int
    text: str
    answer: bytes = b""


class _HeadAndTail(msgspec.Struct):
    """The start and the end of a stream of any length, in bounded memory."""

    limit: int
    head: bytearray = msgspec.field(default_factory=bytearray)
    tail: bytearray = msgspec.field(default_factory=bytearray)
    dropped: int = 0

    def add(self, data: bytes) -> None:
        capacity = self.limit // 2 - len(self.head)
        self.head += data[:capacity]
        self.tail += data[capacity:]
        excess = len(self.tail) - self.limit // 2
        if excess > self.limit // 2 + _CHUNK_SIZE:
            self._shorten(excess)

    def text(self) -> str:
        self._shorten(len(self.tail) - self.limit // 2)
        if b"\0" in self.head or b"\0" in self.tail:
            return (f"[{self.dropped:,} bytes omitted in the middle]\n" if self.dropped else "") + bytes_to_text(
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
    """A process in its own group: its pid, and this end of its pipes, -1 for none.

    `stdin` is written to its input, which `close_input` then closes; without `close_input` it stays open. `reap` waits
    for the exit and returns the exit code.
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
"""Starts a process; exiting the context closes the pipes."""


async def run_group(program: ProcessSpec) -> ProcessExit:
    return await attend_process(partial(_start_program, program), program.argv[0])


async def attend_process(start: StartProcess, name: str) -> ProcessExit:
    """Run a process until it exits. On cancellation, kill its whole group and wait until it has exited."""
    future, stop = _attend_in_thread(start)
    future.add_done_callback(lambda _: os.close(stop))
    try:
        await asyncio.wait([future])
        return future.result()
    except asyncio.CancelledError:
        if not future.done():
            os.eventfd_write(stop, 1)
        await asyncio.wait([future], timeout=_KILL_TIMEOUT)
        if not future.done():
            raise Unstoppable(f"{name} was killed and has not exited.") from None
        future.exception()
        raise


def _attend_in_thread(start: StartProcess) -> tuple["asyncio.Future[ProcessExit]", int]:
    """Run a process in a thread. A write to the returned descriptor stops it."""
    try:
        stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise Failed(type(error).__name__, f"cannot create a process for the call: {error}") from error
    try:
        return asyncio.get_running_loop().run_in_executor(ThreadPerTaskExecutor(), _run, start, stop), stop
    except RuntimeError as error:
        os.close(stop)
        raise Failed(type(error).__name__, f"cannot create a process for the call: {error}") from error


def _run(start: StartProcess, stop: int) -> ProcessExit:
    try:
        with start() as process:
            return _Attendant(process).run(stop)
    except OSError as error:
        # No more files can be opened; the started process has been killed.
        raise Failed(type(error).__name__, f"cannot watch the process of the call: {error}") from error


@contextmanager
def _start_program(program: ProcessSpec) -> Generator[StartedProcess]:
    answer, answer_end = os.pipe() if program.has_answer_pipe else (-1, -1)
    try:
        process = _start(program, answer_end)
    except (OSError, ValueError) as error:
        _close(answer)
        raise Failed(type(error).__name__, f"Cannot start {program.argv[0]}: {error}") from error
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
                close_input=None if program.has_answer_pipe or process.stdin is None else process.stdin.close,
            )
    finally:
        _close(answer)


def _start(program: ProcessSpec, answer_end: int) -> "subprocess.Popen[bytes]":
    answering = (answer_end,) if program.has_answer_pipe else ()
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
    def __init__(self, process: StartedProcess) -> None:
        self._process = process
        self._unwritten = memoryview(process.stdin)
        self._output = _HeadAndTail(process.max_output)
        self._answer = _HeadAndTail(process.max_output * _BYTES_PER_CHARACTER + MAX_FILES_BYTES)
        self._sinks = {process.output: self._output, process.answer: self._answer}
        self._sinks.pop(-1, None)
        self._has_ended = False

    def run(self, stop: int) -> ProcessExit:
        """Run until the process has exited, even if its pipes are still open, or until `stop` is written to."""
        _GROUPS.add(self._process.pid)
        try:
            # If SIGCHLD is ignored, an exited process is already reaped.
            with (
                suppress(ProcessLookupError),
                _open_pidfd(self._process.pid) as pidfd,
                selectors.DefaultSelector() as self._selector,
            ):
                if self._process.input >= 0:
                    os.set_blocking(self._process.input, False)
                    self._selector.register(self._process.input, selectors.EVENT_WRITE, self._write)
                for fd in self._sinks:
                    self._selector.register(fd, selectors.EVENT_READ, self._read)
                for fd in (pidfd, stop):
                    self._selector.register(fd, selectors.EVENT_READ, self._end)
                while not self._has_ended:
                    for key, _ in self._selector.select():
                        key.data(key.fd)
        finally:
            # The process is not reaped, so its pid cannot be reused. A new fork may not lead a group yet.
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(self._process.pid, signal.SIGKILL)
            _GROUPS.remove(self._process.pid)
            code = self._process.reap()
        self._read_rest()
        return ProcessExit(code, self._output.text(), bytes(self._answer.head + self._answer.tail))

    def _end(self, _: int) -> None:
        self._has_ended = True

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK_SIZE)
        self._sinks[fd].add(data)
        if not data:
            self._selector.unregister(fd)

    def _write(self, fd: int) -> None:
        """Write standard input. A process that does not read it is not a failure."""
        try:
            written_count = os.write(fd, self._unwritten)
        except BlockingIOError:
            return
        except BrokenPipeError:
            written_count = len(self._unwritten)
        self._unwritten = self._unwritten[written_count:]
        if not self._unwritten:
            self._selector.unregister(fd)
            if self._process.close_input is not None:
                self._process.close_input()

    def _read_rest(self) -> None:
        """Read what is left in the pipes, without waiting for escaped children."""
        for fd, sink in self._sinks.items():
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while data := os.read(fd, _CHUNK_SIZE):
                    sink.add(data)


@contextmanager
def _open_pidfd(pid: int) -> Generator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _fd(pipe: IO[bytes] | None) -> int:
    return pipe.fileno() if pipe else -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


EXTRA_ANSWER: Final = 1000
"""Maximum characters of an answer in addition to the output."""


class ToolOutcome(msgspec.Struct, frozen=True):
    """The outcome of a call: text with an optional cost and files, a failure, or a doubt. Bytes represent any text."""

    text: bytes = b""
    cost: int | None = None
    kind: bytes = b""
    message: bytes = b""
    partial: bytes = b""
    doubt: bytes = b""
    files: tuple[File, ...] = ()


def perform_call(function: Callable[[], Any], max_output: int) -> bytes:
    """Call a function and encode its outcome; only `Failed` and `Unstoppable` are expected."""
    return msgspec.msgpack.encode(_run_call(function, max_output))


def _run_call(call: Callable[[], Any], max_output: int) -> ToolOutcome:
    try:
        output = to_output(call(), max_output)
    except Failed as failed:
        kind, _, message = str(failed).partition(": ")
        text, partial = truncate_middle(message, max_output), truncate_middle(failed.partial, max_output)
        return ToolOutcome(kind=encode_body(kind), message=encode_body(text), partial=encode_body(partial))
    except Unstoppable as doubt:
        return ToolOutcome(doubt=encode_body(str(doubt)))
    if output.happened:
        return ToolOutcome(kind=b"NotCarried", message=b"only an async tool can record events.")
    return ToolOutcome(encode_body(output.text), output.cost_micros, files=output.files)


def read_answer(process_exit: ProcessExit) -> Output:
    """Decode a process's answer. A failure includes the process's output."""
    try:
        outcome = msgspec.msgpack.decode(process_exit.answer, type=ToolOutcome)
    except msgspec.DecodeError:
        raise Failed(
            "Crashed",
            f"the tool's process exited without an answer: {_explain_exit(process_exit.code)}",
            process_exit.text,
        ) from None
    if outcome.doubt:
        raise Unstoppable(decode_body(outcome.doubt))
    if outcome.kind:
        raise Failed(
            decode_body(outcome.kind), decode_body(outcome.message), process_exit.text + decode_body(outcome.partial)
        )
    return Output(decode_body(outcome.text), outcome.cost, files=outcome.files)


def _explain_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}." if code < 0 else f"exit code {code}."


_PROGRAM_MODULE: Final = "halter.tools.isolated_program"


class IsolatedJob(msgspec.Struct, frozen=True):
    module: str
    name: str
    file: str
    path: list[str]
    arguments: str
    key: str
    max_output: int
    files: TrustedFiles | None = None


def check_findable(tool: str, function: Callable[..., Any]) -> None:
    """Reject a function that another process cannot import."""
    if "<" in function.__qualname__ or inspect.getsourcefile(function) is None:
        raise ConfigError(
            f"The tool {tool} cannot run isolated: {function.__qualname__} is defined inside another function. "
            "Define it at the top level of a module, so that another process can import it."
        )


async def run_isolated(
    function: Callable[..., Any], arguments: bytes, key: str, max_output: int, files: TrustedFiles | None = None
) -> Output:
    file = inspect.getsourcefile(function) or ""
    sources = None if files is None else files.with_only_modules()
    job = IsolatedJob(
        function.__module__, function.__qualname__, file, sys.path, arguments.decode(), key, max_output, sources
    )
    # Bytecode next to an agent's code would be untrusted code.
    argv = [sys.executable, "-P", "-B", "-m", _PROGRAM_MODULE]
    stdin = msgspec.json.encode(job) + b"\n"
    environment = {**os.environ, AGENT_VARIABLE: "tool"}
    program = ProcessSpec(
        argv, Path.cwd(), environment, stdin, has_answer_pipe=True, max_output=max_output + EXTRA_ANSWER
    )
    return read_answer(await run_group(program))


_PRCTL: Final = ctypes.CDLL(None).prctl
_SIGNALS: Final = tuple(map(int, signal.valid_signals()))
_SET_PARENT_DEATH_SIGNAL: Final = 1


async def run_forked(call: Callable[[], Any], name: str, max_output: int) -> Output:
    process_exit = await attend_process(partial(_start_fork, call, max_output), name)
    print_masked_output(process_exit.text)
    return read_answer(process_exit)


@contextmanager
def _start_fork(call: Callable[[], Any], max_output: int) -> Generator[StartedProcess]:
    """Fork in the thread of the process: the kernel kills the fork when that thread exits."""
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        pid = _fork_child(call, max_output, output=pipes[1], answer=pipes[3])
    except OSError as error:
        _close_all(pipes)
        raise Failed(type(error).__name__, f"cannot create a process for the call: {error}") from error
    _close_all((pipes[1], pipes[3]))
    try:
        yield StartedProcess(pid, pipes[0], pipes[2], partial(_reap, pid), max_output + EXTRA_ANSWER)
    finally:
        _close_all((pipes[0], pipes[2]))


def _fork_child(call: Callable[[], Any], max_output: int, *, output: int, answer: int) -> int:
    parent, handled_signals = os.getpid(), [number for number in _SIGNALS if callable(signal.getsignal(number))]
    pid = fork()
    if pid == 0:
        _run_as_child(partial(perform_call, call, max_output), parent, handled_signals, output, answer)
    return pid


def _close_all(pipes: Iterable[int]) -> None:
    for fd in pipes:
        os.close(fd)


def _reap(pid: int) -> int:
    """Wait for a fork. Its exit code is lost if the program ignores SIGCHLD or waits for any child."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _run_as_child(
    work: Callable[[], bytes], parent: int, handled_signals: list[int], output: int, answer: int
) -> NoReturn:
    """Do the work and exit, without ever returning to the code of the process."""
    code = 1
    try:
        _isolate_child(parent, handled_signals)
        used_fds = {answer, *_redirect(output)}
        # Two processes that use one connection corrupt it. Closing it is not enough: the next opened file would get the
        # descriptor and the connection's writes.
        closed_socket, peer = socket.socketpair()
        peer.close()
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 Paths take ten times as long.
            if fd not in used_fds and fd != closed_socket.fileno() and _has_another_end(fd):
                os.dup2(closed_socket.fileno(), fd, inheritable=False)
        unwritten = memoryview(work())
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        while unwritten:
            unwritten = unwritten[os.write(answer, unwritten) :]
        code = 0
    except BaseException:  # noqa: BLE001 There is no caller, and the error must be reported.
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _isolate_child(parent: int, handled_signals: list[int]) -> None:
    """Start a session that ends with the parent, with default signal handlers."""
    os.setsid()
    _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in handled_signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The fork must not finalize the garbage of the process, such as a connection.
    gc.freeze()
    forget_groups()
    os.environ[AGENT_VARIABLE] = "tool"


def _has_another_end(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False  # The descriptor of the listing itself.
    if stat.S_ISCHR(mode):
        return os.isatty(fd)
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode))


def _redirect(output: int) -> set[int]:
    """Redirect input from the null device and output to the pipe, past the process's buffers; return the fds.

    A logger may still refer to the old streams, so their descriptors are replaced as well.
    """
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    fds = {1, 2, *_numbers(sys.stdout, sys.stderr)}
    for fd in fds:
        os.dup2(output, fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 It stays open until exit.
    sys.stdout = sys.__stdout__ = _open_printer(1)
    sys.stderr = sys.__stderr__ = _open_printer(2)
    return {output, *fds}


def _numbers(*streams: TextIO | None) -> Iterator[int]:
    for stream in streams:
        # A stream may be None, closed, or not a file.
        with suppress(AttributeError, OSError, ValueError):
            yield cast("TextIO", stream).fileno()


def _open_printer(fd: int) -> Any:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
