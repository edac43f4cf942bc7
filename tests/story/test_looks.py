"""Looks that a sensor takes for ever: they pass the same brakes as every call, and leave no trace."""

import asyncio

import msgspec

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import MINUTE, SECOND
from halter.core.events import CallSettled
from halter.core.ids import make_worker_id, session_stream
from halter.core.ports import Lease
from halter.core.tools import Tool
from halter.guard.call_answer import Answer
from halter.guard.guard import GuardRuntime
from halter.guard.halts import halt, resume
from halter.guard.prepare import Call, SessionContext
from halter.models.prices import Prices
from halter.redaction.secrets import GivenSecrets
from halter.spec.agent import Phase
from halter.testing.world import World
from halter.tools.function_tool import tool


class Place:
    """A session that looks, and how often its tools really ran."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ran: list[str] = []
        policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk", "agent.yaml")))
        self.standing = SessionContext("s", "desk", policy.phases[0], policy, str(policy.digest()))
        secrets, prices = GivenSecrets({}), Prices({})
        self.doors = GuardRuntime(world.store, world.clock, redact=str, secrets=secrets, prices=prices)

        async def price() -> str:
            self.ran.append("price")
            return "7"

        async def paid() -> str:
            self.ran.append("paid")
            return "7"

        async def stubborn() -> str:
            self.ran.append("stubborn")
            try:
                await world.clock.sleep(MINUTE)
            except asyncio.CancelledError:
                await world.clock.sleep(MINUTE)
            return "late"

        own_tools = (
            tool(price, level="SAFE", effect="read"),
            tool(paid, level="SAFE", effect="read", cost="0.01"),
            tool(stubborn, level="SAFE", timeout=600),
        )
        self.tools: dict[str, Tool] = {each.spec.name: each for each in own_tools}

    async def begin(self) -> Lease:
        await self.world.start("s", agent="desk")
        (lease,) = await self.world.store.claim(make_worker_id("w", self.world.ids), 1)
        return lease

    async def looks(self, lease: Lease, name: str = "price", number: int = 0) -> Answer:
        answer = await self.doors.call_read_only(
            lease, self.standing, Call(f"s.p{number}", name, b"{}", "sensor"), self.tools
        )
        assert isinstance(answer, Answer)
        return answer


async def test_a_look_runs_and_leaves_no_trace_but_one_that_costs_is_written_down(world: World) -> None:
    place = Place(world)
    lease = await place.begin()
    before = len(world.history)
    assert [(await place.looks(lease, number=number)).text for number in range(3)] == ["7"] * 3
    assert len(world.history) == before
    assert (await place.looks(lease, "paid", 9)).text == "7"
    assert [event.kind for event in world.history[before:]] == ["call_started", "call_settled"]


async def test_a_halt_refuses_a_look_at_once_and_only_while_it_stands(world: World) -> None:
    place = Place(world)
    lease = await place.begin()
    await place.looks(lease)
    await world.store.commit(halt("agent:desk", "ada", "stop"))
    assert (await place.looks(lease, number=1)).outcome == "external_halt"
    await world.store.commit(resume("agent:desk", "ada", "go on"))
    assert (await place.looks(lease, number=2)).outcome == "ok"
    assert place.ran == ["price"] * 2


async def test_a_look_that_was_let_through_once_is_judged_anew_where_its_session_stands_now(world: World) -> None:
    place = Place(world)
    lease = await place.begin()
    await place.looks(lease)
    place.standing = msgspec.structs.replace(place.standing, phase=Phase("intake", ("paid",)))
    assert (await place.looks(lease, number=1)).outcome == "tool_not_granted"
    assert place.ran == ["price"]


async def test_a_call_that_is_cancelled_twice_is_settled_as_unknown(world: World) -> None:
    place = Place(world)
    lease = await place.begin()
    call = Call("s.1", "stubborn", b"{}")
    calling = asyncio.ensure_future(place.doors.call(lease, place.standing, call, place.tools))
    await world.advance(SECOND)
    calling.cancel()
    await world.advance(SECOND)
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()
    events = await world.events(session_stream("s"))
    assert [stored.event.outcome for stored in events if isinstance(stored.event, CallSettled)] == ["unknown"]
