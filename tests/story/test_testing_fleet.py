"""The test kit for agents of folders: they run in a world, and a person answers them."""

import shutil
from pathlib import Path

from halter.core.clock import HOUR, MINUTE
from halter.models.scripted import call
from halter.testing.world import Fleet, World

DESK = Path(__file__).parents[2] / "examples" / "market-desk"


def desk(home: Path) -> Path:
    return Path(shutil.copytree(DESK, home / "market-desk"))


async def test_an_agent_of_a_folder_lives_in_a_world_as_halter_up_would_run_it(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(tmp_path))
    await world.advance(8 * MINUTE)
    (pending_decision,) = await fleet.waiting()
    assert (pending_decision.name, pending_decision.level) == ("place_order", "RESTRICTED")
    await fleet.answer(pending_decision, "approve")
    await world.advance(MINUTE)
    receipt = await fleet.receipt("market-desk-1")
    assert [each.outcome for each in receipt.calls if each.name == "place_order"] == ["ok"]
    assert receipt.decisions[0].by == "ada"
    assert ("market-desk", "market-desk-1 starts.") in fleet.reports


async def test_what_the_fleets_file_says_bounds_it(world: World, tmp_path: Path) -> None:
    (tmp_path / "halter.yaml").write_text("policy: {disabled: [place_order]}\n")
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(tmp_path))
    await world.advance(HOUR // 2)
    assert list(await fleet.waiting()) == []
    brakes = {brake.code for brake in (await fleet.receipt("market-desk-1")).brakes}
    assert brakes == {"disabled"}


async def test_after_a_crash_the_next_process_asks_no_second_time(world: World, tmp_path: Path) -> None:
    fleet, folder = Fleet(world, tmp_path), desk(tmp_path)
    fleet.start(folder)
    await world.advance(8 * MINUTE)
    await world.restart()
    fleet.start(folder)
    await world.advance(MINUTE)
    assert len(await fleet.waiting()) == 1


def test_a_line_of_a_script_can_ask_for_a_call() -> None:
    (tool_call,) = call("weather", city="Oslo").reply.calls
    assert (tool_call.tool, tool_call.arguments) == ("weather", '{"city":"Oslo"}')
