"""Files beside an agent's file. Nothing outside of the agent's folder is read, whatever a file or a link says."""

import os
import stat
from pathlib import Path

from halter.config.load import MAX_BYTES


class Unreadable(Exception):
    """Why a file cannot be used, as the end of a sentence about it."""


def read_beside(folder: Path, name: str) -> bytes | None:
    """Read a file below a folder, or return None if there is none."""
    path = _inside(folder, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable("is not a file")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise Unreadable(f"is larger than {MAX_BYTES:,} bytes")
    return data


def _inside(folder: Path, name: str) -> Path:
    try:
        root = folder.resolve()
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise Unreadable("is not the name of a file") from error
    if not path.is_relative_to(root):
        raise Unreadable("leads out of the agent's folder")
    return path


def text_of(data: bytes) -> str:
    """Read the bytes of a file as text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"is not UTF-8 text in line {line}; save it as UTF-8") from None
    if "\0" in text:
        raise Unreadable(f"holds a NUL in line {text.count(chr(10), 0, text.index(chr(0))) + 1}; remove it")
    return text
