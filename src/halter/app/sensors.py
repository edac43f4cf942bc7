"""The sensors of one session: what its agent's file names, made, and looking through the guard."""

import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from halter.app.agent_context import AgentContext
from halter.autonomy.pace import value_of
from halter.autonomy.sensing import Sensing
from halter.autonomy.signals import Score, Signals, Unscored
from halter.brain.answers import ScoreAnswer, answered, asks
from halter.brain.session_runtime import SessionRuntime
from halter.config.pacing import compiled_signals
from halter.core import sensing
from halter.core.clock import SECOND, Clock
from halter.core.pacing import Sensor, Signal
from halter.core.sensing import HealthReport, Reading, SensorFailed
from halter.core.tools import Tool, with_secrets
from halter.guard.ask import Call
from halter.guard.chokepoint import Answer
from halter.guard.request import Answered, Request

SIGNAL_TIMEOUT = 30 * SECOND

Look = Callable[[], Awaitable[Any]]


def fetchers(speaking: AgentContext) -> Mapping[str, Tool]:
    """Make the tools by which sensors poll addresses. No model is told of them."""
    from halter.sensors.fetch import Fetch

    polled = [
        sensor for sensor in speaking.agent.pacing.sensors if sensor.type == "poll" and sensor.source.url is not UNSET
    ]
    made = [Fetch(sensor) for sensor in polled]
    return {fetch.spec.name: fetch for fetch in made}


class Sensors:
    """Makes whatever a session's sensors need."""

    def __init__(self, speaking: AgentContext, running: SessionRuntime, folder: Path) -> None:
        self._speaking = speaking
        self._running = running
        self._folder = folder
        self._clock: Clock = speaking.app.clock
        self._chance: random.Random = speaking.chance

    def signals(self, sensor: Sensor) -> Signals:
        """Make the signals on what a sensor reads."""

        async def judge(signal: Signal, value: Any) -> Score | Unscored:
            return await self._judged(sensor.name, signal, value)

        return Signals(sensor.signals, compiled_signals(sensor), judge)

    def runs(
        self,
        sensor: Sensor,
        take: Callable[[Reading], Awaitable[None]],
        changed: Callable[[HealthReport], Awaitable[None]],
    ) -> Sensing:
        """Make what keeps a sensor running."""
        return Sensing(self._made(sensor), self._clock, self._chance, take, changed)

    def _made(self, sensor: Sensor) -> sensing.Sensor:
        match sensor.type:
            case "poll":
                from halter.sensors.poll import poll

                return poll(sensor, self._look(sensor), self._clock, self._chance)
            case "watch":
                from halter.sensors.watch import watch

                return watch(sensor, self._folder, self._clock, self._speaking.agent.refuses)
            case "stream":
                from halter.sensors.stream import stream

                return stream(sensor, self._headers(sensor), self._clock)

    def _look(self, sensor: Sensor) -> Look:
        """Poll through the guard, as every call goes."""
        source = sensor.source
        tool = f"poll_{sensor.name}" if source.tool is UNSET else source.tool
        arguments = b"{}" if source.tool is UNSET else msgspec.json.encode(dict(source.params))

        async def look() -> Any:
            call = f"{self._running.lease.session}.p{sensor.name}_{self._clock.now()}"
            answer = await self._running.look(Call(call, tool, arguments, "sensor", at_most=sensor.timeout))
            if not isinstance(answer, Answer):
                raise SensorFailed(f"{tool} needs a person, or money that others hold.")
            if answer.outcome != "ok":
                raise SensorFailed(answer.text)
            return value_of(answer.text)

        return look

    def _headers(self, sensor: Sensor) -> Mapping[str, str]:
        """Fill in the secrets that the agent may use."""
        agent = self._speaking.agent

        def reveal(name: str) -> str:
            if name not in agent.policy.secrets or name not in agent.secrets.names():
                raise SensorFailed(f"The secret {name} of the sensor {sensor.name} is not set, or not granted.")
            return agent.secrets.value(name)

        return with_secrets(dict(sensor.source.headers), reveal)

    async def _judged(self, sensor: str, signal: Signal, value: Any) -> Score | Unscored:
        """Let a model score a reading, in a form that can be nothing else than a score."""
        if signal.model is UNSET:
            return Unscored(f"The signal {signal.name} has no model.")
        request = Request(
            id=f"{self._running.lease.session}.s{sensor}_{signal.name}_{self._clock.now()}",
            prompt=asks(signal.prompt, value, ScoreAnswer),
            purpose="signal",
            timeout=SIGNAL_TIMEOUT,
            optional=True,
        )
        answer = await self._running.request(request, self._speaking.models.named(signal.model))
        if not isinstance(answer, Answered):
            return Unscored(f"{signal.model} gave no score for {signal.name}.")
        score = answered(answer.reply, ScoreAnswer)
        if score is None:
            return Unscored(f"{signal.model} gave no score for {signal.name} in the form that it was asked for.")
        return Score(score.score, score.reason)
