"""Every line that installs Halter names its own distribution."""

import re
import tomllib
from pathlib import Path

import pytest

from halter_agents import DISTRIBUTION, VERSION

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "docs", "examples", "deploy", "scripts")
TEXTS = [
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))),
    *ROOT.glob("*.md"),
    ROOT / "Makefile",
]
INSTALL = re.compile(
    r"\b(?:(?:pip3?|pipx|uv(?: pip)?) install|uv (?:tool install|add)|(?:poetry|pdm) add|(?:uvx|pipx run|uv tool run)"
    r"(?: (?:--from|--spec)(?=[ =]))?)(?P<words>[ =][^;|&`#\n]*)"
)
STARTER = ("uvx", "pipx run", "uv tool run")
EXTRA = re.compile(r"(?<![\w/-])halter\[[a-z,]+\]")


@pytest.mark.parametrize(
    "line",
    [
        "pip install halter",
        "pipx install 'halter[models]'",
        "uvx --from halter halter demo",
        "uv add -q halter==1",
        "halter[top]",
    ],
)
def test_a_line_that_installs_the_other_project_is_found(line: str) -> None:
    assert names_other_project(line)


@pytest.mark.parametrize(
    "line",
    [
        f"pip install '{DISTRIBUTION}[models]'",
        f"uvx --from {DISTRIBUTION} halter demo",
        "pip install '/srv/src/halter[models]'",
    ],
)
def test_a_line_that_installs_halter_is_right(line: str) -> None:
    assert not names_other_project(line)


def test_code_and_documentation_install_no_other_project() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".html", ".js", ".sh", ""}
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if names_other_project(line)
    ]
    assert wrong == []


def names_other_project(line: str) -> bool:
    if EXTRA.search(line):
        return True
    for found in INSTALL.finditer(line):
        words = [word.strip("'\"") for word in re.split(r"[ =]", found["words"]) if word and not word.startswith("-")]
        if found[0].startswith(STARTER):  # What follows the package is the command that it runs.
            words = words[:1]
        if "halter" in words:
            return True
    return False


def test_the_package_is_built_under_the_name_and_version_that_it_states() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (DISTRIBUTION, VERSION)
