"""Names that stand in a store, for a shell that completes them: read at once, from a file, and from nothing else."""

from contextlib import closing
from typing import Final, Literal

from halter.journal.open import file_of
from halter.journal.queries import load
from halter.journal.sqlite_file import open_to_read

Names = Literal["sessions", "agents", "decisions", "triggers", "rules", "findings", "proposals"]

MOST: Final = 200
"""More than these nobody looks through."""

HURRY: Final = "PRAGMA busy_timeout = 50"


def offered(url: str, names: Names, beginning: str) -> list[tuple[str, str]]:
    """List the names that begin so, each with a word about it. Behind a server nobody is asked: that may take long."""
    path = file_of(url)
    if path is None or not path.is_file():
        return []
    with closing(open_to_read(str(path))) as connection:
        connection.execute(HURRY)
        params = {"like": f"{_literal(beginning)}*", "limit": MOST}
        rows = connection.execute(load("sqlite/offered.sql")[names], params)
        return [(str(name), str(told)) for name, told in rows]


def _literal(text: str) -> str:
    """Write a text so that it matches nothing but itself."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
