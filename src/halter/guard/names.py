"""Finding configured names in a text: whole words, however they are capitalised, in any script.

All names are one automaton, which is built once for an agent and takes time in proportion to the text, however many
names there are. It knows nothing of the edges of words: they are looked at where a name was found.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from halter.core.text import to_body
from halter.guard.linear import Regex, RegexSet, any_of, escaped

_RANGES: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
)
_EDGED: Final = re.compile(rf"[^\W_{_RANGES}]")
"""Letters of words with edges. Other scripts put no space between words, or hang particles on them."""

_BREAK: Final = re.compile(rb"\\(?:[nrtbf]|u00[aA]0|u20[0-9a-fA-F]{2})\Z")
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ENDS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_BLANK: Final = (
    rb"[\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
)
_GAP: Final = rb"(?:" + _BLANK + rb"){1,4}"
_ESCAPED_GAP: Final = rb"(?:" + _BLANK + rb"|\\[nrt]|\\u00[aA]0){1,4}"
_NEAR: Final = 8
_LONGEST: Final = 4096


class Names(NamedTuple):
    """The names of an agent as they are, and between quotes, as JSON and programs write them."""

    plain: "Matcher | None"
    escaped: "Matcher | None"
    shortest: int


class Matcher:
    """Finds names in text encoded by `to_body`. With `unescape`, what was found is read as it stands between quotes."""

    def __init__(self, patterns: Sequence[bytes], *, nested: bool, unescape: bool) -> None:
        self._patterns = patterns
        self._any = Regex(any_of(patterns))
        self._nested = nested
        self._unescape = unescape
        self._which: RegexSet | None = None

    def find(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Find names in order, never overlapping; of two that begin at one place, the longer one."""
        at, end = 0, len(data)
        while (match := self._any.search(data, at, end)) is not None:
            start = match[0]
            stop = match[1] if self._has_edges(data, *match) else self._shorter(data, start) if self._nested else -1
            if stop >= 0:
                yield start, stop
            at = stop if stop >= 0 else start + 1

    def _shorter(self, data: bytes, start: int) -> int:
        """Find a name that is the beginning of another one, where the other one does not end with its word."""
        self._which = self._which or RegexSet(self._patterns)
        for index in sorted(self._which.match(data[start : start + _LONGEST])):
            stop = Regex(self._patterns[index]).match(data, start, len(data))
            if stop >= 0 and self._has_edges(data, start, stop):
                return stop
        return -1

    def _has_edges(self, data: bytes, start: int, stop: int) -> bool:
        """Tell whether a name stands by itself, as far as its first and last letter ask for that."""
        name = data[start:stop].decode("utf-8", "surrogatepass")
        name = unescaped(name) if self._unescape else name
        before, after = data[max(0, start - _NEAR) : start], data[stop : stop + _NEAR]
        if _EDGED.match(name[-1]) and _EDGED.match(after.decode("utf-8", "replace")[:1]):
            return False
        if not _EDGED.match(name[0]) or not _EDGED.match(before.decode("utf-8", "replace")[-1:]):
            return True
        return self._unescape and _BREAK.search(before) is not None


@lru_cache(maxsize=256)
def compiled(names: tuple[str, ...]) -> Names:
    """Compile the names of an agent, once, when it is assembled; blank ones name nobody."""
    meant = {form for name in names if name.strip() for form in _forms(name.strip())}
    if not meant:
        return Names(None, None, _LONGEST)
    longest_first = sorted(meant, key=lambda name: (-len(name), name))
    nested = _nested(meant)
    plain = [_pattern(name, _GAP, _letter) for name in longest_first]
    quoted = [_pattern(name, _ESCAPED_GAP, _escaped_letter) for name in longest_first]
    return Names(
        Matcher(plain, nested=nested, unescape=False),
        Matcher(quoted, nested=nested, unescape=True),
        min(map(len, meant)),
    )


def _forms(name: str) -> set[str]:
    """An accent may be a part of its letter, or stand behind it."""
    return {name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)}


def _nested(names: set[str]) -> bool:
    """Tell whether any name is the beginning of another one."""
    folded = sorted({" ".join(name.split()).casefold() for name in names})
    # In order, whatever begins with a name stands right behind it.
    return any(later.startswith(name) for name, later in pairwise(folded))


def _pattern(name: str, gap: bytes, letter: Callable[[str], bytes]) -> bytes:
    return gap.join(b"".join(map(letter, word)) for word in name.split())


def _cases(letter: str) -> list[str]:
    cases = {letter, letter.lower(), letter.upper(), letter.title()}
    cases |= {"ς"} if "σ" in cases else set[str]()
    return sorted(case for case in cases if len(case) == 1)


@lru_cache(maxsize=1024)
def _letter(letter: str) -> bytes:
    return b"(?:" + b"|".join(escaped(to_body(case)) for case in _cases(letter)) + b")"


@lru_cache(maxsize=1024)
def _escaped_letter(letter: str) -> bytes:
    """Match a letter as it stands between quotes: as it is, or escaped. A backslash is always escaped there."""
    if letter.isascii() and letter.isalnum():
        return _letter(letter)
    plain = () if letter == "\\" else (_letter(letter),)
    short = (rb"\\" + escaped(letter.encode()),) if letter in "\"'\\" else ()
    return b"(?:" + b"|".join((*plain, *short, *map(_escape, _cases(letter)))) + b")"


def _escape(letter: str) -> bytes:
    units = letter.encode("utf-16-be", "surrogatepass").hex().encode()
    short = b"".join(rb"\\u(?i:%s)" % units[at : at + 4] for at in range(0, len(units), 4))
    return rb"%s|\\U(?i:%08x)" % (short, ord(letter))


def unescaped(spelled: str) -> str:
    """Tell what a name is that was found between quotes."""
    plain = _ESCAPE.sub(lambda found: _ENDS.get(found[3], found[3]) or chr(int(found[1] or found[2], 16)), spelled)
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
