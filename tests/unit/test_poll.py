"""A poll looks again and again, whatever the clock and the looks do: in virtual time."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.tools import MAX_READING_BYTES, Sensor, SensorFailed
from halter.sensors.poll import MIN_POLLING_INTERVAL, compute_poll_rest, make_poll_sensor
from halter.spec.sensors import PollSensor, ToolSource
from halter.testing.world import World


def ignore(_: Any) -> None: ...


def spec(interval: int = 10 * SECOND, jitter: float = 0.0) -> PollSensor:
    return PollSensor(name="gauge", source=ToolSource(tool="look"), interval=interval, jitter=jitter)


class Jumping:
    """A clock whose hands somebody moves, while time passes as ever."""

    def __init__(self, world: World) -> None:
        self.off = 0
        self._world = world

    def now(self) -> int:
        return self._world.now + self.off

    async def sleep(self, duration: int) -> None:
        await self._world.clock.sleep(duration)


class Looks:
    """Notes when somebody looks, and takes its time."""

    def __init__(self, world: World, lasting: float = 0) -> None:
        self.at: list[int] = []
        self.lasting = lasting
        self.looking = 0
        self._world = world
        self._began = world.now

    async def __call__(self) -> Any:
        self.at.append(self._world.now - self._began)
        assert self.looking == 0, "two looks at once"
        self.looking += 1
        await self._world.clock.sleep(round(self.lasting * SECOND))
        self.looking -= 1
        return len(self.at)

    def seconds(self) -> list[float]:
        return [at / SECOND for at in self.at]


async def listen(sensor: Sensor, note: Callable[[Any], None]) -> None:
    async for reading in sensor.readings():
        note(reading.value)


async def test_a_poll_looks_at_once_and_then_every_interval(world: World) -> None:
    looks = Looks(world)
    results: list[Any] = []
    world.spawn(listen(make_poll_sensor(spec(), looks, world.clock, world.random), results.append))
    await world.advance(35 * SECOND)
    assert looks.seconds() == [0, 10, 20, 30]
    assert results == [1, 2, 3, 4]


async def test_a_slow_look_does_not_shift_the_next(world: World) -> None:
    looks = Looks(world, lasting=4)
    world.spawn(listen(make_poll_sensor(spec(), looks, world.clock, world.random), ignore))
    await world.advance(35 * SECOND)
    assert looks.seconds() == [0, 10, 20, 30]


async def test_what_was_missed_by_a_look_that_took_long_is_not_made_up_for(world: World) -> None:
    looks = Looks(world, lasting=14)
    world.spawn(listen(make_poll_sensor(spec(), looks, world.clock, world.random), ignore))
    await world.advance(59 * SECOND)
    assert looks.seconds() == [0, 20, 40]


async def test_chance_adds_no_more_than_its_part_of_the_interval(world: World) -> None:
    looks = Looks(world)
    world.spawn(listen(make_poll_sensor(spec(jitter=0.5), looks, world.clock, world.random), ignore))
    await world.advance(10 * MINUTE)
    pauses = [after - before for before, after in pairwise(looks.at)]
    assert all(10 * SECOND <= each <= 15 * SECOND for each in pauses)
    assert len(set(pauses)) > 10


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@pytest.mark.parametrize("when", [2, 7])
async def test_a_clock_that_jumps_makes_neither_a_burst_nor_a_silence(world: World, jump: int, when: int) -> None:
    """While somebody looks, and while nobody does."""
    looks, clock = Looks(world, lasting=5), Jumping(world)
    world.spawn(listen(make_poll_sensor(spec(), looks, clock, world.random), ignore))
    await world.advance(when * SECOND)
    clock.off = jump
    await world.advance(2 * MINUTE)
    pauses = [after - before for before, after in pairwise(looks.at)]
    assert all(5 * SECOND <= each <= 20 * SECOND for each in pauses)


async def test_a_look_that_hangs_is_a_failure(world: World) -> None:
    sensor = make_poll_sensor(spec(), Looks(world, lasting=3600), world.clock, world.random)
    with pytest.raises(SensorFailed, match="No answer within 30 s"):
        await listen(sensor, ignore)


@pytest.mark.parametrize("value", ["x" * MAX_READING_BYTES, object(), "\ud800"])
async def test_a_look_at_what_is_no_reading_is_a_failure(world: World, value: Any) -> None:
    async def look() -> Any:
        return value

    with pytest.raises(SensorFailed):
        await listen(make_poll_sensor(spec(), look, world.clock, world.random), ignore)


async def test_nobody_is_asked_without_a_pause(world: World) -> None:
    looks = Looks(world)
    world.spawn(listen(make_poll_sensor(spec(interval=0), looks, world.clock, world.random), ignore))
    await world.advance(SECOND)
    assert len(looks.at) == SECOND // MIN_POLLING_INTERVAL + 1


def test_a_rest_is_never_nothing_nor_more_than_a_period() -> None:
    chance = random.Random(2)
    assert all(0 < compute_poll_rest(7, chance.randrange(-(10**9), 10**9)) <= 7 for _ in range(1000))
