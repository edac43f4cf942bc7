"""The reference pages are those that the code makes."""

import pytest

from scripts.reference import pages
from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "reference"
MADE = pages()


@pytest.mark.parametrize("name", MADE)
def test_a_reference_page_is_not_out_of_date(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == MADE[name], "Run `make docs`."


def test_no_page_stands_there_that_nothing_makes() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(MADE)
