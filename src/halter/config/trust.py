"""Code in an agent's folder runs only after a person trusted it, once per digest.

What is covered is what could run: Python in all its forms, scripts, and the file that names MCP servers' commands.
A changed, added or removed file is another digest, and another digest is not trusted. Compiled Python counts too,
since Python prefers it to its source: whoever loads trusted code must not write bytecode beside it.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import Digest

COMMANDS: Final = frozenset((".mcp.json",))
CODE: Final = frozenset((".py", ".pyc", ".pth", ".so", ".sh", ".bash", ".js", ".mjs", ".cjs", ".ts"))
MAX_BYTES: Final = 50_000_000
MAX_FILES: Final = 5_000
_SKIPPED: Final = frozenset((".git", ".venv", "node_modules"))
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def folder_digest(folder: Path) -> Digest:
    """Name the code in a folder by its file names and contents; a ConfigError where that cannot be told."""
    digest = hashlib.sha256(b"halter folder 1\n")
    left = MAX_BYTES
    for count, path in enumerate(sorted(_code(folder), key=lambda found: found.as_posix())):
        content = _content(path, left)
        left -= len(content)
        if left < 0 or count >= MAX_FILES:
            raise ConfigError(f"{folder} holds too much code to be looked at: keep an agent's folder small.")
        name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        digest.update(b"%d:%s%d:" % (len(name), name, len(content)))
        digest.update(content)
    return Digest(digest.hexdigest())


def holds_code(folder: Path) -> bool:
    """Tell whether anything in a folder could run."""
    return any(_code(folder))


def _code(folder: Path) -> Iterator[Path]:
    """Find what could run. A link may lead to code that changes unseen, so none is followed and none accepted."""
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the agent's folder itself.")
    for parent, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                raise ConfigError(f"{path} is a symbolic link: put the file itself into the agent's folder.")
        yield from (Path(parent, name) for name in files if name in COMMANDS or Path(name).suffix in CODE)


def _unreadable(error: OSError) -> None:
    raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _content(path: Path, most: int) -> bytes:
    """Read a file without following a link that was put there meanwhile, and without waiting for a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


class Trusted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who trusted which code, and when."""

    digest: str
    by: str
    at: int


class Trust:
    """The folders whose code people trusted, in a file that only its owner may read and write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_trusted(self, folder: Path, digest: str) -> bool:
        """Tell whether a person trusted exactly this code in this folder."""
        found = self.folders().get(_key(folder))
        return found is not None and found.digest == digest

    def trust(self, folder: Path, digest: str, by: str, at: int) -> None:
        """Note that a person trusts this code in this folder, and no longer the code that was there before."""
        self._write({**self.folders(), _key(folder): Trusted(digest, by, at)})

    def distrust(self, folder: Path) -> None:
        """Forget that a folder was trusted."""
        self._write({key: found for key, found in self.folders().items() if key != _key(folder)})

    def folders(self) -> Mapping[str, Trusted]:
        """List what is trusted, by folder."""
        try:
            if self._path.stat().st_mode & _OTHERS_MAY_WRITE:
                raise ConfigError(f"Others may write to {self._path}: look through it, then run chmod 600 on it.")
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror or error}.") from error
        try:
            return msgspec.json.decode(data, type=dict[str, Trusted])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} is damaged ({error}): remove it, and trust each folder again.") from None

    def _write(self, folders: Mapping[str, Trusted]) -> None:
        """Replace the file as a whole, so that no reader ever sees half of it."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._path, msgspec.json.format(msgspec.json.encode(folders, order="sorted")))
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror or error}.") from error


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".trust-", delete=False) as file:
        written = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written.replace(path)
        except OSError:
            written.unlink(missing_ok=True)
            raise


def _key(folder: Path) -> str:
    return str(folder.resolve())
