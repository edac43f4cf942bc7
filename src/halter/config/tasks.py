"""What starts an agent's sessions, what they read and whom they tell: checked, and filled in where a file is silent.

Whatever can be known to go wrong is said here, before anything runs: nobody watches a schedule that never fires.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from halter.config.agent import Agent
from halter.config.both import Both, either
from halter.config.channels import CHANNELS, misled
from halter.config.fleet import Fleet
from halter.config.load import KeyPath, Wrong
from halter.config.pacing import HIDDEN, references, without_query
from halter.config.resolve import walk
from halter.config.sensors import unlisted
from halter.config.shape import dotted
from halter.config.triggers import misplaced, mistimed, unmatched
from halter.core.clock import MINUTE
from halter.core.spec import AgentSpec
from halter.core.tasks import VERBS, Anonymize, Channel, Notify, Schedule, Tasks, Verbs

IN_APP: Final = Channel(name="in_app", type="in_app")
"""Where an agent tells what it has to say if nobody named another way."""


def read_tasks(fleet: Fleet, agent: Agent, folder: Path | None) -> Tasks:
    """Put together an agent's tasks, or raise a ConfigError that says what to change.

    An agent of a program has no folder: what it names is looked for here.
    """
    spec, zone = agent.spec, fleet.spec.zone
    for path, sentence in _mistakes(spec, folder, zone):
        raise agent.places.wrong(path, sentence)
    _check_reached(Both(fleet, agent))
    return Tasks(
        schedules=tuple(_placed(schedule, zone) for schedule in spec.schedules),
        watches=spec.watches,
        webhooks=spec.webhooks,
        collections=dict(spec.collections),
        review=spec.review,
        notify=_notify(fleet, agent),
        anonymize=_hidden(spec),
        verbs=_verbs(spec),
        idle_halt=round(spec.idle_halt_minutes * MINUTE),
        concurrency=either(spec.concurrency, None),
    )


def recorded_tasks(tasks: Tasks) -> Tasks:
    """Take out what may be a key, or somebody's name, so that it can be written down as a part of a definition."""
    channels = tuple(_without_keys(channel) for channel in tasks.notify.channels)
    hidden = None if tasks.anonymize is None else (HIDDEN,) * len(tasks.anonymize)
    return msgspec.structs.replace(tasks, notify=replace(tasks.notify, channels=channels), anonymize=hidden)


def _without_keys(channel: Channel) -> Channel:
    headers = {name: references(value) or HIDDEN for name, value in channel.headers.items()}
    return replace(channel, headers=headers, url=without_query(channel.url))


def judging_models(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    """List the models that look at findings, with the way to each."""
    yield from ((("review", "judges", index), model) for index, model in enumerate(spec.review.judges))


def _mistakes(spec: AgentSpec, folder: Path | None, zone: str) -> Iterator[Wrong]:
    for name, collection in spec.collections.items():
        yield from misplaced(collection.path, folder, ("collections", name, "path"))
        yield from unmatched(collection.pattern, ("collections", name, "pattern"))
    yield from mistimed(spec, folder, zone)
    yield from misled(spec.notify)
    for index, channel in enumerate(spec.notify.channels):
        named = {key: word for key in ("password", "service") if (word := getattr(channel, key)) is not UNSET}
        yield from unlisted(spec, (*CHANNELS, index), {**named, "headers": dict(channel.headers)})
    yield from _of_names(spec)


def _of_names(spec: AgentSpec) -> Iterator[Wrong]:
    said = spec.anonymize
    if isinstance(said, Anonymize) and said.names and said.enabled is UNSET and spec.phases != "review":
        path = ("anonymize", "names")
        yield path, f"`{dotted(path)}` hides nothing while nothing is hidden; write `enabled: true` beside it."


def _check_reached(both: Both) -> None:
    """See that the fleet allows the hosts that an agent's own channels lead to."""
    for index, channel in enumerate(both.agent.spec.notify.channels):
        if channel.url is not UNSET:
            both.reached((*CHANNELS, index, "url"), channel.url)
        if channel.host is not UNSET:
            both.reached((*CHANNELS, index, "host"), f"smtp://{channel.host}")


def _placed(schedule: Schedule, zone: str) -> Schedule:
    """Fill in whose clock it is."""
    zone, hours = either(schedule.timezone, zone), schedule.active_hours
    if hours is not UNSET:
        hours = replace(hours, timezone=either(hours.timezone, zone))
    return replace(schedule, timezone=zone, active_hours=hours)


def _notify(fleet: Fleet, agent: Agent) -> Notify:
    """Put the channels of both files together; what is told of is the agent's word, if it has one."""
    ours, theirs, usual = fleet.spec.notify, agent.spec.notify, Notify()
    taken = {channel.name for channel in ours.channels}
    for index, channel in enumerate(theirs.channels):
        if channel.name in taken:
            path = (*CHANNELS, index, "name")
            sentence = f"`{dotted(path)}` is `{channel.name}`, as that of a channel in {fleet.places.at(CHANNELS)}"
            raise agent.places.wrong(path, f"{sentence}, which every agent has; choose another name.")
    says = ("notify", "on") in agent.places.lines or theirs.on != usual.on
    return Notify(channels=(*ours.channels, *theirs.channels) or (IN_APP,), on=theirs.on if says else ours.on)


def _hidden(spec: AgentSpec) -> tuple[str, ...] | None:
    said = spec.anonymize
    if isinstance(said, bool):
        return () if said else None
    said = either(said, Anonymize())
    return said.names if either(said.enabled, spec.phases == "review") else None


def _verbs(spec: AgentSpec) -> Verbs:
    """Take the verbs that are named, those that a phase grants, and that to read documents where there are any."""
    found = {*spec.verbs, *(name for phase in walk(spec.phases) for name in phase.grants or ())}
    if spec.collections or spec.watches:
        found.add("retrieve_chunks")
    return tuple(verb for verb in VERBS if verb in found)
