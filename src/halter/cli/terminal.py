"""The terminal: questions, typed lines, progress, and output that does not block agents.

An answer counts only if it was typed after its question was shown. A stalled reader of the output (a stopped terminal,
a pager) delays only code that waits for the output, never an agent.
"""

import asyncio
import os
import queue
import select
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from halter.cli.command import fail
from halter.cli.entrypoint import OutputLost
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.output import make_console

EARLY_INPUT_NOTICE: Final = "Discarded the input typed before this question."
_CHUNK: Final = 4096


class Keyboard(Protocol):
    """A source of lines; `is_tty` is true if a person types them."""

    is_tty: bool

    def has_line(self) -> bool:
        """Return whether a whole line is typed and unread."""
        ...

    def drop(self) -> None:
        """Discard unread input."""
        ...

    def line(self, prompt: str) -> str | None:
        """Show a prompt and read a line; None at the end of input."""
        ...


class StandardInput:
    """Stdin: a terminal with line editing, or a pipe."""

    def __init__(self) -> None:
        self.is_tty = sys.stdin.isatty()
        if self.is_tty:
            with suppress(ImportError):
                # `input` supports line editing once this module is loaded.
                import_module("readline")

    def has_line(self) -> bool:
        return self.is_tty and is_readable(sys.stdin.fileno())

    def drop(self) -> None:
        if self.is_tty:
            discard_typed(sys.stdin.fileno())

    def line(self, prompt: str) -> str | None:
        try:
            if self.is_tty:
                return input(prompt)
            line = sys.stdin.readline()
        except (EOFError, ValueError, OSError):
            return None
        return line.rstrip("\n") if line else None


class TerminalDevice:
    """A terminal by its file number, without line editing."""

    def __init__(self, number: int) -> None:
        self.is_tty = os.isatty(number)
        self._number = number

    def has_line(self) -> bool:
        return is_readable(self._number)

    def drop(self) -> None:
        discard_typed(self._number)

    def line(self, prompt: str) -> str | None:
        os.write(self._number, prompt.encode())
        data = b""
        while not data.endswith(b"\n"):
            chunk = os.read(self._number, _CHUNK)
            if not chunk:
                return None
            data += chunk
        return data.decode("utf-8", "replace").rstrip("\n")


def is_readable(number: int) -> bool:
    try:
        return bool(select.select([number], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def discard_typed(number: int) -> None:
    import termios

    with suppress(termios.error, OSError, ValueError):
        termios.tcflush(number, termios.TCIFLUSH)


def ask_freshly(keyboard: Keyboard, question: str) -> str | None:
    """Ask a question; discard earlier input, with a notice."""
    had_early_input = keyboard.has_line()
    keyboard.drop()
    return keyboard.line(f"{EARLY_INPUT_NOTICE}\n{question}" if had_early_input else question)


def confirm(question: str, make_keyboard: Callable[[], Keyboard] = StandardInput) -> bool:
    """Ask for a yes; fail without a terminal."""
    keyboard = make_keyboard()
    if not keyboard.is_tty:
        fail("Not a terminal. Pass --yes to confirm.", EXIT_USAGE)
    while (line := ask_freshly(keyboard, f"{question} [y/N]: ")) is not None:
        match line.strip().lower():
            case "y" | "yes":
                return True
            case "" | "n" | "no":
                return False
            case _:
                pass
    return False


class _ReadRequest(NamedTuple):
    prompt: str
    freshly: bool


class _TypedLine(NamedTuple):
    line: str | None
    ahead: bool


class LineReader:
    """Reads lines in a thread that ends with the process: a read from a terminal cannot be cancelled."""

    def __init__(self, prompt: str, keyboard: Keyboard | None = None) -> None:
        self._prompt = prompt
        self._keyboard: Keyboard = keyboard or StandardInput()
        self._wishes: queue.SimpleQueue[_ReadRequest] = queue.SimpleQueue()
        self._lines: asyncio.Queue[_TypedLine] = asyncio.Queue()
        self._asking = False
        self._is_closed = False
        self._freshly = False
        self._terminal: list[Any] | None = None
        self.is_tty = self._keyboard.is_tty
        self.ahead = False
        """True if the last line was typed before its prompt."""

    async def __aenter__(self) -> Self:
        if self.is_tty:
            self._terminal = _read_terminal_settings()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="halter-lines", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal settings: the thread may still wait for a line."""
        if self._terminal is not None:
            import termios

            with suppress(termios.error, ValueError, OSError):
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)

    def __aiter__(self) -> AsyncIterator[str]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[str]:
        while (line := await self._next(self._prompt)) is not None:
            yield line

    async def ask(self, question: str) -> str | None:
        """Ask a question; only input typed after it counts. None at the end of input."""
        self.require_fresh()
        return await self._next(question)

    def require_fresh(self) -> None:
        """Discard input typed before the next prompt."""
        self._freshly = True

    @property
    def asking(self) -> bool:
        """True while a prompt is unanswered."""
        return self.is_tty and self._asking

    async def _next(self, prompt: str) -> str | None:
        freshly, self._freshly = self._freshly and self.is_tty, False
        if freshly and self._asking and not self._is_closed:
            # The earlier prompt here is settled: the line being typed was meant for it.
            await self._read_line()
            prompt = f"{EARLY_INPUT_NOTICE}\n{prompt}"
        if self._is_closed:
            return None
        if not self._asking:
            self._wishes.put(_ReadRequest(prompt, freshly))
            self._asking = True
        return await self._read_line()

    async def _read_line(self) -> str | None:
        typed_line = await self._lines.get()
        # The end of input leaves the prompt unanswered.
        self._is_closed = self._asking = typed_line.line is None
        self.ahead = typed_line.ahead
        return typed_line.line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            typed_line = self._prompt_line(self._wishes.get())
            with suppress(RuntimeError):
                # The loop may be closed by now.
                loop.call_soon_threadsafe(self._lines.put_nowait, typed_line)
            if typed_line.line is None:
                return

    def _prompt_line(self, request: _ReadRequest) -> _TypedLine:
        if request.freshly:
            return _TypedLine(ask_freshly(self._keyboard, request.prompt), ahead=False)
        is_ahead = self._keyboard.has_line()
        return _TypedLine(self._keyboard.line(request.prompt), is_ahead)


def _read_terminal_settings() -> list[Any] | None:
    import termios

    try:
        return termios.tcgetattr(sys.stdin)
    except (ValueError, OSError, termios.error):
        return None


PROGRESS_DELAY_SECONDS: Final = 1.0
"""Shorter jobs show no progress."""

ProgressListener = Callable[[str], None]


@contextmanager
def progress(
    label: str, *, quiet: bool = False, delay_seconds: float = PROGRESS_DELAY_SECONDS
) -> Generator[ProgressListener]:
    """Show progress on stderr if a job takes longer than `delay_seconds`; only at a terminal."""
    screen = make_console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda _: None
        return
    progress_line = _Progress(screen, label)
    timer = threading.Timer(delay_seconds, progress_line.start)
    timer.daemon = True
    timer.start()
    try:
        yield progress_line.update
    finally:
        timer.cancel()
        timer.join()
        progress_line.end()


class _Progress:
    """A progress line that appears after a delay. A dumb terminal gets one line only."""

    def __init__(self, screen: Console, label: str) -> None:
        self._screen = screen
        self._label = label
        self._spinner = Spinner("dots", text=f"{label} …")
        # The output of the command must not be mixed with the progress line.
        self._live = Live(self._spinner, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False)

    def start(self) -> None:
        if self._screen.is_dumb_terminal:
            self._screen.print(f"{self._label} …", markup=False)
        else:
            self._live.start(refresh=True)

    def update(self, detail: str) -> None:
        self._spinner.update(text=f"{self._label}: {detail} …")

    def end(self) -> None:
        self._live.stop()


def format_progress(done_count: int, total: int, noun: str = "events") -> str:
    return f"{done_count:,} of {total:,} {noun}"


PRINTER_FLUSH_SECONDS: Final = 1.0
"""Time limit for the remaining writes at exit."""


MAX_PENDING_TEXTS: Final = 64
"""Maximum number of texts that wait to be written."""


class Printer:
    """Writes in a thread that ends with the process: a write to a stalled terminal cannot be cancelled.

    Texts added during a write are written together next.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._problem: OSError | None = None

    async def __aenter__(self) -> Self:
        sys.stdout.flush()
        args = (sys.stdout.fileno(), asyncio.get_running_loop())
        threading.Thread(target=self._write, args=args, name="halter-printer", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), PRINTER_FLUSH_SECONDS)

    def write(self, text: str) -> None:
        self._texts.append(text)
        if self._idle.is_set():
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._start_write)

    @property
    def is_full(self) -> bool:
        """True if `wait_for_space` would block or raise."""
        return len(self._texts) >= MAX_PENDING_TEXTS or self._problem is not None

    async def wait_for_space(self) -> None:
        """Wait while too many texts are unwritten. Raises OutputLost if the output failed."""
        if len(self._texts) >= MAX_PENDING_TEXTS:
            await self._idle.wait()
        if self._problem is not None:
            raise OutputLost(self._problem)

    def _start_write(self) -> None:
        text, self._texts = "".join(self._texts), []
        self._queue.put(text.encode(sys.stdout.encoding, "backslashreplace"))

    def _write_all(self) -> None:
        if self._texts:
            self._start_write()
        else:
            self._idle.set()

    def _write(self, file: int, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            text = self._queue.get()
            try:
                if self._problem is None:
                    _write_all(file, text)
            except OSError as error:
                self._problem = error
            with suppress(RuntimeError):
                # The loop may be closed by now.
                loop.call_soon_threadsafe(self._write_all)


def _write_all(file: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(file, text) :]
        except BlockingIOError:
            select.select([], [file], [])
