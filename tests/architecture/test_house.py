"""What is absolute about the shape of the package. What grows with features is shown: `python -m scripts.house`."""

from pathlib import Path

import pytest

from scripts.house import SOURCE, text, travel
from scripts.shape import find_circles, list_circles

MAX_FILES_OF_A_FOLDER = 25
FRAMES = 11
"""From `Agent.run` to the commit of a guarded tool call."""
FILES = 7


def test_no_folder_has_more_files_than_a_person_can_survey() -> None:
    folder, count = text().fullest_folder
    assert count <= MAX_FILES_OF_A_FOLDER, folder


def test_no_two_modules_import_each_other_wherever_the_import_stands() -> None:
    assert not list_circles(SOURCE)


def test_a_guarded_call_takes_few_hops_to_its_commit() -> None:
    figures = travel()
    assert 0 < figures.frames <= FRAMES, figures.path
    assert figures.files <= FILES, figures.path


@pytest.mark.parametrize(
    "import_line",
    ["import two", "from two import that", "def act():\n    from two import that", "class A:\n    import two"],
)
def test_a_circle_is_found_wherever_its_import_stands(tmp_path: Path, import_line: str) -> None:
    package = tmp_path / "halter"
    package.mkdir()
    package.joinpath("one.py").write_text(import_line.replace("two", "halter.two"))
    package.joinpath("two.py").write_text("from halter import one\nthat = 1\n")
    package.joinpath("three.py").write_text("from halter import one\n")
    assert list_circles(tmp_path) == (("halter.one", "halter.two"),)


def test_circles_that_share_a_module_are_one() -> None:
    imports = {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}, "d": {"a"}}
    assert find_circles(imports) == [("a", "b", "c")]
