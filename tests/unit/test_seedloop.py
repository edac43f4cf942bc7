import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from halter.core.clock import SECOND
from halter.testing.world import VIRTUAL_START, SeedLoop, run_in_virtual_time

SEEDS = range(21)
EVERY_ORDER = [None, *SEEDS]

Trace = list[Any]
Scene = Callable[[], Coroutine[Any, Any, Trace]]


def this_loop() -> SeedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SeedLoop)
    return loop


def traces(scene: Scene) -> list[Trace]:
    return [run_in_virtual_time(scene(), seed=seed) for seed in SEEDS]


async def fifty_tasks() -> Trace:
    trace: Trace = []

    async def work(number: int) -> None:
        for step in range(4):
            trace.append((number, step, this_loop().now()))
            await asyncio.sleep(step % 2)

    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(work(number))
    return trace


async def lost_update() -> Trace:
    total = 0

    async def add_one() -> None:
        nonlocal total
        seen = total
        await asyncio.sleep(0)
        total = seen + 1

    await asyncio.gather(add_one(), add_one())
    return [total]


async def reader_beside_writer() -> Trace:
    trace: Trace = []
    read: Trace = []

    async def write() -> None:
        await asyncio.sleep(0)
        trace.append("here")

    async def look() -> None:
        await asyncio.sleep(0)
        read.extend(trace)

    await asyncio.gather(write(), look())
    return read


async def group_that_fails() -> Trace:
    trace: Trace = []

    async def wait_until_cancelled(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            trace.append(number)

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError

    async def group_of_both() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(wait_until_cancelled(number))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await group_of_both()
    return trace


async def tasks_left_behind(trace: Trace) -> None:
    async def linger(number: int) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            trace.append(number)

    tasks = [asyncio.create_task(linger(number)) for number in range(30)]
    await asyncio.sleep(1)
    assert not any(task.done() for task in tasks)


def test_the_same_seed_replays_the_same_interleaving() -> None:
    assert traces(fifty_tasks) == traces(fifty_tasks)


def test_different_seeds_give_different_interleavings() -> None:
    assert len({tuple(trace) for trace in traces(fifty_tasks)}) == len(SEEDS)


def test_a_lost_update_is_found_by_some_seed_and_then_always_by_that_seed() -> None:
    failing = [seed for seed in SEEDS if run_in_virtual_time(lost_update(), seed=seed) == [1]]
    assert 0 < len(failing) < len(SEEDS)
    assert all(run_in_virtual_time(lost_update(), seed=failing[0]) == [1] for _ in range(20))


def test_a_race_that_plain_asyncio_hides_is_found_by_some_seed() -> None:
    assert asyncio.run(reader_beside_writer()) == ["here"]
    assert run_in_virtual_time(reader_beside_writer(), seed=None) == ["here"]
    assert [] in traces(reader_beside_writer)


def test_without_a_seed_tasks_run_in_the_order_of_asyncio() -> None:
    firsts = [number for number, step, _ in run_in_virtual_time(fifty_tasks(), seed=None) if step == 0]
    assert firsts == list(range(50))


def test_the_cancellation_of_a_group_replays_wherever_its_tasks_lie_in_memory() -> None:
    first = traces(group_that_fails)
    elsewhere = [bytearray(size) for size in range(5000)]
    assert traces(group_that_fails) == first
    assert elsewhere


def test_the_cancellation_at_the_end_replays_too() -> None:
    def ends() -> list[Trace]:
        found: list[Trace] = []
        for seed in SEEDS:
            found.append([])
            run_in_virtual_time(tasks_left_behind(found[-1]), seed=seed)
        return found

    first = ends()
    assert ends() == first
    assert all(sorted(trace) == list(range(30)) for trace in first)


def test_tasks_have_the_same_names_in_every_replay() -> None:
    async def names() -> Trace:
        children = [asyncio.create_task(asyncio.sleep(0)) for _ in range(3)]
        named = asyncio.create_task(asyncio.sleep(0), name="mine")
        await asyncio.gather(*children, named)
        return [task.get_name() for task in [*children, named]]

    assert run_in_virtual_time(names()) == run_in_virtual_time(names()) == ["Task-2", "Task-3", "Task-4", "mine"]


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_call_soon_keeps_its_order(seed: int | None) -> None:
    async def scene() -> Trace:
        trace: Trace = []
        tasks: list[asyncio.Task[None]] = []
        for number in range(30):
            asyncio.get_running_loop().call_soon(trace.append, number)
            tasks.append(asyncio.create_task(asyncio.sleep(0)))
        await asyncio.gather(*tasks)
        return trace

    assert run_in_virtual_time(scene(), seed=seed) == list(range(30))


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_what_a_future_tells_first_happens_before_its_waiter_goes_on(seed: int | None) -> None:
    async def scene() -> Trace:
        trace: Trace = []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(lambda _: trace.append("told"))
        loop.call_later(1, future.set_result, None)
        await future
        return [*trace, "went on"]

    assert run_in_virtual_time(scene(), seed=seed) == ["told", "went on"]


def test_timers_of_one_moment_come_in_any_order_and_those_of_two_moments_in_theirs() -> None:
    async def scene() -> Trace:
        trace: Trace = []
        for delay in (2, 1):
            for name in "ab":
                asyncio.get_running_loop().call_later(delay, trace.append, (delay, name))
        await asyncio.sleep(3)
        return trace

    found = traces(scene)
    assert all([delay for delay, _ in trace] == [1, 1, 2, 2] for trace in found)
    assert {"".join(name for _, name in trace[:2]) for trace in found} == {"ab", "ba"}


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_a_timer_that_is_cancelled_when_already_due_does_not_run(seed: int | None) -> None:
    async def scene() -> Trace:
        trace: Trace = []
        loop = asyncio.get_running_loop()

        def win(number: int) -> None:
            trace.append(number)
            timers[1 - number].cancel()

        timers = [loop.call_later(1, win, number) for number in range(2)]
        await asyncio.sleep(2)
        return trace

    assert len(run_in_virtual_time(scene(), seed=seed)) == 1


def test_a_callback_that_is_cancelled_when_already_ready_does_not_run() -> None:
    async def scene() -> Trace:
        trace: Trace = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: trace.append(context))
        loop.call_soon(trace.append, 1).cancel()
        await asyncio.sleep(1)
        return trace

    assert traces(scene) == [[] for _ in SEEDS]


def test_a_timeout_at_the_moment_of_completion_may_go_either_way() -> None:
    async def scene() -> Trace:
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(1)
        except TimeoutError:
            return ["too late"]
        return ["in time"]

    assert {trace[0] for trace in traces(scene)} == {"in time", "too late"}


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_queues_events_locks_and_timeouts_keep_their_promises(seed: int | None) -> None:
    async def scene() -> Trace:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        begin, lock = asyncio.Event(), asyncio.Lock()
        trace: Trace = []

        async def produce() -> None:
            await begin.wait()
            for number in range(20):
                await queue.put(number)

        async def consume() -> None:
            while True:
                async with lock:
                    trace.append(await queue.get())
                queue.task_done()

        async with asyncio.TaskGroup() as group:
            consumers = [group.create_task(consume()) for _ in range(3)]
            producer = group.create_task(produce())
            asyncio.get_running_loop().call_at(10, begin.set)
            await producer
            await queue.join()
            for consumer in consumers:
                consumer.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await queue.get()
        return [*trace, this_loop().now() - VIRTUAL_START]

    assert run_in_virtual_time(scene(), seed=seed) == [*range(20), 15 * SECOND]


def test_callbacks_keep_their_context() -> None:
    async def scene() -> Trace:
        trace: Trace = []
        loop = asyncio.get_running_loop()
        variable = contextvars.ContextVar[str]("variable")
        variable.set("soon")
        loop.call_soon(lambda: trace.append(variable.get()))
        variable.set("later")
        loop.call_later(1, lambda: trace.append(variable.get()))
        variable.set("other")
        await asyncio.sleep(2)
        return trace

    assert traces(scene) == [["soon", "later"] for _ in SEEDS]


def test_a_callback_that_fails_reaches_the_exception_handler_and_the_loop_continues() -> None:
    async def scene() -> Trace:
        trace: Trace = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: trace.append(type(context["exception"])))
        loop.call_soon(int, "no number")
        loop.call_later(1, int, "no number")
        await asyncio.sleep(2)
        return trace

    assert run_in_virtual_time(scene()) == [ValueError, ValueError]


def test_run_cancels_and_closes_all_that_is_left_behind() -> None:
    async def readings() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append("generator")

    async def sleeper() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            closed.append("task")

    async def scene() -> SeedLoop:
        open_ends.extend([asyncio.create_task(sleeper()), readings()])
        await anext(open_ends[1])
        await asyncio.to_thread(int)
        return this_loop()

    closed: Trace = []
    open_ends: Trace = []
    loop = run_in_virtual_time(scene())
    assert loop.is_closed()
    assert closed == ["task", "generator"]
    assert loop.now() == VIRTUAL_START
