"""Agents that run by themselves, in virtual time, from their folders to their journals."""

from pathlib import Path

from halter.core.clock import MINUTE
from halter.testing.world import World
from tests.story.autonomous import Fleet

SLEEPS = """
model: scripted
script: script.yaml
"""


async def test_a_yield_goes_from_the_models_reply_to_the_sleeping_row_and_back(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = """
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 300, reason: nothing to do}}]
- calls: [{tool: yield, arguments: {mode: shutdown, reason: all done}}]
"""
    folder = fleet.agent("watch", SLEEPS, script_yaml=script)
    fleet.start(folder)
    await world.advance(MINUTE)
    row = await fleet.row("watch-1")
    assert (row.state, row.owner, row.due_at) == ("SLEEPING", "", row.wake_at)
    assert row.wake_at is not None
    await world.advance(10 * MINUTE)
    row = await fleet.row("watch-1")
    assert (row.state, row.terminal_reason) == ("COMPLETED", "completed")


PRICES = """
from halter import tool

SEEN = []

@tool(level="SAFE", effect="read")
async def price() -> str:
    "Tell the price."
    import asyncio
    at = asyncio.get_running_loop().time()
    return str(200 if 600 <= at < 620 else 100 + int(at // 5) % 3)
"""

DESK = """
model: scripted
script: script.yaml
sensors:
  - name: ticker
    type: poll
    interval: 5
    jitter: 0
    source: {tool: price}
    updates: [{field: last_price}]
    signals:
      - {name: jump, expression: value > 150, notify: true, cooldown: 1h}
autonomy: {enabled: true, idle_timeout: 0}
"""


async def test_a_signal_wakes_a_sleeper_and_its_alert_is_shown_once(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = """
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h, wake_early_if: [jump]}}]
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h, wake_early_if: [jump]}}]
"""
    folder = fleet.agent("desk", DESK, PRICES, script_yaml=script)
    fleet.start(folder)
    await world.advance(30 * MINUTE)
    row = await fleet.row("desk-1")
    assert row.state == "SLEEPING"
