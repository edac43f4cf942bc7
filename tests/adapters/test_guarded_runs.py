"""The sessions of a conversation: a run goes on with the one that is not over, however many are."""

import pytest

from halter.adapters.guarded_runs import NO_TOOLS, GuardedRuns, find_first_open
from tests.adapters.conftest import Desk


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
