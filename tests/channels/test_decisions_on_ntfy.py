"""Decisions on ntfy: a secret topic knows a person, and a button counts once, for what it was shown with."""

import logging
from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.ids import channel_stream
from halter.core.ports import Query
from halter.core.rows import HaltRow
from halter.net.httpx_transport import connect_directly
from halter.operations import decisions
from halter.operations.actor import Actor, Principal
from halter.operations.channels import list_approvers, offer_pairing
from halter.present.events import summarize_event
from halter.testing.world import World
from tests.channels.fake_ntfy import FakeNtfy
from tests.channels.test_decisions_on_telegram import LONG, WIPES, Phone

FLEET = "channels:\n  ntfy: {token: '${secret:TELEGRAM}', url: 'http://ntfy.test'}\n"


async def ready(world: World, home: Path, replies: str = WIPES) -> tuple[Phone, str]:
    """Ada is paired, and is asked, in a topic of her own."""
    phone = Phone(world, home, replies, platform=FakeNtfy(), fleet=FLEET)
    phone.serve()
    pairing_code = await offer_pairing(phone.desk, "ntfy", "ada", "approver")
    phone.platform.write(pairing_code.place, pairing_code.code)
    await world.advance(10 * SECOND)
    await phone.asks()
    return phone, pairing_code.place


async def test_one_tap_approves_and_the_message_becomes_the_outcome(world: World, tmp_path: Path) -> None:
    phone, topic = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    assert (outcome.place, [*outcome.buttons]) == (topic, ["Approve", "Deny", "Always"])
    data = phone.platform.press(topic, outcome, "Approve")
    await world.advance(MINUTE)
    (event,) = await phone.made()
    assert (event.verdict, event.by) == ("approve", "ada")
    assert (outcome.text, outcome.buttons) == ("Approved by ada: wipe of desk, session desk.once-1.", {})
    phone.platform.press_data(topic, outcome, data)
    phone.platform.send_again()
    await world.advance(MINUTE)
    assert len(await phone.made()) == 1
    assert "already answered" in phone.platform.messages[-1].text


async def test_what_others_publish_counts_only_in_a_topic_that_was_paired(world: World, tmp_path: Path) -> None:
    phone, topic = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    before = await world.events(channel_stream("ntfy"))
    phone.platform.press(f"{topic}x", outcome, "Approve")
    phone.platform.write("halter", "/halt")
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert await world.events(channel_stream("ntfy")) == before
    phone.platform.press_data(topic, outcome, f"yes:{'0' * 32}")
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert phone.platform.messages[-1].text.startswith("This button has expired")


async def test_the_whole_topic_is_shown_nowhere(world: World, tmp_path: Path) -> None:
    phone, topic = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.press(topic, outcome, "Deny")
    await world.advance(MINUTE)
    approvers = await list_approvers(phone.desk)
    lines = [summarize_event(each).text for each in await world.events(channel_stream("ntfy"))]
    assert {"ntfy"} == {each.channel for each in approvers}
    assert len(lines) > 4
    assert topic not in f"{approvers} {lines} {phone.reports}"


def test_addresses_that_hold_a_secret_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.NOTSET, "httpx2")
    connect_directly()
    assert not logging.getLogger("httpx2").isEnabledFor(logging.INFO)


async def test_words_name_the_question(world: World, tmp_path: Path) -> None:
    phone, topic = await ready(world, tmp_path)
    decision = (await phone.decision()).decision
    phone.platform.write(topic, "/status")
    phone.platform.write(topic, f'/edit {decision} {{"path": "older"}}')
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["edit"]
    phone.platform.write(topic, "/halt desk")
    await world.advance(MINUTE)
    assert [row.scope for row in await world.journal.ask(Query("all_halts", HaltRow))] == ["agent:desk"]


async def test_what_was_cut_cannot_be_approved(world: World, tmp_path: Path) -> None:
    phone, topic = await ready(world, tmp_path, LONG)
    (outcome,) = phone.platform.messages[1:]
    assert [*outcome.buttons] == ["Deny"]
    phone.platform.press_data(topic, outcome, outcome.buttons["Deny"].replace("no:", "yes:"))
    phone.platform.write(topic, f"/yes {(await phone.decision()).decision}")
    await world.advance(MINUTE)
    assert await phone.made() == []


async def test_a_restart_reads_on_where_it_was(world: World, tmp_path: Path) -> None:
    phone, topic = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.tasks[0].cancel()
    await world.advance(MINUTE)
    phone.platform.press(topic, outcome, "Deny")
    phone.serve()
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["deny"]
    assert len([each for each in phone.platform.messages if each.text.startswith("Paired as")]) == 1


async def test_what_is_answered_elsewhere_shows_there(world: World, tmp_path: Path) -> None:
    phone, _ = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    await decisions.deny(Actor(phone.fleet.app, Principal("bob")), (await phone.decision()).decision)
    await world.advance(5 * SECOND)
    assert (outcome.text, outcome.buttons) == ("Denied by bob: wipe of desk, session desk.once-1.", {})
