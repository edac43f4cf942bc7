"""Ways in which an agent that runs by itself could be brought to break its promises, and cannot."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import StoreUnavailable
from halter.core.events import RequestSettled, SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import Committed, Store, Stored, Write
from halter.dispatch.dispatcher import quarantine_session
from halter.guard.halts import halt
from halter.loop.concurrency import watch_changes
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.session_start import begin_session, post_message
from halter.runtime.supervisor import Supervisor
from halter.runtime.switches import turn_off, turn_on
from halter.settings import read_settings
from halter.state.lifecycle import start_session
from halter.testing.fakes import StoreProxy
from halter.testing.world import World
from tests.story.autonomous import Fleet, moment, rhythm
from tests.story.test_dispatch import taken_away

COUNTS = """
from halter import tool

READ = []

@tool(level="SAFE", effect="read")
async def price() -> int:
    "Tell the price, which is always another one."
    READ.append(1)
    return len(READ)
"""

SENSES = """
model: scripted
script: script.yaml
sensors:
  - {name: ticker, type: poll, interval: 5, jitter: 0, source: {tool: price}}
"""

SCORES = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - name: ticker
    type: poll
    interval: 20
    jitter: 0
    source: {tool: price}
    signals: [{name: strange, model: "scripted:small", prompt: Strange?, notify: true}]
"""
SMALL = "- {when: The data, calls: [{tool: answer, arguments: {score: 0.2}}], takes: 15s}\n"


def naps(seconds: object = "1h", *names: str) -> str:
    arguments = f"{{mode: sleep, sleep: {seconds}, wake_early_if: [{', '.join(names)}]}}"
    return f"- calls: [{{tool: yield, arguments: {arguments}}}]\n"


async def outcomes(fleet: Fleet, session: str = "desk-1") -> list[str]:
    """What the requests of a session came to."""
    events = [stored.event for stored in await fleet.events(session)]
    return [event.outcome for event in events if isinstance(event, RequestSettled)]


STOPS = "calls: [{tool: yield, arguments: {mode: shutdown}}]"


async def test_a_shutdown_is_one_although_a_sensors_request_is_under_way(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SCORES, COUNTS, script_yaml=SMALL * 9 + f"- {{{STOPS}, takes: 5s}}\n"))
    await world.advance(MINUTE)
    row = await fleet.row("desk-1")
    assert (row.state, row.terminal_reason, row.owner) == ("COMPLETED", "completed", "")
    assert "attending_failed" not in await fleet.kinds("desk-1")


@pytest.mark.parametrize("scope", ["session:desk-1", "agent:desk", "fleet"])
async def test_a_halt_ends_a_sleeper_while_its_sensors_request_is_under_way(
    world: World, tmp_path: Path, scope: str
) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SCORES, COUNTS, script_yaml=SMALL * 9 + naps()))
    await world.advance(5 * SECOND)
    await world.store.commit(halt(scope, "ada", "halt"))
    await world.advance(SECOND)
    row = await fleet.row("desk-1")
    assert (row.state, row.terminal_reason, row.owner) == ("HALTED", "external_halt", "")
    assert await outcomes(fleet) == ["ok", "cancelled"]
    assert "attending_failed" not in await fleet.kinds("desk-1")


async def test_on_right_after_off_begins_the_next_session(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=naps() * 2))
    await world.advance(MINUTE)
    await turn_off(fleet.app, "desk")
    await turn_on(fleet.app, "desk")
    await world.advance(2 * MINUTE)
    assert (await fleet.row("desk-1")).state == "HALTED"
    assert [row.session for row in await fleet.sessions("desk")] == ["desk-1", "desk-2"]


async def test_what_is_under_way_is_not_taken_for_something_that_a_crash_left(world: World, tmp_path: Path) -> None:
    """A sleeper that the next process finds asleep wakes while its sensors' requests are under way."""
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", SCORES, COUNTS, script_yaml=SMALL * 900 + naps(610) * 9)
    fleet.start(folder)
    await world.advance(5 * MINUTE)
    await world.restart()
    fleet.start(folder)
    await world.advance(10 * MINUTE)
    assert (await outcomes(fleet)).count("unknown") == 1
    assert "attending_failed" not in await fleet.kinds("desk-1")


async def test_a_session_that_begins_while_its_agent_is_switched_off_is_stopped(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=naps() * 9))
    await world.advance(MINUTE)
    await turn_off(fleet.app, "desk")
    await world.advance(MINUTE)
    assert fleet.up is not None
    await fleet.up.agents["desk"].begin_session(2)
    await world.advance(MINUTE)
    row = await fleet.row("desk-2")
    assert (row.state, row.owner) == ("HALTED", "")
    await turn_on(fleet.app, "desk")
    await world.advance(MINUTE)
    assert (await fleet.row("desk-3")).state == "SLEEPING"


SHARP = "calls: [{tool: yield, arguments: {mode: shutdown}}], takes: 10s"


@pytest.mark.parametrize("beside", [True, False])
async def test_a_persons_word_during_the_last_turn_is_answered_by_another(
    world: World, tmp_path: Path, *, beside: bool
) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=f"- {{{SHARP}}}\n" * 2))
    await world.advance(5 * SECOND)
    assert fleet.up is not None
    context = fleet.up.agents["desk"].context
    if beside:
        await begin_session(context, "Buy now.", "chat")
    else:
        await post_message(context, "desk-1", "Buy now.")
    await world.advance(MINUTE)
    assert [line for line in rhythm(await fleet.events("desk-1")) if "turn" in line] == [
        "00:00:00 turn 1",
        "00:00:10 turn 2",
    ]
    assert "Buy now." in str(fleet.prompts("desk")[1].messages[-1])
    assert (await fleet.row("desk-1")).state == "COMPLETED"


class LastWord(StoreProxy):
    """A store in which somebody says a word right after the last request of a session was cut, before all else."""

    said = False

    def __init__(self, world: World) -> None:
        super().__init__(world.store)
        self._world = world

    async def commit(self, write: Write) -> Committed:
        committed = await super().commit(write)
        cut = any(
            isinstance(one.event, RequestSettled) and one.event.outcome == "cancelled"
            for one in committed.list_events()
        )
        if cut and not self.said:
            self.said = True
            await self._world.send_message("desk-1", "Wait.")
        return committed


class Interrupter(Fleet):
    """A process at whose end somebody speaks."""

    @property
    def app(self) -> Runtime:
        return replace(super().app, store=cast("Any", LastWord(self.world)))


async def test_a_word_at_the_very_moment_of_the_end_is_not_lost(world: World, tmp_path: Path) -> None:
    """It comes while the sensors are being stopped."""
    fleet = Interrupter(world, tmp_path)
    script = SMALL * 99 + f"- {{{STOPS}, takes: 5s}}\n" * 2
    fleet.start(fleet.agent("desk", SCORES, COUNTS, script_yaml=script))
    await world.advance(10 * MINUTE)
    assert "cancelled" in await outcomes(fleet)
    assert "Wait." in str(fleet.prompts("desk")[1].messages)
    assert (await fleet.row("desk-1")).state == "COMPLETED"


async def test_what_is_written_right_after_somebody_began_to_listen_is_heard(world: World) -> None:
    async with watch_changes(world.journal) as event:
        await world.journal.commit(
            start_session(SessionStarted(session="one", agent="desk", kind="task", started_by="ada"))
        )
        await world.advance(0)
        assert event.is_set()


class Interrupted(StoreProxy):
    """A store in which something happens right before one commit."""

    def __init__(self, store: Store, happens: Callable[[], Awaitable[None]]) -> None:
        super().__init__(store)
        self._happens = happens

    async def commit(self, write: Write) -> Committed:
        await self._happens()
        return await super().commit(write)


async def test_a_word_while_a_broken_session_is_put_aside_lets_it_go_on(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", SENSES, COUNTS, script_yaml=naps()))
    await world.advance(MINUTE)
    await world.restart()
    await world.advance(MINUTE)
    (lease,) = await world.journal.claim(WorkerId("another"), 1, SessionId("desk-1"))
    racing = Interrupted(world.journal, lambda: world.send_message("desk-1", "Still there?"))
    assert not await quarantine_session(racing, lease, 5, "ValueError: no", world.now)
    assert "attending_failed" not in await fleet.kinds("desk-1")
    assert await quarantine_session(world.journal, lease, 5, "ValueError: no", world.now)
    assert ((await fleet.row("desk-1")).state, (await fleet.row("desk-1")).owner) == ("PAUSED", "")


async def test_a_process_that_lost_its_session_puts_no_alert_into_its_inbox(world: World, tmp_path: Path) -> None:
    """As one does that was stopped for longer than its lease, and continued."""
    fleet = Fleet(world, tmp_path)
    alerts = "signals: [{name: up, expression: value > 0, notify: true, cooldown: 1s}]"
    text = SENSES.replace("source: {tool: price}", f"source: {{tool: price}}, {alerts}")
    text = text.replace("interval: 5", "interval: 4")
    fleet.start(fleet.agent("desk", text, COUNTS, script_yaml=naps()))
    await world.advance(55 * SECOND + SECOND // 2)
    posted = await fleet.inbox("desk-1")
    assert len(posted) == 14
    await taken_away(world, "desk-1")
    await world.advance(MINUTE)
    assert await fleet.inbox("desk-1") == posted
    assert fleet.up is not None
    assert not fleet.up.agents["desk"].snapshots


async def test_a_signal_that_passes_a_cap_ends_the_session(world: World, tmp_path: Path) -> None:
    prices = "models: {scripted:script: {price: free}, scripted:small: {price: {input: 10, output: 10}}}\n"
    fleet = Fleet(world, tmp_path, prices)
    dear = SMALL.replace("takes: 15s", "usage: {input_tokens: 90, output_tokens: 50000}")
    text = SCORES.replace("idle_timeout: 0", "idle_timeout: 0, token_budget_per_hour: 0")
    script = dear + SMALL * 9 + naps(60) * 9
    folder = fleet.agent("desk", text + "limits: {max_cost_usd: 0.05}\n", COUNTS, script_yaml=script)
    fleet.start(folder)
    await world.advance(5 * SECOND)
    assert "overrun_incurred" in await fleet.kinds("desk-1")
    await world.restart()
    fleet.start(folder)
    await world.advance(MINUTE)
    row = await fleet.row("desk-1")
    assert (row.state, row.terminal_reason) == ("BUDGET_EXCEEDED", "overrun")
    # Before its first turn, or before its second, whichever the sensor was in time for.
    assert moment(row.ended_at or 0) in ("00:00:00", "00:01:00")


SECRET = "zq8vj3kx0plm4rt7wybn2hs6"

LISTENS = """
model: scripted
script: script.yaml
secrets: [API_KEY]
autonomy: {{enabled: true}}
sensors:
  - name: feed
    type: stream
    source: {{url: "http://127.0.0.1:{port}/", headers: {{Authorization: "Bearer ${{secret:API_KEY}}"}}}}
"""


async def test_a_sensor_whose_secret_is_not_set_fails_alone(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    ticker = "  - {name: ticker, type: poll, interval: 5, jitter: 0, source: {tool: price}}\n"
    fleet.start(fleet.agent("desk", LISTENS.format(port=9) + ticker, COUNTS, script_yaml=naps(10) * 9))
    await world.advance(MINUTE)
    assert "attending_failed" not in await fleet.kinds("desk-1")
    last = str(fleet.prompts("desk")[-1].messages[-1])
    assert "The secret API_KEY of the sensor feed is not set" in last
    assert "ticker: 1" in last


async def test_what_a_source_says_of_its_failure_gives_no_secret_away(tmp_path: Path) -> None:
    """A server sends back what it was sent, where a person is told what it said."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            body = await reader.readuntil(b"\r\n\r\n")
            (result,) = re.findall(rb"Bearer (\w+)", body)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/" + result + b"\r\nconnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    folder = tmp_path / "desk"
    folder.mkdir()
    (folder / "agent.yaml").write_text("name: desk\n" + LISTENS.format(port=server.sockets[0].getsockname()[1]))
    (folder / "script.yaml").write_text(naps() * 9)
    environ = {"HALTER_TRUST": str(tmp_path / "trust.json"), "USER": "ada", "HALTER_SECRET_API_KEY": SECRET}
    pulses: list[str] = []
    async with open_runtime(read_settings(environ, tmp_path, "memory:"), environ=environ) as app:
        task = asyncio.create_task(
            Supervisor(app, lambda _, __: None, lambda _, __, values: pulses.append(str(values))).run([folder])
        )
        events: list[Stored] = []
        async with asyncio.timeout(60), watch_changes(app.store) as event:
            while not any(stored.kind == "sensor_changed" for stored in events):
                await event.wait()
                event.clear()
                events = list(await app.store.read(session_stream("desk-1"), 0, 1000))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.close()
    assert "[redacted:" in str(events)
    assert SECRET not in f"{pulses} {events}"


class Away(StoreProxy):
    """A store that is away for a while."""

    away = False
    asked = 0

    async def before_call(self) -> None:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("The store is away.")


class Outage(Fleet):
    """A process whose store can be away."""

    def __init__(self, world: World, home: Path) -> None:
        super().__init__(world, home)
        self.store = Away(world.store)

    @property
    def app(self) -> Runtime:
        return replace(super().app, store=cast("Any", self.store))


@pytest.mark.parametrize("at", [2, 20, 59, 60, 61])
async def test_a_store_that_is_away_for_minutes_is_waited_for_patiently(world: World, tmp_path: Path, at: int) -> None:
    fleet = Outage(world, tmp_path)
    alerts = "signals: [{name: up, expression: value > 0, notify: true, cooldown: 1s}]"
    text = SENSES.replace("source: {tool: price}", f"source: {{tool: price}}, {alerts}")
    fleet.start(fleet.agent("desk", text, COUNTS, script_yaml=naps(60) * 99))
    await world.advance(at * SECOND)
    fleet.store.away, before = True, fleet.store.asked
    posted = len(await fleet.inbox("desk-1"))
    await world.advance(5 * MINUTE)
    assert fleet.store.asked - before < 2_400
    assert len(await fleet.inbox("desk-1")) <= posted + 1
    fleet.store.away = False
    await world.advance(5 * MINUTE)
    assert "attending_failed" not in await fleet.kinds("desk-1")
    assert (await fleet.row("desk-1")).state == "SLEEPING"
    assert len(await fleet.inbox("desk-1")) >= posted + 20
    lines = rhythm(await fleet.events("desk-1"))
    assert sum("turn" in line for line in lines) >= 5
