"""What the world does to a drill (a full disk, a server that restarts, a process that is gone), put in words."""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, cast

from halter.core.errors import HalterError, StoreUnavailable

EARLY: Final = "The drill ended early, and so proves nothing."


class DrillBroken(HalterError):
    """The world failed while a drill ran; so it proves nothing."""


def faults() -> tuple[type[Exception], ...]:
    """List what disks, databases and processes do to a drill besides what Halter puts in words."""
    plain = (OSError, EOFError, sqlite3.Error)
    try:
        import psycopg
    except ImportError:
        return plain
    return (*plain, psycopg.Error)


def sentence(error: Exception) -> str:
    """Put an error of the world in words, also the first of several that happened at once."""
    if isinstance(error, ExceptionGroup):
        return sentence(cast("ExceptionGroup[Exception]", error).exceptions[0])
    if isinstance(error, HalterError):
        return str(error)
    if isinstance(error, EOFError):
        return "A process of the drill ended without saying why. Run it again."
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{said[:1].upper()}{said[1:].rstrip('.')}. See that disk and database are well, and run it again."


@contextmanager
def in_words() -> Generator[None]:
    """Let what the world does to a drill at work out as a sentence; what kept it from beginning says so itself."""
    try:
        yield
    except (DrillBroken, StoreUnavailable) as error:
        raise DrillBroken(f"{EARLY} {error}") from error
    except ExceptionGroup as group:
        known, unknown = group.split((HalterError, *faults()))
        if known is None or unknown is not None:
            raise
        raise DrillBroken(f"{EARLY} {sentence(known)}") from group
    except faults() as error:
        raise DrillBroken(f"{EARLY} {sentence(error)}") from error
