"""Finding configured names in a text: whole words, however they are capitalised, in any script.

All names become one pattern that shares their beginnings, so that a thousand names take hardly longer than one.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

_BEFORE: Final = r"(?<![^\W_])"
_AFTER: Final = r"(?![^\W_])"
_GAP: Final = r"\s{1,4}"
_UNSPACED: Final = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Letters of scripts that put no space between words, or hang particles on them: there a name has no edge."""

_END: Final = ""
_Trie = dict[str, Any]


class Names(NamedTuple):
    """Two patterns: for names as they are, and for those that JSON spells otherwise."""

    plain: re.Pattern[str] | None
    spelled: re.Pattern[str] | None


@lru_cache(maxsize=64)
def compiled(names: tuple[str, ...]) -> Names:
    """Compile the names of an agent; blank ones name nobody."""
    meant = sorted({form for name in names if name.strip() for form in _forms(name.strip())})
    written = {spelled for name in meant for spelled in _spellings(name) if spelled != name}
    return Names(_pattern(meant), _pattern(sorted(written)))


def _spellings(name: str) -> tuple[str, str]:
    return json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1]


def _forms(name: str) -> set[str]:
    """An accent may be a part of its letter, or stand behind it."""
    return {name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)}


def _pattern(names: Sequence[str]) -> re.Pattern[str] | None:
    if not names:
        return None
    trie: _Trie = {}
    for name in sorted(names, key=len, reverse=True):
        here = trie
        for token in _tokens(name):
            here = here.setdefault(token, {})
        here[_END] = {}
    return re.compile(_joined(trie))


def _tokens(name: str) -> list[str]:
    """Take a name apart into what matches each of its letters, with an edge where there has to be one."""
    words = [[_letter(letter) for letter in word] for word in name.split()]
    letters = [token for word in words for token in (_GAP, *word)][1:]
    return [*_edge(_BEFORE, name[0]), *letters, *_edge(_AFTER, name[-1])]


def _edge(edge: str, letter: str) -> Iterable[str]:
    return (edge,) if letter.isalnum() and not _UNSPACED.match(letter) else ()


def _letter(letter: str) -> str:
    cases = {letter, letter.lower(), letter.upper(), letter.title()}
    cases |= {"ς"} if "σ" in cases else set[str]()
    single = sorted(case for case in cases if len(case) == 1)
    return re.escape(letter) if len(single) == 1 else f"[{''.join(single)}]"


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
