"""Agents that ask agents unattended: in a process of many agents, for longer than a minute, and after a crash."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import CallSettled, SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.dispatch.workers import WorkerRow
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.halts import halt
from halter.runtime.switches import turn_off, turn_on
from halter.runtime.worker import AutonomousAgent
from halter.state import lifecycle
from halter.testing.fakes import CRASH_KINDS, Crash, CrashKind
from halter.testing.world import World
from tests.story.autonomous import Fleet

ASKS = """
model: scripted
script: script.yaml
agents: [{name: scout}]
autonomy: {enabled: true, idle_timeout: 0}
"""
ASKS_SCRIPT = """
- calls: [{tool: ask_scout, arguments: {task: find the key}}]
- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]
"""
SCOUT = "model: scripted\nscript: script.yaml\nautonomy: {enabled: false}\n"
SLOW = "- {text: Under the mat., takes: 4m}\n"


async def children_of(fleet: Fleet) -> list[SessionRow]:
    return [row for row in await fleet.sessions("scout") if row.parent == "desk-1"]


async def test_an_asked_agent_that_works_for_minutes_ends_no_process_and_is_asked_once(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.agent("scout", SCOUT, script_yaml=SLOW)
    up = fleet.start(fleet.agent("desk", ASKS, script_yaml=ASKS_SCRIPT))
    await world.advance(3 * MINUTE)
    assert not up.done()
    await world.advance(2 * MINUTE)
    (child,) = await children_of(fleet)
    assert (child.state, child.generation) == ("COMPLETED", 1)
    assert (await fleet.row("desk-1")).state == "SLEEPING"


CALM_AGENT = "model: scripted\nscript: script.yaml\n"
CALM_SCRIPT = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1m}}]\n" * 30


class Broken(AutonomousAgent):
    """An agent whose sessions cannot be started."""

    async def begin_session(self, *_: Any, **__: Any) -> SessionId:
        raise KeyError("scout")


async def test_an_agent_that_cannot_be_started_is_reported_and_the_others_run_on(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    desk, clerk = (fleet.agent(name, CALM_AGENT, script_yaml=CALM_SCRIPT) for name in ("desk", "clerk"))
    up = fleet.start(desk, clerk)
    await world.advance(MINUTE)
    assert fleet.up is not None
    fleet.up.agents["desk"] = Broken(fleet.up.agents["desk"].context, desk)
    await turn_off(fleet.app, "desk")
    await world.advance(MINUTE)
    await turn_on(fleet.app, "desk")
    await world.advance(10 * MINUTE)
    assert not up.done()
    assert ("desk", "Could not start or check its session; retrying: KeyError: 'scout'") in fleet.told
    assert (await fleet.kinds("clerk-1")).count("turn_started") >= 12


async def test_a_session_of_an_agent_that_does_not_run_here_is_released(world: World, tmp_path: Path) -> None:
    """A call that was interrupted while it claimed its sub-session leaves it to this worker."""
    fleet = Fleet(world, tmp_path)
    up = fleet.start(fleet.agent("desk", CALM_AGENT, script_yaml=CALM_SCRIPT))
    await world.advance(SECOND)
    event = SessionStarted(session="lost", agent="scout", kind="task", started_by="ada", parent="desk-1")
    await world.journal.commit(lifecycle.start_session(event))
    owner = WorkerId((await world.journal.ask(Query("all_workers", WorkerRow)))[0].worker)
    assert await world.journal.claim(owner, 1, SessionId("lost"))
    await world.advance(3 * MINUTE)
    assert not up.done()
    row = await fleet.row("lost")
    assert (row.owner, row.state, row.ended_at) == ("", "RUNNING", None)


ASKS_ONCE = """
- {unless: "Ada is paid.", calls: [{tool: ask_scout, arguments: {task: pay Ada}}]}
- {when: "Ada is paid.", calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]}
"""
HOURLY = """
model: scripted
script: script.yaml
schedules: [{name: hourly, every: 1d, prompt: Look around.}]
"""
PAYS = """
from pathlib import Path
from halter import tool

@tool(level="PRIVILEGED", effect="write")
async def pay(name: str) -> str:
    "Pay somebody."
    with Path(__file__).parents[1].joinpath("paid.txt").open("a") as file:
        file.write(name + " ")
    return "The money is sent."
"""
PAYS_ONCE = """
- {when: pay Ada, unless: The money is sent., repeat: true, calls: [{tool: pay, arguments: {name: ada}}]}
- {when: The money is sent., text: Ada is paid., takes: 90s}
- {when: It had been done before the crash., text: Ada is paid.}
- {when: Look around., text: Nothing., repeat: true}
"""


def start_both(fleet: Fleet) -> asyncio.Task[None]:
    """Start a process that runs both agents: the one that asks, and the one that is asked and needs an approval."""
    scout = fleet.agent("scout", HOURLY, PAYS, script_yaml=PAYS_ONCE)
    return fleet.start(fleet.agent("desk", ASKS, script_yaml=ASKS_ONCE), scout)


async def approve_all(world: World) -> int:
    decisions = await list_pending_decisions(world.journal)
    for decision in decisions:
        await world.journal.commit(answer_decision(decision, "approve", "ada", world.ids.make()))
    return len(decisions)


async def require_paid_once(fleet: Fleet) -> None:
    """Check that one sub-session paid once, and that the agent that asked has its answer."""
    (child,) = await children_of(fleet)
    assert (child.state, (fleet.home / "paid.txt").read_text()) == ("COMPLETED", "ada ")
    settled = [each.event for each in await fleet.events("desk-1") if isinstance(each.event, CallSettled)]
    assert [event.outcome for event in settled if event.call.endswith("_0_0")] == ["ok"]
    assert (await fleet.row("desk-1")).state == "SLEEPING"


async def test_an_asked_agent_that_runs_here_too_works_in_one_sub_session(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    start_both(fleet)
    await world.advance(3 * MINUTE)
    assert await approve_all(world) == 1
    await world.advance(3 * MINUTE)
    await require_paid_once(fleet)


@pytest.mark.parametrize("lived", [1 * SECOND, 3 * MINUTE], ids=["at once", "after minutes"])
@pytest.mark.parametrize("approves_first", [True, False], ids=["then approved", "then taken up"])
async def test_after_a_crash_the_same_sub_session_gets_the_approval_and_pays_once(
    world: World, tmp_path: Path, lived: int, *, approves_first: bool
) -> None:
    fleet = Fleet(world, tmp_path)
    start_both(fleet)
    await world.advance(lived)
    await world.restart()
    if approves_first:
        assert await approve_all(world) == 1
    start_both(fleet)
    await world.advance(2 * MINUTE)
    assert await approve_all(world) == (0 if approves_first else 1)
    await world.advance(5 * MINUTE)
    assert await approve_all(world) == 0
    await require_paid_once(fleet)


async def test_a_halt_of_the_one_that_asks_ends_the_sub_session_whoever_runs_it(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    start_both(fleet)
    await world.advance(MINUTE)
    await world.journal.commit(halt("session:desk-1", "ada", "stop"))
    await world.advance(MINUTE)
    (child,) = await children_of(fleet)
    assert (child.state, (await fleet.row("desk-1")).state) == ("CANCELLED", "HALTED")
    assert await approve_all(world) == 0


@pytest.mark.parametrize("kind", [*CRASH_KINDS, "stop"])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_a_stop_or_a_lost_answer_at_any_commit_leaves_one_sub_session_that_pays_at_most_once(
    tmp_path: Path, kind: CrashKind, every: int
) -> None:
    for commit in range(1, 80, every):
        home = tmp_path / str(commit)
        home.mkdir()
        with World(7, crash=Crash(commit, kind)) as world:
            world.run(_ask_through(world, home))
            if world.commits < commit:
                return
    raise AssertionError("It has more commits than were looked at.")


async def stop_in_order(world: World, process: asyncio.Task[None]) -> None:
    """Stop the process half a second after the planned commit, as TERM does."""
    await world.store.stop_requested.wait()
    await world.clock.sleep(SECOND // 2)
    process.cancel()


async def _ask_through(world: World, home: Path) -> None:
    """Ask, start again after a crash or a stop, and approve whatever is asked."""
    fleet = Fleet(world, home)
    process = start_both(fleet)
    stopping = world.spawn(stop_in_order(world, process))
    for _ in range(16):
        await world.advance(30 * SECOND)
        if world.store.dead:
            await world.restart()
        if process.done():
            process = start_both(fleet)
        await approve_all(world)
    (child,) = await children_of(fleet)
    assert child.state == "COMPLETED"
    paid = home / "paid.txt"
    assert (paid.read_text() if paid.exists() else "") in {"", "ada "}
    settled = [each.event for each in await fleet.events("desk-1") if isinstance(each.event, CallSettled)]
    assert [event.outcome for event in settled if event.call.endswith("_0_0")] == ["ok"]
    stopping.cancel()
