"""A question and a decision on Telegram, with a crash at any commit: each is answered once, by the person who did."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from halter.core.clock import SECOND
from halter.core.events import ApproverPaired, CallStarted, DecisionMade, WakePosted
from halter.core.ids import inbox_stream
from halter.state.channel import ChannelLog
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from tests.channels.test_decisions_on_telegram import ADA, Phone

SCRIPT = """
- {when: Look, calls: [{tool: ask_user, arguments: {question: Which desk?}}]}
- {when: left, text: It is full., calls: [{tool: wipe, arguments: {path: old}}]}
- {repeat: true, text: Done.}
"""
SESSION = "desk.once-1"
PAIRED = ApproverPaired(channel="telegram", account=ADA, place=ADA, name="ada", role="operator", by="root")
EVERY = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])


class Person:
    """Ada, who answers each message that she gets once, whatever becomes of the process that sent it."""

    def __init__(self, phone: Phone) -> None:
        self.phone = phone
        self._answered: set[str] = set()

    def answer(self) -> None:
        for message in self.phone.platform.messages:
            if message.id in self._answered:
                continue
            if yes := [label for label in message.buttons if label in ("Approve", "It was done")]:
                self.phone.platform.press(ADA, message, yes[0])
            elif "asks a question" in message.text:
                self.phone.platform.write(ADA, "the left one", reply_to=message.id)
            else:
                continue
            self._answered.add(message.id)


def crash_each(home: Path, every: int) -> Iterator[tuple[World, Phone]]:
    persons: list[Person] = []
    numbers = itertools.count()

    async def program(world: World) -> None:
        person = persons[-1]
        phone = person.phone
        log = ChannelLog(world.journal, "telegram")
        await log.append("paired", lambda state: [] if state.approvers else [PAIRED])
        phone.serve()
        phone.fleet.start(phone.folder)
        while [row.state for row in await phone.fleet.sessions("desk")] != ["COMPLETED"]:
            person.answer()
            await world.clock.sleep(SECOND)
        await world.clock.sleep(5 * SECOND)
        for task in phone.tasks:
            task.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash, orderly=True)
        path = home / str(next(numbers))
        path.mkdir()
        persons.append(Person(Phone(world, path, SCRIPT)))
        return world

    for world in crash_everywhere(program, new_world, every=every):
        yield world, persons[-1].phone


async def check(world: World, phone: Phone) -> None:
    inbox = [stored.event for stored in await world.events(inbox_stream(SESSION))]
    decisions = [event for event in inbox if isinstance(event, DecisionMade)]
    assert [(event.verdict, event.by) for event in decisions if event.decision.endswith("/approval")] == [
        ("approve", "ada")
    ]
    assert len({event.decision for event in decisions}) == len(decisions)
    wake_posteds = [event for event in inbox if isinstance(event, WakePosted) and event.cause == "message"]
    assert [event.sender for event in wake_posteds] == ["ada"]
    events = [stored.event for stored in await phone.fleet.events(SESSION)]
    ran = [event.tool for event in events if isinstance(event, CallStarted)]
    assert (ran.count("wipe"), ran.count("ask_user")) == (1, 1)


@EVERY
def test_each_is_answered_once_after_a_crash_at_any_commit(every: int, tmp_path: Path) -> None:
    lives = 0
    for world, phone in crash_each(tmp_path, every):
        world.run(check(world, phone))
        lives += 1
    assert lives > 5
