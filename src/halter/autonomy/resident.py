"""A session whose sensors run in this process: they read while it sleeps, and wake it.

What a sensor finds is in memory; that it matters is in the journal. A signal becomes an event in the session's inbox
before anybody acts on it, so an alert outlives the process that saw it.

Keeps one sensor running, whatever its source does, and says how it does.

After a failure it waits, each time longer; what comes faster than it is taken in is dropped, and counted.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, ParamSpec, Protocol, cast

import msgspec
from msgspec.structs import replace

from halter.autonomy.hot_state import Awareness, ChangedValue, HotStateSnapshot, RejectedValue, list_changed_fields
from halter.autonomy.signals import ScoredSignal, Signals, describe_signal
from halter.core.agent_spec import SensorSpec, Update
from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.errors import HalterError, LeaseLost
from halter.core.events import SensorChanged, WakePosted
from halter.core.text import clean, shorten
from halter.core.tools import LARGEST_READING, Health, HealthReport, Reading, Sensor, SensorFailed
from halter.loop.loop import TurnLoop
from halter.loop.session_runtime import SessionRuntime, raise_if_cancelled
from halter.loop.text_calls import PathValue, look_up_path
from halter.tasks.conversation import Conclusion, Conversation

MIN_BACKOFF: Final = SECOND
MAX_BACKOFF: Final = 5 * MINUTE
HEALTH_REPORT_INTERVAL: Final = 10 * SECOND
"""After a change of health was told, the next is told so much later: one that flaps floods no journal."""
MOST_READINGS: Final = 100
MOST_BYTES: Final = 4 * LARGEST_READING
"""What may wait to be looked at."""
_LONGEST_SENTENCE: Final = 10_000
"""Whoever is told of it shortens it further, once no secret can be cut in two any more."""

P = ParamSpec("P")
TakeReading = Callable[[Reading], Awaitable[None]]
HealthListener = Callable[[HealthReport], Awaitable[None]]


def compute_sensor_backoff(failures: int, chance: random.Random) -> int:
    """Say how long a source is left alone after so many failures in a row; after none, that is the floor."""
    longest = min(MAX_BACKOFF, MIN_BACKOFF << min(failures, 20))
    shortest = max(MIN_BACKOFF, longest // 2)
    return shortest + round(chance.random() * (longest - shortest))


def compute_sensor_pause(failures: int, retry_after: int | None, chance: random.Random) -> int:
    """Say how long to wait, for a source that may itself have asked for some time."""
    return max(compute_sensor_backoff(failures, chance), min(retry_after or 0, MAX_BACKOFF))


class ReadingBuffer:
    """Readings that wait to be looked at. Where there are too many the oldest go, and are counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: deque[Reading] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, reading: Reading) -> None:
        """Add the newest one."""
        self._waiting.append(reading)
        self._bytes += reading.size
        while len(self._waiting) > MOST_READINGS or (self._bytes > MOST_BYTES and len(self._waiting) > 1):
            self._oldest()
            self.dropped += 1
        self._news.set()

    async def get(self) -> Reading:
        """Wait for the oldest one."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._oldest()

    def _oldest(self) -> Reading:
        reading = self._waiting.popleft()
        self._bytes -= reading.size
        return reading


class SupervisedSensor:
    """Runs one sensor. `report` says how it does now.

    `take` is given the readings, one after the other; `changed` is told when the health is another than was told last.
    A failure of either, or of the sensor, is waited out.
    """

    def __init__(
        self, sensor: Sensor, clock: Clock, chance: random.Random, take: TakeReading, changed: HealthListener
    ) -> None:
        self.report = HealthReport(sensor=sensor.name, since=clock.now())
        self._sensor = sensor
        self._clock = clock
        self._chance = chance
        self._take = take
        self._changed = changed
        self._buffer = ReadingBuffer()
        self._turned = asyncio.Event()
        self._not_read = 0
        self._not_taken = 0

    async def run(self) -> None:
        """Run until cancelled; nothing else ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._hand_on())
            tasks.create_task(self._tell())

    async def _read(self) -> None:
        while True:
            trouble = await _run_and_explain(self._read_once)
            if trouble:
                self._not_read += 1
                self._fail(trouble)
            await self._clock.sleep(compute_sensor_pause(self._not_read, self._sensor.retry_after, self._chance))

    async def _read_once(self) -> None:
        async with _closing(self._sensor.readings()) as readings:
            async for reading in readings:
                self._buffer.put(reading)
                self.report = replace(self.report, read_at=reading.at, dropped=self._buffer.dropped)
                self._not_read = 0
                self._recover()
                # A source that always has more would let nobody else run.
                await asyncio.sleep(0)

    async def _hand_on(self) -> None:
        while True:
            reading = await self._buffer.get()
            trouble = await _run_and_explain(self._take, reading)
            if trouble:
                self._not_taken += 1
                self._fail(f"What was read was not taken in: {trouble}")
                await self._clock.sleep(compute_sensor_backoff(self._not_taken, self._chance))
            else:
                self._not_taken = 0
                self._recover()

    async def _tell(self) -> None:
        told: Health = "starting"
        while True:
            while self.report.health == told:
                self._turned.clear()
                await self._turned.wait()
            report = self.report
            # What could not be told is told when this time is over, if it is still so.
            if not await _run_and_explain(self._changed, report):
                told = report.health
            await self._clock.sleep(HEALTH_REPORT_INTERVAL)

    def _fail(self, sentence: str) -> None:
        self._turn("failing", self.report.failures + 1, shorten(clean(sentence), _LONGEST_SENTENCE))

    def _recover(self) -> None:
        """Be well again, once the source is read and its readings are taken in."""
        if self.report.health != "ok" and not self._not_read and not self._not_taken:
            self._turn("ok", 0, "")

    def _turn(self, health: Health, failures: int, sentence: str) -> None:
        since = self.report.since if health == self.report.health else self._clock.now()
        self.report = replace(self.report, health=health, since=since, failures=failures, sentence=sentence)
        self._turned.set()


async def _run_and_explain(act: Callable[P, Awaitable[None]], *args: P.args, **named: P.kwargs) -> str:
    """Do something, and say what went wrong with it. A cancellation that nobody asked for is trouble like any other."""
    trouble = ""
    try:
        await act(*args, **named)
    except asyncio.CancelledError:
        trouble = "It was cancelled from within."
    except HalterError as error:
        trouble = str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001, whatever a source or a taker does, the sensor goes on.
        trouble = f"It failed unexpectedly: {type(error).__name__}: {error}"
    raise_if_cancelled()
    return trouble


@asynccontextmanager
async def _closing(readings: AsyncIterator[Reading]) -> AsyncGenerator[AsyncIterator[Reading]]:
    """Let go of a source at once, and not when somebody gets around to it."""
    try:
        yield readings
    finally:
        if isinstance(readings, AsyncGenerator):
            await readings.aclose()


LONGEST_SENTENCE: Final = 500
"""So much is kept of what a sensor has to say about its failure."""

SessionPulseListener = Callable[[str, Mapping[str, Any]], None]
"""Somebody who wants to know what happens at this moment, and is told a name and some values."""


class SensorRunner(Protocol):
    """Makes whatever keeps a sensor running, given who takes its readings and who hears how it does."""

    def __call__(self, sensor: SensorSpec, take: Any, changed: Any) -> SupervisedSensor: ...


class WatchedSensor(msgspec.Struct, frozen=True):
    """A sensor, and the signals on what it reads."""

    sensor: SensorSpec
    signals: Signals


class ResidentSession:
    """One session that stays in this process while it sleeps."""

    def __init__(
        self,
        conversation: Conversation,
        running: SessionRuntime,
        loop: TurnLoop,
        aware: Awareness,
        watched: Sequence[WatchedSensor],
        runs: SensorRunner,
        pulse: SessionPulseListener = lambda _, __: None,
    ) -> None:
        self._conversation = conversation
        self._running = running
        self._loop = loop
        self._aware = aware
        self._watched = watched
        self._runs = runs
        self._pulse = pulse
        self._waits_for: frozenset[str] = frozenset()
        self._unfit: set[str] = set()
        self._lost: asyncio.Future[LeaseLost] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        running.ending = self._still

    async def live(self, resting: Conclusion | None = None) -> Conclusion:
        """Run the sensors, and give the session its turns, until it is over. It may be found asleep."""
        self._lost = asyncio.get_running_loop().create_future()
        living = asyncio.create_task(self._living(resting), name="halter-resident")
        self._sense()
        try:
            await asyncio.wait((living, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                raise self._lost.result()
            return await living
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await self._still()

    def _sense(self) -> None:
        """Let the sensors read, if they do not."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._reads(each), name="halter-sensor") for each in self._watched]

    async def _reads(self, watched: WatchedSensor) -> None:
        """Run a sensor. What it has under way must not be taken for something that an earlier owner left in doubt."""
        await self._running.looked_back.wait()
        try:
            sensing = self._sensing(watched)
        except SensorFailed as failed:
            report = HealthReport(sensor=watched.sensor.name, health="failing", failures=1, sentence=str(failed))
            await self._unless_lost(self._changed(report))
        else:
            await sensing.run()

    async def _still(self) -> None:
        """Stop the sensors, and let them settle what they have under way: no session ends while it holds something."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _living(self, resting: Conclusion | None) -> Conclusion:
        came = resting or await self._conversation.attend()
        while not came.over:
            self._sense()
            self._waits_for = frozenset(came.wake_on)
            if came is not resting:
                await self._missed()
            await self._running.until_woken(came.wake_at)
            self._waits_for = frozenset()
            came = await self._conversation.attend()
        return came

    def _sensing(self, watched: WatchedSensor) -> SupervisedSensor:
        async def take(reading: Reading) -> None:
            await self._unless_lost(self._take(watched, reading))

        async def changed(report: HealthReport) -> None:
            await self._unless_lost(self._changed(report))

        return self._runs(watched.sensor, take, changed)

    async def _unless_lost(self, act: Awaitable[None]) -> None:
        """Do something; if the session has another owner by now, let it go."""
        try:
            await act
        except LeaseLost as lost:
            if self._lost is not None and not self._lost.done():
                self._lost.set_result(lost)

    async def _take(self, watched: WatchedSensor, reading: Reading) -> None:
        """Take a reading in: score it, keep what of it is wanted, and tell what fired."""
        reading = Reading(redact_json(reading.value, self._running.redacted), reading.at)
        looked = await watched.signals.look(reading, self._aware.hot.values())
        self._fits(f"{watched.sensor.name} (signals)", " ".join(looked.sentences))
        moved = self._kept(watched.sensor, reading) if looked.writes else frozenset[str]()
        known = self._aware.hot.values()
        values = {name: known[name] for name in sorted(moved)}
        self._pulse("autonomy:sensor_updated", {"sensor": watched.sensor.name, "changed": values})
        for scored in looked.scored:
            if scored.told:
                await self._tell(watched.sensor.name, scored, reading)
        await self._wake(watched.sensor.name, moved, reading.at)

    def _kept(self, sensor: SensorSpec, reading: Reading) -> frozenset[str]:
        """Write a reading into its fields; tell which changed. What does not fit is told with the sensor's health."""
        moved: set[str] = set()
        for update in sensor.written():
            problem = self._written(sensor.name, update, reading, moved)
            self._fits(f"{sensor.name}.{update.field}", problem)
        return frozenset(moved)

    def _fits(self, name: str, problem: str) -> None:
        """Let the model know what is wrong with a reading, for as long as something is."""
        if problem or name in self._unfit:
            self._aware.hear(HealthReport(sensor=name, health="failing" if problem else "ok", sentence=problem))
            (self._unfit.add if problem else self._unfit.discard)(name)

    def _written(self, sensor: str, update: Update, reading: Reading, moved: set[str]) -> str:
        found = look_up_path(reading.value, update.path)
        if not isinstance(found, PathValue):
            return found.sentence
        put = self._aware.hot.put(update.field, found.value, reading.at, by=sensor, append=update.append)
        if isinstance(put, ChangedValue):
            moved.add(update.field)
        return put.sentence if isinstance(put, RejectedValue) else ""

    async def _tell(self, sensor: str, scored: ScoredSignal, reading: Reading) -> None:
        """Put a signal that fired into the session's inbox: as an alert, if it is to be one."""
        signal = scored.signal
        text = describe_signal(sensor, scored, reading) if signal.notify else ""
        event = WakePosted(cause="signal", origin="sensor", sender=sensor, name=signal.name, notifies=signal.notify)
        await self._running.post(f"{self._running.lease.session}/{sensor}/{signal.name}/{reading.at}", event, text)

    async def _wake(self, sensor: str, moved: frozenset[str], at: int) -> None:
        """Wake a sleeper that waits for one of these fields, or for anything that this sensor finds."""
        found = moved | {sensor} if moved else moved
        names = sorted(found & self._waits_for)
        for name in names[:1]:
            self._waits_for = frozenset()
            event = WakePosted(cause="signal", origin="sensor", sender=sensor, name=name)
            await self._running.post(f"{self._running.lease.session}/{sensor}/{name}/{at}", event, "")

    async def _missed(self) -> None:
        """Wake a sleeper that fell asleep waiting for what had just changed, or for a signal that had just fired."""
        before = HotStateSnapshot.from_bytes(self._loop.hot) if self._loop.hot else None
        moved = frozenset(change.name for change in list_changed_fields(before, self._aware.hot.seen()))
        for name in sorted((moved | await self._fired()) & self._waits_for)[:1]:
            event = WakePosted(cause="signal", origin="sensor", sender=name, name=name)
            key = f"{self._running.lease.session}/missed/{name}/{self._loop.turn.number}_{self._loop.turn.skips}"
            await self._running.post(key, event, "")

    async def _fired(self) -> frozenset[str]:
        """Name the signals that fired since the last turn began, and found nobody asleep."""
        inbox = await self._running.inbox(self._loop.turn.heard) if self._waits_for else ()
        posted = [stored.event for stored in inbox if isinstance(stored.event, WakePosted)]
        return frozenset(event.name for event in posted if event.cause == "signal" and not event.wakes)

    async def _changed(self, report: HealthReport) -> None:
        """Write down that a sensor fails, or no longer does."""
        sentence = shorten(self._running.redacted(report.sentence), LONGEST_SENTENCE)
        report = msgspec.structs.replace(report, sentence=sentence)
        self._aware.hear(report)
        event = SensorChanged(
            sensor=report.sensor,
            health=report.health,
            failures=report.failures,
            sentence=report.sentence,
        )
        await self._running.write(f"{self._running.lease.session}/{report.sensor}/health/{report.since}", event)


def redact_json(value: Any, redact: Callable[[str], str]) -> Any:
    """Take secrets out of every text of a JSON value. Most hold none, which one look at all of it tells."""
    try:
        whole = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return _redact_texts(value, redact)
    # A secret that JSON spells otherwise is known by its backslash.
    return value if "\\" not in whole and redact(whole) == whole else _redact_texts(value, redact)


def _redact_texts(value: Any, redact: Callable[[str], str]) -> Any:
    match value:
        case str():
            return redact(value)
        case list():
            return [_redact_texts(each, redact) for each in cast("list[Any]", value)]
        case dict():
            return {
                redact(str(key)): _redact_texts(each, redact) for key, each in cast("dict[Any, Any]", value).items()
            }
        case _:
            return value
