"""Webhooks and the services of apprise get their letters, and nothing is given away when they do not."""

import asyncio
import json
from typing import Any

import pytest
from letters import LETTER, Listener
from msgspec.structs import replace

from halter.core.notifications import DeliveryFailed, OutgoingNotification
from halter.notify import make_sender
from halter.spec.channels import AnyChannel, AppriseChannel, InAppChannel, WebhookChannel

# The library imports modules of Python's own that are about to go.
pytestmark = pytest.mark.filterwarnings("ignore:.*slated for removal:DeprecationWarning")

KEY = "mAdeUpKeyThatOpensNothing1234567890"


def hook(port: int, **more: Any) -> WebhookChannel:
    return WebhookChannel(name="ops", url=f"http://127.0.0.1:{port}/in?key={KEY}", **more)


def service(port: int) -> tuple[AppriseChannel, dict[str, str]]:
    return AppriseChannel(name="chat", service="${secret:CHAT}"), {"CHAT": f"json://127.0.0.1:{port}/{KEY}"}


async def send(channel: AnyChannel, secrets: dict[str, str], letter: OutgoingNotification = LETTER) -> None:
    await make_sender(channel, secrets.__getitem__).send(letter)


async def undelivered(channel: AnyChannel, secrets: dict[str, str]) -> DeliveryFailed:
    with pytest.raises(DeliveryFailed) as why:
        await send(channel, secrets)
    assert KEY not in repr(why.value)
    assert why.value.__cause__ is None
    return why.value


def status(code: int, text: str = "") -> bytes:
    return f"HTTP/1.1 {code} X\r\n{text}content-length: 2\r\n\r\nno".encode()


async def test_a_webhook_gets_the_letter_as_json_with_its_name_beside_it(listener: Listener) -> None:
    await send(hook(listener.port, headers={"X-Key": "Bearer ${secret:K}"}), {"K": KEY})
    (got,) = listener.got
    assert got.line == f"POST /in?key={KEY} HTTP/1.1"
    assert json.loads(got.body) == {
        "id": "n1",
        "subject": "Three contracts lapse",
        "text": "Look at them.\n",
        "agent": "night-watch",
        "session": "s1",
        "about": "finding",
        "at": 0,
    }
    assert got.headers["halter-delivery"] == "n1"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["user-agent"].startswith("halter/")
    assert got.headers["x-key"] == f"Bearer {KEY}"


async def test_a_file_cannot_give_a_letter_another_name(listener: Listener) -> None:
    await send(hook(listener.port, headers={"HALTER-Delivery": "x", "User-Agent": "mine"}), {})
    assert listener.got[0].headers["halter-delivery"] == "n1"
    assert listener.got[0].headers["user-agent"] == "mine"


@pytest.mark.parametrize(
    ("code", "may_retry"),
    [(429, True), (500, True), (503, True), (408, True), (400, False), (401, False), (404, False)],
)
async def test_a_webhook_that_fails_is_asked_again_only_where_that_may_help(
    listener: Listener, code: int, *, may_retry: bool
) -> None:
    listener.answers = [status(code)]
    why = await undelivered(hook(listener.port), {})
    assert str(why) == f"The webhook at 127.0.0.1 answered {code}."
    assert why.may_retry is may_retry


async def test_a_webhook_does_not_send_a_letter_on_to_another_place(listener: Listener) -> None:
    listener.answers = [status(307, f"location: http://127.0.0.1:{listener.port}/elsewhere\r\n")]
    why = await undelivered(hook(listener.port), {})
    assert len(listener.got) == 1
    assert "redirects to another URL (307)" in str(why)
    assert not why.may_retry


async def test_a_webhook_that_is_down_is_worth_another_try(listener: Listener) -> None:
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    why = await undelivered(hook(port), {})
    assert str(why) == "The webhook at 127.0.0.1 cannot be reached: connection refused."
    assert why.may_retry


async def test_a_webhook_that_hangs_up_without_an_answer_is_worth_another_try(listener: Listener) -> None:
    listener.answers = [b""]
    assert (await undelivered(hook(listener.port), {})).may_retry


@pytest.mark.parametrize("value", [f"{KEY}\r\nX: y", f"{KEY}\n", f"ключ{KEY}"])
async def test_a_secret_that_no_header_can_carry_is_not_shown(listener: Listener, value: str) -> None:
    why = await undelivered(hook(listener.port, headers={"X-Key": "${secret:K}"}), {"K": value})
    assert "check the URL and its headers" in str(why)
    assert (listener.got, why.may_retry) == ([], False)


async def test_a_service_of_apprise_gets_the_letter(listener: Listener) -> None:
    await send(*service(listener.port))
    (got,) = listener.got
    assert got.line == f"POST /{KEY} HTTP/1.1"
    assert json.loads(got.body)["title"] == "Three contracts lapse"
    assert json.loads(got.body)["message"].strip() == "Look at them."


async def test_a_letter_without_a_text_is_a_letter_too(listener: Listener) -> None:
    channel, secrets = service(listener.port)
    await send(channel, secrets, replace(LETTER, text=""))
    assert len(listener.got) == 1


async def test_a_service_that_fails_is_retried_and_its_address_is_not_shown(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    listener.answers = [status(500)]
    why = await undelivered(*service(listener.port))
    assert str(why) == "The channel chat could not send the notification."
    assert why.may_retry
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("address", [f"nobody://{KEY}", KEY, "json://"])
async def test_an_address_that_apprise_does_not_know_is_not_tried_again(address: str) -> None:
    why = await undelivered(AppriseChannel(name="chat", service="${secret:CHAT}"), {"CHAT": address})
    assert "has a URL that Apprise does not know: check its secret" in str(why)
    assert not why.may_retry


async def test_what_is_shown_in_the_app_needs_no_sending() -> None:
    await send(InAppChannel(name="in_app"), {})
