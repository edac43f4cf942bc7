"""Hot state that the agent's own tools fill, and a heartbeat in one line."""

from pathlib import Path

import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.events import RunStarted, TurnSkipped
from halter.core.messages import Prompt, Text
from halter.testing.world import World
from tests.story.autonomous import Fleet
from tests.story.tasks import Office
from tests.story.test_schedules_run import DONE, HEAD, clock

DESK = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0, gate: {on: change}}
hot_state:
  fields:
    cash: {type: number, ttl: 30, refresh_tool: account, path: money.cash}
    positions: {type: object, ttl: 30, refresh_tool: account, path: positions}
"""
ACCOUNT = """
from halter import tool

asked = []

@tool(level="SAFE", effect="read")
async def account(of: str = "") -> dict[str, object]:
    "Tell what the account holds."
    asked.append(of)
    return {"money": {"cash": 100 * len(asked)}, "positions": {"AAPL": 3}}
"""
NAP = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 10m}}]\n"


def read_hot_state(prompt: Prompt) -> str:
    last = prompt.messages[-1].parts[-1]
    assert isinstance(last, Text)
    return last.text


async def test_a_call_of_the_agents_own_fills_the_fields_of_its_tool(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = "- calls: [{tool: account, arguments: {}}]\n" + NAP
    fleet.start(fleet.agent("desk", DESK, ACCOUNT, script_yaml=script))
    await world.advance(MINUTE)
    before, after = map(read_hot_state, fleet.prompts("desk"))
    assert "cash: not yet loaded" in before
    assert "cash: 100 (0s ago)" in after
    assert 'positions: {"AAPL":3} (0s ago)' in after


async def test_a_call_for_something_else_fills_nothing(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = "- calls: [{tool: account, arguments: {of: bob}}]\n" + NAP
    fleet.start(fleet.agent("desk", DESK, ACCOUNT, script_yaml=script))
    await world.advance(MINUTE)
    assert "cash: not yet loaded" in read_hot_state(fleet.prompts("desk")[1])


async def test_what_the_agent_read_itself_is_no_reason_to_wake_it(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = "- calls: [{tool: account, arguments: {}}]\n" + NAP
    fleet.start(fleet.agent("desk", DESK, ACCOUNT, script_yaml=script))
    await world.advance(25 * MINUTE)
    skipped = [stored.event for stored in await fleet.events("desk-1") if isinstance(stored.event, TurnSkipped)]
    assert len(skipped) == 2
    assert len(fleet.prompts("desk")) == 2


async def test_one_reading_refreshes_all_fields_of_its_tool(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fresh = DESK.replace("ttl: 30", "ttl: 30, auto_refresh: true")
    fleet.start(fleet.agent("desk", fresh, ACCOUNT, script_yaml=NAP * 2))
    await world.advance(15 * MINUTE)
    first, second = map(read_hot_state, fleet.prompts("desk"))
    assert "cash: 100 (0s ago)" in first
    assert "cash: 200 (0s ago)" in second
    assert 'positions: {"AAPL":3} (0s ago)' in second


async def test_a_path_that_leads_nowhere_is_reported_and_asked_once(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    wrong = DESK.replace("ttl: 30", "ttl: 30, auto_refresh: true").replace("path: positions", "path: holdings")
    fleet.start(fleet.agent("desk", wrong, ACCOUNT, script_yaml=NAP))
    await world.advance(MINUTE)
    (text,) = map(read_hot_state, fleet.prompts("desk"))
    assert "cash: 100 (0s ago)" in text
    assert "positions: not yet loaded" in text
    assert "There is no `holdings` at `holdings`." in text


@pytest.mark.both_dispatchers
async def test_a_heartbeat_is_one_line(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path, sturdy=True)
    head = HEAD.replace("{enabled: false}", '{enabled: false, active_hours: {start: "01:00", end: "03:00"}}')
    office.reviewer("heartbeat: 30m\n", DONE, head=head)
    office.start(tmp_path / "clerk")
    await world.advance(4 * HOUR)
    times = [clock(event.due_at) for event in await office.told_of(RunStarted, "heartbeat")]
    assert times == ["01:00", "01:30", "02:00", "02:30"]
