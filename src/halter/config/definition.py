"""The definition of an agent: its resolved configuration, what a store records of it, and the digest of its files.

A definition is pure: it is read once, from files or from a program's options, and opens nothing.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict

from halter.config.roots import list_guidance_files
from halter.config.yaml_reader import MAX_BYTES, KeyPath
from halter.core.clock import MINUTE
from halter.core.tools import find_secret_names
from halter.policy.evaluation import ResolvedPolicy
from halter.spec.autonomy import Pacing
from halter.spec.forms import BY_KEY, Spec
from halter.spec.models import BrainSpec
from halter.spec.playbook import Playbook
from halter.spec.sensors import AnySensor
from halter.spec.skills import Skill
from halter.spec.tasks import Tasks

LocateValue = Callable[[KeyPath], str]


class AgentDefinition(Struct, frozen=True, kw_only=True):
    """The checked configuration of an agent and its fleet, with every default filled in.

    `source_folder` is the agent's folder; an agent that is defined in a program has none. `notes` say what of its files
    is left out. `locate_script` and `locate_reflex` locate replies and rules for error messages.
    """

    policy: ResolvedPolicy
    model_settings: BrainSpec = field(default_factory=BrainSpec)
    pacing: Pacing = field(default_factory=Pacing)
    tasks: Tasks = field(default_factory=Tasks)
    skills: Mapping[str, Skill] = {}
    playbooks: Mapping[str, Playbook] = {}
    source_folder: Path | None = None
    notes: tuple[str, ...] = ()
    locate_script: LocateValue = lambda _: "the agent"
    locate_reflex: LocateValue = lambda _: "the agent"

    def models(self) -> Iterator[str]:
        settings = self.model_settings
        yield from (name for name in (settings.model, *settings.fallback_models, *settings.model_for.values()) if name)
        yield from self.pacing.models()
        yield from self.tasks.review.judges

    def parts(self) -> dict[str, Any]:
        """Return the fields by name, for a subclass that adds fields."""
        return {name: getattr(self, name) for name in AgentDefinition.__struct_fields__}


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


def redact_definition(agent: AgentDefinition) -> Mapping[str, Any]:
    """Return what a store records of an agent, without plain keys and personal names."""
    pacing, tasks = asdict(agent.pacing), asdict(agent.tasks)
    channels = [_write_kind(channel, _CHANNEL_DEFAULTS) for channel in agent.tasks.notify.channels]
    tasks["notify"] = {**asdict(agent.tasks.notify), "channels": channels}
    if agent.tasks.anonymize is not None:
        tasks["anonymize"] = (HIDDEN_VALUE,) * len(agent.tasks.anonymize)
    pacing["sensors"] = [_write_sensor(sensor) for sensor in agent.pacing.sensors]
    return {"policy": agent.policy, "mind": agent.model_settings, "pacing": pacing, "tasks": tasks}


_SENSOR_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"interval": MINUTE, "jitter": 0.1})
_SOURCE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"arguments": {}, "headers": {}, "pattern": "*"})
_SIGNAL_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"prompt": ""})
_CHANNEL_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"to": (), "security": "starttls", "headers": {}})


def _write_sensor(sensor: AnySensor) -> Mapping[str, Any]:
    source = _write_kind(sensor.source, _SOURCE_DEFAULTS)
    signals = [_write_kind(signal, _SIGNAL_DEFAULTS) for signal in sensor.signals]
    return {**_write_kind(sensor, _SENSOR_DEFAULTS), "source": source, "signals": signals}


def _write_kind(value: Spec, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write a mapping in one form for all its kinds, which the digests of stored definitions are made of.

    Of each header only the secret references are written, and of a URL not its query.
    """
    content: dict[str, Any] = {**defaults, **msgspec.to_builtins(value)}
    content.pop(BY_KEY, None)
    if "headers" in content:
        content["headers"] = {name: _strip_header(text) for name, text in content["headers"].items()}
    if "url" in content:
        content["url"] = _strip_query(content["url"])
    return content


def _strip_query(url: str) -> str:
    url_parts = urlsplit(url)
    return urlunsplit(url_parts._replace(query=HIDDEN_VALUE)) if url_parts.query else url


def _strip_header(text: str) -> str:
    names = sorted(find_secret_names(text.encode()))
    return " ".join(f"${{secret:{name}}}" for name in names) or HIDDEN_VALUE
