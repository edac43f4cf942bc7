"""What the dashboard's libraries log: told in a sentence to whoever runs the server, and written to no terminal.

A browser has a hand in what they log: addresses, and words of its own. A traceback is of no use to anybody here.
"""

import logging
from collections.abc import Callable
from typing import Final

PAGES: Final = "nicegui"
WIRES: Final = ("engineio.server", "socketio.server")
"""What breaks there is what a browser sent, and nothing of ours."""


class Overheard(logging.Handler):
    """Hands on that something broke. Warnings are about what a browser asked for, and it has its answer."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell what broke, and of which kind it is."""
        error = record.exc_info[1] if record.exc_info else None
        kind = f"{type(error).__name__}: " if error is not None else ""
        self._tell(f"A page broke: {kind}{record.getMessage()}")


def overhear(tell: Callable[[str], None]) -> None:
    """Take over what is logged, in place of whatever would have written it to the terminal."""
    _only(PAGES, Overheard(tell))
    for name in WIRES:
        _only(name, logging.NullHandler())


def _only(name: str, handler: logging.Handler) -> None:
    log = logging.getLogger(name)
    log.handlers[:] = [handler]
    log.propagate = False
