"""Telling a person at a terminal that something takes its time, and how far it is; nobody else is told."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from halter.cli.answer import console

A_WHILE: Final = 1.0
"""After so many seconds people begin to wonder."""

Tell = Callable[[str], None]
"""Takes what is to be told now."""


@contextmanager
def patience(what: str, *, quiet: bool = False, a_while: float = A_WHILE) -> Generator[Tell]:
    """Show beside the answer that something is being done, if it takes longer than a while.

    A file, a pipe or a program is shown nothing: what is read there is the answer, and nothing that was wiped away.
    """
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda _: None
        return
    waiting = _Waiting(screen, what)
    timer = threading.Timer(a_while, waiting.begin)
    timer.daemon = True
    timer.start()
    try:
        yield waiting.tell
    finally:
        timer.cancel()
        timer.join()
        waiting.end()


class _Waiting:
    """A line that is shown from some moment on. A terminal that cannot wipe lines is told once, and no more."""

    def __init__(self, screen: Console, what: str) -> None:
        self._screen = screen
        self._what = what
        self._spinner = Spinner("dots", text=f"{what} …")
        # The answer goes its own way, and must never be taken for a part of this.
        self._live = Live(self._spinner, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False)

    def begin(self) -> None:
        if self._screen.is_dumb_terminal:
            self._screen.print(f"{self._what} …", markup=False)
        else:
            self._live.start(refresh=True)

    def tell(self, more: str) -> None:
        self._spinner.update(text=f"{self._what}: {more} …")

    def end(self) -> None:
        self._live.stop()


def share(done: int, total: int, noun: str = "events") -> str:
    """Say how far something is."""
    return f"{done:,} of {total:,} {noun}"
