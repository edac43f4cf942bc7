"""Where an export goes: to a file that only its owner may read, or to the standard output."""

import os
import stat
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

from halter.cli.answer import json_line
from halter.core.errors import ConfigError

OUTPUT: Final = "-"


class Sink(Protocol):
    """Somewhere to put rows."""

    def put(self, rows: Iterable[object]) -> None:
        """Write rows, each on a line of its own; they have arrived when this returns."""
        ...


class Printed:
    """Rows on the standard output."""

    def put(self, rows: Iterable[object]) -> None:
        """Write rows, and let whoever reads them have them."""
        for row in rows:
            sys.stdout.write(json_line(row).decode())
        sys.stdout.flush()


class Kept:
    """Rows in a file."""

    def __init__(self, file: FileIO, path: str) -> None:
        self._file = file
        self._path = path
        self._on_disk = stat.S_ISREG(os.fstat(file.fileno()).st_mode)

    def put(self, rows: Iterable[object]) -> None:
        """Write rows, and wait until they are on the disk; a pipe or a device has none."""
        try:
            _write_all(self._file, b"".join(map(json_line, rows)))
            if self._on_disk:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from error


@contextmanager
def sink(target: str, *, append: bool, private: bool = False) -> Generator[Sink]:
    """Open what was named; a file is begun anew unless something goes on in it.

    A new file is for its owner alone; one that was there before becomes so if it is to be `private`.
    """
    if target == OUTPUT:
        yield Printed()
        return
    try:
        cut_short = append and _cut_short(Path(target))
        how = os.O_APPEND if append else os.O_TRUNC
        file = FileIO(os.open(target, os.O_WRONLY | os.O_CREAT | how, 0o600), "wb")
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from error
    with file:
        if private and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
        if cut_short:
            _write_all(file, b"\n")
        yield Kept(file, target)


def write_private(path: str, text: str) -> None:
    """Write a whole file that only its owner may read."""
    try:
        with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
            _write_all(file, text.encode())
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _write_all(file: FileIO, data: bytes) -> None:
    """Write without a buffer: what could not be written must not be tried once more when the file is closed."""
    while data:
        data = data[file.write(data) :]


def _cut_short(path: Path) -> bool:
    """Tell whether a crash cut the last line of a file short: it has to end, or it spoils the next one."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _unwritable(path: str, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"{path!r} cannot be written: {why or error}.")
