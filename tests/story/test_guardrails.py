"""The guardrails of agents that run by themselves: what each does, its event, and that a crash forgives nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import CallRefused, CallStarted, GuardrailTriggered, RequestSettled
from halter.core.ports import Stored
from halter.state import lifecycle
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet, moment, rhythm

TOUCH = """
from halter import tool

@tool(level="CONTROLLED", effect="write")
async def touch(what: str = "") -> str:
    "Change something."
    return "done"

@tool(level="SAFE", effect="read")
async def look(what: str = "") -> str:
    "Only look."
    return "seen"
"""


def held_back(events: Sequence[Stored]) -> list[tuple[str, str, str]]:
    """When which guardrail held the session back, and until when."""
    return [
        (moment(stored.at), event.guardrail, moment(event.until) if event.until else "")
        for stored in events
        if isinstance(event := stored.event, GuardrailTriggered)
    ]


def turns(events: Sequence[Stored]) -> list[str]:
    return [moment(event.at) for event in events if event.kind == "turn_started"]


RESTLESS = """
model: reflex
reflex: [{{yield: {{mode: {mode}, sleep: 0}}}}]
autonomy: {{enabled: true, max_sleep: {max_sleep}}}
"""


async def test_an_agent_that_never_sleeps_is_put_to_sleep_after_fifty_turns(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("hasty", RESTLESS.format(mode="sleep", max_sleep="1d")))
    await world.advance(HOUR)
    events = await fleet.events("hasty-1")
    # No sleep is shorter than a second, and that is none.
    assert turns(events) == [f"00:00:{second:02}" for second in range(50)]
    assert held_back(events) == [("00:00:49", "max_consecutive_turns", "01:00:49")]
    assert rhythm(events)[-1] == "00:00:49 SLEEPING until 01:00:49"
    await world.advance(HOUR)
    events = await fleet.events("hasty-1")
    assert turns(events)[50:] == [f"01:00:{second:02}" for second in range(49, 60)] + [
        f"01:01:{second:02}" for second in range(39)
    ]
    assert held_back(events)[1:] == [("01:01:38", "max_consecutive_turns", "02:01:38")]


async def test_going_on_at_once_for_ever_is_held_back_likewise(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("hasty", RESTLESS.format(mode="continue", max_sleep="12h")))
    await world.advance(HOUR)
    events = await fleet.events("hasty-1")
    assert turns(events) == ["00:00:00"] * 50 + ["00:30:00"] * 50 + ["01:00:00"] * 50
    assert [until for _, _, until in held_back(events)] == ["00:30:00", "01:00:00", "01:30:00"]


async def test_turns_without_a_sleep_are_counted_across_a_crash(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("hasty", RESTLESS.format(mode="sleep", max_sleep="1d"))
    fleet.start(folder)
    await world.advance(29 * SECOND)
    assert len(turns(await fleet.events("hasty-1"))) == 30
    await world.restart()
    await world.advance(MINUTE)
    fleet.start(folder)
    await world.advance(HOUR)
    events = await fleet.events("hasty-1")
    assert len(turns(events)) == 50
    assert [guardrail for _, guardrail, _ in held_back(events)] == ["max_consecutive_turns"]


FORGETFUL = """
model: reflex
reflex: [{say: All is well.}]
"""


async def test_an_agent_awake_for_nothing_is_shut_down(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("idler", FORGETFUL))
    await world.advance(HOUR)
    events = await fleet.events("idler-1")
    # The pauses double: after 1 + 2 + … + 512 seconds it was awake for longer than ten minutes.
    assert turns(events) == [moment(events[0].at + (2**number - 1) * SECOND) for number in range(10)]
    assert held_back(events) == [("00:17:03", "idle_timeout", "")]
    assert rhythm(events)[-1] == "00:17:03 COMPLETED, idle_timeout"
    row = await fleet.row("idler-1")
    assert (row.state, row.terminal_reason) == ("COMPLETED", "idle_timeout")


async def test_time_awake_for_nothing_is_counted_across_a_crash(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("idler", FORGETFUL)
    fleet.start(folder)
    await world.advance(9 * MINUTE)
    await world.restart()
    fleet.start(folder)
    await world.advance(HOUR)
    events = await fleet.events("idler-1")
    assert rhythm(events)[-1] == "00:17:03 COMPLETED, idle_timeout"
    assert len(turns(events)) == 10


YIELDS, SAYS = "{yield: {mode: sleep, sleep: 3h}}", "{say: All is well.}"


@CALM
@pytest.mark.parametrize(
    ("rule", "more", "hours"),
    [(YIELDS, "", 24), (SAYS, ", gate: {on: change}", 24), (SAYS, ", max_consecutive_turns: 5", 2)],
    ids=["a sleep that it chose", "turns that the gate skipped", "a sleep that was forced"],
)
async def test_what_is_not_idleness_ends_no_agent(
    world: World, tmp_path: Path, rule: str, more: str, hours: int
) -> None:
    fleet = Fleet(world, tmp_path)
    fields = "hot_state: {fields: {note: {}}}\n"
    mind = f"model: reflex\nreflex: [{rule}]\nautonomy: {{enabled: true{more}}}\n"
    fleet.start(fleet.agent("patient", fields + mind))
    await world.advance(hours * HOUR)
    assert (await fleet.row("patient-1")).state == "SLEEPING"


DAYTIME = """
model: reflex
reflex: [{yield: {mode: sleep, sleep: 1h}}]
autonomy: {enabled: true, active_hours: {start: "08:00", end: "10:30", timezone: UTC}}
"""


@CALM
async def test_outside_of_its_hours_an_agent_sleeps_until_they_begin(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("clerk", DAYTIME))
    await world.advance(33 * HOUR)
    events = await fleet.events("clerk-1")
    assert turns(events) == ["08:00:00", "09:00:00", "10:00:00", "32:00:00", "33:00:00"]
    assert held_back(events) == [
        ("00:00:00", "active_hours", "08:00:00"),
        ("11:00:00", "active_hours", "32:00:00"),
    ]


@CALM
async def test_a_persons_message_wakes_an_agent_outside_of_its_hours(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("clerk", DAYTIME))
    await world.advance(3 * HOUR)
    await world.send_message("clerk-1", "Is anybody there?", "ada")
    await world.advance(6 * HOUR)
    events = await fleet.events("clerk-1")
    assert rhythm(events) == [
        "00:00:00 held back by active_hours",
        "00:00:00 SLEEPING until 08:00:00",
        "03:00:00 woken by message",
        "03:00:00 turn 1",
        "03:00:00 yielded sleep",
        "03:00:00 SLEEPING until 04:00:00",
        "04:00:00 woken by timer",
        "04:00:00 held back by active_hours",
        "04:00:00 SLEEPING until 08:00:00",
        "08:00:00 woken by timer",
        "08:00:00 turn 2",
        "08:00:00 yielded sleep",
        "08:00:00 SLEEPING until 09:00:00",
        "09:00:00 woken by timer",
        "09:00:00 turn 3",
        "09:00:00 yielded sleep",
        "09:00:00 SLEEPING until 10:00:00",
    ]


@CALM
async def test_an_agents_message_opens_no_turn_outside_of_the_hours(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("clerk", DAYTIME))
    await world.advance(3 * HOUR)
    await world.store.commit(lifecycle.post_message("clerk-1", "news", b"Something came.", "other", "agent"))
    await world.advance(HOUR)
    assert turns(await fleet.events("clerk-1")) == []
    await world.advance(4 * HOUR)
    assert turns(await fleet.events("clerk-1")) == ["08:00:00"]


BUSY = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
"""


async def test_the_eleventh_change_within_a_minute_is_refused_and_recorded(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    touches = ", ".join(f'{{tool: touch, arguments: {{what: "{number}"}}}}' for number in range(12))
    looks = ", ".join(f'{{tool: look, arguments: {{what: "{number}"}}}}' for number in range(15))
    script = f"""
- calls: [{touches}]
- calls: [{looks}]
- calls: [{{tool: touch, arguments: {{what: once more}}}}]
- calls: [{{tool: yield, arguments: {{mode: sleep, sleep: 60}}}}]
- calls: [{{tool: touch, arguments: {{what: later}}}}]
- calls: [{{tool: yield, arguments: {{mode: sleep, sleep: 1h}}}}]
"""
    fleet.start(fleet.agent("busy", BUSY, TOUCH, script_yaml=script))
    await world.advance(2 * MINUTE)
    events = await fleet.events("busy-1")
    ran = [event.tool for stored in events if isinstance(event := stored.event, CallStarted)]
    refused = [event for stored in events if isinstance(event := stored.event, CallRefused)]
    assert (ran.count("touch"), ran.count("look")) == (11, 15)
    assert [(event.tool, event.outcome) for event in refused] == [("touch", "rate_limited")] * 3
    assert {event.sentence for event in refused} == {
        "You may make 10 calls per minute that change something. Wait with `yield`, then continue."
    }
    assert held_back(events) == [("00:00:00", "max_actions_per_minute", "")] * 2


TWO = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0, max_actions_per_minute: 2}
"""
FIVE_STEPS = "".join(f"- {{call: touch, arguments: {{what: '{n}'}}}}\n" for n in range(5))


def list_calls(events: Sequence[Stored]) -> list[str]:
    """List what became of each call of `touch`, with its time."""
    calls = [(stored.at, stored.event) for stored in events if isinstance(stored.event, CallStarted | CallRefused)]
    return [
        f"{moment(at)} {'ran' if isinstance(event, CallStarted) else event.outcome}"
        for at, event in calls
        if event.tool == "touch"
    ]


async def test_the_steps_of_a_playbook_are_counted_as_calls_that_change_something(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    script = """
- calls: [{tool: run_playbook, arguments: {playbook: steps}}]
- calls: [{tool: touch}]
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 60}}]
- calls: [{tool: run_playbook, arguments: {playbook: steps}}]
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]
"""
    folder = fleet.agent("busy", f"{TWO}verbs: [run_playbook]\n", TOUCH, script_yaml=script)
    (folder / "playbooks").mkdir()
    (folder / "playbooks" / "steps.yaml").write_text(FIVE_STEPS)
    fleet.trust(folder)
    fleet.start(folder)
    await world.advance(3 * MINUTE)
    first = ["00:00:00 ran", "00:00:00 ran", "00:00:00 rate_limited", "00:00:00 rate_limited"]
    later = ["00:01:00 ran", "00:01:00 ran", "00:01:00 rate_limited"]
    assert list_calls(await fleet.events("busy-1")) == first + later


ASKED = "model: scripted\nscript: script.yaml\nautonomy: {enabled: false}\n"
TOUCHES_FIVE = "- calls: [{tool: touch}, {tool: touch}, {tool: touch}, {tool: touch}, {tool: touch}]\n- {text: Done.}\n"


async def test_the_calls_of_asked_agents_count_for_the_one_that_asks(world: World, tmp_path: Path) -> None:
    """A limit of six: two that ask each other's help, and what is done for them, at any depth."""
    fleet = Fleet(world, tmp_path)
    ask = "- calls: [{tool: ask_scout, arguments: {task: touch all}}]\n"
    helper = f"{ASKED}agents: [{{name: scout}}]\n"
    fleet.agent("scout", ASKED, TOUCH, script_yaml=TOUCHES_FIVE)
    fleet.agent("helper", helper, TOUCH, script_yaml=f"- calls: [{{tool: touch}}]\n{ask}- {{text: Done.}}\n")
    script = """
- calls: [{tool: ask_helper, arguments: {task: touch all}}]
- calls: [{tool: touch}]
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]
"""
    six = TWO.replace("max_actions_per_minute: 2", "max_actions_per_minute: 6")
    fleet.start(fleet.agent("busy", f"{six}agents: [{{name: helper}}]\n", TOUCH, script_yaml=script))
    await world.advance(MINUTE)
    (scout,), (helper_row,) = await fleet.sessions("scout"), await fleet.sessions("helper")
    ran, limited = "00:00:00 ran", "00:00:00 rate_limited"
    assert list_calls(await fleet.events(helper_row.session)) == [ran]
    # Two calls that ask, and one of the helper: three are left.
    assert list_calls(await fleet.events(scout.session)) == [ran] * 3 + [limited] * 2
    assert list_calls(await fleet.events("busy-1")) == [limited]
    refused = [stored.event for stored in await fleet.events(scout.session) if isinstance(stored.event, CallRefused)]
    assert refused[0].sentence == (
        "busy-1 and the agents that it asks may make 6 calls per minute that change something. "
        "Answer without this call."
    )


PACED = """
model: reflex
reflex:
  - {when: step == 0, call: {tool: touch}}
  - {yield: {mode: sleep, sleep: 5}}
"""


def list_touch_times(events: Sequence[Stored]) -> list[str]:
    calls = [(stored.at, stored.event) for stored in events if isinstance(stored.event, CallStarted)]
    return [moment(at) for at, event in calls if event.tool == "touch"]


async def test_changes_are_counted_over_a_sliding_minute_also_across_a_crash(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("busy", PACED, TOUCH)
    fleet.start(folder)
    await world.advance(38 * SECOND)
    await world.restart()
    fleet.start(folder)
    await world.advance(80 * SECOND)
    events = await fleet.events("busy-1")
    first = [f"00:00:{second:02}" for second in range(0, 50, 5)]
    second = [f"00:01:{second:02}" for second in range(0, 50, 5)]
    assert list_touch_times(events) == first + second
    refused = [moment(stored.at) for stored in events if isinstance(stored.event, CallRefused)]
    assert refused == ["00:00:50", "00:00:55", "00:01:50", "00:01:55"]


HUNGRY = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0, token_budget_per_hour: 6000}
"""


def list_token_use(events: Sequence[Stored]) -> list[tuple[str, int]]:
    settled = [(stored.at, stored.event) for stored in events if isinstance(stored.event, RequestSettled)]
    return [(moment(at), event.charge.tokens) for at, event in settled if event.charge is not None]


LINE = """
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 5m}}]
  usage: {input_tokens: 500, output_tokens: 700, cache_read_tokens: 200}
"""


async def test_when_the_hours_tokens_are_used_up_it_pauses_until_the_hour_ends(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("hungry", HUNGRY, script_yaml=LINE * 20))
    await world.advance(65 * MINUTE)
    events = await fleet.events("hungry-1")
    # A request costs 1,000 tokens, since cached ones do not count, and what is left for the sixth is too little for it.
    assert rhythm(events)[-14:] == [
        "00:20:00 turn 5",
        "00:20:00 yielded sleep",
        "00:20:00 SLEEPING until 00:25:00",
        "00:25:00 woken by timer",
        "00:25:00 turn 6",
        "00:25:00 held back by token_budget_per_hour",
        "00:25:00 SLEEPING until 01:00:00",
        "01:00:00 woken by timer",
        "01:00:00 yielded sleep",
        "01:00:00 SLEEPING until 01:05:00",
        "01:05:00 woken by timer",
        "01:05:00 turn 7",
        "01:05:00 yielded sleep",
        "01:05:00 SLEEPING until 01:10:00",
    ]
    assert list_token_use(events) == [
        (at, 1000) for at in ("00:00:00", "00:05:00", "00:10:00", "00:15:00", "00:20:00", "01:00:00", "01:05:00")
    ]
    assert held_back(events) == [("00:25:00", "token_budget_per_hour", "01:00:00")]


@pytest.mark.parametrize("minutes", [12, 30], ids=["in the middle of the hour", "while it pauses"])
async def test_the_hours_tokens_are_counted_across_a_crash(world: World, tmp_path: Path, minutes: int) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("hungry", HUNGRY, script_yaml=LINE * 20)
    fleet.start(folder)
    await world.advance(minutes * MINUTE)
    await world.restart()
    fleet.start(folder)
    await world.advance((59 - minutes) * MINUTE)
    assert list_token_use(await fleet.events("hungry-1")) == [
        (at, 1000) for at in ("00:00:00", "00:05:00", "00:10:00", "00:15:00", "00:20:00")
    ]
    await world.advance(2 * MINUTE)
    assert list_token_use(await fleet.events("hungry-1"))[5:] == [("01:00:00", 1000)]


SCORES = """
model: scripted
script: script.yaml
autonomy: {enabled: true, token_budget_per_hour: 5000}
sensors:
  - name: feed
    type: poll
    interval: 60
    jitter: 0
    source: {tool: look}
    signals: [{name: odd, model: "scripted:small", prompt: Odd?, notify: true}]
"""
CALM = """
- when: The data
  calls: [{tool: answer, arguments: {score: 0.1}}]
  usage: {input_tokens: 400, output_tokens: 100}
"""


async def test_a_signal_that_finds_no_tokens_left_is_not_scored_and_lets_the_agent_sleep(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    nap = "- {calls: [{tool: yield, arguments: {mode: sleep, sleep: 3h}}], usage: {input_tokens: 500}}\n"
    fleet.start(fleet.agent("desk", SCORES, TOUCH, script_yaml=CALM * 100 + nap))
    await world.advance(61 * MINUTE)
    events = await fleet.events("desk-1")
    assert rhythm(events) == ["00:00:00 turn 1", "00:00:00 yielded sleep", "00:00:00 SLEEPING until 03:00:00"]
    # The turn and seven scores take 500 tokens each; for one more, which may take 1,408, too little is left.
    assert [tokens for at, tokens in list_token_use(events) if at < "01:00:00"] == [500] * 8
    assert list_token_use(events)[8:] == [("01:00:00", 500), ("01:01:00", 500)]
    assert held_back(events) == []


PATIENT = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0, token_budget_per_hour: 6000, max_consecutive_turns: 7}
"""


@pytest.mark.parametrize("crashes", [False, True], ids=["undisturbed", "after a crash"])
async def test_a_pause_for_tokens_is_counted_alike_with_and_without_a_crash(
    world: World, tmp_path: Path, *, crashes: bool
) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("hungry", PATIENT, script_yaml=LINE.replace("5m", "0") * 20)
    fleet.start(folder)
    await world.advance(30 * MINUTE)
    if crashes:
        await world.restart()
        fleet.start(folder)
    await world.advance(31 * MINUTE)
    assert held_back(await fleet.events("hungry-1")) == [
        ("00:00:05", "token_budget_per_hour", "01:00:00"),
        ("01:00:01", "max_consecutive_turns", "02:00:01"),
    ]
