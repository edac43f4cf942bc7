"""The sessions of a conversation: a run goes on with the one that is not over, however many are.

And what every adapter is tested for.
"""

import re
from pathlib import Path

import pytest

from halter import adapters
from halter.adapters.guarded_runs import NO_TOOLS, GuardedRuns, find_first_open, read_task_text
from tests.adapters.conftest import Desk
from tests.adapters.killed_program import FRAMEWORKS


@pytest.mark.parametrize("over", [0, 1, 2, 3, 4, 7, 8, 9, 1000])
async def test_the_first_session_that_is_not_over_is_found_in_few_looks(over: int) -> None:
    looks: list[int] = []

    async def has_ended(number: int) -> bool:
        looks.append(number)
        return number < over

    assert await find_first_open(has_ended) == over
    assert len(looks) <= 2 * over.bit_length() + 1


async def test_each_run_of_a_conversation_begins_where_the_last_one_ended(desk: Desk) -> None:
    runs = GuardedRuns(desk.guard(), NO_TOOLS)
    names: list[str] = []
    for _ in range(4):
        async with runs.session("Pay.", "one") as session:
            names.append(session.id)
    assert names == ["one.0", "one.1", "one.2", "one.3"]


PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg"


class Part:
    """A part of a message, as a framework has it: with a text, or with bytes."""

    def __init__(self, text: str = "", content: object = "") -> None:
        self.text, self.content, self.data = text, content, b"iVBORw0KGgo"


@pytest.mark.parametrize(
    "content",
    [
        "What is this?",
        [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is this?"}],
        {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, {"image_url": PICTURE}]},
        ["What is this?", Part()],
        Part(content=[Part("What is this?"), {"type": "image", "base64": PICTURE}]),
    ],
)
def test_the_task_of_a_run_is_what_was_written_without_pictures_and_files(content: object) -> None:
    assert read_task_text(content) == "What is this?"
    assert read_task_text([Part(), {"type": "image", "base64": PICTURE}, 7, None]) == ""


PROMISES = (
    r"def test_parallel_\w+_on_one_cap_never_pass_it",
    r"for \w+ in range\(20\)",
    r"def test_a_halt_ends_a_\w+_within_its_request",
    r"def test_(what_goes_round_the_guard_is_refused|a_tool_that_the_provider_runs_is_named)",
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_adapter_is_tested_for_caps_halts_and_what_goes_round_it(framework: str) -> None:
    tested = (Path(__file__).parent / f"test_{framework}.py").read_text()
    assert [promise for promise in PROMISES if re.search(promise, tested) is None] == []


def test_every_adapter_is_tested_for_a_kill() -> None:
    folder = Path(adapters.__file__).parent
    guarding = {
        each.stem
        for each in folder.glob("*.py")
        if re.search(r"^def (guard|create_agent)\(", each.read_text(), re.MULTILINE)
    }
    assert guarding == {*FRAMEWORKS}
