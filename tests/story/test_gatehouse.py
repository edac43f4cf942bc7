"""What a crash left in doubt is repeated only with what it was asked for, and with secrets that are still granted."""

import pytest

from halter.config.agent import agent_of
from halter.config.fleet import Fleet
from halter.config.load import load_bytes
from halter.config.resolve import resolve
from halter.core.events import CallStarted
from halter.core.ids import SessionId, new_worker, session_stream
from halter.core.ports import Draft, Write
from halter.dispatch.tending import taken, tended
from halter.guard.ask import Standing
from halter.guard.chokepoint import Answer, NeedsPerson
from halter.guard.gatehouse import Gatehouse
from halter.guard.secrets import GivenSecrets
from halter.models.prices import Prices
from halter.state.session import replay
from halter.testing.world import World
from halter.tools.tool import tool


@pytest.mark.parametrize(
    ("arguments", "granted", "seen"),
    [
        (b'{"at": "${secret:KEY}"}', {"KEY"}, ["correct-horse"]),
        (b'{"at": "${secret:KEY}"}', set[str](), []),
        (b'{"at": "[redacted:KEY]"}', {"KEY"}, []),
    ],
    ids=["granted", "granted no more", "hidden"],
)
async def test_a_call_in_doubt_is_repeated_only_as_it_was(
    world: World, arguments: bytes, granted: set[str], seen: list[str]
) -> None:
    looked: list[str] = []

    async def look(at: str) -> str:
        looked.append(at)
        return "seen"

    policy = resolve(Fleet(), agent_of(load_bytes(b"name: desk", "agent.yaml")))
    standing = Standing("s", "desk", policy.phases[0], policy, str(policy.digest()), secrets=frozenset(granted))
    secrets = GivenSecrets({"KEY": "correct-horse"})
    gatehouse = Gatehouse(world.store, world.clock, redact=str, secrets=secrets, prices=Prices({}))
    await world.start("s", agent="desk")
    (lease,) = await world.store.claim(new_worker("w", world.ids), 1)
    begun = CallStarted(call="s.1", tool="look", effect="read")
    await world.store.commit(Write(session_stream("s"), "begin", lambda _: [Draft(begun, arguments)], lease=lease))
    (flight,) = replay(await world.events(session_stream("s"))).in_flight.values()
    tools = {"look": tool(look, level="SAFE", effect="read")}
    answer = await gatehouse.recover(lease, standing, flight, arguments, tools)
    assert isinstance(answer, Answer if seen else NeedsPerson)
    assert looked == seen


async def test_a_process_that_ends_in_good_order_lets_the_next_one_go_on_at_once(world: World) -> None:
    await world.start("s")
    first, second = new_worker("first", world.ids), new_worker("second", world.ids)
    async with tended(world.store, world.clock, first):
        assert await taken(world.store, world.clock, first, SessionId("s"), 0)
        assert await taken(world.store, world.clock, second, SessionId("s"), 0) is None
    assert await taken(world.store, world.clock, second, SessionId("s"), 0)
