"""Lines that somebody types, read beside everything else that goes on."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, Self


class Lines:
    """Reads standard input line by line in a thread that ends with the process: a terminal cannot be let go of."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._wanted = threading.Semaphore(0)
        self._asked = prompt
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._asking = False
        self._over = False
        self._terminal: list[Any] | None = None
        self.by_hand = sys.stdin.isatty()

    async def __aenter__(self) -> Self:
        """Begin to read."""
        if self.by_hand:
            with suppress(ImportError):
                # Whoever types a line may correct it: `input` does that once this module is there.
                import_module("readline")
            self._terminal = _terminal()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="halter-lines", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was: the thread may wait on for a line that nobody asks for any more."""
        if self._terminal is not None:
            import termios

            with suppress(termios.error, ValueError, OSError):
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)

    def __aiter__(self) -> AsyncIterator[str]:
        return self._all()

    async def _all(self) -> AsyncIterator[str]:
        while (line := await self._next(self._prompt)) is not None:
            yield line

    async def ask(self, question: str) -> str | None:
        """Ask for one line; at the end of input there is none."""
        return await self._next(question)

    @property
    def asking(self) -> bool:
        """Tell whether a prompt stands there that nobody has answered."""
        return self.by_hand and self._asking

    async def _next(self, prompt: str) -> str | None:
        if self._over:
            return None
        if not self._asking:
            self._asked, self._asking = prompt, True
            self._wanted.release()
        line = await self._lines.get()
        # Whoever ends the input leaves the prompt where it stands.
        self._over = self._asking = line is None
        return line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._wanted.acquire()
            line = self._line()
            with suppress(RuntimeError):
                # The loop may be closed by now, and then nobody wants to know.
                loop.call_soon_threadsafe(self._lines.put_nowait, line)
            if line is None:
                return

    def _line(self) -> str | None:
        try:
            if self.by_hand:
                return input(self._asked)
            line = sys.stdin.readline()
        except (EOFError, ValueError, OSError):
            return None
        return line.rstrip("\n") if line else None


def _terminal() -> list[Any] | None:
    """Take down how the terminal is set."""
    import termios

    try:
        return termios.tcgetattr(sys.stdin)
    except (ValueError, OSError, termios.error):
        return None
