"""Facts and tables on a terminal."""

from halter.app.words.sheet import Facts, Listing, Sheet
from halter.cli.answer import answer_block, answer_table


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
