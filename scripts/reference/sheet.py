"""How the pages are written: their heads, and tables."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

NOTHING: Final = "\N{EN DASH}"
"""What stands in a cell that has nothing to say."""


def head(title: str, source: str, *paragraphs: str) -> str:
    """Begin a page: its title, where it comes from, and what there is to know first."""
    made = f"<!-- Made from {source} by `make docs`; a change here would be lost. -->"
    return "\n\n".join((made, f"# {title}", *paragraphs)) + "\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table; a cell stays on its line, and a bar in it does not end it."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join(lines + [f"| {' | '.join(cell(each) for each in row)} |" for row in rows]) + "\n"


def cell(text: str) -> str:
    """Make text fit for a cell."""
    return " ".join(text.split()).replace("|", "\\|") or NOTHING


def code(text: object) -> str:
    """Write a word of the code."""
    return f"`{text}`"


def told(docstring: str | None) -> str:
    """Take a docstring as text: its paragraphs, each on one line."""
    paragraphs = re.split(r"\n\s*\n", (docstring or "").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
