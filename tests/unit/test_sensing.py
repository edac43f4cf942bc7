"""A sensor is kept running whatever its source does: in virtual time."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from halter.autonomy.resident import (
    HEALTH_REPORT_INTERVAL,
    MAX_BACKOFF,
    MAX_BUFFERED_BYTES,
    MAX_READINGS,
    MIN_BACKOFF,
    ReadingBuffer,
    SupervisedSensor,
    compute_sensor_backoff,
    compute_sensor_pause,
)
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.tools import MAX_READING_BYTES, HealthReport, Reading, SensorFailed
from halter.testing.world import World

FAILS = SensorFailed("The source is on fire.")


class Programmed:
    """A sensor that does what it is told: each time it is begun, the next of its programs."""

    name = "source"

    def __init__(self, world: World, programs: Sequence[Sequence[Any]], *, results: Sequence[Any] = (FAILS,)) -> None:
        self.retry_after: int | None = None
        self.begun: list[int] = []
        self.closed = 0
        self._world = world
        self._programs = iter(programs)
        self._then = results

    async def readings(self) -> AsyncGenerator[Reading]:
        self.begun.append(self._world.now)
        try:
            for step in next(self._programs, self._then):
                match step:
                    case BaseException():
                        raise step
                    case float():
                        await self._world.clock.sleep(round(step * SECOND))
                    case value:
                        yield Reading(value, self._world.now, 10)
        finally:
            self.closed += 1

    def pauses(self) -> list[int]:
        return [after - before for before, after in pairwise(self.begun)]


class Watcher:
    """Runs a sensor, and notes what it is told."""

    def __init__(self, world: World, source: Any, refuse: Callable[[Any], BaseException | None] | None = None) -> None:
        self.taken: list[Any] = []
        self.told: list[tuple[int, HealthReport]] = []
        self.deaf: list[BaseException] = []
        self._world = world
        self._refuse = refuse or (lambda _: None)
        self.sensing = SupervisedSensor(source, world.clock, world.random, self._take, self._changed)
        self.task = world.spawn(self.sensing.run())

    async def _take(self, reading: Reading) -> None:
        refused = self._refuse(reading.value)
        if refused:
            raise refused
        self.taken.append(reading.value)

    async def _changed(self, report: HealthReport) -> None:
        if self.deaf:
            raise self.deaf.pop()
        self.told.append((self._world.now, report))

    @property
    def health(self) -> list[str]:
        return [report.health for _, report in self.told]


async def test_readings_are_taken_in_the_order_in_which_they_came(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [[1, 2, 3, 1000.0]]))
    assert watcher.sensing.report.health == "starting"
    await world.advance(SECOND)
    assert watcher.taken == [1, 2, 3]
    assert watcher.sensing.report.health == "ok"
    assert watcher.health == ["ok"]
    assert watcher.sensing.report.read_at == watcher.told[0][0]


async def test_a_sensor_is_starting_until_its_first_reading(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [[100.0, 1, 1000.0]]))
    await world.advance(99 * SECOND)
    assert watcher.sensing.report.health == "starting"
    assert watcher.health == []
    await world.advance(SECOND)
    assert watcher.health == ["ok"]


async def test_failures_are_waited_out_each_time_longer_up_to_a_cap(world: World) -> None:
    source = Programmed(world, [])
    watcher = Watcher(world, source)
    await world.advance(2 * HOUR)
    pauses = source.pauses()
    assert MIN_BACKOFF <= pauses[0] <= 2 * MIN_BACKOFF
    assert all(2**n * MIN_BACKOFF <= pause <= 2 ** (n + 1) * MIN_BACKOFF for n, pause in enumerate(pauses[:7]))
    assert all(MAX_BACKOFF / 2 <= pause <= MAX_BACKOFF for pause in pauses[9:])
    assert len(set(pauses[9:])) > 1
    assert watcher.health == ["failing"]
    assert watcher.sensing.report.failures == len(source.begun)
    assert watcher.sensing.report.sentence == "The source is on fire."


async def test_a_clean_close_never_reconnects_faster_than_the_floor(world: World) -> None:
    source = Programmed(world, [], results=[1])
    watcher = Watcher(world, source)
    await world.advance(MINUTE)
    assert set(source.pauses()) == {MIN_BACKOFF}
    assert watcher.health == ["ok"]


async def test_a_clean_close_without_a_reading_waits_too(world: World) -> None:
    source = Programmed(world, [], results=[])
    watcher = Watcher(world, source)
    await world.advance(MINUTE)
    assert min(source.pauses()) >= MIN_BACKOFF
    assert watcher.sensing.report.health == "starting"


async def test_a_reading_ends_the_row_of_failures(world: World) -> None:
    source = Programmed(world, [[FAILS], [FAILS], [FAILS], [FAILS], [1, FAILS]], results=[1000.0])
    Watcher(world, source)
    await world.advance(HOUR)
    assert source.pauses()[3] >= 8 * MIN_BACKOFF
    assert source.pauses()[4] <= 2 * MIN_BACKOFF


@pytest.mark.parametrize(("requested_seconds", "least", "most"), [(90, 90, 90), (0, 1, 2), (86_400, 300, 300)])
async def test_a_source_is_left_alone_for_as_long_as_it_asks_within_bounds(
    world: World, requested_seconds: int, least: int, most: int
) -> None:
    source = Programmed(world, [[FAILS]], results=[1000.0])
    source.retry_after = requested_seconds * SECOND
    Watcher(world, source)
    await world.advance(10 * MINUTE)
    assert least * SECOND <= source.pauses()[0] <= most * SECOND


async def test_a_sensor_that_recovers_is_reported_as_well(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [[1, 60.0, FAILS], [2, 1000.0]]))
    await world.advance(2 * MINUTE)
    assert watcher.health == ["ok", "failing", "ok"]
    failing, well = watcher.told[1][1], watcher.told[2][1]
    assert (failing.failures, failing.sentence) == (1, "The source is on fire.")
    assert (well.failures, well.sentence) == (0, "")
    assert watcher.sensing.report.since == well.since > failing.since


async def test_a_failing_sensor_is_reported_once_and_not_with_each_failure(world: World) -> None:
    watcher = Watcher(world, Programmed(world, []))
    await world.advance(HOUR)
    assert watcher.health == ["failing"]


async def test_a_sensor_that_flaps_reports_at_most_one_change_in_ten_seconds(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [], results=[1, 0.5, FAILS]))
    await world.advance(10 * MINUTE)
    times = [at for at, _ in watcher.told]
    assert all(after - before >= HEALTH_REPORT_INTERVAL for before, after in pairwise(times))
    assert all(before != after for before, after in pairwise(watcher.health))
    assert len(times) > 3


async def test_the_newest_health_is_reported_when_the_quiet_time_has_ended(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [[1, 1.0, FAILS], [1, 1.0, FAILS]]))
    await world.advance(9 * SECOND)
    assert watcher.health == ["ok"]
    await world.advance(SECOND)
    assert watcher.health == ["ok", "failing"]
    assert watcher.told[1][0] - watcher.told[0][0] == HEALTH_REPORT_INTERVAL


async def test_health_that_could_not_be_reported_is_reported_later(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [[1, 10_000.0]]))
    watcher.deaf = [RuntimeError("nobody listens"), RuntimeError("still nobody")]
    await world.advance(MINUTE)
    assert watcher.health == ["ok"]
    assert watcher.sensing.report.health == "ok"


@pytest.mark.parametrize(
    "failure", [ValueError("a surprise"), asyncio.CancelledError(), ExceptionGroup("two", [KeyError(1), OSError()])]
)
async def test_whatever_a_source_raises_the_sensor_continues(world: World, failure: BaseException) -> None:
    watcher = Watcher(world, Programmed(world, [[failure], [1, 1000.0]]))
    await world.advance(MINUTE)
    assert watcher.taken == [1]
    assert watcher.health == ["failing", "ok"]
    assert watcher.told[0][1].sentence


@pytest.mark.parametrize("failure", [ValueError("a surprise"), asyncio.CancelledError(), SensorFailed()])
async def test_whatever_taking_in_raises_the_sensor_continues(world: World, failure: BaseException) -> None:
    watcher = Watcher(
        world,
        Programmed(world, [[1, 60.0, 2, 60.0, 3, 1000.0]]),
        refuse=lambda value: failure if value == 2 else None,
    )
    await world.advance(3 * MINUTE)
    assert watcher.taken == [1, 3]
    assert watcher.health == ["ok", "failing", "ok"]
    assert watcher.told[1][1].sentence.startswith("The reading was not processed: ")


async def test_a_taker_that_never_works_keeps_a_sensor_failing_however_well_its_source_is_read(world: World) -> None:
    watcher = Watcher(world, Programmed(world, [], results=[1, 0.1] * 100_000), refuse=lambda _: ValueError("no"))
    await world.advance(5 * MINUTE)
    assert watcher.health in (["failing"], ["ok", "failing"])
    assert watcher.sensing.report.health == "failing"
    assert watcher.sensing.report.failures < 20


async def test_what_waits_to_be_taken_does_not_hide_that_the_source_fails(world: World) -> None:
    async def slowly(_: Reading) -> None:
        await world.clock.sleep(20 * SECOND)

    async def note(_: HealthReport) -> None: ...

    sensing = SupervisedSensor(Programmed(world, [[1, 2, 3]]), world.clock, world.random, slowly, note)
    world.spawn(sensing.run())
    await world.advance(50 * SECOND)
    assert sensing.report.health == "failing"


class Flood:
    """A source that always has more and never lets anybody else run."""

    name = "flood"
    retry_after = None

    def __init__(self, count: int) -> None:
        self.count = count
        self.given = 0

    async def readings(self) -> AsyncIterator[Reading]:
        while self.given < self.count:
            self.given += 1
            yield Reading(self.given, 0, 10)
        await asyncio.Event().wait()


async def test_a_flood_neither_fills_the_memory_nor_stops_the_others(world: World) -> None:
    numbers: list[int] = []
    flood = Flood(10_000)

    async def slowly(reading: Reading) -> None:
        numbers.append(reading.value)
        await world.clock.sleep(SECOND)

    async def note(_: HealthReport) -> None: ...

    others = 0

    async def other() -> None:
        nonlocal others
        while flood.given < flood.count:
            others += 1
            await asyncio.sleep(0)

    sensing = SupervisedSensor(flood, world.clock, world.random, slowly, note)
    world.spawn(sensing.run())
    await world.spawn(other())
    await world.advance(HOUR)
    assert others > 1000
    assert sensing.report.dropped == 10_000 - len(numbers)
    assert len(numbers) <= MAX_READINGS + 1
    assert numbers == sorted(numbers)
    assert numbers[-MAX_READINGS:] == list(range(10_001 - MAX_READINGS, 10_001))


def test_large_readings_that_wait_are_bounded_by_their_bytes() -> None:
    buffer = ReadingBuffer()
    for number in range(10):
        buffer.add(Reading(number, 0, MAX_READING_BYTES))
    assert buffer.dropped == 10 - MAX_BUFFERED_BYTES // MAX_READING_BYTES


async def test_a_cancelled_sensor_lets_go_of_its_source_at_once(world: World) -> None:
    source = Programmed(world, [[1, 1000.0]])
    watcher = Watcher(world, source)
    await world.advance(SECOND)
    watcher.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher.task
    assert source.closed == 1


async def test_a_sensor_that_is_cancelled_in_a_flood_lets_go_of_its_source_as_well(world: World) -> None:
    source, enough = Programmed(world, [range(10**9)]), asyncio.Event()
    watcher = Watcher(world, source, refuse=lambda value: enough.set() if value == 10 else None)
    await enough.wait()
    watcher.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher.task
    assert source.closed == 1


def test_back_off_stays_between_floor_and_cap() -> None:
    chance = random.Random(1)
    for failures in (*range(30), 10**9):
        for _ in range(20):
            assert MIN_BACKOFF <= compute_sensor_backoff(failures, chance) <= MAX_BACKOFF
            assert MIN_BACKOFF <= compute_sensor_pause(failures, chance.randrange(10**12), chance) <= MAX_BACKOFF


async def test_a_sensor_that_is_told_to_stop_stops_also_when_stopping_fails(world: World) -> None:
    """As a tool does that is told twice: what went wrong on the way must not hide the word."""

    async def take(_: Reading) -> None:
        try:
            await world.clock.sleep(HOUR)
        finally:
            raise ValueError("it failed while it was being stopped")

    async def changed(_: HealthReport) -> None:
        """Nobody cares."""

    sensing = SupervisedSensor(Programmed(world, [[1]]), world.clock, random.Random(0), take, changed)
    running = asyncio.create_task(sensing.run())
    await world.advance(MINUTE)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
