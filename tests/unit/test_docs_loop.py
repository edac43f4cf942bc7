"""The page about the loop says of limits what the page about an agent's file says, where every default is checked."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+?) \| [^|]+ \|$", re.MULTILINE)


def section(page: str, title: str) -> str:
    return (DOCS / page).read_text("utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_limits_have_the_defaults_that_an_agents_file_has() -> None:
    known = dict(ROW.findall(section("agents.md", "Every key")))
    told = dict(ROW.findall(section("loop.md", "Limits")))
    assert len(told) == 13
    assert {key: known[f"limits.{key}"] for key in told} == told
