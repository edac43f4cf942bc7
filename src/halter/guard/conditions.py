"""What a rule says of single arguments: exactly this value, a command word by word, a folder, a host, or anything.

A wildcard stands only where a person wrote one. It matches a piece of one word: never a space, a slash, a sign that a
shell reads, an option, or a step up. A star that is meant as such is written `[*]`.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from halter.guard.commands import plain
from halter.guard.places import normal

STAR: Final = "*"
LITERAL_STAR: Final = "[*]"
PIECE: Final = r"[\w.,:=@%+-]+"
"""What a wildcard may match."""
_KEPT: Final = 200
"""So many characters of a value are kept to be shown."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_PARTS: Final = re.compile(r"(\[\*\]|\*)")


class Is(msgspec.Struct, frozen=True, tag="is", tag_field="by"):
    """The argument is exactly this value; `shown` is the beginning of it, for people."""

    key: str
    digest: str
    shown: str


class Argv(msgspec.Struct, frozen=True, tag="argv", tag_field="by"):
    """The argument is one plain command, whose words fit these one by one: as many, and no more."""

    key: str
    words: tuple[str, ...]


class Inside(msgspec.Struct, frozen=True, tag="inside", tag_field="by"):
    """The argument is a path in a folder, or the folder."""

    key: str
    folder: str


class Leads(msgspec.Struct, frozen=True, tag="leads", tag_field="by"):
    """The argument is a URL that leads to a host, encrypted and through the usual port; or it names the host itself."""

    key: str
    host: str


class Anything(msgspec.Struct, frozen=True, tag="anything", tag_field="by"):
    """The argument may be whatever it is: a person said so of this one."""

    key: str


Condition = Is | Argv | Inside | Leads | Anything


def exactly(key: str, value: Any) -> Is:
    """Ask for the value that an argument has now."""
    text = _text(value)
    return Is(key, _digest(text), text if len(text) <= _KEPT else f"{text[:_KEPT]}…")


def fits(condition: Condition, value: Any) -> bool:
    """Tell whether an argument, as JSON has it, is what a condition asks for."""
    match condition:
        case Is(_, digest):
            return _digest(_text(value)) == digest
        case Argv(_, words):
            return fits_words(words, argv_of(value))
        case Inside(_, folder):
            return isinstance(value, str) and is_inside(value, folder)
        case Leads(_, host):
            return isinstance(value, str) and leads_to(value, host)
        case Anything():
            return True


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def argv_of(value: Any) -> tuple[str, ...] | None:
    """Return the words of a value that is one plain command and nothing else."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in cast("Sequence[Any]", value)):
        return plain(tuple(cast("Sequence[str]", value)))
    return None


def fits_words(patterns: tuple[str, ...], words: tuple[str, ...] | None) -> bool:
    """Tell whether words fit patterns, one by one. The program itself has no wildcard."""
    if not patterns or words is None or len(words) != len(patterns) or STAR in patterns[0]:
        return False
    return all(fits_word(pattern, word) for pattern, word in zip(patterns, words, strict=True))


def fits_word(pattern: str, word: str) -> bool:
    """Tell whether one word fits a pattern."""
    if STAR not in pattern:
        return word == pattern
    if _compiled(pattern).fullmatch(word) is None or (word.startswith("-") and not pattern.startswith("-")):
        return False
    steps = zip(pattern.split("/"), word.split("/"), strict=True)
    return all(step not in {".", ".."} or step == written for written, step in steps)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = _PARTS.split(pattern)
    return re.compile("".join({STAR: PIECE, LITERAL_STAR: r"\*"}.get(part, re.escape(part)) for part in parts))


def literally(word: str) -> str:
    """Write a word as a pattern for just itself."""
    return word.replace(STAR, LITERAL_STAR)


def is_inside(path: str, folder: str) -> bool:
    """Tell whether a path is a folder or lies in it. One with a step up is not: a link could turn it elsewhere.

    Nor is a URL, which only looks like a path in the folder, or what a program could take for an option.
    """
    if not path.isprintable() or ".." in path.replace("\\", "/").split("/"):
        return False
    if _SCHEME.match(path) or path.startswith("-"):
        return False
    path, folder = normal(path), normal(folder)
    if folder == ".":
        return not path.startswith(("/", "~"))
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def leads_to(value: str, host: str) -> bool:
    """Tell whether a URL leads to a host; the host is compared as a whole."""
    return host_of(value) == host.lower().rstrip(".") != ""


def host_of(value: str) -> str | None:
    """Return the host that a URL surely leads to by TLS, or the host that a value names."""
    if not value.isascii() or not value.isprintable() or " " in value or "\\" in value:
        return None
    if "//" not in value:
        return value.lower().rstrip(".")
    try:
        parts = urlsplit(value)
        usual = parts.scheme == "https" and parts.port in {None, 443} and "@" not in parts.netloc
    except ValueError:
        return None
    return (parts.hostname or "").rstrip(".") if usual else None
