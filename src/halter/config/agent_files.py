"""An agent's folder: its `agent.yaml`, and the agents in the folders beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict, replace

from halter.config.decode import decode_document
from halter.config.yaml_reader import Document, SourceMap, load_file
from halter.spec.agent import AgentSpec
from halter.spec.limits import Limits

AGENT_FILE: Final = "agent.yaml"


class AgentFile(msgspec.Struct, frozen=True):
    spec: AgentSpec
    source_map: SourceMap = SourceMap(AGENT_FILE)


def read_agent(path: Path, display_name: str | None = None) -> AgentFile:
    return parse_agent(load_file(path / AGENT_FILE if path.is_dir() else path, display_name))


def parse_agent(document: Document) -> AgentFile:
    spec = decode_document(document, AgentSpec)
    return AgentFile(replace(spec, limits=_merge_guardrails(spec, document.source_map)), document.source_map)


def _merge_guardrails(spec: AgentSpec, source_map: SourceMap) -> Limits:
    """Merge `guardrails`, a former name of four of the `limits`, into these."""
    values = {key: value for key, value in asdict(spec.guardrails).items() if value is not UNSET}
    for key in values:
        if getattr(spec.limits, key) is not UNSET:
            location = source_map.at(("limits", key))
            sentence = f"`guardrails.{key}` is already set in {location} as `limits.{key}`; keep one of them."
            raise source_map.error_at(("guardrails", key), sentence)
    if values:
        source_map.rename((), "guardrails", "limits")
    return replace(spec.limits, **values)


_NAME_LINE: Final = re.compile(
    r"^name:[ \t]*(?P<q>['\"]?)(?P<name>[A-Za-z0-9_.-]{1,64})(?P=q)[ \t]*(?:#.*)?$", re.MULTILINE
)
_MAX_HEAD: Final = 20_000


def find_neighbour_agents(path: Path | None) -> Mapping[str, Path]:
    """Find the agents in the sibling folders of an agent, by the names in their files. Their code is not run."""
    if path is None:
        return {}
    own_folder, folders = path.resolve(), dict[str, Path]()
    for file in sorted(own_folder.parent.glob(f"*/{AGENT_FILE}")):
        try:
            with file.open(encoding="utf-8", errors="replace") as text:
                head = text.read(_MAX_HEAD)
        except OSError:
            continue
        match = _NAME_LINE.search(head)
        if match is not None and file.parent != own_folder:
            folders.setdefault(match["name"], file.parent)
    return folders
