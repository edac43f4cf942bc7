"""A sheet as one HTML file that needs nothing else, and in which no text is ever anything but text."""

from collections.abc import Sequence
from html import escape
from typing import Final

from halter.app.words.sheet import Facts, Listing, Sheet
from halter.core.text import clean

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
"""Whatever slipped through all the same, no browser would run it or fetch anything for it."""


def page(title: str, sheet: Sheet) -> str:
    """Write the whole page. Everything that is shown passes `_safe`."""
    parts = "\n".join(_part(part) for part in sheet)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n<h1>{_safe(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def _safe(text: str) -> str:
    return escape(clean(text), quote=True)


def _part(part: Facts | Listing) -> str:
    match part:
        case Facts():
            rows = "\n".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in part.facts if value)
            return f"{_heading(part.title)}<dl>\n{rows}\n</dl>"
        case Listing() if part.rows:
            return f"{_heading(part.title)}{_table(part)}"
        case Listing():
            return f"<p>{_safe(part.empty)}</p>" if part.empty else ""


def _heading(title: str) -> str:
    return f"<h2>{_safe(title)}</h2>\n" if title else ""


def _table(part: Listing) -> str:
    numbers = part.right.split()
    right = [name in numbers for name in part.columns]
    head = _row("th", part.columns, right)
    body = "\n".join(_row("td", row, right) for row in part.rows)
    return f"<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    marks = (' class="number"' if number else "" for number in right)
    return f"<tr>{''.join(f'<{tag}{mark}>{_safe(cell)}</{tag}>' for cell, mark in zip(cells, marks, strict=True))}</tr>"
