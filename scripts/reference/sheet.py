"""Heads and tables of the reference pages."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

NOTHING: Final = "\N{EN DASH}"
"""Content of an empty cell."""


def head(title: str, source: str, *paragraphs: str) -> str:
    """Render the head of a page: its source, title and introduction."""
    comment = f"<!-- Made from {source} by `make docs`; a change here would be lost. -->"
    return "\n\n".join((comment, f"# {title}", *paragraphs)) + "\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table, with cells on one line and escaped bars."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join(lines + [f"| {' | '.join(cell(each) for each in row)} |" for row in rows]) + "\n"


def cell(text: str) -> str:
    """Format text for a cell."""
    return " ".join(text.split()).replace("|", "\\|") or NOTHING


def code(text: object) -> str:
    """Format a word as code."""
    return f"`{text}`"


def told(docstring: str | None) -> str:
    """Parse a docstring into paragraphs, each on one line."""
    paragraphs = re.split(r"\n\s*\n", (docstring or "").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
