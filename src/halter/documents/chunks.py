"""Cutting a text into pieces that a model can read one by one: at the end of a paragraph or a sentence, if it can."""

import re
from typing import Final

SIZE: Final = 1200
OVERLAP: Final = 150

_PARAGRAPH: Final = re.compile(r"\n[ \t\r]?\n")
_SENTENCE: Final = re.compile(r"[.!?\u2026][\"')\]\u201d\u2019\u00bb]?(?=\s)|[\u3002\uff01\uff1f]|\n")
_SPACE: Final = re.compile(r"\s")


def chunked(text: str, size: int = SIZE, overlap: int = OVERLAP) -> tuple[tuple[int, int], ...]:
    """Cut a text into pieces of at most `size` characters, each of which begins a little before the last one's end.

    Together they cover all of the text, and none is empty.
    """
    back = min(overlap, (size - 1) // 3)
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        end = _end(text, start, size)
        found.append((start, end))
        start = end if end == len(text) else _beginning(text, end - back, end)
    return tuple(found)


def _end(text: str, start: int, size: int) -> int:
    """Find where a piece ends, in the second half of what it may hold."""
    most = start + size
    if most >= len(text):
        return len(text)
    least = start + (size + 1) // 2
    for sign in (_PARAGRAPH, _SENTENCE, _SPACE):
        ends = [match.end() for match in sign.finditer(text, least, most)]
        if ends:
            return ends[-1]
    return most


def _beginning(text: str, least: int, end: int) -> int:
    """Find where the next piece begins: with a sentence, or else with a word, of those that it repeats."""
    for sign in (_SENTENCE, _SPACE):
        match = sign.search(text, least, end)
        if match and match.end() < end:
            return match.end()
    return least
