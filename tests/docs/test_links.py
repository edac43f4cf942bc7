"""Every link of the documentation leads somewhere, and every page can be reached from its map."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT

PAPERS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TITLE = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(paper: Path) -> Iterator[tuple[Path, str]]:
    text = FENCE.sub("", paper.read_text("utf-8"))
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            yield (paper.parent / path).resolve() if path else paper, anchor


def anchors(paper: Path) -> set[str]:
    """Name the titles of a page as links do."""
    titles = TITLE.findall(FENCE.sub("", paper.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: str(paper.relative_to(ROOT)))
def test_every_link_leads_somewhere(paper: Path) -> None:
    lost = [
        f"{path}#{anchor}"
        for path, anchor in links(paper)
        if not path.exists() or (anchor and anchor not in anchors(path))
    ]
    assert lost == []


def test_every_page_can_be_reached_from_the_map() -> None:
    reached, paths = set[Path](), [ROOT / "docs" / "README.md"]
    while paths:
        page = paths.pop()
        if page not in reached:
            reached.add(page)
            paths += [path for path, _ in links(page) if path.suffix == ".md" and path.exists()]
    assert [str(page) for page in (ROOT / "docs").rglob("*.md") if page not in reached] == []
