"""The keys of sensors: where their readings come from, which fields they write, and which signals they fire."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE, SECOND
from halter.spec.forms import (
    BY_KEY,
    Address,
    Duration,
    FilePattern,
    HeaderName,
    HeaderValue,
    Name,
    NonEmptyText,
    OneModel,
    PathInto,
    Spec,
    UnusableKey,
    within,
)

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


_FIRES_AT: Final = "Score at which the signal fires; by default 0.5, or 4 for a detector."


class Signal(Spec, frozen=True, kw_only=True, tag_field=BY_KEY):
    """A score of a reading. It fires at `threshold` and above."""

    NO_KIND: ClassVar[str] = "has no score; write an `expression`, a `model` or a `detector`."
    FOREIGN: ClassVar[str] = "applies to a `{owner}`, which is missing; write it."
    DEFAULT_THRESHOLD: ClassVar[float] = 0.5

    name: Annotated[Name, Meta(description="Name of the signal.")]
    threshold: Annotated[float, Meta(description=_FIRES_AT)] | UnsetType = UNSET
    cooldown: Annotated[Duration, Meta(description="Time after firing in which the signal does not fire again.")] = (
        MINUTE
    )
    notify: Annotated[bool, Meta(description="Begin the next turn with an alert.")] = False
    filter: Annotated[bool, Meta(description="Write fields only when the signal fires.")] = False

    @property
    def fires_at(self) -> float:
        return self.DEFAULT_THRESHOLD if self.threshold is UNSET else self.threshold


class ExpressionSignal(Signal, frozen=True, kw_only=True, tag="expression"):
    """A signal whose score is an expression."""

    expression: Annotated[
        NonEmptyText, Meta(description="A CEL expression over `value` and `hot`: true, false or a number.")
    ]


class ModelSignal(Signal, frozen=True, kw_only=True, tag="model"):
    """A signal whose score a small model gives."""

    MISSING: ClassVar[str] = "has a `model` but no `{key}`; write what the model should judge."

    model: Annotated[OneModel, Meta(description="A small model that gives a score from 0 to 1.")]
    prompt: Annotated[str, Meta(description="Instructions for that model.")]
    threshold: (
        Annotated[
            float,
            Meta(
                description=_FIRES_AT,
                extra=within(0, 1, "is {value}, but a model scores from 0 to 1; write a number in between, as in 0.8."),
            ),
        ]
        | UnsetType
    ) = UNSET

    def require_fit(self) -> None:
        if not self.prompt.strip():
            raise UnusableKey(self.MISSING.format(key="prompt"))


class DetectorSignal(Signal, frozen=True, kw_only=True, tag="detector"):
    """A signal whose score a detector gives."""

    DEFAULT_THRESHOLD: ClassVar[float] = 4.0

    detector: Annotated[Detector, Meta(description="A built-in detector of unusual numbers.")]
    threshold: (
        Annotated[
            float,
            Meta(
                description=_FIRES_AT,
                extra=within(
                    0,
                    None,
                    "is {value}, which every number reaches; write a number of standard deviations, as in 4.",
                ),
            ),
        ]
        | UnsetType
    ) = UNSET


AnySignal = ExpressionSignal | ModelSignal | DetectorSignal


_URL: Final = "URL: http(s):// for polling or server-sent events, ws(s):// for WebSocket."


class SensorSource(Spec, frozen=True, kw_only=True, tag_field=BY_KEY):
    """The source of a sensor."""

    HIDDEN: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"params": "arguments"})


class PollSource(SensorSource, frozen=True, kw_only=True):
    """A source that is read at an interval."""

    NO_KIND: ClassVar[str] = "is incomplete: a sensor of type poll needs a `tool` or a `url`; write it."
    FOREIGN: ClassVar[str] = (
        "does not apply to a sensor of type poll, which needs a `tool` or a `url`; remove it, or change `type`."
    )


class ToolSource(PollSource, frozen=True, kw_only=True, tag="tool"):
    """A tool that reads."""

    FOREIGN_KEYS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"headers": "applies to a `url`, which is missing; remove it."}
    )

    tool: Annotated[NonEmptyText, Meta(description="Read-only tool to call.")]
    arguments: Annotated[Mapping[str, Any], Meta(description="Arguments of `tool`.")] = {}


class UrlSource(PollSource, frozen=True, kw_only=True, tag="url"):
    """A URL that is fetched."""

    FOREIGN_KEYS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"arguments": "applies to a `tool`; for a `url`, write it into the query."}
    )

    url: Annotated[Address, Meta(description=_URL)]
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of the request; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}

    def require_fit(self) -> None:
        if not self.url.startswith("http"):
            sentence = (
                "is a WebSocket, which cannot be polled; write `type: stream`, or a URL with http:// or https://."
            )
            raise UnusableKey(sentence, "url")


class FilesSource(SensorSource, frozen=True, kw_only=True, tag="path"):
    """A file, or the files of a folder."""

    MISSING: ClassVar[str] = "is incomplete: a sensor of type files needs a `path` to a file or a folder; write it."
    FOREIGN: ClassVar[str] = (
        "does not apply to a sensor of type files, which needs a `path` to a file or a folder; remove it, or "
        "change `type`."
    )

    path: Annotated[NonEmptyText, Meta(description="File or folder, relative to the agent's folder.")]
    pattern: Annotated[FilePattern, Meta(description="Pattern of the files in the folder, as in `*.log`.")] = "*"


_STREAM_NEEDS: Final = "a `url` that begins with http://, https://, ws:// or wss://"


class StreamSource(SensorSource, frozen=True, kw_only=True, tag="url"):
    """A URL whose events or messages are listened to."""

    MISSING: ClassVar[str] = f"is incomplete: a sensor of type stream needs {_STREAM_NEEDS}; write it."
    FOREIGN: ClassVar[str] = (
        f"does not apply to a sensor of type stream, which needs {_STREAM_NEEDS}; remove it, or change `type`."
    )

    url: Annotated[Address, Meta(description=_URL)]
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of the request; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    format: (
        Annotated[StreamFormat, Meta(description="Protocol of a stream; by default derived from the URL.")] | UnsetType
    ) = UNSET

    def require_fit(self) -> None:
        scheme, protocol = self.url.partition(":")[0], self.protocol
        if self.format not in (UNSET, protocol):
            sentence = f"is {self.format}, but a URL with {scheme}:// uses {protocol}; remove it, or change the URL."
            raise UnusableKey(sentence, "format")

    @property
    def protocol(self) -> StreamFormat:
        return "websocket" if self.url.lower().startswith("ws") else "sse"


class SensorSpec(Spec, frozen=True, kw_only=True, tag_field="type"):
    """A background reader that updates the hot state."""

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({"type": {"watch": "files"}})
    FOREIGN: ClassVar[str] = "applies to sensors of type {owner}, but this one is of type {kind}; remove it."
    KIND: ClassVar[str] = "`poll` reads at an interval, `files` follows files, `stream` listens."

    name: Annotated[Name, Meta(description="Name of the sensor.")]
    timeout: Annotated[
        Duration,
        Meta(
            description="Time limit for one answer, or for opening a stream.",
            extra=within(0, None, "is {value}; write a duration, as in 5s."),
        ),
    ] = 30 * SECOND
    updates: Annotated[
        tuple[Update, ...], Meta(description="Fields to write; by default the field with the sensor's name.")
    ] = ()
    signals: Annotated[tuple[AnySignal, ...], Meta(description="Signals on its readings.")] = ()

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


class PollSensor(SensorSpec, frozen=True, kw_only=True, tag="poll"):
    """A sensor that reads at an interval."""

    source: Annotated[ToolSource | UrlSource, Meta(description="Source of the readings.")]
    interval: Annotated[
        Duration,
        Meta(description="Time between two polls.", extra=within(0, None, "is {value}; write a duration, as in 5s.")),
    ] = MINUTE
    jitter: Annotated[float, Meta(ge=0, le=1, description="Maximum random delay, as a fraction of the interval.")] = 0.1


class FilesSensor(SensorSpec, frozen=True, kw_only=True, tag="files"):
    """A sensor that follows files."""

    source: Annotated[FilesSource, Meta(description="Source of the readings.")]


class StreamSensor(SensorSpec, frozen=True, kw_only=True, tag="stream"):
    """A sensor that listens."""

    source: Annotated[StreamSource, Meta(description="Source of the readings.")]


AnySensor = PollSensor | FilesSensor | StreamSensor
