"""The keys of sensors: where their readings come from, which fields they write, and which signals they fire."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE, SECOND
from halter.spec.forms import Address, Duration, HeaderName, HeaderValue, Name, NonEmptyText, OneModel, PathInto, Spec

SensorType = Literal["poll", "files", "stream"]
StreamFormat = Literal["sse", "websocket"]


class Update(Spec, frozen=True):
    """The field that receives a part of a reading."""

    field: Annotated[Name, Meta(description="Field to write.")]
    path: Annotated[
        PathInto,
        Meta(
            description="Path of the value in the reading, as in `quotes.AAPL` or `items[0]`. Default: the whole "
            "reading; if several updates have no path, the member with the field's name."
        ),
    ] = ""
    append: Annotated[bool, Meta(description="Append the value to an array.")] = False


class Detector(Spec, frozen=True):
    """Detects unusual numbers. The score is the distance from the mean, in standard deviations."""

    path: Annotated[PathInto, Meta(description="Path of the number in the reading.")] = ""
    half_life: Annotated[
        float, Meta(ge=1, description="Number of readings after which the weight of a reading is halved.")
    ] = 20
    warmup: Annotated[int, Meta(ge=2, description="Number of readings to learn from before the first score.")] = 20


class Signal(Spec, frozen=True):
    """A score of a reading, given by `expression`, `model` or `detector`. It fires at `threshold` and above."""

    name: Annotated[Name, Meta(description="Name of the signal.")]
    expression: (
        Annotated[NonEmptyText, Meta(description="A CEL expression over `value` and `hot`: true, false or a number.")]
        | UnsetType
    ) = UNSET
    model: Annotated[OneModel, Meta(description="A small model that gives a score from 0 to 1.")] | UnsetType = UNSET
    prompt: Annotated[str, Meta(description="Instructions for that model.")] = ""
    detector: Annotated[Detector, Meta(description="A built-in detector of unusual numbers.")] | UnsetType = UNSET
    threshold: (
        Annotated[float, Meta(description="Score at which the signal fires; by default 0.5, or 4 for a detector.")]
        | UnsetType
    ) = UNSET
    cooldown: Annotated[Duration, Meta(description="Time after firing in which the signal does not fire again.")] = (
        MINUTE
    )
    notify: Annotated[bool, Meta(description="Begin the next turn with an alert.")] = False
    filter: Annotated[bool, Meta(description="Write fields only when the signal fires.")] = False


class SensorSource(Spec, frozen=True):
    """The source of a sensor: a tool, a URL, or a file or folder."""

    HIDDEN: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"params": "arguments"})

    tool: Annotated[NonEmptyText, Meta(description="Read-only tool to call.")] | UnsetType = UNSET
    arguments: Annotated[Mapping[str, Any], Meta(description="Arguments of `tool`.")] = {}
    url: (
        Annotated[
            Address, Meta(description="URL: http(s):// for polling or server-sent events, ws(s):// for WebSocket.")
        ]
        | UnsetType
    ) = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of the request; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    format: (
        Annotated[StreamFormat, Meta(description="Protocol of a stream; by default derived from the URL.")] | UnsetType
    ) = UNSET
    path: Annotated[NonEmptyText, Meta(description="File or folder, relative to the agent's folder.")] | UnsetType = (
        UNSET
    )
    pattern: Annotated[NonEmptyText, Meta(description="Pattern of the files in the folder, as in `*.log`.")] = "*"


class SensorSpec(Spec, frozen=True):
    """A background reader that updates the hot state."""

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({"type": {"watch": "files"}})

    name: Annotated[Name, Meta(description="Name of the sensor.")]
    type: Annotated[
        SensorType, Meta(description="`poll` reads at an interval, `files` follows files, `stream` listens.")
    ]
    source: Annotated[SensorSource, Meta(description="Source of the readings.")]
    interval: Annotated[Duration, Meta(description="Time between two polls.")] = MINUTE
    jitter: Annotated[float, Meta(ge=0, le=1, description="Maximum random delay, as a fraction of the interval.")] = 0.1
    timeout: Annotated[Duration, Meta(description="Time limit for one answer, or for opening a stream.")] = 30 * SECOND
    updates: Annotated[
        tuple[Update, ...], Meta(description="Fields to write; by default the field with the sensor's name.")
    ] = ()
    signals: Annotated[tuple[Signal, ...], Meta(description="Signals on its readings.")] = ()

    def list_updates(self) -> tuple[Update, ...]:
        """Return the updates with their paths.

        One update without a path gets the whole reading. If several replace a field, each gets the member of that name.
        """
        pathless_count = sum(not update.path and not update.append for update in self.updates)
        if pathless_count <= 1:
            return self.updates or (Update(field=self.name),)
        return tuple(
            update if update.path or update.append else msgspec.structs.replace(update, path=update.field)
            for update in self.updates
        )
