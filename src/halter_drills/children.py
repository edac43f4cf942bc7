"""Real processes, so that they can really be killed, stopped and continued.

They are forked from a small server process without threads, which multiprocessing keeps for this: so it does
not matter what threads the drill itself has, and a child starts in milliseconds.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Protocol, TypeVarTuple

import msgspec

from halter.core.errors import HalterError
from halter_drills import DRILLS
from halter_drills.drill import DrillBroken, faults, sentence

Ts = TypeVarTuple("Ts")


class Pipe(Protocol):
    """How a child and the drill talk: in values that can be pickled. EOFError says that the other side is gone."""

    def send(self, obj: Any, /) -> None: ...
    def recv(self) -> Any: ...
    def poll(self, timeout: float | None = 0.0, /) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


PATIENCE: Final = 60.0
"""Seconds to wait for a child before the drill says that it is stuck."""

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PRELOADED: Final = ("__main__", "halter.__main__", *(f"halter_drills.{name}" for name in DRILLS))
"""What the server imports once, so that no child has to: multiprocessing wants the main module in each of them."""


class ChildStuck(DrillBroken):
    """A process that the drill started did not do what it had to do."""


_ONE_AT_A_TIME = threading.Lock()
"""Starting a process also polls all others, and two threads that poll one take its exit code from each other."""


class ChildFailed(DrillBroken):
    """A process that the drill started could not go on; it says why."""


class ChildFailure(msgspec.Struct, frozen=True):
    """The last words of a child that met an error."""

    sentence: str


class Child:
    """A process at work. Whatever it says can be heard, and it can be killed, stopped and continued."""

    def __init__(self, process: BaseProcess, pipe: Pipe) -> None:
        self._process = process
        self.pipe = pipe

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def tell(self, word: Any) -> None:
        self.pipe.send(word)

    def hear(self, patience: float = PATIENCE) -> Any:
        """Wait for the next word of the child; EOFError if it died without another one."""
        if not self.pipe.poll(patience):
            raise ChildStuck(f"A process of the drill said nothing for {patience:.0f} s.")
        word = self.pipe.recv()
        if isinstance(word, ChildFailure):
            raise ChildFailed(word.sentence)
        return word

    def hear_all(self, patience: float = PATIENCE) -> list[Any]:
        """Collect what the child says until it ends; `patience` is for each word."""
        words: list[Any] = []
        while True:
            try:
                words.append(self.hear(patience))
            except (EOFError, ConnectionResetError):
                return words

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while process_state(self.pid) not in ("T", ""):
            if time.monotonic() > deadline:
                raise ChildStuck("A process of the drill could not be stopped.")
            time.sleep(0.001)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def wait(self, patience: float = PATIENCE) -> int:
        """Wait until the child has ended, and return its exit code (negative for a signal)."""
        deadline = time.monotonic() + patience
        while (code := self._exit_code()) is None:
            if time.monotonic() > deadline:
                raise ChildStuck(f"A process of the drill did not end within {patience:.0f} s.")
            time.sleep(0.002)
        return code

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        with suppress(ChildStuck):
            self.wait()
        self.pipe.close()

    def _exit_code(self) -> int | None:
        with _ONE_AT_A_TIME:
            return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        if self._exit_code() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Children:
    """Starts children; made by `children`, which ends those that are left."""

    def __init__(self, preload: Sequence[str]) -> None:
        with _undisturbed():
            resource_tracker.ensure_running()  # Done later, this would let through the signals that are to wait.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, *preload])
        self._started: list[Child] = []

    def start(self, work: Callable[[Pipe, *Ts], None], *args: *Ts) -> Child:
        """Run `work(pipe, *args)` in a new process; it must be a function that a module has at its top."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=_worked, args=(work, there, args), daemon=True)
        child = Child(process, here)
        with _ONE_AT_A_TIME, _undisturbed():
            process.start()
            self._started.append(child)
        there.close()
        return child

    def words(self, patience: float = PATIENCE) -> Generator[tuple[Child, Any]]:
        """Yield what any child says, as it is said, until each has ended; also those that are started meanwhile."""
        while self._started:
            speaking = {child.pipe.fileno(): child for child in self._started}
            ready = wait(list(speaking), patience)
            if not ready:
                raise ChildStuck(f"The processes of the drill said nothing for {patience:.0f} s.")
            for child in [child for number, child in speaking.items() if number in ready]:
                try:
                    word = child.hear(patience)
                except (EOFError, ConnectionResetError):
                    self._ended(child)
                    continue
                yield child, word

    def _ended(self, child: Child) -> None:
        code = child.wait()
        child.end()
        self._started.remove(child)
        if code > 0:
            raise ChildFailed(f"A process of the drill ended with exit code {code}; it said why on the standard error.")

    def end(self) -> None:
        for child in self._started:
            child.end()
        self._started.clear()


@contextmanager
def children(*preload: str) -> Generator[Children]:
    """Lend a place to start children from; none of them is left when it closes. `preload` names their modules."""
    started = Children(preload)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Let signals wait until a child is started and noted, so that none is left behind.

    The server and its children inherit this: to end them is up to the drill, which hears the same signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worked(work: Callable[..., None], pipe: Pipe, args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(pipe, *args)
    except* (HalterError, *faults()) as errors:
        with suppress(OSError):
            pipe.send(ChildFailure(sentence(errors)))


def _end_with_parent() -> None:
    """Let no child outlive a drill that was killed itself."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def process_state(pid: int) -> str:
    """Read the state letter of a process, after its name, which stands in brackets and may contain anything."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]
