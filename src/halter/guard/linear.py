"""Regular expressions in linear time, over bytes: RE2 behind the two questions that are asked of it."""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any, Final

MEMORY: Final = 64 << 20
"""What one automaton may use before it forgets its states; most need a hundredth of it."""

_ASCII: Final = 128


class Regex:
    """A compiled pattern in which a byte is a character, whatever its value.

    It asks the C++ object behind the package's drop-in replacement for `re`: that one makes a generator and a match
    object for every question, which is two thirds of the time where a hostile text is full of matches.
    """

    __slots__ = ("_match", "_searching", "_starting")

    def __init__(self, pattern: bytes) -> None:
        re2: Any = import_module("re2._re2").RE2
        compiled = re2(pattern, _options(re2))
        if not compiled.ok():
            # The pattern itself may be made of a secret.
            raise ValueError(f"A pattern of {len(pattern)} bytes cannot be used: {compiled.error().decode()}.")
        self._match = compiled.Match
        self._searching = re2.Anchor.UNANCHORED
        self._starting = re2.Anchor.ANCHOR_START

    def search(self, text: bytes, start: int, end: int) -> tuple[int, int] | None:
        """Find the first match that lies between two places."""
        span: tuple[int, int] = self._match(self._searching, text, start, end)[0]
        return None if span[0] < 0 else span

    def match(self, text: bytes, start: int, end: int) -> int:
        """Tell where the match ends that begins at a place, or -1."""
        span: tuple[int, int] = self._match(self._starting, text, start, end)[0]
        return span[1]


class RegexSet:
    """Many patterns, of which it can be told which match where a text begins."""

    __slots__ = ("_set",)

    def __init__(self, patterns: Iterable[bytes]) -> None:
        module: Any = import_module("re2._re2")
        self._set = module.Set(module.RE2.Anchor.ANCHOR_START, _options(module.RE2))
        for pattern in patterns:
            self._set.Add(pattern)
        self._set.Compile()

    def match(self, text: bytes) -> list[int]:
        """Tell the numbers of the patterns that match."""
        return self._set.Match(text)


def _options(re2: Any) -> Any:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = MEMORY
    options.never_capture = True
    options.log_errors = False
    return options


@cache
def compiled(pattern: bytes) -> Regex:
    """Compile a pattern of this program's own, once."""
    return Regex(pattern)


def any_of(patterns: Iterable[bytes]) -> bytes:
    """Join patterns; of two that match at one place, the first counts."""
    return b"|".join(b"(?:" + pattern + b")" for pattern in patterns)


def escaped(text: bytes) -> bytes:
    """Spell bytes so that every one stands for itself in a pattern."""
    return b"".join(bytes([byte]) if byte < _ASCII and chr(byte).isalnum() else b"\\x%02x" % byte for byte in text)
