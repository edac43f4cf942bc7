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
_UNSPACED: Final = re.compile(f"[{_RANGES}]")
"""Letters of scripts that put no space between words, or hang particles on them: there a name has no edge."""

_WORD: Final = rf"[^\W_{_RANGES}]"
_BREAK: Final = r"(?<=\\[nrtbf])|(?<=\\u00[aA]0)|(?<=\\u20[0-9a-fA-F]{2})"
_ALWAYS_ESCAPED: Final = frozenset('"\\')


class Spelling(NamedTuple):
    """How a text may write what is in a name."""

    before: str
    after: str
    gap: str
    letter: Callable[[str], str]


_END: Final = ""
_Trie = dict[str, Any]


class Names(NamedTuple):
    """Two patterns: for names as they are, and for names as JSON spells them."""

    plain: re.Pattern[str] | None
    spelled: re.Pattern[str] | None


@lru_cache(maxsize=64)
def compiled(names: tuple[str, ...]) -> Names:
    """Compile the names of an agent; blank ones name nobody."""
    meant = {form for name in names if name.strip() for form in _forms(name.strip())}
    longest_first = sorted(meant, key=lambda name: (-len(name), name))
    return Names(_pattern(longest_first, _PLAIN), _pattern(longest_first, _JSON))


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
    return (edge,) if letter.isalnum() and not _UNSPACED.match(letter) else ()


def _cases(letter: str) -> list[str]:
    cases = {letter, letter.lower(), letter.upper(), letter.title()}
    cases |= {"ς"} if "σ" in cases else set[str]()
    return sorted(case for case in cases if len(case) == 1)


def _letter(letter: str) -> str:
    cases = _cases(letter)
    return re.escape(letter) if len(cases) == 1 else f"[{''.join(cases)}]"


def _json_letter(letter: str) -> str:
    """Match a letter as JSON writes it: as it is, where that may be, or escaped."""
    if letter.isascii() and letter.isalnum():
        return _letter(letter)
    plain = rf"\\{re.escape(letter)}" if letter in _ALWAYS_ESCAPED else _letter(letter)
    return f"(?:{'|'.join((plain, *map(_escaped, _cases(letter))))})"


def _escaped(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    digits = "".join(digit if digit.isdigit() else f"[{digit}{digit.upper()}]" for digit in units[:4])
    rest = "".join(digit if digit.isdigit() else f"[{digit}{digit.upper()}]" for digit in units[4:])
    return rf"\\u{digits}" + (rf"\\u{rest}" if rest else "")


_PLAIN: Final = Spelling(f"(?<!{_WORD})", f"(?!{_WORD})", r"\s{1,4}", _letter)
_JSON: Final = Spelling(f"(?:(?<!{_WORD})|{_BREAK})", f"(?!{_WORD})", r"(?:\s|\\[nrt]|\\u00[aA]0){1,4}", _json_letter)


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
