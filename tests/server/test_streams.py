"""News as they come: nothing is missed by who reads on, nobody is waited for, and nobody hears what is not theirs."""

import asyncio
import json
import socket as sockets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from halter.core.clock import SECOND
from halter.core.events import MessageAdded
from halter.core.ids import session_stream
from halter.core.ports import Draft, Write
from halter.operations.channels import offer_pairing
from halter.runtime.feed import FeedGap
from halter.server.middleware import ServerLimits
from halter.server.responses import Feed
from halter.server.stream import read_cursor, write_cursor
from tests.server.conftest import QUICK, House


async def write(house: House, session: str, count: int = 1, size: int = 0) -> None:
    """Let a session say something."""
    lease = house.office.scribe.leases[session]
    for _ in range(count):
        drafts = [Draft(MessageAdded(turn=1, reason="repetition"), b"x" * size)]
        key = house.office.ground.make()
        await house.app.store.commit(Write(session_stream(session), key, lambda _, d=drafts: d, lease=lease))


@asynccontextmanager
async def listen(house: House, name: str, **wants: Any) -> AsyncIterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {house.secrets[name]}"}
    async with connect(f"ws://127.0.0.1:{house.port}/api/ws", additional_headers=headers, proxy=None) as socket:
        await socket.send(json.dumps(wants))
        yield socket


async def receive(socket: ClientConnection, count: int) -> list[dict[str, Any]]:
    return [json.loads(await socket.recv()) for _ in range(count)]


async def test_a_listener_gets_the_position_of_every_stream_and_then_each_event(house: House) -> None:
    async with listen(house, "viewer") as socket:
        (fields,) = await receive(socket, 1)
        assert (fields["name"], fields["position"]) == ("here", dict(await house.office.heads()))
        await write(house, "mine-1", 2)
        await write(house, "theirs-1")
        results = await receive(socket, 3)
    places = [(each["stream"], each["seq"]) for each in results]
    base = fields["position"]
    mine, theirs = base["session:mine-1"], base["session:theirs-1"]
    assert places == [("session:mine-1", mine + 1), ("session:mine-1", mine + 2), ("session:theirs-1", theirs + 1)]
    assert {each["name"] for each in results} == {"message_added"}


async def test_a_reconnected_listener_continues_by_stream_and_sequence_without_a_gap_or_repeat(house: House) -> None:
    async with listen(house, "viewer") as socket:
        position = (await receive(socket, 1))[0]["position"]
        await write(house, "mine-1", 2)
        for each in await receive(socket, 2):
            position[each["stream"]] = each["seq"]
    await write(house, "mine-1", 3)
    await write(house, "theirs-1", 2)
    async with listen(house, "viewer", after=position) as socket:
        fields = await receive(socket, 6)
        await write(house, "mine-1")
        fields += await receive(socket, 1)
    found = [(each["stream"], each["seq"]) for each in fields[1:]]
    mine, theirs = position["session:mine-1"], position["session:theirs-1"]
    assert sorted(found) == [*(("session:mine-1", mine + n) for n in (1, 2, 3, 4)),
                             *(("session:theirs-1", theirs + n) for n in (1, 2))]  # fmt: skip


async def test_who_sees_one_agent_hears_nothing_of_another_nor_of_the_fleet(house: House) -> None:
    async with listen(house, "admin-of-mine") as socket, house.client("admin") as admin:
        (fields,) = await receive(socket, 1)
        assert set(fields["position"]) == {"session:mine-1", "trigger:mine/hook"}
        await write(house, "theirs-1", 5)
        house.bus.publish_live("theirs-1", "words", {"text": "not yours"})
        assert (await admin.post("/api/halts", json={"scope": "agent:theirs"})).status_code == 200
        await write(house, "mine-1")
        (payload,) = await receive(socket, 1)
    assert payload["stream"] == "session:mine-1"
    async with listen(house, "admin-of-mine", after={}) as socket:
        (fields,) = await receive(socket, 1)
        results = await receive(socket, sum(fields["position"].values()))
    assert {each["stream"] for each in results} == {"session:mine-1", "trigger:mine/hook"}


@pytest.mark.parametrize("role", ["viewer", "approver", "operator", "admin"])
async def test_where_a_person_is_asked_is_sent_to_admins_only(house: House, role: str) -> None:
    """On ntfy, who knows the topic may answer as its person."""
    desk, heads = house.office.desk(name="admin"), dict(await house.office.heads())
    before = await offer_pairing(desk, "ntfy", "ada", "approver")
    async with listen(house, role, after=heads) as socket:
        await receive(socket, 1)
        fields = await receive(socket, 1) if role == "admin" else []
        while_listening = await offer_pairing(desk, "ntfy", "bob", "approver")
        await write(house, "mine-1")
        fields += await receive(socket, 2 if role == "admin" else 1)
    streams = ["channel:ntfy", "channel:ntfy"] if role == "admin" else []
    assert [each["stream"] for each in fields] == [*streams, "session:mine-1"]
    assert (before.place in str(fields), while_listening.place in str(fields)) == (role == "admin", role == "admin")


@pytest.mark.parametrize(
    ("wants", "named"),
    [
        ({"session": "theirs-1"}, "viewer-of-mine"),
        ({"session": "nothing"}, "viewer"),
        ({"agent": "theirs"}, "viewer-of-mine"),
        ({"who": "admin"}, "viewer"),
        ({"after": {"session:mine-1": -1}}, "viewer"),
        ({"after": {"session:mine-1": "1"}}, "viewer"),
        ({"kinds": "all"}, "viewer"),
    ],
)
async def test_an_invalid_subscription_is_rejected_and_the_socket_closed(house: House, wants: Any, named: str) -> None:
    async with listen(house, named, **wants) as socket:
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1007
        assert socket.close_reason


async def test_only_what_was_subscribed_to_is_sent(house: House) -> None:
    wants = {"agent": "mine", "kinds": ["message_added", "words"]}
    async with listen(house, "viewer", **wants) as socket:
        await receive(socket, 1)
        await write(house, "theirs-1")
        house.bus.publish_live("theirs-1", "words", {"text": "b"})
        async with house.client("admin") as admin:
            await admin.post("/api/sessions/mine-1/messages", json={"text": "Go on."})
        house.bus.publish_live("mine-1", "words", {"text": "a"})
        await write(house, "mine-1")
        assert {each["name"] for each in await receive(socket, 2)} == {"words", "message_added"}


async def events(lines: AsyncIterator[str], count: int) -> list[dict[str, str]]:
    """Read so many server-sent events."""
    values: list[dict[str, str]] = [{}]
    async for line in lines:
        if not line and values[-1]:
            if len(values) == count:
                return values
            values.append({})
        elif line and not line.startswith(":"):
            key, _, value = line.partition(": ")
            values[-1][key] = value
    return values


async def sse(house: House, count: int, text: str = "", last: str = "", writes: Any = None) -> list[dict[str, str]]:
    headers = {"Last-Event-ID": last} if last else {}
    async with house.client("viewer", **headers) as client, client.stream("GET", f"/api/stream{text}") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        first = await events(lines, 1)
        if writes is not None:
            await writes()
        return first if count == 1 else [*first, *await events(lines, count - 1)]


async def test_server_sent_events_go_on_by_their_last_id(house: House) -> None:
    for text in ("", "?session=mine-1"):
        values = await sse(house, 3, text, writes=lambda: write(house, "mine-1", 2))
        assert [each["event"] for each in values] == ["here", "message_added", "message_added"]
        await write(house, "mine-1", 2)
        on = await sse(house, 2 if not text else 3, text, last=values[-1]["id"])
        seqs = [json.loads(each["data"])["seq"] for each in (*values[1:], *on) if each["event"] == "message_added"]
        assert seqs == list(range(seqs[0], seqs[0] + 4))


async def test_the_position_in_one_session_outlives_the_server_and_the_position_in_all_of_them_is_reported_gone(
    house: House,
) -> None:
    head = (await house.office.heads())["session:mine-1"]
    (values, *news) = await sse(house, 3, f"?session=mine-1&after=session:mine-1={head - 2}")
    assert values["event"] == "here"
    assert [json.loads(each["data"])["seq"] for each in news] == [head - 1, head]
    (gap,) = await sse(house, 1, last="anotherfeed.17")
    assert gap["event"] == "gap"
    assert "restarted" in gap["data"]


@pytest.mark.parametrize("number", ["9" * 23, "9" * 5000])
async def test_a_position_that_no_feed_can_have_is_reported_gone(house: House, number: str) -> None:
    (values,) = await sse(house, 1)
    (gap,) = await sse(house, 1, last=f"{values['id'].partition('.')[0]}.{number}")
    assert gap["event"] == "gap"


async def test_a_removed_token_ends_what_it_has_open(house: House) -> None:
    async with (
        listen(house, "viewer") as socket,
        listen(house, "admin") as client_connection,
        house.client("viewer") as client,
    ):
        await receive(socket, 1)
        await receive(client_connection, 1)
        async with client.stream("GET", "/api/stream") as answer:
            lines = answer.aiter_lines()
            await events(lines, 1)
            house.tokens.remove("viewer")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008
            with pytest.raises(Exception, match=r"incomplete|closed|peer"):
                [line async for line in lines]
        await write(house, "mine-1")
        assert (await receive(client_connection, 1))[0]["stream"] == "session:mine-1"


@pytest.mark.parametrize("limits", [ServerLimits(streams=2, all_streams=3)])
async def test_more_streams_than_there_may_be_are_refused_until_one_is_closed(
    house: House, limits: ServerLimits
) -> None:
    async with listen(house, "viewer") as client_connection, listen(house, "viewer") as two:
        await receive(client_connection, 1)
        await receive(two, 1)
        async with house.client("viewer") as client:
            answer = await client.get("/api/stream")
            assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
        async with listen(house, "admin") as three, house.client("operator") as client:
            await receive(three, 1)
            assert (await client.get("/api/stream")).status_code == 429
        await client_connection.close()
        await client_connection.wait_closed()
        async with listen(house, "viewer") as again:
            assert (await receive(again, 1))[0]["name"] == "here"


@pytest.mark.parametrize("limits", [ServerLimits(streams=1, stall=SECOND // 4)])
async def test_one_who_stalls_is_let_go_and_slows_nobody(house: House, limits: ServerLimits) -> None:
    request = (
        f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{house.port}\r\n"
        f"Authorization: Bearer {house.secrets['operator']}\r\n\r\n"
    )
    stalled = sockets.socket()
    stalled.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    with stalled:
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", house.port))
        await loop.sock_sendall(stalled, request.encode())
        await loop.sock_recv(stalled, 10)
        async with listen(house, "viewer") as socket:
            await receive(socket, 1)
            for _ in range(10):
                await write(house, "mine-1", 40, size=20_000)
                assert len(await receive(socket, 40)) == 40
        status = 429
        async with house.client("operator") as client:
            while status == 429:
                async with client.stream("GET", "/api/stream") as answer:
                    status = answer.status_code
        assert status == 200


async def test_a_listener_that_falls_behind_gets_a_gap_with_its_positions_and_continues(house: House) -> None:
    feed = Feed(house.app.store, house.app.clock, house.app.ids, house.bus, limit=10)
    running = asyncio.create_task(feed.run())
    await feed.ready.wait()
    head = (await house.office.heads())["session:mine-1"]
    slow = feed.follow(feed.next, lambda told: told.session == "mine-1")
    quick = feed.follow(feed.next, lambda _: True)
    await write(house, "mine-1")
    assert (await anext(slow)).seq == head + 1  # type: ignore[union-attr]
    for _ in range(6):
        await write(house, "mine-1", 5)
        assert [type(await anext(quick)).__name__ for _ in range(5)] == ["FeedMessage"] * 5
    gap = await anext(slow)
    assert isinstance(gap, FeedGap)
    assert gap.events == gap.lost["session:mine-1"].through - gap.lost["session:mine-1"].after  # type: ignore[index]
    assert gap.lost["session:mine-1"].after == head + 1  # type: ignore[index]
    after = await anext(slow)
    assert after.seq == gap.lost["session:mine-1"].through + 1  # type: ignore[union-attr, index]
    await slow.aclose()
    await quick.aclose()
    running.cancel()
    await asyncio.wait([running])


def test_a_place_is_written_as_it_is_read() -> None:
    values = {"session:desk-1": 12, "session:desk-1/in": 3, "fleet": 0}
    assert read_cursor(write_cursor(values)) == values


@pytest.mark.parametrize("limits", [ServerLimits(check=10 * SECOND, stall=QUICK.stall)])
async def test_a_server_that_ends_tells_those_who_listen(house: House, limits: ServerLimits) -> None:
    async with listen(house, "viewer") as socket:
        await receive(socket, 1)
        await house.end()
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1001
