"""Every platform keeps the same promises, over a real socket on this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from halter.channels.channel import Transport, TransportFailed
from halter.channels.messages import ChatButton, ChatMessage, ChatReply
from halter.channels.ntfy import NtfyTransport
from halter.channels.slack import SlackTransport
from halter.channels.telegram import TelegramTransport
from halter.net.httpx_transport import connect_directly
from tests.channels.fake_ntfy import FakeNtfy
from tests.channels.fake_slack import FakeSlack
from tests.channels.fake_telegram import FakeTelegram, Refused

YES, NO = (f"{verb}:{'0' * 32}" for verb in ("yes", "no"))
MESSAGE = ChatMessage("Is it so?\n\n{}\n\nSay.", (ChatButton("Yes", YES), ChatButton("No", NO)), (11, 13))
ADA = "41"


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an application on a free port."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, port=0, lifespan="off", log_config=None, ws="websockets-sansio", timeout_graceful_shutdown=0
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 The server has no event for it.
        await asyncio.sleep(0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


class Platform:
    """A fake, and the transport that speaks to it."""

    def __init__(self, fake: Any, transport: Transport) -> None:
        self.fake = fake
        self.transport = transport

    async def receive(self, after: str, count: int) -> list[ChatReply]:
        """Read so many replies that follow a mark, and see that no more come with them."""
        chat_replies: list[ChatReply] = []
        while len(chat_replies) < count:
            chat_replies += await self.transport.receive(after, HERE)
        return chat_replies


@pytest.fixture(params=["telegram", "ntfy", "slack"])
async def platform(request: pytest.FixtureRequest) -> AsyncIterator[Platform]:
    fake: Any = {"telegram": FakeTelegram, "ntfy": FakeNtfy, "slack": FakeSlack}[request.param]()
    async with served(fake) as url:
        token = fake.token
        telegram_transport: Transport = TelegramTransport(lambda: token, url, connect_directly)
        if request.param == "ntfy":
            telegram_transport = NtfyTransport(url, lambda: token, connect_directly)
        elif request.param == "slack":
            fake.url, app_token = url.replace("http:", "ws:") + "/socket", fake.app_token
            telegram_transport = SlackTransport(lambda: token, lambda: app_token, url, connect_directly)
            await telegram_transport.receive("", HERE)
        yield Platform(fake, telegram_transport)
        await telegram_transport.close()


HERE = frozenset([ADA])


async def test_a_message_is_sent_pressed_answered_and_closed(platform: Platform) -> None:
    output = await platform.transport.send(ADA, MESSAGE)
    (result,) = platform.fake.messages
    assert (result.id, result.text, [*result.buttons]) == (output, MESSAGE.text, ["Yes", "No"])
    platform.fake.press(ADA, result, "Yes")
    (reply,) = await platform.receive("", 1)
    assert (reply.account, reply.chat, reply.press) == (ADA, ADA, YES)
    await platform.transport.respond(reply, "So it is.")
    await platform.transport.close_message(ADA, output, "It was so.")
    assert (result.text, result.buttons) == ("It was so.", {})
    await platform.transport.close_message(ADA, output, "It was so.")


async def test_what_follows_a_mark_is_read_once_and_in_order(platform: Platform) -> None:
    for text in ("one", "two", "three"):
        platform.fake.write(ADA, text)
    replies = await platform.receive("", 3)
    assert [each.text for each in replies] == ["one", "two", "three"]
    platform.fake.write(ADA, "four")
    assert [each.text for each in await platform.receive(replies[0].mark, 1)] == ["four"]


async def test_a_text_that_fits_is_taken_and_one_letter_more_is_not(platform: Platform) -> None:
    text = 1
    while platform.transport.can_send("x" * text):
        text *= 2
    while not platform.transport.can_send("x" * text):
        text -= 1
    await platform.transport.send(ADA, ChatMessage("x" * text))
    with pytest.raises(TransportFailed):
        await platform.transport.send(ADA, ChatMessage("x" * (text + 1)))
    assert not platform.transport.can_send("\U0001f600" * text)


async def test_a_probe_says_whether_the_token_counts_and_sends_nothing(platform: Platform) -> None:
    assert await platform.transport.probe() in ("as @halter_bot", "with its token", "as halter")
    platform.fake.token = "another"
    with pytest.raises(TransportFailed, match="Check "):
        await platform.transport.probe()
    assert platform.fake.messages == []


async def test_a_limit_says_how_long_to_wait(platform: Platform) -> None:
    platform.fake.refuse_next.append(Refused(429, "Too Many Requests: retry after 7", retry_after=7))
    with pytest.raises(TransportFailed) as failed:
        await platform.transport.send(ADA, MESSAGE)
    assert (failed.value.may_retry, failed.value.retry_after) == (True, 7_000_000)


@pytest.mark.parametrize(
    "transport",
    [
        TelegramTransport(lambda: "1:secret", "http://127.0.0.1:9", connect_directly),
        NtfyTransport("http://127.0.0.1:9", lambda: "1:secret", connect_directly),
        SlackTransport(lambda: "1:secret", lambda: "1:secret", "http://127.0.0.1:9", connect_directly),
    ],
    ids=["telegram", "ntfy", "slack"],
)
async def test_what_cannot_be_reached_is_tried_again_and_gives_nothing_away(transport: Transport) -> None:
    for act in (transport.send(ADA, MESSAGE), transport.receive("", HERE)):
        with pytest.raises(TransportFailed) as failed:
            await act
        assert failed.value.may_retry
        assert "secret" not in str(failed.value)
    await transport.close()


async def test_a_wrong_key_is_tried_again_later(platform: Platform) -> None:
    platform.fake.token = "another"
    await platform.transport.close()
    platform.fake.app_token = "another"
    for act in (platform.transport.send(ADA, MESSAGE), platform.transport.receive("", HERE)):
        with pytest.raises(TransportFailed) as failed:
            await act
        assert (failed.value.may_retry, failed.value.retry_after) == (True, 60_000_000)


async def test_what_is_not_known_is_passed_over(platform: Platform) -> None:
    if isinstance(platform.fake, FakeTelegram):
        platform.fake.arrive({"message": {"message_id": "not a number"}})
        platform.fake.arrive({"my_chat_member": {}})
    platform.fake.write("42", "of a topic that is not read, or of another account")
    platform.fake.write(ADA, "hello")
    chat_replies: list[ChatReply] = []
    while not any(each.account == ADA for each in chat_replies):
        chat_replies += await platform.transport.receive("", HERE)
    assert chat_replies[-1].text == "hello"
