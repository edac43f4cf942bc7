"""What every clock and every source of ids promises: the fakes keep it as the real ones do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import HOUR, MINUTE, SECOND, Clock, SystemClock
from halter.core.ids import Ids, SortableIds
from halter.testing.fakes import ManualClock, SeededIds, make_seeded_salts
from halter.testing.world import VIRTUAL_START, SeedLoop, run_in_virtual_time

Scene = Callable[[Clock], Coroutine[Any, Any, None]]
YEAR_2000 = 946_684_800 * SECOND
YEAR_2100 = 4_102_444_800 * SECOND


@asynccontextmanager
async def hands(clock: ManualClock) -> AsyncIterator[None]:
    """Put a manual clock forward, a microsecond at a time, for as long as somebody works by it."""

    async def turn() -> None:
        while True:
            await asyncio.sleep(0)
            clock.advance(1)

    turning = asyncio.create_task(turn())
    try:
        yield
    finally:
        turning.cancel()


def on_the_system_clock(scene: Scene) -> None:
    asyncio.run(scene(SystemClock()))


def on_a_manual_clock(scene: Scene) -> None:
    async def main() -> None:
        clock = ManualClock(VIRTUAL_START)
        async with hands(clock):
            await scene(clock)

    run_in_virtual_time(main(), seed=None)


def in_virtual_time(scene: Scene) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeedLoop)
        await scene(loop)

    run_in_virtual_time(main())


@pytest.fixture(params=[on_the_system_clock, on_a_manual_clock, in_virtual_time], ids=lambda play: play.__name__)
def play(request: pytest.FixtureRequest) -> Callable[[Scene], None]:
    return request.param


def test_a_clock_tells_whole_microseconds_since_1970(play: Callable[[Scene], None]) -> None:
    async def scene(clock: Clock) -> None:
        assert type(clock.now()) is int
        assert YEAR_2000 < clock.now() < YEAR_2100

    play(scene)


@pytest.mark.parametrize("duration", [-1, 0, 1, 50])
def test_a_sleep_ends_and_is_not_over_before_it_began(play: Callable[[Scene], None], duration: int) -> None:
    async def scene(clock: Clock) -> None:
        before = clock.now()
        await clock.sleep(duration)
        assert clock.now() >= before

    play(scene)


def test_others_run_while_somebody_sleeps(play: Callable[[Scene], None]) -> None:
    async def scene(clock: Clock) -> None:
        ran: list[int] = []
        sleeping = asyncio.create_task(clock.sleep(50))
        asyncio.get_running_loop().call_soon(ran.append, 1)
        await sleeping
        assert ran == [1]

    play(scene)


def test_a_sleep_can_be_cancelled(play: Callable[[Scene], None]) -> None:
    async def scene(clock: Clock) -> None:
        sleeping = asyncio.create_task(clock.sleep(HOUR))
        await asyncio.sleep(0)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping

    play(scene)


def test_a_manual_clock_stands_still_until_it_is_put_forward() -> None:
    async def scene() -> list[tuple[str, int]]:
        clock, woken = ManualClock(VIRTUAL_START), list[tuple[str, int]]()

        async def sleeper(name: str, duration: int) -> None:
            await clock.sleep(duration)
            woken.append((name, clock.now() - VIRTUAL_START))

        tasks = [asyncio.create_task(sleeper(*who)) for who in [("late", HOUR), ("early", MINUTE), ("also", MINUTE)]]
        for step in (0, MINUTE - 1, 1, 0, HOUR):
            for _ in range(3):
                await asyncio.sleep(0)
            clock.advance(step)
        await asyncio.gather(*tasks)
        return woken

    assert run_in_virtual_time(scene(), seed=None) == [("early", MINUTE), ("also", MINUTE), ("late", MINUTE + HOUR)]


class BackwardsClock:
    """A machine's clock that is set back again and again."""

    def __init__(self, times: Iterator[int]) -> None:
        self._times = times

    def now(self) -> int:
        return next(self._times, VIRTUAL_START)


MakeIds = Callable[[Callable[[], int]], Ids]


def seeded(now: Callable[[], int]) -> Ids:
    return SeededIds(7, now)


@pytest.fixture(params=[SortableIds, seeded], ids=["sortable", "seeded"])
def make_ids(request: pytest.FixtureRequest) -> MakeIds:
    return request.param


def test_ids_are_unique_and_later_ones_sort_after_earlier_ones(make_ids: MakeIds) -> None:
    ids = make_ids(SystemClock().now)
    texts = [ids.make() for _ in range(2000)]
    assert texts == sorted(set(texts))


def test_ids_stay_in_order_when_the_clock_stands_still(make_ids: MakeIds) -> None:
    ids = make_ids(lambda: VIRTUAL_START)
    texts = [ids.make() for _ in range(2000)]
    assert texts == sorted(set(texts))


@given(st.lists(st.integers(0, YEAR_2100), max_size=50))
@pytest.mark.parametrize("make", [SortableIds, seeded], ids=["sortable", "seeded"])
def test_ids_stay_in_order_when_the_clock_is_set_back(make: MakeIds, times: list[int]) -> None:
    ids = make(BackwardsClock(iter(times)).now)
    texts = [ids.make() for _ in range(len(times) + 2)]
    assert texts == sorted(set(texts))


def test_ids_made_in_different_milliseconds_sort_by_time_whoever_makes_them(make_ids: MakeIds) -> None:
    texts = [make_ids(lambda time=time: time).make() for time in range(VIRTUAL_START, VIRTUAL_START + SECOND, 1000)]
    assert texts == sorted(set(texts))


def test_ids_are_26_characters_that_can_stand_anywhere(make_ids: MakeIds) -> None:
    ids = make_ids(SystemClock().now)
    assert all(len(text) == 26 and text.isascii() and text.isalnum() and text == text.lower() for text in [ids.make()])


def test_the_same_seed_gives_the_same_ids_and_salts() -> None:
    first, second, seeded_ids = (SeededIds(seed, lambda: VIRTUAL_START) for seed in (1, 1, 2))
    assert [first.make() for _ in range(5)] == [second.make() for _ in range(5)]
    assert seeded_ids.make() != SeededIds(1, lambda: VIRTUAL_START).make()
    assert make_seeded_salts(1)(16) == make_seeded_salts(1)(16) != make_seeded_salts(2)(16)


def test_salts_have_the_size_that_is_asked_for_and_do_not_repeat() -> None:
    salts = make_seeded_salts(1)
    bodies = [salts(16) for _ in range(100)]
    assert {len(salt) for salt in bodies} == {16}
    assert len(set(bodies)) == 100
