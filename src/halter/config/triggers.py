"""What can be known to be wrong with a trigger before it has started anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import UNSET

from halter.config.beside import Unreadable, read_beside
from halter.config.both import either
from halter.config.load import KeyPath, Wrong
from halter.config.sensors import unlisted
from halter.config.shape import dotted
from halter.core.clock import MINUTE
from halter.core.durations import shown_duration
from halter.core.spec import AgentSpec
from halter.core.tasks import AnyTrigger, Schedule, Watch
from halter.core.text import nearest, shorten

_TIMES: Final = ("cron", "every", "at")
_CAPS: Final = ("max_cost_usd", "max_cost_usd_per_hour", "max_cost_usd_per_day")
_KINDS: Final = ("schedules", "watches", "webhooks")


def triggers(spec: AgentSpec) -> Iterator[tuple[KeyPath, AnyTrigger]]:
    """List all that starts sessions, with the way to each."""
    for kind in _KINDS:
        yield from (((kind, index), trigger) for index, trigger in enumerate(getattr(spec, kind)))


def mistimed(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Wrong]:
    """List what is wrong with all that starts sessions. Files are looked for beside the agent's, if it has any."""
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
            sentence = f"`{dotted((*path, 'name'))}` is `{trigger.name}`, as that of `{dotted(seen[trigger.name])}`"
            yield (*path, "name"), f"{sentence}; choose another name."
        seen.setdefault(trigger.name, path)


def _of_trigger(trigger: AnyTrigger, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    there, plays = dotted(path), trigger.playbook is not UNSET
    if not trigger.prompt.strip() and not plays:
        yield path, f"`{there}` starts sessions that have nothing to do; write a `prompt`, or name a `playbook`."
    if trigger.prompt and plays:
        yield (*path, "playbook"), f"`{there}` has both a `prompt` and a `playbook`; keep one of them."
    if trigger.inputs and not plays:
        yield (*path, "inputs"), f"`{dotted((*path, 'inputs'))}` is for a `playbook`, which is missing; name it."
    yield from unlisted(spec, (*path, "inputs"), trigger.inputs)
    for key in _CAPS:
        if getattr(trigger, key) == 0:
            sentence = f"`{dotted((*path, key))}` is 0, so nothing could ever run"
            yield (*path, key), f"{sentence}; write a number of dollars, or `none` for no cap of its own."
    for index, name in enumerate(trigger.collections):
        yield from _undeclared(name, spec, (*path, "collections", index))
    if trigger.playbook is not UNSET and folder is not None:
        yield from _unreadable(folder, trigger.playbook, (*path, "playbook"))


def _undeclared(name: str, spec: AgentSpec, path: KeyPath) -> Iterator[Wrong]:
    if name not in spec.collections:
        hint = nearest(name, list(spec.collections), "the `collections` of this file")
        yield path, f"`{dotted(path)}` is `{name}`, which is no collection; {hint}"


def _unreadable(folder: Path, name: str, path: KeyPath) -> Iterator[Wrong]:
    why = "is missing"
    try:
        if read_beside(folder, name) is not None:
            return
    except Unreadable as unreadable:
        why = str(unreadable)
    yield path, f"`{dotted(path)}` names `{shorten(name)}`, which {why}; name a file in the agent's folder."


def _of_schedule(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Wrong]:
    there, said = dotted(path), [key for key in _TIMES if getattr(schedule, key) is not UNSET]
    if not said:
        yield path, f"`{there}` says not when; write `cron`, `every` or `at`."
    for key in said[1:]:
        yield (*path, key), f"`{there}` has both `{said[0]}` and `{key}`; one of them says when: keep one."
    hours = schedule.active_hours
    if hours is not UNSET and hours.start == hours.end:
        sentence = f"`{there}.active_hours` starts and ends at {hours.start}; let one be another time"
        yield (*path, "active_hours"), f"{sentence}, or remove it for a schedule that may always run."
    yield from _of_pauses(schedule, path)
    yield from _of_moments(schedule, path, either(schedule.timezone, zone))


def _of_pauses(schedule: Schedule, path: KeyPath) -> Iterator[Wrong]:
    least, every = schedule.min_interval, schedule.every
    if least < MINUTE:
        sentence = f"`{dotted((*path, 'min_interval'))}` is {shown_duration(least) if least else '0'}"
        yield (*path, "min_interval"), f"{sentence}, and a minute is the least; write 1m or more."
    if every is UNSET:
        return
    if every < least:
        sentence = f"`{dotted((*path, 'every'))}` is {shown_duration(every) if every else '0'}, which is shorter"
        yield (*path, "every"), f"{sentence} than its `min_interval`, {shown_duration(least)}; write that or more."
    elif schedule.jitter >= every:
        sentence = f"`{dotted((*path, 'jitter'))}` is {shown_duration(schedule.jitter)}, as long as its `every`"
        yield (*path, "jitter"), f"{sentence} or longer, so that runs would meet; write less."


def _of_moments(schedule: Schedule, path: KeyPath, zone: str) -> Iterator[Wrong]:
    """See that the times can come at all."""
    if schedule.at is UNSET and schedule.cron is UNSET:
        return
    from halter.core.schedules import Timing, flaw, parse_at

    if schedule.at is not UNSET:
        moment = parse_at(schedule.at, zone)
        if isinstance(moment, str):
            yield (*path, "at"), f"`{dotted((*path, 'at'))}` cannot be used. {moment}"
    if schedule.cron is not UNSET and (why := flaw(Timing(cron=schedule.cron, timezone=zone))):
        yield (*path, "cron"), f"`{dotted((*path, 'cron'))}` cannot be used. {why}"


def _of_watch(watch: Watch, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    there = dotted(path)
    if watch.path is UNSET and watch.collection is UNSET:
        yield path, f"`{there}` says not what to watch; write a `path`, or name a `collection`."
    if watch.path is not UNSET and watch.collection is not UNSET:
        yield (*path, "collection"), f"`{there}` has both a `path` and a `collection`; keep one of them."
    yield from unmatched(watch.pattern, (*path, "pattern"))
    if watch.collection is UNSET:
        if watch.path is not UNSET:
            yield from _of_place(watch.path, spec, folder, (*path, "path"))
        return
    yield from _undeclared(watch.collection, spec, (*path, "collection"))
    if watch.pattern != "*":
        sentence = f"`{dotted((*path, 'pattern'))}` is for a `path`, and this watches a collection"
        yield (*path, "pattern"), f"{sentence}; write it there, under `collections`, or remove it."
    if watch.collection in spec.collections:
        yield from _of_place(spec.collections[watch.collection].path, spec, folder, (*path, "collection"))


def _of_place(name: str, spec: AgentSpec, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    """Refuse to watch what commands can write: nobody could tell an agent's own output from what is new."""
    yield from misplaced(name, folder, path)
    shell = spec.tools.shell
    watched, works = located(folder, name), None if shell is UNSET else located(folder, shell.root)
    if watched is None or works is None:
        return
    if watched.is_relative_to(works) or works.is_relative_to(watched):
        sentence = f"`{dotted(path)}` leads to where commands write (`tools.shell.root`)"
        yield path, f"{sentence}, so that the agent's own output would start it again; keep the two folders apart."


def misplaced(name: str, folder: Path | None, path: KeyPath) -> Iterator[Wrong]:
    """List what is wrong with the name of a folder, which need not be there yet."""
    found = located(folder, name)
    if found is None or found.is_file():
        yield path, f"`{dotted(path)}` is `{shorten(name)}`, which is no folder; name the one that holds the documents."


def unmatched(pattern: str, path: KeyPath) -> Iterator[Wrong]:
    """List what is wrong with a pattern: it looks below its folder and nowhere else."""
    parts = pattern.split("/")
    if parts[0] in {"", "~"} or ".." in parts or "\0" in pattern:
        sentence = f"`{dotted(path)}` is `{shorten(pattern)}`, which leads out of its folder"
        yield path, f"{sentence}; write it as seen from there, as in *.pdf or **/*.md."


def located(folder: Path | None, name: str) -> Path | None:
    """Find a folder as seen from the agent's own, through all links; None if it cannot be one."""
    try:
        return ((folder or Path()) / name).resolve()
    except (OSError, RuntimeError, ValueError):
        return None
