"""Files below a folder. Nothing outside the folder is read."""

import errno
import os
import stat
from pathlib import Path

from halter.config.yaml_reader import MAX_BYTES


class UnusableFile(Exception):
    """A file cannot be used. The message is the end of a sentence about the file."""


def read_folder_file(folder: Path, name: str) -> bytes | None:
    """Read a file below a folder. Returns None if it does not exist."""
    path = _resolve_inside(folder, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnusableFile("is not a file")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableFile(f"cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise UnusableFile(f"is larger than {MAX_BYTES:,} bytes")
    return data


def _resolve_inside(folder: Path, name: str) -> Path:
    try:
        root = folder.resolve()
        path = resolve_links(root / name)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnusableFile("is not a valid file name") from error
    if not path.is_relative_to(root):
        raise UnusableFile("leads out of the agent's folder")
    return path


def resolve_links(path: Path) -> Path:
    """Resolve a path, which need not exist. A loop of links raises OSError, or RuntimeError before Python 3.13."""
    try:
        return path.resolve(strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return path.resolve()


def decode_file_text(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnusableFile(f"is not UTF-8 text in line {line}; save it as UTF-8") from None
    if "\0" in text:
        raise UnusableFile(
            f"contains a NUL character in line {text.count(chr(10), 0, text.index(chr(0))) + 1}; remove it"
        )
    return text
