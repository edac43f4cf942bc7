"""The matrix of `make frameworks` leaves no adapter out, and says which requirements keep a framework from Halter."""

import subprocess
from pathlib import Path

from scripts.frameworks import FRAMEWORKS, TESTS, find_conflict

ROOT = Path(__file__).parents[2]
SHARED = {"__init__", "attachments", "guarded_runs"}
"""The modules that all adapters use."""
OF_THE_GUARD = {"sdk_clients"}
"""What `Guard.model` guards: no adapter, but tried beside its libraries."""

PRINTED = """\
The conflict is caused by:
    halter-agents 1.0.0 depends on pydantic>=2.14
    crewai 1.15.30 depends on pydantic<2.13 and >=2.11.9

To fix this you could try to:
1. loosen the range of package versions you've specified
"""


def find(printed: str, errors: str) -> str:
    return find_conflict(subprocess.CompletedProcess([], 1, printed, errors))


def test_each_adapter_is_tried_beside_its_framework_and_has_tests() -> None:
    adapters = {each.stem for each in (ROOT / "src/halter/adapters").glob("*.py")}
    assert adapters - SHARED == {*FRAMEWORKS} - OF_THE_GUARD
    assert all((ROOT / f"tests/adapters/test_{each}.py").exists() for each in FRAMEWORKS)
    assert all((ROOT / each).exists() for each in TESTS)


def test_a_conflict_is_named_by_the_requirements_of_both_sides() -> None:
    assert find(PRINTED, "ERROR: ResolutionImpossible: for help visit a page\n") == (
        "halter-agents 1.0.0 depends on pydantic>=2.14, and crewai 1.15.30 depends on pydantic<2.13 and >=2.11.9"
    )


def test_an_error_that_is_no_conflict_is_quoted() -> None:
    errors = "WARNING: slow\nERROR: No matching distribution found for nosuch\n"
    assert find("Looking in a folder\n", errors) == "No matching distribution found for nosuch"
