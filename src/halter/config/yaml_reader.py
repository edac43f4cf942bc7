"""Parses YAML into plain values, with a map of their lines.

Only mappings, lists, text, numbers, true, false and null are accepted. Aliases, tags and merge keys are rejected: a
small file with aliases can expand to gigabytes, and a tag can construct any object. Scalars follow YAML 1.2: `no` and
`12:30` are text.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.core.errors import ConfigError

if TYPE_CHECKING:
    # An agent that is defined in a program has no file and does not need this library.
    from yaml import MarkedYAMLError, events

KeyPath = tuple[str | int, ...]
Mistake = tuple[KeyPath, str]

MAX_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 32

_MAX_SENTENCE_LENGTH: Final = 1000


def escape_sentence(sentence: str) -> str:
    """Escape and shorten file content for a terminal."""
    short = sentence if len(sentence) <= _MAX_SENTENCE_LENGTH else f"{sentence[:_MAX_SENTENCE_LENGTH]}…"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in short)


class SourceMap(msgspec.Struct, frozen=True):
    """The lines of a file's keys by their paths, and the former names that were found in it, as sentences."""

    file: str
    lines: dict[KeyPath, int] = {}
    former_names: list[str] = []

    def at(self, path: KeyPath = ()) -> str:
        """Return the file and line of a value, or of its nearest parent."""
        for length in range(len(path), -1, -1):
            if (line := self.lines.get(path[:length])) is not None:
                return f"{self.file} line {line}"
        return self.file

    def rename(self, path: KeyPath, old: str, new: str) -> None:
        """Note that a key is written under a former name, and find its lines under the present one as well."""
        former_path = (*path, old)
        renamed_lines = {
            (*path, new, *key[len(former_path) :]): line
            for key, line in self.lines.items()
            if key[: len(former_path)] == former_path
        }
        self.lines.update(renamed_lines | self.lines)
        self.former_names.append(f"{self.at(former_path)}: `{old}` is now called `{new}`.")

    def error_at(self, path: KeyPath, sentence: str) -> ConfigError:
        return ConfigError(escape_sentence(f"{self.at(path)}: {sentence}"))


class Document(msgspec.Struct, frozen=True):
    value: Any
    source_map: SourceMap


def load_file(path: Path, display_name: str | None = None) -> Document:
    """Read a YAML file; `display_name` is its name in messages."""
    name = display_name or str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist. Create it, or name another file.") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}.") from error
    return load_bytes(data, name)


def load_bytes(data: bytes, file: str) -> Document:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES:,} bytes. Keep data out of configuration files.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file} line {line}: this is not UTF-8 text; save the file as UTF-8.") from None

    return YamlBuilder(file).build(text)


_INTEGER: Final = re.compile(r"[-+]?[0-9]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_VALUE_BY_WORD: Final[Mapping[str, bool | None]] = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_MAX_NUMBER_LENGTH: Final = 30


def _events(text: str) -> "Iterator[events.Event]":
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    while loader.check_event():
        yield loader.get_event()


class _Open:
    __slots__ = ("key", "path", "value")

    def __init__(self, path: KeyPath, value: "dict[str, Any] | list[Any]") -> None:
        self.path = path
        self.value = value
        self.key: str | None = None


class YamlBuilder:
    """Builds a document event by event, without recursion, so that no depth exhausts the stack."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._lines: dict[KeyPath, int] = {}
        self._open: list[_Open] = []
        self._documents = 0
        self._value: Any = None

    def build(self, text: str) -> Document:
        from yaml import MarkedYAMLError
        from yaml.reader import ReaderError

        try:
            for event in _events(text):
                self._handle_event(event)
        except MarkedYAMLError as error:
            raise self._unreadable(error, text) from None
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self._error_at(line, "this line contains a character that YAML does not allow; remove it.") from None
        if self._value is None:
            raise self._error_at(1, "the file is empty; write at least one key.")
        return Document(self._value, SourceMap(self._file, self._lines))

    def _error_at(self, line: int, sentence: str) -> ConfigError:
        return ConfigError(escape_sentence(f"{self._file} line {line}: {sentence}"))

    def _unreadable(self, error: "MarkedYAMLError", text: str) -> ConfigError:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        lines = text.splitlines()
        source_line = lines[line - 1] if line <= len(lines) else ""
        if "\t" in source_line[: len(source_line) - len(source_line.lstrip())]:
            return self._error_at(line, "this line starts with a tab; indent with spaces.")
        return self._error_at(line, f"this is not valid YAML: {error.problem or error.context or 'syntax error'}.")

    def _handle_event(self, event: "events.Event") -> None:
        from yaml import events

        line = event.start_mark.line + 1
        match event:
            case events.AliasEvent():
                raise self._error_at(line, "aliases (`*name`) are not supported; write the value out.")
            case events.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._error_at(line, "`---` starts a second document; keep one document per file.")
            case events.ScalarEvent():
                self._read_plain_scalar(event, line)
                self._scalar(event, line)
            case events.MappingStartEvent():
                self._read_plain_scalar(event, line)
                self._enter({}, line)
            case events.SequenceStartEvent():
                self._read_plain_scalar(event, line)
                self._enter([], line)
            case events.MappingEndEvent() | events.SequenceEndEvent():
                self._open.pop()
            case _:
                pass

    def _read_plain_scalar(self, event: "events.NodeEvent", line: int) -> None:
        if event.anchor is not None:
            raise self._error_at(line, "anchors (`&name`) are not supported; write each value out.")
        if getattr(event, "tag", None) is not None:
            raise self._error_at(line, f"the tag `{getattr(event, 'tag', '')}` is not supported; remove it.")

    def _scalar(self, event: "events.ScalarEvent", line: int) -> None:
        container = self._open[-1] if self._open else None
        if container is not None and isinstance(container.value, dict) and container.key is None:
            if not event.value:
                raise self._error_at(line, "a key is empty; write a name before the colon.")
            path = (*container.path, event.value)
            if path in self._lines:
                raise self._error_at(
                    line, f"`{event.value}` is already set in line {self._lines[path]}; keep one of them."
                )
            container.key = event.value
            self._lines[path] = line
            return
        self._add_value(self._resolve_scalar(event, line), line)

    def _enter(self, value: "dict[str, Any] | list[Any]", line: int) -> None:
        if self._open and isinstance(self._open[-1].value, dict) and self._open[-1].key is None:
            raise self._error_at(line, "a key must be a plain name, not a mapping or a list.")
        if len(self._open) >= MAX_DEPTH:
            raise self._error_at(line, f"values are nested more than {MAX_DEPTH} levels deep; reduce the nesting.")
        self._open.append(_Open(self._add_value(value, line), value))

    def _add_value(self, value: Any, line: int) -> KeyPath:
        if not self._open:
            self._value = value
            path: KeyPath = ()
        else:
            path = self._insert_value(self._open[-1], value)
        self._lines.setdefault(path, line)
        return path

    def _insert_value(self, container: _Open, value: Any) -> KeyPath:
        if isinstance(container.value, list):
            container.value.append(value)
            return (*container.path, len(container.value) - 1)
        key, container.key = container.key or "", None
        container.value[key] = value
        return (*container.path, key)

    def _resolve_scalar(self, event: "events.ScalarEvent", line: int) -> str | int | float | bool | None:
        text: str = event.value
        if not event.implicit[0]:
            return text
        if text in _VALUE_BY_WORD:
            return _VALUE_BY_WORD[text]
        if not _FLOAT.fullmatch(text):
            return text
        number = int(text) if _INTEGER.fullmatch(text) and len(text) <= _MAX_NUMBER_LENGTH else float(text)
        if not math.isfinite(number):
            raise self._error_at(line, f"the number {text[:_MAX_NUMBER_LENGTH]} is too large.")
        return number
