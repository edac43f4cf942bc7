"""What defines an agent: its files by one digest, and what they came to as a store may keep it."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from halter.config.load import MAX_BYTES
from halter.config.resolve import ResolvedAgent
from halter.core.pacing import Pacing, Source
from halter.core.tasks import Channel, Tasks
from halter.core.tools import secret_names

Asked = TypeVar("Asked", Source, Channel)

HIDDEN: Final = "…"

_BELOW: Final = ("playbooks", ".agents")


def definition_digest(folder: Path) -> str:
    """Name an agent's files by their names and contents: those in its folder itself, its playbooks and its skills.

    What lies in other folders is what it works on, and what is too large to be a definition counts by its size.
    """
    digest = hashlib.sha256(b"halter definition 1\n")
    for path in sorted(_files(folder), key=lambda found: found.as_posix()):
        name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        content = _content(path)
        digest.update(b"%d:%s%d:%s" % (len(name), name, len(content), content))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.is_file())
    for name in _BELOW:
        yield from (path for path in (folder / name).rglob("*") if path.is_file())


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        return path.read_bytes() if size <= MAX_BYTES else b"%d bytes" % size
    except OSError:
        return b"unreadable"


def recorded(agent: ResolvedAgent) -> Mapping[str, Any]:
    """Return what a store keeps of an agent: without what may be a key in plain text, or a person's name."""
    pacing, tasks = _pacing(agent.pacing), _tasks(agent.tasks)
    return {"policy": agent.policy, "mind": agent.mind, "pacing": pacing, "tasks": tasks}


def _pacing(pacing: Pacing) -> Pacing:
    sensors = (replace(sensor, source=_without_keys(sensor.source)) for sensor in pacing.sensors)
    return replace(pacing, sensors=tuple(sensors))


def _tasks(tasks: Tasks) -> Tasks:
    channels = tuple(_without_keys(channel) for channel in tasks.notify.channels)
    hidden = None if tasks.anonymize is None else (HIDDEN,) * len(tasks.anonymize)
    return replace(tasks, notify=replace(tasks.notify, channels=channels), anonymize=hidden)


def _without_keys(asked: Asked) -> Asked:
    """Keep of each header only the secrets that it names, and of an address all but its query."""
    headers = {
        name: " ".join(f"${{secret:{each}}}" for each in sorted(secret_names(value.encode()))) or HIDDEN
        for name, value in asked.headers.items()
    }
    return replace(asked, headers=headers, url=_without_query(asked.url))


def _without_query(url: str | UnsetType) -> str | UnsetType:
    if url is UNSET:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=HIDDEN)) if parts.query else url
