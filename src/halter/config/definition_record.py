"""What a store keeps of an agent's definition: a digest of its files, and its content without keys and names."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from halter.config.resolve import ResolvedAgent
from halter.config.roots import list_guidance_files
from halter.config.yaml_reader import MAX_BYTES
from halter.core.tools import find_secret_names
from halter.spec.autonomy import Pacing
from halter.spec.channels import Channel
from halter.spec.sensors import SensorSource
from halter.spec.tasks import Tasks

KeyedSpec = TypeVar("KeyedSpec", SensorSource, Channel)
HIDDEN_VALUE: Final = "…"
_DECLARATION_FOLDERS: Final = ("playbooks", ".agents", ".claude/skills")


def definition_digest(folder: Path, excluded_paths: Iterable[Path] = ()) -> str:
    """Digest an agent's files: those in its folder, its playbooks and its skills.

    Other folders contain data. A file that is too large for a definition counts by its size. `excluded_paths` are
    never opened: a process that closes a file of its open SQLite store loses the locks of that store.
    """
    digest = hashlib.sha256(b"halter definition 1\n")
    excluded_ids = set(map(_identify, excluded_paths)) - {None}
    files = {path for path in _files(folder) if _identify(path) not in excluded_ids}
    for path in sorted(files, key=lambda file: file.as_posix()):
        name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        content = _content(path)
        digest.update(b"%d:%s%d:%s" % (len(name), name, len(content), content))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.is_file())
    for name in _DECLARATION_FOLDERS:
        yield from (path for path in (folder / name).rglob("*") if path.is_file())
    yield from (folder / name for name in list_guidance_files(folder))


def _identify(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, whichever link leads to it. Returns None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        return path.read_bytes() if size <= MAX_BYTES else b"%d bytes" % size
    except OSError:
        return b"unreadable"


def redact_definition(agent: ResolvedAgent) -> Mapping[str, Any]:
    """Return what a store records of an agent, without plain keys and personal names."""
    pacing, tasks = _define_pacing(agent.pacing), _define_tasks(agent.tasks)
    return {"policy": agent.policy, "mind": agent.model_settings, "pacing": pacing, "tasks": tasks}


def _define_pacing(pacing: Pacing) -> Pacing:
    sensors = (replace(sensor, source=_strip_keys(sensor.source)) for sensor in pacing.sensors)
    return replace(pacing, sensors=tuple(sensors))


def _define_tasks(tasks: Tasks) -> Tasks:
    channels = tuple(_strip_keys(channel) for channel in tasks.notify.channels)
    hidden_names = None if tasks.anonymize is None else (HIDDEN_VALUE,) * len(tasks.anonymize)
    return replace(tasks, notify=replace(tasks.notify, channels=channels), anonymize=hidden_names)


def _strip_keys(spec: KeyedSpec) -> KeyedSpec:
    """Return a copy with only the secret references of each header, and the URL without its query."""
    headers = {
        name: " ".join(f"${{secret:{secret}}}" for secret in sorted(find_secret_names(value.encode()))) or HIDDEN_VALUE
        for name, value in spec.headers.items()
    }
    return replace(spec, headers=headers, url=_strip_query(spec.url))


def _strip_query(url: str | UnsetType) -> str | UnsetType:
    if url is UNSET:
        return url
    url_parts = urlsplit(url)
    return urlunsplit(url_parts._replace(query=HIDDEN_VALUE)) if url_parts.query else url
