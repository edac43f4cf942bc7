"""What a command has to show, apart from how: facts and tables, for a terminal or for a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from halter.cli.answer import answer_block, answer_table


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts below each other, each with its name; one that is empty is left out."""

    title: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Listing:
    """A table. `right` names the columns of numbers, `long` those whose words may be broken.

    Without rows it says `empty`, and nothing where that is empty too.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: str = ""
    long: str = ""
    empty: str = ""


Sheet = Sequence[Facts | Listing]


def show(sheet: Sheet) -> None:
    """Show all of it on a terminal."""
    for part in sheet:
        match part:
            case Facts():
                answer_block(part.title, part.facts)
            case Listing() if part.rows or part.empty:
                answer_table(part.title, part.columns, part.rows, right=part.right, long=part.long, empty=part.empty)
            case Listing():
                pass
