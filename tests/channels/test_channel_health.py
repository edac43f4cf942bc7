"""What `halter doctor` says of channels and of sign-on: each thing that is wrong, with what to do."""

from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncBaseTransport, ConnectError, Request, Response

from halter.channels.serve import check_channels, read_channels
from halter.core.clock import SECOND
from halter.operations.channels import offer_pairing, remove_approver
from halter.server.oidc import check_sign_on
from halter.testing.world import World
from tests.channels.fake_ntfy import FakeNtfy
from tests.channels.fake_slack import FakeSlack
from tests.channels.streams import StreamedApp, make_client
from tests.channels.test_decisions_on_ntfy import FLEET as NTFY
from tests.channels.test_decisions_on_telegram import Phone
from tests.server.provider import Provider

SLACK = "channels:\n  slack: {token: '${secret:TELEGRAM}', app_token: '${secret:APP}', url: 'http://slack.test'}\n"


async def look(phone: Phone, connect: Any = None) -> dict[str, tuple[str, str]]:
    checks = [check async for check in check_channels(phone.fleet.app, connect or phone.connect)]
    return {check.name: (check.verdict, check.finding) for check in checks}


async def test_a_channel_that_works_says_who_answers_and_which_process_serves_it(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await world.advance(SECOND)
    await phone.pair()
    (verdict, text) = (await look(phone))["telegram"]
    assert verdict == "ok"
    assert text.startswith("Connected as @halter_bot. ada may decide here. channel-telegram")
    assert phone.platform.token not in text


async def test_no_paired_person_and_no_process_are_reported_with_what_to_do(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    await offer_pairing(phone.desk, "telegram", "ada", "approver")
    (verdict, text) = (await look(phone))["telegram"]
    assert verdict == "warning"
    assert "Pair a person with halter channels pair telegram NAME" in text
    assert "No process serves it. Start halter serve" in text


async def test_a_viewer_is_no_one_who_may_decide(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await world.advance(SECOND)
    await phone.pair("vic", role="viewer")
    assert "No approver is paired" in (await look(phone))["telegram"][1]


async def test_a_token_that_is_missing_or_refused_is_a_problem(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.fleet.environ["HALTER_SECRET_TELEGRAM"] = "1:wrong"
    (verdict, text) = (await look(phone))["telegram"]
    assert (verdict, "Check the secret of `channels.telegram.token`" in text) == ("problem", True)
    assert "1:wrong" not in text
    del phone.fleet.environ["HALTER_SECRET_TELEGRAM"]
    (verdict, text) = (await look(phone))["telegram"]
    assert (verdict, "Set HALTER_SECRET_TELEGRAM" in text) == ("problem", True)


async def test_a_webhook_and_a_platform_that_is_away_are_problems(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.platform.webhook = True
    (verdict, text) = (await look(phone))["telegram"]
    assert (verdict, "A webhook is set for @halter_bot" in text) == ("problem", True)

    class Away(AsyncBaseTransport):
        async def handle_async_request(self, request: Request) -> Response:
            raise ConnectError("no route", request=request)

    (verdict, text) = (await look(phone, lambda: make_client(Away())))["telegram"]
    assert verdict == "problem"
    assert text.startswith("Telegram cannot be reached (no route).")


@pytest.mark.parametrize(("fleet", "platform"), [(NTFY, FakeNtfy), (SLACK, FakeSlack)])
async def test_the_others_are_looked_at_as_well(world: World, tmp_path: Path, fleet: str, platform: Any) -> None:
    phone = Phone(world, tmp_path, platform=platform(), fleet=fleet)
    phone.fleet.environ["HALTER_SECRET_APP"] = getattr(phone.platform, "app_token", "")
    (finding,) = (await look(phone)).values()
    assert finding[1].startswith("No approver is paired")
    phone.platform.token = "another"
    (finding,) = (await look(phone)).values()
    assert finding[0] == "problem"
    assert phone.platform.messages == []


async def test_a_server_that_is_no_ntfy_is_a_problem(world: World, tmp_path: Path) -> None:
    async def page(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<h1>It works!</h1>"})

    phone = Phone(world, tmp_path, platform=FakeNtfy(), fleet=NTFY)
    (finding,) = (await look(phone, lambda: make_client(StreamedApp(page)))).values()
    assert finding[0] == "problem"
    assert "does not answer like ntfy. Check `channels.ntfy.url`" in finding[1]


async def test_a_person_paired_with_a_missing_channel_is_reported(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await world.advance(SECOND)
    await phone.pair()
    (tmp_path / "halter.yaml").write_text("zone: UTC\n")
    assert not read_channels(phone.fleet.app).telegram
    (verdict, text) = (await look(phone))["telegram"]
    assert (verdict, text.startswith("ada cannot be reached: halter.yaml has no telegram")) == ("warning", True)
    await remove_approver(phone.desk, "telegram", "ada")
    assert await look(phone) == {}


SIGN_ON = """\
sign_on:
  roles: {leads: approver}
  oidc:
    {issuer: 'http://127.0.0.1:9', client_id: halter, url: 'http://127.0.0.1:8765', client_secret: '${secret:CLIENT}'}
"""


async def test_sign_on_says_what_is_missing_and_what_the_provider_must_know(world: World, tmp_path: Path) -> None:
    provider = Provider("http://127.0.0.1:9", lambda: 0)
    phone = Phone(world, tmp_path, fleet=SIGN_ON)

    async def look_at_sign_on() -> Any:
        return await check_sign_on(phone.fleet.app, lambda: make_client(StreamedApp(provider.app)))

    missing = await look_at_sign_on()
    assert (missing.verdict, "Set HALTER_SECRET_CLIENT" in missing.finding) == ("problem", True)
    phone.fleet.environ["HALTER_SECRET_CLIENT"] = "of the client"
    good = await look_at_sign_on()
    address = "http://127.0.0.1:8765/login/oidc/callback"
    text = (
        f"127.0.0.1:9 signs people on. Its redirect URI for this client must be {address}. "
        "No group has the role admin; an admin needs a token."
    )
    assert (good.verdict, good.finding) == ("ok", text)
    provider.described_as = "http://127.0.0.1:10"
    wrong = await look_at_sign_on()
    assert (wrong.verdict, "set `sign_on.oidc.issuer` to it" in wrong.finding) == ("problem", True)
