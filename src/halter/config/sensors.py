"""What can be known to be wrong with a sensor before it has read anything."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.config.load import KeyPath, Wrong
from halter.config.playbook import texts
from halter.config.shape import dotted
from halter.core.pacing import HotField, Sensor, SensorType, Signal, Source, StreamFormat
from halter.core.spec import AgentSpec
from halter.core.tools import secret_names

_TAKES: Final[Mapping[SensorType, tuple[str, ...]]] = MappingProxyType(
    {
        "poll": ("tool", "params", "url", "headers"),
        "watch": ("path", "pattern"),
        "stream": ("url", "headers", "format"),
    }
)
"""The keys of a source that mean something to each type of sensor."""
_NEEDS: Final[Mapping[SensorType, str]] = MappingProxyType(
    {
        "poll": "a `tool` or a `url`",
        "watch": "a `path`, which is a file or a folder",
        "stream": "a `url` that begins with http://, https://, ws:// or wss://",
    }
)
_SPEAKS: Final[Mapping[str, StreamFormat]] = MappingProxyType(
    {"http": "sse", "https": "sse", "ws": "websocket", "wss": "websocket"}
)
_POLLED: Final = ("interval", "jitter")
_SCORES: Final = ("expression", "model", "detector")
_NOTHING: Final = Source()


def misread(sensor: Sensor, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Wrong]:
    """List what is wrong with a sensor, given all fields that there are."""
    yield from _of_source(sensor, (*path, "source"))
    yield from _of_times(sensor, path)
    yield from _of_updates(sensor, fields, (*path, "updates"))
    for index, signal in enumerate(sensor.signals):
        yield from _of_signal(signal, (*path, "signals", index))


def named_secrets(spec: AgentSpec, sensor: Sensor, path: KeyPath) -> Iterator[Wrong]:
    """List the secrets that a sensor names although the agent may not."""
    yield from unlisted(spec, (*path, "source", "headers"), sensor.source.headers)
    yield from unlisted(spec, (*path, "source", "params"), sensor.source.params)


def unlisted(spec: AgentSpec, path: KeyPath, value: Any) -> Iterator[Wrong]:
    """List the secrets that a value names although the agent may not."""
    for at, text in texts(dict(value), path):
        for name in sorted(secret_names(text.encode("utf-8", "surrogatepass")) - {*spec.secrets}):
            yield at, f"`{dotted(at)}` names the secret `{name}`, which is not among the agent's `secrets`; list it."


def _of_source(sensor: Sensor, path: KeyPath) -> Iterator[Wrong]:
    source, kind = sensor.source, sensor.type
    for key in Source.__struct_fields__:
        if key not in _TAKES[kind] and getattr(source, key) != getattr(_NOTHING, key):
            sentence = f"`{dotted((*path, key))}` means nothing to a sensor of type {kind}, which needs {_NEEDS[kind]}"
            yield (*path, key), f"{sentence}; remove it, or change `type`."
    match kind:
        case "poll":
            yield from _of_poll(source, path)
        case "watch":
            yield from _needs(kind, path, missing=source.path is UNSET)
        case "stream":
            yield from _needs(kind, path, missing=source.url is UNSET)
            yield from _of_format(source, path)


def _needs(kind: SensorType, path: KeyPath, *, missing: bool) -> Iterator[Wrong]:
    if missing:
        yield path, f"`{dotted(path)}` says not where to read: a sensor of type {kind} needs {_NEEDS[kind]}; write it."


def _of_poll(source: Source, path: KeyPath) -> Iterator[Wrong]:
    yield from _needs("poll", path, missing=source.tool is UNSET and source.url is UNSET)
    if source.tool is not UNSET and source.url is not UNSET:
        yield (*path, "url"), f"`{dotted(path)}` has both a `tool` and a `url`; keep one of them."
    if source.params and source.tool is UNSET:
        yield (*path, "params"), f"`{dotted((*path, 'params'))}` is for a `tool`; write it into the address after a ?."
    if source.headers and source.url is UNSET:
        yield (*path, "headers"), f"`{dotted((*path, 'headers'))}` is for a `url`, which is missing; remove it."
    if source.url is not UNSET and _SPEAKS[urlsplit(source.url).scheme] == "websocket":
        sentence = f"`{dotted((*path, 'url'))}` is a WebSocket, which cannot be polled"
        yield (*path, "url"), f"{sentence}; write `type: stream`, or an address with http:// or https://."


def _of_format(source: Source, path: KeyPath) -> Iterator[Wrong]:
    if source.url is UNSET or source.format is UNSET:
        return
    scheme = urlsplit(source.url).scheme
    if source.format != _SPEAKS[scheme]:
        sentence = f"`{dotted((*path, 'format'))}` is {source.format}, but an address with {scheme}:// speaks"
        yield (*path, "format"), f"{sentence} {_SPEAKS[scheme]}; remove it, or change the address."


def _of_times(sensor: Sensor, path: KeyPath) -> Iterator[Wrong]:
    for key in ("interval", "timeout"):
        if not getattr(sensor, key):
            there = dotted((*path, key))
            yield (*path, key), f"`{there}` is 0, which leaves no time for anything; write a duration, as in 5s."
    if sensor.type == "poll":
        return
    usual = Sensor(name=sensor.name, type=sensor.type, source=sensor.source)
    for key in _POLLED:
        if getattr(sensor, key) != getattr(usual, key):
            sentence = f"`{dotted((*path, key))}` is for a sensor of type poll, and this is a {sensor.type}"
            yield (*path, key), f"{sentence}; remove it."


def _of_updates(sensor: Sensor, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Wrong]:
    seen: set[str] = set()
    for index, update in enumerate(sensor.updates):
        at = (*path, index)
        if update.append and fields[update.field].type != "array":
            sentence = f"`{dotted((*at, 'append'))}` adds to an array, but the field `{update.field}` is none"
            remedy = f"under `hot_state.fields`, write {update.field}: {{type: array, max_items: 20}}"
            yield (*at, "append"), f"{sentence}; {remedy}."
        if update.field in seen and not update.append:
            yield (*at, "field"), f"`{dotted((*at, 'field'))}` is `{update.field}` again; write each field once."
        seen.add(update.field)


def _of_signal(signal: Signal, path: KeyPath) -> Iterator[Wrong]:
    said = [key for key in _SCORES if getattr(signal, key) is not UNSET]
    there, ways = dotted(path), "an `expression`, a `model` or a `detector`"
    if not said:
        yield path, f"`{there}` has nothing that gives a score; write {ways}."
    for key in said[1:]:
        yield (*path, key), f"`{there}` has both `{said[0]}` and `{key}`; a score comes from one of them: keep one."
    if signal.model is not UNSET and not signal.prompt.strip():
        yield path, f"`{there}` has a `model` but no `prompt`; write what the model is to judge."
    if signal.model is UNSET and signal.prompt:
        yield (*path, "prompt"), f"`{dotted((*path, 'prompt'))}` is for a `model`, which is missing; write it."
    yield from _of_threshold(signal, (*path, "threshold"))


def _of_threshold(signal: Signal, path: KeyPath) -> Iterator[Wrong]:
    """A threshold that is never reached, or always, is a slip of the pen."""
    if signal.threshold is UNSET:
        return
    if signal.model is not UNSET and not 0 < signal.threshold <= 1:
        yield path, f"`{dotted(path)}` is {signal.threshold:g}, but a model scores from 0 to 1; write 0.8, or the like."
    if signal.detector is not UNSET and signal.threshold <= 0:
        sentence = f"`{dotted(path)}` is {signal.threshold:g}, which every number reaches"
        yield path, f"{sentence}; write how many deviations are too many, as in 4."
