"""Halts of agents that run by themselves, in whatever they are doing."""

from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.guard.halts import cancel, halt, resume
from halter.testing.world import World
from tests.story.autonomous import Fleet
from tests.story.test_autonomy_hostile import SENSES, naps

pytestmark = pytest.mark.both_dispatchers

LOOKS = """
import asyncio

from halter import tool

@tool(level="SAFE", effect="read")
async def price() -> int:
    "Tell the price, slowly."
    await asyncio.sleep(20)
    return 5

@tool(level="SAFE", effect="read", cost="0.01")
async def paid() -> int:
    "Tell the price, for money."
    await asyncio.sleep(20)
    return 5
"""
THINKS = "model: scripted\nscript: script.yaml\n"
FRESH = THINKS + "hot_state: {fields: {p: {refresh_tool: price, auto_refresh: true, ttl: 1}}}\n"
GATED = (
    THINKS + "autonomy: {enabled: true, gate: {on: always, model: 'scripted:small'}}\nhot_state: {fields: {p: {}}}\n"
)
OPENS = "- {when: The data, calls: [{tool: answer, arguments: {open: true}}], takes: 20s}\n"
WHILE = {
    "a fact is refreshed": (FRESH, naps() * 9, 5),
    "the gate is asked": (GATED, OPENS * 9 + naps(30) * 9, 35),
    "a sensor polls": (SENSES, naps() * 9, 5),
    "a sensor polls for money": (SENSES.replace("price", "paid"), naps() * 9, 5),
    "a person is asked": (SENSES, "- calls: [{tool: ask_user, arguments: {question: What now?}}]\n" * 9, 5),
    "it pauses": (THINKS, "- text: Hm.\n" * 9, 5),
}


@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize("doing", WHILE)
async def test_a_halt_ends_it_within_a_second_whatever_it_does(
    world: World, tmp_path: Path, doing: str, *, cancels: bool
) -> None:
    fleet = Fleet(world, tmp_path)
    text, script, at = WHILE[doing]
    fleet.start(fleet.agent("desk", text, LOOKS, script_yaml=script))
    await world.advance(at * SECOND)
    await world.store.commit(cancel("desk-1", "ada", "stop") if cancels else halt("fleet", "ada", "stop"))
    await world.advance(SECOND)
    row = await fleet.row("desk-1")
    assert (row.state, row.owner) == ("CANCELLED" if cancels else "HALTED", "")
    kinds = await fleet.kinds("desk-1")
    assert "attending_failed" not in kinds
    await world.advance(5 * MINUTE)
    assert await fleet.kinds("desk-1") == kinds
    await world.store.commit(resume("fleet", "ada", "go on", ramp=MINUTE))
    await world.advance(2 * MINUTE)
    assert ((await fleet.row("desk-1")).ended_at is None) == (not cancels)
    assert [each.session for each in await fleet.sessions("desk")] == ["desk-1"]
