"""A resident session: its sensors run in this process while it sleeps, and wake it.

Readings are only in memory. A signal becomes an event in the session's inbox before anything acts on it, so an alert
survives its process. A failing sensor is retried with a growing delay. Readings that arrive too fast are dropped and
counted.
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
from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.errors import HalterError, LeaseLost
from halter.core.events import SensorChanged, WakePosted
from halter.core.text import clean, shorten
from halter.core.tools import MAX_READING_BYTES, Health, HealthReport, Reading, Sensor, SensorFailed
from halter.loop.concurrency import raise_if_cancelled
from halter.loop.loop import TurnLoop
from halter.loop.session_runtime import SessionRuntime
from halter.loop.text_calls import PathValue, find_path_value
from halter.spec.sensors import AnySensor, Update
from halter.tasks.conversation import Conclusion, Conversation

MIN_BACKOFF: Final = SECOND
MAX_BACKOFF: Final = 5 * MINUTE
HEALTH_REPORT_INTERVAL: Final = 10 * SECOND
"""Minimum time between two health reports: a flapping sensor must not flood the journal."""
MAX_READINGS: Final = 100
MAX_BUFFERED_BYTES: Final = 4 * MAX_READING_BYTES
"""Maximum size of the waiting readings, in bytes."""
_MAX_ERROR_LENGTH: Final = 10_000
"""Listeners shorten the text further, after secrets are redacted."""

P = ParamSpec("P")
ReadingListener = Callable[[Reading], Awaitable[None]]
HealthListener = Callable[[HealthReport], Awaitable[None]]


def compute_sensor_backoff(failures: int, rng: random.Random) -> int:
    """Return the delay after a number of consecutive failures; the minimum after none."""
    max_delay = min(MAX_BACKOFF, MIN_BACKOFF << min(failures, 20))
    min_delay = max(MIN_BACKOFF, max_delay // 2)
    return min_delay + round(rng.random() * (max_delay - min_delay))


def compute_sensor_pause(failures: int, retry_after: int | None, rng: random.Random) -> int:
    """Return the delay for a source that may have asked for a longer one."""
    return max(compute_sensor_backoff(failures, rng), min(retry_after or 0, MAX_BACKOFF))


class ReadingBuffer:
    """A queue of readings. If there are too many, the oldest are dropped and counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: deque[Reading] = deque()
        self._bytes = 0
        self._reading_event = asyncio.Event()

    def add(self, reading: Reading) -> None:
        self._waiting.append(reading)
        self._bytes += reading.size
        while len(self._waiting) > MAX_READINGS or (self._bytes > MAX_BUFFERED_BYTES and len(self._waiting) > 1):
            self._pop_oldest()
            self.dropped += 1
        self._reading_event.set()

    async def get(self) -> Reading:
        while not self._waiting:
            self._reading_event.clear()
            await self._reading_event.wait()
        return self._pop_oldest()

    def _pop_oldest(self) -> Reading:
        reading = self._waiting.popleft()
        self._bytes -= reading.size
        return reading


class SupervisedSensor:
    """The supervisor of one sensor. `report` is its health.

    `on_reading` gets the readings in order; `on_health` is called when the health changes. A failure of either, or of
    the sensor, is retried.
    """

    def __init__(
        self, sensor: Sensor, clock: Clock, rng: random.Random, on_reading: ReadingListener, on_health: HealthListener
    ) -> None:
        self.report = HealthReport(sensor=sensor.name, since=clock.now())
        self._sensor = sensor
        self._clock = clock
        self._rng = rng
        self._on_reading = on_reading
        self._on_health = on_health
        self._buffer = ReadingBuffer()
        self._health_changed = asyncio.Event()
        self._read_failures = 0
        self._delivery_failures = 0

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._deliver())
            tasks.create_task(self._report_health())

    async def _read(self) -> None:
        while True:
            problem = await _run_and_explain(self._read_once)
            if problem:
                self._read_failures += 1
                self._fail(problem)
            await self._clock.sleep(compute_sensor_pause(self._read_failures, self._sensor.retry_after, self._rng))

    async def _read_once(self) -> None:
        async with _closing(self._sensor.readings()) as readings:
            async for reading in readings:
                self._buffer.add(reading)
                self.report = replace(self.report, read_at=reading.at, dropped=self._buffer.dropped)
                self._read_failures = 0
                self._recover()
                # A source that always has another reading would starve other tasks.
                await asyncio.sleep(0)

    async def _deliver(self) -> None:
        while True:
            reading = await self._buffer.get()
            problem = await _run_and_explain(self._on_reading, reading)
            if problem:
                self._delivery_failures += 1
                self._fail(f"The reading was not processed: {problem}")
                await self._clock.sleep(compute_sensor_backoff(self._delivery_failures, self._rng))
            else:
                self._delivery_failures = 0
                self._recover()

    async def _report_health(self) -> None:
        reported_health: Health = "starting"
        while True:
            while self.report.health == reported_health:
                self._health_changed.clear()
                await self._health_changed.wait()
            report = self.report
            # A health that could not be reported is reported after the interval, if it has not changed.
            if not await _run_and_explain(self._on_health, report):
                reported_health = report.health
            await self._clock.sleep(HEALTH_REPORT_INTERVAL)

    def _fail(self, sentence: str) -> None:
        self._turn("failing", self.report.failures + 1, shorten(clean(sentence), _MAX_ERROR_LENGTH))

    def _recover(self) -> None:
        """Mark the sensor healthy, if the source is read and its readings are processed without a failure."""
        if self.report.health != "ok" and not self._read_failures and not self._delivery_failures:
            self._turn("ok", 0, "")

    def _turn(self, health: Health, failures: int, sentence: str) -> None:
        since = self.report.since if health == self.report.health else self._clock.now()
        self.report = replace(self.report, health=health, since=since, failures=failures, sentence=sentence)
        self._health_changed.set()


async def _run_and_explain(act: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> str:
    """Run a function and return its error as text, or "". A cancellation from inside counts as a failure."""
    problem = ""
    try:
        await act(*args, **kwargs)
    except asyncio.CancelledError:
        problem = "Cancelled from inside."
    except HalterError as error:
        problem = str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001, no failure of a source or a callback may stop the sensor.
        problem = f"Unexpected error: {type(error).__name__}: {error}"
    raise_if_cancelled()
    return problem


@asynccontextmanager
async def _closing(readings: AsyncIterator[Reading]) -> AsyncGenerator[AsyncIterator[Reading]]:
    """Close a source when the block ends, without waiting for the garbage collector."""
    try:
        yield readings
    finally:
        if isinstance(readings, AsyncGenerator):
            await readings.aclose()


MAX_RECORDED_ERROR_LENGTH: Final = 500
"""Maximum number of characters of a sensor's error in the journal."""

SessionPulseListener = Callable[[str, Mapping[str, Any]], None]
"""Listener that gets the name and the values of a live event."""


class SensorRunner(Protocol):
    """A factory of a sensor's supervisor, with the callbacks for readings and health."""

    def __call__(
        self, sensor: AnySensor, on_reading: ReadingListener, on_health: HealthListener, /
    ) -> SupervisedSensor: ...


class WatchedSensor(msgspec.Struct, frozen=True):
    """A sensor and its signals."""

    sensor: AnySensor
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
        """Run the sensors and the session's turns until it ends. The session may start asleep."""
        self._lease_lost = asyncio.get_running_loop().create_future()
        turns_task = asyncio.create_task(self._living(resting), name="halter-resident")
        self._run_sensors()
        try:
            await asyncio.wait((turns_task, self._lease_lost), return_when=asyncio.FIRST_COMPLETED)
            if not turns_task.done():
                raise self._lease_lost.result()
            return await turns_task
        finally:
            turns_task.cancel()
            await asyncio.gather(turns_task, return_exceptions=True)
            await self._stop_sensors()

    def _run_sensors(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run_sensor(each), name="halter-sensor") for each in self._sensors]

    async def _run_sensor(self, watched_sensor: WatchedSensor) -> None:
        """Run a sensor after the recovery, so that its calls are not mistaken for those of an earlier owner."""
        await self._runtime.wait_until_recovered()
        try:
            supervisor = self._sensing(watched_sensor)
        except SensorFailed as failed:
            report = HealthReport(sensor=watched_sensor.sensor.name, health="failing", failures=1, sentence=str(failed))
            await self._unless_lost(self._record_health(report))
        else:
            await supervisor.run()

    async def _stop_sensors(self) -> None:
        """Stop the sensors and let them settle their calls: no session ends while it has a hold."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _living(self, resting: Conclusion | None) -> Conclusion:
        conclusion = resting or await self._conversation.run_until_parked()
        while not conclusion.has_ended:
            self._run_sensors()
            self._waits_for = frozenset(conclusion.wake_on)
            if conclusion is not resting:
                await self._wake_for_missed()
            await self._runtime.wait_for_wake(conclusion.wake_at)
            self._waits_for = frozenset()
            conclusion = await self._conversation.run_until_parked()
        return conclusion

    def _sensing(self, watched_sensor: WatchedSensor) -> SupervisedSensor:
        async def on_reading(reading: Reading) -> None:
            await self._unless_lost(self._handle_reading(watched_sensor, reading))

        async def on_health(report: HealthReport) -> None:
            await self._unless_lost(self._record_health(report))

        return self._runs(watched_sensor.sensor, on_reading, on_health)

    async def _unless_lost(self, work: Awaitable[None]) -> None:
        """Await something; end the resident session if its lease is lost."""
        try:
            await work
        except LeaseLost as lost:
            if self._lease_lost is not None and not self._lease_lost.done():
                self._lease_lost.set_result(lost)

    async def _handle_reading(self, watched_sensor: WatchedSensor, reading: Reading) -> None:
        """Handle a reading: score it, write it into its fields, post the signals that fired, and save its look.

        A process that dies before the look is saved reads the changes again: they are news twice, and never lost.
        """
        look = redact_json(reading.look, self._runtime.redact)
        reading = Reading(redact_json(reading.value, self._runtime.redact), reading.at)
        results = await watched_sensor.signals.score(reading, self._hot_view.hot.values())
        self._set_problem(f"{watched_sensor.sensor.name} (signals)", " ".join(results.sentences))
        changed_names = self._store_reading(watched_sensor.sensor, reading) if results.is_written else frozenset[str]()
        hot_values = self._hot_view.hot.values()
        values = {name: hot_values[name] for name in sorted(changed_names)}
        self._pulse("autonomy:sensor_updated", {"sensor": watched_sensor.sensor.name, "changed": values})
        for scored_signal in results.scored:
            if scored_signal.is_reported:
                await self._post_signal(watched_sensor.sensor.name, scored_signal, reading)
        await self._wake_if_waiting(watched_sensor.sensor.name, changed_names, reading.at)
        if look is not None and look != self._hot_view.hot.looks.get(watched_sensor.sensor.name):
            self._hot_view.hot.looks[watched_sensor.sensor.name] = look
            await self._runtime.save_snapshot(self._hot_view.hot.snapshot())

    def _store_reading(self, sensor: AnySensor, reading: Reading) -> frozenset[str]:
        """Write a reading into its fields; return the changed ones. A value that does not fit is a health problem."""
        changed_names: set[str] = set()
        for update in sensor.list_updates():
            problem = self._write_field(sensor.name, update, reading, changed_names)
            self._set_problem(f"{sensor.name}.{update.field}", problem)
        return frozenset(changed_names)

    def _set_problem(self, name: str, problem: str) -> None:
        """Show the model a problem with a reading until it is resolved."""
        if problem or name in self._unfit:
            self._hot_view.add_health_report(
                HealthReport(sensor=name, health="failing" if problem else "ok", sentence=problem)
            )
            (self._unfit.add if problem else self._unfit.discard)(name)

    def _write_field(self, sensor: str, update: Update, reading: Reading, changed_names: set[str]) -> str:
        path_value = find_path_value(reading.value, update.path)
        if not isinstance(path_value, PathValue):
            return path_value.sentence
        outcome = self._hot_view.hot.put(update.field, path_value.value, reading.at, by=sensor, append=update.append)
        if isinstance(outcome, ChangedValue):
            changed_names.add(update.field)
        return outcome.sentence if isinstance(outcome, RejectedValue) else ""

    async def _post_signal(self, sensor: str, scored_signal: ScoredSignal, reading: Reading) -> None:
        """Post a fired signal into the session's inbox; as an alert if it notifies."""
        signal = scored_signal.signal
        text = describe_signal(sensor, scored_signal, reading) if signal.notify else ""
        event = WakePosted(cause="signal", origin="sensor", sender=sensor, name=signal.name, notifies=signal.notify)
        await self._runtime.post(f"{self._runtime.lease.session}/{sensor}/{signal.name}/{reading.at}", event, text)

    async def _wake_if_waiting(self, sensor: str, changed_names: frozenset[str], at: int) -> None:
        """Wake a session that waits for one of these fields, or for this sensor."""
        candidates = changed_names | {sensor} if changed_names else changed_names
        names = sorted(candidates & self._waits_for)
        for name in names[:1]:
            self._waits_for = frozenset()
            event = WakePosted(cause="signal", origin="sensor", sender=sensor, name=name)
            await self._runtime.post(f"{self._runtime.lease.session}/{sensor}/{name}/{at}", event, "")

    async def _wake_for_missed(self) -> None:
        """Wake a session that went to sleep waiting for a field or signal that had just changed or fired."""
        previous = HotStateSnapshot.from_bytes(self._loop.hot) if self._loop.hot else None
        changed_names = frozenset(
            change.name for change in list_changed_fields(previous, self._hot_view.hot.make_snapshot())
        )
        for name in sorted((changed_names | await self._find_fired()) & self._waits_for)[:1]:
            event = WakePosted(cause="signal", origin="sensor", sender=name, name=name)
            key = f"{self._runtime.lease.session}/missed/{name}/{self._loop.turn.number}_{self._loop.turn.skip_count}"
            await self._runtime.post(key, event, "")

    async def _find_fired(self) -> frozenset[str]:
        """Return the signals that fired since the start of the last turn, while the session was awake."""
        inbox = await self._runtime.inbox(self._loop.turn.inbox_seen) if self._waits_for else ()
        wakes = [stored.event for stored in inbox if isinstance(stored.event, WakePosted)]
        return frozenset(event.name for event in wakes if event.cause == "signal" and not event.wakes)

    async def _record_health(self, report: HealthReport) -> None:
        """Record that a sensor fails or has recovered."""
        sentence = shorten(self._runtime.redact(report.sentence), MAX_RECORDED_ERROR_LENGTH)
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
    """Redact every text in a JSON value. One check of the encoded value skips values without a secret."""
    try:
        value_json = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return _redact_texts(value, redact)
    # A secret that JSON escapes contains a backslash.
    return value if "\\" not in value_json and redact(value_json) == value_json else _redact_texts(value, redact)


def _redact_texts(value: Any, redact: Callable[[str], str]) -> Any:
    match value:
        case str():
            return redact(value)
        case list():
            return [_redact_texts(item, redact) for item in cast("list[Any]", value)]
        case dict():
            return {
                redact(str(key)): _redact_texts(item, redact) for key, item in cast("dict[Any, Any]", value).items()
            }
        case _:
            return value
