"""Arguments that a person puts in place of those that were asked about."""

import sys
from pathlib import Path
from typing import Final

from halter.app.desk.decisions import arguments
from halter.cli.command import UNUSABLE, fail, saying_errors
from halter.core.ports import BLOB_FROM

INPUT: Final = "-"


def arguments_from(file: str) -> bytes:
    """Read arguments from a file or from the standard input: a JSON object."""
    try:
        data = sys.stdin.buffer.read(BLOB_FROM + 1) if file == INPUT else _content(Path(file))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        fail(f"{file!r} cannot be read: {why or error}.", UNUSABLE)
    return saying_errors(lambda: arguments(data, f" in {file!r}"))


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BLOB_FROM + 1)
