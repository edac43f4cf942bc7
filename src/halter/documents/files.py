"""Files of documents: their listing, their bytes, and their digest."""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from halter.core.ports import UnreadableFile
from halter.core.text import clean
from halter.system.folders import FileEntries, FileRefusal, allow_all, describe_os_error, scan_folder

MAX_DOCUMENT_BYTES: Final = 50 * 1024 * 1024
_PORTION: Final = 1 << 20


class DocumentBytes(msgspec.Struct, frozen=True):
    """The bytes of a file and their digest, which identifies the document."""

    data: bytes
    digest: str


class _FileProblem(Exception):
    """A problem with a file, converted to `UnreadableFile`."""


def scan_documents(folder: Path, pattern: str) -> FileEntries | UnreadableFile:
    """List the files of a folder that match a pattern, without links that lead out of it."""
    listing = scan_folder(folder, pattern)
    return listing if isinstance(listing, UnreadableFile) else listing.files


def read_document(
    path: Path, limit: int = MAX_DOCUMENT_BYTES, refuses: FileRefusal = allow_all
) -> DocumentBytes | UnreadableFile:
    """Read a whole file, unless it is too large, changes meanwhile, or is refused."""
    try:
        with _open_regular_file(path, refuses) as (file, size):
            if size > limit:
                return UnreadableFile(
                    f"{_name(path)} has {size:,} bytes; the limit is {limit:,}. Split it, or leave it out."
                )
            data = b"".join(_portions(file, limit + 1))
            digest = sha256(data).hexdigest()
            _reject_other_bytes(path, digest, _digest(file, limit + 1))
    except _FileProblem as error:
        return UnreadableFile(str(error))
    return DocumentBytes(data, digest)


def digest_file(path: Path, refuses: FileRefusal = allow_all) -> str | UnreadableFile:
    try:
        with _open_regular_file(path, refuses) as (file, size):
            digest = _digest(file, size + 1)
            _reject_other_bytes(path, digest, _digest(file, size + 1))
    except _FileProblem as error:
        return UnreadableFile(str(error))
    return digest


@contextmanager
def _open_regular_file(path: Path, refuses: FileRefusal) -> Generator[tuple[int, int]]:
    """Open a regular file and yield its descriptor and size. Raises if the file changes before it is closed."""
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if refuses(path, file):
                raise _FileProblem(f"{_name(path)} leads to a file that the agent may not read.")
            old_status = os.fstat(file)
            _reject_other(path, old_status.st_mode)
            yield file, old_status.st_size
            new_status = os.fstat(file)
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        raise _FileProblem(f"{_name(path)} does not exist, or was removed.") from None
    except (OSError, ValueError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else clean(str(error))
        raise _FileProblem(f"{_name(path)} cannot be read: {reason}.") from None
    if (old_status.st_size, old_status.st_mtime_ns) != (new_status.st_size, new_status.st_mtime_ns):
        raise _changed_error(path)


def _reject_other(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise _FileProblem(f"{_name(path)} is a folder: name a file in it.")
    if not stat.S_ISREG(mode):
        raise _FileProblem(f"{_name(path)} is not a regular file.")


def _reject_other_bytes(path: Path, first_digest: str, second_digest: str) -> None:
    """Reject a file that differs on a second read, since modification times are too coarse to detect every change."""
    if first_digest != second_digest:
        raise _changed_error(path)


def _changed_error(path: Path) -> _FileProblem:
    return _FileProblem(f"{_name(path)} changed while it was read. It is read again when it stops changing.")


def _digest(file: int, limit: int) -> str:
    digest = sha256()
    for portion in _portions(file, limit):
        digest.update(portion)
    return digest.hexdigest()


def _portions(file: int, limit: int) -> Generator[bytes]:
    """Read a file from the start in portions, up to `limit` bytes even if it grows."""
    os.lseek(file, 0, os.SEEK_SET)
    while limit > 0 and (portion := os.read(file, min(_PORTION, limit))):
        limit -= len(portion)
        yield portion


def _name(path: Path) -> str:
    return clean(path.name)
