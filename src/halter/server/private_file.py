"""A small JSON file that only its owner may read, replaced as a whole by one writer at a time."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError

_OTHERS_MAY: Final = stat.S_IRWXG | stat.S_IRWXO


class PrivateFile:
    """One file. Every method but `state` raises ConfigError where the file cannot be had."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """Return what is in it; None where there is no file."""
        try:
            if self.path.stat().st_mode & _OTHERS_MAY:
                raise ConfigError(f"Others may read {self.path}: run chmod 600 on it, and make new tokens.")
            return self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def write(self, content: object) -> None:
        """Replace the file; a temporary file is its owner's alone from the first moment."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=f".{self.path.name}-", delete=False) as file:
                _fill(Path(file.name), file.fileno(), msgspec.json.format(msgspec.json.encode(content)), self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}.") from error

    @contextmanager
    def alone(self) -> Generator[None]:
        """Keep others from changing the file meanwhile: of two changes, neither is lost."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}.") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def state(self) -> tuple[int, ...]:
        """Return what changes whenever the file does."""
        try:
            about = self.path.stat()
        except OSError:
            return ()
        return (about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_mode)


def _fill(written: Path, file: int, data: bytes, place: Path) -> None:
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(data)
        os.fsync(file)
        written.replace(place)
    except OSError:
        written.unlink(missing_ok=True)
        raise
