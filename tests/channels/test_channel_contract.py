"""Every platform keeps the same promises, over a real socket on this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from halter.channels.channel import Transport, TransportFailed
from halter.channels.messages import ChatButton, ChatMessage
from halter.channels.serve import connect_directly
from halter.channels.telegram import TelegramTransport
from tests.channels.fake_telegram import FakeTelegram, Refused

MESSAGE = ChatMessage("Is it so?\n\n{}\n\nSay.", (ChatButton("Yes", "yes:1"), ChatButton("No", "no:1")), (11, 13))
ADA = "41"


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an application on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=0))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 The server has no event for it.
        await asyncio.sleep(0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


class Platform:
    """A fake, and the transport that speaks to it."""

    def __init__(self, fake: FakeTelegram, url: str) -> None:
        self.fake = fake
        self.transport: Transport = TelegramTransport(lambda: fake.token, url, connect_directly)


@pytest.fixture(params=["telegram"])
async def platform(request: pytest.FixtureRequest) -> AsyncIterator[Platform]:
    fake = FakeTelegram()
    async with served(fake) as url:
        made = Platform(fake, url)
        yield made
        await made.transport.close()


NOWHERE = frozenset[str]()


async def test_a_message_is_sent_pressed_answered_and_closed(platform: Platform) -> None:
    sent = await platform.transport.send(ADA, MESSAGE)
    (shown,) = platform.fake.messages
    assert (shown.id, shown.text, [*shown.buttons]) == (sent, MESSAGE.text, ["Yes", "No"])
    platform.fake.press(ADA, shown, "Yes")
    (reply,) = await platform.transport.receive("", NOWHERE)
    assert (reply.account, reply.place, reply.message, reply.press) == (ADA, ADA, sent, "yes:1")
    await platform.transport.respond(reply, "So it is.")
    await platform.transport.close_message(ADA, sent, "It was so.")
    assert (shown.text, shown.buttons) == ("It was so.", {})
    await platform.transport.close_message(ADA, sent, "It was so.")


async def test_what_follows_a_mark_is_read_once_and_in_order(platform: Platform) -> None:
    for text in ("one", "two", "three"):
        platform.fake.write(ADA, text)
    replies = await platform.transport.receive("", NOWHERE)
    assert [each.text for each in replies] == ["one", "two", "three"]
    platform.fake.write(ADA, "four")
    assert [each.text for each in await platform.transport.receive(replies[-1].mark, NOWHERE)] == ["four"]
    platform.fake.write(ADA, "five")
    platform.fake.send_again()
    assert [each.text for each in await platform.transport.receive(replies[0].mark, NOWHERE)] == ["five"]


async def test_a_text_that_fits_is_taken_and_one_letter_more_is_not(platform: Platform) -> None:
    most = 1
    while platform.transport.fits("x" * most):
        most *= 2
    while not platform.transport.fits("x" * most):
        most -= 1
    await platform.transport.send(ADA, ChatMessage("x" * most))
    with pytest.raises(TransportFailed):
        await platform.transport.send(ADA, ChatMessage("x" * (most + 1)))
    assert not platform.transport.fits("\U0001f600" * most)


async def test_a_limit_says_how_long_to_wait(platform: Platform) -> None:
    platform.fake.refuse_next.append(Refused(429, "Too Many Requests: retry after 7", retry_after=7))
    with pytest.raises(TransportFailed) as failed:
        await platform.transport.send(ADA, MESSAGE)
    assert (failed.value.may_retry, failed.value.retry_after) == (True, 7_000_000)


async def test_what_cannot_be_reached_is_tried_again_and_gives_nothing_away() -> None:
    transport = TelegramTransport(lambda: "1:secret", "http://127.0.0.1:9", connect_directly)
    with pytest.raises(TransportFailed) as failed:
        await transport.send(ADA, MESSAGE)
    assert failed.value.may_retry
    assert "secret" not in str(failed.value)
    await transport.close()


async def test_updates_of_a_kind_that_is_not_known_are_passed_over(platform: Platform) -> None:
    fake = platform.fake
    fake.arrive({"message": {"message_id": "not a number"}})
    fake.arrive({"my_chat_member": {}})
    fake.write(ADA, "hello")
    assert [each.text for each in await platform.transport.receive("", NOWHERE)] == ["hello"]
