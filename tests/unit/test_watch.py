"""How an effect runs under the watch: done, failed, late, halted or cancelled, in the task of its caller."""

import asyncio
from collections.abc import Callable, Coroutine
from mmap import mmap
from typing import Any

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.guard.halts import (
    HALT_POLL_INTERVAL,
    CancelledEffect,
    EffectStopped,
    HaltWatch,
    halt,
    read_cancelled_effect,
    resume,
)
from halter.system.liveness import LIVENESS_BYTES, LivenessWriter, read_liveness
from halter.testing.world import World

SCOPES = ("session:s", "agent:desk", "fleet")


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def answer_with(word: str) -> str:
    return word


async def failing() -> str:
    raise ValueError("no")


async def watch_effect(
    watch: HaltWatch, effect: Coroutine[Any, Any, str], allowed: int = SECOND
) -> tuple[object, int, str]:
    """How an effect ended, what is left of a cancel in its task, and what the same task can do afterwards."""
    try:
        text: object = await watch.run(effect, SCOPES, allowed, "deed")
    except asyncio.CancelledError as error:
        text = read_cancelled_effect(error)
    except (EffectStopped, ValueError) as error:
        text = error
    remaining_cancels = cancelling()
    return (
        text,
        remaining_cancels,
        await watch.run(answer_with("after"), SCOPES, allowed) if not remaining_cancels else "",
    )


async def run(world: World, effect: Callable[[], Coroutine[Any, Any, str]], allowed: int = SECOND, *stops: str) -> Any:
    """Run an effect in a task of its own; each stop comes after some time: a halt, or a cancel of the task."""
    task = asyncio.create_task(watch_effect(HaltWatch(world.store, world.clock), effect(), allowed))
    await world.advance(1)
    for stop in stops:
        if stop == "cancel":
            task.cancel()
        else:
            await world.store.commit(halt(stop, "ada", stop))
        await world.advance(HALT_POLL_INTERVAL)
    await world.advance(2 * allowed)
    return await task


async def test_what_is_under_way_is_shown_to_the_process_that_looks_after_this_one(world: World) -> None:
    shown: list[tuple[str, bool]] = []
    with mmap(-1, LIVENESS_BYTES) as memory:
        watch = HaltWatch(world.store, world.clock)
        watch.liveness = LivenessWriter(memory)

        async def look() -> None:
            reading = read_liveness(memory)
            shown.append((reading.call, reading.deadline > 0))

        await watch.run(look(), SCOPES, SECOND, "deed")
        await look()
    assert shown == [("deed", True), ("deed", False)]


async def test_what_is_done_and_what_fails_comes_back_as_it_is(world: World) -> None:
    assert await run(world, lambda: answer_with("done")) == ("done", 0, "after")
    failed, result, after = await run(world, failing)
    assert (type(failed), result, after) == (ValueError, 0, "after")


async def test_a_late_effect_is_stopped_and_its_task_continues(world: World) -> None:
    async def slow() -> str:
        await world.clock.sleep(MINUTE)
        return "too late"

    stopped, result, after = await run(world, slow)
    assert (stopped.outcome, str(stopped), result, after) == (
        "timeout",
        "TimeoutError: deed exceeded its deadline",
        0,
        "after",
    )


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_halted_effect_is_stopped_and_its_task_continues(world: World, scope: str) -> None:
    async def slow() -> str:
        await world.clock.sleep(MINUTE)
        return "too late"

    stopped, result, after = await run(world, slow, MINUTE // 2, scope)
    assert (stopped.outcome, str(stopped), result, after) == ("external_halt", f"{scope} was halted.", 0, "after")


@pytest.mark.parametrize("halted", ["first", "second"])
async def test_of_two_effects_the_one_is_stopped_whose_session_is_halted(world: World, halted: str) -> None:
    watch, names, begun = HaltWatch(world.store, world.clock), ("first", "second"), world.now

    async def wait(name: str) -> tuple[str, int]:
        try:
            await watch.run(world.clock.sleep(MINUTE), (f"session:{name}", "fleet"), 2 * MINUTE)
        except EffectStopped as stopped:
            return str(stopped), (world.now - begun) // HALT_POLL_INTERVAL
        return "done", (world.now - begun) // HALT_POLL_INTERVAL

    tasks: list[asyncio.Task[tuple[str, int]]] = []
    for name in names:
        tasks.append(asyncio.create_task(wait(name)))
        await world.advance(1)
    await world.store.commit(halt(f"session:{halted}", "ada", "stop"))
    await world.advance(2 * MINUTE)
    ends = dict(zip(names, await asyncio.gather(*tasks), strict=True))
    done = ("done", MINUTE // HALT_POLL_INTERVAL)
    assert ends == {"first": done, "second": done} | {halted: (f"session:{halted} was halted.", 1)}


async def test_a_halt_that_was_lifted_stops_nothing(world: World) -> None:
    await world.store.commit(halt("fleet", "ada", "halt"))
    await world.store.commit(resume("fleet", "ada", "resume"))
    watch = HaltWatch(world.store, world.clock)
    task = asyncio.create_task(watch.run(world.clock.sleep(MINUTE), SCOPES, 2 * MINUTE))
    await world.advance(2 * MINUTE)
    await task
    assert await watch.find(SCOPES) is None


@pytest.mark.parametrize("scope", SCOPES)
async def test_what_is_halted_is_found_whichever_of_its_scopes_is(world: World, scope: str) -> None:
    watch = HaltWatch(world.store, world.clock)
    assert await watch.find(SCOPES) is None
    await world.store.commit(halt(scope, "ada", "halt"))
    halt_row = await watch.find(SCOPES)
    assert halt_row is not None
    assert (halt_row.scope, halt_row.by) == (scope, "ada")


@pytest.mark.parametrize("stop", ["fleet", "late"])
async def test_what_an_effect_says_while_it_is_stopped_is_kept(world: World, stop: str) -> None:
    async def polite() -> str:
        try:
            await world.clock.sleep(MINUTE)
        except asyncio.CancelledError:
            return "paid for"
        return "too late"

    stopped, result, after = await run(world, polite, SECOND, *([] if stop == "late" else [stop]))
    assert (stopped.leftover, result, after) == ("paid for", 0, "after")


@pytest.mark.parametrize("swallows", [True, False])
async def test_a_cancelled_session_stays_cancelled_even_if_its_effect_answers(world: World, *, swallows: bool) -> None:
    async def stubborn() -> str:
        try:
            await world.clock.sleep(MINUTE)
        except asyncio.CancelledError:
            if swallows:
                return "done all the same"
            raise
        return "too late"

    cancelled, result, _ = await run(world, stubborn, MINUTE // 2, "cancel")
    assert (type(cancelled), cancelled.is_cancelled_twice, result) == (CancelledEffect, False, 1)
    assert (cancelled.leftover == "done all the same") == swallows


@pytest.mark.parametrize("stops", [("cancel", "cancel"), ("fleet", "cancel")])
async def test_an_effect_that_was_cancelled_twice_may_not_have_stopped(world: World, stops: tuple[str, ...]) -> None:
    async def slow_to_stop() -> str:
        try:
            await world.clock.sleep(MINUTE)
        except asyncio.CancelledError:
            await world.clock.sleep(MINUTE)
        return "stopped"

    cancelled, result, _ = await run(world, slow_to_stop, MINUTE // 2, *stops)
    assert (type(cancelled), cancelled.is_cancelled_twice, result >= 1) == (CancelledEffect, True, True)


async def test_an_effect_that_cancels_itself_ends_its_session_as_a_cancel(world: World) -> None:
    async def gives_up() -> str:
        raise asyncio.CancelledError

    cancelled, result, _ = await run(world, gives_up)
    assert (type(cancelled), cancelled.is_cancelled_twice, result) == (CancelledEffect, False, 0)


async def test_effects_at_the_same_time_are_each_stopped_at_their_own_time(world: World) -> None:
    watch = HaltWatch(world.store, world.clock)

    async def slow(allowed: int) -> int:
        with pytest.raises(EffectStopped):
            await watch.run(world.clock.sleep(MINUTE), SCOPES, allowed)
        return world.now

    begun, allowed = world.now, [SECOND, 3 * SECOND, SECOND // 100, 2 * SECOND]
    tasks = [asyncio.create_task(slow(each)) for each in allowed]
    await world.advance(5 * SECOND)
    took = [(await task) - begun for task in tasks]
    assert [abs(each - late) < SECOND // 1000 for each, late in zip(took, allowed, strict=True)] == [True] * 4


async def test_a_timeout_around_a_session_ends_as_a_timeout(world: World) -> None:
    async def bounded() -> str:
        watch = HaltWatch(world.store, world.clock)
        try:
            async with asyncio.timeout(1):
                await watch.run(world.clock.sleep(MINUTE), SCOPES, MINUTE)
        except TimeoutError:
            return f"in time, {cancelling()}"
        return "never"

    task = asyncio.create_task(bounded())
    await world.advance(2 * SECOND)
    assert await task == "in time, 0"


@pytest.mark.parametrize("scope", ["fleet", "late"])
async def test_of_effects_inside_of_each_other_each_is_told_once_to_stop(world: World, scope: str) -> None:
    watch, ends = HaltWatch(world.store, world.clock), list[str]()

    async def inner() -> str:
        try:
            await world.clock.sleep(MINUTE)
        except asyncio.CancelledError:
            await world.clock.sleep(SECOND)
            raise
        return "too late"

    async def outer() -> str:
        try:
            return await watch.run(inner(), SCOPES, SECOND if scope == "late" else MINUTE, "inner")
        except EffectStopped as stopped:
            ends.append(stopped.outcome)
            await world.clock.sleep(MINUTE)
            return "stopped"

    async def session() -> str:
        try:
            return await watch.run(outer(), SCOPES, SECOND if scope == "late" else MINUTE, "outer")
        except EffectStopped as stopped:
            return f"{stopped.outcome}, {cancelling()}"

    task = asyncio.create_task(session())
    await world.advance(1)
    if scope != "late":
        await world.store.commit(halt(scope, "ada", "halt"))
    await world.advance(10 * SECOND)
    outcome = "timeout" if scope == "late" else "external_halt"
    assert (await task, ends) == (f"{outcome}, 0", [outcome])
