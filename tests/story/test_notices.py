"""People are told of what was halted, failed, waits for them or is left to them: once, and after it is so."""

from pathlib import Path

from autonomous import Fleet

from halter.core.clock import HOUR, MINUTE
from halter.core.events import ItemReleased, NotificationQueued
from halter.core.ids import OUTBOX
from halter.core.notifications import parse_notification
from halter.core.ports import Query, read_body
from halter.core.rows import ItemRow, NotificationRow
from halter.operations.actor import Actor, Principal
from halter.operations.messages import send_message
from halter.operations.queries import read_needs
from halter.runtime.switches import turn_off
from halter.runtime.trigger_runner import record_trigger_events
from halter.testing.world import World
from tests.story.autonomous import CALM

DESK = """
autonomy: {enabled: false}
model: scripted
script: replies.yaml
schedules: [{name: hourly, every: 1h, prompt: Look at the desk.}]
"""
FAILS = "- {repeat: true, fails: {kind: Refused, message: I would rather not}}\n"
WIPES = """
- {when: Look at the desk, text: It is full., calls: [{tool: wipe, arguments: {}}]}
- {repeat: true, text: Done.}
"""
ASKS = """
- {when: Look at the desk, calls: [{tool: ask_user, arguments: {question: Which desk?}}]}
- {repeat: true, text: Done.}
"""
TOOLS = """
from halter import tool

@tool(level="RESTRICTED", effect="write")
def wipe() -> str:
    '''Wipe the desk.'''
    return "wiped"
"""


async def list_notifications(world: World) -> list[tuple[str, str]]:
    """What people are told by the runtime itself: over which channel, and with which subject."""
    events = [stored for stored in await world.events(OUTBOX) if isinstance(stored.event, NotificationQueued)]
    return [
        (stored.event.channel, parse_notification(await read_body(world.journal, stored)).subject)
        for stored in events
        if isinstance(stored.event, NotificationQueued)
    ]


async def texts(world: World) -> list[str]:
    return [
        parse_notification(await read_body(world.journal, stored)).text
        for stored in await world.events(OUTBOX)
        if isinstance(stored.event, NotificationQueued)
    ]


async def test_a_session_that_failed_is_notified_once_also_by_the_next_process(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", DESK, replies_yaml=FAILS)
    task = fleet.start(folder)
    await world.advance(90 * MINUTE)
    assert [row.state for row in await fleet.sessions("desk")] == ["ERROR"]
    assert await list_notifications(world) == [("in_app", "desk is unhealthy")]
    (row,) = await world.journal.ask(Query("all_notifications", NotificationRow))
    assert row.sent_at is not None
    task.cancel()
    fleet.start(folder)
    await world.advance(20 * MINUTE)
    assert len(await list_notifications(world)) == 1


async def test_whoever_died_before_the_word_was_out_leaves_it_to_the_next(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", DESK + "notify: {on: []}\n", replies_yaml=FAILS)
    task = fleet.start(folder)
    await world.advance(90 * MINUTE)
    assert await list_notifications(world) == []
    task.cancel()
    fleet.agent("desk", DESK, replies_yaml=FAILS)
    fleet.start(folder)
    await world.advance(MINUTE)
    assert await list_notifications(world) == [("in_app", "desk is unhealthy")]


async def test_a_session_that_waits_for_an_approval_is_notified(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK, TOOLS, replies_yaml=WIPES))
    await world.advance(HOUR + MINUTE)
    assert [row.state for row in await fleet.sessions("desk")] == ["WAITING_FOR_APPROVAL"]
    assert await list_notifications(world) == [("in_app", "desk needs you: wants to wipe.")]
    (need,) = await read_needs(Actor(fleet.app, Principal("ada")))
    assert (need.kind, need.sentence, need.why) == ("approval", "desk wants to wipe.", "It is full.")
    assert (await texts(world))[0].splitlines()[:2] == ["desk wants to wipe.", "It is full."]


async def test_a_task_that_asks_a_question_is_notified(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK, replies_yaml=ASKS))
    await world.advance(HOUR + MINUTE)
    assert [row.state for row in await fleet.sessions("desk")] == ["WAITING_FOR_INPUT"]
    assert await list_notifications(world) == [("in_app", "desk needs you: asks: Which desk?")]
    desk = Actor(fleet.app, Principal("ada"))
    (need,) = await read_needs(desk)
    assert (need.kind, need.sentence, need.commands) == (
        "question",
        "desk asks: Which desk?",
        ("halter tell desk.hourly-1 ANSWER",),
    )
    assert need.sentence in (await texts(world))[0]
    await send_message(desk, "desk.hourly-1", "The tall one.")
    await world.advance(MINUTE)
    assert await read_needs(desk) == []


async def test_a_session_that_was_halted_is_notified_over_every_channel(world: World, tmp_path: Path) -> None:
    channels = """
notify:
  channels:
    - {name: app, type: in_app}
    - {name: also, type: in_app}
"""
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK + channels, TOOLS, replies_yaml=WIPES))
    await world.advance(HOUR + MINUTE)
    await turn_off(fleet.app, "desk")
    await world.advance(MINUTE)
    assert [row.state for row in await fleet.sessions("desk")] == ["HALTED"]
    assert (await list_notifications(world))[2:] == [
        ("app", "desk: a session was halted"),
        ("also", "desk: a session was halted"),
    ]


async def test_a_document_that_cannot_be_read_is_notified_and_the_watch_continues(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    watch = DESK.replace("schedules: [{name: hourly, every: 1h", "watches: [{name: inbox, path: inbox")
    folder = fleet.agent("desk", watch, replies_yaml="- {repeat: true, text: Read.}\n")
    (folder / "inbox").mkdir()
    (folder / "inbox" / "empty.txt").write_bytes(b"")
    fleet.start(folder)
    await world.advance(MINUTE)
    assert await list_notifications(world) == [("in_app", "desk: a document was quarantined (empty.txt)")]
    (folder / "inbox" / "fine.txt").write_text("Hello.")
    await world.advance(MINUTE)
    assert [row.state for row in await fleet.sessions("desk")] == ["COMPLETED"]


async def test_an_event_that_agent_yaml_switches_off_is_not_notified(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK + "notify: {on: [waiting]}\n", replies_yaml=FAILS))
    await world.advance(90 * MINUTE)
    assert await list_notifications(world) == []


@CALM
async def test_a_document_that_is_quarantined_again_is_notified_again(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    text = DESK.replace("schedules: [{name: hourly, every: 1h", "watches: [{name: inbox, path: inbox, max_attempts: 1")
    folder = fleet.agent("desk", f"{text}notify: {{on: [quarantined]}}\n", replies_yaml=FAILS)
    (folder / "inbox").mkdir()
    (folder / "inbox" / "a.txt").write_text("Hello.")
    fleet.start(folder)
    await world.advance(MINUTE)
    assert len(await list_notifications(world)) == 1
    (item,) = await world.journal.ask(Query("items_of", ItemRow, {"trigger": "desk/inbox"}))
    await world.store.commit(
        record_trigger_events("desk/inbox", "again", ItemReleased(trigger="desk/inbox", item=item.item, by="ada"))
    )
    await world.advance(2 * HOUR)
    assert await list_notifications(world) == 2 * [("in_app", "desk: a document was quarantined (a.txt)")]
