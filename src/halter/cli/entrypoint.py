"""The outermost layer of the program: streams, signals and exit code."""

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

from halter.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_UNUSABLE, TERMINATION_SIGNALS
from halter.cli.output import warn
from halter.core.errors import explain_missing_module
from halter.system.processes import note_end

STREAMS: Final = (0, 1, 2)


class OutputLost(Exception):
    """The output could not be written to stdout."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.code = EXIT_BROKEN_PIPE if error.errno == errno.EPIPE else EXIT_UNUSABLE


class StandardOutput(io.FileIO):
    """Stdout, with an error type that distinguishes it from other files."""

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
    except OutputLost as output_lost:
        # Keep the interpreter from retrying the failed write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = output_lost.code
        if code == EXIT_UNUSABLE:
            warn(f"The command ran, but its output could not be written ({output_lost}).", "red")
    except ModuleNotFoundError as missing:
        code = _report_missing_extra(missing)
    except Exception as mistake:  # noqa: BLE001  the outermost layer: no caller handles the error
        code = report_internal_error(mistake)
    return code


def _run() -> int:
    from halter.cli.commands import build_command_tree

    try:
        build_command_tree()(prog_name="halter")
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
    """Open missing standard streams, and make stdout accept any text.

    If a standard stream is closed, the next opened file gets its number and receives error messages.
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
    """Clean up on SIGTERM and SIGHUP, too; ignored signals stay ignored."""
    for number in TERMINATION_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt once: later signals must not disturb the cleanup.

    Half-made objects, such as an event loop, may fail when they are freed. The operator does not need that error.
    """
    for number in TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.unraisablehook = _ignore_unraisable
    note_end()
    raise KeyboardInterrupt


def _ignore_unraisable(_unraisable: "sys.UnraisableHookArgs") -> None:
    """Print nothing."""


def report_internal_error(bug: Exception) -> int:
    """Report a bug, and save the traceback to a file."""
    sentence = f"Internal error ({type(bug).__name__}: {bug})."
    try:
        with tempfile.NamedTemporaryFile("w", prefix="halter-mistake-", suffix=".txt", delete=False) as file:
            file.write("".join(traceback.format_exception(bug)))
    except OSError as error:
        warn(f"{sentence} The traceback could not be saved ({error.strerror}); please report it.", "red")
    else:
        warn(f"{sentence} Please report it with {file.name}.", "red")
    return EXIT_INTERNAL
