"""Finding configured names in a text: whole words, however they are capitalised, in any script.

All names become one pattern that shares their beginnings, so that a thousand names take hardly longer than one.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

_RANGES: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
)
_UNSPACED: Final = f"[{_RANGES}]"
"""Letters of scripts that put no space between words, or hang particles on them: there a name has no edge."""

_WORD: Final = rf"[^\W_{_RANGES}]"
_BREAK: Final = r"(?<=\\[nrtbf])|(?<=\\u00[aA]0)|(?<=\\u20[0-9a-fA-F]{2})"
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ENDS: Final = {"n": "\n", "r": "\r", "t": "\t"}


class Spelling(NamedTuple):
    """How a text may write what is in a name."""

    before: str
    after: str
    gap: str
    letter: Callable[[str], str]


_END: Final = ""
_Trie = dict[str, Any]


class Names(NamedTuple):
    """Two patterns: for names as they are, and for names between quotes, as JSON and programs write them."""

    plain: re.Pattern[str] | None
    escaped: re.Pattern[str] | None


@lru_cache(maxsize=64)
def compiled(names: tuple[str, ...]) -> Names:
    """Compile the names of an agent; blank ones name nobody."""
    meant = {form for name in names if name.strip() for form in _forms(name.strip())}
    longest_first = sorted(meant, key=lambda name: (-len(name), name))
    return Names(_pattern(longest_first, _PLAIN), _pattern(longest_first, _ESCAPED))


def _forms(name: str) -> set[str]:
    """An accent may be a part of its letter, or stand behind it."""
    return {name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)}


def _pattern(names: Sequence[str], spelling: Spelling) -> re.Pattern[str] | None:
    trie: _Trie = {}
    for name in names:
        here = trie
        for token in _tokens(name, spelling):
            here = here.setdefault(token, {})
        here[_END] = {}
    return re.compile(_joined(trie)) if trie else None


def _tokens(name: str, spelling: Spelling) -> list[str]:
    """Take a name apart into what matches each of its letters, with an edge where there has to be one."""
    words = [[spelling.letter(letter) for letter in word] for word in name.split()]
    letters = [token for word in words for token in (spelling.gap, *word)][1:]
    return [*_edge(spelling.before, name[0]), *letters, *_edge(spelling.after, name[-1])]


def _edge(edge: str, letter: str) -> Iterable[str]:
    return (edge,) if letter.isalnum() and not re.match(_UNSPACED, letter) else ()


def _cases(letter: str) -> list[str]:
    cases = {letter, letter.lower(), letter.upper(), letter.title()}
    cases |= {"ς"} if "σ" in cases else set[str]()
    return sorted(case for case in cases if len(case) == 1)


def _letter(letter: str) -> str:
    cases = _cases(letter)
    return re.escape(letter) if len(cases) == 1 else f"[{''.join(cases)}]"


def _escaped_letter(letter: str) -> str:
    """Match a letter as it stands between quotes: as it is, or escaped. A backslash is always escaped there."""
    if letter.isascii() and letter.isalnum():
        return _letter(letter)
    plain = () if letter == "\\" else (_letter(letter),)
    short = (rf"\\{re.escape(letter)}",) if letter in "\"'\\" else ()
    return f"(?:{'|'.join((*plain, *short, *map(_escape, _cases(letter))))})"


def _escape(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    short = "".join(rf"\\u{_digits(units[at : at + 4])}" for at in range(0, len(units), 4))
    return rf"{short}|\\U{_digits(f'{ord(letter):08x}')}"


def _digits(digits: str) -> str:
    return "".join(digit if digit.isdigit() else f"[{digit}{digit.upper()}]" for digit in digits)


def unescaped(spelled: str) -> str:
    """Tell what a name is that was found between quotes."""
    plain = _ESCAPE.sub(lambda found: _ENDS.get(found[3], found[3]) or chr(int(found[1] or found[2], 16)), spelled)
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


_PLAIN: Final = Spelling(f"(?<!{_WORD})", f"(?!{_WORD})", r"\s{1,4}", _letter)
_ESCAPED: Final = Spelling(
    f"(?:(?<!{_WORD})|{_BREAK})", f"(?!{_WORD})", r"(?:\s|\\[nrt]|\\u00[aA]0){1,4}", _escaped_letter
)


def _joined(trie: _Trie) -> str:
    """Write a trie as a pattern: the longer name first. What has only one way on needs no brackets."""
    written: list[str] = []
    while len(trie) == 1 and _END not in trie:
        token, trie = next(iter(trie.items()))
        written.append(token)
    if trie and set(trie) != {_END}:
        ways = [token + _joined(rest) for token, rest in trie.items() if token != _END]
        written.append(f"(?:{'|'.join(ways)}){'?' * (_END in trie)}")
    return "".join(written)
