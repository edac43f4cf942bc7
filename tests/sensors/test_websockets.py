"""WebSockets over a real socket, from servers of all manners."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from halter.autonomy.resident import MIN_BACKOFF
from halter.core.clock import SECOND
from halter.core.tools import Sensor, SensorFailed
from halter.sensors.stream import make_stream_sensor
from halter.spec.sensors import StreamSensor, StreamSource

MADE_UP = "made-up-key-123"

Read = Callable[..., Awaitable[list[Any]]]
Speak = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def speaking(speak: Speak, **options: Any) -> AsyncIterator[str]:
    async with serve(speak, "127.0.0.1", 0, **options) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/"


def feed(url: str, clock: Any, patience: float = 20, **headers: str) -> Sensor:
    spec = StreamSensor(name="feed", source=StreamSource(url=url), timeout=round(patience * SECOND))
    return make_stream_sensor(spec, headers, clock)


async def test_messages_are_json_or_text(clock: Any, read: Read) -> None:
    keys: list[str | None] = []

    async def speak(connection: ServerConnection) -> None:
        assert connection.request
        keys.append(connection.request.headers.get("authorization"))
        for message in ('{"a": [1]}', "hello", "7", "Grüße", ""):
            await connection.send(message)

    async with speaking(speak) as url:
        assert await read(feed(url, clock, authorization=MADE_UP)) == [{"a": [1]}, "hello", 7, "Grüße", ""]
    assert keys == [MADE_UP]


async def test_a_clean_close_is_never_followed_by_a_connection_before_the_floor(clock: Any, listen: Any) -> None:
    async def speak(connection: ServerConnection) -> None:
        await connection.send("1")

    async with speaking(speak) as url, listen(feed(url, clock)) as listener:
        await listener.until_read(5)
    assert len(clock.slept) >= 4
    assert min(clock.slept) >= MIN_BACKOFF
    assert [report.health for report in listener.told] == ["ok"]


async def test_a_connection_that_drops_is_failing_until_it_is_back(clock: Any, listen: Any) -> None:
    connections = 0

    async def speak(connection: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        if connections == 2:
            connection.transport.abort()
            return
        await connection.send(str(connections))
        if connections == 1:
            await connection.close(1011, "a mishap")
            return
        await connection.wait_closed()

    async with speaking(speak) as url, listen(feed(url, clock)) as listener:
        assert await listener.until_read(2) == [1, 3]
        await listener.until(lambda: listener.sensing.report.health == "ok")
    assert min(clock.slept) >= MIN_BACKOFF


async def test_a_connection_that_drops_is_a_failure_with_a_sentence(clock: Any, read: Read) -> None:
    async def speak(connection: ServerConnection) -> None:
        await connection.send("1")
        connection.transport.abort()

    async with speaking(speak) as url:
        with pytest.raises(SensorFailed, match="connection of the stream was lost"):
            await read(feed(url, clock))


async def test_bytes_are_refused(clock: Any, read: Read) -> None:
    async def speak(connection: ServerConnection) -> None:
        await connection.send(b"\x00\x01\x02")
        await connection.wait_closed()

    async with speaking(speak) as url:
        with pytest.raises(SensorFailed, match="a binary message of 3 bytes"):
            await read(feed(url, clock))


async def test_a_message_that_is_too_large_is_not_kept(clock: Any, read: Read) -> None:
    async def speak(connection: ServerConnection) -> None:
        try:
            await connection.send("x" * 100_000 for _ in range(1000))
        except ConnectionClosed:
            return

    async with speaking(speak) as url:
        with pytest.raises(SensorFailed, match="larger than 1,000,000 bytes"):
            await read(feed(url, clock))


async def test_a_flood_leaves_room_for_others(clock: Any, listen: Any) -> None:
    async def speak(connection: ServerConnection) -> None:
        for number in range(10_000):
            await connection.send(str(number))
        await connection.wait_closed()

    async with speaking(speak) as url, listen(feed(url, clock)) as listener:
        await listener.until(lambda: 9_999 in listener.taken)
    assert len(listener.taken) + listener.sensing.report.dropped == 10_000
    assert listener.taken == sorted(listener.taken)


async def test_a_cancelled_stream_lets_go_of_its_connection(clock: Any, listen: Any) -> None:
    event = asyncio.Event()

    async def speak(connection: ServerConnection) -> None:
        await connection.send("1")
        await connection.wait_closed()
        event.set()

    async with speaking(speak) as url:
        async with listen(feed(url, clock)) as listener:
            await listener.until_read(1)
        async with asyncio.timeout(20):
            await event.wait()


def upgraded(request: str) -> bytes:
    key = next(line.partition(":")[2].strip() for line in request.splitlines() if "sec-websocket-key" in line.lower())
    accept = base64.b64encode(hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest())  # noqa: S324
    head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    return head + b"sec-websocket-accept: " + accept + b"\r\n\r\n"


def over(server: Any) -> str:
    return f"ws://127.0.0.1:{server.port}/"


async def test_a_server_that_stops_answering_is_given_up(server: Any, clock: Any, read: Read) -> None:
    async def fall_silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(upgraded(server.asked[-1]) + b"\x81\x011")
        await asyncio.Event().wait()

    server.answers = [fall_silent]
    with pytest.raises(SensorFailed, match="stream was closed: keepalive ping timeout"):
        await read(feed(over(server), clock, patience=0.2))


async def test_a_server_that_hangs_is_given_up(server: Any, clock: Any, read: Read) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    server.answers = [hang]
    with pytest.raises(SensorFailed, match=r"did not open within 0\.1 s"):
        await read(feed(over(server), clock, patience=0.1))


@pytest.mark.parametrize(
    "frames", [b"\xff\xff\xff\xff", b"\x81\x02\xff\xff", b"\x81", b"\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff"]
)
async def test_garbage_after_a_good_beginning_is_a_failure(server: Any, clock: Any, read: Read, frames: bytes) -> None:
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(upgraded(server.asked[-1]) + frames)

    server.answers = [babble]
    with pytest.raises(SensorFailed):
        await read(feed(over(server), clock))


REFUSALS = {
    b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n": "refused the stream with 401",
    b"HTTP/1.1 302 Found\r\nlocation: ws://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n": "refused the stream with 302",
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n": "refused the stream with 200",
    b"\x00\xff\x13 this is no HTTP\r\n\r\n": "The WebSocket handshake failed",
    b"": "The WebSocket handshake failed",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n": "The WebSocket handshake failed",
}


@pytest.mark.parametrize("answer", REFUSALS)
async def test_what_is_no_websocket_is_a_failure_with_a_sentence(
    server: Any, clock: Any, read: Read, answer: bytes
) -> None:
    server.answers = [answer]
    with pytest.raises(SensorFailed, match=REFUSALS[answer]):
        await read(feed(over(server), clock))


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1/", "ws://", "ws://a:port/"])
async def test_an_address_that_cannot_be_used_is_a_failure(clock: Any, read: Read, url: str) -> None:
    with pytest.raises(SensorFailed):
        await read(feed(url, clock))


@pytest.mark.parametrize("bad", ["\n", "\r\nx: y", "\0", "ü"])
async def test_a_key_that_no_header_can_hold_is_told_without_the_key(
    server: Any, clock: Any, read: Read, bad: str
) -> None:
    server.answers = [b"HTTP/1.1 400 No\r\ncontent-length: 0\r\n\r\n"]
    with pytest.raises(SensorFailed) as error:
        await read(feed(over(server), clock, authorization=MADE_UP + bad))
    assert MADE_UP not in str(error.value)
    assert all("x: y" not in request for request in server.asked)
