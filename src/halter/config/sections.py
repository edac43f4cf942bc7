"""Checks of the sections of `agent.yaml`: autonomy, hot state, sensors, triggers, collections and channels.

A sensor or a schedule that never fires goes unnoticed in an unattended agent, so every mistake is found when the file
is read. What depends on the agent's tools is checked once they are known.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.config.agent_files import UnusableFile, list_texts, read_beside, resolve_links
from halter.config.decode import format_key_path, make_mistake, value_or_default
from halter.config.yaml_reader import KeyPath, Mistake, escape_sentence
from halter.core.agent_spec import (
    ALWAYS_WAKING_NAMES,
    HEARTBEAT,
    Anonymize,
    AnyTrigger,
    Autonomy,
    Channel,
    ChannelType,
    Gate,
    HotField,
    Notify,
    Pacing,
    Schedule,
    SensorSource,
    SensorSpec,
    SensorType,
    Signal,
    StreamFormat,
    Watch,
    make_heartbeat,
)
from halter.core.clock import MINUTE, format_duration
from halter.core.errors import ConfigError
from halter.core.spec import AgentSpec
from halter.core.text import Expression, compile_expression, join_names, shorten, suggest_nearest
from halter.core.tools import find_secret_names

GATE_VARIABLES: Final[Mapping[str, Any]] = MappingProxyType({"hot": {}, "before": {}, "changed": [], "skips": 0})

KnownVariables = tuple[Mapping[str, Any], ...]

_READINGS: Final[tuple[Any, ...]] = ({}, "", [], 0, 0.0, False, "1970-01-01T00:00:00Z", "1s")
_SIGNAL_KNOWS: Final[KnownVariables] = tuple({"value": value, "hot": _READINGS[0]} for value in _READINGS)
"""What an expression of a signal may use, for each type that a reading may have."""
_TAKES: Final[Mapping[SensorType, tuple[str, ...]]] = MappingProxyType(
    {"poll": ("tool", "params", "url", "headers"), "watch": ("path", "pattern"), "stream": ("url", "headers", "format")}
)
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


def list_pacing_mistakes(spec: AgentSpec) -> Iterator[Mistake]:
    yield from _autonomy_mistakes(spec.autonomy)
    for name, field in spec.hot_state.fields.items():
        yield from _field_mistakes(field, ("hot_state", "fields", name))
        yield from list_unlisted_secrets(spec, ("hot_state", "fields", name, "refresh_params"), field.refresh_params)
    fields = collect_hot_fields(spec)
    for index, sensor in enumerate(spec.sensors):
        path, source = ("sensors", index), sensor.source
        yield from _sensor_mistakes(sensor, fields, path)
        yield from list_unlisted_secrets(spec, (*path, "source", "headers"), source.headers)
        yield from list_unlisted_secrets(spec, (*path, "source", "params"), source.params)
    yield from _name_mistakes(spec)


def collect_hot_fields(spec: AgentSpec) -> dict[str, HotField]:
    written = (update.field for sensor in spec.sensors for update in sensor.list_updates())
    return dict(spec.hot_state.fields) | {name: HotField() for name in written if name not in spec.hot_state.fields}


def list_paced_models(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    gate = spec.autonomy.gate
    if gate is not UNSET and gate.model is not UNSET:
        yield ("autonomy", "gate", "model"), gate.model
    if spec.autonomy.precheck_model is not UNSET:
        yield ("autonomy", "precheck_model"), spec.autonomy.precheck_model
    for index, sensor in enumerate(spec.sensors):
        for at, signal in enumerate(sensor.signals):
            if signal.model is not UNSET:
                yield ("sensors", index, "signals", at, "model"), signal.model


def list_unwritten_fields(pacing: Pacing) -> tuple[str, ...]:
    """Warn of fields that nothing writes: no error while a file is unfinished."""
    written = {update.field for sensor in pacing.sensors for update in sensor.list_updates()}
    return tuple(
        f"Nothing writes the field `{name}`, so it will always be shown as not yet loaded: give it a `refresh_tool`, "
        "or let a sensor write it."
        for name, field in pacing.fields.items()
        if field.refresh_tool is UNSET and name not in written
    )


def list_unlisted_secrets(spec: AgentSpec, path: KeyPath, value: Any) -> Iterator[Mistake]:
    for at, text in list_texts(dict(value), path):
        for name in sorted(find_secret_names(text.encode("utf-8", "surrogatepass")) - {*spec.secrets}):
            yield make_mistake(at, f"names the secret `{name}`, which is not among the agent's `secrets`; list it.")


def compile_gate(pacing: Pacing, place: str = "`autonomy.gate.expression`") -> Expression | None:
    """Compile the gate's expression, if any; `place` locates it in a ConfigError."""
    gate = pacing.autonomy.gate
    if gate is UNSET or not gate.expression:
        return None
    return _compile_expression(gate.expression, (GATE_VARIABLES,), place, "the gate")


def compile_signals(sensor: SensorSpec, where: Callable[[KeyPath], str] | None = None) -> Mapping[str, Expression]:
    return {
        signal.name: _compile_expression(
            signal.expression,
            _SIGNAL_KNOWS,
            where(("signals", index, "expression")) if where else f"The sensor {sensor.name}",
            "a signal",
        )
        for index, signal in enumerate(sensor.signals)
        if signal.expression is not UNSET
    }


def _compile_expression(text: str, known: KnownVariables, place: str, who: str) -> Expression:
    """Compile an expression that must hold for one of several types: a reading's type is not known yet."""
    sentence = ""
    for knows in known:
        try:
            return compile_expression(text, knows, place, "expression", who)
        except ConfigError as error:
            sentence = sentence or escape_sentence(str(error))
    raise ConfigError(sentence)


def _autonomy_mistakes(autonomy: Autonomy) -> Iterator[Mistake]:
    least, most, hours = autonomy.min_sleep, autonomy.max_sleep, autonomy.active_hours
    path = ("autonomy", "min_sleep")
    if not least:
        yield make_mistake(path, "is 0, so an agent might never pause; write at least a little, as in 1s.")
    if least > most:
        sentence = f"the shortest sleep (`min_sleep`, {format_duration(least)}) is longer than the longest"
        yield path, f"{sentence} (`max_sleep`, {format_duration(most)}); change one of them."
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"starts and ends at {hours.start}; change one of them"
        yield make_mistake(
            ("autonomy", "active_hours"), f"{sentence}, or remove it for an agent that may always be awake."
        )
    gate, other = value_or_default(autonomy.gate, Gate()), autonomy.precheck_model
    if other is not UNSET and gate.model not in (UNSET, other):
        sentence = f"is `{other}`, but `autonomy.gate.model` is `{gate.model}`"
        yield make_mistake(
            ("autonomy", "precheck_model"), f"{sentence}; both are names of one model, so keep one of them."
        )
    if gate.prompt and gate.model is UNSET and other is UNSET:
        sentence = "is for a model, and the gate has none; write `model` beside it, or remove it."
        yield make_mistake(("autonomy", "gate", "prompt"), sentence)


def _field_mistakes(field: HotField, path: KeyPath) -> Iterator[Mistake]:
    if field.max_items is not UNSET and field.type != "array":
        sentence = f"is for an array, but the field's type is {field.type}; write `type: array`, or remove it."
        yield make_mistake((*path, "max_items"), sentence)
    if field.refresh_tool is UNSET:
        for key in ("auto_refresh", "refresh_params", "path"):
            if getattr(field, key):
                sentence = f"needs a `refresh_tool`, which is missing; write it, or remove `{key}`."
                yield make_mistake((*path, key), sentence)


def _name_mistakes(spec: AgentSpec) -> Iterator[Mistake]:
    """Check that every name a sleeping agent may be woken by is unambiguous."""
    taken = dict.fromkeys(collect_hot_fields(spec), "a field")
    for path, name, noun, own in _list_names(spec):
        if name in ALWAYS_WAKING_NAMES:
            yield make_mistake(path, f"is `{name}`, which is what always wakes an agent; choose another name.")
        elif name in taken and not (own and taken[name] == "a field"):
            shared = f"is `{name}`, but {taken[name]} has that name already"
            yield make_mistake(path, f"{shared}, and an agent is woken by name; choose another one.")
        if noun != "a field":
            taken[name] = noun


def _list_names(spec: AgentSpec) -> Iterator[tuple[KeyPath, str, str, bool]]:
    """List all names with path, meaning, and whether a field may have the same name."""
    for name in spec.hot_state.fields:
        yield ("hot_state", "fields", name), name, "a field", True
    for index, sensor in enumerate(spec.sensors):
        for at, update in enumerate(sensor.updates):
            yield ("sensors", index, "updates", at, "field"), update.field, "a field", True
    for index, sensor in enumerate(spec.sensors):
        writes = {update.field for update in sensor.list_updates()}
        yield ("sensors", index, "name"), sensor.name, "a sensor", sensor.name in writes
    for index, sensor in enumerate(spec.sensors):
        for at, signal in enumerate(sensor.signals):
            yield ("sensors", index, "signals", at, "name"), signal.name, "a signal", False


def _sensor_mistakes(sensor: SensorSpec, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Mistake]:
    yield from _source_mistakes(sensor, (*path, "source"))
    for key in ("interval", "timeout"):
        if not getattr(sensor, key):
            yield make_mistake((*path, key), "is 0, which leaves no time for anything; write a duration, as in 5s.")
    usual = SensorSpec(name=sensor.name, type=sensor.type, source=sensor.source)
    for key in () if sensor.type == "poll" else _POLLED:
        if getattr(sensor, key) != getattr(usual, key):
            yield make_mistake((*path, key), f"is for a sensor of type poll, and this is a {sensor.type}; remove it.")
    yield from _update_mistakes(sensor, fields, (*path, "updates"))
    for index, signal in enumerate(sensor.signals):
        yield from _signal_mistakes(signal, (*path, "signals", index))


def _source_mistakes(sensor: SensorSpec, path: KeyPath) -> Iterator[Mistake]:
    source, kind, nothing = sensor.source, sensor.type, SensorSource()
    for key in SensorSource.__struct_fields__:
        if key not in _TAKES[kind] and getattr(source, key) != getattr(nothing, key):
            sentence = f"means nothing to a sensor of type {kind}, which needs {_NEEDS[kind]}"
            yield make_mistake((*path, key), f"{sentence}; remove it, or change `type`.")
    missing = {
        "poll": source.tool is UNSET and source.url is UNSET,
        "watch": source.path is UNSET,
        "stream": source.url is UNSET,
    }
    if missing[kind]:
        yield make_mistake(path, f"does not say where to read: a sensor of type {kind} needs {_NEEDS[kind]}; write it.")
    match kind:
        case "poll":
            yield from _poll_mistakes(source, path)
        case "stream":
            yield from _format_mistakes(source, path)
        case "watch":
            pass


def _poll_mistakes(source: SensorSource, path: KeyPath) -> Iterator[Mistake]:
    if source.tool is not UNSET and source.url is not UNSET:
        yield (*path, "url"), f"`{format_key_path(path)}` has both a `tool` and a `url`; keep one of them."
    if source.params and source.tool is UNSET:
        yield make_mistake((*path, "params"), "is for a `tool`; write it into the address after a ?.")
    if source.headers and source.url is UNSET:
        yield make_mistake((*path, "headers"), "is for a `url`, which is missing; remove it.")
    if source.url is not UNSET and _SPEAKS[urlsplit(source.url).scheme] == "websocket":
        sentence = "is a WebSocket, which cannot be polled"
        yield make_mistake((*path, "url"), f"{sentence}; write `type: stream`, or an address with http:// or https://.")


def _format_mistakes(source: SensorSource, path: KeyPath) -> Iterator[Mistake]:
    if source.url is UNSET or source.format is UNSET:
        return
    scheme = urlsplit(source.url).scheme
    if source.format != _SPEAKS[scheme]:
        sentence = f"is {source.format}, but an address with {scheme}:// speaks {_SPEAKS[scheme]}"
        yield make_mistake((*path, "format"), f"{sentence}; remove it, or change the address.")


def _update_mistakes(sensor: SensorSpec, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Mistake]:
    seen: set[str] = set()
    for index, update in enumerate(sensor.updates):
        at = (*path, index)
        if update.append and fields[update.field].type != "array":
            sentence = f"adds to an array, but the field `{update.field}` is none"
            remedy = f"under `hot_state.fields`, write {update.field}: {{type: array, max_items: 20}}"
            yield make_mistake((*at, "append"), f"{sentence}; {remedy}.")
        if update.field in seen and not update.append:
            yield make_mistake((*at, "field"), f"is `{update.field}` again; write each field once.")
        seen.add(update.field)


def _signal_mistakes(signal: Signal, path: KeyPath) -> Iterator[Mistake]:
    texts = [key for key in _SCORES if getattr(signal, key) is not UNSET]
    there, ways = format_key_path(path), "an `expression`, a `model` or a `detector`"
    if not texts:
        yield path, f"`{there}` has nothing that gives a score; write {ways}."
    for key in texts[1:]:
        yield (*path, key), f"`{there}` has both `{texts[0]}` and `{key}`; a score comes from one of them: keep one."
    if signal.model is not UNSET and not signal.prompt.strip():
        yield path, f"`{there}` has a `model` but no `prompt`; write what the model is to judge."
    if signal.model is UNSET and signal.prompt:
        yield make_mistake((*path, "prompt"), "is for a `model`, which is missing; write it.")
    yield from _threshold_mistakes(signal, (*path, "threshold"))


def _threshold_mistakes(signal: Signal, path: KeyPath) -> Iterator[Mistake]:
    """Find thresholds that are never or always reached."""
    if signal.threshold is UNSET:
        return
    if signal.model is not UNSET and not 0 < signal.threshold <= 1:
        yield make_mistake(path, f"is {signal.threshold:g}, but a model scores from 0 to 1; write 0.8, or the like.")
    if signal.detector is not UNSET and signal.threshold <= 0:
        sentence = f"is {signal.threshold:g}, which every number reaches"
        yield make_mistake(path, f"{sentence}; write how many deviations are too many, as in 4.")


_TIMES: Final = ("cron", "every", "at")
_CAPS: Final = ("max_cost_usd", "max_cost_usd_per_hour", "max_cost_usd_per_day")
_KINDS: Final = ("schedules", "watches", "webhooks")
_TASK_TAKES: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {
        "in_app": (),
        "email": ("to", "sender", "host", "port", "security", "username", "password"),
        "webhook": ("url", "headers"),
        "apprise": ("service",),
    }
)
_TASK_NEEDS: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {"in_app": (), "email": ("to", "sender", "host"), "webhook": ("url",), "apprise": ("service",)}
)
_COMMON: Final = ("name", "type")
_MAIL: Final = re.compile(r"[^\s@,;<>\"]+@[^\s@,;<>\"]+")
CHANNELS_PATH: Final[KeyPath] = ("notify", "channels")


def list_triggers(spec: AgentSpec) -> Iterator[tuple[KeyPath, AnyTrigger]]:
    if spec.heartbeat is not UNSET:
        yield (HEARTBEAT,), make_heartbeat(spec.heartbeat, spec.autonomy.active_hours)
    for kind in _KINDS:
        yield from (((kind, index), trigger) for index, trigger in enumerate(getattr(spec, kind)))


def list_task_mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Mistake]:
    for name, collection in spec.collections.items():
        yield from _folder_mistakes(collection.path, folder, ("collections", name, "path"))
        yield from _pattern_mistakes(collection.pattern, ("collections", name, "pattern"))
    yield from _all_trigger_mistakes(spec, folder, zone)
    yield from list_channel_mistakes(spec.notify)
    for index, channel in enumerate(spec.notify.channels):
        named = {key: word for key in ("password", "service") if (word := getattr(channel, key)) is not UNSET}
        yield from list_unlisted_secrets(spec, (*CHANNELS_PATH, index), {**named, "headers": dict(channel.headers)})
    said = spec.anonymize
    if isinstance(said, Anonymize) and said.names and said.enabled is UNSET and spec.phases != "review":
        sentence = "hides nothing while nothing is hidden; write `enabled: true` beside it."
        yield make_mistake(("anonymize", "names"), sentence)


def _all_trigger_mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Mistake]:
    seen: dict[str, KeyPath] = {}
    for path, trigger in list_triggers(spec):
        yield from _trigger_mistakes(trigger, spec, folder, path)
        match trigger:
            case Schedule():
                yield from _schedule_mistakes(trigger, path, zone)
            case Watch():
                yield from _watch_mistakes(trigger, spec, folder, path)
            case _:
                yield from list_unlisted_secrets(spec, path, {"token": trigger.token})
        if trigger.name in seen:
            sentence = f"is `{trigger.name}`, as that of `{format_key_path(seen[trigger.name])}`"
            yield make_mistake((*path, "name"), f"{sentence}; choose another name.")
        seen.setdefault(trigger.name, path)


def _trigger_mistakes(trigger: AnyTrigger, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    there, plays = format_key_path(path), trigger.playbook is not UNSET
    if not trigger.prompt.strip() and not plays:
        yield path, f"`{there}` starts sessions that have nothing to do; write a `prompt`, or name a `playbook`."
    if trigger.prompt and plays:
        yield (*path, "playbook"), f"`{there}` has both a `prompt` and a `playbook`; keep one of them."
    if trigger.inputs and not plays:
        yield make_mistake((*path, "inputs"), "is for a `playbook`, which is missing; name it.")
    yield from list_unlisted_secrets(spec, (*path, "inputs"), trigger.inputs)
    for key in _CAPS:
        if getattr(trigger, key) == 0:
            sentence = "is 0, so nothing could ever run"
            yield make_mistake((*path, key), f"{sentence}; write a number of dollars, or `none` for no cap of its own.")
    for index, name in enumerate(trigger.collections):
        yield from _undeclared_mistakes(name, spec, (*path, "collections", index))
    if trigger.playbook is not UNSET and folder is not None:
        yield from _unreadable_mistakes(folder, trigger.playbook, (*path, "playbook"))


def _undeclared_mistakes(name: str, spec: AgentSpec, path: KeyPath) -> Iterator[Mistake]:
    if name not in spec.collections:
        hint = suggest_nearest(name, list(spec.collections), "the `collections` of this file")
        yield make_mistake(path, f"is `{name}`, which is no collection; {hint}")


def _unreadable_mistakes(folder: Path, name: str, path: KeyPath) -> Iterator[Mistake]:
    why = "is missing"
    try:
        if read_beside(folder, name) is not None:
            return
    except UnusableFile as unreadable:
        why = str(unreadable)
    yield make_mistake(path, f"names `{shorten(name)}`, which {why}; name a file in the agent's folder.")


def _schedule_mistakes(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Mistake]:
    there, texts = format_key_path(path), [key for key in _TIMES if getattr(schedule, key) is not UNSET]
    if not texts:
        yield path, f"`{there}` does not say when; write `cron`, `every` or `at`."
    for key in texts[1:]:
        yield (*path, key), f"`{there}` has both `{texts[0]}` and `{key}`; one of them says when: keep one."
    hours = schedule.active_hours
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"starts and ends at {hours.start}; change one of them"
        yield make_mistake((*path, "active_hours"), f"{sentence}, or remove it for a schedule that may always run.")
    yield from _pause_mistakes(schedule, path)
    yield from _moment_mistakes(schedule, path, value_or_default(schedule.timezone, zone))


def _pause_mistakes(schedule: Schedule, path: KeyPath) -> Iterator[Mistake]:
    least, every = schedule.min_interval, schedule.every
    if least < MINUTE:
        sentence = f"is {format_duration(least) if least else '0'}"
        yield make_mistake((*path, "min_interval"), f"{sentence}, but the minimum is 1m; write that or more.")
    if every is UNSET:
        return
    if every < least:
        sentence = f"is {format_duration(every) if every else '0'}, which is shorter"
        yield make_mistake(
            (*path, "every"), f"{sentence} than its `min_interval`, {format_duration(least)}; write that or more."
        )
    elif schedule.jitter >= every:
        sentence = f"is {format_duration(schedule.jitter)}, as long as its `every`"
        yield make_mistake((*path, "jitter"), f"{sentence} or longer, so that runs would overlap; write less.")


def _moment_mistakes(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Mistake]:
    if schedule.at is UNSET and schedule.cron is UNSET:
        return
    from halter.core.schedules import Timing, find_timing_flaw, parse_moment

    if schedule.at is not UNSET:
        moment = parse_moment(schedule.at, zone)
        if isinstance(moment, str):
            yield make_mistake((*path, "at"), f"cannot be used. {moment}")
    if schedule.cron is not UNSET and (why := find_timing_flaw(Timing(cron=schedule.cron, timezone=zone))):
        yield make_mistake((*path, "cron"), f"cannot be used. {why}")


def _watch_mistakes(watch: Watch, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    there = format_key_path(path)
    if watch.path is UNSET and watch.collection is UNSET:
        yield path, f"`{there}` does not say what to watch; write a `path`, or name a `collection`."
    if watch.path is not UNSET and watch.collection is not UNSET:
        yield (*path, "collection"), f"`{there}` has both a `path` and a `collection`; keep one of them."
    yield from _pattern_mistakes(watch.pattern, (*path, "pattern"))
    if watch.collection is UNSET:
        if watch.path is not UNSET:
            yield from _path_mistakes(watch.path, spec, folder, (*path, "path"))
        return
    yield from _undeclared_mistakes(watch.collection, spec, (*path, "collection"))
    if watch.pattern != "*":
        sentence = "is for a `path`, and this watches a collection"
        yield make_mistake((*path, "pattern"), f"{sentence}; write it there, under `collections`, or remove it.")
    if watch.collection in spec.collections:
        yield from _path_mistakes(spec.collections[watch.collection].path, spec, folder, (*path, "collection"))


def _path_mistakes(name: str, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    """Refuse to watch a folder that commands write: the agent's own output would trigger it."""
    yield from _folder_mistakes(name, folder, path)
    shell = spec.tools.shell
    watched, works = locate_folder(folder, name), None if shell is UNSET else locate_folder(folder, shell.root)
    if watched is None or works is None:
        return
    if watched.is_relative_to(works) or works.is_relative_to(watched):
        sentence = "leads to where commands write (`tools.shell.root`)"
        yield make_mistake(
            path, f"{sentence}, so that the agent's own output would start it again; keep the two folders apart."
        )


def _folder_mistakes(name: str, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    """Check a folder's name; the folder need not exist yet."""
    found = locate_folder(folder, name)
    if found is None or found.is_file():
        yield make_mistake(path, f"is `{shorten(name)}`, which is no folder; name the one that holds the documents.")


def _pattern_mistakes(pattern: str, path: KeyPath) -> Iterator[Mistake]:
    parts = pattern.split("/")
    if parts[0] in {"", "~"} or ".." in parts or "\0" in pattern:
        sentence = f"is `{shorten(pattern)}`, which leads out of its folder"
        yield make_mistake(path, f"{sentence}; write it as seen from there, as in *.pdf or **/*.md.")


def locate_folder(folder: Path | None, name: str) -> Path | None:
    """Resolve a folder relative to the agent's, through all links; None if it cannot be one."""
    try:
        return resolve_links((folder or Path()) / name)
    except (OSError, RuntimeError, ValueError):
        return None


def list_channel_mistakes(notify: Notify) -> Iterator[Mistake]:
    seen: set[str] = set()
    for index, channel in enumerate(notify.channels):
        path = (*CHANNELS_PATH, index)
        yield from _one_channel_mistakes(channel, path)
        if channel.name in seen:
            yield make_mistake((*path, "name"), f"is `{channel.name}`, as that of another; choose another name.")
        seen.add(channel.name)


def _one_channel_mistakes(channel: Channel, path: KeyPath) -> Iterator[Mistake]:
    kind, usual = channel.type, Channel(name=channel.name, type=channel.type)
    for key in Channel.__struct_fields__:
        if key not in (*_COMMON, *_TASK_TAKES[kind]) and getattr(channel, key) != getattr(usual, key):
            sentence = f"means nothing to a channel of type {kind}"
            yield make_mistake((*path, key), f"{sentence}, {_list_taken_keys(kind)}; remove it, or change `type`.")
    for key in _TASK_NEEDS[kind]:
        if getattr(channel, key) == getattr(usual, key):
            yield make_mistake(path, f"is of type {kind}, which needs `{key}`; write it.")
    match kind:
        case "email":
            yield from _mail_mistakes(channel, path)
        case "webhook":
            yield from _address_mistakes(channel, (*path, "url"))
        case "in_app" | "apprise":
            pass


def _list_taken_keys(kind: ChannelType) -> str:
    return f"which takes {join_names(_TASK_TAKES[kind])}" if _TASK_TAKES[kind] else "which takes no more than a name"


def _mail_mistakes(channel: Channel, path: KeyPath) -> Iterator[Mistake]:
    for at, address in _addresses(channel, path):
        if not _MAIL.fullmatch(address) or not address.isprintable():
            yield make_mistake(at, "is no e-mail address; write one alone, as in ada@example.com.")
    if (channel.username is UNSET) != (channel.password is UNSET):
        has, lacks = ("password", "username") if channel.username is UNSET else ("username", "password")
        yield make_mistake((*path, has), f"needs a `{lacks}` beside it; write it, or remove `{has}`.")
    if channel.password is not UNSET and channel.security == "none" and not _is_here(channel.host or ""):
        sentence = "is none, so the password would be sent in plain text"
        yield make_mistake((*path, "security"), f"{sentence}; write starttls or tls.")


def _addresses(channel: Channel, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    yield from (((*path, "to", index), address) for index, address in enumerate(channel.to))
    if channel.sender is not UNSET:
        yield (*path, "sender"), channel.sender


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _address_mistakes(channel: Channel, path: KeyPath) -> Iterator[Mistake]:
    if channel.url is not UNSET and urlsplit(channel.url).scheme not in {"http", "https"}:
        yield make_mistake(path, "is a WebSocket, and a webhook is not; begin it with https:// or http://.")
