"""How an agent paces itself: what `autonomy`, `hot_state` and `sensors` say, checked, and filled in where it is silent.

Whatever can be known to go wrong is said here, before anything runs: nobody watches a sensor that never fires. What
depends on the tools that an agent has is checked once they are known.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from halter.config.agent import Agent
from halter.config.both import Both, either
from halter.config.conditions import compiled_gate, compiled_signals
from halter.config.fleet import Fleet
from halter.config.load import KeyPath, Wrong
from halter.config.sensors import misread, named_secrets, unlisted
from halter.config.shape import dotted
from halter.core.durations import shown_duration
from halter.core.pacing import ALWAYS, Autonomy, Gate, HotField, Pacing, Sensor
from halter.core.spec import AgentSpec
from halter.core.tools import secret_names

HIDDEN = "…"


def read_pacing(fleet: Fleet, agent: Agent) -> Pacing:
    """Put together how an agent paces itself, or raise a ConfigError that says what to change."""
    spec, places = agent.spec, agent.places
    for path, sentence in _mistakes(spec):
        raise places.wrong(path, sentence)
    both = Both(fleet, agent)
    for index, sensor in enumerate(spec.sensors):
        if sensor.source.url is not UNSET:
            both.reached(("sensors", index, "source", "url"), sensor.source.url)
    pacing = Pacing(autonomy=_filled(spec.autonomy, fleet), fields=_fields(spec), sensors=spec.sensors)
    compiled_gate(pacing, places.at(("autonomy", "gate", "expression")))
    for index, sensor in enumerate(spec.sensors):
        compiled_signals(sensor, lambda path, at=index: places.at(("sensors", at, *path)))
    return pacing


def paced_models(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    """List the models that the gate and the signals of an agent's file name, with the way to each."""
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
    """Say which fields nothing writes. That is no mistake while a file is being made, but it should be seen."""
    written = {update.field for sensor in pacing.sensors for update in sensor.written()}
    return tuple(
        f"Nothing writes the field `{name}`, so it will always be shown as not yet loaded: give it a `refresh_tool`, "
        "or let a sensor write it."
        for name, field in pacing.fields.items()
        if field.refresh_tool is UNSET and name not in written
    )


def recorded(pacing: Pacing) -> Pacing:
    """Take out what may be a key in plain text, so that it can be written down as a part of an agent's definition."""
    return replace(pacing, sensors=tuple(_without_keys(sensor) for sensor in pacing.sensors))


def _without_keys(sensor: Sensor) -> Sensor:
    source = sensor.source
    headers = {name: references(value) or HIDDEN for name, value in source.headers.items()}
    return replace(sensor, source=replace(source, headers=headers, url=without_query(source.url)))


def references(value: str) -> str:
    """Keep of a text only the secrets that it names."""
    return " ".join(f"${{secret:{name}}}" for name in sorted(secret_names(value.encode())))


def without_query(url: str | UnsetType) -> str | UnsetType:
    """Keep of an address all but its query, which may hold a key."""
    if url is UNSET:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=HIDDEN)) if parts.query else url


def _filled(autonomy: Autonomy, fleet: Fleet) -> Autonomy:
    """Fill in the fleet's zone, and take the other place for the gate's model for the gate's own."""
    gate, hours = autonomy.gate, autonomy.active_hours
    if autonomy.precheck_model is not UNSET:
        gate = replace(either(gate, Gate()), model=autonomy.precheck_model)
    if hours is not UNSET:
        hours = replace(hours, timezone=either(hours.timezone, fleet.spec.zone))
    return replace(autonomy, gate=gate, active_hours=hours, precheck_model=UNSET)


def _fields(spec: AgentSpec) -> dict[str, HotField]:
    """Add the fields that only sensors name to those that are declared."""
    written = (update.field for sensor in spec.sensors for update in sensor.written())
    return dict(spec.hot_state.fields) | {name: HotField() for name in written if name not in spec.hot_state.fields}


def _mistakes(spec: AgentSpec) -> Iterator[Wrong]:
    yield from _of_autonomy(spec.autonomy)
    for name, field in spec.hot_state.fields.items():
        yield from _of_field(field, ("hot_state", "fields", name))
        yield from unlisted(spec, ("hot_state", "fields", name, "refresh_params"), field.refresh_params)
    fields = _fields(spec)
    for index, sensor in enumerate(spec.sensors):
        yield from misread(sensor, fields, ("sensors", index))
        yield from named_secrets(spec, sensor, ("sensors", index))
    yield from _of_names(spec)


def _of_autonomy(autonomy: Autonomy) -> Iterator[Wrong]:
    yield from _of_sleep(autonomy)
    hours = autonomy.active_hours
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"`autonomy.active_hours` starts and ends at {hours.start}; let one be another time"
        yield ("autonomy", "active_hours"), f"{sentence}, or remove it for an agent that may always be awake."
    yield from _of_gate(autonomy)


def _of_sleep(autonomy: Autonomy) -> Iterator[Wrong]:
    least, most = autonomy.min_sleep, autonomy.max_sleep
    path = ("autonomy", "min_sleep")
    if not least:
        yield path, "`autonomy.min_sleep` is 0, so an agent might never pause; write at least a little, as in 1s."
    if least > most:
        sentence = f"the shortest sleep (`min_sleep`, {shown_duration(least)}) is longer than the longest"
        yield path, f"{sentence} (`max_sleep`, {shown_duration(most)}); change one of them."


def _of_gate(autonomy: Autonomy) -> Iterator[Wrong]:
    gate, other = either(autonomy.gate, Gate()), autonomy.precheck_model
    if other is not UNSET and gate.model not in (UNSET, other):
        sentence = f"`autonomy.precheck_model` is `{other}`, but `autonomy.gate.model` is `{gate.model}`"
        yield ("autonomy", "precheck_model"), f"{sentence}; both are names of one model, so keep one of them."
    if gate.prompt and gate.model is UNSET and other is UNSET:
        sentence = "`autonomy.gate.prompt` is for a model, and the gate has none"
        yield ("autonomy", "gate", "prompt"), f"{sentence}; write `model` beside it, or remove it."


def _of_field(field: HotField, path: KeyPath) -> Iterator[Wrong]:
    if field.max_items is not UNSET and field.type != "array":
        sentence = f"`{dotted((*path, 'max_items'))}` is for an array, but the field's type is {field.type}"
        yield (*path, "max_items"), f"{sentence}; write `type: array`, or remove it."
    if field.refresh_tool is UNSET:
        for key in ("auto_refresh", "refresh_params"):
            if getattr(field, key):
                sentence = f"`{dotted((*path, key))}` needs a `refresh_tool`, which is missing"
                yield (*path, key), f"{sentence}; write it, or remove `{key}`."


def _of_names(spec: AgentSpec) -> Iterator[Wrong]:
    """See that every name by which a sleeper may ask to be woken means one thing."""
    taken = dict.fromkeys(_fields(spec), "a field")
    for path, name, noun, own in _named(spec):
        there = dotted(path)
        if name in ALWAYS:
            yield path, f"`{there}` is `{name}`, which is what always wakes an agent; choose another name."
        elif name in taken and not (own and taken[name] == "a field"):
            shared = f"`{there}` is `{name}`, but {taken[name]} has that name already"
            yield path, f"{shared}, and an agent is woken by name; choose another one."
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
