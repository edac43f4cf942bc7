"""Ways in which an agent that runs by itself could be brought to break its promises, and cannot."""

from pathlib import Path

import pytest

from halter.app.talking import begin, say
from halter.app.up import turn_off, turn_on
from halter.brain.together import heard
from halter.core.clock import MINUTE, SECOND
from halter.core.events import RequestSettled
from halter.core.ids import session_stream
from halter.guard.halts import halt
from halter.testing.world import World
from tests.story.autonomous import Fleet, rhythm

COUNTS = """
from halter import tool

READ = []

@tool(level="SAFE", effect="read")
async def price() -> int:
    "Tell the price, which is always another one."
    READ.append(1)
    return len(READ)
"""

SENSES = """
model: scripted
script: script.yaml
sensors:
  - {name: ticker, type: poll, interval: 5, jitter: 0, source: {tool: price}}
"""

SCORES = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - name: ticker
    type: poll
    interval: 20
    jitter: 0
    source: {tool: price}
    signals: [{name: strange, model: "scripted:small", prompt: Strange?, notify: true}]
"""
SMALL = "- {when: The data, calls: [{tool: answer, arguments: {score: 0.2}}], takes: 15s}\n"


def naps(seconds: object = "1h", *names: str) -> str:
    arguments = f"{{mode: sleep, sleep: {seconds}, wake_early_if: [{', '.join(names)}]}}"
    return f"- calls: [{{tool: yield, arguments: {arguments}}}]\n"


async def outcomes(fleet: Fleet, session: str = "desk-1") -> list[str]:
    """What the requests of a session came to."""
    events = [stored.event for stored in await fleet.events(session)]
    return [event.outcome for event in events if isinstance(event, RequestSettled)]


STOPS = "calls: [{tool: yield, arguments: {mode: shutdown}}]"


async def test_a_shutdown_is_one_although_a_sensors_request_is_under_way(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SCORES, COUNTS, script_yaml=SMALL * 9 + f"- {{{STOPS}, takes: 5s}}\n"))
    await world.advance(MINUTE)
    row = await fleet.row("desk-1")
    assert (row.state, row.terminal_reason, row.owner) == ("COMPLETED", "completed", "")


@pytest.mark.parametrize("scope", ["session:desk-1", "agent:desk", "fleet"])
async def test_a_halt_ends_a_sleeper_while_its_sensors_request_is_under_way(
    world: World, tmp_path: Path, scope: str
) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SCORES, COUNTS, script_yaml=SMALL * 9 + naps()))
    await world.advance(5 * SECOND)
    await world.store.commit(halt(scope, "ada", "halt"))
    await world.advance(SECOND)
    row = await fleet.row("desk-1")
    assert (row.state, row.terminal_reason, row.owner) == ("HALTED", "external_halt", "")
    assert await outcomes(fleet) == ["ok", "cancelled"]


async def test_on_right_after_off_begins_the_next_session(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=naps() * 2))
    await world.advance(MINUTE)
    await turn_off(fleet.app, "desk")
    await turn_on(fleet.app, "desk")
    await world.advance(2 * MINUTE)
    assert (await fleet.row("desk-1")).state == "HALTED"
    assert [row.session for row in await fleet.sessions("desk")] == ["desk-1", "desk-2"]


async def test_what_is_under_way_is_not_taken_for_something_that_a_crash_left(world: World, tmp_path: Path) -> None:
    """A sleeper that the next process finds asleep wakes while its sensors' requests are under way."""
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", SCORES, COUNTS, script_yaml=SMALL * 900 + naps(610) * 9)
    fleet.start(folder)
    await world.advance(5 * MINUTE)
    await world.restart()
    fleet.start(folder)
    await world.advance(10 * MINUTE)
    assert (await outcomes(fleet)).count("unknown") == 1
    assert "attending_failed" not in await fleet.kinds("desk-1")


async def test_a_session_that_begins_while_its_agent_is_switched_off_is_stopped(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=naps() * 9))
    await world.advance(MINUTE)
    await turn_off(fleet.app, "desk")
    await world.advance(MINUTE)
    assert fleet.up is not None
    await fleet.up.agents["desk"].begin(2)
    await world.advance(MINUTE)
    row = await fleet.row("desk-2")
    assert (row.state, row.owner) == ("HALTED", "")
    await turn_on(fleet.app, "desk")
    await world.advance(MINUTE)
    assert (await fleet.row("desk-3")).state == "SLEEPING"


SHARP = "calls: [{tool: yield, arguments: {mode: shutdown}}], takes: 10s"


@pytest.mark.parametrize("beside", [True, False])
async def test_a_persons_word_during_the_last_turn_is_answered_by_another(
    world: World, tmp_path: Path, *, beside: bool
) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=f"- {{{SHARP}}}\n" * 2))
    await world.advance(5 * SECOND)
    assert fleet.up is not None
    speaking = fleet.up.agents["desk"].speaking
    if beside:
        await begin(speaking, "Buy now.", "chat")
    else:
        await say(speaking, "desk-1", "Buy now.")
    await world.advance(MINUTE)
    assert [line for line in rhythm(await fleet.events("desk-1")) if "turn" in line] == [
        "00:00:00 turn 1",
        "00:00:10 turn 2",
    ]
    assert "Buy now." in str(fleet.prompts("desk")[1].messages[-1])
    assert (await fleet.row("desk-1")).state == "COMPLETED"


async def test_a_word_at_the_very_moment_of_the_end_is_not_lost(world: World, tmp_path: Path) -> None:
    """It comes while the sensors are being stopped."""
    fleet = Fleet(world, tmp_path)
    script = SMALL * 99 + f"- {{{STOPS}, takes: 5s}}\n" * 2
    fleet.start(fleet.agent("desk", SCORES, COUNTS, script_yaml=script))
    async with heard(world.journal, lambda change: change.stream == session_stream("desk-1")) as news:
        while "cancelled" not in await outcomes(fleet):
            await news.wait()
            news.clear()
    await world.say("desk-1", "Wait.")
    await world.advance(MINUTE)
    assert "Wait." in str(fleet.prompts("desk")[1].messages)
    assert (await fleet.row("desk-1")).state == "COMPLETED"
