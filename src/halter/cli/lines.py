"""Lines that somebody types, read beside everything else that goes on."""

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from halter.cli.keyboard import NOT_TAKEN, Keyboard, StandardInput, ask_freshly


class _Wish(NamedTuple):
    """What is to be read: a line after this prompt; `freshly`, only one that is typed after it was shown."""

    prompt: str
    freshly: bool


class _Typed(NamedTuple):
    """A line, and whether it was typed before its prompt was shown."""

    line: str | None
    ahead: bool


class Lines:
    """Reads a keyboard line by line in a thread that ends with the process: a terminal cannot be let go of."""

    def __init__(self, prompt: str, keyboard: Keyboard | None = None) -> None:
        self._prompt = prompt
        self._keyboard: Keyboard = keyboard or StandardInput()
        self._wishes: queue.SimpleQueue[_Wish] = queue.SimpleQueue()
        self._lines: asyncio.Queue[_Typed] = asyncio.Queue()
        self._asking = False
        self._over = False
        self._freshly = False
        self._terminal: list[Any] | None = None
        self.by_hand = self._keyboard.by_hand
        self.ahead = False
        """Whether the line that was read last was typed before its prompt was shown."""

    async def __aenter__(self) -> Self:
        """Begin to read."""
        if self.by_hand:
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
        """Ask a question; only what is typed from now on answers it. At the end of input there is no answer."""
        self.require_fresh()
        return await self._next(question)

    def require_fresh(self) -> None:
        """Take for the next line only what is typed after its prompt is shown: it answers something."""
        self._freshly = True

    @property
    def asking(self) -> bool:
        """Tell whether a prompt stands there that nobody has answered."""
        return self.by_hand and self._asking

    async def _next(self, prompt: str) -> str | None:
        freshly, self._freshly = self._freshly and self.by_hand, False
        if freshly and self._asking and not self._over:
            # Something else was asked here and is settled: what is being typed was meant for that.
            await self._take()
            prompt = f"{NOT_TAKEN}\n{prompt}"
        if self._over:
            return None
        if not self._asking:
            self._wishes.put(_Wish(prompt, freshly))
            self._asking = True
        return await self._take()

    async def _take(self) -> str | None:
        typed = await self._lines.get()
        # Whoever ends the input leaves the prompt where it stands.
        self._over = self._asking = typed.line is None
        self.ahead = typed.ahead
        return typed.line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            typed = self._typed(self._wishes.get())
            with suppress(RuntimeError):
                # The loop may be closed by now, and then nobody wants to know.
                loop.call_soon_threadsafe(self._lines.put_nowait, typed)
            if typed.line is None:
                return

    def _typed(self, wish: _Wish) -> _Typed:
        if wish.freshly:
            return _Typed(ask_freshly(self._keyboard, wish.prompt), ahead=False)
        ahead = self._keyboard.waits()
        return _Typed(self._keyboard.line(wish.prompt), ahead)


def _terminal() -> list[Any] | None:
    """Take down how the terminal is set."""
    import termios

    try:
        return termios.tcgetattr(sys.stdin)
    except (ValueError, OSError, termios.error):
        return None
