"""The news of a fleet: nothing is missed by who reads on, and nobody is waited for."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import cast, get_args

import msgspec
import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import (
    AnyEvent,
    GuardrailTriggered,
    MessageAdded,
    SensorChanged,
    SessionParked,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
)
from halter.core.ids import StreamId, WorkerId, inbox_stream, session_stream
from halter.core.ports import Draft, Lease, Store, Write
from halter.core.rows import SessionRow
from halter.runtime.feed import (
    POLLING_INTERVAL,
    Bus,
    FeedEvent,
    FeedGap,
    FeedItem,
    LiveUpdate,
    name_feed_event,
    read_stream_heads,
)
from halter.testing.world import World
from tests.story.autonomous import Fleet

MOST = 10


class Room:
    """Sessions that write, and people who listen to them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bus = Bus(world.journal, world.clock)
        self.leases: dict[str, Lease] = {}

    async def begin(self, session: str) -> None:
        await self.world.start(session, kind="autonomous")
        (self.leases[session],) = await self.world.journal.claim(WorkerId("w"), 1)

    async def write(self, session: str, count: int) -> None:
        event, lease = MessageAdded(turn=1, reason="repetition"), self.leases[session]
        for _ in range(count):
            write = Write(session_stream(session), self.world.ids.make(), lambda _: [Draft(event)], lease=lease)
            await self.world.journal.commit(write)

    async def everything(self) -> set[tuple[str, int]]:
        return {
            (stream, event.seq)
            for stream, _ in await read_stream_heads(self.world.journal)
            for event in await self.world.events(stream)
        }


class Client:
    """Somebody who takes what they are given, as long as they are not stalled."""

    def __init__(self, items: AsyncGenerator[FeedItem]) -> None:
        self.items = items
        self.items_taken: list[FeedItem] = []
        self.flows = asyncio.Event()
        self.flows.set()

    async def take(self) -> None:
        async with aclosing(self.items):
            async for item in self.items:
                self.items_taken.append(item)
                await self.flows.wait()

    def list_positions(self) -> list[tuple[str, int]]:
        return [(item.stored.stream, item.stored.seq) for item in self.items_taken if isinstance(item, FeedEvent)]

    def gaps(self) -> list[FeedGap]:
        return [item for item in self.items_taken if isinstance(item, FeedGap)]

    def pulses(self) -> list[LiveUpdate]:
        return [item for item in self.items_taken if isinstance(item, LiveUpdate)]


def start_client(world: World, items: AsyncGenerator[FeedItem]) -> Client:
    client = Client(items)
    world.spawn(client.take())
    return client


@pytest.fixture
def room(world: World) -> Room:
    return Room(world)


async def test_two_listeners_are_both_given_every_event_once_and_in_order(room: Room) -> None:
    await room.begin("a")
    await room.write("a", 3)
    first, second = (start_client(room.world, room.bus.listen()) for _ in range(2))
    await room.world.advance(SECOND)
    await room.write("a", 5)
    await room.begin("b")
    await room.world.advance(SECOND)
    expected = [(session_stream("a"), seq) for seq in range(5, 10)] + [(session_stream("b"), 1)]
    assert first.list_positions() == second.list_positions() == expected
    assert not first.gaps()


async def test_a_stalled_listener_is_told_of_a_gap_and_nobody_waits_for_it(room: Room) -> None:
    await room.begin("a")
    slow, quick = (start_client(room.world, room.bus.listen(limit=MOST)) for _ in range(2))
    await room.world.advance(SECOND)
    slow.flows.clear()
    for _ in range(60):
        await room.write("a", 5)
        await room.world.advance(SECOND)
    assert len(quick.list_positions()) == 300
    assert not quick.gaps()
    assert len(slow.items_taken) == 1
    slow.flows.set()
    await room.world.advance(2 * POLLING_INTERVAL)
    (gap,) = slow.gaps()
    assert gap.events == 300 - len(slow.list_positions())
    assert gap.lost[session_stream("a")].through == 301


async def test_no_event_is_lost_across_a_gap_because_it_is_read_again(room: Room) -> None:
    await room.begin("a")
    await room.begin("b")
    slow = start_client(room.world, room.bus.listen({}, limit=MOST))
    await room.world.advance(SECOND)
    for _ in range(3):
        slow.flows.clear()
        await room.write("a", 2_345)
        await room.write("b", 7)
        await room.begin(f"new{room.world.now}")
        slow.flows.set()
        await room.world.advance(2 * POLLING_INTERVAL)
    assert slow.gaps()
    feed_events = [feed_event for gap in slow.gaps() async for feed_event in room.bus.read_missed(gap)]
    received = [
        *slow.list_positions(),
        *((feed_event.stored.stream, feed_event.stored.seq) for feed_event in feed_events),
    ]
    assert len(received) == len(set(received))
    assert set(received) == await room.everything()


async def test_whoever_comes_back_is_given_all_that_has_come_since(room: Room) -> None:
    await room.begin("a")
    first = Client(room.bus.listen({}))
    task = room.world.spawn(first.take())
    await room.world.advance(SECOND)
    task.cancel()
    await room.write("a", 50)
    await room.begin("b")
    values = {StreamId(stream): seq for stream, seq in first.list_positions()}
    client = start_client(room.world, room.bus.listen(values, limit=MOST))
    await room.world.advance(SECOND)
    assert set(first.list_positions()) | set(client.list_positions()) == await room.everything()
    assert not set(first.list_positions()) & set(client.list_positions())
    assert not client.gaps()


async def test_of_pulses_that_are_not_taken_only_the_newest_are_kept(room: Room) -> None:
    slow, quick = (start_client(room.world, room.bus.listen(limit=MOST)) for _ in range(2))
    await room.world.advance(SECOND)
    room.bus.publish_live("a", "text", {"text": "first"})
    await room.world.advance(SECOND)
    slow.flows.clear()
    for number in range(100):
        room.bus.publish_live("a", "text", {"text": number})
        await room.world.advance(SECOND // 100)
    slow.flows.set()
    await room.world.advance(SECOND)
    assert [pulse.values["text"] for pulse in quick.pulses()] == ["first", *range(100)]
    (gap,) = slow.gaps()
    results = [pulse.values["text"] for pulse in slow.pulses()]
    assert results[-MOST:] == list(range(90, 100))
    assert gap.pulses + len(results) == 101
    assert (gap.events, gap.lost) == (0, {})


async def test_what_comes_together_is_given_in_the_order_in_which_it_happened(room: Room) -> None:
    await room.begin("a")
    await room.begin("b")
    client = start_client(room.world, room.bus.listen(limit=100))
    await room.world.advance(SECOND)
    client.flows.clear()
    for session in "aabbaba":
        await room.write(session, 1)
        await room.world.advance(2 * POLLING_INTERVAL)
    client.flows.set()
    await room.world.advance(2 * POLLING_INTERVAL)
    times = [item.stored.at for item in client.items_taken if isinstance(item, FeedEvent)]
    assert len(times) == 7
    assert times[1:] == sorted(times[1:])


async def test_pulses_reach_only_those_who_listen_at_that_moment(room: Room) -> None:
    room.bus.publish_live("a", "text", {"text": "too early"})
    late = start_client(room.world, room.bus.listen())
    await room.world.advance(SECOND)
    room.bus.publish_live("a", "text", {"text": "in time"})
    await room.world.advance(SECOND)
    assert [pulse.values for pulse in late.pulses()] == [{"text": "in time"}]


async def test_whoever_wants_some_streams_hears_of_no_others(room: Room) -> None:
    client = start_client(room.world, room.bus.listen(includes_stream=lambda stream: stream != session_stream("b")))
    await room.world.advance(SECOND)
    await room.begin("a")
    await room.begin("b")
    await room.world.advance(2 * POLLING_INTERVAL)
    assert client.list_positions() == [(session_stream("a"), 1)]


NAMES: list[tuple[AnyEvent, str]] = [
    (TurnStarted(turn=1), "autonomy:turn_started"),
    (TurnEnded(turn=1, why="ended"), "autonomy:turn_completed"),
    (TurnSkipped(stage="change", skips=1), "autonomy:precheck_skipped"),
    (GuardrailTriggered(guardrail="idle_timeout", sentence="."), "autonomy:guardrail_triggered"),
    (SensorChanged(sensor="s", health="failing"), "autonomy:sensor_error"),
    (SensorChanged(sensor="s", health="ok"), "sensor_changed"),
    (WakePosted(cause="signal", origin="sensor", sender="s", notifies=True), "autonomy:notification_pushed"),
    (WakePosted(cause="signal", origin="sensor", sender="s"), "wake_posted"),
    (SessionParked(state="SLEEPING"), "session_parked"),
]


@pytest.mark.parametrize(("event", "name"), NAMES)
def test_events_are_told_under_the_names_that_clients_know(event: AnyEvent, name: str) -> None:
    assert name_feed_event(event, autonomous=True) == name
    assert name_feed_event(event, autonomous=False) == event.KIND


def test_every_event_has_a_name() -> None:
    kinds = {event.KIND for event in get_args(AnyEvent)}
    assert {name_feed_event(event, autonomous=False) for event, _ in NAMES} <= kinds
    assert name_feed_event(Unknown("of_tomorrow", 9, b""), autonomous=True) == "of_tomorrow"


async def test_of_a_session_that_runs_here_the_store_is_not_asked_for_its_kind(room: Room) -> None:
    await room.begin("a")
    (stored,) = await room.world.events(session_stream("a"))
    turn = msgspec.structs.replace(stored, kind=TurnStarted.KIND, event=TurnStarted(turn=1))
    bus = Bus(cast("Store", None), room.world.clock)
    bus.remember_session(SessionRow("a", kind="autonomous", started_at=1))
    assert (await bus.name_event(turn)).name == "autonomy:turn_started"


async def test_what_an_inbox_says_before_its_session_starts_tells_nothing_of_its_kind(room: Room) -> None:
    room.bus.remember_session(SessionRow("a"))
    await room.begin("a")
    (stored,) = await room.world.events(session_stream("a"))
    turn = msgspec.structs.replace(stored, kind=TurnStarted.KIND, event=TurnStarted(turn=1))
    assert (await room.bus.name_event(turn)).name == "autonomy:turn_started"


DESK = """
model: scripted
script: script.yaml
sensors:
  - name: ticker
    type: poll
    interval: 5
    jitter: 0
    source: {tool: price}
    signals: [{name: jump, expression: value > 150, notify: true, cooldown: 1h}]
autonomy: {enabled: true, idle_timeout: 0, gate: {on: change, expression: "'never' in changed"}}
"""
PRICE = """
from halter import tool

@tool(level="SAFE", effect="read")
async def price() -> str:
    "Tell the price."
    import asyncio
    at = asyncio.get_running_loop().time()
    if 60 <= at < 90:
        raise OSError("The exchange is closed.")
    return str(200 if at >= 300 else 100)
"""
SLEEPS = "".join("- calls: [{tool: yield, arguments: {mode: sleep, sleep: 100, wake_early_if: [jump]}}]\n" * 9)


async def test_an_agent_that_runs_by_itself_is_told_of_under_all_seven_names(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path, sturdy=True)
    folder = fleet.agent("desk", DESK, PRICE, script_yaml=SLEEPS)
    bus = Bus(world.journal, world.clock)
    client = start_client(world, bus.listen())
    fleet.start(folder, pulse=bus.publish_live)
    await world.advance(15 * MINUTE)
    names = {item.name for item in client.items_taken if isinstance(item, FeedEvent | LiveUpdate)}
    assert names >= {
        "autonomy:turn_started",
        "autonomy:turn_completed",
        "autonomy:precheck_skipped",
        "autonomy:sensor_updated",
        "autonomy:sensor_error",
        "autonomy:notification_pushed",
    }
    values = [pulse.values for pulse in client.pulses() if pulse.name == "autonomy:sensor_updated"]
    assert {"sensor": "ticker", "changed": {"ticker": 200}} in values
    assert json.dumps(values)
    (alert,) = [
        item for item in client.items_taken if isinstance(item, FeedEvent) and item.name.endswith("notification_pushed")
    ]
    assert alert.stored.stream == inbox_stream("desk-1")


async def test_a_turn_of_a_chat_is_no_turn_of_an_agent_that_runs_by_itself(room: Room) -> None:
    client = start_client(room.world, room.bus.listen())
    await room.world.advance(SECOND)
    for name, kind in (("own", "autonomous"), ("talk", "chat")):
        await room.world.start(name, kind=kind)
        (lease,) = await room.world.journal.claim(WorkerId("w"), 1)
        started = Write(session_stream(name), name, lambda _: [Draft(TurnStarted(turn=1))], lease=lease)
        await room.world.journal.commit(started)
    await room.world.advance(SECOND)
    received = {(item.stored.stream, item.name) for item in client.items_taken if isinstance(item, FeedEvent)}
    assert (session_stream("own"), "autonomy:turn_started") in received
    assert (session_stream("talk"), "turn_started") in received
