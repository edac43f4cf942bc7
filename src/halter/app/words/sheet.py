"""What there is to show, apart from how: facts and tables, for a terminal or for a page."""

from collections.abc import Sequence
from dataclasses import dataclass


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
