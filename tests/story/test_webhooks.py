"""Deliveries by HTTP start sessions: once each, for those with the token, within the caps."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest
from autonomous import Fleet

from halter.core.clock import MINUTE, SECOND
from halter.core.events import RunSkipped, RunStarted, SessionEnded, SessionStarted, TurnStarted
from halter.core.ids import trigger_stream
from halter.core.ports import read_body
from halter.guard.halts import halt, switch_off
from halter.runtime.webhooks import Delivery, HookAccepted, HookRejected, WebhookReceiver
from halter.server.api import serve_hooks
from halter.testing.world import World

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TOKEN = "mAdeUpT0kenThatOpensNothing"
DESK = """
autonomy: {enabled: false}
model: scripted
script: replies.yaml
secrets: [HOOK_TOKEN]
webhooks:
  - name: tickets
    prompt: Answer the ticket.
    token: ${secret:HOOK_TOKEN}
    max_bytes: 1000
"""
REPLIES = "- {repeat: true, text: Answered.}\n"


def desk(fleet: Fleet, text: str = "") -> Path:
    fleet.environ["HALTER_SECRET_HOOK_TOKEN"] = TOKEN
    return fleet.agent("desk", DESK + text, replies_yaml=REPLIES)


async def started(world: World, tmp_path: Path, text: str = "", fleet_file: str = "") -> tuple[Fleet, WebhookReceiver]:
    fleet = Fleet(world, tmp_path, fleet_file)
    fleet.start(desk(fleet, text))
    await world.advance(SECOND)
    assert fleet.up is not None, fleet.told
    return fleet, fleet.up.hooks()


def ticket(
    body: bytes = b'{"ticket": 7}', delivery: str = "d1", token: str = TOKEN, kind: str = "application/json"
) -> Delivery:
    return Delivery({"authorization": f"Bearer {token}", "halter-delivery": delivery, "content-type": kind}, body)


async def list_events(world: World) -> list[Any]:
    return [stored.event for stored in await world.events(trigger_stream("desk/tickets"))]


async def test_a_delivery_starts_one_session_that_is_given_it_as_something_not_to_be_trusted(
    world: World, tmp_path: Path
) -> None:
    fleet, hooks = await started(world, tmp_path)
    assert await hooks.receive("desk", "tickets", ticket()) == HookAccepted("desk.tickets-1")
    await world.advance(MINUTE)
    session_events = await fleet.events("desk.tickets-1")
    assert isinstance(session_events[-1].event, SessionEnded)
    (turn,) = [each for each in session_events if isinstance(each.event, TurnStarted)]
    text = (await read_body(world.journal, turn)).decode()
    assert "Answer the ticket." in text
    assert '\\"ticket\\": 7' in text
    assert '"origin":"document","trusted":false' in text


async def test_the_same_delivery_twice_starts_nothing_more_and_is_answered_as_before(
    world: World, tmp_path: Path
) -> None:
    fleet, hooks = await started(world, tmp_path)
    first = await hooks.receive("desk", "tickets", ticket())
    outcome = await hooks.receive("desk", "tickets", ticket(b'{"ticket": 8}'))
    assert (first, outcome) == (HookAccepted("desk.tickets-1"), HookAccepted("desk.tickets-1", repeated=True))
    assert await hooks.receive("desk", "tickets", ticket(delivery="d2")) == HookAccepted("desk.tickets-2")
    await world.advance(MINUTE)
    assert [row.session for row in await fleet.sessions("desk")] == ["desk.tickets-1", "desk.tickets-2"]


async def test_twenty_deliveries_at_once_start_twenty_sessions(world: World, tmp_path: Path) -> None:
    _, hooks = await started(world, tmp_path)
    answers = await asyncio.gather(
        *(hooks.receive("desk", "tickets", ticket(delivery=f"d{number % 20}")) for number in range(40))
    )
    assert all(isinstance(answer, HookAccepted) for answer in answers)
    runs = [event for event in await list_events(world) if isinstance(event, RunStarted)]
    assert len(runs) == len({run.session for run in runs}) == 20


@pytest.mark.parametrize(
    ("delivery", "status"),
    [
        (ticket(token=""), 401),
        (ticket(token=TOKEN + "x"), 401),
        (ticket(token="${secret:HOOK_TOKEN}"), 401),
        (ticket(delivery=""), 400),
        (ticket(delivery="a b"), 400),
        (ticket(delivery="d" * 201), 400),
        (ticket(b"{broken"), 400),
        (ticket(b""), 400),
        (ticket(b"\xff\xfe\x00"), 400),
        (ticket(b"\xff\xfe\x00", kind="text/plain"), 400),
        (ticket(b"x" * 1001, kind="text/plain"), 413),
        (ticket(b"[" * 900), 400),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_a_delivery_is_said_and_starts_nothing(
    world: World, tmp_path: Path, delivery: Delivery, status: int
) -> None:
    fleet, hooks = await started(world, tmp_path)
    answer = await hooks.receive("desk", "tickets", delivery)
    assert isinstance(answer, HookRejected)
    assert answer.status == status
    assert answer.sentence.endswith((".", "TOKEN`."))
    assert await fleet.sessions("desk") == []
    assert isinstance(await hooks.receive("desk", "tickets", ticket()), HookAccepted)


async def test_a_webhook_that_is_not_there_is_answered_as_a_wrong_token_is(world: World, tmp_path: Path) -> None:
    _, hooks = await started(world, tmp_path)
    wrong = await hooks.receive("desk", "tickets", ticket(token="wrong"))
    assert await hooks.receive("desk", "others", ticket()) == wrong
    assert await hooks.receive("nobody", "tickets", ticket()) == wrong


async def test_an_agent_that_is_off_or_halted_takes_nothing_and_says_why(world: World, tmp_path: Path) -> None:
    fleet, hooks = await started(world, tmp_path)
    await world.store.commit(halt("trigger:desk/tickets", "ada", "h1"))
    answer = await hooks.receive("desk", "tickets", ticket())
    assert isinstance(answer, HookRejected)
    assert (answer.status, "halter resume trigger:desk/tickets" in answer.sentence) == (409, True)
    await world.store.commit(switch_off("desk", [], "ada", "o1"))
    answer = await hooks.receive("desk", "tickets", ticket(delivery="d2"))
    assert isinstance(answer, HookRejected)
    assert "halter on desk" in answer.sentence
    assert [event.why for event in await list_events(world) if isinstance(event, RunSkipped)] == ["halted", "off"]
    assert await fleet.sessions("desk") == []


async def test_a_cap_that_is_spent_takes_nothing_until_it_is_not(world: World, tmp_path: Path) -> None:
    price = 'models: {"scripted:script": {price: {input: 1000, output: 1000}}}\n'
    reply = "- {repeat: true, text: Answered., usage: {input_tokens: 1900, output_tokens: 100}}\n"
    fleet = Fleet(world, tmp_path, price)
    folder = desk(
        fleet, "    max_cost_usd_per_day: 2\nlimits: {max_cost_usd: 3, max_output_tokens: 256, on_cap: stop}\n"
    )
    (folder / "replies.yaml").write_text(reply)
    fleet.start(folder)
    await world.advance(SECOND)
    assert fleet.up is not None
    assert isinstance(await fleet.up.hooks().receive("desk", "tickets", ticket(b"hello", kind="")), HookAccepted)
    await world.advance(MINUTE)
    answer = await fleet.up.hooks().receive("desk", "tickets", ticket(b"hello", "d2", kind=""))
    assert isinstance(answer, HookRejected), [row.state for row in await fleet.sessions("desk")]
    assert answer.status == 429
    assert answer.retry_after is not None
    assert 0 < answer.retry_after <= 24 * 60 * MINUTE


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


async def test_over_a_real_socket_a_delivery_is_taken_once(world: World, tmp_path: Path, port: int) -> None:
    fleet, hooks = await started(world, tmp_path)
    loop: Any = asyncio.get_running_loop()
    serving = asyncio.create_task(serve_hooks(hooks, "127.0.0.1", port))
    try:
        with loop.outside():
            await _knock(port, serving)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    first = (await fleet.events("desk.tickets-1"))[0].event
    assert isinstance(first, SessionStarted)
    assert first.traceparent == CALLER


async def _knock(port: int, serving: asyncio.Task[None]) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Halter-Delivery": "42", "traceparent": CALLER}
    url = f"http://127.0.0.1:{port}/hooks/desk/tickets"
    async with httpx2.AsyncClient(trust_env=False, timeout=10) as client:
        answer = await _wait_for_answer(client, url, headers, serving)
        assert (answer.status_code, answer.json()) == (202, {"session": "desk.tickets-1", "repeated": False})
        response = await client.post(url, headers=headers, json={"ticket": 7})
        assert (response.status_code, response.json()["repeated"]) == (200, True)
        wrong = await client.post(url, headers={**headers, "Authorization": "Bearer no"}, json={})
        assert wrong.status_code == 401
        large = await client.post(url, headers={**headers, "Halter-Delivery": "43"}, content=b"x" * 5_000_000)
        assert large.status_code == 413
        assert (await client.get(url)).status_code == 405
    await _check_refused_unread(port)


async def _check_refused_unread(port: int) -> None:
    """Announce a body and send none of it: a server that waits for it would wait forever."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /hooks/desk/tickets HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 1000\r\n"
    writer.write(f"{head}Authorization: Bearer no\r\n\r\n".encode())
    assert b" 401 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def _wait_for_answer(
    client: httpx2.AsyncClient, url: str, headers: dict[str, str], serving: asyncio.Task[None]
) -> httpx2.Response:
    """Knock until somebody opens: a server takes a moment to listen."""
    while True:
        try:
            return await client.post(url, headers=headers, json={"ticket": 7})
        except httpx2.ConnectError:
            assert not serving.done()
            await asyncio.sleep(0)
