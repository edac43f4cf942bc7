"""A chat with an agent that also runs by itself: both know the same facts, and each has a history of its own."""

from pathlib import Path

import msgspec

from halter.core.clock import MINUTE, SECOND
from halter.core.events import RequestStarted, TurnStarted, WakePosted
from halter.core.ids import WorkerId, inbox_stream
from halter.core.ports import read_body
from halter.core.text import decode_body
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session, post_message
from halter.testing.world import World
from tests.story.autonomous import Fleet, rhythm

DESK = """
model: reflex
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - name: ticker
    type: poll
    interval: 5
    jitter: 0
    source: {tool: price}
reflex:
  - when: message.contains("price") && hot.ticker == 100
    say: It is a hundred.
  - when: message.contains("price")
    say: I do not know.
  - when: size(hot.notifications) > 0
    yield: {mode: sleep, sleep: 1h, reason: a person spoke}
  - yield: {mode: sleep, sleep: 1h, reason: nothing to do}
"""
PRICE = """
from halter import tool

@tool(level="SAFE", effect="read")
async def price() -> str:
    "Tell the price."
    return "100"
"""


async def make_chat_context(fleet: Fleet) -> AgentRuntime:
    """Somebody who talks with the agent, in a process of their own."""
    assert fleet.up is not None
    return msgspec.structs.replace(fleet.up.agents["desk"].context, worker=WorkerId("talk"))


async def words(fleet: Fleet, session: str) -> str:
    """The history of a session: what its turns began with, and what the model answered."""
    events = [event for event in await fleet.events(session) if event.kind in ("turn_started", "request_settled")]
    return "\n".join([decode_body(await read_body(fleet.world.journal, event)) for event in events])


async def test_a_chat_sees_the_facts_and_wakes_the_agent_and_both_keep_their_own_history(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK, PRICE))
    await world.advance(10 * MINUTE)
    context = await make_chat_context(fleet)
    chat = await begin_session(context, "What is the price?", "chat")
    ending, _ = await attend_session(context, chat)
    await world.advance(MINUTE)

    assert ending.state == "WAITING_FOR_INPUT"
    assert "It is a hundred." in await words(fleet, chat)
    assert rhythm(await fleet.events("desk-1"))[-4:] == [
        "00:10:00 woken by message",
        "00:10:00 turn 2",
        "00:10:00 yielded sleep",
        "00:10:00 SLEEPING until 01:10:00",
    ]
    text = await words(fleet, "desk-1")
    assert "What is the price?" not in text
    assert "It is a hundred." not in text
    assert "a person spoke" in text
    assert "a person spoke" not in await words(fleet, chat)
    (alert,) = await world.events(inbox_stream("desk-1"))
    assert isinstance(alert.event, WakePosted)
    assert (alert.event.notifies, alert.event.origin, alert.event.trusted) == (True, "person", True)
    assert decode_body(alert.body or b"").endswith(f"in the chat {chat}: What is the price?")


async def test_what_a_chat_is_shown_of_the_facts_is_stale_and_has_its_age(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK, PRICE))
    await world.advance(10 * MINUTE + 3 * SECOND)
    context = await make_chat_context(fleet)
    chat = await begin_session(context, "What is the price?", "chat")
    ending = await attend_session(context, chat)
    prompts = [stored for stored in await fleet.events(chat) if isinstance(stored.event, RequestStarted)]
    text = decode_body(await read_body(world.journal, prompts[-1]))
    assert "ticker: 100 (stale: " in text, (text, ending)


async def test_every_word_of_a_chat_reaches_the_agent_once(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK, PRICE))
    await world.advance(MINUTE)
    context = await make_chat_context(fleet)
    chat = await begin_session(context, "What is the price?", "chat")
    await attend_session(context, chat)
    await post_message(context, chat, "And the price now?")
    await attend_session(context, chat)
    await world.advance(MINUTE)
    texts = [decode_body(stored.body or b"") for stored in await world.events(inbox_stream("desk-1"))]
    assert [text.rpartition(": ")[2] for text in texts] == ["What is the price?", "And the price now?"]
    turns = [stored for stored in await fleet.events("desk-1") if isinstance(stored.event, TurnStarted)]
    assert 2 <= len(turns) <= 3


async def test_a_chat_with_an_agent_whose_session_has_ended_wakes_nobody(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", DESK.replace("mode: sleep, sleep: 1h, reason: nothing to do", "mode: shutdown"), PRICE)
    fleet.start(folder)
    await world.advance(MINUTE)
    assert (await fleet.row("desk-1")).state == "COMPLETED"
    context = await make_chat_context(fleet)
    chat = await begin_session(context, "What is the price?", "chat")
    await attend_session(context, chat)
    await world.advance(MINUTE)
    assert await world.events(inbox_stream("desk-1")) == []
    assert (await fleet.row("desk-1")).state == "COMPLETED"
