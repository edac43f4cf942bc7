"""Checks of the sections of `agent.yaml`: autonomy, hot state, sensors, triggers, collections and channels.

A sensor or a schedule that never fires goes unnoticed in an unattended agent, so every mistake is reported when the
file is read. What depends on the agent's tools is checked once they are known.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.config.decode import format_key_path, make_mistake, value_or_default
from halter.config.folder_files import UnusableFile, read_folder_file, resolve_links
from halter.config.playbook_files import list_texts
from halter.config.yaml_reader import KeyPath, Mistake, escape_sentence
from halter.core.clock import MINUTE, format_duration
from halter.core.errors import ConfigError
from halter.core.text import Expression, compile_expression, join_names, shorten, suggest_nearest
from halter.core.tools import find_secret_names
from halter.spec.agent import AgentSpec
from halter.spec.autonomy import ALWAYS_WAKING_NAMES, Autonomy, Gate, HotField, Pacing
from halter.spec.channels import Channel, ChannelType, Notify
from halter.spec.sensors import SensorSource, SensorSpec, SensorType, Signal, StreamFormat
from halter.spec.tasks import Anonymize
from halter.spec.triggers import HEARTBEAT, TIMED_SCHEMES, AnyTrigger, Schedule, Watch, Webhook, make_heartbeat

GATE_VARIABLES: Final[Mapping[str, Any]] = MappingProxyType({"hot": {}, "before": {}, "changed": [], "skips": 0})

KnownVariables = tuple[Mapping[str, Any], ...]

_SAMPLE_READINGS: Final[tuple[Any, ...]] = ({}, "", [], 0, 0.0, False, "1970-01-01T00:00:00Z", "1s")
_SIGNAL_VARIABLES: Final[KnownVariables] = tuple(
    {"value": value, "hot": _SAMPLE_READINGS[0]} for value in _SAMPLE_READINGS
)
"""The variables of a signal's expression, for each type that a reading can have."""
_SOURCE_KEYS: Final[Mapping[SensorType, tuple[str, ...]]] = MappingProxyType(
    {
        "poll": ("tool", "arguments", "url", "headers"),
        "files": ("path", "pattern"),
        "stream": ("url", "headers", "format"),
    }
)
_SOURCE_REQUIREMENTS: Final[Mapping[SensorType, str]] = MappingProxyType(
    {
        "poll": "a `tool` or a `url`",
        "files": "a `path` to a file or a folder",
        "stream": "a `url` that begins with http://, https://, ws:// or wss://",
    }
)
_FORMAT_BY_SCHEME: Final[Mapping[str, StreamFormat]] = MappingProxyType(
    {"http": "sse", "https": "sse", "ws": "websocket", "wss": "websocket"}
)
_POLL_KEYS: Final = ("interval", "jitter")
_SCORE_KEYS: Final = ("expression", "model", "detector")


def list_pacing_mistakes(spec: AgentSpec) -> Iterator[Mistake]:
    yield from _autonomy_mistakes(spec.autonomy)
    for name, field in spec.hot_state.fields.items():
        yield from _field_mistakes(field, ("hot_state", "fields", name))
        yield from list_unlisted_secrets(
            spec, ("hot_state", "fields", name, "refresh_arguments"), field.refresh_arguments
        )
    fields = collect_hot_fields(spec)
    for index, sensor in enumerate(spec.sensors):
        path, source = ("sensors", index), sensor.source
        yield from _sensor_mistakes(sensor, fields, path)
        yield from list_unlisted_secrets(spec, (*path, "source", "headers"), source.headers)
        yield from list_unlisted_secrets(spec, (*path, "source", "arguments"), source.arguments)
    yield from _name_mistakes(spec)


def collect_hot_fields(spec: AgentSpec) -> dict[str, HotField]:
    field_names = (update.field for sensor in spec.sensors for update in sensor.list_updates())
    return dict(spec.hot_state.fields) | {name: HotField() for name in field_names if name not in spec.hot_state.fields}


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
    """List warnings about fields that nothing writes; these are not errors, since a file may be unfinished."""
    written_names = {update.field for sensor in pacing.sensors for update in sensor.list_updates()}
    return tuple(
        f"Nothing writes the field `{name}`, so it is always shown as not yet loaded. Give it a `refresh_tool`, "
        "or write it from a sensor."
        for name, field in pacing.fields.items()
        if field.refresh_tool is UNSET and name not in written_names
    )


def list_unlisted_secrets(spec: AgentSpec, path: KeyPath, value: Any) -> Iterator[Mistake]:
    for at, text in list_texts(dict(value), path):
        for name in sorted(find_secret_names(text.encode("utf-8", "surrogatepass")) - {*spec.secrets}):
            yield make_mistake(at, f"names the secret `{name}`, which is not in the agent's `secrets`; add it there.")


def compile_gate(pacing: Pacing, location: str = "`autonomy.gate.expression`") -> Expression | None:
    """Compile the gate's expression, if any; `location` is named in a ConfigError."""
    gate = pacing.autonomy.gate
    if gate is UNSET or not gate.expression:
        return None
    return _compile_expression(gate.expression, (GATE_VARIABLES,), location, "the gate")


def compile_signals(sensor: SensorSpec, locate: Callable[[KeyPath], str] | None = None) -> Mapping[str, Expression]:
    return {
        signal.name: _compile_expression(
            signal.expression,
            _SIGNAL_VARIABLES,
            locate(("signals", index, "expression")) if locate else f"The sensor {sensor.name}",
            "a signal",
        )
        for index, signal in enumerate(sensor.signals)
        if signal.expression is not UNSET
    }


def _compile_expression(text: str, variants: KnownVariables, location: str, owner: str) -> Expression:
    """Compile an expression that is valid for one of several types: a reading's type is not known in advance."""
    sentence = ""
    for variables in variants:
        try:
            return compile_expression(text, variables, location, "expression", owner)
        except ConfigError as error:
            sentence = sentence or escape_sentence(str(error))
    raise ConfigError(sentence)


def _autonomy_mistakes(autonomy: Autonomy) -> Iterator[Mistake]:
    min_sleep, max_sleep, hours = autonomy.min_sleep, autonomy.max_sleep, autonomy.active_hours
    path = ("autonomy", "min_sleep")
    if not min_sleep:
        yield make_mistake(path, "is 0, so the agent might never pause; write a duration, as in 1s.")
    if min_sleep > max_sleep:
        sentence = f"`autonomy.min_sleep` ({format_duration(min_sleep)}) is longer than"
        yield path, f"{sentence} `autonomy.max_sleep` ({format_duration(max_sleep)}); change one of them."
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"starts and ends at {hours.start}; change one of them"
        yield make_mistake(("autonomy", "active_hours"), f"{sentence}, or remove the key to allow all hours.")
    gate, precheck_model = value_or_default(autonomy.gate, Gate()), autonomy.precheck_model
    if precheck_model is not UNSET and gate.model not in (UNSET, precheck_model):
        sentence = f"is `{precheck_model}`, but `autonomy.gate.model` is `{gate.model}`"
        yield make_mistake(("autonomy", "precheck_model"), f"{sentence}; both set the same model, so keep one of them.")
    if gate.prompt and gate.model is UNSET and precheck_model is UNSET:
        sentence = "needs a `model`, which is missing; write it, or remove the prompt."
        yield make_mistake(("autonomy", "gate", "prompt"), sentence)


def _field_mistakes(field: HotField, path: KeyPath) -> Iterator[Mistake]:
    if field.max_items is not UNSET and field.type != "array":
        sentence = f"applies to arrays, but the field's type is {field.type}; write `type: array`, or remove it."
        yield make_mistake((*path, "max_items"), sentence)
    if field.refresh_tool is UNSET:
        for key in ("auto_refresh", "refresh_arguments", "path"):
            if getattr(field, key):
                sentence = f"needs a `refresh_tool`, which is missing; write it, or remove `{key}`."
                yield make_mistake((*path, key), sentence)


def _name_mistakes(spec: AgentSpec) -> Iterator[Mistake]:
    """List ambiguous names among those that can wake a sleeping agent."""
    noun_by_name = dict.fromkeys(collect_hot_fields(spec), "a field")
    for path, name, noun, may_share in _list_names(spec):
        if name in ALWAYS_WAKING_NAMES:
            yield make_mistake(path, f"is `{name}`, which is reserved: it always wakes the agent; choose another name.")
        elif name in noun_by_name and not (may_share and noun_by_name[name] == "a field"):
            sentence = f"is `{name}`, which is already the name of {noun_by_name[name]}"
            yield make_mistake(path, f"{sentence}; choose another name.")
        if noun != "a field":
            noun_by_name[name] = noun


def _list_names(spec: AgentSpec) -> Iterator[tuple[KeyPath, str, str, bool]]:
    """Yield each name with its path, its noun, and true if a field may have the same name."""
    for name in spec.hot_state.fields:
        yield ("hot_state", "fields", name), name, "a field", True
    for index, sensor in enumerate(spec.sensors):
        for item_index, update in enumerate(sensor.updates):
            yield ("sensors", index, "updates", item_index, "field"), update.field, "a field", True
    for index, sensor in enumerate(spec.sensors):
        written_fields = {update.field for update in sensor.list_updates()}
        yield ("sensors", index, "name"), sensor.name, "a sensor", sensor.name in written_fields
    for index, sensor in enumerate(spec.sensors):
        for item_index, signal in enumerate(sensor.signals):
            yield ("sensors", index, "signals", item_index, "name"), signal.name, "a signal", False


def _sensor_mistakes(sensor: SensorSpec, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Mistake]:
    yield from _source_mistakes(sensor, (*path, "source"))
    for key in ("interval", "timeout"):
        if not getattr(sensor, key):
            yield make_mistake((*path, key), "is 0; write a duration, as in 5s.")
    defaults = SensorSpec(name=sensor.name, type=sensor.type, source=sensor.source)
    for key in () if sensor.type == "poll" else _POLL_KEYS:
        if getattr(sensor, key) != getattr(defaults, key):
            yield make_mistake(
                (*path, key), f"applies to sensors of type poll, but this one is of type {sensor.type}; remove it."
            )
    yield from _update_mistakes(sensor, fields, (*path, "updates"))
    for index, signal in enumerate(sensor.signals):
        yield from _signal_mistakes(signal, (*path, "signals", index))


def _source_mistakes(sensor: SensorSpec, path: KeyPath) -> Iterator[Mistake]:
    source, kind, defaults = sensor.source, sensor.type, SensorSource()
    for key in SensorSource.__struct_fields__:
        if key not in _SOURCE_KEYS[kind] and getattr(source, key) != getattr(defaults, key):
            sentence = f"does not apply to a sensor of type {kind}, which needs {_SOURCE_REQUIREMENTS[kind]}"
            yield make_mistake((*path, key), f"{sentence}; remove it, or change `type`.")
    missing = {
        "poll": source.tool is UNSET and source.url is UNSET,
        "files": source.path is UNSET,
        "stream": source.url is UNSET,
    }
    if missing[kind]:
        yield make_mistake(
            path, f"is incomplete: a sensor of type {kind} needs {_SOURCE_REQUIREMENTS[kind]}; write it."
        )
    match kind:
        case "poll":
            yield from _poll_mistakes(source, path)
        case "stream":
            yield from _format_mistakes(source, path)
        case "files":
            pass


def _poll_mistakes(source: SensorSource, path: KeyPath) -> Iterator[Mistake]:
    if source.tool is not UNSET and source.url is not UNSET:
        yield (*path, "url"), f"`{format_key_path(path)}` has both a `tool` and a `url`; keep one of them."
    if source.arguments and source.tool is UNSET:
        yield make_mistake((*path, "arguments"), "applies to a `tool`; for a `url`, write it into the query.")
    if source.headers and source.url is UNSET:
        yield make_mistake((*path, "headers"), "applies to a `url`, which is missing; remove it.")
    if source.url is not UNSET and _FORMAT_BY_SCHEME[urlsplit(source.url).scheme] == "websocket":
        sentence = "is a WebSocket, which cannot be polled"
        yield make_mistake((*path, "url"), f"{sentence}; write `type: stream`, or a URL with http:// or https://.")


def _format_mistakes(source: SensorSource, path: KeyPath) -> Iterator[Mistake]:
    if source.url is UNSET or source.format is UNSET:
        return
    scheme = urlsplit(source.url).scheme
    if source.format != _FORMAT_BY_SCHEME[scheme]:
        sentence = f"is {source.format}, but a URL with {scheme}:// uses {_FORMAT_BY_SCHEME[scheme]}"
        yield make_mistake((*path, "format"), f"{sentence}; remove it, or change the URL.")


def _update_mistakes(sensor: SensorSpec, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Mistake]:
    updated_fields: set[str] = set()
    for index, update in enumerate(sensor.updates):
        at = (*path, index)
        if update.append and fields[update.field].type != "array":
            sentence = f"applies to arrays, but the field `{update.field}` is not one"
            remedy = f"under `hot_state.fields`, write {update.field}: {{type: array, max_items: 20}}"
            yield make_mistake((*at, "append"), f"{sentence}; {remedy}.")
        if update.field in updated_fields and not update.append:
            yield make_mistake((*at, "field"), f"is `{update.field}` again; write each field once.")
        updated_fields.add(update.field)


def _signal_mistakes(signal: Signal, path: KeyPath) -> Iterator[Mistake]:
    score_keys = [key for key in _SCORE_KEYS if getattr(signal, key) is not UNSET]
    key_path, score_choices = format_key_path(path), "an `expression`, a `model` or a `detector`"
    if not score_keys:
        yield path, f"`{key_path}` has no score; write {score_choices}."
    for key in score_keys[1:]:
        yield (
            (*path, key),
            f"`{key_path}` has both `{score_keys[0]}` and `{key}`; keep one of them.",
        )
    if signal.model is not UNSET and not signal.prompt.strip():
        yield path, f"`{key_path}` has a `model` but no `prompt`; write what the model should judge."
    if signal.model is UNSET and signal.prompt:
        yield make_mistake((*path, "prompt"), "applies to a `model`, which is missing; write it.")
    yield from _threshold_mistakes(signal, (*path, "threshold"))


def _threshold_mistakes(signal: Signal, path: KeyPath) -> Iterator[Mistake]:
    """List thresholds that are never or always reached."""
    if signal.threshold is UNSET:
        return
    if signal.model is not UNSET and not 0 < signal.threshold <= 1:
        yield make_mistake(
            path, f"is {signal.threshold:g}, but a model scores from 0 to 1; write a number in between, as in 0.8."
        )
    if signal.detector is not UNSET and signal.threshold <= 0:
        sentence = f"is {signal.threshold:g}, which every number reaches"
        yield make_mistake(path, f"{sentence}; write a number of standard deviations, as in 4.")


_TIME_KEYS: Final = ("cron", "every", "at")
_CAP_KEYS: Final = ("max_cost_usd", "max_cost_usd_per_hour", "max_cost_usd_per_day")
_TRIGGER_SECTIONS: Final = ("schedules", "watches", "webhooks")
_CHANNEL_KEYS: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {
        "in_app": (),
        "email": ("to", "sender", "host", "port", "security", "username", "password"),
        "webhook": ("url", "headers"),
        "apprise": ("service",),
    }
)
_REQUIRED_CHANNEL_KEYS: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {"in_app": (), "email": ("to", "sender", "host"), "webhook": ("url",), "apprise": ("service",)}
)
_COMMON_CHANNEL_KEYS: Final = ("name", "type")
_MAIL_ADDRESS: Final = re.compile(r"[^\s@,;<>\"]+@[^\s@,;<>\"]+")
CHANNELS_PATH: Final[KeyPath] = ("notify", "channels")


def list_triggers(spec: AgentSpec) -> Iterator[tuple[KeyPath, AnyTrigger]]:
    if spec.heartbeat is not UNSET:
        yield (HEARTBEAT,), make_heartbeat(spec.heartbeat, spec.autonomy.active_hours)
    for kind in _TRIGGER_SECTIONS:
        yield from (((kind, index), trigger) for index, trigger in enumerate(getattr(spec, kind)))


def list_task_mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Mistake]:
    for name, collection in spec.collections.items():
        yield from _folder_mistakes(collection.path, folder, ("collections", name, "path"))
        yield from _pattern_mistakes(collection.pattern, ("collections", name, "pattern"))
    yield from _list_trigger_mistakes(spec, folder, zone)
    yield from list_channel_mistakes(spec.notify)
    for index, channel in enumerate(spec.notify.channels):
        secret_texts = {key: value for key in ("password", "service") if (value := getattr(channel, key)) is not UNSET}
        yield from list_unlisted_secrets(
            spec, (*CHANNELS_PATH, index), {**secret_texts, "headers": dict(channel.headers)}
        )
    anonymize = spec.anonymize
    if isinstance(anonymize, Anonymize) and anonymize.names and anonymize.enabled is UNSET and spec.phases != "review":
        sentence = "has no effect while anonymization is off; write `enabled: true`."
        yield make_mistake(("anonymize", "names"), sentence)


def _list_trigger_mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Mistake]:
    path_by_name: dict[str, KeyPath] = {}
    for path, trigger in list_triggers(spec):
        yield from _trigger_mistakes(trigger, spec, folder, path)
        match trigger:
            case Schedule():
                yield from _schedule_mistakes(trigger, path, zone)
            case Watch():
                yield from _watch_mistakes(trigger, spec, folder, path)
            case _:
                yield from _webhook_mistakes(trigger, spec, path)
        if trigger.name in path_by_name:
            sentence = f"is `{trigger.name}`, which is also the name of `{format_key_path(path_by_name[trigger.name])}`"
            yield make_mistake((*path, "name"), f"{sentence}; choose another name.")
        path_by_name.setdefault(trigger.name, path)


def _trigger_mistakes(trigger: AnyTrigger, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    key_path, has_playbook = format_key_path(path), trigger.playbook is not UNSET
    if not trigger.prompt.strip() and not has_playbook:
        yield path, f"`{key_path}` starts sessions without a task; write a `prompt` or a `playbook`."
    if trigger.prompt and has_playbook:
        yield (*path, "playbook"), f"`{key_path}` has both a `prompt` and a `playbook`; keep one of them."
    if trigger.inputs and not has_playbook:
        yield make_mistake((*path, "inputs"), "applies to a `playbook`, which is missing; write it.")
    yield from list_unlisted_secrets(spec, (*path, "inputs"), trigger.inputs)
    for key in _CAP_KEYS:
        if getattr(trigger, key) == 0:
            sentence = "is 0, so nothing could run"
            yield make_mistake((*path, key), f"{sentence}; write a number of dollars, or `none` for no separate cap.")
    for index, name in enumerate(trigger.collections):
        yield from _undeclared_mistakes(name, spec, (*path, "collections", index))
    if trigger.playbook is not UNSET and folder is not None:
        yield from _unreadable_mistakes(folder, trigger.playbook, (*path, "playbook"))


def _webhook_mistakes(hook: Webhook, spec: AgentSpec, path: KeyPath) -> Iterator[Mistake]:
    texts = {"token": hook.token, "previous_token": hook.previous_token}
    yield from list_unlisted_secrets(spec, path, {key: text for key, text in texts.items() if text is not UNSET})
    if hook.tolerance is UNSET:
        return
    if hook.tolerance == 0:
        yield make_mistake((*path, "tolerance"), "is 0, so every delivery would be refused; write a duration.")
    if hook.scheme not in TIMED_SCHEMES:
        schemes = ", ".join(f"`{name}`" for name in sorted(TIMED_SCHEMES))
        sentence = f"does not apply to the scheme `{hook.scheme}`, which signs no time; only {schemes} do. Remove it."
        yield make_mistake((*path, "tolerance"), sentence)


def _undeclared_mistakes(name: str, spec: AgentSpec, path: KeyPath) -> Iterator[Mistake]:
    if name not in spec.collections:
        hint = suggest_nearest(name, list(spec.collections), "the `collections` of this file")
        yield make_mistake(path, f"is `{name}`, which is not a collection; {hint}")


def _unreadable_mistakes(folder: Path, name: str, path: KeyPath) -> Iterator[Mistake]:
    reason = "is missing"
    try:
        if read_folder_file(folder, name) is not None:
            return
    except UnusableFile as error:
        reason = str(error)
    yield make_mistake(path, f"names `{shorten(name)}`, which {reason}; name a file in the agent's folder.")


def _schedule_mistakes(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Mistake]:
    key_path, time_keys = format_key_path(path), [key for key in _TIME_KEYS if getattr(schedule, key) is not UNSET]
    if not time_keys:
        yield path, f"`{key_path}` has no time; write `cron`, `every` or `at`."
    for key in time_keys[1:]:
        yield (*path, key), f"`{key_path}` has both `{time_keys[0]}` and `{key}`; keep one of them."
    hours = schedule.active_hours
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"starts and ends at {hours.start}; change one of them"
        yield make_mistake((*path, "active_hours"), f"{sentence}, or remove the key to allow all hours.")
    yield from _pause_mistakes(schedule, path)
    yield from _moment_mistakes(schedule, path, value_or_default(schedule.timezone, zone))


def _pause_mistakes(schedule: Schedule, path: KeyPath) -> Iterator[Mistake]:
    min_interval, interval = schedule.min_interval, schedule.every
    if min_interval < MINUTE:
        sentence = f"is {format_duration(min_interval) if min_interval else '0'}"
        yield make_mistake((*path, "min_interval"), f"{sentence}, but the minimum is 1m; write that or more.")
    if interval is UNSET:
        return
    if interval < min_interval:
        sentence = f"is {format_duration(interval) if interval else '0'}, which is shorter"
        yield make_mistake(
            (*path, "every"),
            f"{sentence} than its `min_interval`, {format_duration(min_interval)}; write that or more.",
        )
    elif schedule.jitter >= interval:
        sentence = f"is {format_duration(schedule.jitter)}, as long as its `every`"
        yield make_mistake((*path, "jitter"), f"{sentence} or longer, so runs would overlap; write less.")


def _moment_mistakes(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Mistake]:
    if schedule.at is UNSET and schedule.cron is UNSET:
        return
    from halter.core.schedules import Timing, find_timing_flaw, parse_moment

    if schedule.at is not UNSET:
        moment = parse_moment(schedule.at, zone)
        if isinstance(moment, str):
            yield make_mistake((*path, "at"), f"cannot be used. {moment}")
    if schedule.cron is not UNSET and (flaw := find_timing_flaw(Timing(cron=schedule.cron, timezone=zone))):
        yield make_mistake((*path, "cron"), f"cannot be used. {flaw}")


def _watch_mistakes(watch: Watch, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    key_path = format_key_path(path)
    if watch.path is UNSET and watch.collection is UNSET:
        yield path, f"`{key_path}` has nothing to watch; write a `path` or a `collection`."
    if watch.path is not UNSET and watch.collection is not UNSET:
        yield (*path, "collection"), f"`{key_path}` has both a `path` and a `collection`; keep one of them."
    yield from _pattern_mistakes(watch.pattern, (*path, "pattern"))
    if watch.collection is UNSET:
        if watch.path is not UNSET:
            yield from _path_mistakes(watch.path, spec, folder, (*path, "path"))
        return
    yield from _undeclared_mistakes(watch.collection, spec, (*path, "collection"))
    if watch.pattern != "*":
        sentence = "applies to a `path`, but this watches a collection"
        yield make_mistake((*path, "pattern"), f"{sentence}; write it there, under `collections`, or remove it.")
    if watch.collection in spec.collections:
        yield from _path_mistakes(spec.collections[watch.collection].path, spec, folder, (*path, "collection"))


def _path_mistakes(name: str, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    """Reject a watched folder that commands write to: the agent's own output would trigger the watch."""
    yield from _folder_mistakes(name, folder, path)
    shell = spec.tools.shell
    watched_folder, shell_folder = (
        locate_folder(folder, name),
        None if shell is UNSET else locate_folder(folder, shell.root),
    )
    if watched_folder is None or shell_folder is None:
        return
    if watched_folder.is_relative_to(shell_folder) or shell_folder.is_relative_to(watched_folder):
        sentence = "overlaps with the folder of commands (`tools.shell.root`)"
        yield make_mistake(path, f"{sentence}, so the agent's own output would trigger it; use separate folders.")


def _folder_mistakes(name: str, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    """Reject a name that cannot be a folder; the folder need not exist yet."""
    resolved_folder = locate_folder(folder, name)
    if resolved_folder is None or resolved_folder.is_file():
        yield make_mistake(
            path, f"is `{shorten(name)}`, which is not a folder; name the folder that contains the documents."
        )


def _pattern_mistakes(pattern: str, path: KeyPath) -> Iterator[Mistake]:
    parts = pattern.split("/")
    if parts[0] in {"", "~"} or ".." in parts or "\0" in pattern:
        sentence = f"is `{shorten(pattern)}`, which leads out of its folder"
        yield make_mistake(path, f"{sentence}; write it relative to the folder, as in *.pdf or **/*.md.")


def locate_folder(folder: Path | None, name: str) -> Path | None:
    """Resolve a folder relative to the agent's, through all links. Returns None if the name is not valid."""
    try:
        return resolve_links((folder or Path()) / name)
    except (OSError, RuntimeError, ValueError):
        return None


def list_channel_mistakes(notify: Notify) -> Iterator[Mistake]:
    channel_names: set[str] = set()
    for index, channel in enumerate(notify.channels):
        path = (*CHANNELS_PATH, index)
        yield from _one_channel_mistakes(channel, path)
        if channel.name in channel_names:
            yield make_mistake(
                (*path, "name"), f"is `{channel.name}`, which is also the name of another channel; choose another name."
            )
        channel_names.add(channel.name)


def _one_channel_mistakes(channel: Channel, path: KeyPath) -> Iterator[Mistake]:
    kind, defaults = channel.type, Channel(name=channel.name, type=channel.type)
    for key in Channel.__struct_fields__:
        if key not in (*_COMMON_CHANNEL_KEYS, *_CHANNEL_KEYS[kind]) and getattr(channel, key) != getattr(defaults, key):
            sentence = f"does not apply to a channel of type {kind}"
            yield make_mistake(
                (*path, key), f"{sentence}, {_describe_channel_keys(kind)}; remove it, or change `type`."
            )
    for key in _REQUIRED_CHANNEL_KEYS[kind]:
        if getattr(channel, key) == getattr(defaults, key):
            yield make_mistake(path, f"is of type {kind}, which needs `{key}`; write it.")
    match kind:
        case "email":
            yield from _mail_mistakes(channel, path)
        case "webhook":
            yield from _address_mistakes(channel, (*path, "url"))
        case "in_app" | "apprise":
            pass


def _describe_channel_keys(kind: ChannelType) -> str:
    return f"which takes {join_names(_CHANNEL_KEYS[kind])}" if _CHANNEL_KEYS[kind] else "which takes only a name"


def _mail_mistakes(channel: Channel, path: KeyPath) -> Iterator[Mistake]:
    for at, address in _addresses(channel, path):
        if not _MAIL_ADDRESS.fullmatch(address) or not address.isprintable():
            yield make_mistake(at, "is not an e-mail address; write one address, as in ada@example.com.")
    if (channel.username is UNSET) != (channel.password is UNSET):
        present_key, missing_key = ("password", "username") if channel.username is UNSET else ("username", "password")
        yield make_mistake((*path, present_key), f"needs a `{missing_key}`; write it, or remove `{present_key}`.")
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
        yield make_mistake(path, "is a WebSocket URL; write one that begins with https:// or http://.")
