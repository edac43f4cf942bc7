"""Folders of an agent's tools and documents, and the files that tools must not reach."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import UNSET

from halter.config.agent_files import AGENT_FILE, AgentFile, read_agent
from halter.config.decode import format_key_path
from halter.config.guidance import GUIDANCE_FILES, INSTRUCTIONS, Guidance, read_guidance
from halter.config.mcp_file import MCP_FILE
from halter.config.sections import list_triggers, locate_folder
from halter.config.yaml_reader import KeyPath
from halter.core.errors import ConfigError
from halter.core.text import shorten
from halter.spec.agent import AgentSpec
from halter.spec.sensors import FilesSensor
from halter.system.protected_paths import ProtectedEntry, ProtectedPaths, WritableFolders

TOOLS_FILE: Final = "tools.py"


DEFINITION_FILES: Final = (AGENT_FILE, INSTRUCTIONS, *GUIDANCE_FILES, TOOLS_FILE, MCP_FILE)
"""The files that an agent is loaded from, existing or not: a new file counts from the next start."""
DECLARATION_FOLDERS: Final = (".agents", ".claude/skills", "playbooks")
PROTECTED_FOLDERS: Final = (".agents", ".claude", "playbooks", ".git", ".venv", "node_modules")
"""Folders of an agent that tools must not write to: their content is loaded or run."""


def definition_of(folder: Path, spec: AgentSpec | None = None, description: str = "") -> Iterator[ProtectedEntry]:
    """List the files that an agent is loaded from, including those that its file names."""
    sentence = description or f"from which the agent in {folder} is loaded"
    named_files = () if spec is None else list_named_files(spec)
    names = (*DEFINITION_FILES, *named_files, *list_guidance_files(folder))
    yield from (ProtectedEntry(folder / name, sentence) for name in names)
    yield from (ProtectedEntry(folder / name, sentence, is_folder=True) for name in PROTECTED_FOLDERS)
    # An entry of these folders may be stored elsewhere, or have another name by which it could be written.
    yield from (ProtectedEntry(path, sentence, is_folder=path.is_dir()) for path in _list_links(folder))


def _list_links(folder: Path) -> Iterator[Path]:
    """Yield links among skills and playbooks, including dangling ones, and files with several names."""
    for name in DECLARATION_FOLDERS:
        try:
            for path in (folder / name).rglob("*"):
                if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
                    yield path
        except OSError:
            continue


def list_guidance_files(folder: Path) -> tuple[str, ...]:
    """List the guidance files of an agent, with what they import."""
    return read_agent_guidance(folder).files


def read_agent_guidance(folder: Path) -> Guidance:
    """Read the guidance files of an agent, without what its tools may have written."""
    if not any((folder / name).exists() for name in GUIDANCE_FILES):
        return Guidance()
    return read_guidance(folder, list_data_places(folder))


DATA_FOLDER: Final = "data"
"""The folder for an agent's data, from which no code may be loaded."""


def list_data_places(folder: Path) -> tuple[Path, ...]:
    """Return the data folders inside an agent's folder: tool roots, documents and `data`."""
    try:
        spec = read_agent(folder).spec
    except ConfigError:
        return (folder / DATA_FOLDER,)
    names = [
        DATA_FOLDER,
        *(name for _, name in list_tool_roots(spec)),
        *(name for _, name, _ in list_readable_places(spec)),
    ]
    data_places = [Path(os.path.realpath(folder / name)) for name in names]
    root = Path(os.path.realpath(folder))
    return tuple(path for path in data_places if path != root and path.is_relative_to(root))


def list_named_files(spec: AgentSpec) -> Iterator[str]:
    yield from (name for name in (spec.script, spec.reflex) if isinstance(name, str))
    yield from (trigger.playbook for _, trigger in list_triggers(spec) if trigger.playbook is not UNSET)


def list_tool_roots(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    if spec.tools.files is not UNSET:
        yield ("tools", "files", "root"), spec.tools.files.root
    if spec.tools.shell is not UNSET:
        yield ("tools", "shell", "root"), spec.tools.shell.root


def list_readable_places(spec: AgentSpec) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the files and folders that an agent's file makes readable, with key path and pattern."""
    for index, watch in enumerate(spec.watches):
        if watch.path is not UNSET:
            yield ("watches", index, "path"), watch.path, watch.pattern
    for name, collection in spec.collections.items():
        yield ("collections", name, "path"), collection.path, collection.pattern
    for index, sensor in enumerate(spec.sensors):
        if isinstance(sensor, FilesSensor):
            yield ("sensors", index, "source", "path"), sensor.source.path, sensor.source.pattern


def find_writable_folders(folder: Path, spec: AgentSpec | None = None) -> WritableFolders:
    """Return the folders that an agent's tools can write to; an agent with an unreadable file has no tools."""
    resolved_spec = spec or _spec(folder)
    return WritableFolders(
        folder, () if resolved_spec is None else tuple(folder / name for _, name in list_tool_roots(resolved_spec))
    )


def list_agents_above(path: Path) -> Iterator[Path]:
    resolved_path = locate_folder(None, str(path))
    yield from (
        parent for parent in (() if resolved_path is None else resolved_path.parents) if (parent / AGENT_FILE).is_file()
    )


def list_sibling_agents(folder: Path) -> Iterator[Path]:
    own_folder = folder.resolve()
    yield from (file.parent for file in sorted(own_folder.parent.glob(f"*/{AGENT_FILE}")) if file.parent != own_folder)


def list_other_definitions(agent: AgentFile, folder: Path) -> Iterator[ProtectedEntry]:
    """Yield the files of other agents: those in sibling folders, and those whose folder contains one of its roots."""
    own_folder = locate_folder(None, str(folder))
    for other_folder in list_sibling_agents(folder):
        yield from definition_of(other_folder)
    for _, name in list_tool_roots(agent.spec):
        for other_folder in list_agents_above(folder / name):
            if other_folder != own_folder:
                yield from definition_of(other_folder, _spec(other_folder))


def _spec(folder: Path) -> AgentSpec | None:
    try:
        return read_agent(folder).spec
    except ConfigError:
        return None


def check_protected_roots(agent: AgentFile, folder: Path, protected: ProtectedPaths) -> None:
    """Raise a ConfigError for a root or a readable place that reaches protected files."""
    for path, name in list_tool_roots(agent.spec):
        if reach := protected.reach(folder / name):
            raise agent.source_map.error_at(
                path,
                f"`{format_key_path(path)}` is `{shorten(name)}`, which {reach}. Tools cannot use protected files: "
                "use a separate folder, as in `root: work`.",
            )
    for path, name, pattern in list_readable_places(agent.spec):
        if reach := protected.find_match(folder / name, pattern):
            sentence = f"`{format_key_path(path)}` is `{shorten(name)}`, which {reach}"
            raise agent.source_map.error_at(
                path, f"{sentence}. Agents cannot read protected files: use another folder."
            )
