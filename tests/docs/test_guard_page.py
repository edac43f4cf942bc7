"""The page about the guard tells the truth about levels, outcomes and decisions."""

import re
from typing import get_args

from halter.core.vocabulary import DecisionKind, Outcome
from halter.policy.levels import LEVEL_TABLE
from halter.spec.policy import MODES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "guard.md").read_text("utf-8")
BY_ITSELF = {"ok", "error", "timeout", "cancelled", "unknown"}
"""Outcomes of a call that no check refused."""


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_levels_are_those_that_hold() -> None:
    fields = dict(re.findall(r"^\| ([A-Z]+) \|.*\| ([^|]+) \|$", section("Levels, modes and risks"), re.MULTILINE))
    assert fields == {
        level: " / ".join("yes" if mode in row.asks else "\N{EN DASH}" for mode in MODES)
        for level, row in LEVEL_TABLE.items()
    }


def test_every_outcome_of_a_refusal_is_on_the_page() -> None:
    results = set(re.findall(r"`(\w+)`", section("The order of the checks")))
    assert results == set(get_args(Outcome)) - BY_ITSELF


def test_every_kind_of_decision_is_on_the_page() -> None:
    results = re.findall(r"^\| ([a-z ]+) \|", section("Decisions"), re.MULTILINE)
    assert [word.replace(" ", "_") for word in results if word not in {"kind", "command"}] == list(
        get_args(DecisionKind)
    )
