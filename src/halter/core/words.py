"""The words of a text, as every store indexes and searches them."""

import re
import unicodedata
from typing import Final

MAX_WORD_LENGTH: Final = 40
"""Maximum number of letters of a word that are indexed."""

MAX_INDEXED_WORDS: Final = 5_000
"""Maximum number of indexed words of a text: more than any chunk has, and few enough for every database."""

MAX_QUERY_WORDS: Final = 32
"""Maximum number of words of a query."""

# Scripts without spaces: each character is a word.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD_PATTERN: Final = f"(?:(?![{_UNSPACED}])[^\\W_])+|(?![\\W_])[{_UNSPACED}]"

_FOREIGN: Final = re.compile("[^\x00-\x7f]+")


def fold_text(text: str) -> str:
    """Normalize a text for comparison: case, accents and compatibility forms."""
    if text.isascii():
        return text.lower()
    return _FOREIGN.sub(_strip_marks, unicodedata.normalize("NFKD", text)).casefold()


def _strip_marks(match: re.Match[str]) -> str:
    return "".join(letter for letter in match[0] if unicodedata.category(letter)[0] != "M")


def split_words(text: str) -> tuple[str, ...]:
    """Split a text into the words that every store indexes and searches: letters and digits only.

    Stores receive these words instead of the text, so that a store's own tokenizer does not affect the results.
    """
    words: list[str] = []
    for match in re.finditer(WORD_PATTERN, fold_text(text)):
        words.append(match[0][:MAX_WORD_LENGTH])
        if len(words) == MAX_INDEXED_WORDS:
            break
    return tuple(words)


def split_query_words(query: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(split_words(query)))[:MAX_QUERY_WORDS]
