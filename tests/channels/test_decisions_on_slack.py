"""Decisions on Slack: one press answers exactly what was shown, once, and only by people who were paired."""

from pathlib import Path

import pytest

from halter.channels.channel import DecisionChannel
from halter.channels.slack import SlackTransport, read_typed
from halter.core.clock import MINUTE, SECOND
from halter.core.ports import Query
from halter.core.rows import HaltRow
from halter.operations import decisions
from halter.operations.actor import Actor, Principal
from halter.operations.channels import offer_pairing
from halter.testing.world import World
from tests.channels.fake_slack import FakeSlack
from tests.channels.streams import StreamedApp, make_client
from tests.channels.test_decisions_on_telegram import LONG, WIPES, Phone

ADA, EVE = "U0ADA", "U0EVE"


def serve(phone: Phone) -> None:
    fake = phone.platform
    transport = SlackTransport(
        lambda: fake.token,
        lambda: fake.app_token,
        "http://slack.test",
        lambda: make_client(StreamedApp(fake)),
        fake.open_socket,
    )
    phone.tasks.append(phone.world.spawn(DecisionChannel(phone.fleet.app, transport, phone.reports.append).run()))


async def ready(world: World, home: Path, replies: str = WIPES) -> Phone:
    phone = Phone(world, home, replies, platform=FakeSlack(), fleet="")
    serve(phone)
    await world.advance(SECOND)
    pairing_code = await offer_pairing(phone.desk, "slack", "ada", "approver")
    phone.platform.write(ADA, pairing_code.code, place="D1")
    await world.advance(3 * SECOND)
    await phone.asks()
    return phone


async def test_one_press_approves_and_the_message_becomes_the_outcome(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    assert (outcome.place, [*outcome.buttons]) == ("D1", ["Approve", "Deny", "Always"])
    data = phone.platform.press(ADA, outcome, "Approve")
    phone.platform.send_again()
    await world.advance(MINUTE)
    assert [(event.verdict, event.by) for event in await phone.made()] == [("approve", "ada")]
    (toast,) = phone.platform.toasts
    assert toast.startswith("Approved: wipe of desk, session desk.once-1. halter up ")
    assert (outcome.text, outcome.buttons) == ("Approved by ada: wipe of desk, session desk.once-1.", {})
    phone.platform.press_data(ADA, outcome, data)
    await world.advance(MINUTE)
    assert "already answered" in phone.platform.toasts[1]
    assert phone.platform.unconfirmed == {}


async def test_strangers_and_other_apps_are_ignored(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.press(EVE, outcome, "Approve")
    phone.platform.write(EVE, "halt", place="D1")
    phone.platform.write(ADA, "halt", place="D1", bot_id="B1")
    phone.platform.write(ADA, "halt", place="D1", subtype="message_changed")
    phone.platform.write(ADA, "halt", place="C9")
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert await world.journal.ask(Query("all_halts", HaltRow)) == []
    assert phone.platform.toasts == []


async def test_words_in_the_thread_of_a_question_answer_it(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.write(ADA, "no not today", place="D1", reply_to=outcome.id)
    await world.advance(MINUTE)
    assert [(event.verdict, event.reason) for event in await phone.made()] == [("deny", "not today")]
    phone.platform.write(ADA, "halt", place="D1")
    await world.advance(MINUTE)
    assert [row.by for row in await world.journal.ask(Query("all_halts", HaltRow))] == ["ada"]


async def test_a_text_is_shown_as_it_is_though_slack_reads_entities(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path, WIPES.replace("old", "'a&lt;b & <c>'"))
    (outcome,) = phone.platform.messages[1:]
    assert '"a&lt;b & <c>"' in outcome.text


async def test_what_does_not_fit_once_it_is_escaped_cannot_be_approved(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path, WIPES.replace("old", f"'{'&' * 1000}'"))
    (outcome,) = phone.platform.messages[1:]
    assert [*outcome.buttons] == ["Deny"]


async def test_arguments_are_approved_as_they_were_typed(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.write(ADA, '{"path": "a&b <c> https://a.test/?x=1&y=2"}', place="D1", reply_to=outcome.id)
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["edit"]
    results = [each for each in await phone.fleet.events("desk.once-1") if each.body and b"wiped" in each.body]
    assert b"wiped a&b <c> https://a.test/?x=1&y=2" in results[0].body


@pytest.mark.parametrize(
    ("delivered", "typed"),
    [
        ("<http://a.test|a.test>", "a.test"),
        ("<mailto:ada@a.test|ada@a.test>", "ada@a.test"),
        ("&amp;lt;", "&lt;"),
        ("ask <@U0EVE>", "ask <@U0EVE>"),
    ],
)
def test_what_slack_delivers_is_read_as_it_was_typed(delivered: str, typed: str) -> None:
    assert read_typed(delivered) == typed


async def test_what_was_cut_cannot_be_approved(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path, LONG)
    (outcome,) = phone.platform.messages[1:]
    assert [*outcome.buttons] == ["Deny"]
    phone.platform.press_data(ADA, outcome, outcome.buttons["Deny"].replace("no:", "yes:"))
    phone.platform.write(ADA, "yes", place="D1", reply_to=outcome.id)
    await world.advance(MINUTE)
    assert await phone.made() == []


async def test_a_socket_that_is_refreshed_or_cut_is_opened_anew(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.refresh()
    await world.advance(MINUTE)
    phone.platform.cut()
    phone.platform.press(ADA, outcome, "Approve")
    await world.advance(MINUTE)
    assert phone.platform.opened == 3
    assert [event.verdict for event in await phone.made()] == ["approve"]


async def test_a_restart_keeps_people_and_buttons(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.tasks[0].cancel()
    await world.advance(MINUTE)
    phone.platform.press(ADA, outcome, "Deny")
    serve(phone)
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["deny"]


async def test_what_is_answered_elsewhere_shows_there(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    await decisions.deny(Actor(phone.fleet.app, Principal("bob")), (await phone.decision()).decision)
    await world.advance(5 * SECOND)
    assert (outcome.text, outcome.buttons) == ("Denied by bob: wipe of desk, session desk.once-1.", {})
