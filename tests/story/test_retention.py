"""Retention: a process that runs agents erases the texts of sessions that ended long ago; the events stay."""

from pathlib import Path

import pytest
from autonomous import Fleet

from halter.core.clock import HOUR, MINUTE
from halter.runtime.switches import turn_off
from halter.testing.world import World
from tests.story.autonomous import CALM

SLEEPS = "model: scripted\nscript: script.yaml\nautonomy: {enabled: true, max_sleep: 30d}\n"
SCRIPT = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 20d, reason: a quiet word}}]\n"


async def run_ended_session(world: World, home: Path, fleet: str) -> Fleet:
    """Run an agent whose only session ends after a minute, in a process that keeps running."""
    new_fleet = Fleet(world, home, fleet, sturdy=True)
    new_fleet.start(
        new_fleet.agent("desk", SLEEPS, script_yaml=SCRIPT), new_fleet.agent("other", SLEEPS, script_yaml=SCRIPT)
    )
    await world.advance(MINUTE)
    await turn_off(new_fleet.app, "desk")
    await world.advance(MINUTE)
    return new_fleet


async def count_erased(fleet: Fleet, session: str) -> int:
    return sum(event.erased for event in await fleet.events(session))


@CALM
async def test_words_are_erased_when_the_retention_of_the_fleet_has_passed(world: World, tmp_path: Path) -> None:
    fleet = await run_ended_session(world, tmp_path, "retention: 3h\n")
    await world.advance(2 * HOUR)
    assert await count_erased(fleet, "desk-1") == 0
    await world.advance(2 * HOUR)
    assert await count_erased(fleet, "desk-1") > 0
    assert await count_erased(fleet, "other-1") == 0, "it has not ended"
    assert ("retention", "Erased the texts of 1 session, as retention requires.") in fleet.told
    assert (await fleet.row("desk-1")).terminal_reason == "external_halt"
    results = [stored.event for stored in await world.events("fleet") if stored.kind == "bodies_erased"]
    assert {(outcome.by, outcome.reason) for outcome in results} == {("halter.yaml", "retention")}


@CALM
@pytest.mark.parametrize("fleet", ["", "retention: none\n"])
async def test_without_a_retention_nothing_is_ever_erased(world: World, tmp_path: Path, fleet: str) -> None:
    running_fleet = await run_ended_session(world, tmp_path, fleet)
    await world.advance(5 * HOUR)
    assert await count_erased(running_fleet, "desk-1") == 0
