"""How an agent paces itself: what `autonomy`, `hot_state` and `sensors` of its file say, as frozen values.

A field is a key of the file, under the same name, and its default is the one that holds. Times are microseconds here,
and seconds or `30m` in the file.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import DAY, MINUTE, SECOND
from halter.core.written import (
    Address,
    DayTime,
    Duration,
    HeaderName,
    HeaderValue,
    Name,
    OneModel,
    PathInto,
    Spec,
    Zone,
)

FieldType = Literal["any", "object", "array", "string", "number", "integer", "boolean"]
SensorType = Literal["poll", "watch", "stream"]
StreamFormat = Literal["sse", "websocket"]

ALWAYS: Final = ("message", "decision")
"""What wakes a session whatever it says, and may be named all the same."""

Text = Annotated[str, Meta(min_length=1)]


class Gate(Spec, frozen=True):
    """The cheap check before a full turn. All that is said must hold, in this order; without any of it, it is open."""

    on: Annotated[
        Literal["change", "always"],
        Meta(description="`change` skips a turn when nothing has changed since the last one; `always` asks on."),
    ] = "change"
    expression: Annotated[str, Meta(description="A CEL expression over `hot`, `before`, `changed` and `skips`.")] = ""
    model: Annotated[OneModel, Meta(description="A small model that is shown what changed.")] | UnsetType = UNSET
    prompt: Annotated[str, Meta(description="What that model is to look for.")] = ""
    max_skips: Annotated[int, Meta(ge=0, description="After so many skips in a row a turn is taken; 0 for never.")] = 0


class ActiveHours(Spec, frozen=True):
    """When an agent may be awake. An end before the start is on the next day."""

    start: Annotated[DayTime, Meta(description="When it begins, as in `08:00`.")]
    end: Annotated[DayTime, Meta(description="When it ends, as in `23:00`.")]
    timezone: Annotated[Zone, Meta(description="Whose clock that is; the fleet's, if not given.")] | UnsetType = UNSET


class Autonomy(Spec, frozen=True):
    """How an agent runs by itself, and the guardrails that it cannot move."""

    enabled: Annotated[bool, Meta(description="Whether the agent runs by itself.")] = False
    prompt: Annotated[str, Meta(description="What each turn begins with, if not the usual words.")] = ""
    min_sleep: Annotated[Duration, Meta(description="The shortest sleep.")] = SECOND
    max_sleep: Annotated[Duration, Meta(description="The longest sleep.")] = DAY
    max_consecutive_turns: Annotated[
        int, Meta(ge=1, description="So many turns without a sleep; then it is put to sleep.")
    ] = 50
    token_budget_per_hour: Annotated[
        int, Meta(ge=0, description="Tokens in an hour, cached ones not counted; 0 for no budget.")
    ] = 100_000
    max_actions_per_minute: Annotated[
        int, Meta(ge=0, description="Calls with side effects in any minute; 0 for no limit.")
    ] = 10
    idle_timeout: Annotated[
        Duration, Meta(description="Awake for so long without a call, a change or a message, it ends; 0 for never.")
    ] = 10 * MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="When it may be awake.")] | UnsetType = UNSET
    gate: Annotated[Gate, Meta(description="The cheap check before a full turn.")] | UnsetType = UNSET
    precheck_model: Annotated[OneModel, Meta(description="Another place for `gate.model`.")] | UnsetType = UNSET


class HotField(Spec, frozen=True):
    """One fact that the model sees every turn."""

    type: Annotated[FieldType, Meta(description="What its value must be.")] = "any"
    ttl: Annotated[Duration, Meta(description="After so long it is shown as stale.")] | UnsetType = UNSET
    refresh_tool: (
        Annotated[Text, Meta(description="A tool that only looks, whose result is the value.")] | UnsetType
    ) = UNSET
    refresh_params: Annotated[Mapping[str, Any], Meta(description="What that tool is given.")] = {}
    auto_refresh: Annotated[bool, Meta(description="Whether a stale value is refreshed before each turn.")] = False
    max_items: Annotated[int, Meta(ge=1, description="An array keeps the newest so many.")] | UnsetType = UNSET
    description: Annotated[str, Meta(description="What it is, in a few words for the model.")] = ""


class HotState(Spec, frozen=True):
    """The typed facts with ages that the model sees every turn."""

    fields: Annotated[Mapping[Name, HotField], Meta(description="The facts, by name.")] = {}


class Update(Spec, frozen=True):
    """Where a part of a reading goes."""

    field: Annotated[Name, Meta(description="The field that is written.")]
    path: Annotated[PathInto, Meta(description="The part of the reading, as in `quotes.AAPL` or `items[0]`.")] = ""
    append: Annotated[bool, Meta(description="Whether it is added to an array.")] = False


class Detector(Spec, frozen=True):
    """Finds numbers that are far from what they usually are: how many deviations away is the score."""

    path: Annotated[PathInto, Meta(description="The number in the reading.")] = ""
    half_life: Annotated[float, Meta(ge=1, description="After so many readings, one counts half.")] = 20
    warmup: Annotated[int, Meta(ge=2, description="So many readings are only learned from.")] = 20


class Signal(Spec, frozen=True):
    """A score on a reading; from `threshold` on it fires. One of `expression`, `model` or `detector` gives it."""

    name: Annotated[Name, Meta(description="The signal's name.")]
    expression: (
        Annotated[Text, Meta(description="A CEL expression over `value` and `hot`: true, false or a number.")]
        | UnsetType
    ) = UNSET
    model: Annotated[OneModel, Meta(description="A small model that gives a score from 0 to 1.")] | UnsetType = UNSET
    prompt: Annotated[str, Meta(description="What that model is to judge.")] = ""
    detector: Annotated[Detector, Meta(description="A built-in detector of unusual numbers.")] | UnsetType = UNSET
    threshold: (
        Annotated[float, Meta(description="From which score on it fires: 0.5, or 4 for a detector, if not given.")]
        | UnsetType
    ) = UNSET
    cooldown: Annotated[Duration, Meta(description="How long it is quiet after it fired.")] = MINUTE
    notify: Annotated[bool, Meta(description="Whether the next turn begins with an alert.")] = False
    filter: Annotated[bool, Meta(description="Whether fields are written only when it fires.")] = False


class Source(Spec, frozen=True):
    """Where a sensor reads: a tool, an address, or a file or folder."""

    HIDDEN: ClassVar[bool] = True

    tool: Annotated[Text, Meta(description="A tool that only looks.")] | UnsetType = UNSET
    params: Annotated[Mapping[str, Any], Meta(description="What that tool is given.")] = {}
    url: (
        Annotated[Address, Meta(description="An address: http(s):// to poll or for SSE, ws(s):// for WebSocket.")]
        | UnsetType
    ) = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of the request; a key is written `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    format: (
        Annotated[StreamFormat, Meta(description="What a stream speaks; told by its address, if not given.")]
        | UnsetType
    ) = UNSET
    path: Annotated[Text, Meta(description="A file or folder, seen from the agent's own.")] | UnsetType = UNSET
    pattern: Annotated[Text, Meta(description="Which files of a folder, as in `*.log`.")] = "*"


class Sensor(Spec, frozen=True):
    """A background reader that keeps hot state fresh."""

    name: Annotated[Name, Meta(description="The sensor's name.")]
    type: Annotated[SensorType, Meta(description="Whether it asks again and again, watches files, or listens.")]
    source: Annotated[Source, Meta(description="Where it reads.")]
    interval: Annotated[Duration, Meta(description="How often it asks.")] = MINUTE
    jitter: Annotated[float, Meta(ge=0, le=1, description="The part of the interval that chance may add.")] = 0.1
    timeout: Annotated[Duration, Meta(description="How long one answer, or the beginning of a stream, may take.")] = (
        30 * SECOND
    )
    updates: Annotated[tuple[Update, ...], Meta(description="The fields it writes; one of its own name, if none.")] = ()
    signals: Annotated[tuple[Signal, ...], Meta(description="Scores on what it reads.")] = ()

    def written(self) -> tuple[Update, ...]:
        """List where its readings go."""
        return self.updates or (Update(field=self.name),)


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, for one agent. Its gate and its zone are filled in."""

    autonomy: Autonomy = Autonomy()
    fields: Mapping[str, HotField] = {}
    """Every field, those that only a sensor names among them."""
    sensors: tuple[Sensor, ...] = ()

    def names(self) -> Iterator[str]:
        """List what a sleeper may be woken by: fields, sensors, signals, and what always wakes."""
        yield from self.fields
        for sensor in self.sensors:
            yield sensor.name
            yield from (signal.name for signal in sensor.signals)
        yield from ALWAYS

    def models(self) -> Iterator[str]:
        """List the models that are asked beside the one that thinks: the gate's, and those of signals."""
        gate = self.autonomy.gate
        if gate is not UNSET and gate.model is not UNSET:
            yield gate.model
        for sensor in self.sensors:
            yield from (signal.model for signal in sensor.signals if signal.model is not UNSET)
