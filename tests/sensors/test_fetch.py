"""The look at an address, behind a permit, at servers of all manners."""

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from halter.autonomy.resident import MIN_BACKOFF
from halter.core.clock import SECOND
from halter.core.tools import Failed, Invalid, Permit, SensorFailed, Tool, Valid, find_secret_names
from halter.sensors.poll import Fetch, make_poll_sensor, parse_json_value
from halter.spec.sensors import PollSensor, UrlSource

MADE_UP = "made-up-key-123"


def page(body: bytes, status: str = "200 OK", *lines: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def fetch_from(server: Any, patience: float = 20, **headers: str) -> Fetch:
    return Fetch("gauge", UrlSource(url=server.url, headers=headers), round(patience * SECOND))


async def got(tool: Tool, **secrets: str) -> str:
    valid = tool.validate(b"{}")
    assert isinstance(valid, Valid)
    return (await tool.run(valid, Permit("call-1", 0, secrets))).text


async def test_what_an_address_holds_is_got(server: Any) -> None:
    server.answers = [page(b'{"level": 3}')]
    assert json.loads(await got(fetch_from(server))) == {"level": 3}
    assert server.asked[0].startswith("GET /feed HTTP/1.1\r\n")


def test_it_is_a_safe_tool_that_only_looks_and_takes_no_arguments() -> None:
    tool: Tool = Fetch("gauge", UrlSource(url="http://a.example/x"), 30 * SECOND)
    assert (tool.spec.name, tool.spec.level, tool.spec.effect) == ("poll_gauge", "SAFE", "read")
    assert isinstance(tool.validate(b'{"url": "http://b.example/"}'), Invalid)
    assert isinstance(tool.validate(b"\xff"), Invalid)
    assert isinstance(tool.validate(b""), Valid)
    fetch = Fetch("gauge", UrlSource(url="http://b.example/x"), 30 * SECOND)
    assert fetch.spec.digest != tool.spec.digest


async def test_the_guard_sees_which_secrets_it_names_and_only_the_server_sees_what_they_are(server: Any) -> None:
    server.answers = [page(b"1")]
    tool = fetch_from(server, authorization="Bearer ${secret:GAUGE_KEY}")
    valid = tool.validate(b"{}")
    assert isinstance(valid, Valid)
    assert find_secret_names(valid.canonical) == {"GAUGE_KEY"}
    assert tool.validate(valid.canonical) == valid
    await got(tool, GAUGE_KEY=MADE_UP)
    assert server.header(0, "authorization") == f"Bearer {MADE_UP}"
    assert MADE_UP.encode() not in msgspec.json.encode(tool.spec) + valid.canonical


async def test_a_permit_is_good_for_one_look(server: Any) -> None:
    server.answers = [page(b"1")]
    tool, permit = fetch_from(server), Permit("call-1", 0, {})
    valid = tool.validate(b"{}")
    assert isinstance(valid, Valid)
    await tool.run(valid, permit)
    with pytest.raises(RuntimeError, match="used before"):
        await tool.run(valid, permit)
    assert len(server.asked) == 1


FAILURES = {
    page(b"", "404 Not Found"): "HttpError: 127.0.0.1 answered 404 Not Found.",
    page(b"", "500 "): "HttpError: 127.0.0.1 answered 500.",
    page(b"\xff\xfe\x00garbage"): "NotText: ",
    page(b"hi", "200 OK", "content-type: text/plain; charset=klingon"): "NotText: ",
    page(b"hi", "200 OK", "content-encoding: br"): "Encoded: ",
    page(b"x" * 1_000_001): "TooLarge: ",
    page(b"", "302 Found", "location: http://localhost:1/"): "Redirected: 127.0.0.1 redirects to localhost",
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of it": "RemoteProtocolError: ",
    b"SSH-2.0-garbage\r\n\r\n": "RemoteProtocolError: ",
}


@pytest.mark.parametrize("answer", FAILURES)
async def test_what_cannot_be_read_has_failed(server: Any, answer: bytes) -> None:
    server.answers = [answer]
    with pytest.raises(Failed) as error:
        await got(fetch_from(server))
    assert str(error.value).startswith(FAILURES[answer])


async def test_a_redirect_to_another_place_is_never_asked(server: Any) -> None:
    bodies: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await reader.read(1))
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        server.answers = [page(b"", "302 Found", f"location: http://127.0.0.1:{port}/")]
        with pytest.raises(Failed, match="Redirected"):
            await got(fetch_from(server, authorization=MADE_UP))
    assert bodies == []


@pytest.mark.parametrize("partial_answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"])
async def test_a_server_that_hangs_is_given_up(server: Any, partial_answer: bytes) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(partial_answer)
        await asyncio.Event().wait()

    server.answers = [hang]
    with pytest.raises(Failed, match=r"^Timeout: .* within 0\.1 s"):
        await got(fetch_from(server, patience=0.1))


async def test_a_hundred_megabytes_are_not_kept(server: Any) -> None:
    sent_bytes = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while sent_bytes < 100_000_000:
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent_bytes += 100_000

    server.answers = [pour]
    with pytest.raises(Failed, match=r"^TooLarge"):
        await got(fetch_from(server))
    assert sent_bytes < 50_000_000


async def test_proxies_of_the_environment_are_not_used(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.answers = [page(b"1")]
    assert await got(fetch_from(server)) == "1"


async def test_a_poll_of_an_address_that_fails_and_recovers_goes_on(server: Any, clock: Any, listen: Any) -> None:
    server.answers = [page(b"", "500 Oh no"), b"", page(b'{"level": 1}'), page(b"", "502 No"), page(b'{"level": 2}')]
    tool = fetch_from(server)

    async def look() -> Any:
        try:
            return parse_json_value(await got(tool))
        except Failed as error:
            raise SensorFailed(str(error)) from error

    async with listen(
        make_poll_sensor(
            PollSensor(name="gauge", source=UrlSource(url=server.url), interval=SECOND), look, clock, random.Random(0)
        )
    ) as listener:
        result = await listener.until_read(3)
        await listener.until(lambda: listener.sensing.report.health == "ok")
    assert result[:3] == [{"level": 1}, {"level": 2}, {"level": 2}]
    assert listener.told[0].health == "failing"
    assert listener.told[0].sentence == "HttpError: 127.0.0.1 answered 500 Oh no."
    failures = [slept for slept in clock.slept if slept >= MIN_BACKOFF]
    assert len(failures) >= 3
