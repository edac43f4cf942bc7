"""Lines that somebody types, read beside everything else that goes on."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Self


class Lines:
    """Reads standard input line by line in a thread that ends with the process: a terminal cannot be let go of."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._wanted = threading.Semaphore(0)
        self._asked = prompt
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self.by_hand = sys.stdin.isatty()

    async def __aenter__(self) -> Self:
        """Begin to read."""
        if self.by_hand:
            with suppress(ImportError):
                # Whoever types a line may correct it: `input` does that once this module is there.
                import_module("readline")
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="halter-lines", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing has to be done: the thread waits for a line that nobody asks for any more."""

    def __aiter__(self) -> AsyncIterator[str]:
        return self._all()

    async def _all(self) -> AsyncIterator[str]:
        while (line := await self._next(self._prompt)) is not None:
            yield line

    async def ask(self, question: str) -> str:
        """Ask for one line; at the end of input it is empty."""
        return await self._next(question) or ""

    async def _next(self, prompt: str) -> str | None:
        self._asked = prompt
        self._wanted.release()
        return await self._lines.get()

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
