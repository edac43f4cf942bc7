"""Files that commands write: rows that are durable, and texts that only their owner can read."""

import os
import stat
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final

from halter.cli.output import encode_json_line
from halter.core.errors import ConfigError

STDOUT_ARGUMENT: Final = "-"


WriteRows = Callable[[Iterable[object]], None]
"""Writes rows as JSON lines. The rows are durable when it returns."""


def _print_rows(rows: Iterable[object]) -> None:
    for row in rows:
        sys.stdout.write(encode_json_line(row).decode())
    sys.stdout.flush()


def _write_rows(file: FileIO, path: str, rows: Iterable[object]) -> None:
    """Write rows and sync them to disk, unless the file is a pipe or a device."""
    try:
        _write_all(file, b"".join(map(encode_json_line, rows)))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable_error(path, error) from error


@contextmanager
def open_sink(target: str, *, append: bool, private: bool = False) -> Generator[WriteRows]:
    """Open a file or stdout; a file is truncated unless `append` is set.

    A new file is readable by its owner only; with `private`, an existing file becomes so, too.
    """
    if target == STDOUT_ARGUMENT:
        yield _print_rows
        return
    try:
        cut_short = append and _is_cut_short(Path(target))
        mode_flag = os.O_APPEND if append else os.O_TRUNC
        file = FileIO(os.open(target, os.O_WRONLY | os.O_CREAT | mode_flag, 0o600), "wb")
    except (OSError, ValueError) as error:
        raise _unwritable_error(target, error) from error
    with file:
        if private and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
        if cut_short:
            _write_all(file, b"\n")
        yield partial(_write_rows, file, target)


def write_private(path: str, text: str) -> None:
    """Write a file that only its owner can read."""
    try:
        with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
            _write_all(file, text.encode())
    except (OSError, ValueError) as error:
        raise _unwritable_error(path, error) from error


def _write_all(file: FileIO, data: bytes) -> None:
    """Write without a buffer, so that closing the file does not repeat a failed write."""
    while data:
        data = data[file.write(data) :]


def _is_cut_short(path: Path) -> bool:
    """Return whether a crash left an unterminated last line, which must be terminated before the next one."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _unwritable_error(path: str, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"Cannot write {path!r}: {reason or error}.")
