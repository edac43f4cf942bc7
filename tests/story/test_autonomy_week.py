"""Days in which nothing happens: what an agent that runs by itself costs, with a gate and without one."""

from pathlib import Path

import msgspec
import pytest

from halter.core.clock import DAY
from halter.core.events import RequestStarted, TurnSkipped
from halter.core.money import micros_to_usd
from halter.core.ports import Query
from halter.state.receipt import make_receipt
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet, moment

PRICES = """
models:
  scripted:script: {price: {input: 3, output: 15}}
  scripted:small: {price: {input: 0.1, output: 0.4}}
"""
WATCH = """
model: scripted
script: script.yaml
hot_state: {{fields: {{doors: {{refresh_tool: doors, auto_refresh: true, ttl: 1m}}}}}}
autonomy: {{enabled: true{gate}}}
"""
SHUT = """
from halter import tool

@tool(level="SAFE", effect="read")
async def doors() -> dict:
    "Tell how the doors are."
    return {"front": "shut", "back": "shut"}
"""
COUNTED = """
import asyncio

from halter import tool

@tool(level="SAFE", effect="read")
async def doors() -> dict:
    "Tell how the doors are, and how often somebody has passed by."
    return {"front": "shut", "passed": int(asyncio.get_running_loop().time() // 60)}
"""
NAP = """
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]
  usage: {input_tokens: 100, output_tokens: 20}
"""
NO = """
- when: The data
  calls: [{tool: answer, arguments: {open: false, reason: only somebody who passed by}}]
  usage: {input_tokens: 200, output_tokens: 30}
"""
A_TURN = 100 * 3 + 20 * 15
A_LOOK = 200 // 10 + 30 * 4 // 10
"""Micro-dollars."""


class Spent(msgspec.Struct, frozen=True):
    """What one purpose cost an agent."""

    agent: str
    purpose: str
    name: str
    spends: int
    usd: int
    input_tokens: int
    output_tokens: int


async def list_requests_and_skips(fleet: Fleet, agent: str) -> tuple[list[str], list[str]]:
    """The purposes of an agent's requests, and when it skipped a turn."""
    events = await fleet.events(f"{agent}-1")
    purposes = [event.purpose for stored in events if isinstance(event := stored.event, RequestStarted)]
    return purposes, [moment(stored.at) for stored in events if isinstance(stored.event, TurnSkipped)]


@CALM
@pytest.mark.parametrize("days", [1, pytest.param(7, marks=pytest.mark.soak)])
def test_days_without_news_cost_one_request_with_a_gate_and_one_for_every_nap_without(
    tmp_path: Path, days: int
) -> None:
    with World(7, orderly=True) as world:
        world.run(quiet_days(world, tmp_path, days))


async def quiet_days(world: World, tmp_path: Path, days: int) -> None:
    naps = days * 24
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    small = ', gate: {on: change, model: "scripted:small"}'
    agents = [
        fleet.agent("gated", WATCH.format(gate=", gate: {on: change}"), SHUT, script_yaml=NAP),
        fleet.agent("open", WATCH.format(gate=""), SHUT, script_yaml=NAP * (naps + 1)),
        fleet.agent("asked", WATCH.format(gate=small), COUNTED, script_yaml=NO * naps + NAP),
    ]
    fleet.start(*agents)
    await world.advance(days * DAY)
    assert await list_requests_and_skips(fleet, "gated") == (
        ["turn"],
        [f"{hour:02}:00:00" for hour in range(1, naps + 1)],
    )
    assert await list_requests_and_skips(fleet, "open") == (["turn"] * (naps + 1), [])
    texts, skips = await list_requests_and_skips(fleet, "asked")
    assert (texts, len(skips)) == (["turn", *["gate"] * naps], naps)
    assert set(await world.journal.ask(Query("spent_by_purpose", Spent, {"since": 0}))) == {
        Spent("open", "turn", "scripted:script", naps + 1, (naps + 1) * A_TURN, (naps + 1) * 100, (naps + 1) * 20),
        Spent("asked", "gate", "scripted:small", naps, naps * A_LOOK, naps * 200, naps * 30),
        *(Spent(agent, "turn", "scripted:script", 1, A_TURN, 100, 20) for agent in ("asked", "gated")),
    }
    for agent, spent in (
        ("gated", {"turn": A_TURN}),
        ("open", {"turn": (naps + 1) * A_TURN}),
        ("asked", {"turn": A_TURN, "gate": naps * A_LOOK}),
    ):
        receipt = make_receipt(await fleet.events(f"{agent}-1"))
        assert receipt.spent_by_purpose_usd == {purpose: micros_to_usd(micros) for purpose, micros in spent.items()}
        assert (receipt.state, receipt.cost_usd) == ("SLEEPING", micros_to_usd(sum(spent.values())))
