"""Agents that run by themselves, in virtual time, from their folders to their journals."""

from pathlib import Path

import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import CallRefused, GuardrailTriggered, SessionEnded, WakePosted
from halter.core.ids import SessionId
from halter.core.messages import Text, ToolResult
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.halts import halt, resume
from halter.runtime.switches import turn_off, turn_on
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet, rhythm

pytestmark = pytest.mark.both_dispatchers

SLEEPS = """
model: scripted
script: script.yaml
"""

PRICES = '''
import asyncio

from halter import tool

ORDERS = []


@tool(level="SAFE", effect="read")
async def price() -> str:
    """Tell the price: 100, but 200 from the tenth minute on for a while."""
    at = asyncio.get_running_loop().time()
    return str(200 if 600 <= at < 900 else 100)


@tool(level="SAFE", effect="read", timeout=600)
async def ponder(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "pondered"


@tool(level="RESTRICTED")
async def order(shares: int) -> str:
    """Buy."""
    ORDERS.append(shares)
    return f"bought {shares}"
'''

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


def sleep(seconds: object = "1h", *names: str) -> str:
    arguments = f"{{mode: sleep, sleep: {seconds}, wake_early_if: [{', '.join(names)}]}}"
    return f"- calls: [{{tool: yield, arguments: {arguments}}}]\n"


def desk(fleet: Fleet, script: str, text: str = "") -> Path:
    return fleet.agent("desk", DESK + text, PRICES, script_yaml=script)


async def volatile(fleet: Fleet, session: str = "desk-1") -> list[str]:
    """What each request was told of what is true only now."""
    return [
        part.text
        for prompt in fleet.prompts("desk")
        for part in prompt.messages[-1].parts
        if isinstance(part, Text) and part.reason == "volatile"
    ]


async def test_a_yield_goes_from_the_models_reply_to_the_sleeping_row_and_back(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = sleep(300) + "- calls: [{tool: yield, arguments: {mode: shutdown, reason: all done}}]\n"
    fleet.start(fleet.agent("watch", SLEEPS, script_yaml=script))
    await world.advance(MINUTE)
    row = await fleet.row("watch-1")
    assert (row.state, row.owner, row.due_at) == ("SLEEPING", "", row.started_at + 300 * SECOND)
    await world.advance(10 * MINUTE)
    assert rhythm(await fleet.events("watch-1")) == [
        "00:00:00 turn 1",
        "00:00:00 yielded sleep",
        "00:00:00 SLEEPING until 00:05:00",
        "00:05:00 woken by timer",
        "00:05:00 turn 2",
        "00:05:00 yielded shutdown",
        "00:05:00 COMPLETED, completed",
    ]
    row = await fleet.row("watch-1")
    assert (row.state, row.terminal_reason) == ("COMPLETED", "completed")
    assert (
        "watch",
        "watch-1 has ended (COMPLETED: completed). Run `halter on watch` to start the next session.",
    ) in fleet.told


@CALM
async def test_a_signal_wakes_a_sleeper_and_its_alert_is_shown_once(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep("1h", "jump") * 3))
    await world.advance(30 * MINUTE)
    assert rhythm(await fleet.events("desk-1")) == [
        "00:00:00 turn 1",
        "00:00:00 yielded sleep",
        "00:00:00 SLEEPING until 01:00:00",
        "00:10:00 woken by signal",
        "00:10:00 turn 2",
        "00:10:00 yielded sleep",
        "00:10:00 SLEEPING until 01:10:00",
    ]
    await world.advance(HOUR)
    texts = await volatile(fleet)
    assert ["jump" in each for each in texts] == [False, True, False]
    assert "last_price: 200" in texts[1]
    assert texts[1].index("jump") < texts[1].index("last_price")


async def test_each_of_two_fields_gets_its_own_member_of_the_reading(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    tools = PRICES.replace("async def price() -> str:", "async def price() -> dict[str, float]:").replace(
        "return str(200 if 600 <= at < 900 else 100)", 'return {"last_price": at // 1 + 100, "1st-day": 7, "more": 1}'
    )
    text = DESK.replace("[{field: last_price}]", "[{field: last_price}, {field: 1st-day}]")
    text = text.replace("value > 150", "value.last_price > 1e9")
    fleet.start(fleet.agent("desk", text, tools, script_yaml=sleep("10m") * 3))
    await world.advance(30 * MINUTE)
    shown = (await volatile(fleet))[-1]
    assert "last_price: 1" in shown
    assert "1st-day: 7 (" in shown
    assert '"more"' not in shown


async def test_a_change_of_a_field_that_is_named_wakes(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep("1h", "last_price") * 9))
    await world.advance(20 * MINUTE)
    wakes = [line for line in rhythm(await fleet.events("desk-1")) if "woken" in line]
    # The first price may come before the first sleep or after it: then it is a change that wakes at once.
    assert [line for line in wakes if not line.startswith("00:00:00")] == [
        "00:10:00 woken by signal",
        "00:15:00 woken by signal",
    ]


async def test_an_alert_that_comes_while_a_turn_is_under_way_is_not_slept_through(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = sleep(595) + "- calls: [{tool: ponder, arguments: {seconds: 10}}]\n" + sleep("1h", "jump") * 2
    fleet.start(desk(fleet, script))
    await world.advance(30 * MINUTE)
    assert rhythm(await fleet.events("desk-1"))[3:] == [
        "00:09:55 woken by timer",
        "00:09:55 turn 2",
        "00:10:05 yielded sleep",
        "00:10:05 turn 3",
        "00:10:05 yielded sleep",
        "00:10:05 SLEEPING until 01:10:05",
    ]
    assert "jump" in (await volatile(fleet))[-1]


async def test_a_name_that_cannot_wake_is_answered_with_those_that_can(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep("1h", "moon") + sleep("1h")))
    await world.advance(MINUTE)
    (refused,) = [each.event for each in await fleet.events("desk-1") if isinstance(each.event, CallRefused)]
    assert refused.outcome == "invalid_arguments"
    assert refused.sentence == (
        "Nothing called `moon` can wake you; "
        "`wake_early_if` accepts `last_price`, `ticker`, `jump`, `message`, `decision`."
    )
    assert (await fleet.row("desk-1")).state == "SLEEPING"


@pytest.mark.parametrize("duration", ["-1", '"soon"', '"-5m"', "null", "[1]", "true"])
async def test_a_sleep_that_is_no_time_is_told_to_the_model(world: World, tmp_path: Path, duration: str) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep(duration) + sleep("1h")))
    await world.advance(MINUTE)
    assert [type(each.event) for each in await fleet.events("desk-1")].count(CallRefused) == 1
    assert (await fleet.row("desk-1")).state == "SLEEPING"


async def test_a_sleep_of_a_thousand_years_is_one_of_a_day(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep(1e30)))
    await world.advance(MINUTE)
    row = await fleet.row("desk-1")
    assert row.wake_at == row.started_at + 24 * HOUR


async def test_a_halt_ends_a_sleeper_and_lifting_it_lets_it_go_on(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep("1h") * 2))
    await world.advance(MINUTE)
    await world.store.commit(halt("agent:desk", "ada", "halt"))
    await world.advance(SECOND)
    row = await fleet.row("desk-1")
    assert (row.state, row.terminal_reason, row.owner) == ("HALTED", "external_halt", "")
    await world.advance(5 * MINUTE)
    await world.store.commit(resume("agent:desk", "ada", "resume"))
    await world.advance(MINUTE)
    assert (await fleet.row("desk-1")).state == "SLEEPING"
    kinds = await fleet.kinds("desk-1")
    assert kinds.count("session_ended") == kinds.count("session_resumed") == 1


async def test_a_sleeper_without_sensors_is_ended_by_a_halt_too(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("watch", SLEEPS, script_yaml=sleep("1h")))
    await world.advance(MINUTE)
    await world.store.commit(halt("fleet", "ada", "halt"))
    await world.advance(SECOND)
    assert (await fleet.row("watch-1")).state == "HALTED"


async def test_off_stops_what_runs_and_on_begins_anew(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep("1h") * 2))
    await world.advance(MINUTE)
    assert await turn_off(fleet.app, "desk") == ["desk-1"]
    await world.advance(MINUTE)
    assert (await fleet.row("desk-1")).state == "HALTED"
    assert fleet.told[-1] == ("desk", "desk is switched off. Run `halter on desk`.")
    await world.advance(HOUR)
    await turn_on(fleet.app, "desk")
    await world.advance(MINUTE)
    assert (await fleet.row("desk-2")).state == "SLEEPING"


async def test_an_agent_that_was_switched_off_stays_off_at_the_next_start(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = desk(fleet, sleep("1h") * 2)
    fleet.start(folder)
    await world.advance(MINUTE)
    await turn_off(fleet.app, "desk")
    await world.restart()
    fleet.start(folder)
    await world.advance(HOUR)
    assert [row.session for row in await fleet.sessions("desk")] == ["desk-1"]


async def test_a_sleeper_sleeps_on_in_the_next_process_and_wakes_when_it_is_time(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = desk(fleet, sleep("1h") * 2)
    fleet.start(folder)
    await world.advance(MINUTE)
    await world.restart()
    fleet.start(folder)
    await world.advance(2 * MINUTE)
    assert rhythm(await fleet.events("desk-1"))[-1] == "00:00:00 SLEEPING until 01:00:00"
    await world.advance(HOUR)
    assert "01:00:00 woken by timer" in rhythm(await fleet.events("desk-1"))
    assert (await fleet.row("desk-1")).generation == 2


async def test_a_wake_that_was_due_while_nothing_ran_comes_at_the_start(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = desk(fleet, sleep("1h") * 2)
    fleet.start(folder)
    await world.advance(MINUTE)
    await world.restart()
    await world.advance(3 * HOUR)
    fleet.start(folder)
    await world.advance(MINUTE)
    assert [line for line in rhythm(await fleet.events("desk-1")) if "woken" in line] == ["03:01:00 woken by timer"]


async def test_a_wait_for_a_person_pauses_the_loop_while_its_sensors_read_on(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, "- calls: [{tool: order, arguments: {shares: 5}}]\n" + sleep("1h")))
    await world.advance(30 * MINUTE)
    row = await fleet.row("desk-1")
    assert row.state == "WAITING_FOR_APPROVAL"
    (pending_decision,) = await list_pending_decisions(world.journal)
    fired = [each.event for each in await fleet.inbox("desk-1") if isinstance(each.event, WakePosted)]
    assert [event.name for event in fired] == ["jump"]
    await world.store.commit(answer_decision(pending_decision, "approve", "ada", "yes"))
    await world.advance(MINUTE)
    results = [
        part for message in fleet.prompts("desk")[-1].messages for part in message.parts if isinstance(part, ToolResult)
    ]
    assert [(result.tool, result.text) for result in results] == [("order", "bought 5")]
    row = await fleet.row("desk-1")
    assert row.state == "SLEEPING"


async def test_a_broken_agent_among_good_ones_is_reported_and_the_rest_runs(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    good = fleet.agent("watch", SLEEPS, script_yaml=sleep("1h"))
    bad = fleet.agent("bad", "modle: scripted\n")
    plain = fleet.agent("plain", "model: scripted\nscript: script.yaml\nautonomy: {}\n", script_yaml=sleep("1h"))
    fleet.start(bad, plain, good)
    await world.advance(MINUTE)
    assert (await fleet.row("watch-1")).state == "SLEEPING"
    assert "modle" in fleet.told[0][1]
    assert "plain has nothing to run unattended" in fleet.told[1][1]


async def test_a_session_that_spent_its_budget_gets_no_other_by_a_restart(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path, "models: {scripted:script: {price: {input: 100000, output: 100000}}}\n")
    folder = fleet.agent("watch", SLEEPS + "limits: {max_cost_usd: 0.01, on_cap: stop}\n", script_yaml=sleep("1h"))
    for _ in range(3):
        fleet.start(folder)
        await world.advance(HOUR)
        await world.restart()
    (row,) = await fleet.sessions("watch")
    assert (row.state, row.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")
    await turn_on(fleet.app, "watch")
    fleet.start(folder)
    await world.advance(MINUTE)
    assert len(await fleet.sessions("watch")) == 2


@CALM
async def test_what_nobody_has_to_know_is_not_written_down(world: World, tmp_path: Path) -> None:
    """Seven hundred looks that found nothing leave no trace."""
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(fleet, sleep("1d")))
    await world.advance(HOUR)
    assert len(await fleet.events("desk-1")) == 10
    assert len(await fleet.inbox("desk-1")) == 1
    assert SessionId("desk-1") in fleet.up.agents["desk"].snapshots if fleet.up else False
    assert GuardrailTriggered.KIND not in await fleet.kinds("desk-1")
    assert SessionEnded.KIND not in await fleet.kinds("desk-1")
