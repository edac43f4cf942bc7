"""How commands print: sentences and tables for people, JSON for programs, and the styles of a screen."""

import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from halter.core.public_json import encode_public_json

if TYPE_CHECKING:
    from halter.operations.desk import Done

MIN_TABLE_WIDTH: Final = 60
"""Columns of a screen below which a table is never readable."""

MIN_FOLDED_WIDTH: Final = 13
"""The least that a column of ids or of long text is given: half an id."""

FRAME: Final = 3
"""What a column needs besides its text: a line, and a space on both sides."""

_CONTROL_CHARACTERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What steers a terminal, and what turns the order of letters around: people decide about what they read."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table: the least width at which none of its words is broken, and the one at which no line is."""

    name: str
    number: bool
    least: int
    most: int


def make_console(*, stderr: bool = False, highlight: bool = False) -> Console:
    """Make what writes to a terminal, or to whatever stands in its place.

    Of a terminal that can do little it is thought that it has 80 columns, whatever it says itself: so it is asked here.
    """
    made = Console(stderr=stderr, highlight=highlight)
    if made.is_dumb_terminal:
        made.size = ConsoleDimensions(*shutil.get_terminal_size((80, 25)))
    return made


def say(sentence: str, *, at_once: bool = False) -> None:
    """Answer with a sentence; `at_once` where more may be long in coming."""
    _print(make_console(), sentence)
    if at_once:
        sys.stdout.flush()


def warn(sentence: str, style: str = "yellow") -> None:
    """Say a sentence beside the answer. Where nobody can hear it, the exit code must do."""
    with suppress(OSError):
        _print(make_console(stderr=True), sentence, style)


def render_sentence(sentence: str, style: str = "") -> str:
    """Make a sentence ready to be written to the standard output, by somebody else."""
    screen = make_console()
    with screen.capture() as captured:
        _print(screen, sentence, style)
    return captured.get()


def _print(screen: Console, sentence: str, style: str = "") -> None:
    """Break lines between words on a screen; a file or a program gets the sentence as one line."""
    screen.print(escape_text(sentence), style=style, soft_wrap=not screen.is_terminal)


def escape_text(text: str) -> Text:
    """Show what an agent or a tool wrote without letting it speak to the terminal, and what is no text at all."""
    return Text(_CONTROL_CHARACTERS.sub("�", text))


def answer_json(value: object) -> None:
    """Print a value as JSON; amounts are dollars, times integers of microseconds."""
    sys.stdout.write(msgspec.json.format(encode_public_json(value), indent=2).decode() + "\n")


def answer_done(done: "Done", *, as_json: bool) -> None:
    """Say what was done; for programs, name it."""
    if as_json:
        facts = {name: value for name, value in msgspec.structs.asdict(done).items() if name != "sentence"}
        answer_json({"subject": done.subject, "done": True, **facts})
    else:
        say(done.sentence)


def answer_line(value: object) -> None:
    """Print a value as JSON on a line of its own, at once: a program reads it while more is to come."""
    sys.stdout.write(encode_json_line(value).decode())
    sys.stdout.flush()


def encode_json_line(value: object) -> bytes:
    """Write a value as one line of JSON."""
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
    """Print a table for people, or where it does not fit the screen, each row as a block of lines.

    `right` names the columns of numbers, `long` those whose words may be broken, `empty` what to say where there
    is nothing.
    """
    if not rows and empty:
        say(empty)
        return
    screen = make_console(highlight=True)
    laid_out = [
        _column(name, [row[place] for row in rows], right.split(), long.split()) for place, name in enumerate(columns)
    ]
    room = screen.width - 1 - FRAME * len(columns)
    if screen.width >= MIN_TABLE_WIDTH and room >= sum(column.least for column in laid_out):
        screen.print(_table(title, laid_out, rows, room))
        return
    for row in rows:
        answer_block(title, list(zip(columns, row, strict=True)))
        title = ""


def answer_block(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print facts below each other, each with its name."""
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
    widest = max(map(cell_len, words), default=0)
    lines = max(cell_len(line) for text in texts for line in text.splitlines() or [""])
    return TableColumn(name, name in right, min(widest, MIN_FOLDED_WIDTH) if name in long else widest, lines)


def _table(title: str, columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], room: int) -> Table:
    table = Table(title=escape_text(title), title_justify="left", header_style="bold")
    for column, width in zip(columns, _widths(columns, room), strict=True):
        justify = "right" if column.number else "left"
        table.add_column(column.name, justify=justify, overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(escape_text, row))
    return table


def _widths(columns: Sequence[TableColumn], room: int) -> list[int]:
    """Share the room that is left: whoever lacks little gets all of it, the others equal parts of the rest."""
    widths = [column.least for column in columns]
    left = room - sum(widths)
    lacking = sorted(range(len(columns)), key=lambda place: columns[place].most - columns[place].least)
    for served, place in enumerate(lacking):
        given = min(columns[place].most - widths[place], left // (len(lacking) - served))
        widths[place] += given
        left -= given
    return widths


PLAIN: Final = ""

WARNING_STYLE: Final = "yellow"

URGENT_STYLE: Final = "bold yellow"


class StyledLine(msgspec.Struct, frozen=True):
    """What is shown, and how much it stands out."""

    text: str
    style: str = PLAIN
