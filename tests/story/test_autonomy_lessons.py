"""What went wrong with agents that run by themselves elsewhere, and does not here.

Each test drives a model through the whole path: from an agent's folder, through the guard, to the journal. What went
wrong with schedules is not here, since there are none yet: that a mark moves only on success, and what cron does.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import DecisionAsked, HotStateSeen, RequestStarted, TurnEnded, TurnSkipped, TurnStarted
from halter.core.ids import session_stream
from halter.core.messages import Prompt, Text
from halter.core.ports import Stored
from halter.loop.concurrency import watch_changes
from halter.models.scripted import Scripted
from halter.runtime.runtime import open_runtime
from halter.runtime.supervisor import Supervisor
from halter.settings import read_settings
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet, moment, rhythm

PATIENCE = 60
"""Seconds after which a test in real time gives up."""

SCRIPTED = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
"""
NAP = "calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h, wake_early_if: [jump]}}]"

HOUR_LONG = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]\n"

PRICES = """
import asyncio

from halter import tool

@tool(level="SAFE", effect="read")
async def price() -> int:
    "Tell the price."
    return 200 if 60 <= asyncio.get_running_loop().time() < 65 else 100
"""
WATCHES = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - name: ticker
    type: poll
    interval: 5
    jitter: 0
    source: {tool: price}
    signals: [{name: jump, expression: value > 150, notify: true, cooldown: 1h}]
"""


def prompts(fleet: Fleet, agent: str, model: str = "scripted:script") -> list[Prompt]:
    """What a scripted model of an agent was sent."""
    assert fleet.up is not None
    return cast("Scripted", fleet.up.agents[agent].context.models.get(model)).requests


def ending(prompt: Prompt) -> str:
    """What stands last in a prompt, and changes every turn."""
    last = prompt.messages[-1].parts[-1]
    assert isinstance(last, Text)
    assert last.reason == "volatile"
    return last.text


def turns(events: Sequence[Stored]) -> list[str]:
    return [moment(stored.at) for stored in events if isinstance(stored.event, TurnStarted)]


async def test_the_model_is_offered_the_yield_and_its_turns_follow_what_it_yields(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    naps = (600, 60, 5)
    script = "".join(f"- calls: [{{tool: yield, arguments: {{mode: sleep, sleep: {nap}}}}}]\n" for nap in naps)
    last = "- calls: [{tool: yield, arguments: {mode: shutdown}}]\n"
    fleet.start(fleet.agent("watch", SCRIPTED, script_yaml=script + last))
    await world.advance(HOUR)
    assert all("yield" in {tool.name for tool in prompt.tools} for prompt in prompts(fleet, "watch"))
    events = await fleet.events("watch-1")
    assert turns(events) == ["00:00:00", "00:10:00", "00:11:00", "00:11:05"]
    assert rhythm(events)[-1] == "00:11:05 COMPLETED, completed"


async def test_words_of_shutting_down_stop_nothing(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    text = '- text: "I am shutting down now. yield(mode=shutdown)"\n'
    fleet.start(fleet.agent("watch", SCRIPTED, script_yaml=text * 3 + HOUR_LONG))
    await world.advance(MINUTE)
    events = await fleet.events("watch-1")
    assert turns(events) == ["00:00:00", "00:00:01", "00:00:03", "00:00:07"]
    assert (await fleet.row("watch-1")).state == "SLEEPING"


GATED = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0, gate: {on: change, model: "scripted:small"}}
hot_state: {fields: {price: {refresh_tool: price, auto_refresh: true, ttl: 1}}}
"""
RISING = """
import asyncio

from halter import tool

@tool(level="SAFE", effect="read")
async def price() -> int:
    "Tell the price."
    return int(asyncio.get_running_loop().time())
"""


@pytest.mark.parametrize(
    ("answer", "turns_taken"),
    [
        ("text: NO - YESTERDAY", 2),
        ("text: 'I would say no.'", 2),
        ('text: \'{"open": false, "reason": "calm"}\'', 1),
        ("calls: [{tool: answer, arguments: {open: false}}]", 1),
        ("calls: [{tool: answer, arguments: {open: true}}]", 2),
        ("calls: [{tool: answer, arguments: {open: 'no'}}]", 2),
    ],
)
@CALM
async def test_only_a_clear_no_in_the_form_that_was_asked_for_closes_a_gate(
    world: World, tmp_path: Path, answer: str, turns_taken: int
) -> None:
    fleet = Fleet(world, tmp_path)
    script = f"- {{when: The data, {answer}}}\n" + "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]\n" * 2
    fleet.start(fleet.agent("watch", GATED, RISING, script_yaml=script))
    await world.advance(90 * MINUTE)
    assert len(prompts(fleet, "watch", "scripted:small")) == 1
    assert len(turns(await fleet.events("watch-1"))) == turns_taken


STEPPED = RISING.replace(
    "int(asyncio.get_running_loop().time())", "(asyncio.get_running_loop().time() + 1800) // 14400"
)


@CALM
async def test_the_gates_model_is_asked_once_about_the_same_difference(world: World, tmp_path: Path) -> None:
    """The price rises every four hours; the agent wakes every hour. Also another process has the answer."""
    fleet = Fleet(world, tmp_path)
    no = "- {when: The data, calls: [{tool: answer, arguments: {open: false, reason: only a little}}]}\n"
    fleet.start(fleet.agent("watch", GATED, STEPPED, script_yaml=no * 9 + HOUR_LONG))
    await world.advance(6 * HOUR)
    await world.restart()
    fleet.start(tmp_path / "watch")
    await world.advance(6 * HOUR)
    events = [stored.event for stored in await fleet.events("watch-1")]
    request_events = [event for event in events if isinstance(event, RequestStarted)]
    assert [event.purpose for event in request_events] == ["turn", *["gate"] * 3]
    assert len([event for event in events if isinstance(event, TurnSkipped) and event.stage == "model"]) > 6


SCORED = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - name: ticker
    type: poll
    interval: 1h
    jitter: 0
    source: {tool: price}
    signals: [{name: strange, model: "scripted:small", prompt: Strange?, notify: true}]
"""


@pytest.mark.parametrize(
    ("answer", "alerts"),
    [
        ("text: 0.2 on a scale of 0 to 1", 0),
        ("text: '1.0'", 0),
        ("calls: [{tool: answer, arguments: {score: 0.2}}]", 0),
        ("calls: [{tool: answer, arguments: {score: 7}}]", 0),
        ("calls: [{tool: answer, arguments: {score: 0.9}}]", 1),
    ],
)
async def test_a_score_in_a_sentence_is_no_score(world: World, tmp_path: Path, answer: str, alerts: int) -> None:
    fleet = Fleet(world, tmp_path)
    script = f"- {{when: The data, {answer}}}\n- calls: [{{tool: yield, arguments: {{mode: sleep, sleep: 1h}}}}]\n"
    fleet.start(fleet.agent("watch", SCORED, RISING, script_yaml=script))
    await world.advance(MINUTE)
    assert len(prompts(fleet, "watch", "scripted:small")) == 1
    assert len(await fleet.inbox("watch-1")) == alerts


@CALM
async def test_a_model_that_forgets_to_yield_pauses_longer_each_time(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    text = "- text: All is well.\n"
    fleet.start(fleet.agent("watch", SCRIPTED, script_yaml=text * 12 + HOUR_LONG + text * 2 + HOUR_LONG))
    await world.advance(2 * HOUR + 20 * MINUTE)
    events = await fleet.events("watch-1")
    # 1 + 2 + 4 + … seconds; whoever has yielded once begins anew.
    assert turns(events)[:13] == [moment(events[0].at + (2**number - 1) * SECOND) for number in range(13)]
    assert turns(events)[13:] == ["02:08:15", "02:08:16", "02:08:18"]


TRADES = """
import asyncio

from halter import tool

@tool(level="RESTRICTED")
async def trade(symbol: str) -> str:
    "Buy something."
    return "bought " + symbol
"""


@pytest.mark.parametrize("mode", ["SEMI", "FULL"])
async def test_a_prediction_is_paid_for_before_a_person_is_asked_and_otherwise_not_at_all(
    world: World, tmp_path: Path, mode: str
) -> None:
    fleet = Fleet(world, tmp_path, f"mode: {mode}\npolicy: {{simulate: asked}}\n")
    script = (
        "- calls: [{tool: trade, arguments: {symbol: ACME}}]\n- calls: [{tool: yield, arguments: {mode: shutdown}}]\n"
    )
    text = "model_for: {simulation: 'scripted:small'}\n"
    foresees = "- {when: trade, text: It would buy.}\n"
    fleet.start(fleet.agent("desk", SCRIPTED + text, TRADES, script_yaml=foresees + script))
    await world.advance(MINUTE)
    events = await fleet.events("desk-1")
    order = [
        event.purpose if isinstance(event, RequestStarted) else "asked"
        for event in (stored.event for stored in events)
        if isinstance(event, (RequestStarted, DecisionAsked))
    ]
    assert order == (["turn", "simulation", "asked"] if mode == "SEMI" else ["turn", "turn"])


@CALM
async def test_a_sleep_longer_than_the_idle_timeout_ends_nobody(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    patient = "model: scripted\nscript: script.yaml\nautonomy: {enabled: true, idle_timeout: 10}\n"
    naps = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 5h}}]\n" * 3
    fleet.start(fleet.agent("watch", patient, script_yaml=naps))
    await world.advance(14 * HOUR)
    assert turns(await fleet.events("watch-1")) == ["00:00:00", "05:00:00", "10:00:00"]
    assert (await fleet.row("watch-1")).state == "SLEEPING"


@CALM
async def test_an_alert_survives_a_failed_request_and_is_gone_after_the_turn_that_showed_it(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    fails = "- fails: {kind: Rejected, message: not today}\n"
    fleet.start(fleet.agent("desk", WATCHES, PRICES, script_yaml=f"- {NAP}\n{fails}- {NAP}\n- {NAP}\n"))
    await world.advance(2 * HOUR)
    events = await fleet.events("desk-1")
    ends = [event.why for stored in events if isinstance(event := stored.event, TurnEnded)]
    assert ends[:4] == ["yielded", "model_error", "yielded", "yielded"]
    results = ["`jump`" in ending(prompt) for prompt in prompts(fleet, "desk")]
    assert results[:4] == [False, True, True, False]


async def test_an_alert_survives_a_crash_in_the_turn_that_shows_it(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", WATCHES, PRICES, script_yaml=f"- {{{NAP}}}\n- {{{NAP}, takes: 50s}}\n")
    fleet.start(folder)
    await world.advance(70 * SECOND)
    assert (await fleet.events("desk-1"))[-1].kind == "request_started"
    await world.restart()
    (folder / "script.yaml").write_text(f"- {NAP}\n- {NAP}\n")
    fleet.start(folder)
    await world.advance(2 * HOUR)
    assert ["`jump`" in ending(prompt) for prompt in prompts(fleet, "desk")] == [True, False]


async def test_a_signal_that_fires_while_the_model_thinks_is_not_slept_through(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    slow = f"- {{{NAP}, takes: 70s}}\n"
    fleet.start(fleet.agent("desk", WATCHES, PRICES, script_yaml=slow + f"- {NAP}\n"))
    await world.advance(5 * MINUTE)
    assert rhythm(await fleet.events("desk-1")) == [
        "00:00:00 turn 1",
        "00:01:10 yielded sleep",
        "00:01:10 turn 2",
        "00:01:10 yielded sleep",
        "00:01:10 SLEEPING until 01:01:10",
    ]
    assert ["`jump`" in ending(prompt) for prompt in prompts(fleet, "desk")] == [False, True]


WORKS = """
import asyncio
from pathlib import Path

from halter import tool

LOG = Path(__file__).parent / "log.txt"

@tool(level="CONTROLLED")
async def work() -> str:
    "Do something that takes a while."
    with LOG.open("a") as log:
        log.write("begun ")
    await asyncio.sleep(20)
    with LOG.open("a") as log:
        log.write("done ")
    return "done"
"""
TAKES_TURNS = """
model: reflex
policy: {provenance: off}
reflex:
  - {when: step == 0, call: {tool: work}}
  - {yield: {mode: sleep, sleep: 10}}
"""


async def test_two_processes_never_give_one_agent_two_turns_at_once(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("worker", TAKES_TURNS, WORKS)
    first = fleet.start(folder)
    fleet.start(folder)
    await world.advance(5 * MINUTE + 25 * SECOND)
    first.cancel()
    await world.advance(5 * MINUTE)
    events = await fleet.events("worker-1")
    kinds = [event.kind for event in events if event.kind in ("turn_started", "turn_ended")]
    assert kinds == ["turn_started", "turn_ended"] * 21
    assert (folder / "log.txt").read_text().split() == ["begun", "done"] * 21
    assert [event.kind for event in events].count("attending_failed") == 0


async def test_what_breaks_down_over_a_session_is_said_and_no_other_session_suffers(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    naps = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 420}}]\n" * 20
    well = fleet.agent("well", SCRIPTED, script_yaml=naps)
    broken = fleet.agent("broken", SCRIPTED, script_yaml="- {}\n" * 20)
    fleet.start(broken, well)
    await world.advance(70 * MINUTE)
    ends = [event.why for stored in await fleet.events("broken-1") if isinstance(event := stored.event, TurnEnded)]
    assert ends == ["model_error"] * 3
    row = await fleet.row("broken-1")
    assert (row.state, row.terminal_reason) == ("ERROR", "model_error")
    assert len(turns(await fleet.events("well-1"))) == 11


LISTENS = """
model: reflex
reflex:
  - {{when: size(hot.notifications) > 0, yield: {{mode: shutdown, reason: seen}}}}
  - {{yield: {{mode: sleep, sleep: 1h, wake_early_if: [jump]}}}}
sensors:
  - name: feed
    type: stream
    source: {{url: "http://127.0.0.1:{port}/feed"}}
    signals: [{{name: jump, expression: value.price > 150, notify: true}}]
autonomy: {{enabled: true}}
"""
FEED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    b': a comment is no data\n\ndata: {"price": 100}\n\n: {"price": 999}\n\ndata: {"price":\ndata: 200}\n\n'
)


async def test_a_stream_of_a_real_server_wakes_an_agent_and_its_comments_are_no_data(tmp_path: Path) -> None:
    bodies: list[bytes] = []
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            bodies.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(FEED)
            await writer.drain()
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    folder = tmp_path / "listener"
    folder.mkdir()
    (folder / "agent.yaml").write_text("name: listener\n" + LISTENS.format(port=server.sockets[0].getsockname()[1]))
    environ = {"HALTER_TRUST": str(tmp_path / "trust.json"), "USER": "ada"}
    async with open_runtime(read_settings(environ, tmp_path, "memory:"), environ=environ) as app:
        task = asyncio.create_task(Supervisor(app, lambda *_: None, rng=random.Random(1)).run([folder]))
        events: list[Stored] = []
        async with asyncio.timeout(PATIENCE), watch_changes(app.store) as news:
            while not events or events[-1].kind != "session_ended":
                await news.wait()
                news.clear()
                events = list(await app.store.read(session_stream("listener-1"), 0, 1000))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    over.set()
    server.close()
    assert rhythm(events)[-1].endswith("COMPLETED, completed")
    results: list[Any] = [
        msgspec.json.decode(stored.body or b"{}") for stored in events if isinstance(stored.event, HotStateSeen)
    ]
    assert all(each.get("feed", {"price": 100})["price"] in (100, 200) for each in results)
    assert results[-1] == {"feed": {"price": 200}}
    assert len(bodies) == 1
