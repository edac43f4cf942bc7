"""What `autonomy`, `hot_state` and `sensors` say: mistakes that can be known before anything runs, and expressions.

An unattended agent's sensor that never fires goes unnoticed, so every mistake is found when the file is read. What
depends on the agent's tools is checked once they are known.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.config.load import KeyPath, Wrong, showable
from halter.config.playbook import texts
from halter.config.shape import about, dotted, either
from halter.core.durations import shown_duration
from halter.core.errors import ConfigError
from halter.core.expressions import Expression, compiled
from halter.core.pacing import (
    ALWAYS,
    Autonomy,
    Gate,
    HotField,
    Pacing,
    Sensor,
    SensorType,
    Signal,
    Source,
    StreamFormat,
)
from halter.core.spec import AgentSpec
from halter.core.tools import secret_names

GATE_KNOWS: Final[Mapping[str, Any]] = MappingProxyType({"hot": {}, "before": {}, "changed": [], "skips": 0})
"""What an expression of the gate may ask for."""

Known = tuple[Mapping[str, Any], ...]

_READINGS: Final[tuple[Any, ...]] = ({}, "", [], 0, 0.0, False, "1970-01-01T00:00:00Z", "1s")
_SIGNAL_KNOWS: Final[Known] = tuple({"value": value, "hot": _READINGS[0]} for value in _READINGS)
"""What an expression of a signal may ask for, with each thing that a reading may be; most are mappings."""
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


def pacing_mistakes(spec: AgentSpec) -> Iterator[Wrong]:
    """List what is wrong with how an agent paces itself."""
    yield from _of_autonomy(spec.autonomy)
    for name, field in spec.hot_state.fields.items():
        yield from _of_field(field, ("hot_state", "fields", name))
        yield from unlisted(spec, ("hot_state", "fields", name, "refresh_params"), field.refresh_params)
    fields = all_fields(spec)
    for index, sensor in enumerate(spec.sensors):
        path, source = ("sensors", index), sensor.source
        yield from _of_sensor(sensor, fields, path)
        yield from unlisted(spec, (*path, "source", "headers"), source.headers)
        yield from unlisted(spec, (*path, "source", "params"), source.params)
    yield from _of_names(spec)


def all_fields(spec: AgentSpec) -> dict[str, HotField]:
    """Add the fields that only sensors name to those that are declared."""
    written = (update.field for sensor in spec.sensors for update in sensor.written())
    return dict(spec.hot_state.fields) | {name: HotField() for name in written if name not in spec.hot_state.fields}


def paced_models(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    """List the models of the gate and of signals, with the way to each."""
    gate = spec.autonomy.gate
    if gate is not UNSET and gate.model is not UNSET:
        yield ("autonomy", "gate", "model"), gate.model
    if spec.autonomy.precheck_model is not UNSET:
        yield ("autonomy", "precheck_model"), spec.autonomy.precheck_model
    for index, sensor in enumerate(spec.sensors):
        for at, signal in enumerate(sensor.signals):
            if signal.model is not UNSET:
                yield ("sensors", index, "signals", at, "model"), signal.model


def unwritten(pacing: Pacing) -> tuple[str, ...]:
    """Say which fields nothing writes: no mistake in an unfinished file, but worth a warning."""
    written = {update.field for sensor in pacing.sensors for update in sensor.written()}
    return tuple(
        f"Nothing writes the field `{name}`, so it will always be shown as not yet loaded: give it a `refresh_tool`, "
        "or let a sensor write it."
        for name, field in pacing.fields.items()
        if field.refresh_tool is UNSET and name not in written
    )


def unlisted(spec: AgentSpec, path: KeyPath, value: Any) -> Iterator[Wrong]:
    """List the secrets that a value names although the agent may not."""
    for at, text in texts(dict(value), path):
        for name in sorted(secret_names(text.encode("utf-8", "surrogatepass")) - {*spec.secrets}):
            yield about(at, f"names the secret `{name}`, which is not among the agent's `secrets`; list it.")


def compiled_gate(pacing: Pacing, place: str = "`autonomy.gate.expression`") -> Expression | None:
    """Compile the expression of the gate, if it has one; `place` is for the sentence of a ConfigError."""
    gate = pacing.autonomy.gate
    if gate is UNSET or not gate.expression:
        return None
    return _compiled(gate.expression, (GATE_KNOWS,), place, "the gate")


def compiled_signals(sensor: Sensor, where: Callable[[KeyPath], str] | None = None) -> Mapping[str, Expression]:
    """Compile the expressions of a sensor's signals, by their names; `where` names the place of a value of it."""
    return {
        signal.name: _compiled(
            signal.expression,
            _SIGNAL_KNOWS,
            where(("signals", index, "expression")) if where else f"The sensor {sensor.name}",
            "a signal",
        )
        for index, signal in enumerate(sensor.signals)
        if signal.expression is not UNSET
    }


def _compiled(text: str, known: Known, place: str, who: str) -> Expression:
    """Compile an expression that must make sense for one of several values: the reading's type is not known yet."""
    sentence = ""
    for knows in known:
        try:
            return compiled(text, knows, place, "expression", who)
        except ConfigError as error:
            sentence = sentence or showable(str(error))
    raise ConfigError(sentence)


def _of_autonomy(autonomy: Autonomy) -> Iterator[Wrong]:
    least, most, hours = autonomy.min_sleep, autonomy.max_sleep, autonomy.active_hours
    path = ("autonomy", "min_sleep")
    if not least:
        yield about(path, "is 0, so an agent might never pause; write at least a little, as in 1s.")
    if least > most:
        sentence = f"the shortest sleep (`min_sleep`, {shown_duration(least)}) is longer than the longest"
        yield path, f"{sentence} (`max_sleep`, {shown_duration(most)}); change one of them."
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"starts and ends at {hours.start}; let one be another time"
        yield about(("autonomy", "active_hours"), f"{sentence}, or remove it for an agent that may always be awake.")
    gate, other = either(autonomy.gate, Gate()), autonomy.precheck_model
    if other is not UNSET and gate.model not in (UNSET, other):
        sentence = f"is `{other}`, but `autonomy.gate.model` is `{gate.model}`"
        yield about(("autonomy", "precheck_model"), f"{sentence}; both are names of one model, so keep one of them.")
    if gate.prompt and gate.model is UNSET and other is UNSET:
        sentence = "is for a model, and the gate has none; write `model` beside it, or remove it."
        yield about(("autonomy", "gate", "prompt"), sentence)


def _of_field(field: HotField, path: KeyPath) -> Iterator[Wrong]:
    if field.max_items is not UNSET and field.type != "array":
        sentence = f"is for an array, but the field's type is {field.type}; write `type: array`, or remove it."
        yield about((*path, "max_items"), sentence)
    if field.refresh_tool is UNSET:
        for key in ("auto_refresh", "refresh_params"):
            if getattr(field, key):
                sentence = f"needs a `refresh_tool`, which is missing; write it, or remove `{key}`."
                yield about((*path, key), sentence)


def _of_names(spec: AgentSpec) -> Iterator[Wrong]:
    """See that every name by which a sleeper may ask to be woken means one thing."""
    taken = dict.fromkeys(all_fields(spec), "a field")
    for path, name, noun, own in _named(spec):
        if name in ALWAYS:
            yield about(path, f"is `{name}`, which is what always wakes an agent; choose another name.")
        elif name in taken and not (own and taken[name] == "a field"):
            shared = f"is `{name}`, but {taken[name]} has that name already"
            yield about(path, f"{shared}, and an agent is woken by name; choose another one.")
        if noun != "a field":
            taken[name] = noun


def _named(spec: AgentSpec) -> Iterator[tuple[KeyPath, str, str, bool]]:
    """List all names with the way to each, what each names, and whether it may be that of a field: its own."""
    for name in spec.hot_state.fields:
        yield ("hot_state", "fields", name), name, "a field", True
    for index, sensor in enumerate(spec.sensors):
        for at, update in enumerate(sensor.updates):
            yield ("sensors", index, "updates", at, "field"), update.field, "a field", True
    for index, sensor in enumerate(spec.sensors):
        writes = {update.field for update in sensor.written()}
        yield ("sensors", index, "name"), sensor.name, "a sensor", sensor.name in writes
    for index, sensor in enumerate(spec.sensors):
        for at, signal in enumerate(sensor.signals):
            yield ("sensors", index, "signals", at, "name"), signal.name, "a signal", False


def _of_sensor(sensor: Sensor, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Wrong]:
    yield from _of_source(sensor, (*path, "source"))
    yield from _of_times(sensor, path)
    yield from _of_updates(sensor, fields, (*path, "updates"))
    for index, signal in enumerate(sensor.signals):
        yield from _of_signal(signal, (*path, "signals", index))


def _of_source(sensor: Sensor, path: KeyPath) -> Iterator[Wrong]:
    source, kind, nothing = sensor.source, sensor.type, Source()
    for key in Source.__struct_fields__:
        if key not in _TAKES[kind] and getattr(source, key) != getattr(nothing, key):
            sentence = f"means nothing to a sensor of type {kind}, which needs {_NEEDS[kind]}"
            yield about((*path, key), f"{sentence}; remove it, or change `type`.")
    missing = {
        "poll": source.tool is UNSET and source.url is UNSET,
        "watch": source.path is UNSET,
        "stream": source.url is UNSET,
    }
    if missing[kind]:
        yield about(path, f"says not where to read: a sensor of type {kind} needs {_NEEDS[kind]}; write it.")
    match kind:
        case "poll":
            yield from _of_poll(source, path)
        case "stream":
            yield from _of_format(source, path)
        case "watch":
            pass


def _of_poll(source: Source, path: KeyPath) -> Iterator[Wrong]:
    if source.tool is not UNSET and source.url is not UNSET:
        yield (*path, "url"), f"`{dotted(path)}` has both a `tool` and a `url`; keep one of them."
    if source.params and source.tool is UNSET:
        yield about((*path, "params"), "is for a `tool`; write it into the address after a ?.")
    if source.headers and source.url is UNSET:
        yield about((*path, "headers"), "is for a `url`, which is missing; remove it.")
    if source.url is not UNSET and _SPEAKS[urlsplit(source.url).scheme] == "websocket":
        sentence = "is a WebSocket, which cannot be polled"
        yield about((*path, "url"), f"{sentence}; write `type: stream`, or an address with http:// or https://.")


def _of_format(source: Source, path: KeyPath) -> Iterator[Wrong]:
    if source.url is UNSET or source.format is UNSET:
        return
    scheme = urlsplit(source.url).scheme
    if source.format != _SPEAKS[scheme]:
        sentence = f"is {source.format}, but an address with {scheme}:// speaks {_SPEAKS[scheme]}"
        yield about((*path, "format"), f"{sentence}; remove it, or change the address.")


def _of_times(sensor: Sensor, path: KeyPath) -> Iterator[Wrong]:
    for key in ("interval", "timeout"):
        if not getattr(sensor, key):
            yield about((*path, key), "is 0, which leaves no time for anything; write a duration, as in 5s.")
    usual = Sensor(name=sensor.name, type=sensor.type, source=sensor.source)
    for key in () if sensor.type == "poll" else _POLLED:
        if getattr(sensor, key) != getattr(usual, key):
            yield about((*path, key), f"is for a sensor of type poll, and this is a {sensor.type}; remove it.")


def _of_updates(sensor: Sensor, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Wrong]:
    seen: set[str] = set()
    for index, update in enumerate(sensor.updates):
        at = (*path, index)
        if update.append and fields[update.field].type != "array":
            sentence = f"adds to an array, but the field `{update.field}` is none"
            remedy = f"under `hot_state.fields`, write {update.field}: {{type: array, max_items: 20}}"
            yield about((*at, "append"), f"{sentence}; {remedy}.")
        if update.field in seen and not update.append:
            yield about((*at, "field"), f"is `{update.field}` again; write each field once.")
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
        yield about((*path, "prompt"), "is for a `model`, which is missing; write it.")
    yield from _of_threshold(signal, (*path, "threshold"))


def _of_threshold(signal: Signal, path: KeyPath) -> Iterator[Wrong]:
    """A threshold that is never reached, or always, is a slip of the pen."""
    if signal.threshold is UNSET:
        return
    if signal.model is not UNSET and not 0 < signal.threshold <= 1:
        yield about(path, f"is {signal.threshold:g}, but a model scores from 0 to 1; write 0.8, or the like.")
    if signal.detector is not UNSET and signal.threshold <= 0:
        sentence = f"is {signal.threshold:g}, which every number reaches"
        yield about(path, f"{sentence}; write how many deviations are too many, as in 4.")
