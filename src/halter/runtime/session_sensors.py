"""The sensors of a live session, their signals, and what they have seen."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.autonomy.hot_state import HotState, parse_looks, parse_source_text
from halter.autonomy.resident import SupervisedSensor, redact_json
from halter.autonomy.signals import Score, ScoringFailure, Signals
from halter.config.sections import compile_signals
from halter.core import tools
from halter.core.clock import SECOND, Clock
from halter.core.ports import Query
from halter.core.rows import SavedHotState, SessionRow
from halter.core.tools import HealthReport, Reading, SensorFailed, Tool, substitute_secrets
from halter.guard.call_answer import Answer
from halter.guard.prepare import Call
from halter.guard.request import AnsweredRequest, ModelRequest
from halter.loop.prompt import ScoreAnswer, make_question_prompt, read_form_answer
from halter.loop.session_runtime import SessionRuntime
from halter.runtime.agent_runtime import AgentRuntime
from halter.spec.sensors import AnySensor, FilesSensor, ModelSignal, PollSensor, StreamSensor, ToolSource, UrlSource


async def _load_looks(agent: AgentRuntime, row: SessionRow) -> Mapping[str, Any]:
    """Return what the agent's sensors have seen: the looks of this session, or of the newest one that has any."""
    params = {"agent": agent.name, "kind": "autonomous", "limit": MAX_SESSIONS_SEARCHED}
    rows = await agent.store.ask(Query("sessions_of", SessionRow, params))
    for session in dict.fromkeys((row.session, *(each.session for each in rows))):
        for snapshot in await agent.store.ask(Query("snapshot", SavedHotState, {"session": session})):
            if looks := parse_looks(snapshot.data):
                return looks
    return {}


SIGNAL_TIMEOUT = 30 * SECOND


MAX_SESSIONS_SEARCHED: Final = 10
"""Number of an agent's newest sessions that are searched for what its sensors have seen."""


PollSource = Callable[[], Awaitable[Any]]


def make_fetch_tools(agent: AgentRuntime) -> Mapping[str, Tool]:
    """Make the tools with which sensors poll URLs. They are not offered to the model."""
    from halter.sensors.poll import Fetch

    fetch_tools = [
        Fetch(sensor.name, sensor.source, sensor.timeout)
        for sensor in agent.definition.pacing.sensors
        if isinstance(sensor.source, UrlSource)
    ]
    return {fetch.spec.name: fetch for fetch in fetch_tools}


class SessionSensors:
    """A factory of a session's sensors and their signals."""

    def __init__(self, context: AgentRuntime, runtime: SessionRuntime, folder: Path, hot: HotState) -> None:
        self._context = context
        self._runtime = runtime
        self._folder = folder
        self._hot = hot
        self._clock: Clock = context.app.clock
        self._rng: random.Random = context.rng

    async def load_looks(self, row: SessionRow) -> None:
        """Load what the agent's sensors have seen, in this session or an earlier one.

        A sensor without a look takes its first one now, before the session works: what comes from now on is news.
        """
        looks = self._hot.looks
        looks.update(await _load_looks(self._context, row))
        sensors = [each for each in self._context.definition.pacing.sensors if isinstance(each, FilesSensor)]
        missing = [sensor for sensor in sensors if sensor.name not in looks]
        if missing:
            from halter.sensors.files import read_first_look

            for sensor in missing:
                look = await asyncio.to_thread(read_first_look, sensor, self._folder)
                if look is not None:
                    looks[sensor.name] = redact_json(look, self._runtime.redact)
            await self._runtime.save_snapshot(self._hot.snapshot())

    def signals(self, sensor: AnySensor) -> Signals:
        async def judge(signal: ModelSignal, value: Any) -> Score | ScoringFailure:
            return await self._score(sensor.name, signal, value)

        return Signals(sensor.signals, compile_signals(sensor), judge)

    def runs(
        self,
        sensor: AnySensor,
        on_reading: Callable[[Reading], Awaitable[None]],
        on_health: Callable[[HealthReport], Awaitable[None]],
    ) -> SupervisedSensor:
        return SupervisedSensor(self._make_sensor(sensor), self._clock, self._rng, on_reading, on_health)

    def _make_sensor(self, sensor: AnySensor) -> tools.Sensor:
        match sensor:
            case PollSensor():
                from halter.sensors.poll import make_poll_sensor

                return make_poll_sensor(sensor, self._make_poll(sensor), self._clock, self._rng)
            case FilesSensor():
                from halter.sensors.files import make_watch_sensor

                look = self._hot.looks.get(sensor.name)
                return make_watch_sensor(sensor, self._folder, self._clock, self._context.is_refused, look)
            case StreamSensor():
                from halter.sensors.stream import make_stream_sensor

                return make_stream_sensor(sensor, self._headers(sensor), self._clock)

    def _make_poll(self, sensor: PollSensor) -> PollSource:
        """Return a function that polls a sensor's source through the guard."""
        match sensor.source:
            case ToolSource(tool=tool, arguments=values):
                arguments = msgspec.json.encode(dict(values))
            case UrlSource():
                tool, arguments = f"poll_{sensor.name}", b"{}"

        async def poll_once() -> Any:
            call = f"{self._runtime.lease.session}.p{sensor.name}_{self._clock.now()}"
            answer = await self._runtime.call_read_only(Call(call, tool, arguments, "sensor", timeout=sensor.timeout))
            if not isinstance(answer, Answer):
                raise SensorFailed(f"{tool} waits for an approval, or for budget that other effects hold.")
            if answer.outcome != "ok":
                raise SensorFailed(answer.text)
            return parse_source_text(answer.text)

        return poll_once

    def _headers(self, sensor: StreamSensor) -> Mapping[str, str]:
        agent = self._context

        def reveal(name: str) -> str:
            if name not in agent.policy.secrets or name not in agent.secrets.names():
                raise SensorFailed(f"The secret {name} of the sensor {sensor.name} is not set or not granted.")
            return agent.secrets.value(name)

        return substitute_secrets(dict(sensor.source.headers), reveal)

    async def _score(self, sensor: str, signal: ModelSignal, value: Any) -> Score | ScoringFailure:
        """Have a model score a reading. The answer form allows only a score."""
        request = ModelRequest(
            id=f"{self._runtime.lease.session}.s{sensor}_{signal.name}_{self._clock.now()}",
            prompt=make_question_prompt(signal.prompt, value, ScoreAnswer),
            purpose="signal",
            timeout=SIGNAL_TIMEOUT,
            optional=True,
        )
        answer = await self._runtime.request(request, self._context.models.get(signal.model))
        if not isinstance(answer, AnsweredRequest):
            return ScoringFailure(f"{signal.model} returned no score for {signal.name}.")
        score = read_form_answer(answer.reply, ScoreAnswer)
        if score is None:
            return ScoringFailure(f"{signal.model} returned no score for {signal.name} in the required form.")
        return Score(score.score, score.reason)
