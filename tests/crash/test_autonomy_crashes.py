"""An hour of an autonomous agent, with a crash at any commit.

It polls a price, is told of jumps, skips turns that are not worth it, sends, asks a person, meets a provider that
fails, and shuts itself down. Whatever crashes, it resumes: no alert is lost or shown to two finished turns, nothing is
done twice, and its money adds up.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import pytest

from halter.autonomy.hot_state import HotState, LiveFacts
from halter.autonomy.pace import AutonomousPace, PaceTerms
from halter.autonomy.resident import ResidentSession, SupervisedSensor, WatchedSensor
from halter.autonomy.signals import Score, ScoringFailure, Signals
from halter.autonomy.upkeep import REST_STATES
from halter.config.sections import compile_signals
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.errors import ModelUnavailable
from halter.core.events import RequestStarted, TurnEnded, TurnSkipped, TurnStarted, WakePosted
from halter.core.ids import SessionId, inbox_stream, make_worker_id, session_stream
from halter.core.messages import Prompt, Reply, Text, ToolResult
from halter.core.money import BudgetRow, micros_to_usd
from halter.core.ports import HeartbeatReply, Lease, Query, read_body
from halter.core.rows import SessionRow, SpendRow
from halter.core.tools import SensorFailed
from halter.dispatch.heartbeat import acquire_lease, renew_leases
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.call_answer import Answer
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import Call, SessionContext
from halter.journal.verify import verify_store
from halter.loop.history import SessionHistory
from halter.loop.loop import TurnLoop
from halter.loop.session_runtime import SessionRuntime
from halter.loop.turn import TROUBLED_ENDS
from halter.models.prices import Prices
from halter.redaction.secrets import GivenSecrets
from halter.sensors.poll import make_poll_sensor
from halter.spec.autonomy import Autonomy, Gate, HotField, Pacing
from halter.spec.sensors import AnySensor, ExpressionSignal, ModelSignal, PollSensor, ToolSource
from halter.state.receipt import Receipt
from halter.tasks.conversation import Conclusion, Conversation
from halter.testing.fakes import Crash
from halter.testing.world import VIRTUAL_START, World, crash_everywhere
from halter.tools.function_tool import tool
from tests.crash.test_loop_crashes import TEN, Sensible, reply, timeless
from tests.story.loops import Story, calls, says

TICKER: Final = PollSensor(
    name="ticker",
    source=ToolSource(tool="ticker"),
    interval=5 * MINUTE,
    jitter=0,
    signals=(ExpressionSignal(name="jump", expression="value > 150", notify=True, cooldown=10 * MINUTE),),
)
MOST_SKIPS: Final = 2
PACING: Final = Pacing(
    autonomy=Autonomy(enabled=True, gate=Gate(max_skips=MOST_SKIPS), idle_timeout=0),
    fields={"ticker": HotField(ttl=5 * MINUTE)},
    sensors=(TICKER,),
)
PERIOD: Final = 40 * MINUTE
"""How often the price jumps."""


class Snapshots:
    """Hands that hold on to what they have, and tell its hot state."""

    def __init__(self, values: Mapping[SessionId, Callable[[], bytes]]) -> None:
        self._kept = values

    def leases(self) -> frozenset[Lease]:
        return frozenset()

    def cancel_lost(self, leases: frozenset[Lease]) -> None:
        pass

    def snapshots(self) -> Mapping[SessionId, bytes]:
        return {session: encode() for session, encode in self._kept.items()}

    def describe(self) -> str:
        return ""

    async def on_heartbeat(self, beat: HeartbeatReply) -> None:
        pass


class Manor(Story):
    """A session with sensors, in one process after the other."""

    def __init__(self, world: World, answer: Callable[[Prompt, int], Reply]) -> None:
        super().__init__(world, kind="autonomous")
        self.models, self.price = [Sensible(world, answer)], TEN
        self.pacing = PACING
        self.extra = [tool(self.ticker, level="SAFE", effect="read")]
        self.restarted_at = VIRTUAL_START
        self.takes = 0

    async def ticker(self) -> str:
        """Tell the price: it rises, and jumps once in a while; each jump is to another price."""
        await self.world.clock.sleep(self.takes)
        number, into = divmod(self.world.now - VIRTUAL_START, PERIOD)
        if into >= 35 * MINUTE:
            return str(200 + number)
        return "110" if into >= 12 * MINUTE else "100"

    async def live(self) -> None:
        """Run the session here until it ends or the process crashes."""
        store, clock = self.world.store.patient(self.world.clock), self.world.clock
        worker = make_worker_id("manor", self.world.ids)
        hot = HotState(self.pacing.fields)
        values: dict[SessionId, Callable[[], bytes]] = {}
        async with renew_leases(store, clock, worker, 10 * SECOND, Snapshots(values)):
            lease = await acquire_lease(store, clock, worker, SessionId("s"), 20 * SECOND)
            assert lease is not None
            prices = Prices({str(model.name): self.price for model in self.models})
            doors = GuardRuntime(store, clock, redact=self.redact, secrets=GivenSecrets({}), prices=prices)
            running = SessionRuntime(store, clock, doors, lease, self.standing(), self.tools(store))
            aware = LiveFacts(hot, clock)
            hot.restore(await running.load_snapshot())
            # Only now: what is not known yet must not be kept in place of what was.
            values[SessionId("s")] = hot.snapshot
            self.loop = TurnLoop(
                running, clock, self.thinking(running), random.Random(self.world.seed), aware.make_live_context()
            )
            pace = AutonomousPace(running, self.loop, clock, PaceTerms(pacing=self.pacing), aware)
            conversation = Conversation(running, self.loop, clock, pace, resident=True)
            watched_sensors = [WatchedSensor(TICKER, Signals(TICKER.signals, compile_signals(TICKER), fail_scoring))]
            resident = ResidentSession(
                conversation, running, self.loop, aware, watched_sensors, lambda *a: self.sensing(running, *a)
            )
            self.came = await resident.live(await self.asleep(running))

    async def asleep(self, running: SessionRuntime) -> Conclusion | None:
        """Find the session asleep, with its time still to come."""
        (row,) = await self.world.journal.ask(Query("session", SessionRow, {"session": "s"}))
        if row.state not in REST_STATES or (row.due_at is not None and row.due_at <= self.world.now):
            return None
        await running.load_history()
        return Conclusion(row.state, wake_at=row.wake_at, wake_on=tuple(row.wake_on.split()))

    def sensing(self, running: SessionRuntime, sensor: AnySensor, take: Any, result: Any) -> SupervisedSensor:
        async def look() -> Any:
            name = f"s.p{sensor.name}_{self.world.now}"
            answer = await running.call_read_only(Call(name, "ticker", b"{}", "sensor", timeout=sensor.timeout))
            if not isinstance(answer, Answer) or answer.outcome != "ok":
                raise SensorFailed("It did not answer.")
            return int(answer.text)

        chance = random.Random(self.world.seed)
        return SupervisedSensor(
            make_poll_sensor(sensor, look, self.world.clock, chance), self.world.clock, chance, take, result
        )


async def fail_scoring(signal: ModelSignal, _: Any) -> Score | ScoringFailure:
    return ScoringFailure(f"Nobody judges {signal.name}.")


def desk(prompt: Prompt, number: int) -> Reply:
    """Answer by the prompt: by the alerts of this turn and the number of turns that have ended."""
    if number == 3:
        raise ModelUnavailable("Overloaded: come back later", billed=False)
    parts = [part for message in prompt.messages for part in message.parts]
    results = [part for part in parts if isinstance(part, ToolResult)]
    rounds = sum(result.tool == "yield" for result in results) + sum(
        isinstance(part, Text) and part.text == "Hm." for part in parts
    )
    if (prompt.facts or {}).get("notifications"):
        alert = ("send", {"text": f"alert {len(results)}"})
        return reply(calls(alert, ("yield", {"mode": "sleep", "sleep": 120})))
    return reply(LINES[min(rounds, len(LINES) - 1)])


WAIT: Final = ("yield", {"mode": "sleep", "sleep": 6 * 3600, "wake_early_if": ["jump"]})
LINES: Final = [
    calls(("send", {"text": "hello"}), ("yield", {"mode": "sleep", "sleep": 300})),
    calls(("wipe", {"path": "a"}), ("yield", {"mode": "sleep", "sleep": 120})),
    says("Hm."),
    calls(("yield", {"mode": "continue"})),
    calls(WAIT),
    calls(("yield", {"mode": "shutdown"})),
]


async def answer_truly(world: World, manor: Manor) -> None:
    """Allow what is asked for, and say truly, as a person who looks would, whether a call in doubt was made."""
    while True:
        for waiting in await list_pending_decisions(world.journal):
            done = waiting.about != "unknown_call" or await was_done(world, manor, waiting.subject)
            write = answer_decision(waiting, "approve" if done else "deny", "ada", world.ids.make())
            await world.store.patient(world.clock).commit(write)
        await world.clock.sleep(20 * SECOND)


async def was_done(world: World, manor: Manor, call: str) -> bool:
    for stored in await world.events(session_stream("s")):
        if stored.kind == "call_started" and stored.event.call == call:
            arguments = msgspec.json.decode(await read_body(world.journal, stored))
            return manor.desk.done[f"{stored.event.tool} {next(iter(arguments.values()))}"] > 0
    raise LookupError(call)


def everywhere(down: int, every: int) -> Any:
    """Run the hour repeatedly, each time with another crash; the next process starts `down` later."""
    manors: list[Manor] = []

    async def program(world: World) -> None:
        manor = manors[-1]
        if manor.loop is not None:
            await world.clock.sleep(down)
            manor.restarted_at = world.now
        answering = world.spawn(answer_truly(world, manor))
        await manor.begin()
        if not (await world.session("s")).ended:
            await manor.live()
        answering.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash)
        manors.append(Manor(world, desk))
        return world

    for world in crash_everywhere(program, new_world, every=every):
        yield world, manors[-1]


async def check_outcome(world: World, manor: Manor) -> Receipt:
    """Check what holds after every crash."""
    receipt = await manor.receipt()
    await check_money(world, receipt)
    await check_alerts(world)
    await check_skips(world)
    check_done_once(manor)
    session_history = SessionHistory("s")
    await session_history.apply(await manor.events(), lambda stored: read_body(world.journal, stored))
    assert manor.loop is not None
    assert timeless(session_history.turn) == timeless(manor.loop.turn), world
    assert session_history.transcript.messages == manor.messages, world
    assert session_history.hot == manor.loop.hot, world
    assert (await verify_store(world.journal)).findings == ()
    return receipt


async def check_money(world: World, receipt: Receipt) -> None:
    """Check that charges, receipt and tables agree, and that nothing is still held."""
    events = [stored.event for stored in await world.events(session_stream("s"))]
    charged = sum(event.charge.usd for event in events if getattr(event, "charge", None) is not None)
    spends = await world.journal.ask(Query("all_spends", SpendRow))
    budgets = await world.journal.ask(Query("budgets", BudgetRow))
    assert receipt.cost_usd == micros_to_usd(charged) == micros_to_usd(sum(spend.usd for spend in spends)) > 0
    assert {budget.held for budget in budgets} == {0}
    assert receipt.in_doubt == ()


def check_done_once(manor: Manor) -> None:
    """Check that nothing was done twice, and that the model was shown what was done and what was not."""
    assert set(manor.desk.done.values()) == {1}
    results = [result for result in manor.results() if result.tool in ("send", "wipe")]
    assert sum(result.outcome == "ok" for result in results) == manor.desk.done.total()


async def check_alerts(world: World) -> None:
    """Check that each alert is in every turn from the first that could see it to the first that ended."""
    alerts = [
        (stored.seq, (await read_body(world.journal, stored)).decode().partition("It read ")[2])
        for stored in await world.events(inbox_stream("s"))
        if isinstance(stored.event, WakePosted) and stored.event.notifies
    ]
    cleared = 0
    for turn in await list_turns(world):
        expected = [read for seq, read in alerts if cleared < seq <= turn.heard]
        for texts in turn.alerts_by_turn:
            assert texts == expected, (world, turn)
        cleared = cleared if turn.why in TROUBLED_ENDS else turn.heard


async def check_skips(world: World) -> None:
    """Check that a turn follows the maximum number of skips in a row, across processes."""
    skips = 0
    for stored in await world.events(session_stream("s")):
        match stored.event:
            case TurnSkipped():
                skips += 1
                assert stored.event.skips == skips <= MOST_SKIPS, world
            case TurnStarted():
                skips = 0
            case _:
                pass


class Told(msgspec.Struct):
    """A turn by the journal alone: how far its inbox was read, which alerts its requests showed, how it ended."""

    heard: int
    alerts_by_turn: list[list[str]] = []
    why: str = ""


async def list_turns(world: World) -> Sequence[Told]:
    turns: list[Told] = []
    for stored in await world.events(session_stream("s")):
        match stored.event:
            case TurnStarted(inbox_seen=heard):
                turns.append(Told(heard))
            case RequestStarted(purpose="turn"):
                volatile = msgspec.json.decode(await read_body(world.journal, stored))["volatile"]
                alerts = [line for line in volatile.splitlines() if "`jump`" in line]
                turns[-1].alerts_by_turn.append([line.partition("It read ")[2].strip('"') for line in alerts])
            case TurnEnded(why=why):
                turns[-1].why = why
            case _:
                pass
    return turns


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.soak)])
def test_an_autonomous_hour_resumes_after_a_crash_at_any_commit(every: int) -> None:
    for number, (world, manor) in enumerate(everywhere(0, every)):
        result = world.run(check_outcome(world, manor))
        assert (result.state, result.terminal_reason) == ("COMPLETED", "completed"), world
        assert any(turn.alerts_by_turn and turn.alerts_by_turn[-1] for turn in world.run(list_turns(world))), world
        if number == 0:
            assert manor.desk.done == {"send hello": 1, "wipe a": 1, "send alert 6": 1}
            assert sum(stored.kind == "turn_skipped" for stored in world.history) > 3
            assert [line.outcome for line in result.requests].count("error") == 1


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.soak)])
def test_what_was_due_while_nobody_ran_is_woken_at_the_next_start(every: int) -> None:
    for world, manor in everywhere(7 * HOUR, every):
        result = world.run(check_outcome(world, manor))
        assert (result.state, result.terminal_reason) == ("COMPLETED", "completed"), world
        ats = [stored.at for stored in world.run(manor.events()) if stored.at >= manor.restarted_at]
        assert not ats or ats[0] - manor.restarted_at <= SECOND, world


async def test_hot_state_is_shown_as_stale_after_a_restart_until_it_is_read_again(world: World) -> None:
    manor = Manor(world, desk)
    gateless = Autonomy(enabled=True, idle_timeout=0)
    manor.pacing = msgspec.structs.replace(PACING, autonomy=gateless, fields={"ticker": HotField()})
    await manor.begin()
    world.spawn(manor.live())
    await world.advance(4 * MINUTE)
    await world.restart()
    await world.clock.sleep(HOUR)
    manor.takes = 20 * SECOND
    world.spawn(manor.live())
    await world.advance(SECOND)
    assert "ticker: 100 (stale: 1h4m ago)" in volatile(manor.model.requests[-1])
    manor.takes = 0
    world.spawn(answer_truly(world, manor))
    await world.advance(5 * MINUTE)
    assert "ticker: 110 (" in volatile(manor.model.requests[-1])
    assert "stale" not in volatile(manor.model.requests[-1])


def volatile(prompt: Prompt) -> str:
    part = prompt.messages[-1].parts[-1]
    return part.text if isinstance(part, Text) and part.reason == "volatile" else ""


class Sparing(Manor):
    """A session that may use few tokens in an hour."""

    def standing(self) -> SessionContext:
        return msgspec.structs.replace(super().standing(), tokens_per_hour=15_000)


async def test_a_pause_for_tokens_is_recalled_as_it_was(world: World) -> None:
    manor = Sparing(world, lambda _, __: reply(calls(("yield", {"mode": "continue"})), 4000))
    await manor.begin()
    world.spawn(manor.live())
    await world.advance(30 * MINUTE)
    assert "guardrail_triggered" in await manor.kinds()
    assert manor.loop is not None
    session_history = SessionHistory("s")
    await session_history.apply(await manor.events(), lambda stored: read_body(world.journal, stored))
    assert (
        (session_history.turn.sleepless_turn_count, session_history.turn.is_held_back)
        == (manor.loop.turn.sleepless_turn_count, manor.loop.turn.is_held_back)
        == (3, False)
    )
