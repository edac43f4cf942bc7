"""The paths that the tools of an agent must not reach: its definition, Halter's own files, and the program itself."""

import site
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from halter.config.agent_files import AgentFile
from halter.config.merge import FLEET_FILE
from halter.config.roots import (
    definition_of,
    find_writable_folders,
    list_agents_above,
    list_other_definitions,
)
from halter.core.errors import ConfigError
from halter.core.tools import Tool
from halter.settings import Settings, find_logins_file
from halter.system.folders import FileRefusal
from halter.system.paths import identity_of, is_path_within
from halter.system.protected_paths import ProtectedEntry, ProtectedPaths, WritableFolders
from halter.tools.function_tool import FunctionTool
from halter.tools.process import PROGRAM_FOLDERS

OWN_FOLDER: Final = "halter"
"""Name of the folders in which Halter keeps its settings and its state."""


OWN_DEFINITION: Final = "the agent's own definition"


SQLITE_FILE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")


ProtectedPathsFactory = Callable[[Settings, AgentFile | None, Path | None], ProtectedPaths]


def list_protected_paths(settings: Settings, agent: AgentFile | None, folder: Path | None) -> ProtectedPaths:
    """List the paths that the tools of an agent must not reach. An agent of a program has no folder."""
    entries: list[ProtectedEntry] = []
    agent_folder = None if folder is None else folder.absolute()
    if agent is not None and agent_folder is not None:
        entries += [
            *definition_of(agent_folder, agent.spec, OWN_DEFINITION),
            *list_other_definitions(agent, agent_folder),
        ]
    entries += [*list_halter_files(settings), *list_program_paths()]
    absolute_entries = (msgspec.structs.replace(entry, path=entry.path.absolute()) for entry in entries)
    return ProtectedPaths(tuple(dict.fromkeys(absolute_entries)), agent_folder)


def list_halter_files(settings: Settings) -> Iterator[ProtectedEntry]:
    """List Halter's own files: fleet file, store, checkpoints, keys, trust and tokens."""
    from halter.journal.open import find_store_file

    for fleet in dict.fromkeys((Path.cwd() / FLEET_FILE, *settings.fleets)):
        yield ProtectedEntry(fleet, "where the fleet's file is looked for")
    if settings.fleet is not None:
        yield ProtectedEntry(settings.fleet, "the fleet's file")
    store = find_store_file(settings.store)
    if store is not None:
        yield from (
            ProtectedEntry(store.with_name(store.name + suffix), "the store", is_secret=True)
            for suffix in SQLITE_FILE_SUFFIXES
        )
    yield ProtectedEntry(settings.checkpoints, "the folder of checkpoints", is_secret=True, is_folder=True)
    yield ProtectedEntry(settings.signing_key, "the signing key", is_secret=True)
    if settings.trust is not None:
        yield ProtectedEntry(settings.trust, "the list of what is trusted", is_secret=True)
    if settings.tokens is not None:
        yield ProtectedEntry(settings.tokens, "the list of tokens", is_secret=True)
        yield ProtectedEntry(find_logins_file(settings.tokens), "the list of logins", is_secret=True)
    if settings.hooks is not None:
        yield ProtectedEntry(settings.hooks, "the folder of hooks into other programs", is_secret=True, is_folder=True)
    paths = (settings.signing_key, settings.trust, settings.tokens, store, *settings.fleets)
    folders = [path.parent for path in paths if path]
    for folder in dict.fromkeys(folder for folder in folders if folder.name == OWN_FOLDER):
        yield ProtectedEntry(folder, "a folder of Halter's own", is_secret=True, is_folder=True)


def list_program_paths() -> Iterator[ProtectedEntry]:
    """List the paths from which this program loads code: write access there would allow anything.

    /proc is included: it shows this process and its environment.
    """
    description = "from which this program loads code"
    virtual = sys.prefix != sys.base_prefix
    code_folders = {Path(location) for name, location in sysconfig.get_paths().items() if name != "data" or virtual}
    code_folders |= {Path(__file__).parents[1], Path(site.getusersitepackages())}
    yield from (
        ProtectedEntry(Path(location), "from which programs are started", is_folder=True)
        for location in PROGRAM_FOLDERS
    )
    yield ProtectedEntry(Path("/proc"), "where the processes of this machine are", is_folder=True)
    yield from (ProtectedEntry(path, description, is_folder=True) for path in sorted(code_folders))
    yield from (
        ProtectedEntry(Path(location) / OWN_FOLDER, description) for location in dict.fromkeys(sys.path) if location
    )


def make_file_refusal(protected_paths: ProtectedPaths, roots: WritableFolders) -> FileRefusal:
    """Return a check that refuses secret files under any name, and files outside the root that led to them."""

    def refuse(path: Path, fd: int) -> bool:
        secret = protected_paths.take_snapshot(read_only=True).judge_file(identity_of(fd)) is not None
        return secret or roots.leads_out(path, fd)

    return refuse


def require_unwritten(paths: Iterable[Path], loaded_agents: Iterable[WritableFolders]) -> None:
    """Raise ConfigError if an agent's tools can write to a path: that agent may have written it."""
    for path in paths:
        for agent in (*loaded_agents, *map(find_writable_folders, list_agents_above(path))):
            for root in agent.roots:
                if is_path_within(path, root):
                    raise ConfigError(
                        f"{path} is inside {root}, where the tools of the agent in {agent.folder} can write. That "
                        "agent may have written it. Review it, and move it elsewhere."
                    )


def protect_tools(tools: Iterable[Tool], paths: ProtectedPaths) -> None:
    """Pass every tool with a root the paths that it must not reach. Raises ConfigError if its root reaches one."""
    for tool in tools:
        root = tool.rooted_tool if isinstance(tool, FunctionTool) else None
        if root is None:
            continue
        if objection := paths.reach(root.root):
            raise ConfigError(
                f"The root of the tool {tool.spec.name}, {root.root}, {objection}. No tool may reach that. "
                "Give the tool a separate folder."
            )
        root.protect(paths)


@contextmanager
def register_writable(registry: list[WritableFolders], agent: WritableFolders) -> Generator[None]:
    """Register the folders in which an agent's tools can write, while the agent is loaded."""
    registry.append(agent)
    try:
        yield
    finally:
        registry.remove(agent)


def list_secret_files(settings: Settings) -> list[Path]:
    return [entry.path for entry in list_halter_files(settings) if entry.is_secret]
