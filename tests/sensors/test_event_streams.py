"""Server-sent events over a real socket, from servers of all manners."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halter.autonomy.resident import MAX_BACKOFF, MIN_BACKOFF
from halter.core.clock import SECOND
from halter.core.tools import Sensor, SensorFailed
from halter.sensors.stream import is_sendable, make_stream_sensor
from halter.spec.sensors import StreamSensor, StreamSource

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
OPEN = OK + b"connection: close\r\n\r\n"
MADE_UP = "made-up-key-123"

Read = Callable[..., Awaitable[list[Any]]]


def feed(server: Any, clock: Any, patience: float = 20, **headers: str) -> Sensor:
    timeout = round(patience * SECOND)
    spec = StreamSensor(name="feed", source=StreamSource(url=server.url), timeout=timeout)
    return make_stream_sensor(spec, headers, clock)


async def test_comments_names_ids_and_lines_are_read_to_the_letter(server: Any, clock: Any, read: Read) -> None:
    server.answers = [
        OPEN + b': welcome\n\nid: 1\ndata: {\ndata: "a": 1}\n\n: still here\nevent: note\ndata: two\ndata: lines\n\n'
        b"data: unfinished\n"
    ]
    assert await read(feed(server, clock)) == [{"a": 1}, {"event": "note", "data": "two\nlines", "id": "1"}]


async def test_a_clean_close_is_never_followed_by_a_connection_before_the_floor(
    server: Any, clock: Any, listen: Any
) -> None:
    server.answers = [OPEN + b"data: 1\n\n"]
    async with listen(feed(server, clock)) as listener:
        await listener.until_read(5)
    reconnects = len(server.asked) - 1
    assert reconnects >= 4
    assert len(clock.slept) >= reconnects
    assert min(clock.slept) >= MIN_BACKOFF
    assert [report.health for report in listener.told] == ["ok"]


async def test_the_server_is_told_the_last_id_and_when_it_wants_it(server: Any, clock: Any, listen: Any) -> None:
    server.answers = [
        OPEN + b"retry: 7000\nid: a-41\ndata: 1\n\nid: never\ndata: cut off\n",
        OPEN + b"data: 2\n\nid\ndata: 3\n\n",
        OPEN + b"data: 4\n\n",
    ]
    async with listen(feed(server, clock)) as listener:
        assert await listener.until_read(4) == [1, 2, 3, 4]
    assert [server.header(n, "last-event-id") for n in range(3)] == [None, "a-41", None]
    assert server.header(0, "accept") == "text/event-stream"
    assert server.header(0, "cache-control") == "no-store"
    assert 7 * SECOND in clock.slept


async def test_an_id_that_no_header_can_hold_is_not_sent(server: Any, clock: Any, listen: Any) -> None:
    server.answers = [OPEN + b"id: a\x0bb\ndata: 1\n\n", OPEN + b"id: " + b"x" * 9000 + b"\ndata: 2\n\n"]
    async with listen(feed(server, clock)) as listener:
        await listener.until_read(3)
    assert [server.header(n, "last-event-id") for n in range(3)] == [None, None, None]
    assert is_sendable("Grüße 7")


REFUSALS = {
    b"HTTP/1.1 204 No Content\r\n\r\n": "the stream has ended",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi": (
        "Expected server-sent events from .*, but received 200 with"
    ),
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi": "no content type",
    b"HTTP/1.1 500 Oh no\r\ncontent-length: 0\r\n\r\n": "answered 500 Oh no",
    b"HTTP/1.1 202 Later\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n": "but received 202 with",
    b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n": "redirects to",
    b"HTTP/1.1 302 Found\r\nlocation: /feed\r\ncontent-length: 0\r\n\r\n": "more than 5 times",
    b"HTTP/1.1 302 Found\r\nlocation: http://a:port/\r\ncontent-length: 0\r\n\r\n": "cannot be read",
    b"\x00\xff\x13 this is no HTTP\r\n\r\n": "cannot be read",
    b"": "cannot be read",
    OK + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b"data: 1\n\n"): "compressed",
    OK + b"content-length: 100\r\n\r\ndata: 1\n\ndata: 2": "cannot be read",
    OK + b"transfer-encoding: chunked\r\n\r\nzz\r\ndata: 1\n\n": "cannot be read",
}


@pytest.mark.parametrize("answer", REFUSALS)
async def test_what_is_no_stream_is_a_failure_with_a_sentence(
    server: Any, clock: Any, read: Read, answer: bytes
) -> None:
    server.answers = [answer]
    with pytest.raises(SensorFailed, match=REFUSALS[answer]):
        await read(feed(server, clock))


async def test_a_stream_that_is_cut_has_failed_and_goes_on_after_the_last_whole_event(
    server: Any, clock: Any, listen: Any
) -> None:
    server.answers = [
        OK + b"transfer-encoding: chunked\r\n\r\n1b\r\nid: 1\ndata: 1\n\nid: 2\ndata: 2\r\n1",
        OPEN + b"id: 2\ndata: 2\n\n",
    ]
    async with listen(feed(server, clock)) as listener:
        assert (await listener.until_read(2))[:2] == [1, 2]
    assert server.header(1, "last-event-id") == "1"


async def test_a_server_that_is_not_there_is_a_failure(clock: Any, read: Read) -> None:
    spec = StreamSensor(name="feed", source=StreamSource(url="http://127.0.0.1:1/"))
    with pytest.raises(SensorFailed, match=r"127\.0\.0\.1 cannot be read"):
        await read(make_stream_sensor(spec, {}, clock))


@pytest.mark.parametrize("url", ["ftp://example.com/", "http://", "http://ann:pass@127.0.0.1:1/", "http://a:port/", ""])
async def test_an_address_that_cannot_be_used_is_a_failure(clock: Any, read: Read, url: str) -> None:
    spec = StreamSensor(name="feed", source=StreamSource(url=url or "x", format="sse"))
    with pytest.raises(SensorFailed, match="URL") as error:
        await read(make_stream_sensor(spec, {}, clock))
    assert "pass@" not in str(error.value)


@pytest.mark.parametrize("partial_answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-ty"])
async def test_a_server_that_hangs_is_given_up(server: Any, clock: Any, read: Read, partial_answer: bytes) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(partial_answer)
        await asyncio.Event().wait()

    server.answers = [hang]
    with pytest.raises(SensorFailed, match=r"did not answer within 0\.1 s"):
        await read(feed(server, clock, patience=0.1))


async def test_a_quiet_stream_is_not_given_up(server: Any, clock: Any, read: Read) -> None:
    quiet = asyncio.Event()

    async def pause(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OPEN)
        asyncio.get_running_loop().call_later(0.5, quiet.set)
        await quiet.wait()
        writer.write(b"data: 1\n\n")

    server.answers = [pause]
    assert await read(feed(server, clock, patience=0.2)) == [1]


async def test_a_hundred_megabytes_in_one_line_are_not_kept(server: Any, clock: Any, read: Read) -> None:
    sent_bytes = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        writer.write(OPEN + b"data: ")
        while sent_bytes < 100_000_000:
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent_bytes += 100_000

    server.answers = [pour]
    with pytest.raises(SensorFailed, match="larger than 1,000,000 bytes"):
        await read(feed(server, clock))
    assert sent_bytes < 50_000_000


async def test_ten_thousand_updates_at_once_leave_room_for_others(server: Any, clock: Any, listen: Any) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OPEN + b"".join(b"data: %d\n\n" % number for number in range(10_000)))
        await writer.drain()
        await reader.read()

    server.answers = [flood]
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with listen(feed(server, clock)) as listener:
        await listener.until(lambda: 9_999 in listener.taken)
        task.cancel()
    assert others > 1_000
    assert len(listener.taken) + listener.sensing.report.dropped == 10_000
    assert listener.taken == sorted(listener.taken)


async def test_a_cancelled_stream_lets_go_of_its_connection(server: Any, clock: Any, listen: Any) -> None:
    event = asyncio.Event()

    async def notice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OPEN + b"data: 1\n\n")
        await reader.read()
        event.set()

    server.answers = [notice]
    async with listen(feed(server, clock)) as listener:
        await listener.until_read(1)
    async with asyncio.timeout(20):
        await event.wait()


async def test_a_redirect_within_a_server_is_followed_with_its_headers(server: Any, clock: Any, read: Read) -> None:
    server.answers = [
        b"HTTP/1.1 307 Over there\r\nlocation: /other\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        OPEN + b"data: 1\n\n",
    ]
    assert await read(feed(server, clock, authorization=MADE_UP)) == [1]
    assert server.asked[1].startswith("GET /other ")
    assert server.header(1, "authorization") == MADE_UP


@pytest.mark.parametrize("bad", ["\n", "\r\nx: y", "\0", "ü"])
async def test_a_key_that_no_header_can_hold_is_told_without_the_key(
    server: Any, clock: Any, read: Read, bad: str
) -> None:
    server.answers = [b"HTTP/1.1 400 No\r\ncontent-length: 0\r\n\r\n"]
    with pytest.raises(SensorFailed) as error:
        await read(feed(server, clock, authorization=MADE_UP + bad))
    assert MADE_UP not in str(error.value)
    assert all("x: y" not in request for request in server.asked)


async def test_a_server_that_is_busy_or_done_is_left_alone(server: Any, clock: Any, listen: Any) -> None:
    server.answers = [
        b"HTTP/1.1 503 Busy\r\nretry-after: 120\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 Done\r\n\r\n",
        OPEN + b"data: 1\n\n",
    ]
    async with listen(feed(server, clock)) as listener:
        await listener.until_read(1)
    assert 120 * SECOND in clock.slept
    assert MAX_BACKOFF in clock.slept


def test_an_address_tells_what_is_spoken_there() -> None:
    addresses = ("https://a.example", "ws://a.example", "WSS://a.example")
    texts = [StreamSource(url=address).protocol for address in addresses]
    assert texts == ["sse", "websocket", "websocket"]
