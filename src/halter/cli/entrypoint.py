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
from halter.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_UNUSABLE, TERMINATION_SIGNALS
from halter.cli.output import warn
from halter.core.errors import explain_missing_module

STREAMS: Final = (0, 1, 2)


class OutputLost(Exception):
    """The answer could not be written to where it should go."""

    def __init__(self, why: OSError) -> None:
        super().__init__(why.strerror)
        self.code = EXIT_BROKEN_PIPE if why.errno == errno.EPIPE else EXIT_UNUSABLE


class StandardOutput(io.FileIO):
    """The standard output, which tells its own errors from those of any other file."""

    def write(self, data: Buffer, /) -> int:
        """Write, or say that nobody could be told."""
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error) from error


def run_program() -> int:
    """Run the command that was typed, and return the code to leave with."""
    open_streams()
    handle_termination_signals()
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OutputLost as unheard:
        _discard_output()
        code = unheard.code
        if code == EXIT_UNUSABLE:
            warn(f"What was done stands, but the answer could not be written ({unheard}).", "red")
    except ModuleNotFoundError as missing:
        code = _report_missing_extra(missing)
    except Exception as mistake:  # noqa: BLE001  the outermost door: nothing further out could answer
        code = report_internal_error(mistake)
    return code


def _run() -> int:
    try:
        build()(prog_name="halter")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _report_missing_extra(missing: ModuleNotFoundError) -> int:
    """Name the extra that brings a missing library."""
    sentence = explain_missing_module(missing)
    if sentence is None:
        return report_internal_error(missing)
    warn(sentence, "red")
    return EXIT_UNUSABLE


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
    outlet = io.BufferedWriter(StandardOutput(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(outlet, encoding, "backslashreplace", line_buffering=os.isatty(1))


def handle_termination_signals() -> None:
    """Clean up also when told to end, or when the terminal is gone; but leave alone what was to be ignored."""
    for number in TERMINATION_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """End once: what comes after the first signal must not disturb the cleaning up."""
    for number in TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _discard_output() -> None:
    """Keep the interpreter from trying once more, as it leaves, what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def report_internal_error(mistake: Exception) -> int:
    """Say that Halter itself is wrong, and keep what is needed to mend it in a file, not before the person."""
    told = f"Halter made a mistake ({type(mistake).__name__}: {mistake})."
    try:
        with tempfile.NamedTemporaryFile("w", prefix="halter-mistake-", suffix=".txt", delete=False) as kept:
            kept.write("".join(traceback.format_exception(mistake)))
    except OSError as error:
        warn(f"{told} Its details could not be kept ({error.strerror}); please report it.", "red")
    else:
        warn(f"{told} Please report it with {kept.name}.", "red")
    return EXIT_INTERNAL
