"""The names of the package keep the rules that are absolute; each rule is shown to find what breaks it."""

import ast
from pathlib import Path

import pytest

from scripts.house import check_names
from scripts.names import ALIASES, CHECKS, PARTICIPLES

MAX_EXCEPTIONS = 20

BROKEN = """
from json import loads as parse
class Lease: ...
def told(): ...
def take_call(): ...
def is_due() -> int: ...
"""


def test_no_name_of_the_package_breaks_a_rule() -> None:
    assert {rule: breaches for rule, breaches in check_names().items() if breaches} == {}


@pytest.mark.parametrize("rule", CHECKS)
def test_a_name_that_breaks_a_rule_is_found(rule: str) -> None:
    module = ast.parse(BROKEN)
    modules = {Path("pacing.py"): module, Path("leases.py"): ast.parse("class Lease: ...")}
    assert len(list(CHECKS[rule](modules))) == 1


def test_the_exceptions_are_few_and_each_has_its_reason() -> None:
    assert len(PARTICIPLES) <= MAX_EXCEPTIONS
    assert all([*PARTICIPLES.values(), *ALIASES.values()])
