"""Somebody sets the machine's clock. What takes three seconds takes three seconds; only calendars notice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND, SystemClock, read_monotonic, start_steady_time
from halter.core.events import CallSettled
from halter.core.ids import WorkerId
from halter.core.ports import Lease
from halter.core.rows import SessionRow
from halter.dispatch.heartbeat import acquire_lease
from halter.dispatch.idle import ObservedHeads
from halter.dispatch.store_clock import StoreClock
from halter.guard.approvals import answer_decision
from halter.testing.fakes import ManualClock
from halter.testing.world import World
from tests.story.loops import Story, calls, fails, says, tool
from tests.story.test_loop import check_end
from tests.story.test_loop_waits import wait_for_decision
from tests.story.test_watchdog import Hangs, begin, read_session_row, run_process

TIMEOUT = "limits: {timeout: 60s}"
JUMPS = [pytest.param(2 * HOUR, id="ahead"), pytest.param(-2 * HOUR, id="back")]


def jump_tool(world: World, duration: int) -> Any:
    async def work() -> str:
        """Take three seconds, in the middle of which somebody sets the clock."""
        await world.clock.sleep(SECOND)
        world.clock.set_ahead(duration)
        await world.clock.sleep(2 * SECOND)
        return "worked"

    return tool(work, level="SAFE", effect="read")


@pytest.mark.parametrize("jump", JUMPS)
async def test_a_turn_of_seconds_is_not_over_because_the_clock_was_set(world: World, jump: int) -> None:
    story = Story(world, [calls("work"), says("Done.")], kind="task", policy_yaml=TIMEOUT)
    story.extra = [jump_tool(world, jump)]
    await check_end(story, await story.run("Work."), "COMPLETED", "completed")
    durations = [each.event.duration_ms for each in await story.events() if isinstance(each.event, CallSettled)]
    assert durations == [3000]


async def test_calls_of_a_step_that_runs_while_the_clock_is_set_keep_the_time_that_they_have(world: World) -> None:
    story = Story(world, [calls("work", "look", "look"), says("Done.")], kind="task", policy_yaml=TIMEOUT)
    story.extra = [jump_tool(world, 2 * HOUR)]
    await check_end(story, await story.run("Work."), "COMPLETED", "completed")
    assert {result.outcome for result in story.results()} == {"ok"}


async def test_a_turn_has_its_whole_time_and_no_more_when_the_clock_was_set_back(world: World) -> None:
    story = Story(world, [calls("work"), says("Too late.", takes=5 * MINUTE)], kind="task", policy_yaml=TIMEOUT)
    story.extra = [jump_tool(world, -2 * HOUR)]
    # In the same day: caps and rates follow the calendar.
    await world.advance(DAY // 2)
    began = world.clock.monotonic()
    ending = await story.run("Work.")
    assert 60 * SECOND <= world.clock.monotonic() - began <= 62 * SECOND
    assert (ending.state, ending.terminal_reason) == ("TIMED_OUT", "timed_out")


@pytest.mark.parametrize("jump", JUMPS)
async def test_the_time_that_a_person_takes_is_measured_while_the_clock_is_set(world: World, jump: int) -> None:
    lines = [calls(("wipe", {"path": "a"})), says("Done.", takes=30 * SECOND)]
    story = Story(world, lines, kind="task", policy_yaml=TIMEOUT)
    running = asyncio.create_task(story.run("Clean up."))
    waiting = await wait_for_decision(world)
    await world.advance(HOUR)
    world.clock.set_ahead(jump)
    await world.advance(HOUR)
    await world.store.commit(answer_decision(waiting, "approve", "ada", "yes"))
    assert (await running).state == "COMPLETED"


async def test_a_back_off_is_not_longer_because_the_clock_was_set_back(world: World) -> None:
    story = Story(world, [fails(), says("Done.")], kind="task")
    running = asyncio.create_task(story.run("Go."))
    await asyncio.sleep(0)
    world.clock.set_ahead(-2 * HOUR)
    began = world.clock.monotonic()
    assert (await running).state == "COMPLETED"
    assert world.clock.monotonic() - began < MINUTE


class Waits(Hangs):
    """Works for two minutes, in the middle of which somebody sets the clock."""

    async def run_first(self, lease: Lease) -> None:
        await self.world.clock.sleep(MINUTE)
        self.world.clock.set_ahead(2 * HOUR)


async def test_a_running_session_is_not_idle_because_the_clock_was_set(world: World) -> None:
    waits = Waits(world)
    await begin(world)
    world.spawn(run_process(world, waits))
    await world.advance(3 * MINUTE)
    row: SessionRow = await read_session_row(world)
    assert (row.state, waits.stopped) == ("RUNNING", 0)
    await world.advance(4 * MINUTE)
    assert (await read_session_row(world)).state == "PAUSED"


async def test_the_wait_for_a_lease_ends_in_time_when_the_clock_is_set_back(world: World) -> None:
    await begin(world)
    assert await acquire_lease(world.store, world.clock, WorkerId("one"), "desk-1", 0)
    began = world.clock.monotonic()
    waiting = asyncio.create_task(acquire_lease(world.store, world.clock, WorkerId("two"), "desk-1", 5 * SECOND))
    await world.clock.sleep(SECOND)
    world.clock.set_ahead(-2 * HOUR)
    assert await waiting is None
    assert world.clock.monotonic() - began <= 6 * SECOND


@pytest.mark.parametrize("make", [SystemClock, StoreClock, ManualClock])
def test_every_clock_of_ours_has_a_reading_that_nobody_sets(make: Callable[[], Any]) -> None:
    clock = make()
    assert clock.monotonic() <= read_monotonic(clock)


def test_a_clock_of_a_program_without_such_a_reading_is_read_as_it_is() -> None:
    class Plain:
        def now(self) -> int:
            return 7

        async def sleep(self, duration: int) -> None: ...

    assert read_monotonic(Plain()) == 7


def test_a_manual_clock_that_is_set_wakes_no_sleeper_and_steady_time_does_not_notice() -> None:
    clock = ManualClock(HOUR)
    read_time = start_steady_time(clock)
    clock.set_ahead(2 * HOUR)
    assert (clock.now(), read_time()) == (3 * HOUR, HOUR)
    clock.advance(SECOND)
    assert (clock.now(), read_time()) == (3 * HOUR + SECOND, HOUR + SECOND)


def test_silence_is_counted_from_the_first_sight_of_the_newest_event() -> None:
    clock = ManualClock(HOUR)
    heads = ObservedHeads(clock)
    assert heads.measure_silence("s", 3) == 0
    clock.advance(MINUTE)
    clock.set_ahead(2 * HOUR)
    assert heads.measure_silence("s", 3) == MINUTE
    assert heads.measure_silence("s", 4) == 0
    heads.forget_others(())
    clock.advance(MINUTE)
    assert heads.measure_silence("s", 4) == 0
