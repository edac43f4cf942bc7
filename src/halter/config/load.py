"""Files of configuration into plain values, each of which remembers its line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""The way to a value from the top of its file: keys of mappings and places in lists."""
Wrong = tuple[KeyPath, str]
"""The way to a value, and a sentence about it."""

MAX_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 32

_LONGEST_SENTENCE: Final = 1000


def showable(sentence: str) -> str:
    """Keep what a file says from steering the terminal that shows it, or from filling it."""
    short = sentence if len(sentence) <= _LONGEST_SENTENCE else f"{sentence[:_LONGEST_SENTENCE]}…"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in short)


class Places(msgspec.Struct, frozen=True):
    """Where each value of a file stands."""

    file: str
    lines: Mapping[KeyPath, int] = {}

    def at(self, path: KeyPath = ()) -> str:
        """Name the file, and the line of a value or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            if (line := self.lines.get(path[:length])) is not None:
                return f"{self.file} line {line}"
        return self.file

    def wrong(self, path: KeyPath, sentence: str) -> ConfigError:
        """Make an error of a sentence about a value."""
        return ConfigError(showable(f"{self.at(path)}: {sentence}"))


class Document(msgspec.Struct, frozen=True):
    """What a file says, and where."""

    value: Any
    places: Places


def load_file(path: Path, shown: str | None = None) -> Document:
    """Read a YAML file; `shown` is the name that sentences call it by."""
    name = shown or str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name} is missing: write it, or name another one.") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}.") from error
    return load_bytes(data, name)


def load_bytes(data: bytes, file: str) -> Document:
    """Read YAML of any origin."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES:,} bytes: keep data out of configuration.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file} line {line}: this is not UTF-8 text; save the file as UTF-8.") from None
    # What has no files to read need not wait for PyYAML.
    from halter.config.building import Builder

    return Builder(file).build(text)
