"""Child processes that a drill kills, stops and continues.

They are forked from multiprocessing's fork server, which has no threads, so a child starts in milliseconds.
"""

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Protocol, TypeVarTuple

import msgspec

from halter.core.errors import ConfigError, HalterError
from halter_drills import DRILLS
from halter_drills.drill import DrillBroken, faults, sentence

Ts = TypeVarTuple("Ts")


class Pipe(Protocol):
    """Connection between a child and the drill, for pickled values. `EOFError` means that the other side has closed."""

    def send(self, obj: Any, /) -> None: ...
    def recv(self) -> Any: ...
    def poll(self, timeout: float | None = 0.0, /) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


CHILD_TIMEOUT_SECONDS: Final = 60.0
"""Seconds after which a silent child counts as stuck."""

MAX_SOCKET_PATH_LENGTH: Final = 107
"""Bytes of the name of a socket on Linux."""

END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

DEFERRED: Final = ("genai_prices", "httpx2", "nacl.signing", "pkgutil", "yaml")
"""Modules that Halter imports on first use, and that most children need."""

PRELOADED: Final = ("__main__", "halter.__main__", *(f"halter_drills.{name}" for name in DRILLS), *DEFERRED)
"""Imported once by the fork server, for all children; multiprocessing needs the main module in each."""


_PROCESS_LOCK = threading.Lock()
"""Starting a process polls all others; two threads that poll the same process take each other's exit code."""


class ChildStuck(DrillBroken):
    """A child did not answer, stop or end in time."""


class ChildFailed(DrillBroken):
    """A child ended with an error or in an unexpected way."""


class ChildFailure(msgspec.Struct, frozen=True):
    """The last message of a child that failed."""

    sentence: str


class Child:
    def __init__(self, process: BaseProcess, pipe: Pipe) -> None:
        self._process = process
        self.pipe = pipe

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, word: Any) -> None:
        self.pipe.send(word)

    def receive(self, max_wait: float = CHILD_TIMEOUT_SECONDS) -> Any:
        """Wait for the child's next message. Raise `EOFError` if the child has died."""
        if not self.pipe.poll(max_wait):
            raise ChildStuck(f"A process of the drill sent nothing for {max_wait:.0f} s.")
        message = self.pipe.recv()
        if isinstance(message, ChildFailure):
            raise ChildFailed(message.sentence)
        return message

    def receive_all(self, max_wait: float = CHILD_TIMEOUT_SECONDS) -> list[Any]:
        """Collect messages until the child ends; `max_wait` applies to each."""
        messages: list[Any] = []
        while True:
            try:
                messages.append(self.receive(max_wait))
            except (EOFError, ConnectionResetError):
                return messages

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        wait_until_stopped(self.pid)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wait(self, max_wait: float = CHILD_TIMEOUT_SECONDS) -> int:
        """Wait until the child has ended; return its exit code (negative for a signal)."""
        deadline = time.monotonic() + max_wait
        while (exit_code := self._exit_code()) is None:
            if time.monotonic() > deadline:
                raise ChildStuck(f"A process of the drill did not end within {max_wait:.0f} s.")
            time.sleep(0.002)
        return exit_code

    def expect_killed(self) -> None:
        if self.wait() != -signal.SIGKILL:
            raise ChildFailed("A process of the drill ended before it could be killed.")

    def end(self) -> None:
        with suppress(ChildStuck):
            self.kill()
        self.pipe.close()

    def _exit_code(self) -> int | None:
        with _PROCESS_LOCK:
            return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        if self._exit_code() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Children:
    """Starts children. Made by `children`, which kills the remaining ones."""

    def __init__(self, preload: Sequence[str]) -> None:
        _check_socket_folder(Path(tempfile.gettempdir()))
        with _block_signals():
            resource_tracker.ensure_running()  # Started later, it would unblock the signals.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, *preload])
        self._started: list[Child] = []

    def start(self, work: Callable[[Pipe, *Ts], Coroutine[Any, Any, None] | None], *args: *Ts) -> Child:
        """Run `work(pipe, *args)` in a new process; it must be a top-level function, async or not."""
        drill_end, child_end = self._context.Pipe()
        process = self._context.Process(target=_run_work, args=(work, child_end, args), daemon=True)
        child = Child(process, drill_end)
        with _PROCESS_LOCK, _block_signals():
            process.start()
            self._started.append(child)
        child_end.close()
        return child

    def messages(self, max_wait: float = CHILD_TIMEOUT_SECONDS) -> Generator[tuple[Child, Any]]:
        """Yield the messages of all children, including new ones, until all have ended."""
        while self._started:
            children_by_fd = {child.pipe.fileno(): child for child in self._started}
            ready = wait(list(children_by_fd), max_wait)
            if not ready:
                raise ChildStuck(f"The processes of the drill sent nothing for {max_wait:.0f} s.")
            for child in [child for fd, child in children_by_fd.items() if fd in ready]:
                try:
                    message = child.receive(max_wait)
                except (EOFError, ConnectionResetError):
                    exit_code = child.wait()
                    child.end()
                    self._started.remove(child)
                    if exit_code > 0:
                        raise ChildFailed(
                            f"A process of the drill ended with exit code {exit_code}; see stderr."
                        ) from None
                    continue
                yield child, message

    def end(self) -> None:
        for child in self._started:
            child.end()
        self._started.clear()


def _check_socket_folder(folder: Path) -> None:
    """Reject a folder whose path is too long for the socket of the fork server."""
    if len(os.fsencode(folder)) + len("/pymp-12345678/listener-12345678") > MAX_SOCKET_PATH_LENGTH:
        raise ConfigError(
            f"The path of the temporary folder {folder} is too long for a socket. Set TMPDIR to a shorter path."
        )


@contextmanager
def children(*preload: str) -> Generator[Children]:
    """Start children inside this block; all are killed when it ends. `preload` names their modules."""
    processes = Children(preload)
    try:
        yield processes
    finally:
        processes.end()


@contextmanager
def _block_signals() -> Generator[None]:
    """Block signals until a child is started and recorded, so that no child is left behind.

    The server and its children inherit this mask; the drill receives the same signals and ends them.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _run_work(work: Callable[..., Coroutine[Any, Any, None] | None], pipe: Pipe, args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        coroutine = work(pipe, *args)
        if coroutine is not None:
            asyncio.run(coroutine)
    except* (HalterError, *faults()) as errors:
        with suppress(OSError):
            pipe.send(ChildFailure(sentence(errors)))


def _end_with_parent() -> None:
    """End this child if the drill itself was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def process_state(pid: int) -> str:
    """Read the state letter of a process. It follows the bracketed name, which may contain any character."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def wait_until_stopped(pid: int) -> None:
    """Wait until a process has stopped after SIGSTOP."""
    deadline = time.monotonic() + CHILD_TIMEOUT_SECONDS
    while process_state(pid) not in ("T", ""):
        if time.monotonic() > deadline:
            raise ChildStuck("A process of the drill could not be stopped.")
        time.sleep(0.001)
