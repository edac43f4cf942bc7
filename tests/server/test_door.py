"""The door as programs and browsers meet it: on a real socket, with whatever they send."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import ConfigError
from halter.server.listener import bind
from halter.server.login import make_login_url
from halter.server.middleware import ServerLimits
from tests.server.conftest import QUICK, House


async def send_raw(house: House, data: bytes) -> bytes:
    """Say something to the socket itself, and hear all of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(data)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def line(house: House, *headers: str, way: str = "GET /api/home") -> bytes:
    token = f"Authorization: Bearer {house.secrets['admin']}"
    return "\r\n".join([f"{way} HTTP/1.1", token, "Connection: close", *headers, "", ""]).encode("latin-1")


async def test_another_host_none_and_two_are_refused_on_the_wire(house: House) -> None:
    good = f"Host: 127.0.0.1:{house.port}"
    assert (await send_raw(house, line(house, good))).startswith(b"HTTP/1.1 200")
    for hosts in (["Host: evil.example"], [f"Host: evil.example:{house.port}"], [], [good, good], [good, "Host: evil"]):
        answer = await send_raw(house, line(house, *hosts))
        assert re.match(rb"HTTP/1.1 4\d\d", answer), (hosts, answer)
        assert b"needs_you" not in answer
    absolute = line(house, "Host: evil.example", way=f"GET http://127.0.0.1:{house.port}/api/home")
    assert b"421" in (await send_raw(house, absolute)).splitlines()[0]


@pytest.mark.parametrize("path", ["/", "/api/home", "/_nicegui/x.js", "/_nicegui_ws/socket.io/?EIO=4", "/docs", "/x"])
async def test_nothing_but_the_login_is_shown_to_nobody(house: House, path: str) -> None:
    async with house.client() as client:
        assert (await client.get(path)).status_code == 401
        page = await client.get(path, headers={"Accept": "text/html"})
        api = path.startswith("/api")
        assert (page.status_code, page.headers.get("location")) == ((401, None) if api else (303, "/login"))
        assert (await client.get("/login")).status_code == 200
        assert (await client.get("/healthz")).text == "halter is here\n"


async def test_every_answer_keeps_browsers_from_doing_more_with_it(house: House) -> None:
    async with house.client("admin", Origin=house.base) as client:
        for path in ("/", "/login", "/login/login.js", "/healthz", "/api/home", "/api/nothing", "/nothing"):
            headers = (await client.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "same-origin"
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert "http:" not in headers["content-security-policy"]
            assert not [name for name in headers if name.startswith("access-control")]
        values = {"Access-Control-Request-Method": "POST", "Origin": house.base}
        preflight = await client.options("/api/halts", headers=values)
        assert not [name for name in preflight.headers if name.startswith("access-control")]


@asynccontextmanager
async def logged_in(house: House, name: str = "admin") -> AsyncIterator[httpx2.AsyncClient]:
    async with house.client(Origin=house.base) as client:
        answer = await client.post("/login", data={"token": house.secrets[name]})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        yield client


async def test_a_token_is_exchanged_for_a_cookie_that_no_script_and_no_other_site_sees(house: House) -> None:
    async with house.client(Origin=house.base) as client:
        answer = await client.post("/login", data={"token": house.secrets["admin"]})
        cookie = answer.headers["set-cookie"]
        assert re.match(rf"halter_{house.port}=[A-Za-z0-9_-]{{43}};", cookie)
        assert house.secrets["admin"] not in cookie
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert (await client.get("/api/whoami")).json()["name"] == "admin"
        assert (await client.post("/api/halts", json={"scope": "fleet"})).status_code == 200
        foreign = {"Origin": "http://evil.example"}
        assert (await client.post("/api/halts/resume", json={"scope": "fleet"}, headers=foreign)).status_code == 403
        response = await client.post("/logout")
        assert (response.status_code, response.headers["location"]) == (303, "/login")
        client.cookies.clear()
        assert (await client.get("/api/whoami")).status_code == 401


async def test_a_cookie_ends_after_half_a_day_and_with_its_token(house: House) -> None:
    async with logged_in(house) as client, logged_in(house, "viewer") as async_client:
        house.office.ground.time += 11 * 60 * MINUTE
        assert (await client.get("/api/whoami")).status_code == 200
        house.tokens.remove("admin")
        assert (await client.get("/api/whoami")).status_code == 401
        assert (await async_client.get("/api/whoami")).status_code == 200
        house.office.ground.time += 2 * 60 * MINUTE
        assert (await async_client.get("/api/whoami")).status_code == 401


async def test_the_address_that_logs_in_says_the_token_to_no_server(house: House) -> None:
    url = make_login_url(house.base, house.secrets["admin"])
    path, _, fragment = url.partition("#")
    assert (path, fragment) == (f"{house.base}/login", f"token={house.secrets['admin']}")
    async with house.client() as client:
        page, script = (await client.get("/login")).text, (await client.get("/login/login.js")).text
    assert "location.hash" in script
    assert "http" not in re.sub(r"<!doctype html>", "", page)
    assert "<script>" not in page
    assert " on" not in page.partition("<form")[2].partition("</form")[0]


@pytest.mark.parametrize("limits", [ServerLimits(failures=3)])
async def test_wrong_tokens_are_counted_and_then_not_even_looked_at(house: House, limits: ServerLimits) -> None:
    async with house.client(Origin=house.base) as client:
        for given in ("", "nonsense", "halter_" + "a" * 43):
            answer = await client.post("/login", data={"token": given})
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
            assert "Invalid token" in answer.text
        answers = [await client.post("/login", data={"token": "halter_" + "a" * 43}) for _ in range(5)]
        assert {answer.status_code for answer in answers} <= {401, 429}
        responses = [answer for answer in answers if answer.status_code == 429]
        assert responses
        assert int(responses[0].headers["retry-after"]) >= 1
        house.office.ground.time += 5 * MINUTE
        assert (await client.post("/login", data={"token": house.secrets["admin"]})).status_code == 303


@pytest.mark.parametrize("limits", [ServerLimits(requests=20)])
async def test_who_asks_too_often_waits_and_the_others_do_not(house: House, limits: ServerLimits) -> None:
    async with house.client("admin") as client, house.client("viewer") as async_client:
        answers = await asyncio.gather(*(client.get("/api/whoami") for _ in range(60)))
        late = [answer for answer in answers if answer.status_code == 429]
        assert late
        assert late[0].json()["error"].startswith("Too many requests in one minute")
        assert int(late[0].headers["retry-after"]) >= 1
        assert (await async_client.get("/api/whoami")).status_code == 200
        house.office.ground.time += MINUTE
        assert (await client.get("/api/whoami")).status_code == 200


@pytest.mark.parametrize("limits", [ServerLimits(pages=3)])
async def test_pages_are_asked_for_less_often_than_other_things(house: House, limits: ServerLimits) -> None:
    async with house.client("viewer") as viewer, house.client("admin") as admin:
        status_codes = [(await viewer.get("/")).status_code for _ in range(50)]
        assert status_codes[:3] == [200, 200, 200]
        assert 429 in status_codes
        assert {(await viewer.get("/api/whoami")).status_code for _ in range(50)} == {200}
        assert (await admin.get("/")).status_code == 200
        house.office.ground.time += MINUTE
        assert (await viewer.get("/")).status_code == 200


@pytest.mark.parametrize("limits", [ServerLimits(body=1000, upload=SECOND // 4)])
async def test_a_body_that_is_too_long_is_refused_however_it_comes(house: House, limits: ServerLimits) -> None:
    async def chunks() -> Any:
        for _ in range(50):
            yield b" " * 100

    async with house.client("admin") as client:
        for content in (b" " * 1001, chunks()):
            answer = await client.post("/api/halts", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 413, answer.text
            assert "1,000 bytes" in answer.json()["error"]
        assert (await client.post("/api/halts", json={"scope": "fleet", "reason": "x" * 900})).status_code == 200
    host = f"Host: 127.0.0.1:{house.port}"
    slow = line(house, host, "Content-Length: 500", "Content-Type: application/json", way="POST /api/halts")
    assert b" 408 " in (await send_raw(house, slow)).splitlines()[0]
    cut = asyncio.create_task(send_raw(house, slow + b"{}"))
    assert b" 408 " in (await cut).splitlines()[0]


HELD = (
    "",
    "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Slow: ",
    "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\nGET",
)


@pytest.mark.parametrize("limits", [ServerLimits(head=SECOND // 4)])
async def test_who_is_connected_and_asks_for_nothing_is_let_go_and_who_listens_is_not(
    house: House, limits: ServerLimits
) -> None:
    values = {"Authorization": f"Bearer {house.secrets['viewer']}"}
    async with (
        connect(f"ws://127.0.0.1:{house.port}/api/ws", additional_headers=values) as socket,
        house.client("viewer") as client,
        client.stream("GET", "/api/stream") as answer,
    ):
        for words in HELD:
            # It answers only once the server has closed the connection.
            await send_raw(house, words.format(port=house.port).encode())
        await socket.send("{}")
        assert json.loads(await socket.recv())["name"] == "here"
        assert "here" in await anext(answer.aiter_lines())


async def test_of_a_head_that_is_too_long_no_more_is_kept_than_is_taken(house: House) -> None:
    head = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{house.port}\r\nX-Long: {'a' * 70_000}"
    assert (await send_raw(house, head.encode())).startswith(b"HTTP/1.1 400")


HOSTILE: list[tuple[dict[str, str], int]] = [
    ({}, 401),
    ({"Authorization": "Bearer nonsense"}, 401),
    ({"Authorization": "TOKEN", "Origin": "http://evil.example"}, 403),
    ({"Authorization": "TOKEN", "Origin": "null"}, 403),
    ({"Authorization": "TOKEN", "Sec-Fetch-Site": "same-site"}, 403),
    ({"Cookie": "COOKIE"}, 403),
    ({"Cookie": "COOKIE", "Origin": "http://localhost:1"}, 403),
    ({"Cookie": "COOKIE", "Sec-Fetch-Site": "same-origin"}, 403),
    ({"Cookie": "halter_0=x", "Origin": "OWN"}, 401),
]


async def test_a_hostile_websocket_is_refused_before_it_is_open(house: House) -> None:
    async with logged_in(house) as client:
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    words = {"TOKEN": f"Bearer {house.secrets['admin']}", "COOKIE": cookie, "OWN": house.base}
    for path in ("/api/ws", "/_nicegui_ws/socket.io/?EIO=4&transport=websocket", f"/api/ws?token={words['TOKEN'][7:]}"):
        for headers, status in HOSTILE:
            values = {name: words.get(value, value) for name, value in headers.items()}
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://127.0.0.1:{house.port}{path}", additional_headers=values):
                    pass
            assert refused.value.response.status_code == status, (path, headers)
            assert json.loads(refused.value.response.body or b"{}")["error"]
    own = {"Cookie": cookie, "Origin": house.base}
    async with connect(f"ws://127.0.0.1:{house.port}/api/ws", additional_headers=own) as socket:
        await socket.send("{}")
        assert json.loads(await socket.recv())["name"] == "here"


async def test_a_port_that_is_taken_or_open_to_others_is_a_sentence(house: House) -> None:
    with pytest.raises(ConfigError, match="the port is in use"):
        bind(port=house.port)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):  # noqa: S104 It is what must be refused.
        with pytest.raises(ConfigError, match="--beyond-this-machine"):
            bind(host)
    bind("0.0.0.0", 0, beyond=True).close()  # noqa: S104 It was asked for.


async def test_a_token_file_that_others_may_read_lets_nobody_in(house: House) -> None:
    async with house.client("admin") as client:
        assert (await client.get("/api/whoami")).status_code == 200
        house.tokens.path.chmod(0o644)
        assert (await client.get("/api/whoami")).status_code == 401
        house.tokens.path.chmod(0o600)
        assert (await client.get("/api/whoami")).status_code == 200


def test_the_usual_limits_are_those_of_the_documents() -> None:
    assert (ServerLimits().body, ServerLimits().streams, QUICK.body) == (1024 * 1024, 20, 1024 * 1024)
