"""Deliveries that their sender signs start sessions, checked as each sender documents it.

The signatures are computed here as the senders' pages describe them; where a page prints an example, it is used too.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from autonomous import Fleet

from halter.core.clock import MINUTE, SECOND
from halter.core.events import TurnStarted
from halter.core.ports import read_body
from halter.server.api import make_hooks_api
from halter.testing.world import World

NEW, OLD = "made-up-new-signing-secret-1", "made-up-old-signing-secret-2"
WHSEC = "whsec_" + base64.b64encode(b"twenty-four made up bytes").decode()
DESK = """
autonomy: {{enabled: false}}
model: scripted
script: replies.yaml
secrets: [NEW, OLD]
webhooks:
  - name: events
    prompt: Handle the event.
    scheme: {scheme}
    token: ${{secret:NEW}}
    max_bytes: 2000
"""
ROTATING = "    previous_token: ${secret:OLD}\n"


def hex_of(secret: str, signed: bytes) -> str:
    return hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()


class Sent(NamedTuple):
    """A delivery as a sender makes it: the body, and the headers for a secret, an id and a time in seconds."""

    body: bytes
    headers: Mapping[str, str]


def sign_github(secret: str, name: str, at: int) -> Sent:
    body = b'{"zen": "Keep it logically awesome.", "hook_id": 1}'
    return Sent(body, {"X-GitHub-Delivery": name, "X-Hub-Signature-256": f"sha256={hex_of(secret, body)}"})


def sign_stripe(secret: str, name: str, at: int) -> Sent:
    body = json.dumps({"id": name, "object": "event", "type": "charge.failed"}).encode()
    signature = hex_of(secret, b"%d.%s" % (at, body))
    return Sent(body, {"Stripe-Signature": f"t={at},v1={'0' * 64},v1={signature},v0={'1' * 64}"})


def sign_slack(secret: str, name: str, at: int, **members: Any) -> Sent:
    body = json.dumps({"type": "event_callback", "event_id": name, **members}).encode()
    signature = hex_of(secret, b"v0:%d:%s" % (at, body))
    return Sent(body, {"X-Slack-Request-Timestamp": str(at), "X-Slack-Signature": f"v0={signature}"})


def sign_sentry(secret: str, name: str, at: int) -> Sent:
    body = b'{"action": "created", "data": {"issue": {"id": "7"}}}'
    return Sent(body, {"Request-ID": name, "Sentry-Hook-Signature": hex_of(secret, body)})


def sign_standard(secret: str, name: str, at: int) -> Sent:
    body = b'{"type": "user.created", "data": {}}'
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, b"%s.%d.%s" % (name.encode(), at, body), "sha256")).decode()
    headers = {
        "webhook-id": name,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1a,AAAA v1,AAAA v1,{signature}",
    }
    return Sent(body, headers)


def sign_linear(secret: str, name: str, at: int) -> Sent:
    body = json.dumps({"action": "create", "webhookTimestamp": at * 1000}).encode()
    return Sent(body, {"Linear-Delivery": name, "Linear-Signature": hex_of(secret, body)})


def sign_shopify(secret: str, name: str, at: int) -> Sent:
    body = b'{"id": 820982911946154508}'
    signature = base64.b64encode(hmac.digest(secret.encode(), body, "sha256")).decode()
    return Sent(body, {"X-Shopify-Webhook-Id": name, "X-Shopify-Hmac-SHA256": signature})


def send_gitlab_token(secret: str, name: str, at: int) -> Sent:
    return Sent(b'{"object_kind": "push"}', {"Idempotency-Key": name, "X-Gitlab-Token": secret})


def send_bearer_token(secret: str, name: str, at: int) -> Sent:
    return Sent(b'{"ticket": 7}', {"Halter-Delivery": name, "Authorization": f"Bearer {secret}"})


SENDERS = {
    "bearer": send_bearer_token,
    "github": sign_github,
    "gitlab": send_gitlab_token,
    "linear": sign_linear,
    "sentry": sign_sentry,
    "shopify": sign_shopify,
    "slack": sign_slack,
    "standard": sign_standard,
    "stripe": sign_stripe,
}
TIMED = ("linear", "slack", "standard", "stripe")
SIGNED = tuple(scheme for scheme in SENDERS if scheme not in {"bearer", "gitlab"})


class Desk:
    """An agent with one webhook, and the server that takes its deliveries."""

    def __init__(self, world: World, folder: Path, scheme: str, text: str = "", **secrets: str) -> None:
        self.world, self.scheme = world, scheme
        self.secrets = {"NEW": NEW, "OLD": OLD, **secrets}
        if scheme == "standard" and not secrets:
            self.secrets = {"NEW": WHSEC, "OLD": "whsec_" + base64.b64encode(b"x" * 24).decode()}
        self.fleet = Fleet(world, folder)
        self.fleet.environ.update({f"HALTER_SECRET_{name}": value for name, value in self.secrets.items()})
        self.fleet.start(
            self.fleet.agent(
                "desk", DESK.format(scheme=scheme) + text, replies_yaml="- {repeat: true, text: Handled.}\n"
            )
        )

    async def start(self) -> "Desk":
        await self.world.advance(SECOND)
        assert self.fleet.up is not None, self.fleet.told
        self.wire = httpx2.ASGITransport(
            make_hooks_api(self.fleet.up.hooks(), self.world.clock), client=("192.0.2.1", 1)
        )
        return self

    def make(self, name: str = "d-1", by: str = "NEW", age: int = 0) -> Sent:
        return SENDERS[self.scheme](self.secrets[by], name, self.world.now // SECOND - age)

    async def post(self, sent: Sent, kind: str = "application/json") -> httpx2.Response:
        headers = {"Content-Type": kind, **sent.headers}
        async with httpx2.AsyncClient(transport=self.wire, base_url="http://here") as client:
            return await client.post("/hooks/desk/events", content=sent.body, headers=headers)

    async def sessions(self) -> list[str]:
        await self.world.advance(MINUTE)
        return [row.session for row in await self.fleet.sessions("desk")]


@pytest.mark.parametrize("scheme", SENDERS)
async def test_a_delivery_as_its_sender_makes_it_starts_one_session_however_often_it_is_sent(
    world: World, tmp_path: Path, scheme: str
) -> None:
    desk = await Desk(world, tmp_path, scheme).start()
    first = await desk.post(desk.make())
    assert (first.status_code, first.json()) == (202, {"session": "desk.events-1", "repeated": False})
    repeated = await desk.post(desk.make(age=1))
    assert (repeated.status_code, repeated.json()) == (200, {"session": "desk.events-1", "repeated": True})
    assert (await desk.post(desk.make("d-2"))).status_code == 202
    assert await desk.sessions() == ["desk.events-1", "desk.events-2"]
    turn = next(each for each in await desk.fleet.events("desk.events-1") if isinstance(each.event, TurnStarted))
    text = (await read_body(world.journal, turn)).decode()
    assert '"origin":"document","trusted":false' in text


@pytest.mark.parametrize("scheme", SENDERS)
async def test_a_delivery_that_another_secret_signed_is_refused_and_starts_nothing(
    world: World, tmp_path: Path, scheme: str
) -> None:
    desk = await Desk(world, tmp_path, scheme).start()
    answer = await desk.post(desk.make(by="OLD"))
    assert answer.status_code == 401, answer.text
    assert await desk.sessions() == []


@pytest.mark.parametrize("scheme", SIGNED)
async def test_one_changed_byte_of_the_body_is_refused(world: World, tmp_path: Path, scheme: str) -> None:
    desk = await Desk(world, tmp_path, scheme).start()
    sent = desk.make()
    for body in (sent.body.replace(b": ", b":", 1), sent.body + b"\n", sent.body[:-1] + b" }"):
        assert (await desk.post(sent._replace(body=body))).status_code == 401
    assert (await desk.post(sent)).status_code == 202


@pytest.mark.parametrize("scheme", SIGNED)
async def test_the_secret_itself_and_no_signature_are_no_signature(world: World, tmp_path: Path, scheme: str) -> None:
    desk = await Desk(world, tmp_path, scheme).start()
    sent = desk.make()
    name = next(name for name in sent.headers if name.lower().endswith(("signature", "signature-256", "sha256")))
    for value in ("", "sha256=", "v0=", "v1,", "t=1,v1=", "t=x", desk.secrets["NEW"], "v1,é".encode("latin-1")):
        headers: dict[str, Any] = {**sent.headers, name: value}
        assert (await desk.post(sent._replace(headers=headers))).status_code == 401, value
    bearer = {"Authorization": f"Bearer {desk.secrets['NEW']}", "Halter-Delivery": "42"}
    assert (await desk.post(sent._replace(headers=bearer))).status_code in {401, 429}


@pytest.mark.parametrize("scheme", TIMED)
async def test_a_delivery_from_outside_the_tolerance_is_refused_and_says_so_to_its_sender_alone(
    world: World, tmp_path: Path, scheme: str
) -> None:
    desk = await Desk(world, tmp_path, scheme).start()
    for age in (301, -301):
        answer = await desk.post(desk.make(age=age))
        assert answer.status_code == 401
        assert "5m" in answer.json()["error"]
        assert "5m" not in (await desk.post(desk.make(by="OLD", age=age))).text
    assert (await desk.post(desk.make(age=290))).status_code == 202
    recorded = desk.make("d-3")
    assert (await desk.post(recorded)).status_code == 202
    await world.advance(6 * MINUTE)
    assert (await desk.post(recorded)).status_code == 401
    assert await desk.sessions() == ["desk.events-1", "desk.events-2"]


async def test_the_tolerance_is_what_the_file_says(world: World, tmp_path: Path) -> None:
    desk = await Desk(world, tmp_path, "stripe", "    tolerance: 30s\n").start()
    assert (await desk.post(desk.make(age=31))).status_code == 401
    assert (await desk.post(desk.make(age=29))).status_code == 202


@pytest.mark.parametrize("scheme", SENDERS)
async def test_while_a_secret_is_changed_both_are_accepted(world: World, tmp_path: Path, scheme: str) -> None:
    desk = await Desk(world, tmp_path, scheme, ROTATING).start()
    assert (await desk.post(desk.make("d-1", "OLD"))).status_code == 202
    assert (await desk.post(desk.make("d-2", "NEW"))).status_code == 202


@pytest.mark.parametrize("scheme", ["bearer", "github", "gitlab", "linear", "sentry", "shopify"])
async def test_a_delivery_without_the_id_that_its_sender_gives_is_told_which_header_is_missing(
    world: World, tmp_path: Path, scheme: str
) -> None:
    desk = await Desk(world, tmp_path, scheme).start()
    sent = desk.make()
    name = next(name for name, value in sent.headers.items() if value == "d-1")
    answer = await desk.post(
        sent._replace(headers={other: value for other, value in sent.headers.items() if other != name})
    )
    assert answer.status_code == 400
    assert f"`{name}" in answer.json()["error"]


async def test_the_challenge_of_slack_is_answered_if_it_is_signed_and_starts_nothing(
    world: World, tmp_path: Path
) -> None:
    desk = await Desk(world, tmp_path, "slack").start()
    at = world.now // SECOND
    challenge = {"type": "url_verification", "challenge": "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P"}
    answer = await desk.post(sign_slack(NEW, "", at, **challenge))
    assert (answer.status_code, answer.json()) == (200, {"challenge": challenge["challenge"]})
    assert (await desk.post(sign_slack(OLD, "", at, **challenge))).status_code == 401
    assert await desk.sessions() == []


async def test_a_command_of_slack_has_no_event_and_runs_once_too(world: World, tmp_path: Path) -> None:
    desk = await Desk(world, tmp_path, "slack").start()
    at, body = world.now // SECOND, b"command=%2Fdeploy&text=shop"
    signature = hex_of(NEW, b"v0:%d:%s" % (at, body))
    sent = Sent(body, {"X-Slack-Request-Timestamp": str(at), "X-Slack-Signature": f"v0={signature}"})
    form = "application/x-www-form-urlencoded"
    assert [(await desk.post(sent, form)).status_code for _ in range(2)] == [202, 200]


async def test_the_example_of_github_is_accepted(world: World, tmp_path: Path) -> None:
    desk = await Desk(world, tmp_path, "github", NEW="It's a Secret to Everybody").start()
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    headers = {"X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958", "X-Hub-Signature-256": signature}
    assert (await desk.post(Sent(b"Hello, World!", headers), "text/plain")).status_code == 202
    assert (await desk.post(Sent(b"Hello, World?", headers), "text/plain")).status_code == 401


async def test_the_example_of_slack_is_accepted(world: World, tmp_path: Path) -> None:
    desk = await Desk(
        world, tmp_path, "slack", "    tolerance: 9000d\n", NEW="8f742231b10e8888abcd99yyyzzz85a5"
    ).start()
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    signature = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"
    headers = {"X-Slack-Request-Timestamp": "1531420618", "X-Slack-Signature": signature}
    assert (await desk.post(Sent(body, headers), "application/x-www-form-urlencoded")).status_code == 202


async def test_the_example_of_standard_webhooks_is_accepted(world: World, tmp_path: Path) -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    desk = await Desk(world, tmp_path, "standard", "    tolerance: 9000d\n", NEW=secret).start()
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert (await desk.post(Sent(b'{"test": 2432232314}', headers))).status_code == 202
    other = Sent(b'{"test": 2432232314}', {**headers, "webhook-id": "msg_other"})
    assert (await desk.post(other)).status_code == 401


async def test_a_body_that_is_too_long_is_refused_before_its_signature_is_checked(world: World, tmp_path: Path) -> None:
    desk = await Desk(world, tmp_path, "github").start()
    body = b"x" * 2001
    headers = {"X-GitHub-Delivery": "d", "X-Hub-Signature-256": f"sha256={hex_of(NEW, body)}"}
    assert (await desk.post(Sent(body, headers), "text/plain")).status_code == 413


async def test_wrong_signatures_are_limited_like_wrong_tokens(world: World, tmp_path: Path) -> None:
    desk = await Desk(world, tmp_path, "github").start()
    wrong = [(await desk.post(desk.make(str(number), "OLD"))).status_code for number in range(12)]
    assert wrong == [401] * 10 + [429] * 2


async def test_a_webhook_that_is_not_there_is_answered_as_a_wrong_signature_is(world: World, tmp_path: Path) -> None:
    desk = await Desk(world, tmp_path, "github").start()
    wrong, sent = await desk.post(desk.make(by="OLD")), desk.make()
    async with httpx2.AsyncClient(transport=desk.wire, base_url="http://here") as client:
        missing = await client.post("/hooks/desk/other", content=sent.body, headers=dict(sent.headers))
    assert (missing.status_code, missing.text) == (wrong.status_code, wrong.text)


@pytest.mark.parametrize(("secret", "problem"), [("whsec_not-base64!", "is not in Base64"), ("", "is not set")])
async def test_a_secret_that_accepts_nothing_is_said_before_the_first_delivery(
    world: World, tmp_path: Path, secret: str, problem: str
) -> None:
    desk = await Desk(world, tmp_path, "standard", NEW=secret).start()
    text = "".join(sentence for _, sentence in desk.fleet.told)
    assert f"The webhook events accepts nothing with one of its secrets: HALTER_SECRET_NEW {problem}" in text
    assert "not-base64!" not in text
