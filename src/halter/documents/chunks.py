"""Texts in overlapping chunks that end at paragraphs or sentences."""

import re
from typing import Final

CHUNK_SIZE: Final = 1200
CHUNK_OVERLAP: Final = 150

_PARAGRAPH: Final = re.compile(r"\n[ \t\r]?\n")
_SENTENCE: Final = re.compile(r"[.!?\u2026][\"')\]\u201d\u2019\u00bb]?(?=\s)|[\u3002\uff01\uff1f]|\n")
_SPACE: Final = re.compile(r"\s")


def split_into_chunks(text: str, size: int = CHUNK_SIZE, overlap: int = CHUNK_OVERLAP) -> tuple[tuple[int, int], ...]:
    """Split a text into overlapping, non-empty spans of at most `size` characters that cover the whole text."""
    overlap_size = min(overlap, (size - 1) // 3)
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        end = _find_end(text, start, size)
        spans.append((start, end))
        start = end if end == len(text) else _find_start(text, end - overlap_size, end)
    return tuple(spans)


def _find_end(text: str, start: int, size: int) -> int:
    """Find the end of a chunk in the second half of its size: after a paragraph, a sentence or a word."""
    limit = start + size
    if limit >= len(text):
        return len(text)
    earliest = start + (size + 1) // 2
    for pattern in (_PARAGRAPH, _SENTENCE, _SPACE):
        ends = [match.end() for match in pattern.finditer(text, earliest, limit)]
        if ends:
            return ends[-1]
    return limit


def _find_start(text: str, earliest: int, end: int) -> int:
    """Find the start of the next chunk within the overlap: at a sentence, or else at a word."""
    for pattern in (_SENTENCE, _SPACE):
        match = pattern.search(text, earliest, end)
        if match and match.end() < end:
            return match.end()
    return earliest
