"""Every line that installs Halter names its own distribution."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import get_args

import pytest

from halter.core.errors import Extra
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


@pytest.mark.parametrize(
    ("package", "brings"), [("genai-prices", "httpx2"), ("pydantic", "typing-extensions"), ("typer", "rich")]
)
def test_what_the_base_uses_without_naming_it_comes_with_what_cannot_do_without_it(package: str, brings: str) -> None:
    wanted = [line for line in requires(package) or () if re.match(rf"{brings}\b", line)]
    assert wanted
    assert "extra" not in wanted[0].partition(";")[2]


def test_the_base_stays_thin_and_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 8
    extras = {*project["optional-dependencies"]}
    assert extras == {*get_args(Extra)}
    assert {*re.findall(r"^\| `([a-z]+)` \|", (ROOT / "docs" / "support.md").read_text(), re.MULTILINE)} >= extras
    assert {*re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split(",")} == extras
