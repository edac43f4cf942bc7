"""What `schedules`, `watches`, `webhooks`, `collections` and `notify` say: mistakes that can be known beforehand.

An unattended agent's schedule that never fires goes unnoticed, so every mistake is found when the file is read.
"""

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.config.beside import Unreadable, read_beside
from halter.config.load import KeyPath, Wrong
from halter.config.pacing import unlisted
from halter.config.shape import about, dotted, either
from halter.core.clock import MINUTE
from halter.core.durations import shown_duration
from halter.core.spec import AgentSpec
from halter.core.tasks import Anonymize, AnyTrigger, Channel, ChannelType, Notify, Schedule, Watch
from halter.core.text import listed, nearest, shorten

_TIMES: Final = ("cron", "every", "at")
_CAPS: Final = ("max_cost_usd", "max_cost_usd_per_hour", "max_cost_usd_per_day")
_KINDS: Final = ("schedules", "watches", "webhooks")
_TAKES: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {
        "in_app": (),
        "email": ("to", "sender", "host", "port", "security", "username", "password"),
        "webhook": ("url", "headers"),
        "apprise": ("service",),
    }
)
"""The keys of a channel that mean something to each type."""
_NEEDS: Final[Mapping[ChannelType, tuple[str, ...]]] = MappingProxyType(
    {"in_app": (), "email": ("to", "sender", "host"), "webhook": ("url",), "apprise": ("service",)}
)
_COMMON: Final = ("name", "type")
_MAIL: Final = re.compile(r"[^\s@,;<>\"]+@[^\s@,;<>\"]+")
CHANNELS: Final[KeyPath] = ("notify", "channels")


def triggers(spec: AgentSpec) -> Iterator[tuple[KeyPath, AnyTrigger]]:
    """List all that starts sessions, with the way to each."""
    for kind in _KINDS:
        yield from (((kind, index), trigger) for index, trigger in enumerate(getattr(spec, kind)))


def task_mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Wrong]:
    """List what is wrong with an agent's tasks. Files are looked for beside the agent's, if it has any."""
    for name, collection in spec.collections.items():
        yield from _misplaced(collection.path, folder, ("collections", name, "path"))
        yield from _unmatched(collection.pattern, ("collections", name, "pattern"))
    yield from _of_triggers(spec, folder, zone)
    yield from channel_mistakes(spec.notify)
    for index, channel in enumerate(spec.notify.channels):
        named = {key: word for key in ("password", "service") if (word := getattr(channel, key)) is not UNSET}
        yield from unlisted(spec, (*CHANNELS, index), {**named, "headers": dict(channel.headers)})
    said = spec.anonymize
    if isinstance(said, Anonymize) and said.names and said.enabled is UNSET and spec.phases != "review":
        sentence = "hides nothing while nothing is hidden; write `enabled: true` beside it."
        yield about(("anonymize", "names"), sentence)


def _of_triggers(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Wrong]:
    seen: dict[str, KeyPath] = {}
    for path, trigger in triggers(spec):
        yield from _of_trigger(trigger, spec, folder, path)
        match trigger:
            case Schedule():
                yield from _of_schedule(trigger, path, zone)
            case Watch():
                yield from _of_watch(trigger, spec, folder, path)
            case _:
                yield from unlisted(spec, path, {"token": trigger.token})
        if trigger.name in seen:
            sentence = f"is `{trigger.name}`, as that of `{dotted(seen[trigger.name])}`"
            yield about((*path, "name"), f"{sentence}; choose another name.")
        seen.setdefault(trigger.name, path)


def _of_trigger(trigger: AnyTrigger, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    there, plays = dotted(path), trigger.playbook is not UNSET
    if not trigger.prompt.strip() and not plays:
        yield path, f"`{there}` starts sessions that have nothing to do; write a `prompt`, or name a `playbook`."
    if trigger.prompt and plays:
        yield (*path, "playbook"), f"`{there}` has both a `prompt` and a `playbook`; keep one of them."
    if trigger.inputs and not plays:
        yield about((*path, "inputs"), "is for a `playbook`, which is missing; name it.")
    yield from unlisted(spec, (*path, "inputs"), trigger.inputs)
    for key in _CAPS:
        if getattr(trigger, key) == 0:
            sentence = "is 0, so nothing could ever run"
            yield about((*path, key), f"{sentence}; write a number of dollars, or `none` for no cap of its own.")
    for index, name in enumerate(trigger.collections):
        yield from _undeclared(name, spec, (*path, "collections", index))
    if trigger.playbook is not UNSET and folder is not None:
        yield from _unreadable(folder, trigger.playbook, (*path, "playbook"))


def _undeclared(name: str, spec: AgentSpec, path: KeyPath) -> Iterator[Wrong]:
    if name not in spec.collections:
        hint = nearest(name, list(spec.collections), "the `collections` of this file")
        yield about(path, f"is `{name}`, which is no collection; {hint}")


def _unreadable(folder: Path, name: str, path: KeyPath) -> Iterator[Wrong]:
    why = "is missing"
    try:
        if read_beside(folder, name) is not None:
            return
    except Unreadable as unreadable:
        why = str(unreadable)
    yield about(path, f"names `{shorten(name)}`, which {why}; name a file in the agent's folder.")


def _of_schedule(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Wrong]:
    there, said = dotted(path), [key for key in _TIMES if getattr(schedule, key) is not UNSET]
    if not said:
        yield path, f"`{there}` says not when; write `cron`, `every` or `at`."
    for key in said[1:]:
        yield (*path, key), f"`{there}` has both `{said[0]}` and `{key}`; one of them says when: keep one."
    hours = schedule.active_hours
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"starts and ends at {hours.start}; let one be another time"
        yield about((*path, "active_hours"), f"{sentence}, or remove it for a schedule that may always run.")
    yield from _of_pauses(schedule, path)
    yield from _of_moments(schedule, path, either(schedule.timezone, zone))


def _of_pauses(schedule: Schedule, path: KeyPath) -> Iterator[Wrong]:
    least, every = schedule.min_interval, schedule.every
    if least < MINUTE:
        sentence = f"is {shown_duration(least) if least else '0'}"
        yield about((*path, "min_interval"), f"{sentence}, and a minute is the least; write 1m or more.")
    if every is UNSET:
        return
    if every < least:
        sentence = f"is {shown_duration(every) if every else '0'}, which is shorter"
        yield about(
            (*path, "every"), f"{sentence} than its `min_interval`, {shown_duration(least)}; write that or more."
        )
    elif schedule.jitter >= every:
        sentence = f"is {shown_duration(schedule.jitter)}, as long as its `every`"
        yield about((*path, "jitter"), f"{sentence} or longer, so that runs would meet; write less.")


def _of_moments(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Wrong]:
    """See that the times can come at all."""
    if schedule.at is UNSET and schedule.cron is UNSET:
        return
    from halter.core.schedules import Timing, flaw, parse_at

    if schedule.at is not UNSET:
        moment = parse_at(schedule.at, zone)
        if isinstance(moment, str):
            yield about((*path, "at"), f"cannot be used. {moment}")
    if schedule.cron is not UNSET and (why := flaw(Timing(cron=schedule.cron, timezone=zone))):
        yield about((*path, "cron"), f"cannot be used. {why}")


def _of_watch(watch: Watch, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    there = dotted(path)
    if watch.path is UNSET and watch.collection is UNSET:
        yield path, f"`{there}` says not what to watch; write a `path`, or name a `collection`."
    if watch.path is not UNSET and watch.collection is not UNSET:
        yield (*path, "collection"), f"`{there}` has both a `path` and a `collection`; keep one of them."
    yield from _unmatched(watch.pattern, (*path, "pattern"))
    if watch.collection is UNSET:
        if watch.path is not UNSET:
            yield from _of_place(watch.path, spec, folder, (*path, "path"))
        return
    yield from _undeclared(watch.collection, spec, (*path, "collection"))
    if watch.pattern != "*":
        sentence = "is for a `path`, and this watches a collection"
        yield about((*path, "pattern"), f"{sentence}; write it there, under `collections`, or remove it.")
    if watch.collection in spec.collections:
        yield from _of_place(spec.collections[watch.collection].path, spec, folder, (*path, "collection"))


def _of_place(name: str, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    """Refuse to watch what commands can write: an agent's own output could not be told from what is new."""
    yield from _misplaced(name, folder, path)
    shell = spec.tools.shell
    watched, works = located(folder, name), None if shell is UNSET else located(folder, shell.root)
    if watched is None or works is None:
        return
    if watched.is_relative_to(works) or works.is_relative_to(watched):
        sentence = "leads to where commands write (`tools.shell.root`)"
        yield about(
            path, f"{sentence}, so that the agent's own output would start it again; keep the two folders apart."
        )


def _misplaced(name: str, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    """List what is wrong with the name of a folder, which need not be there yet."""
    found = located(folder, name)
    if found is None or found.is_file():
        yield about(path, f"is `{shorten(name)}`, which is no folder; name the one that holds the documents.")


def _unmatched(pattern: str, path: KeyPath) -> Iterator[Wrong]:
    """List what is wrong with a pattern: it looks below its folder and nowhere else."""
    parts = pattern.split("/")
    if parts[0] in {"", "~"} or ".." in parts or "\0" in pattern:
        sentence = f"is `{shorten(pattern)}`, which leads out of its folder"
        yield about(path, f"{sentence}; write it as seen from there, as in *.pdf or **/*.md.")


def located(folder: Path | None, name: str) -> Path | None:
    """Find a folder as seen from the agent's own, through all links; None if it cannot be one."""
    try:
        return ((folder or Path()) / name).resolve()
    except (OSError, RuntimeError, ValueError):
        return None


def channel_mistakes(notify: Notify) -> Iterator[Wrong]:
    """List what is wrong with channels, each by itself, and with their names."""
    seen: set[str] = set()
    for index, channel in enumerate(notify.channels):
        path = (*CHANNELS, index)
        yield from _of_channel(channel, path)
        if channel.name in seen:
            yield about((*path, "name"), f"is `{channel.name}`, as that of another; choose another name.")
        seen.add(channel.name)


def _of_channel(channel: Channel, path: KeyPath) -> Iterator[Wrong]:
    kind, usual = channel.type, Channel(name=channel.name, type=channel.type)
    for key in Channel.__struct_fields__:
        if key not in (*_COMMON, *_TAKES[kind]) and getattr(channel, key) != getattr(usual, key):
            sentence = f"means nothing to a channel of type {kind}"
            yield about((*path, key), f"{sentence}, {_taken(kind)}; remove it, or change `type`.")
    for key in _NEEDS[kind]:
        if getattr(channel, key) == getattr(usual, key):
            yield about(path, f"is of type {kind}, which needs `{key}`; write it.")
    match kind:
        case "email":
            yield from _of_mail(channel, path)
        case "webhook":
            yield from _of_address(channel, (*path, "url"))
        case "in_app" | "apprise":
            pass


def _taken(kind: ChannelType) -> str:
    return f"which takes {listed(_TAKES[kind])}" if _TAKES[kind] else "which takes no more than a name"


def _of_mail(channel: Channel, path: KeyPath) -> Iterator[Wrong]:
    for at, address in _addresses(channel, path):
        if not _MAIL.fullmatch(address) or not address.isprintable():
            yield about(at, "is no e-mail address; write one alone, as in ada@example.com.")
    if (channel.username is UNSET) != (channel.password is UNSET):
        has, lacks = ("password", "username") if channel.username is UNSET else ("username", "password")
        yield about((*path, has), f"needs a `{lacks}` beside it; write it, or remove `{has}`.")
    if channel.password is not UNSET and channel.security == "none" and not _is_here(channel.host or ""):
        sentence = "is none, so the password would be sent for all to read"
        yield about((*path, "security"), f"{sentence}; write starttls or tls.")


def _addresses(channel: Channel, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    yield from (((*path, "to", index), address) for index, address in enumerate(channel.to))
    if channel.sender is not UNSET:
        yield (*path, "sender"), channel.sender


def _is_here(host: str) -> bool:
    """Tell whether what is sent to a host stays on this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _of_address(channel: Channel, path: KeyPath) -> Iterator[Wrong]:
    if channel.url is not UNSET and urlsplit(channel.url).scheme not in {"http", "https"}:
        yield about(path, "is a WebSocket, and a webhook is not; begin it with https:// or http://.")
