"""A resident session: its sensors run in this process while it sleeps, and wake it.

Readings are in memory; what matters is in the journal. A signal becomes an event in the session's inbox before anything
acts on it, so an alert survives the process that saw it. A failing sensor is retried, more slowly each time; readings
that come too fast are dropped and counted.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, ParamSpec, Protocol, cast

import msgspec
from msgspec.structs import replace

from halter.autonomy.hot_state import ChangedValue, HotStateSnapshot, LiveFacts, RejectedValue, list_changed_fields
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
"""Minimum time between two health reports: a flapping sensor must not flood the journal."""
MOST_READINGS: Final = 100
MOST_BYTES: Final = 4 * LARGEST_READING
"""Most bytes of readings that wait."""
_LONGEST_SENTENCE: Final = 10_000
"""Listeners shorten it further, after secrets are redacted."""

P = ParamSpec("P")
TakeReading = Callable[[Reading], Awaitable[None]]
HealthListener = Callable[[HealthReport], Awaitable[None]]


def compute_sensor_backoff(failures: int, rng: random.Random) -> int:
    """Returns how long to wait after so many failures in a row; after none, the minimum."""
    longest = min(MAX_BACKOFF, MIN_BACKOFF << min(failures, 20))
    shortest = max(MIN_BACKOFF, longest // 2)
    return shortest + round(rng.random() * (longest - shortest))


def compute_sensor_pause(failures: int, retry_after: int | None, rng: random.Random) -> int:
    """Returns how long to wait, for a source that may have asked for a delay."""
    return max(compute_sensor_backoff(failures, rng), min(retry_after or 0, MAX_BACKOFF))


class ReadingBuffer:
    """Readings that wait. When there are too many, the oldest are dropped and counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: deque[Reading] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def add(self, reading: Reading) -> None:
        self._waiting.append(reading)
        self._bytes += reading.size
        while len(self._waiting) > MOST_READINGS or (self._bytes > MOST_BYTES and len(self._waiting) > 1):
            self._oldest()
            self.dropped += 1
        self._news.set()

    async def get(self) -> Reading:
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._oldest()

    def _oldest(self) -> Reading:
        reading = self._waiting.popleft()
        self._bytes -= reading.size
        return reading


class SupervisedSensor:
    """Runs one sensor. `report` is its health.

    `take` gets the readings one after the other; `changed` is called when the health changes. A failure of either, or
    of the sensor, is retried.
    """

    def __init__(
        self, sensor: Sensor, clock: Clock, rng: random.Random, take: TakeReading, changed: HealthListener
    ) -> None:
        self.report = HealthReport(sensor=sensor.name, since=clock.now())
        self._sensor = sensor
        self._clock = clock
        self._rng = rng
        self._on_reading = take
        self._on_health = changed
        self._buffer = ReadingBuffer()
        self._health_changed = asyncio.Event()
        self._read_failures = 0
        self._delivery_failures = 0

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._deliver())
            tasks.create_task(self._report_health())

    async def _read(self) -> None:
        while True:
            trouble = await _run_and_explain(self._read_once)
            if trouble:
                self._read_failures += 1
                self._fail(trouble)
            await self._clock.sleep(compute_sensor_pause(self._read_failures, self._sensor.retry_after, self._rng))

    async def _read_once(self) -> None:
        async with _closing(self._sensor.readings()) as readings:
            async for reading in readings:
                self._buffer.add(reading)
                self.report = replace(self.report, read_at=reading.at, dropped=self._buffer.dropped)
                self._read_failures = 0
                self._recover()
                # A source that always has more would starve other tasks.
                await asyncio.sleep(0)

    async def _deliver(self) -> None:
        while True:
            reading = await self._buffer.get()
            trouble = await _run_and_explain(self._on_reading, reading)
            if trouble:
                self._delivery_failures += 1
                self._fail(f"What was read was not taken in: {trouble}")
                await self._clock.sleep(compute_sensor_backoff(self._delivery_failures, self._rng))
            else:
                self._delivery_failures = 0
                self._recover()

    async def _report_health(self) -> None:
        told: Health = "starting"
        while True:
            while self.report.health == told:
                self._health_changed.clear()
                await self._health_changed.wait()
            report = self.report
            # What was not reported is reported after the interval, if it still holds.
            if not await _run_and_explain(self._on_health, report):
                told = report.health
            await self._clock.sleep(HEALTH_REPORT_INTERVAL)

    def _fail(self, sentence: str) -> None:
        self._turn("failing", self.report.failures + 1, shorten(clean(sentence), _LONGEST_SENTENCE))

    def _recover(self) -> None:
        """Marks the sensor healthy, once the source is read and its readings are taken."""
        if self.report.health != "ok" and not self._read_failures and not self._delivery_failures:
            self._turn("ok", 0, "")

    def _turn(self, health: Health, failures: int, sentence: str) -> None:
        since = self.report.since if health == self.report.health else self._clock.now()
        self.report = replace(self.report, health=health, since=since, failures=failures, sentence=sentence)
        self._health_changed.set()


async def _run_and_explain(act: Callable[P, Awaitable[None]], *args: P.args, **named: P.kwargs) -> str:
    """Runs something and returns what went wrong. A cancellation from inside counts as a failure."""
    trouble = ""
    try:
        await act(*args, **named)
    except asyncio.CancelledError:
        trouble = "It was cancelled from within."
    except HalterError as error:
        trouble = str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001, no failure of a source or a taker may stop the sensor.
        trouble = f"It failed unexpectedly: {type(error).__name__}: {error}"
    raise_if_cancelled()
    return trouble


@asynccontextmanager
async def _closing(readings: AsyncIterator[Reading]) -> AsyncGenerator[AsyncIterator[Reading]]:
    """Closes a source at once."""
    try:
        yield readings
    finally:
        if isinstance(readings, AsyncGenerator):
            await readings.aclose()


LONGEST_SENTENCE: Final = 500
"""Most characters kept of a sensor's error."""

SessionPulseListener = Callable[[str, Mapping[str, Any]], None]
"""Called with a name and values of something that happens now."""


class SensorRunner(Protocol):
    """Makes the supervisor of a sensor, given the callbacks for readings and health."""

    def __call__(self, sensor: SensorSpec, take: Any, changed: Any) -> SupervisedSensor: ...


class WatchedSensor(msgspec.Struct, frozen=True):
    """A sensor and its signals."""

    sensor: SensorSpec
    signals: Signals


class ResidentSession:
    """One session that stays in this process while it sleeps."""

    def __init__(
        self,
        conversation: Conversation,
        runtime: SessionRuntime,
        loop: TurnLoop,
        hot_view: LiveFacts,
        watched: Sequence[WatchedSensor],
        runs: SensorRunner,
        pulse: SessionPulseListener = lambda _, __: None,
    ) -> None:
        self._conversation = conversation
        self._runtime = runtime
        self._loop = loop
        self._hot_view = hot_view
        self._sensors = watched
        self._runs = runs
        self._pulse = pulse
        self._waits_for: frozenset[str] = frozenset()
        self._unfit: set[str] = set()
        self._lease_lost: asyncio.Future[LeaseLost] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        runtime.ending = self._stop_sensors

    async def live(self, resting: Conclusion | None = None) -> Conclusion:
        """Runs the sensors and gives the session its turns, until it ends. It may start asleep."""
        self._lease_lost = asyncio.get_running_loop().create_future()
        living = asyncio.create_task(self._living(resting), name="halter-resident")
        self._run_sensors()
        try:
            await asyncio.wait((living, self._lease_lost), return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                raise self._lease_lost.result()
            return await living
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await self._stop_sensors()

    def _run_sensors(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run_sensor(each), name="halter-sensor") for each in self._sensors]

    async def _run_sensor(self, watched: WatchedSensor) -> None:
        """Runs a sensor. Its calls in flight must not be taken for an earlier owner's."""
        await self._runtime.wait_until_recovered()
        try:
            sensing = self._sensing(watched)
        except SensorFailed as failed:
            report = HealthReport(sensor=watched.sensor.name, health="failing", failures=1, sentence=str(failed))
            await self._unless_lost(self._record_health(report))
        else:
            await sensing.run()

    async def _stop_sensors(self) -> None:
        """Stops the sensors and lets them settle their calls: no session ends while it holds something."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _living(self, resting: Conclusion | None) -> Conclusion:
        came = resting or await self._conversation.run_until_parked()
        while not came.has_ended:
            self._run_sensors()
            self._waits_for = frozenset(came.wake_on)
            if came is not resting:
                await self._wake_for_missed()
            await self._runtime.wait_for_wake(came.wake_at)
            self._waits_for = frozenset()
            came = await self._conversation.run_until_parked()
        return came

    def _sensing(self, watched: WatchedSensor) -> SupervisedSensor:
        async def on_reading(reading: Reading) -> None:
            await self._unless_lost(self._handle_reading(watched, reading))

        async def on_health(report: HealthReport) -> None:
            await self._unless_lost(self._record_health(report))

        return self._runs(watched.sensor, on_reading, on_health)

    async def _unless_lost(self, act: Awaitable[None]) -> None:
        """Runs something; releases the session if it has another owner."""
        try:
            await act
        except LeaseLost as lost:
            if self._lease_lost is not None and not self._lease_lost.done():
                self._lease_lost.set_result(lost)

    async def _handle_reading(self, watched: WatchedSensor, reading: Reading) -> None:
        """Handles a reading: scores it, keeps what is wanted, and reports what fired."""
        reading = Reading(redact_json(reading.value, self._runtime.redact), reading.at)
        looked = await watched.signals.score(reading, self._hot_view.hot.values())
        self._set_problem(f"{watched.sensor.name} (signals)", " ".join(looked.sentences))
        moved = self._store_reading(watched.sensor, reading) if looked.writes else frozenset[str]()
        known = self._hot_view.hot.values()
        values = {name: known[name] for name in sorted(moved)}
        self._pulse("autonomy:sensor_updated", {"sensor": watched.sensor.name, "changed": values})
        for scored in looked.scored:
            if scored.told:
                await self._post_signal(watched.sensor.name, scored, reading)
        await self._wake_if_waiting(watched.sensor.name, moved, reading.at)

    def _store_reading(self, sensor: SensorSpec, reading: Reading) -> frozenset[str]:
        """Writes a reading into its fields; returns the changed ones. Misfits go to the sensor's health."""
        moved: set[str] = set()
        for update in sensor.list_updates():
            problem = self._write_field(sensor.name, update, reading, moved)
            self._set_problem(f"{sensor.name}.{update.field}", problem)
        return frozenset(moved)

    def _set_problem(self, name: str, problem: str) -> None:
        """Shows the model what is wrong with a reading, while it is."""
        if problem or name in self._unfit:
            self._hot_view.add_health_report(
                HealthReport(sensor=name, health="failing" if problem else "ok", sentence=problem)
            )
            (self._unfit.add if problem else self._unfit.discard)(name)

    def _write_field(self, sensor: str, update: Update, reading: Reading, moved: set[str]) -> str:
        found = look_up_path(reading.value, update.path)
        if not isinstance(found, PathValue):
            return found.sentence
        put = self._hot_view.hot.put(update.field, found.value, reading.at, by=sensor, append=update.append)
        if isinstance(put, ChangedValue):
            moved.add(update.field)
        return put.sentence if isinstance(put, RejectedValue) else ""

    async def _post_signal(self, sensor: str, scored: ScoredSignal, reading: Reading) -> None:
        """Puts a fired signal into the session's inbox; as an alert, if configured."""
        signal = scored.signal
        text = describe_signal(sensor, scored, reading) if signal.notify else ""
        event = WakePosted(cause="signal", origin="sensor", sender=sensor, name=signal.name, notifies=signal.notify)
        await self._runtime.post(f"{self._runtime.lease.session}/{sensor}/{signal.name}/{reading.at}", event, text)

    async def _wake_if_waiting(self, sensor: str, moved: frozenset[str], at: int) -> None:
        """Wakes a session that waits for one of these fields, or for this sensor."""
        found = moved | {sensor} if moved else moved
        names = sorted(found & self._waits_for)
        for name in names[:1]:
            self._waits_for = frozenset()
            event = WakePosted(cause="signal", origin="sensor", sender=sensor, name=name)
            await self._runtime.post(f"{self._runtime.lease.session}/{sensor}/{name}/{at}", event, "")

    async def _wake_for_missed(self) -> None:
        """Wakes a session that fell asleep waiting for what had just changed or fired."""
        before = HotStateSnapshot.from_bytes(self._loop.hot) if self._loop.hot else None
        moved = frozenset(change.name for change in list_changed_fields(before, self._hot_view.hot.take_snapshot()))
        for name in sorted((moved | await self._find_fired()) & self._waits_for)[:1]:
            event = WakePosted(cause="signal", origin="sensor", sender=name, name=name)
            key = f"{self._runtime.lease.session}/missed/{name}/{self._loop.turn.number}_{self._loop.turn.skips}"
            await self._runtime.post(key, event, "")

    async def _find_fired(self) -> frozenset[str]:
        """Returns the signals that fired since the last turn began, while the session was awake."""
        inbox = await self._runtime.inbox(self._loop.turn.heard) if self._waits_for else ()
        posted = [stored.event for stored in inbox if isinstance(stored.event, WakePosted)]
        return frozenset(event.name for event in posted if event.cause == "signal" and not event.wakes)

    async def _record_health(self, report: HealthReport) -> None:
        """Records that a sensor fails, or recovered."""
        sentence = shorten(self._runtime.redact(report.sentence), LONGEST_SENTENCE)
        report = msgspec.structs.replace(report, sentence=sentence)
        self._hot_view.add_health_report(report)
        event = SensorChanged(
            sensor=report.sensor,
            health=report.health,
            failures=report.failures,
            sentence=report.sentence,
        )
        await self._runtime.write(f"{self._runtime.lease.session}/{report.sensor}/health/{report.since}", event)


def redact_json(value: Any, redact: Callable[[str], str]) -> Any:
    """Redacts every text in a JSON value. Most hold no secret, which one check of the whole shows."""
    try:
        whole = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return _redact_texts(value, redact)
    # A secret that JSON escapes contains a backslash.
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
