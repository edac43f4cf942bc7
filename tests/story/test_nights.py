"""Before an agent is switched on it is said what a night may cost at worst, and what it costs if nothing happens."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from halter.app.nights import NIGHT, Costs, costs
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.limits import Cap, Caps
from halter.core.money import DOLLAR, Account
from halter.core.tasks import AnyTrigger, Schedule, Watch
from halter.guard.purse import change_cap
from halter.testing.world import World
from tests.story.fronts import Front, front

WIDE = Caps(agent=(Cap(None),), fleet=(Cap(None),))


async def foreseen(desk: Front, caps: Caps, triggers: Sequence[AnyTrigger] = (), *, autonomous: bool = False) -> Costs:
    read = desk.speaking.agent.read
    tasks = msgspec.structs.replace(
        read.tasks,
        schedules=tuple(each for each in triggers if isinstance(each, Schedule)),
        watches=tuple(each for each in triggers if isinstance(each, Watch)),
    )
    autonomy = msgspec.structs.replace(read.pacing.autonomy, enabled=autonomous)
    read = replace(read, tasks=tasks, pacing=msgspec.structs.replace(read.pacing, autonomy=autonomy))
    policy = msgspec.structs.replace(desk.speaking.agent.policy, caps=caps)
    return await costs(desk.world.store, policy, read, desk.world.now)


EVERY_HOUR = Schedule(name="hourly", every=HOUR)


@pytest.mark.parametrize(
    ("caps", "triggers", "night"),
    [
        (WIDE, [EVERY_HOUR], 12 * DOLLAR),
        (WIDE, [Schedule(name="a", every=HOUR, max_cost_usd=DOLLAR // 10)], 12 * DOLLAR // 10),
        (WIDE, [Schedule(name="a", every=HOUR, max_cost_usd_per_day=DOLLAR * 3)], 3 * DOLLAR),
        (WIDE, [Schedule(name="a", every=SECOND, min_interval=SECOND)], 43_200 * DOLLAR),
        (Caps(fleet=(Cap(None),)), [EVERY_HOUR], 5 * DOLLAR),
        (Caps(agent=(Cap(None),), fleet=(Cap(2 * DOLLAR, "day"),)), [EVERY_HOUR], 2 * DOLLAR),
        (WIDE, [Watch(name="w")], None),
        (Caps(), [Watch(name="w")], 5 * DOLLAR),
        (WIDE, [Watch(name="w", max_cost_usd_per_hour=DOLLAR)], 12 * DOLLAR),
        (WIDE, [], 0),
    ],
)
async def test_the_worst_night_is_bounded_by_runs_windows_and_caps(
    world: World, tmp_path: Path, caps: Caps, triggers: Sequence[AnyTrigger], night: int | None
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        assert (await foreseen(desk, caps, triggers)).worst_night == night


async def test_a_night_that_passes_midnight_has_two_days_and_what_is_spent_is_gone(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        caps = Caps(fleet=(Cap(None),))
        triggers = [Schedule(name="a", every=10 * MINUTE)]
        assert (await foreseen(desk, caps, triggers)).worst_night == 5 * DOLLAR
        await world.advance(NIGHT + HOUR)
        assert (await foreseen(desk, caps, triggers)).worst_night == 10 * DOLLAR
        window = f"day/{'2026-01-01'}"
        await world.store.commit(change_cap(Account("agent:desk", window, "usd"), DOLLAR, "ada", "lower"))
        assert (await foreseen(desk, caps, triggers)).worst_night == 6 * DOLLAR


async def test_an_agent_that_runs_by_itself_adds_its_session(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        assert (await foreseen(desk, WIDE, [EVERY_HOUR], autonomous=True)).worst_night == 13 * DOLLAR


async def test_watches_cost_nothing_while_nothing_happens_and_schedules_do(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        watched = await foreseen(desk, WIDE, [Watch(name="w")])
        assert watched.idle_month == 0
        assert watched.told() == [
            "A night, the next 12 hours, costs at worst any amount, for no cap bounds it.",
            "If nothing happens: $0.00, for it has no schedules.",
        ]
        planned = await foreseen(desk, Caps(), [EVERY_HOUR])
        assert planned.idle_month == 720 * DOLLAR
        assert planned.told()[0] == "A night, the next 12 hours, costs at worst $5.00."


async def test_what_a_person_confirmed_counts_as_well(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every 2 hours check the mail")
        await desk.answer("approve")
        assert (await foreseen(desk, WIDE)).worst_night == 6 * DOLLAR
