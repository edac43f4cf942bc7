"""Files on disk: which there are, what is in them, and the digest that names what is in them. All of this blocks."""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from halter.core.folders import Files, in_words, look
from halter.core.library import Unreadable
from halter.core.protected import Refuses, unrefused
from halter.core.text import clean

MOST_BYTES: Final = 50 * 1024 * 1024
_PORTION: Final = 1 << 20


class Taken(msgspec.Struct, frozen=True):
    """The bytes of a file, and their digest, by which the document is known from now on."""

    data: bytes
    digest: str


class _Trouble(Exception):
    """What is wrong with a file, on the way to being an answer."""


def scan(folder: Path, pattern: str) -> Files | Unreadable:
    """List the files of a folder that a pattern names, by their paths in it, without those that links lead out to."""
    found = look(folder, pattern)
    return found if isinstance(found, Unreadable) else found.files


def take(path: Path, most: int = MOST_BYTES, refuses: Refuses = unrefused) -> Taken | Unreadable:
    """Read a whole file, unless it is too large, is being written to meanwhile, or somebody refuses it."""
    try:
        with _opened(path, refuses) as (file, size):
            if size > most:
                return Unreadable(
                    f"{_name(path)} has {size:,} bytes, and a document may have {most:,}: split it, or leave it out."
                )
            data = b"".join(_portions(file, most + 1))
            digest = sha256(data).hexdigest()
            _refuse_other_bytes(path, digest, _digest(file, most + 1))
    except _Trouble as trouble:
        return Unreadable(str(trouble))
    return Taken(data, digest)


def file_digest(path: Path, refuses: Refuses = unrefused) -> str | Unreadable:
    """Work out the digest of a file of any size, in little memory."""
    try:
        with _opened(path, refuses) as (file, size):
            digest = _digest(file, size + 1)
            _refuse_other_bytes(path, digest, _digest(file, size + 1))
    except _Trouble as trouble:
        return Unreadable(str(trouble))
    return digest


@contextmanager
def _opened(path: Path, refuses: Refuses) -> Generator[tuple[int, int]]:
    """Open a plain file for one reading of all of it. What changes until it is closed was not read as it is."""
    try:
        # A pipe that nobody writes to would be waited for.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if refuses(path, file):
                raise _Trouble(f"{_name(path)} leads to what an agent may not read.")
            before = os.fstat(file)
            _refuse_other(path, before.st_mode)
            yield file, before.st_size
            after = os.fstat(file)
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        raise _Trouble(f"{_name(path)} is not there, or not any more.") from None
    except (OSError, ValueError) as error:
        why = in_words(error) if isinstance(error, OSError) else clean(str(error))
        raise _Trouble(f"{_name(path)} cannot be read: {why}.") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _changed(path)


def _refuse_other(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise _Trouble(f"{_name(path)} is a folder: name a file in it.")
    if not stat.S_ISREG(mode):
        raise _Trouble(f"{_name(path)} is no plain file.")


def _refuse_other_bytes(path: Path, first: str, second: str) -> None:
    """Refuse a file that reads otherwise the second time: its time of change is too coarse to tell of every change."""
    if first != second:
        raise _changed(path)


def _changed(path: Path) -> _Trouble:
    return _Trouble(f"{_name(path)} was changed while it was read: it is read again when it has come to rest.")


def _digest(file: int, most: int) -> str:
    digest = sha256()
    for portion in _portions(file, most):
        digest.update(portion)
    return digest.hexdigest()


def _portions(file: int, most: int) -> Generator[bytes]:
    """Read from the beginning to the end; of a file that grows while it is read, no more than this."""
    os.lseek(file, 0, os.SEEK_SET)
    while most > 0 and (portion := os.read(file, min(_PORTION, most))):
        most -= len(portion)
        yield portion


def _name(path: Path) -> str:
    return clean(path.name)
