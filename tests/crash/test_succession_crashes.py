"""One session at a time, one after the other, whatever crashes where: no cap is passed, and none begins twice."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.events import SessionStarted
from halter.core.money import BudgetRow
from halter.core.ports import Query
from halter.core.rows import SpendRow
from halter.journal.verify import verify_store
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from tests.story.autonomous import Fleet
from tests.story.test_succession import NAP, PRICES, agent, list_sessions

LIMITS = "max_cost_usd: 0.15, max_cost_usd_per_day: 0.50, max_output_tokens: 256, on_cap: stop"
TIME = HOUR + 20 * MINUTE


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_at_any_commit_leaves_one_session_at_a_time_within_every_cap(every: int) -> None:
    with TemporaryDirectory() as folder:
        fleets: list[Fleet] = []

        async def program(world: World) -> None:
            fleet = fleets[-1]
            task = fleet.start(agent(fleet, LIMITS, NAP * 20))
            await world.clock.sleep(TIME)
            task.cancel()

        def new_world(crash: Crash | None) -> World:
            world = World(crash=crash)
            fleets.append(Fleet(world, Path(folder), PRICES))
            return world

        for world in crash_everywhere(program, new_world, every=every):
            world.run(check_outcome(world, fleets[-1]))


async def check_outcome(world: World, fleet: Fleet) -> None:
    session_rows = await list_sessions(fleet)
    assert len(session_rows) >= 3, world
    assert [row.session for row in session_rows] == [f"watch-{number}" for number in range(1, len(session_rows) + 1)]
    for before, after in pairwise(session_rows):
        assert before.ended_at is not None, world
        assert before.ended_at <= after.started_at, world
        first = (await fleet.events(after.session))[0].event
        assert isinstance(first, SessionStarted)
        assert first.follows == before.session, world
    spends = await world.journal.ask(Query("all_spends", SpendRow))
    assert sum(each.usd for each in spends) <= 500_000, world
    for budget in await world.journal.ask(Query("budgets", BudgetRow)):
        assert budget.cap is None or budget.spent + budget.held <= budget.cap, world
    assert (await verify_store(world.journal)).findings == ()
