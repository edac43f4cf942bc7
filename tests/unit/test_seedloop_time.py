import asyncio
import math
import threading
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import DAY, SECOND, Clock
from halter.testing.world import VIRTUAL_START, Deadlock, SeedLoop, run_in_virtual_time

EVERY_ORDER = [None, *range(21)]

Trace = list[Any]


def this_loop() -> SeedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SeedLoop)
    return loop


def test_a_week_of_timers_every_minute_passes_to_the_microsecond() -> None:
    async def week() -> tuple[int, int]:
        loop, ticks = this_loop(), 0
        while loop.now() < VIRTUAL_START + 7 * DAY:
            await asyncio.sleep(60)
            ticks += 1
        return ticks, loop.now()

    assert run_in_virtual_time(week()) == (10_080, VIRTUAL_START + 7 * DAY)


def test_fractions_of_a_second_do_not_drift() -> None:
    async def scene() -> int:
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return this_loop().now()

    assert run_in_virtual_time(scene(), start=5) == 5 + 1000 * SECOND


def test_timers_still_fire_after_ten_years() -> None:
    async def scene() -> int:
        await asyncio.sleep(3650 * 24 * 3600)
        await asyncio.sleep(0.000_001)
        return this_loop().now()

    assert run_in_virtual_time(scene()) == VIRTUAL_START + 3650 * DAY + 1


@given(st.lists(st.integers(0, 30 * DAY), min_size=1, max_size=20), st.none() | st.integers(0, 1000))
def test_every_sleeper_wakes_exactly_at_its_time(delays: list[int], seed: int | None) -> None:
    async def scene() -> Trace:
        trace: Trace = []
        clock: Clock = this_loop()

        async def sleeper(delay: int) -> None:
            await clock.sleep(delay)
            trace.append((delay, clock.now() - VIRTUAL_START))

        await asyncio.gather(*map(sleeper, delays))
        return trace

    assert run_in_virtual_time(scene(), seed=seed) == [(delay, delay) for delay in sorted(delays)]


def test_waiting_for_a_deadline_in_a_loop_ends_though_floats_round() -> None:
    async def scene() -> int:
        loop = this_loop()
        deadline = 0.1 + 0.2
        for _ in range(10):
            if loop.time() >= deadline:
                break
            await asyncio.sleep(deadline - loop.time())
        return loop.now()

    assert run_in_virtual_time(scene()) == VIRTUAL_START + 300_001


def test_cancelled_timers_do_not_accumulate() -> None:
    async def scene() -> int:
        alive: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()
        for _ in range(5000):
            timer = asyncio.get_running_loop().call_later(3600, print)
            alive.add(timer)
            timer.cancel()
            await asyncio.sleep(0)
        return len(alive)

    assert all(run_in_virtual_time(scene(), seed=seed) < 250 for seed in (None, 0))


def test_time_does_not_jump_to_a_cancelled_timer() -> None:
    async def scene() -> int:
        async with asyncio.timeout(3600):
            await asyncio.sleep(1)
        await asyncio.sleep(1)
        return this_loop().now()

    assert run_in_virtual_time(scene()) == VIRTUAL_START + 2 * SECOND


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_it_is_quiet_when_all_that_can_happen_at_this_moment_has_happened(seed: int | None) -> None:
    async def scene() -> Trace:
        trace: Trace = []

        async def steps(number: int) -> None:
            await asyncio.sleep(1)
            for _ in range(number):
                await asyncio.sleep(0)
            trace.append(number)
            await asyncio.sleep(0.000_001)
            trace.append("too late")

        tasks = [asyncio.create_task(steps(number)) for number in range(10)]
        await asyncio.sleep(1)
        await this_loop().wait_until_quiet()
        results = [*trace]
        await asyncio.gather(*tasks)
        return [sorted(results), trace.count("too late"), this_loop().now() - VIRTUAL_START]

    assert run_in_virtual_time(scene(), seed=seed) == [list(range(10)), 10, SECOND + 1]


@pytest.mark.parametrize("seed", [None, 0])
def test_it_is_quiet_only_after_a_thread_came_back(seed: int | None) -> None:
    async def scene() -> bool:
        work = asyncio.create_task(asyncio.to_thread(int))
        await asyncio.sleep(0)
        await this_loop().wait_until_quiet()
        return work.done()

    assert run_in_virtual_time(scene(), seed=seed)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_deadlock_is_an_error_that_names_the_waiting_tasks(seed: int | None) -> None:
    async def scene() -> None:
        never = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(never.wait(), name="left philosopher")
            group.create_task(never.wait(), name="right philosopher")

    with pytest.raises(
        Deadlock, match=r"no callback, timer or outside work can wake one.*left philosopher, right philosopher"
    ):
        run_in_virtual_time(scene(), seed=seed)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_timer_at_infinity_does_not_hide_a_deadlock(seed: int | None) -> None:
    async def scene() -> None:
        async with asyncio.timeout(math.inf):
            await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_in_virtual_time(scene(), seed=seed)


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_time_stands_still_while_a_thread_works(seed: int | None) -> None:
    async def scene() -> Trace:
        gate = threading.Event()
        async with asyncio.timeout(0.001), asyncio.TaskGroup() as group:
            waiter = group.create_task(asyncio.to_thread(gate.wait))
            group.create_task(asyncio.to_thread(gate.set))
        before = this_loop().now()
        await asyncio.sleep(1)
        return [waiter.result(), before - VIRTUAL_START, this_loop().now() - before]

    assert run_in_virtual_time(scene(), seed=seed) == [True, 0, SECOND]


@pytest.mark.parametrize("seed", [None, 0])
def test_time_continues_after_a_thread_has_failed(seed: int | None) -> None:
    async def scene() -> int:
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "no number")
        await asyncio.sleep(1)
        return this_loop().now()

    assert run_in_virtual_time(scene(), seed=seed) == VIRTUAL_START + SECOND


@pytest.mark.parametrize("seed", [None, 0])
def test_what_is_declared_outside_is_really_waited_for(seed: int | None) -> None:
    async def scene() -> int:
        loop = this_loop()
        answer: asyncio.Future[int] = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(answer.set_result, 42))
        with loop.outside():
            async with asyncio.timeout(1):
                thread.start()
                await answer
        thread.join()
        return answer.result() + this_loop().now() - VIRTUAL_START

    assert run_in_virtual_time(scene(), seed=seed) == 42


@pytest.mark.parametrize("seed", EVERY_ORDER)
def test_real_sockets_work_in_every_order(seed: int | None) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()
        await writer.wait_closed()

    async def ask(port: int, word: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(word)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def scene() -> list[bytes]:
        with this_loop().outside():
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                return await asyncio.gather(*(ask(port, word) for word in words))

    words = [b"%d" % number * 1000 for number in range(10)]
    assert run_in_virtual_time(scene(), seed=seed) == words


def test_without_threads_what_blocks_is_done_at_once_and_its_failure_reaches_who_waits() -> None:
    async def scene() -> tuple[bool, str]:
        same = await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        try:
            await asyncio.to_thread(int, "no number")
        except ValueError as error:
            return same, str(error)
        return same, ""

    with asyncio.Runner(loop_factory=lambda: SeedLoop(0, threads=False)) as runner:
        same, error = runner.run(scene())
    assert same
    assert error.startswith("invalid literal")
    assert run_in_virtual_time(scene())[0] is False
