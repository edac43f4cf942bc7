"""Writing to the standard output beside everything else that goes on.

Whoever reads it may stall: a terminal that was stopped, a pipe into a pager. Then only those wait who want to know that
something was written, and never an agent.
"""

import asyncio
import os
import select
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self

from halter.cli.door import Unheard

LAST_WORDS: Final = 1.0
"""For so many seconds it is tried, at the end, to write what is left."""


class Printer:
    """Writes in a thread that ends with the process: a stalled terminal cannot be let go of."""

    def __init__(self) -> None:
        self._texts: SimpleQueue[tuple[bytes, asyncio.Future[None]]] = SimpleQueue()
        self._last: asyncio.Future[None] | None = None
        self._problem: OSError | None = None

    async def __aenter__(self) -> Self:
        """Begin to write."""
        sys.stdout.flush()
        args = (sys.stdout.fileno(), asyncio.get_running_loop())
        threading.Thread(target=self._write, args=args, name="halter-printer", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left, if somebody takes it."""
        if self._last is not None:
            await asyncio.wait([self._last], timeout=LAST_WORDS)

    def put(self, text: str) -> None:
        """Write a text when those before it are written."""
        self._last = asyncio.get_running_loop().create_future()
        self._texts.put((text.encode(sys.stdout.encoding, "backslashreplace"), self._last))

    async def written(self) -> None:
        """Wait until all of it is written. Raises Unheard where it cannot be."""
        if self._last is not None:
            await asyncio.wait([self._last])
        if self._problem is not None:
            raise Unheard(self._problem)

    def _write(self, file: int, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            text, done = self._texts.get()
            try:
                if self._problem is None:
                    _write_all(file, text)
            except OSError as error:
                self._problem = error
            with suppress(RuntimeError):
                # The loop may be closed by now, and then nobody wants to know.
                loop.call_soon_threadsafe(_finish, done)


def _write_all(file: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(file, text) :]
        except BlockingIOError:
            select.select([], [file], [])


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
