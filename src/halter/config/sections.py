"""Checks of the sections of `agent.yaml`: autonomy, hot state, sensors, triggers, collections and channels.

A sensor or a schedule that never fires goes unnoticed in an unattended agent, so every mistake is reported when the
file is read. What depends on the agent's tools is checked once they are known.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from msgspec import UNSET

from halter.config.decode import format_key_path, make_mistake, value_or_default
from halter.config.folder_files import UnusableFile, read_folder_file, resolve_links
from halter.config.playbook_files import list_texts
from halter.config.yaml_reader import KeyPath, Mistake, escape_sentence
from halter.core.errors import ConfigError
from halter.core.text import shorten, suggest_nearest
from halter.core.tools import find_secret_names
from halter.expressions import Expression, compile_expression
from halter.spec.agent import AgentSpec
from halter.spec.autonomy import ALWAYS_WAKING_NAMES, HotField, Pacing
from halter.spec.channels import Notify
from halter.spec.sensors import (
    AnySensor,
    ExpressionSignal,
    FilesSource,
    ModelSignal,
    StreamSource,
    ToolSource,
    UrlSource,
)
from halter.spec.tasks import Anonymize
from halter.spec.triggers import HEARTBEAT, AnyTrigger, Schedule, Watch, Webhook, make_heartbeat

GATE_VARIABLES: Final[Mapping[str, Any]] = MappingProxyType({"hot": {}, "before": {}, "changed": [], "skips": 0})

KnownVariables = tuple[Mapping[str, Any], ...]

_SAMPLE_READINGS: Final[tuple[Any, ...]] = ({}, "", [], 0, 0.0, False, "1970-01-01T00:00:00Z", "1s")
_SIGNAL_VARIABLES: Final[KnownVariables] = tuple(
    {"value": value, "hot": _SAMPLE_READINGS[0]} for value in _SAMPLE_READINGS
)
"""The variables of a signal's expression, for each type that a reading can have."""


def list_pacing_mistakes(spec: AgentSpec) -> Iterator[Mistake]:
    for name, field in spec.hot_state.fields.items():
        yield from list_unlisted_secrets(
            spec, ("hot_state", "fields", name, "refresh_arguments"), field.refresh_arguments
        )
    fields = collect_hot_fields(spec)
    for index, sensor in enumerate(spec.sensors):
        path = ("sensors", index)
        yield from _update_mistakes(sensor, fields, (*path, "updates"))
        match sensor.source:
            case ToolSource(arguments=arguments):
                yield from list_unlisted_secrets(spec, (*path, "source", "arguments"), arguments)
            case UrlSource(headers=headers) | StreamSource(headers=headers):
                yield from list_unlisted_secrets(spec, (*path, "source", "headers"), headers)
            case FilesSource():
                pass
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
            if isinstance(signal, ModelSignal):
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


def compile_signals(sensor: AnySensor, locate: Callable[[KeyPath], str] | None = None) -> Mapping[str, Expression]:
    return {
        signal.name: _compile_expression(
            signal.expression,
            _SIGNAL_VARIABLES,
            locate(("signals", index, "expression")) if locate else f"The sensor {sensor.name}",
            "a signal",
        )
        for index, signal in enumerate(sensor.signals)
        if isinstance(signal, ExpressionSignal)
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


def _update_mistakes(sensor: AnySensor, fields: Mapping[str, HotField], path: KeyPath) -> Iterator[Mistake]:
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


_TRIGGER_SECTIONS: Final = ("schedules", "watches", "webhooks")
CHANNELS_PATH: Final[KeyPath] = ("notify", "channels")


def list_triggers(spec: AgentSpec) -> Iterator[tuple[KeyPath, AnyTrigger]]:
    if spec.heartbeat is not UNSET:
        yield (HEARTBEAT,), make_heartbeat(spec.heartbeat, spec.autonomy.active_hours)
    for kind in _TRIGGER_SECTIONS:
        yield from (((kind, index), trigger) for index, trigger in enumerate(getattr(spec, kind)))


def list_task_mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Mistake]:
    for name, collection in spec.collections.items():
        yield from _folder_mistakes(collection.path, folder, ("collections", name, "path"))
    yield from _list_trigger_mistakes(spec, folder, zone)
    yield from list_channel_mistakes(spec.notify)
    for index, channel in enumerate(spec.notify.channels):
        secret_texts = {key: getattr(channel, key, UNSET) for key in ("password", "service", "headers")}
        texts = {key: text for key, text in secret_texts.items() if text is not UNSET}
        yield from list_unlisted_secrets(spec, (*CHANNELS_PATH, index), texts)
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
                yield from _moment_mistakes(trigger, path, value_or_default(trigger.timezone, zone))
            case Watch():
                yield from _watch_mistakes(trigger, spec, folder, path)
            case Webhook():
                tokens = {"token": trigger.token, "previous_token": value_or_default(trigger.previous_token, "")}
                yield from list_unlisted_secrets(spec, path, tokens)
        if trigger.name in path_by_name:
            sentence = f"is `{trigger.name}`, which is also the name of `{format_key_path(path_by_name[trigger.name])}`"
            yield make_mistake((*path, "name"), f"{sentence}; choose another name.")
        path_by_name.setdefault(trigger.name, path)


def _trigger_mistakes(trigger: AnyTrigger, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Mistake]:
    yield from list_unlisted_secrets(spec, (*path, "inputs"), trigger.inputs)
    for index, name in enumerate(trigger.collections):
        yield from _undeclared_mistakes(name, spec, (*path, "collections", index))
    if trigger.playbook is not UNSET and folder is not None:
        yield from _unreadable_mistakes(folder, trigger.playbook, (*path, "playbook"))


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
    if watch.path is not UNSET:
        yield from _path_mistakes(watch.path, spec, folder, (*path, "path"))
    if watch.collection is not UNSET:
        yield from _undeclared_mistakes(watch.collection, spec, (*path, "collection"))
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
        if channel.name in channel_names:
            yield make_mistake(
                (*path, "name"), f"is `{channel.name}`, which is also the name of another channel; choose another name."
            )
        channel_names.add(channel.name)
