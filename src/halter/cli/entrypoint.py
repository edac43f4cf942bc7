"""The program's outermost layer: its streams, signals and exit code."""

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
    """The answer could not be written to stdout."""

    def __init__(self, why: OSError) -> None:
        super().__init__(why.strerror)
        self.code = EXIT_BROKEN_PIPE if why.errno == errno.EPIPE else EXIT_UNUSABLE


class StandardOutput(io.FileIO):
    """Stdout; its errors are told apart from those of other files."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error) from error


def run_program() -> int:
    open_streams()
    handle_termination_signals()
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OutputLost as unheard:
        # Keep the interpreter from retrying the failed write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = unheard.code
        if code == EXIT_UNUSABLE:
            warn(f"The command ran, but its answer could not be written ({unheard}).", "red")
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
    sentence = explain_missing_module(missing)
    if sentence is None:
        return report_internal_error(missing)
    warn(sentence, "red")
    return EXIT_UNUSABLE


def open_streams() -> None:
    """Make sure that there are three standard streams, and that any text can be written to stdout.

    If one is closed, the next opened file gets its number, and receives error messages.
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
    """Clean up on SIGTERM and SIGHUP, too; leave ignored signals ignored."""
    for number in TERMINATION_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt once: later signals must not disturb the cleanup.

    What the interrupt left half made, such as an event loop, may fail when it is freed: nothing to tell the operator.
    """
    for number in TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.unraisablehook = _ignore_unraisable
    raise KeyboardInterrupt


def _ignore_unraisable(_unraisable: "sys.UnraisableHookArgs") -> None:
    """Say nothing."""


def report_internal_error(mistake: Exception) -> int:
    """Report a bug, and keep the traceback in a file."""
    sentence = f"Internal error ({type(mistake).__name__}: {mistake})."
    try:
        with tempfile.NamedTemporaryFile("w", prefix="halter-mistake-", suffix=".txt", delete=False) as kept:
            kept.write("".join(traceback.format_exception(mistake)))
    except OSError as error:
        warn(f"{sentence} The traceback could not be saved ({error.strerror}); please report it.", "red")
    else:
        warn(f"{sentence} Please report it with {kept.name}.", "red")
    return EXIT_INTERNAL
