"""What defines an agent, by one digest: its files, as they were when a session began."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from halter.config.load import MAX_BYTES

_BELOW: Final = ("playbooks", ".agents")


def definition_digest(folder: Path) -> str:
    """Name an agent's files by their names and contents: those in its folder itself, its playbooks and its skills.

    What lies in other folders is what it works on, and what is too large to be a definition counts by its size.
    """
    digest = hashlib.sha256(b"halter definition 1\n")
    for path in sorted(_files(folder), key=lambda found: found.as_posix()):
        name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        content = _content(path)
        digest.update(b"%d:%s%d:%s" % (len(name), name, len(content), content))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.is_file())
    for name in _BELOW:
        yield from (path for path in (folder / name).rglob("*") if path.is_file())


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        return path.read_bytes() if size <= MAX_BYTES else b"%d bytes" % size
    except OSError:
        return b"unreadable"
