"""Sessions that end without progress back off: minutes, then an hour, then a person. Progress decides, not the end."""

from pathlib import Path

import pytest

from halter.channels.channel import describe_status
from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import NotificationQueued, RunSkipped, TurnEnded, TurnStarted
from halter.core.ids import OUTBOX
from halter.core.notifications import parse_notification
from halter.core.ports import Query, read_body
from halter.core.rows import SpendRow
from halter.dashboard.home import arrange_cards, list_unhealthy_parts
from halter.dashboard.labels import is_unwell, label_health
from halter.operations import queries
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import OpenInbox, waiting
from halter.operations.registry import show_home
from halter.operations.status import read_status
from halter.operations.top import top
from halter.present.report import build_status_sheet
from halter.present.sheet import Sheet, list_lines
from halter.present.tables import build_inbox_sheet
from halter.runtime.message_router import describe_needs
from halter.runtime.needs import list_unhealthy
from halter.runtime.switches import turn_on
from halter.runtime.trigger_runner import run_now
from halter.runtime.webhooks import Delivery, HookAccepted, HookRejected
from halter.testing.world import World
from halter.top.rows import head_line, list_rows
from tests.story.autonomous import CALM, Fleet, rhythm
from tests.story.tasks import Office

PRICES = "models: {scripted:script: {price: {input: 1, output: 200}}}\n"
USED = "usage: {input_tokens: 400, output_tokens: 240}"
"""What a reply of the script costs at that price: about five cents."""


def reply(*calls: str, text: str = "") -> str:
    """Write a reply that the model gives again and again."""
    return f"- {{repeat: true, {USED}, text: {text or 'Once more.'}, calls: [{', '.join(calls)}]}}\n"


def call(tool: str, arguments: str = "") -> str:
    return f"{{tool: {tool}, arguments: {{{arguments}}}}}"


STUCK = reply(call("read_meter"))


def write_orders(count: int) -> str:
    """Write replies that each book another order."""
    return "".join(f"- {{{USED}, calls: [{call('book', f'order: o{number}')}]}}\n" for number in range(count))


TOOLS = '''
from halter import tool

@tool(level="SAFE", effect="read", reads="nothing", isolate=False)
def read_meter() -> str:
    """Read the meter."""
    return "42"

@tool(level="SAFE", effect="write", reads="nothing", isolate=False)
def book(order: str) -> str:
    """Book an order."""
    return "booked"
'''
HEAD = "model: scripted\nscript: script.yaml\nautonomy: {enabled: false}\n"
EVERY_MINUTE = "schedules: [{name: tick, prompt: Look around., every: 1m}]\n"
ALONE = "model: scripted\nscript: script.yaml\nautonomy: {enabled: true, prompt: Look around., gate: {on: change}}\n"
CAPS = "limits: {max_cost_usd: 0.35, max_cost_usd_per_day: 10, max_output_tokens: 256}\n"


async def list_starts(fleet: Fleet, agent: str) -> list[int]:
    """List when the agent's sessions started, in minutes after the first."""
    rows = sorted(await fleet.sessions(agent), key=lambda row: row.started_at)
    return [(row.started_at - rows[0].started_at) // MINUTE for row in rows]


async def list_subjects(world: World) -> list[str]:
    """List the subjects of the notices that were queued."""
    return [
        parse_notification(await read_body(world.journal, stored)).subject
        for stored in await world.events(OUTBOX)
        if isinstance(stored.event, NotificationQueued)
    ]


def render_plain(sheet: Sheet) -> str:
    """Render a sheet as it stands in a pipe."""
    return "\n".join(list_lines(sheet))


async def count_requests(fleet: Fleet) -> int:
    return len(await fleet.world.journal.ask(Query("all_spends", SpendRow)))


def start_clerk(world: World, home: Path, limits: str, script: str = STUCK, trigger: str = EVERY_MINUTE) -> Office:
    """Start an agent that a trigger starts, with a script that it repeats."""
    office = Office(world, home, PRICES, sturdy=True)
    office.reviewer(trigger, script, TOOLS, f"{HEAD}limits: {{{limits}}}\n")
    office.start(home / "clerk")
    return office


def build_actor(fleet: Fleet) -> Actor:
    return Actor(fleet.app, Principal("ada", "admin", ()))


@CALM
async def test_an_agent_that_repeats_one_call_until_its_cap_backs_off_and_then_waits_for_a_person(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    fleet.start(fleet.agent("watch", ALONE + CAPS, TOOLS, script_yaml=STUCK))
    await world.advance(2 * DAY)
    # In each session one turn repeats itself, five minutes later the next one reaches the cap.
    assert await list_starts(fleet, "watch") == [0, 10, 75]
    assert await count_requests(fleet) <= 21
    assert any("until a person runs `halter on watch`" in sentence for _, sentence in fleet.told)
    await turn_on(fleet.app, "watch")
    await world.advance(MINUTE)
    assert len(await list_starts(fleet, "watch")) == 4


@CALM
async def test_turns_of_an_autonomous_session_without_progress_back_off_and_then_wait_for_a_person(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    fleet.start(fleet.agent("watch", ALONE, TOOLS, script_yaml=STUCK))
    await world.advance(MINUTE)
    (need,) = await queries.read_needs(build_actor(fleet))
    assert "watch is unhealthy: the last turn of watch brought no new effect" in need.sentence
    await world.advance(3 * HOUR)
    assert rhythm(await fleet.events("watch-1")) == [
        "00:00:00 turn 1",
        "00:00:00 repetition",
        "00:00:00 SLEEPING until 00:05:00",
        "00:05:00 woken by timer",
        "00:05:00 turn 2",
        "00:05:00 repetition",
        "00:05:00 SLEEPING until 01:05:00",
        "01:05:00 woken by timer",
        "01:05:00 turn 3",
        "01:05:00 repetition",
        "01:05:00 ERROR, repetition",
    ]
    await world.advance(DAY)
    assert await list_starts(fleet, "watch") == [0]
    (need,) = await queries.read_needs(build_actor(fleet))
    assert (need.kind, need.commands[0]) == ("stopped", "halter on watch")


@CALM
async def test_turns_that_reach_their_steps_with_new_effects_do_not_stop_an_autonomous_session(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    limits = "limits: {max_steps: 4, max_cost_usd: 9}\nautonomy: {enabled: true, max_actions_per_minute: 0}\n"
    script = write_orders(40)
    fleet.start(fleet.agent("watch", ALONE.partition("autonomy")[0] + limits, TOOLS, script_yaml=script))
    await world.advance(4 * MINUTE)
    events = [stored.event for stored in await fleet.events("watch-1")]
    assert [event.why for event in events if isinstance(event, TurnEnded)][:10] == ["max_steps"] * 10


@CALM
@pytest.mark.parametrize("by", ["schedule", "autonomous"])
async def test_an_agent_that_wakes_hourly_looks_and_rightly_does_nothing_is_well_and_stays_on(
    world: World, tmp_path: Path, by: str
) -> None:
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    look = f"- {{text: Looking., {USED}, calls: [{call('read_meter')}]}}\n"
    if by == "schedule":
        every = "schedules: [{name: tick, prompt: Look around., every: 1h}]\n"
        script = (look + f"- {{text: Nothing new., {USED}}}\n") * 80
        fleet.start(fleet.agent("watch", HEAD + every, TOOLS, script_yaml=script))
    else:
        caps = "limits: {max_cost_usd: 0.35, max_cost_usd_per_day: 10}\n"
        nap = f"- {{text: Nothing new., {USED}, calls: [{call('yield', 'mode: sleep, sleep: 1h')}]}}\n"
        alone = ALONE.replace(", gate: {on: change}", "")
        fleet.start(fleet.agent("watch", alone + caps, TOOLS, script_yaml=(look + nap) * 120))
    for _ in range(6):
        await world.advance(8 * HOUR)
        assert await list_unhealthy(fleet.app.store, world.now) == []
    sessions = await fleet.sessions("watch")
    turns = [stored for row in sessions for stored in await fleet.events(row.session)]
    assert sum(isinstance(stored.event, TurnStarted) for stored in turns) >= 46
    assert len(sessions) >= 10


ENDS = {
    "its cap": "max_cost_usd: 0.2, max_output_tokens: 256",
    "its steps": "max_steps: 2",
    "repetition": "max_cost_usd: 2",
    "its time": "timeout: 1s",
}


@CALM
@pytest.mark.parametrize("limits", ENDS.values(), ids=ENDS)
async def test_the_sessions_of_a_schedule_that_a_limit_ends_without_progress_back_off(
    world: World, tmp_path: Path, limits: str
) -> None:
    script = STUCK.replace("repeat: true", "repeat: true, takes: 2s") if "timeout" in limits else STUCK
    office = start_clerk(world, tmp_path, limits, script)
    await world.advance(8 * HOUR)
    first, second, third = await list_starts(office, "clerk")
    assert (first, second - first in (5, 6), third - second in (60, 61)) == (0, True, True)
    skipped = await office.told_of(RunSkipped, "tick")
    assert {event.why for event in skipped} == {"no_progress"}
    assert "until a person runs `halter on clerk`" in skipped[-1].sentence
    await turn_on(office.app, "clerk")
    await world.advance(2 * MINUTE)
    assert len(await list_starts(office, "clerk")) == 4


REPEATED = {
    "a read": reply(call("read_meter")),
    "a write": reply(call("book", "order: o1")),
    "two calls in turn": f"- calls: [{call('read_meter')}]\n- calls: [{call('book', 'order: o1')}]\n" * 60,
    "a write, then a read": f"- when: Look around\n  calls: [{call('book', 'order: o1')}]\n" * 4 + STUCK,
    "a call that is refused": reply(call("no_such_tool")),
}


@CALM
@pytest.mark.parametrize("script", REPEATED.values(), ids=REPEATED)
async def test_what_was_done_before_is_no_progress_whatever_it_is(world: World, tmp_path: Path, script: str) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 12", script)
    await world.advance(12 * HOUR)
    assert 3 <= len(await list_starts(office, "clerk")) <= 4
    assert [each.until for each in await list_unhealthy(office.app.store, world.now)] == [None]


@CALM
async def test_sessions_that_a_limit_ends_but_that_did_something_new_go_on(world: World, tmp_path: Path) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 3", write_orders(200))
    await world.advance(20 * MINUTE)
    assert (await office.states())["MAX_STEPS"] >= 18
    assert await list_unhealthy(office.app.store, world.now) == []


@CALM
async def test_a_backoff_survives_restarts(world: World, tmp_path: Path) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 2")
    for _ in range(30):
        await world.advance(20 * MINUTE)
        await world.restart()
        office.start(tmp_path / "clerk")
    assert len(await list_starts(office, "clerk")) == 3


@CALM
async def test_a_person_runs_a_trigger_that_backs_off_and_progress_ends_the_backoff(
    world: World, tmp_path: Path
) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 2")
    await world.advance(3 * HOUR)
    assert len(await list_starts(office, "clerk")) == 3
    assert office.up is not None
    context = office.up.agents["clerk"].context
    session = await run_now(context, tmp_path / "clerk", "tick", None)
    await world.advance(MINUTE)
    assert (await office.row(session)).state == "MAX_STEPS"
    assert len(await list_starts(office, "clerk")) == 4


STUCK_WATCH = "watches:\n  - {name: papers, path: inbox, prompt: A paper has come in., debounce: 2s, max_attempts: 2}\n"


@CALM
async def test_one_bad_document_does_not_stop_a_watch(world: World, tmp_path: Path) -> None:
    script = f"- {{finds: bad, repeat: true, calls: [{call('read_meter')}]}}\n- {{repeat: true, text: Done.}}\n"
    office = start_clerk(world, tmp_path, "max_steps: 2", script, STUCK_WATCH)
    office.drop("bad.txt", "bad")
    await world.advance(HOUR)
    office.drop("good.txt", "good")
    await world.advance(HOUR)
    assert await office.states() == {"MAX_STEPS": 2, "COMPLETED": 1}
    assert await list_unhealthy(office.app.store, world.now) == []


@CALM
async def test_documents_that_fail_at_the_same_time_count_as_one(world: World, tmp_path: Path) -> None:
    slow = STUCK.replace("repeat: true", "repeat: true, takes: 5s")
    office = start_clerk(world, tmp_path, "max_steps: 2", slow, STUCK_WATCH)
    for number in range(9):
        office.drop(f"{number}.txt", f"document {number}")
    await world.advance(3 * MINUTE)
    (unhealthy,) = await list_unhealthy(office.app.store, world.now)
    assert (len(await office.runs()), unhealthy.attempts) == (4, 1)
    await world.advance(12 * HOUR)
    (unhealthy,) = await list_unhealthy(office.app.store, world.now)
    assert (len(await office.runs()), unhealthy.attempts, unhealthy.until) == (12, 3, None)


@CALM
async def test_a_watch_whose_documents_all_fail_waits_for_a_person_and_loses_none(world: World, tmp_path: Path) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 2", STUCK, STUCK_WATCH.replace("}", ", max_parallel: 1}"))
    for number in range(6):
        office.drop(f"{number}.txt", f"document {number}")
    await world.advance(8 * HOUR)
    assert len(await office.runs()) == 3
    assert "until a person runs `halter on clerk`" in (await office.trigger()).delayed
    await turn_on(office.app, "clerk")
    await world.advance(MINUTE)
    assert len(await office.runs()) == 4


@CALM
async def test_a_webhook_whose_sessions_make_no_progress_tells_the_sender_when_to_send_again(
    world: World, tmp_path: Path
) -> None:
    office = Office(world, tmp_path, PRICES, sturdy=True)
    office.environ["HALTER_SECRET_HOOK_TOKEN"] = "mAdeUpT0kenThatOpensNothing"
    hook = "webhooks: [{name: tick, prompt: Answer., token: '${secret:HOOK_TOKEN}'}]\n"
    office.reviewer("secrets: [HOOK_TOKEN]\n" + hook, STUCK, TOOLS, f"{HEAD}limits: {{max_steps: 2}}\n")
    office.start(tmp_path / "clerk")
    await world.advance(SECOND)
    assert office.up is not None
    hooks = office.up.hooks()

    async def deliver(number: int) -> HookAccepted | HookRejected:
        headers = {"authorization": "Bearer mAdeUpT0kenThatOpensNothing", "halter-delivery": f"d{number}"}
        return await hooks.receive("clerk", "tick", Delivery(headers, b"hello"))

    answers: list[tuple[int, int]] = []
    for number, pause in enumerate([MINUTE, 5 * MINUTE, MINUTE, HOUR, MINUTE, DAY]):
        answer = await deliver(number)
        await world.advance(pause)
        if isinstance(answer, HookRejected):
            answers.append((answer.status, (answer.retry_after or 0) // MINUTE))
    assert answers == [(429, 4), (429, 59), (409, 0)]
    assert len(await office.runs()) == 3


@CALM
async def test_an_unhealthy_agent_is_the_first_word_of_every_face(world: World, tmp_path: Path) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 4, max_repeated_tool_steps: 9")
    await world.advance(2 * MINUTE)
    actor, chat = build_actor(office), await describe_needs(office.app.store, world.now)
    fleet_status, view, home = await read_status(actor), await top(actor), await show_home(actor)
    inbox = OpenInbox(await waiting(actor), await queries.read_needs(actor), [])
    (line,) = [each for each in home.fleet if each.agent == "clerk"]
    (notice,) = await list_subjects(world)
    first_words = {
        "status": render_plain(build_status_sheet(fleet_status, world.now)),
        "top": head_line(view).partition(" · ")[2],
        "top's table": list_rows(view)["inbox"][0][1][1],
        "inbox": render_plain(build_inbox_sheet(inbox, world.now)),
        "home": list_unhealthy_parts(home.fleet)[0][0],
        "home's cards": next(iter(arrange_cards({}, home.needs_you))),
        "phone": describe_status(fleet_status),
        "notice": notice,
        "chat": chat,
    }
    assert {face: text for face, text in first_words.items() if "unhealthy" not in text[:50].lower()} == {}
    everything = " ".join(first_words.values()).lower()
    assert "nothing needs you" not in everything
    assert "fine" not in everything.split()
    sentence = (
        "clerk is unhealthy: the last session of clerk/tick brought no new effect, no finding and no answer. "
        "clerk.tick-1 ended MAX_STEPS (max steps) after 4 calls of read_meter with the same arguments. "
        "Nothing starts there before "
        "2026-01-01 00:06:00 UTC. Correct instructions, tools or limits; `halter on clerk` starts it now."
    )
    (agent,) = fleet_status.agents
    assert (agent.health, agent.health_sentence, line.health, line.trouble) == ("unhealthy", sentence) * 2
    assert (label_health(line).text, is_unwell(line)) == ("Unhealthy", True)
    assert (home.needs_you[0].kind, view.inbox[0].need.kind, inbox.needs[0].kind) == ("unhealthy",) * 3


@CALM
async def test_a_person_is_told_once_when_an_unhealthy_agent_waits_for_one(world: World, tmp_path: Path) -> None:
    office = start_clerk(world, tmp_path, "max_steps: 4")
    await world.advance(12 * HOUR)
    assert await list_subjects(world) == [
        "clerk is unhealthy",
        "clerk is unhealthy",
        "clerk needs you: it is unhealthy",
    ]
    (need,) = await queries.read_needs(build_actor(office))
    assert (need.kind, need.commands[0]) == ("stopped", "halter on clerk")
    await turn_on(office.app, "clerk")
    assert await queries.read_needs(build_actor(office)) == []
