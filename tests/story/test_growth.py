"""What a session does costs the same however much there was before it: halts, rules, tools beside those it uses.

Counted are calls of functions: no clock is asked.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, SECOND
from halter.core.events import RuleEnded, RuleMade, SessionStarted
from halter.core.ids import FLEET, WorkerId
from halter.core.ports import Draft, Lease, Write
from halter.core.rows import RuleRow
from halter.guard.approvals import AnyCondition, EachArgument, SameArguments, encode_matcher
from halter.guard.call_answer import Answer
from halter.guard.guard import GuardRuntime
from halter.guard.halts import cancel
from halter.guard.prepare import Call, SessionContext
from halter.models.prices import Prices
from halter.redaction.redact import Redactor
from halter.redaction.secrets import GivenSecrets
from halter.spec.agent import Phase
from halter.state import lifecycle
from halter.testing.world import World
from halter.tools.function_tool import FunctionTool, tool

FEW, MANY = 10, 400


class Desk:
    """A session with a tool that a person has to agree to, and one of everything that may have been there before."""

    def __init__(self, world: World, tools: int = 1) -> None:
        self.world = world
        policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk", "agent.yaml")))
        self.standing = SessionContext("s", "desk", Phase("work", None), policy, str(policy.digest()))
        secrets, prices = GivenSecrets({}), Prices(policy.prices)
        redact = Redactor({}).redact
        self.guard = GuardRuntime(world.store, world.clock, redact=redact, secrets=secrets, prices=prices)
        self.tools = {each.spec.name: each for each in (self._make("order", "PRIVILEGED"), self._make("look", "SAFE"))}
        self.tools |= {f"other_{number}": self._make(f"other_{number}", "SAFE") for number in range(tools)}
        self.calls = 0

    def _make(self, name: str, level: Any) -> FunctionTool:
        async def act(item: str) -> str:
            """Take as long as some polls for halts."""
            await self.world.clock.sleep(3 * SECOND)
            return item

        act.__name__ = act.__qualname__ = name
        return tool(act, level=level, effect="read" if level == "SAFE" else "write")

    async def begin(self) -> Lease:
        await self.world.store.commit(
            lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
        )
        (lease,) = await self.world.store.claim(WorkerId("w"), 1)
        return lease

    async def cancels(self, count: int) -> None:
        """Leave the halts of sessions that were cancelled, as all of them are left."""
        for number in range(count):
            await self.world.store.commit(cancel(f"old-{number}", "ada", f"cancel/{number}"))

    async def agrees(self, rule: str, tool: str, owner: str = "desk", digest: str = "", *, over: bool = False) -> None:
        """Let a person say "always"."""
        matcher = EachArgument((AnyCondition("item"),)) if not digest else SameArguments(digest)
        event = RuleMade(
            rule=rule,
            tool=tool,
            scope="agent",
            owner=owner,
            matcher=encode_matcher(matcher),
            keys=("item",),
            by="ada",
            expires_at=self.world.now + DAY,
        )
        events = [Draft(event), *([Draft(RuleEnded(rule=rule, by="ada"))] if over else [])]
        await self.world.store.commit(Write(FLEET, rule, lambda _: events, [(RuleRow, rule)]))

    async def calls_tool(self, lease: Lease, name: str) -> str:
        self.calls += 1
        call = Call(f"s.c{self.calls}", name, b'{"item":"ink"}')
        answer = await self.guard.call(lease, self.standing, call, self.tools)
        assert isinstance(answer, Answer)
        return answer.outcome


@contextmanager
def count_function_calls() -> Iterator[list[int]]:
    """Count the calls of functions."""
    count = [0]

    def note(_: object, event: str, __: object) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


PLACES = pytest.mark.parametrize("kept", [False, True], ids=["memory", "sqlite"])


def world_of(folder: Path, name: str, *, kept: bool) -> World:
    return World(path=folder / f"{name}.db" if kept else None, orderly=True)


async def count_call(desk: Desk, name: str) -> int:
    """How much one call takes, with the polls for halts while it runs, after another one has warmed everything up."""
    lease = await desk.begin()
    for _ in range(2):
        assert await desk.calls_tool(lease, name) == "ok"
    assert await desk.guard.find_halt(desk.standing) is None
    with count_function_calls() as count:
        assert await desk.calls_tool(lease, name) == "ok"
        assert await desk.guard.find_halt(desk.standing) is None
    return count[0]


@PLACES
def test_a_call_costs_the_same_after_many_cancelled_sessions(tmp_path: Path, *, kept: bool) -> None:
    counts: list[int] = []
    for text in (FEW, MANY):
        with world_of(tmp_path, str(text), kept=kept) as world:
            desk = Desk(world)
            world.run(desk.cancels(text))
            counts.append(world.run(count_call(desk, "look")))
    assert counts[1] <= counts[0] * 1.02


@PLACES
def test_a_call_costs_the_same_beside_many_rules(tmp_path: Path, *, kept: bool) -> None:
    """Beside those of other tools, of other agents, for other arguments, and those that are over."""

    async def agree(desk: Desk, text: int) -> None:
        await desk.agrees("mine", "order")
        for number in range(text):
            await desk.agrees(f"tool-{number}", f"other-{number}")
            await desk.agrees(f"agent-{number}", "order", f"other-{number}")
            await desk.agrees(f"arguments-{number}", "order", digest=f"{number:064}")
            await desk.agrees(f"over-{number}", "order", over=True)

    counts: list[int] = []
    for text in (FEW, MANY):
        with world_of(tmp_path, str(text), kept=kept) as world:
            desk = Desk(world)
            world.run(agree(desk, text))
            counts.append(world.run(count_call(desk, "order")))
    assert counts[1] <= counts[0] * 1.02


def test_a_call_costs_the_same_beside_many_tools() -> None:
    counts: list[int] = []
    for text in (FEW, MANY):
        with World(orderly=True) as world:
            counts.append(world.run(count_call(Desk(world, text), "look")))
    assert counts[1] <= counts[0] * 1.02
