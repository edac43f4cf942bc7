"""What a crash left in doubt is repeated only with what it was asked for, and with secrets that are still granted."""

import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.events import CallStarted
from halter.core.ids import SessionId, make_worker_id, session_stream
from halter.core.ports import Draft, Write
from halter.dispatch.heartbeat import acquire_lease, renew_leases
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.models.prices import Prices
from halter.redaction.secrets import GivenSecrets
from halter.state.session import replay
from halter.testing.world import World
from halter.tools.function_tool import tool


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
    texts: list[str] = []

    async def look(at: str) -> str:
        texts.append(at)
        return "seen"

    policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk", "agent.yaml")))
    session_context = SessionContext(
        "s", "desk", policy.phases[0], policy, str(policy.digest()), secrets=frozenset(granted)
    )
    secrets = GivenSecrets({"KEY": "correct-horse"})
    guard = GuardRuntime(world.store, world.clock, redact=str, secrets=secrets, prices=Prices({}))
    await world.start("s", agent="desk")
    (lease,) = await world.store.claim(make_worker_id("w", world.ids), 1)
    event = CallStarted(call="s.1", tool="look", effect="read")
    await world.store.commit(Write(session_stream("s"), "begin", lambda _: [Draft(event, arguments)], lease=lease))
    (flight,) = replay(await world.events(session_stream("s"))).in_flight.values()
    tools = {"look": tool(look, level="SAFE", effect="read")}
    answer = await guard.recover(lease, session_context, flight, arguments, tools)
    assert isinstance(answer, Answer if seen else ApprovalRequired)
    assert texts == seen


async def test_a_process_that_ends_in_good_order_lets_the_next_one_go_on_at_once(world: World) -> None:
    await world.start("s")
    first, second = make_worker_id("first", world.ids), make_worker_id("second", world.ids)
    async with renew_leases(world.store, world.clock, first):
        assert await acquire_lease(world.store, world.clock, first, SessionId("s"), 0)
        assert await acquire_lease(world.store, world.clock, second, SessionId("s"), 0) is None
    assert await acquire_lease(world.store, world.clock, second, SessionId("s"), 0)
