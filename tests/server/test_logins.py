"""A login ends when it is ended, and no file of the server is as good as a token."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from halter.core.clock import SECOND
from halter.core.ids import FLEET
from halter.operations.actor import Actor, Principal
from halter.operations.queries import audit_page
from halter.present.events import summarize_event
from halter.server.auth import (
    MAX_LOGINS_PER_TOKEN,
    Keyring,
    Login,
    Logins,
    TokenFile,
    append_login,
    digest_login_key,
    make_secret,
    make_server_names,
    make_token,
)
from halter.server.middleware import (
    AsgiMessage,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    AuthState,
    ServerLimits,
    ServerMiddleware,
)
from halter.testing.fakes import ManualClock
from tests.server.conftest import House


@asynccontextmanager
async def logged_in(house: House, name: str = "admin") -> AsyncIterator[httpx2.AsyncClient]:
    async with house.client(Origin=house.base) as client:
        assert (await client.post("/login", data={"token": house.secrets[name]})).status_code == 303
        yield client


async def status(client: httpx2.AsyncClient, cookie: str = "") -> int:
    headers = {"Cookie": cookie} if cookie else {}
    return (await client.get("/api/whoami", headers=headers)).status_code


def cookie_of(client: httpx2.AsyncClient) -> str:
    ((name, value),) = client.cookies.items()
    return f"{name}={value}"


async def test_a_copy_of_every_file_in_the_settings_folder_makes_no_cookie(house: House, tmp_path: Path) -> None:
    async with logged_in(house), house.client() as thief:
        ends = house.app.clock.now() // SECOND + 1000
        tried: list[str] = []
        for token in json.loads(house.tokens.path.read_bytes())["tokens"]:
            body = f"halter cookie 1\n{token['name']}\n{ends}".encode()
            signed = hmac.new(bytes.fromhex(token["digest"]), body, hashlib.sha256).hexdigest()
            tried += [f"{token['name']}.{ends}.{signed}", token["digest"]]
        (result,) = json.loads((tmp_path / "tokens.logins.json").read_bytes())["logins"]
        tried += [result["digest"], result["bound_to"], result["digest"][:43]]
        assert {await status(thief, f"halter_{house.port}={value}") for value in tried} == {401}
    assert (tmp_path / "tokens.logins.json").stat().st_mode & 0o777 == 0o600


async def test_logging_out_ends_the_login_on_the_server_also_after_a_restart(house: House) -> None:
    async with logged_in(house) as client, logged_in(house) as async_client, house.client() as thief:
        text = cookie_of(client)
        assert await status(thief, text) == 200
        await client.post("/logout")
        assert await status(thief, text) == 401
        assert await status(async_client) == 200
        await house.restart()
        assert await status(thief, text) == 401
        assert await status(async_client) == 200


async def test_who_logs_in_with_a_token_and_who_logs_out_is_in_the_audit(house: House) -> None:
    async with logged_in(house, "viewer") as client, logged_in(house):
        await client.post("/login", data={"token": house.secrets["operator"]})
        await client.post("/logout")
        await client.post("/logout")
    entries = await audit_page(Actor(house.app, Principal("root")), text="sign_o", limit=100)
    assert sorted((entry.tool, entry.decided_by, entry.capability_level, entry.outcome) for entry in entries) == [
        ("sign_off", "operator", "", "ok"),
        ("sign_off", "viewer", "", "ok"),
        ("sign_on token", "admin", "admin", "ok"),
        ("sign_on token", "operator", "operator", "ok"),
        ("sign_on token", "viewer", "viewer", "ok"),
    ]
    summaries = [summarize_event(stored).text for stored in await house.app.store.read(FLEET)]
    assert "viewer signs on by token (viewer)" in summaries
    assert "operator signs off" in summaries


async def test_removing_a_token_ends_its_logins_and_a_new_one_of_that_name_brings_none_back(house: House) -> None:
    async with logged_in(house) as client:
        house.tokens.remove("admin")
        assert await status(client) == 401
        house.let_in("admin", "admin")
        assert await status(client) == 401


async def test_a_token_whose_role_is_changed_by_hand_ends_its_logins(house: House) -> None:
    async with logged_in(house, "viewer") as client:
        path = house.tokens.path
        path.write_text(path.read_text().replace('"viewer"', '"admin"'))
        assert await status(client) == 401


async def test_to_log_in_again_ends_the_login_before(house: House) -> None:
    async with logged_in(house) as client, house.client() as thief:
        before = cookie_of(client)
        await client.post("/login", data={"token": house.secrets["viewer"]})
        assert (await client.get("/api/whoami")).json()["name"] == "viewer"
        assert await status(thief, before) == 401


@pytest.mark.parametrize("limits", [ServerLimits(check=3600 * SECOND)])
async def test_logging_out_closes_what_the_browser_had_open_immediately(house: House, limits: ServerLimits) -> None:
    async with logged_in(house) as client, logged_in(house) as async_client:
        url, origin = f"ws://127.0.0.1:{house.port}/api/ws", {"Origin": house.base}
        headers = [{**origin, "Cookie": cookie_of(each)} for each in (client, async_client)]
        async with (
            connect(url, additional_headers=headers[0], proxy=None) as socket,
            connect(url, additional_headers=headers[1], proxy=None) as client_connection,
        ):
            for each in (socket, client_connection):
                await each.send("{}")
                await each.recv()
            await client.post("/logout")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008
            await (await client_connection.ping())


@pytest.mark.parametrize("damage", ["{", '{"logins": 3}', ""])
async def test_a_damaged_list_of_logins_lets_nobody_in_and_is_made_anew(
    house: House, tmp_path: Path, damage: str
) -> None:
    async with logged_in(house) as client:
        (tmp_path / "tokens.logins.json").write_text(damage)
        assert await status(client) == 401
    async with logged_in(house) as client:
        assert await status(client) == 200


async def test_a_list_of_logins_that_others_may_write_lets_nobody_in(house: House, tmp_path: Path) -> None:
    async with logged_in(house) as client:
        (tmp_path / "tokens.logins.json").chmod(0o622)
        assert await status(client) == 401


async def test_a_login_that_cannot_be_kept_is_none_and_one_that_cannot_be_ended_for_good_says_so(
    house: House, tmp_path: Path
) -> None:
    async with logged_in(house) as client, house.client() as thief:
        text = cookie_of(client)
        (tmp_path / "tokens.logins.json").rename(tmp_path / "aside")
        (tmp_path / "tokens.logins.json").mkdir()
        assert await status(thief, text) == 401
        assert (await client.post("/login", data={"token": house.secrets["admin"]})).status_code == 503


def test_the_oldest_logins_of_a_token_end_when_there_are_too_many_and_those_of_others_do_not() -> None:
    logins = [Login(f"d{number}", "ada", "b", 100 + number) for number in range(MAX_LOGINS_PER_TOKEN)]
    others = [Login("e1", "bob", "b", 100), Login("e2", "bob", "b", 50)]
    kept = append_login([*logins, *others], Login("new", "ada", "b", 1000), 60)
    assert [login.digest for login in kept] == [*(f"d{n}" for n in range(1, MAX_LOGINS_PER_TOKEN)), "e1", "new"]


async def test_logins_kept_in_no_file_end_with_the_process() -> None:
    logins, token = Logins(), make_token(make_secret(), "ada", "admin", 0)
    key = await logins.start_login(token, 0)
    assert digest_login_key(key) in logins.current()
    await logins.end(key, 1)
    assert logins.current() == {}


async def test_what_an_open_page_sends_after_its_token_was_removed_reaches_nothing(tmp_path: Path) -> None:
    file, secret, asgi_messages = TokenFile(tmp_path / "tokens.json"), make_secret(), list[AsgiMessage]()
    file.add(make_token(secret, "ada", "admin", 0))
    messages: asyncio.Queue[AsgiMessage] = asyncio.Queue()
    event = asyncio.Event()

    async def inner(_: AsgiScope, receive: AsgiReceive, __: AsgiSend) -> None:
        while not asgi_messages or asgi_messages[-1]["type"] != "websocket.disconnect":
            asgi_messages.append(await receive())
            event.set()

    async def drop(_: AsgiMessage) -> None:
        """Send nothing anywhere."""

    limits = ServerLimits(check=3600 * SECOND)
    checks = AuthState(Keyring(file), Logins(), limits)
    entrance = ServerMiddleware(inner, make_server_names("127.0.0.1", 80), checks, ManualClock(), limits)
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {secret}".encode())]
    scope: AsgiScope = {
        "type": "websocket",
        "path": "/_nicegui_ws/socket.io/",
        "headers": headers,
        "client": ("::1", 1),
    }
    serving = asyncio.create_task(entrance(scope, messages.get, drop))
    for text in ("before", "after"):
        await messages.put({"type": "websocket.receive", "text": text})
        await event.wait()
        file.remove("ada")
    await serving
    assert [message.get("text", message["type"]) for message in asgi_messages] == ["before", "websocket.disconnect"]


def test_the_files_of_the_server_name_no_secret(tmp_path: Path) -> None:
    """A login's digest is made of a random key alone: nothing in the tokens' file leads to it."""
    token = make_token(make_secret(), "ada", "admin", 0)
    first, second = (asyncio.run(Logins(tmp_path / f"{n}.json").start_login(token, 0)) for n in (1, 2))
    fields: list[dict[str, Any]] = [json.loads((tmp_path / f"{n}.json").read_bytes())["logins"][0] for n in (1, 2)]
    assert first != second
    assert fields[0]["digest"] != fields[1]["digest"]
    assert fields[0]["bound_to"] == fields[1]["bound_to"]
    assert first not in (tmp_path / "1.json").read_text()
