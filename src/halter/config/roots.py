"""The folders that an agent's tools and documents use, what they must not reach, and the files of a new agent."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import UNSET

from halter.config.agent_files import (
    AGENT_FILE,
    INSTRUCTIONS,
    AgentFile,
    read_agent,
)
from halter.config.decode import format_key_path
from halter.config.mcp_file import MCP_FILE
from halter.config.sections import list_triggers, locate_folder
from halter.config.yaml_reader import KeyPath
from halter.core.agent_spec import KNOWN_PROVIDERS, REFLEX, SCRIPTED, UNKNOWN_PROVIDER
from halter.core.errors import ConfigError
from halter.core.folders import ProtectedEntry, ProtectedPaths, WritableFolders
from halter.core.spec import AgentSpec
from halter.core.text import shorten
from halter.core.usage import ModelName

TOOLS_FILE: Final = "tools.py"
REPLIES_FILE: Final = "replies.yaml"

_AGENT: Final = """\
# Who this agent is, what thinks for it, and how far it may go.
# All keys: `halter schema`. A mistake is reported with its line.
name: {name}
{model}
mode: SEMI  # you are asked before risky calls; with ASSIST before most
policy:
  provenance: ask  # after it has read what others wrote, you are asked about values that you did not say

limits:
  max_cost_usd: 0.25  # of one session; it stops before it would cost more
  max_cost_usd_per_day: 1.00  # of all its sessions in a day
  max_steps: 20  # of one turn
"""

_RULES: Final = """\
model: reflex  # needs no network and costs nothing; for a real one write, for example, openai:gpt-5-mini

reflex:  # the first rule that holds decides
  - when: message.contains("hello")
    say: Hello. I work by rules; look into agent.yaml and give me a model.
  - say: None of my rules is about that.
"""

_SCRIPT: Final = """\
model: scripted  # says what its script says, each reply once: for tests
script: replies.yaml
"""

_REPLIES: Final = """\
- text: Let me count.
  calls: [{tool: days_between, arguments: {first: "2026-01-01", last: "2026-12-31"}}]
- text: Hello. The year has 364 days after its first.
"""

_INSTRUCTIONS: Final = """\
# {name}

You are {name}, an agent that works by itself.

- Say what you did, and what you did not do.
- Use your tools rather than guess.
- When you are finished, or cannot go on, say so in one sentence.
"""

_TOOLS: Final = '''\
"""Tools of this agent: plain typed functions. What they may do is decided by the guard."""

from datetime import date

from halter import tool


@tool(level="SAFE", effect="read", reads="nothing")
def days_between(first: str, last: str) -> str:
    """Count the days from one date to another, both written as 2026-11-15."""
    return str((date.fromisoformat(last) - date.fromisoformat(first)).days)
'''


def render_starter_files(name: str, model: str) -> Mapping[str, str]:
    """The files of a new agent by name; without a model, it works by rules."""
    files = {
        AGENT_FILE: _AGENT.format(name=_quote_if_needed(name), model=_model_lines(model)),
        INSTRUCTIONS: _INSTRUCTIONS.format(name=name),
        TOOLS_FILE: _TOOLS,
    }
    return files | ({REPLIES_FILE: _REPLIES} if _provider(model) == SCRIPTED else {})


def find_key_variable(model: str) -> str:
    return next(iter(KNOWN_PROVIDERS.get(_provider(model), UNKNOWN_PROVIDER).keys), "")


def _provider(model: str) -> str:
    return ModelName.parse(model).provider if model else REFLEX


def _model_lines(model: str) -> str:
    match _provider(model):
        case "reflex":
            return _RULES
        case "scripted":
            return _SCRIPT
        case provider:
            return f"model: {_quote_if_needed(model)}\n{_provider_lines(provider)}"


def _provider_lines(provider: str) -> str:
    if KNOWN_PROVIDERS.get(provider, UNKNOWN_PROVIDER).base_url:
        return ""
    comment = "where it is reached; what it costs is said in halter.yaml, under `models`"
    return f"providers:\n  {_quote_if_needed(provider)}:\n    base_url: http://localhost:8000/v1  # {comment}\n"


def _quote_if_needed(text: str) -> str:
    """Quote text only where YAML would read it as something else."""
    plain = re.fullmatch(r"[A-Za-z][\w.:/@+-]*\w", text, re.ASCII) and text.lower() not in {"true", "false", "null"}
    return text if plain else json.dumps(text, ensure_ascii=False)


DEFINITION_FILES: Final = (AGENT_FILE, INSTRUCTIONS, TOOLS_FILE, MCP_FILE)
"""What an agent is loaded from, present or not: a file that appears counts from the next start."""
DECLARATION_FOLDERS: Final = (".agents", "playbooks")
PROTECTED_FOLDERS: Final = (*DECLARATION_FOLDERS, ".git", ".venv", "node_modules")
"""Folders of an agent that tools must not write: their content is loaded or run."""


def definition_of(folder: Path, spec: AgentSpec | None = None, what: str = "") -> Iterator[ProtectedEntry]:
    """List the files that an agent is loaded from, including those that its file names."""
    sentence = what or f"from which the agent in {folder} is loaded"
    names = (*DEFINITION_FILES, *(() if spec is None else list_named_files(spec)))
    yield from (ProtectedEntry(folder / name, sentence) for name in names)
    yield from (ProtectedEntry(folder / name, sentence, folder=True) for name in PROTECTED_FOLDERS)
    # What stands in one of these folders may lie elsewhere, or have another name there, by which it could be written.
    yield from (ProtectedEntry(path, sentence, folder=path.is_dir()) for path in _list_links(folder))


def _list_links(folder: Path) -> Iterator[Path]:
    """List links among skills and playbooks, dangling ones too, and files with several names."""
    for name in DECLARATION_FOLDERS:
        try:
            for path in (folder / name).rglob("*"):
                if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
                    yield path
        except OSError:
            continue


def list_named_files(spec: AgentSpec) -> Iterator[str]:
    yield from (name for name in (spec.script, spec.reflex) if isinstance(name, str))
    yield from (trigger.playbook for _, trigger in list_triggers(spec) if trigger.playbook is not UNSET)


def list_tool_roots(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    if spec.tools.files is not UNSET:
        yield ("tools", "files", "root"), spec.tools.files.root
    if spec.tools.shell is not UNSET:
        yield ("tools", "shell", "root"), spec.tools.shell.root


def list_readable_places(spec: AgentSpec) -> Iterator[tuple[KeyPath, str, str]]:
    """List the files and folders that an agent's file lets it read, with key path and pattern."""
    for index, watch in enumerate(spec.watches):
        if watch.path is not UNSET:
            yield ("watches", index, "path"), watch.path, watch.pattern
    for name, collection in spec.collections.items():
        yield ("collections", name, "path"), collection.path, collection.pattern
    for index, sensor in enumerate(spec.sensors):
        if isinstance(sensor.source.path, str):
            yield ("sensors", index, "source", "path"), sensor.source.path, sensor.source.pattern


def find_writable_folders(folder: Path, spec: AgentSpec | None = None) -> WritableFolders:
    """Find the folders that an agent's tools can write; an unreadable file has no tools."""
    read = spec or _spec(folder)
    return WritableFolders(folder, () if read is None else tuple(folder / name for _, name in list_tool_roots(read)))


def list_agents_above(path: Path) -> Iterator[Path]:
    found = locate_folder(None, str(path))
    yield from (each for each in (() if found is None else found.parents) if (each / AGENT_FILE).is_file())


def list_agents_beside(folder: Path) -> Iterator[Path]:
    own = folder.resolve()
    yield from (file.parent for file in sorted(own.parent.glob(f"*/{AGENT_FILE}")) if file.parent != own)


def list_other_definitions(agent: AgentFile, folder: Path) -> Iterator[ProtectedEntry]:
    """List the files of other agents: those beside this one, and those whose folder holds one of its roots."""
    own = locate_folder(None, str(folder))
    for other in list_agents_beside(folder):
        yield from definition_of(other)
    for _, name in list_tool_roots(agent.spec):
        for other in list_agents_above(folder / name):
            if other != own:
                yield from definition_of(other, _spec(other))


def _spec(folder: Path) -> AgentSpec | None:
    try:
        return read_agent(folder).spec
    except ConfigError:
        return None


def check_protected_roots(agent: AgentFile, folder: Path, protected: ProtectedPaths) -> None:
    """Raise a ConfigError for a root or a readable place that reaches protected files."""
    for path, name in list_tool_roots(agent.spec):
        if found := protected.reach(folder / name):
            raise agent.source_map.error_at(
                path,
                f"`{format_key_path(path)}` is `{shorten(name)}`, which {found}. Tools must reach nothing of the kind: "
                "name a folder of its own, as in `root: work`.",
            )
    for path, name, pattern in list_readable_places(agent.spec):
        if found := protected.find_match(folder / name, pattern):
            sentence = f"`{format_key_path(path)}` is `{shorten(name)}`, which {found}"
            raise agent.source_map.error_at(path, f"{sentence}. No agent may read that: name another folder.")
