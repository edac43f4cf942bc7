"""Everything that 0.7.0 understood and answered is understood and answered still, in the same words."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.frozen.lists import LISTS, NEEDED, now, read, write

FOLDER = Path(__file__).parent / "0.7.0"


@dataclass(frozen=True)
class Change:
    """Lines of 0.7.0 that have another form since, on purpose: a pattern, and what stands in its place."""

    title: str
    old: str
    new: str
    why: str


DOLLARS = "Amounts in JSON are dollars, under names that end in _usd."

CHANGES = (
    Change("routes", r"( answer\S*last_day\[\]\.)usd\b", r"\1spent_usd", DOLLARS),
    Change("routes", r"(GET /api/spending answer\[\]\.)usd\b", r"\1spent_usd", DOLLARS),
    Change("routes", r"( answer\S*\.(?:cap|spent)_today)\b", r"\1_usd", DOLLARS),
    Change("routes", r"( answer\S*\.caps\[\]\.(?:cap|held|spent))\b", r"\1_usd", DOLLARS),
    Change("routes", r"( answer\S*\.judges\[\]\.)cap\b", r"\1cap_usd", DOLLARS),
    Change("routes", r"( answer\S*\.judges\[\]\.)usd\b", r"\1most_usd", DOLLARS),
    Change(
        "routes", r"((?:report|receipt) answer\.|home answer\.report\.)spent(?!_)", r"\1spent_by_purpose_usd", DOLLARS
    ),
    Change("routes", r"( answer\S*_usd(?:\.\*)?): integer", r"\1: number", DOLLARS),
    Change("routes", r"( answer\S*\.budgets\[\]\.(?:cap|held|overrun|spent)): integer", r"\1: number", DOLLARS),
    Change("routes", r"( answer\.overruns\[\]\.amount): integer", r"\1: number", DOLLARS),
)
"""In the order in which they are applied. The changelog of 1.0.0 names each of them to users."""


def changed(title: str, line: str) -> str:
    """Write a line of 0.7.0 as it is today."""
    for change in CHANGES:
        if change.title == title:
            line = re.sub(change.old, change.new, line)
    return line


def before(title: str) -> list[str]:
    return [*read(FOLDER / f"{title}.txt")]


@pytest.mark.parametrize("title", LISTS)
def test_what_was_understood_is_understood_still(title: str) -> None:
    texts = {*now(title), *(line.partition(": ")[0] for line in now(title))}
    gone = [line for line in before(title) if changed(title, line) not in texts]
    # What had to be given may be left out by now.
    assert [line for line in gone if not line.endswith(f": {NEEDED}")] == []


@pytest.mark.parametrize("title", LISTS)
def test_nothing_more_has_to_be_given(title: str) -> None:
    """New input has a default where what it belongs to was there before."""
    texts = {*before(title)}
    owners = texts | {owner(line) for line in texts if ": " not in line}
    needed = (line.removesuffix(f": {NEEDED}") for line in now(title) if line.endswith(f": {NEEDED}"))
    assert [path for path in needed if f"{path}: {NEEDED}" not in texts and owner(path) in owners] == []


def test_a_migration_that_stores_have_had_stays_as_it_is() -> None:
    """It is not run again, so a statement that is added to it would be missing from older stores."""
    had = {line.partition(".")[0] for line in before("schema")}
    assert {line for line in now("schema") if line.partition(".")[0] in had} <= {*before("schema")}


def owner(path: str) -> str:
    """Say whose input it is: a fact is an event's, a key a mapping's, an option a command's, a body a route's."""
    if (above := re.sub(r"(\.[^.\s]+| \S+)$", "", path)) != path:
        return re.sub(r" (query|path|header|body)(\[\]|\.\*)?$", "", above)
    return path


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.old)
def test_every_change_in_the_table_is_one(change: Change) -> None:
    assert any(re.search(change.old, line) for line in before(change.title))


def test_a_missing_word_and_a_new_demand_are_found(tmp_path: Path) -> None:
    write(tmp_path / "list.txt", ["halter run", "halter run --store: takes a value", "halter run --store: needed"])
    assert [*read(tmp_path / "list.txt")] == [
        "halter run",
        "halter run --store",
        "halter run --store: takes a value",
        "halter run --store: needed",
    ]
    assert owner("halter run --store") == "halter run"
    assert owner("call_started.tool") == "call_started"
    assert owner("agent.yaml.triggers[].name") == "agent.yaml.triggers[]"
    assert owner("POST /api/halts body.scope") == "POST /api/halts"
    assert owner("GET /api/report query since") == "GET /api/report"
