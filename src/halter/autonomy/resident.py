"""A session whose sensors run in this process: they read while it sleeps, and wake it.

What a sensor finds is in memory; that it matters is in the journal. A signal becomes an event in the session's inbox
before anybody acts on it, so an alert outlives the process that saw it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import msgspec

from halter.autonomy.awareness import Awareness
from halter.autonomy.hotstate import Changed, Refused, Seen, changes
from halter.autonomy.sensing import Sensing
from halter.autonomy.signals import Scored, Signals, sentence_of
from halter.brain.loop import Loop
from halter.brain.session_runtime import SessionRuntime
from halter.brain.values import Found, path_value
from halter.core.errors import LeaseLost
from halter.core.events import SensorChanged, WakePosted
from halter.core.pacing import Sensor, Update
from halter.core.sensing import HealthReport, Reading, SensorFailed
from halter.core.text import shorten
from halter.work.conversation import Came, Conversation

LONGEST_SENTENCE: Final = 500
"""So much is kept of what a sensor has to say about its failure."""

Pulse = Callable[[str, Mapping[str, Any]], None]
"""Somebody who wants to know what happens at this moment, and is told a name and some values."""


class Runs(Protocol):
    """Makes whatever keeps a sensor running, given who takes its readings and who hears how it does."""

    def __call__(self, sensor: Sensor, take: Any, changed: Any) -> Sensing: ...


class Watched(msgspec.Struct, frozen=True):
    """A sensor, and the signals on what it reads."""

    sensor: Sensor
    signals: Signals


class Resident:
    """One session that stays in this process while it sleeps."""

    def __init__(
        self,
        conversation: Conversation,
        running: SessionRuntime,
        loop: Loop,
        aware: Awareness,
        watched: Sequence[Watched],
        runs: Runs,
        pulse: Pulse = lambda _, __: None,
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

    async def live(self, resting: Came | None = None) -> Came:
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

    async def _reads(self, watched: Watched) -> None:
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

    async def _living(self, resting: Came | None) -> Came:
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

    def _sensing(self, watched: Watched) -> Sensing:
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

    async def _take(self, watched: Watched, reading: Reading) -> None:
        """Take a reading in: score it, keep what of it is wanted, and tell what fired."""
        reading = Reading(redacted(reading.value, self._running.redacted), reading.at)
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

    def _kept(self, sensor: Sensor, reading: Reading) -> frozenset[str]:
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
        found = path_value(reading.value, update.path)
        if not isinstance(found, Found):
            return found.sentence
        put = self._aware.hot.put(update.field, found.value, reading.at, by=sensor, append=update.append)
        if isinstance(put, Changed):
            moved.add(update.field)
        return put.sentence if isinstance(put, Refused) else ""

    async def _tell(self, sensor: str, scored: Scored, reading: Reading) -> None:
        """Put a signal that fired into the session's inbox: as an alert, if it is to be one."""
        signal = scored.signal
        text = sentence_of(sensor, scored, reading) if signal.notify else ""
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
        before = Seen.from_bytes(self._loop.hot) if self._loop.hot else None
        moved = frozenset(change.name for change in changes(before, self._aware.hot.seen()))
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


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """Take secrets out of every text of a JSON value. Most hold none, which one look at all of it tells."""
    try:
        whole = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return _redacted(value, redact)
    # A secret that JSON spells otherwise is known by its backslash.
    return value if "\\" not in whole and redact(whole) == whole else _redacted(value, redact)


def _redacted(value: Any, redact: Callable[[str], str]) -> Any:
    match value:
        case str():
            return redact(value)
        case list():
            return [_redacted(each, redact) for each in cast("list[Any]", value)]
        case dict():
            return {redact(str(key)): _redacted(each, redact) for key, each in cast("dict[Any, Any]", value).items()}
        case _:
            return value
