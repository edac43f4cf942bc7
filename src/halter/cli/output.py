"""How commands print: sentences and tables for people, JSON for programs."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from halter.core.public_json import encode_public_json

MIN_TABLE_WIDTH: Final = 60
"""A screen with fewer columns never shows a table."""

MIN_FOLDED_WIDTH: Final = 13
"""The minimum width of a column of ids or of long text: half an id."""

PIPE_WIDTH: Final = 10_000

FRAME: Final = 3
"""The width of a column's frame: a line, and a space on both sides."""

_CONTROL_CHARACTERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal or reverse the text direction: people decide on what they read."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: at `min_width` no word is broken, at `max_width` no line is."""

    name: str
    number: bool
    min_width: int
    max_width: int


def make_console(*, stderr: bool = False, highlight: bool = False) -> Console:
    """Make a console. Rich assumes 80 columns for a dumb terminal; here its real size is used.

    A file or a pipe has no width, unless `COLUMNS` sets one: nothing is wrapped, so a command stays on its line.
    """
    console = Console(stderr=stderr, highlight=highlight)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.size = ConsoleDimensions(PIPE_WIDTH, console.height)
    elif console.is_dumb_terminal:
        console.size = ConsoleDimensions(*shutil.get_terminal_size((80, 25)))
    return console


def print_sentence(sentence: str, *, at_once: bool = False) -> None:
    """Print a sentence."""
    _print(make_console(), sentence)
    if at_once:
        sys.stdout.flush()


def warn(sentence: str, style: str = "yellow") -> None:
    """Print a sentence to stderr; a closed stderr is ignored."""
    with suppress(OSError):
        _print(make_console(stderr=True), sentence, style)


def render_sentence(sentence: str, style: str = "") -> str:
    screen = make_console()
    with screen.capture() as capture:
        _print(screen, sentence, style)
    return capture.get()


def _print(screen: Console, sentence: str, style: str = "") -> None:
    """Wrap lines on a terminal; a file or a pipe gets the sentence as one line."""
    screen.print(escape_text(sentence), style=style, soft_wrap=not screen.is_terminal)


def escape_text(text: str) -> Text:
    """Replace control characters, so that agents and tools cannot control the terminal."""
    return Text(_CONTROL_CHARACTERS.sub("�", text))


def answer_json(value: object) -> None:
    """Print JSON; amounts are in dollars, times in microseconds."""
    sys.stdout.write(msgspec.json.format(encode_public_json(value), indent=2).decode() + "\n")


def answer_line(value: object) -> None:
    """Print JSON on one line, and flush the output."""
    sys.stdout.write(encode_json_line(value).decode())
    sys.stdout.flush()


def encode_json_line(value: object) -> bytes:
    return encode_public_json(value) + b"\n"


def answer_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str = "",
    long: str = "",
    empty: str = "",
) -> None:
    """Print a table; if it does not fit the screen, print each row as a block of lines.

    `right` names the columns of numbers, `long` those whose words may be broken; `empty` is the text for no rows.
    """
    if not rows and empty:
        print_sentence(empty)
        return
    screen = make_console(highlight=True)
    table_columns = [
        _column(name, [row[index] for row in rows], right.split(), long.split()) for index, name in enumerate(columns)
    ]
    capacity = screen.width - 1 - FRAME * len(columns)
    if screen.width >= MIN_TABLE_WIDTH and capacity >= sum(column.min_width for column in table_columns):
        screen.print(_table(title, table_columns, rows, capacity))
        return
    for row in rows:
        answer_block(title, list(zip(columns, row, strict=True)))
        title = ""


def answer_block(title: str, facts: Sequence[tuple[str, str]]) -> None:
    block = Table.grid(padding=(0, 1))
    block.add_column(no_wrap=True, style="bold")
    block.add_column(overflow="fold")
    for name, value in facts:
        if value:
            block.add_row(name, escape_text(value))
    screen = make_console(highlight=True)
    if title:
        screen.print(escape_text(title), style="italic")
    screen.print(block)
    screen.print()


def _column(name: str, cells: Sequence[str], right: Sequence[str], long: Sequence[str]) -> TableColumn:
    texts = [name, *cells]
    words = texts if name in right else [word for text in texts for word in text.split()]
    widest_word = max(map(cell_len, words), default=0)
    widest_line = max(cell_len(line) for text in texts for line in text.splitlines() or [""])
    return TableColumn(
        name, name in right, min(widest_word, MIN_FOLDED_WIDTH) if name in long else widest_word, widest_line
    )


def _table(title: str, columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], capacity: int) -> Table:
    table = Table(title=escape_text(title), title_justify="left", header_style="bold")
    for column, width in zip(columns, _widths(columns, capacity), strict=True):
        justify = "right" if column.number else "left"
        table.add_column(column.name, justify=justify, overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(escape_text, row))
    return table


def _widths(columns: Sequence[TableColumn], capacity: int) -> list[int]:
    """Share the remaining width: columns that need little get all they need, the others equal parts of the rest."""
    widths = [column.min_width for column in columns]
    remaining = capacity - sum(widths)
    indexes = sorted(range(len(columns)), key=lambda index: columns[index].max_width - columns[index].min_width)
    for served_count, index in enumerate(indexes):
        extra = min(columns[index].max_width - widths[index], remaining // (len(indexes) - served_count))
        widths[index] += extra
        remaining -= extra
    return widths
