"""Output independent of its medium: sentences, facts and tables for a terminal, an HTML page or the dashboard."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from halter.core.text import clean


@dataclass(frozen=True, slots=True)
class Facts:
    """Named values, one per line; empty ones are left out."""

    title: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Listing:
    """A table. `right` names the columns of numbers, `long` those whose text may wrap.

    Without rows, `empty` is shown instead.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: str = ""
    long: str = ""
    empty: str = ""


Sheet = Sequence[Facts | Listing | str]

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
td { overflow-wrap: anywhere; white-space: pre-wrap; } td.number, th.number { text-align: right; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
""".strip()

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""A second line of defence: if escaping misses something, the browser neither runs nor fetches it."""


def render_html_page(title: str, sheet: Sheet) -> str:
    """Render a self-contained page. Every value passes `_escape`."""
    parts = "\n".join(_part(part) for part in sheet)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n<h1>{_escape(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def list_lines(sheet: Sheet) -> Iterator[str]:
    """Render a sheet as plain lines, for output without tables."""
    for part in sheet:
        match part:
            case str():
                yield part
            case Facts():
                yield from (f"{name}: {value}" for name, value in part.facts if value)
            case Listing() if part.rows:
                yield f"{part.title}:"
                yield from (" · ".join(cell for cell in row if cell) for row in part.rows)
            case Listing():
                yield from ([part.empty] if part.empty else [])


def _escape(text: str) -> str:
    return escape(clean(text), quote=True)


def _part(part: Facts | Listing | str) -> str:
    match part:
        case str():
            return f"<p>{_escape(part)}</p>"
        case Facts():
            rows = "\n".join(
                f"<dt>{_escape(name)}</dt><dd>{_escape(value)}</dd>" for name, value in part.facts if value
            )
            return f"{_heading(part.title)}<dl>\n{rows}\n</dl>"
        case Listing() if part.rows:
            return f"{_heading(part.title)}{_page_table(part)}"
        case Listing():
            return f"<p>{_escape(part.empty)}</p>" if part.empty else ""


def _heading(title: str) -> str:
    return f"<h2>{_escape(title)}</h2>\n" if title else ""


def _page_table(part: Listing) -> str:
    numbers = part.right.split()
    right = [name in numbers for name in part.columns]
    head = _row("th", part.columns, right)
    body = "\n".join(_row("td", row, right) for row in part.rows)
    return f"<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    attributes = (' class="number"' if number else "" for number in right)
    marked_cells = zip(cells, attributes, strict=True)
    return f"<tr>{''.join(f'<{tag}{attribute}>{_escape(cell)}</{tag}>' for cell, attribute in marked_cells)}</tr>"
