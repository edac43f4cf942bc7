"""A look ahead before a call: predicted once, paid like everything else, and never in anybody's way."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import MINUTE, SECOND
from halter.core.events import RequestStarted, SessionStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.messages import Reply, Text
from halter.core.ports import Query
from halter.core.rows import SpendRow
from halter.core.usage import ModelName, Price, Usage
from halter.guard.halts import halt
from halter.guard.model_door import ModelDoor
from halter.guard.prepare import Call, PreparedCall, SessionContext, prepare_call
from halter.guard.simulation import SIMULATION_LABEL, NotSimulated, Simulated, Simulator
from halter.models.prices import Prices
from halter.models.scripted import Scripted, ScriptedFailure, ScriptLine, say
from halter.spec.agent import Phase
from halter.state import lifecycle
from halter.testing.world import World
from halter.tools.function_tool import tool
from tests.crash.test_loop_crashes import recalled
from tests.story.loops import Story, calls

PRICES = "models: {'test:paid': {price: {input: 1, output: 1}}}\n"
SIMULATES = "policy: {simulate: asked}\n"
USED = Usage(200, 50)


@tool(level="RESTRICTED")
def drop(table: str) -> str:
    """Drop a table."""
    return table


@tool(level="CONTROLLED")
def note(table: str) -> str:
    """Write a note."""
    return table


def make_context(fleet: str = SIMULATES, limits: str = "{}") -> SessionContext:
    ours = parse_fleet(load_bytes((PRICES + fleet).encode(), "halter.yaml"))
    resolved_policy = resolve_policy(
        ours, parse_agent(load_bytes(f"name: desk\nlimits: {limits}\n".encode(), "agent.yaml"))
    )
    return SessionContext("s", "desk", Phase("work", None), resolved_policy, str(resolved_policy.digest()))


class Desk:
    def __init__(self, world: World, standing: SessionContext, lines: list[ScriptLine] | None) -> None:
        self.world = world
        self.standing = standing
        self.model = None if lines is None else Scripted(lines, world.clock, ModelName("test", "paid"))
        prices = Prices(standing.policy.prices)
        self.door = ModelDoor(world.store, world.clock, world.ledger, prices, redact=str)
        self.simulator = Simulator(self.door, world.clock, self.model)

    async def begin(self) -> "Desk":
        event = SessionStarted(session="s", agent="desk", kind="task", started_by="ada")
        await self.world.store.commit(lifecycle.start_session(event))
        (self.lease,) = await self.world.store.claim(WorkerId("w"), 1)
        return self

    def prepare(self, call: str = "s.1", using: Any = drop, table: str = "orders") -> PreparedCall:
        arguments = b'{"table": "%s"}' % table.encode()
        return prepare_call(self.standing, Call(call, using.spec.name, arguments), using, self.world.now, 0)

    async def simulate(self, prepared: PreparedCall | None = None, situation: str = "") -> Simulated | NotSimulated:
        return await self.simulator.simulate(self.lease, self.standing, prepared or self.prepare(), situation)

    @property
    def request_count(self) -> int:
        return len(self.model.requests) if self.model else 0


async def start_desk(world: World, *lines: ScriptLine, standing: SessionContext | None = None) -> Desk:
    return await Desk(world, standing or make_context(), list(lines)).begin()


async def test_a_call_that_a_person_is_asked_about_is_predicted_shortly_and_paid_for(world: World) -> None:
    desk = await start_desk(world, say(" The table would be gone. ", USED))
    assert await desk.simulate(situation="cleaning up") == Simulated(f"{SIMULATION_LABEL} The table would be gone.")
    (prompt,) = desk.model.requests if desk.model else ()
    assert prompt.max_output_tokens == 300
    output = "\n".join(part.text for part in prompt.messages[0].parts if isinstance(part, Text))
    assert "drop: Drop a table." in output
    assert '"table":"orders"' in output
    assert "cleaning up" in output
    (spend,) = await world.store.ask(Query("all_spends", SpendRow))
    assert (spend.purpose, spend.usd, spend.hold) == ("simulation", 250, "s.1/simulation/0")


async def test_the_same_call_in_the_same_situation_is_predicted_once_in_five_minutes(world: World) -> None:
    desk = await start_desk(world, *(say(f"{number}.", USED) for number in range(5)))
    first = await desk.simulate()
    assert isinstance(first, Simulated)
    assert await desk.simulate(desk.prepare("s.2")) == Simulated(first.text, is_cached=True)
    assert desk.request_count == 1
    await desk.simulate(desk.prepare("s.3"), "another situation")
    await desk.simulate(desk.prepare("s.4", table="people"))
    assert desk.request_count == 3
    await world.advance(5 * MINUTE)
    assert await desk.simulate(desk.prepare("s.5")) != first
    assert desk.request_count == 4


async def test_a_prediction_of_the_same_call_is_not_paid_twice_also_when_it_was_forgotten(world: World) -> None:
    desk = await start_desk(world, say("Gone.", USED), say("Not asked for.", USED))
    first = await desk.simulate()
    await world.advance(MINUTE * 10)
    assert await desk.simulate() == first
    assert desk.request_count == 1


@pytest.mark.parametrize(
    ("fleet", "using", "predicted"),
    [
        ("", drop, False),
        (SIMULATES, drop, True),
        (SIMULATES, note, False),
        (f"mode: FULL\n{SIMULATES}", drop, False),
        ("mode: FULL\npolicy: {simulate: always}\n", drop, True),
        ("mode: FULL\npolicy: {tools: {drop: {simulate: always}}}\n", drop, True),
        ("policy: {simulate: asked, tools: {drop: {simulate: never}}}\n", drop, False),
        ("policy: {simulate: asked, disabled: [drop]}\n", drop, False),
    ],
)
async def test_nothing_is_predicted_unless_it_is_switched_on(
    world: World, fleet: str, using: Any, *, predicted: bool
) -> None:
    desk = await start_desk(world, say("Gone.", USED), standing=make_context(fleet))
    answer = await desk.simulate(desk.prepare(using=using))
    assert isinstance(answer, Simulated) == predicted
    assert desk.request_count == int(predicted)


async def test_without_a_model_nothing_is_predicted(world: World) -> None:
    desk = await Desk(world, make_context(), None).begin()
    assert await desk.simulate() == NotSimulated("No simulation model is configured.")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (ScriptLine(reply=Reply(()), fails=ScriptedFailure(kind="Busy", message="later")), "Busy: later"),
        (say("Too late.", takes=MINUTE), "TimeoutError: test:paid exceeded its deadline"),
        (say("  "), "The model gave no prediction."),
        (ScriptLine(reply=Reply((), "refused")), "The model gave no prediction."),
    ],
)
async def test_a_failing_simulation_is_no_simulation(world: World, line: ScriptLine, reason: str) -> None:
    desk = await start_desk(world, line)
    assert await desk.simulate() == NotSimulated(reason)


async def test_a_simulation_that_the_cap_refuses_ends_no_session(world: World) -> None:
    desk = await start_desk(world, standing=make_context(limits="{max_cost_usd: 0.0001}"))
    answer = await desk.simulate()
    assert isinstance(answer, NotSimulated)
    assert "is left of the cap of session:s" in answer.reason
    assert not (await world.session("s")).cost_cap_reached


async def test_a_simulation_does_not_wait_for_money_and_stops_at_a_halt(world: World) -> None:
    desk = await start_desk(
        world, say("Slow.", takes=20 * SECOND), standing=make_context(limits="{max_cost_usd: 0.0013}")
    )
    first = asyncio.create_task(desk.simulate())
    await world.advance(SECOND)
    before = world.now
    second = await desk.simulate(desk.prepare("s.2", table="people"))
    assert (second, world.now) == (NotSimulated("Other holds use the remaining budget."), before)
    await world.store.commit(halt("fleet", "ada", "halt"))
    assert await first == NotSimulated("fleet was halted.")
    assert world.now - before < SECOND


async def test_simulations_are_distinguished_by_their_purpose(world: World) -> None:
    desk = await start_desk(world, say("Gone.", USED))
    await desk.simulate()
    (started,) = [e.event for e in await world.events(session_stream("s")) if isinstance(e.event, RequestStarted)]
    assert started.purpose == "simulation"


CLEANING = calls(("wipe", {"path": "a"}), text="The disk is full.", usage=Usage(100, 20))


async def test_a_prediction_is_recorded_next_to_the_result_and_includes_the_situation(world: World) -> None:
    """The same call in the same situation is neither asked about nor reported again; in another one it is."""
    script_line, other = CLEANING, calls(("wipe", {"path": "a"}), text="Once more.", usage=Usage(100, 20))
    story = Story(
        world, [CLEANING, script_line, other, say("Done.", USED)], kind="task", policy_yaml="policy: {simulate: always}"
    )
    story.policy = resolve_policy(
        parse_fleet(load_bytes(b"mode: FULL\n", "halter.yaml")),
        parse_agent(load_bytes(b"name: desk\npolicy: {simulate: always}\n", "agent.yaml")),
    )
    story.price = Price(Decimal(10), Decimal(10))
    model = Scripted(
        [say("It will be gone.", USED), say("It is gone already.", USED)], world.clock, ModelName("s", "m9")
    )
    story.simulates = model
    await story.run("Clean up the disk.")
    texts = [
        "\n".join(part.text for part in prompt.messages[0].parts if isinstance(part, Text)) for prompt in model.requests
    ]
    assert ["The agent was asked: Clean up the disk." in text for text in texts] == [True, True]
    assert ["With the call it says: The disk is full." in text for text in texts] == [True, False]
    assert [part.text for part in story.results()] == ["wiped"] * 3
    predictions = [part.text.partition("no part of its result: ")[2] for part in story.predictions()]
    assert predictions == ["It will be gone.", "It is gone already."]
    assert (await recalled(world)).transcript.messages == story.messages
    usds = (await story.receipt()).spent_by_purpose_usd
    assert usds["simulation"] == Decimal("0.005")
    assert usds["turn"] == Decimal("0.0061")


async def test_a_prediction_that_passes_the_cap_ends_the_session_after_its_call(world: World) -> None:
    story = Story(world, [CLEANING, say("Never said.", USED)], kind="task", policy_yaml="policy: {simulate: always}")
    story.policy = resolve_policy(
        parse_fleet(load_bytes(b"mode: FULL\n", "halter.yaml")),
        parse_agent(load_bytes(b"name: desk\npolicy: {simulate: always}\n", "agent.yaml")),
    )
    story.price = Price(Decimal(10), Decimal(10))
    dear = say("It will be gone.", Usage(200, 10_000_000))
    story.simulates = Scripted([dear], world.clock, ModelName("s", "m9"))
    ending = await story.run("Clean up the disk.")
    assert (ending.state, ending.terminal_reason) == ("BUDGET_EXCEEDED", "overrun")
    assert [tool_result.text for tool_result in story.results()] == ["wiped"]
