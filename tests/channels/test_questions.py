"""Questions that a model asks in words: answered by a reply, once, by an operator, also after a restart."""

from pathlib import Path
from typing import Any

import pytest

from halter.channels.messages import FOREIGN
from halter.core.clock import MINUTE, SECOND
from halter.core.errors import NotDone
from halter.core.events import WakePosted
from halter.core.ids import inbox_stream
from halter.core.ports import Query
from halter.core.rows import HaltRow
from halter.operations import messages
from halter.operations.actor import Actor, Principal
from halter.operations.channels import offer_pairing
from halter.state import lifecycle
from halter.testing.world import World
from tests.channels.fake_ntfy import FakeNtfy
from tests.channels.fake_slack import FakeSlack
from tests.channels.fake_telegram import FakeTelegram
from tests.channels.test_decisions_on_ntfy import FLEET as NTFY
from tests.channels.test_decisions_on_slack import serve as serve_slack
from tests.channels.test_decisions_on_telegram import ADA, FLEET, Phone

ASKS = """
- {when: Look, calls: [{tool: ask_user, arguments: {question: "Which desk?\\nYes: It is dismissed."}}]}
- {when: left, calls: [{tool: ask_user, arguments: {question: Which drawer?}}]}
- {repeat: true, text: Done.}
"""
SESSION = "desk.once-1"


class Asked:
    """Ada is paired on some platform, and an agent asks her something."""

    def __init__(self, phone: Phone, account: str, text: str) -> None:
        self.phone, self.account, self.place = phone, account, text

    @property
    def shown(self) -> Any:
        return [each for each in self.phone.platform.messages if "asks a question" in each.text]

    def reply(self, text: str, message: Any) -> None:
        """Reply to a message; on ntfy, which has no replies, by the command that it shows."""
        if isinstance(self.phone.platform, FakeNtfy):
            command = message.text.partition("or write: ")[2].partition(" ANSWER")[0]
            self.phone.platform.write(self.account, f"{command} {text}")
        else:
            self.phone.platform.write(self.account, text, place=self.place, reply_to=message.id)

    async def answers(self) -> list[tuple[str, bytes | None]]:
        events = await self.phone.world.events(inbox_stream(SESSION))
        return [
            (each.event.sender, each.body)
            for each in events
            if isinstance(each.event, WakePosted) and each.event.cause == "message"
        ]


def serve(phone: Phone) -> None:
    if isinstance(phone.platform, FakeSlack):
        serve_slack(phone)
    else:
        phone.serve()


async def ready(world: World, home: Path, platform: str = "telegram", role: str = "operator") -> Asked:
    result: Any = {"telegram": FakeTelegram, "ntfy": FakeNtfy, "slack": FakeSlack}[platform]()
    phone = Phone(world, home, ASKS, platform=result, fleet={"telegram": FLEET, "ntfy": NTFY, "slack": ""}[platform])
    serve(phone)
    await world.advance(SECOND)
    offer = await offer_pairing(phone.desk, platform, "ada", role)
    account, text = {"telegram": (ADA, ADA), "ntfy": (offer.place, ""), "slack": ("U0ADA", "D1")}[platform]
    result.write(account, offer.code, place=text)
    await world.advance(10 * SECOND)
    await phone.asks()
    return Asked(phone, account, text)


@pytest.mark.parametrize("platform", ["telegram", "ntfy", "slack"])
async def test_a_reply_answers_a_question_and_the_message_becomes_the_outcome(
    world: World, tmp_path: Path, platform: str
) -> None:
    asked = await ready(world, tmp_path, platform)
    (first,) = asked.shown
    assert first.buttons == {}
    assert first.text.partition(f"{FOREIGN}\n\n")[2] == "Which desk?\nYes: It is dismissed."
    asked.reply("the left one, yes", first)
    await world.advance(MINUTE)
    assert await asked.answers() == [("ada", b"the left one, yes")]
    assert first.text == f"Answered by ada, in session {SESSION}."
    (second,) = asked.shown
    asked.reply("the upper one", second)
    await world.advance(MINUTE)
    assert [row.state for row in await asked.phone.fleet.sessions("desk")] == ["COMPLETED"]
    assert len(await asked.answers()) == 2


@pytest.mark.parametrize("platform", ["telegram", "ntfy", "slack"])
async def test_an_answer_counts_once_and_never_for_a_later_question(
    world: World, tmp_path: Path, platform: str
) -> None:
    asked = await ready(world, tmp_path, platform)
    (first,) = asked.shown
    before = first.text
    asked.reply("the left one", first)
    asked.reply("no, the right one", first)
    await world.advance(MINUTE)
    first.text = before
    asked.reply("again", first)
    asked.phone.platform.send_again()
    await world.advance(MINUTE)
    assert await asked.answers() == [("ada", b"the left one")]
    texts = [*getattr(asked.phone.platform, "toasts", []), *(each.text for each in asked.phone.platform.messages)]
    assert sum("This question was already answered" in each for each in texts) >= 2


@pytest.mark.parametrize("platform", ["telegram", "ntfy", "slack"])
async def test_a_question_survives_a_restart_and_is_not_sent_twice(world: World, tmp_path: Path, platform: str) -> None:
    asked = await ready(world, tmp_path, platform)
    (first,) = asked.shown
    asked.phone.tasks[0].cancel()
    await world.advance(MINUTE)
    asked.reply("the right one", first)
    serve(asked.phone)
    await world.advance(MINUTE)
    assert await asked.answers() == [("ada", b"the right one")]
    assert len(asked.shown) == 0


async def test_a_reply_that_was_done_and_not_noted_is_done_once(world: World, tmp_path: Path) -> None:
    asked = await ready(world, tmp_path)
    (first,) = asked.shown
    desk, call = (
        Actor(asked.phone.fleet.app, Principal("ada", "operator")),
        first.text.split("/answer ")[1].split("/")[0],
    )
    once = await messages.answer_question(desk, SESSION, call, "left", "k")
    done = await messages.answer_question(desk, SESSION, call, "left", "k")
    assert once == done
    with pytest.raises(NotDone, match="already answered"):
        await messages.answer_question(desk, SESSION, call, "right", "another")
    await world.advance(MINUTE)
    assert await asked.answers() == [("ada", b"left")]


async def test_an_answer_that_comes_late_is_not_one_to_the_next_question(world: World, tmp_path: Path) -> None:
    asked = await ready(world, tmp_path)
    (before,) = await asked.phone.fleet.sessions("desk")
    asked.reply("the left one", asked.shown[0])
    await world.advance(MINUTE)
    assert "Which drawer?" in asked.shown[0].text
    late = lifecycle.answer_question(before, "late", "bob", b"right", None)
    assert (await asked.phone.fleet.app.store.commit(late)).events == ()


async def test_what_is_answered_elsewhere_shows_there(world: World, tmp_path: Path) -> None:
    asked = await ready(world, tmp_path)
    (first,) = asked.shown
    await messages.send_message(Actor(asked.phone.fleet.app, Principal("bob")), SESSION, "the right one")
    await world.advance(MINUTE)
    assert first.text == f"Answered by bob, in session {SESSION}."


async def test_an_approver_is_not_asked_and_cannot_answer(world: World, tmp_path: Path) -> None:
    asked = await ready(world, tmp_path, role="approver")
    assert asked.shown == []
    asked.phone.platform.write(ADA, f"/answer {SESSION}.1/question left")
    await world.advance(MINUTE)
    assert await asked.answers() == []


@pytest.mark.parametrize(("platform", "words"), [("telegram", "/halt"), ("slack", "Halt"), ("telegram", "/HALT fleet")])
async def test_a_halt_in_reply_to_a_question_halts(world: World, tmp_path: Path, platform: str, words: str) -> None:
    asked = await ready(world, tmp_path, platform)
    (first,) = asked.shown
    asked.reply(words, first)
    await world.advance(MINUTE)
    assert [row.scope for row in await world.journal.ask(Query("all_halts", HaltRow))] == ["fleet"]
    assert await asked.answers() == []


async def test_what_was_forwarded_answers_nothing(world: World, tmp_path: Path) -> None:
    asked = await ready(world, tmp_path)
    (first,) = asked.shown
    asked.phone.platform.write(ADA, "left", reply_to=first.id, forward_origin={"type": "user"})
    await world.advance(MINUTE)
    assert await asked.answers() == []
