"""The outermost door of the program: its streams, its signals, and how it leaves."""

import errno
import io
import os
import signal
import sys
import tempfile
import traceback
from types import FrameType
from typing import Final

from typing_extensions import Buffer

from halter.cli import build
from halter.cli.answer import warn
from halter.cli.codes import ENDINGS, INTERRUPTED, OURS, UNREAD, UNUSABLE
from halter.core.errors import sentence_for

STREAMS: Final = (0, 1, 2)


class Unheard(Exception):
    """The answer could not be written to where it should go."""

    def __init__(self, why: OSError) -> None:
        super().__init__(why.strerror)
        self.code = UNREAD if why.errno == errno.EPIPE else UNUSABLE


class Outlet(io.FileIO):
    """The standard output, which tells its own errors from those of any other file."""

    def write(self, data: Buffer, /) -> int:
        """Write, or say that nobody could be told."""
        try:
            return super().write(data)
        except OSError as error:
            raise Unheard(error) from error


def enter() -> int:
    """Run the command that was typed, and return the code to leave with."""
    open_streams()
    end_in_order()
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Unheard as unheard:
        _let_go_of_output()
        code = unheard.code
        if code == UNUSABLE:
            warn(f"What was done stands, but the answer could not be written ({unheard}).", "red")
    except ModuleNotFoundError as missing:
        code = _lack(missing)
    except Exception as mistake:  # noqa: BLE001  the outermost door: nothing further out could answer
        code = confess(mistake)
    return code


def _run() -> int:
    try:
        build()(prog_name="halter")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _lack(missing: ModuleNotFoundError) -> int:
    """Name the extra that brings a missing library."""
    sentence = sentence_for(missing)
    if sentence is None:
        return confess(missing)
    warn(sentence, "red")
    return UNUSABLE


def open_streams() -> None:
    """Make sure that there are three standard streams, and that any text can be written to the output.

    Where one is closed, the next file to be opened would get its number, and be written to by whoever complains.
    """
    for number in STREAMS:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    outlet = io.BufferedWriter(Outlet(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(outlet, encoding, "backslashreplace", line_buffering=os.isatty(1))


def end_in_order() -> None:
    """Clean up also when told to end, or when the terminal is gone; but leave alone what was to be ignored."""
    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """End once: what comes after the first signal must not disturb the cleaning up."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _let_go_of_output() -> None:
    """Keep the interpreter from trying once more, as it leaves, what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def confess(mistake: Exception) -> int:
    """Say that Halter itself is wrong, and keep what is needed to mend it in a file, not before the person."""
    told = f"Halter made a mistake ({type(mistake).__name__}: {mistake})."
    try:
        with tempfile.NamedTemporaryFile("w", prefix="halter-mistake-", suffix=".txt", delete=False) as kept:
            kept.write("".join(traceback.format_exception(mistake)))
    except OSError as error:
        warn(f"{told} Its details could not be kept ({error.strerror}); please report it.", "red")
    else:
        warn(f"{told} Please report it with {kept.name}.", "red")
    return OURS
