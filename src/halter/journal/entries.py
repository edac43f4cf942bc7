"""Chunks as the stores index them: each with its words, made once and the same for all."""

from collections.abc import Iterable, Sequence

import msgspec

from halter.core.library import Chunk, words
from halter.core.text import clean


class Entry(msgspec.Struct, frozen=True):
    """A chunk and the words by which it is found."""

    chunk: Chunk
    words: tuple[str, ...]


def entries(document: str, chunks: Iterable[Chunk]) -> list[Entry]:
    """Make chunks fit for every database. They belong to the document named, and are numbered as they come."""
    return [
        Entry(
            msgspec.structs.replace(chunk, document=document, number=number, text=clean(chunk.text)), words(chunk.text)
        )
        for number, chunk in enumerate(chunks)
    ]


def for_fts5(wanted: Sequence[str], *, every: bool) -> str:
    """Ask for words the way FTS5 reads it. They hold letters and digits only, so nothing has to be escaped."""
    return (" AND " if every else " OR ").join(f'"{word}"' for word in wanted)


def for_tsquery(wanted: Sequence[str], *, every: bool) -> str:
    """Ask for words the way PostgreSQL reads it."""
    return (" & " if every else " | ").join(f"'{word}'" for word in wanted)


def for_tsvector(found: Sequence[str]) -> str:
    """Write words and their places the way PostgreSQL reads it."""
    return " ".join(f"'{word}':{place}" for place, word in enumerate(found, 1))
