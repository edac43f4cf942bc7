"""Sessions that change hands, and what must not be lost or stale when they do."""

from pathlib import Path

from halter.core.clock import MINUTE, SECOND
from halter.core.ids import SessionId, WorkerId
from halter.core.messages import Text
from halter.testing.world import World
from tests.story.autonomous import Fleet

COUNTS = '''
import asyncio

from halter import tool


@tool(level="SAFE", effect="read")
async def count() -> int:
    """Count the minutes."""
    return int(asyncio.get_running_loop().time() // 60)
'''
COUNTING = """
model: scripted
script: script.yaml
hot_state: {fields: {minutes: {refresh_tool: count, auto_refresh: true, ttl: 1}}}
"""
NAP = "{calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]"


async def test_a_turn_that_goes_on_in_other_hands_knows_what_is_true_by_then(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("watch", COUNTING, COUNTS, script_yaml=f"- {NAP}, takes: 5m}}\n- {NAP}}}\n")
    fleet.start(folder)
    await world.advance(SECOND)
    await world.restart()
    await world.advance(9 * MINUTE)
    fleet.start(folder)
    await world.advance(MINUTE)
    (prompt,) = fleet.prompts("watch")
    texts = [part.text for part in prompt.messages[-1].parts if isinstance(part, Text) and part.reason == "volatile"]
    assert "minutes: 9 (0s ago)" in texts[0]


async def test_a_session_whose_claim_was_answered_to_nobody_is_found(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("watch", "model: scripted\nscript: script.yaml\n", script_yaml=f"- {NAP}}}\n" * 2))
    await world.advance(MINUTE)
    assert fleet.up is not None
    worker = WorkerId(fleet.up.agents["watch"].context.worker)
    (lease,) = await world.journal.claim(worker, 1, SessionId("watch-1"))
    assert (await fleet.row("watch-1")).owner == worker
    await world.advance(3 * MINUTE)
    row = await fleet.row("watch-1")
    assert (row.owner, row.generation) == ("", lease.generation)
