"""Documents as everybody speaks of them: what was read of a file, its pieces, and the words by which they are found."""

import re
import unicodedata
from typing import Final, Literal

import msgspec

MOST_LETTERS: Final = 40
"""So many letters of a word count; what is longer is no word that anybody would look for whole."""

MOST_WORDS: Final = 5_000
"""So many words of one piece of text can be found: far more than a chunk has, and few enough for every database."""

MOST_ASKED: Final = 32
"""So many words of a query count. Who pastes a whole page finds what its beginning finds."""

DocumentKind = Literal["text", "markdown", "html", "pdf"]

# Scripts that are written without spaces: each of their characters is a word.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD: Final = f"(?:(?![{_UNSPACED}])[^\\W_])+|(?![\\W_])[{_UNSPACED}]"
"""What is one word, as a pattern."""

_FOREIGN: Final = re.compile("[^\x00-\x7f]+")


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a document, from one offset in its text to another. A document is named by the digest of its file."""

    document: str
    number: int
    start: int
    end: int
    text: str


class Extracted(msgspec.Struct, frozen=True, tag=True):
    """The text of a file. `pages` are the offsets at which its pages begin, where it has pages."""

    text: str
    kind: DocumentKind
    pages: tuple[int, ...] = ()


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """What could not be read: a sentence that says what is wrong, and what to do about it."""

    sentence: str


class Found(msgspec.Struct, frozen=True):
    """A chunk that a query found; the higher its rank, the better it fits. Ranks of different stores do not compare."""

    document: str
    number: int
    start: int
    end: int
    text: str
    rank: float


def folded(text: str) -> str:
    """Write a text as it is compared: without capitals, accents and the many forms of the same letter."""
    if text.isascii():
        return text.lower()
    return _FOREIGN.sub(_without_marks, unicodedata.normalize("NFKD", text)).casefold()


def _without_marks(found: re.Match[str]) -> str:
    return "".join(letter for letter in found[0] if unicodedata.category(letter)[0] != "M")


def words(text: str) -> tuple[str, ...]:
    """List the words of a text as every store indexes them and looks for them: letters and digits, and nothing else.

    Stores are given these words rather than the text, so that no tokenizer of theirs decides what is found.
    """
    found: list[str] = []
    for match in re.finditer(WORD, folded(text)):
        found.append(match[0][:MOST_LETTERS])
        if len(found) == MOST_WORDS:
            break
    return tuple(found)


def asked_words(query: str) -> tuple[str, ...]:
    """List the words that a query asks for, each once."""
    return tuple(dict.fromkeys(words(query)))[:MOST_ASKED]
