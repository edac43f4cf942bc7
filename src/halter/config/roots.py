"""The folders that an agent's file names for its tools and its documents, and what they must not reach."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import UNSET

from halter.config.agent import AGENT_FILE, INSTRUCTIONS, Agent, read_agent
from halter.config.load import KeyPath
from halter.config.mcp import MCP_FILE
from halter.config.shape import dotted
from halter.config.starter import TOOLS_FILE
from halter.config.tasks import located, triggers
from halter.core.errors import ConfigError
from halter.core.protected import Protected, ProtectedPaths, Writable
from halter.core.spec import AgentSpec
from halter.core.text import shorten

FILES: Final = (AGENT_FILE, INSTRUCTIONS, TOOLS_FILE, MCP_FILE)
"""What an agent is loaded from, whether it is there or not: a file that appears counts from the next start on."""
BELOW: Final = (".agents", "playbooks")
"""Folders of declarations: skills and playbooks."""
FOLDERS: Final = (*BELOW, ".git", ".venv", "node_modules")
"""Folders of an agent's own that tools must not write into: what they hold is loaded, or run by what is loaded."""


def definition_of(folder: Path, spec: AgentSpec | None = None, what: str = "") -> Iterator[Protected]:
    """List what an agent is loaded from; with its file's content, also the files that this names."""
    told = what or f"from which the agent in {folder} is loaded"
    names = (*FILES, *(() if spec is None else named_files(spec)))
    yield from (Protected(folder / name, told) for name in names)
    yield from (Protected(folder / name, told, folder=True) for name in FOLDERS)
    # What stands in one of these folders may lie elsewhere, or have another name there, by which it could be written.
    yield from (Protected(path, told, folder=path.is_dir()) for path in _linked(folder))


def _linked(folder: Path) -> Iterator[Path]:
    """List the links among an agent's skills and playbooks, dangling ones too, and files with more than one name."""
    for name in BELOW:
        try:
            for path in (folder / name).rglob("*"):
                if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
                    yield path
        except OSError:
            continue


def named_files(spec: AgentSpec) -> Iterator[str]:
    """List the files beside an agent's own that it names: replies, rules and playbooks."""
    yield from (name for name in (spec.script, spec.reflex) if isinstance(name, str))
    yield from (trigger.playbook for _, trigger in triggers(spec) if trigger.playbook is not UNSET)


def roots_of(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    """List the roots of an agent's tools, with the way to each."""
    if spec.tools.files is not UNSET:
        yield ("tools", "files", "root"), spec.tools.files.root
    if spec.tools.shell is not UNSET:
        yield ("tools", "shell", "root"), spec.tools.shell.root


def read_places(spec: AgentSpec) -> Iterator[tuple[KeyPath, str, str]]:
    """List the files and folders that an agent's file lets it read, with the way to each and a pattern."""
    for index, watch in enumerate(spec.watches):
        if watch.path is not UNSET:
            yield ("watches", index, "path"), watch.path, watch.pattern
    for name, collection in spec.collections.items():
        yield ("collections", name, "path"), collection.path, collection.pattern
    for index, sensor in enumerate(spec.sensors):
        if isinstance(sensor.source.path, str):
            yield ("sensors", index, "source", "path"), sensor.source.path, sensor.source.pattern


def writable(folder: Path, spec: AgentSpec | None = None) -> Writable:
    """Find the folders that the tools of an agent can write; an agent whose file cannot be read has no tools."""
    read = spec or _spec(folder)
    return Writable(folder, () if read is None else tuple(folder / name for _, name in roots_of(read)))


def agents_above(place: Path) -> Iterator[Path]:
    """List the agents' folders that a place lies in, the nearest first."""
    found = located(None, str(place))
    yield from (each for each in (() if found is None else found.parents) if (each / AGENT_FILE).is_file())


def agents_beside(folder: Path) -> Iterator[Path]:
    """List the agents' folders beside an agent's own."""
    own = folder.resolve()
    yield from (file.parent for file in sorted(own.parent.glob(f"*/{AGENT_FILE}")) if file.parent != own)


def around(agent: Agent, folder: Path) -> Iterator[Protected]:
    """List what other agents are loaded from: those beside this one, and those in whose folder a root of it lies."""
    own = located(None, str(folder))
    for other in agents_beside(folder):
        yield from definition_of(other)
    for _, name in roots_of(agent.spec):
        for other in agents_above(folder / name):
            if other != own:
                yield from definition_of(other, _spec(other))


def _spec(folder: Path) -> AgentSpec | None:
    try:
        return read_agent(folder).spec
    except ConfigError:
        return None


def against_protected(agent: Agent, folder: Path, protected: ProtectedPaths) -> None:
    """Refuse, in a ConfigError, a root from which a tool would reach what it must not, and a place to read it from."""
    for path, name in roots_of(agent.spec):
        if found := protected.reach(folder / name):
            raise agent.places.wrong(
                path,
                f"`{dotted(path)}` is `{shorten(name)}`, which {found}. Tools must reach nothing of the kind: "
                "name a folder of its own, as in `root: work`.",
            )
    for path, name, pattern in read_places(agent.spec):
        if found := protected.shown(folder / name, pattern):
            sentence = f"`{dotted(path)}` is `{shorten(name)}`, which {found}"
            raise agent.places.wrong(path, f"{sentence}. No agent may read that: name another folder.")
