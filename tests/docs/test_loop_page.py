"""The page about the loop says of limits what the reference says, which is made from the code."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+?) \| [^|]+ \|$", re.MULTILINE)
KEY = re.compile(r"^\| `limits\.([^`]+)` \| [^|]+ \| ([^|;]+?)(?:; [^|]+)? \| [^|]+ \|$", re.MULTILINE)


def section(page: str, title: str) -> str:
    return (DOCS / page).read_text("utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_limits_have_the_defaults_that_hold() -> None:
    fields = dict(KEY.findall((DOCS / "reference" / "agent-yaml.md").read_text("utf-8")))
    payload = dict(ROW.findall(section("loop.md", "Limits")))
    assert len(payload) == 14
    assert {key: fields[key] for key in payload} == payload
