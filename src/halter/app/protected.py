"""What is protected from an agent's tools in this process: its definition, other agents', and Halter's own files."""

import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

import halter
from halter.config.agent import Agent
from halter.config.fleet import FLEET_FILE
from halter.config.roots import agents_above, around, definition_of, writable
from halter.core.errors import ConfigError
from halter.core.protected import Protected, ProtectedPaths, Refuses, Writable, identity_of, lies_in
from halter.core.tools import Tool
from halter.settings import Settings, logins_beside
from halter.tools.group import PROGRAMS
from halter.tools.tool import FunctionTool

OWN_FOLDER: Final = "halter"
"""What a folder is called that Halter makes for its settings or its state."""
OWN_DEFINITION: Final = "the agent's own definition"
BESIDE_SQLITE: Final = ("", "-wal", "-shm", "-journal")

Protects = Callable[[Settings, Agent | None, Path | None], ProtectedPaths]


def protected_for(settings: Settings, agent: Agent | None, folder: Path | None) -> ProtectedPaths:
    """List what the tools of an agent must not reach; a program's agent has no folder."""
    things: list[Protected] = []
    home = None if folder is None else folder.absolute()
    if agent is not None and home is not None:
        things += [*definition_of(home, agent.spec, OWN_DEFINITION), *around(agent, home)]
    things += [*of_settings(settings), *of_program()]
    whole = (msgspec.structs.replace(thing, path=thing.path.absolute()) for thing in things)
    return ProtectedPaths(tuple(dict.fromkeys(whole)), home)


def of_settings(settings: Settings) -> Iterator[Protected]:
    """List the files that Halter keeps: the fleet's file, the store, checkpoints, keys, trust and tokens."""
    from halter.journal.open import file_of

    for fleet in dict.fromkeys((Path.cwd() / FLEET_FILE, *settings.fleets)):
        yield Protected(fleet, "where the fleet's file is looked for")
    if settings.fleet is not None:
        yield Protected(settings.fleet, "the fleet's file")
    store = file_of(settings.store)
    if store is not None:
        yield from (Protected(store.with_name(store.name + end), "the store", secret=True) for end in BESIDE_SQLITE)
    yield Protected(settings.checkpoints, "the folder of checkpoints", secret=True, folder=True)
    yield Protected(settings.signing_key, "the signing key", secret=True)
    if settings.trust is not None:
        yield Protected(settings.trust, "the list of what is trusted", secret=True)
    if settings.tokens is not None:
        yield Protected(settings.tokens, "the list of tokens", secret=True)
        yield Protected(logins_beside(settings.tokens), "the list of logins", secret=True)
    kept = (settings.signing_key, settings.trust, settings.tokens, store, *settings.fleets)
    places = [path.parent for path in kept if path]
    for place in dict.fromkeys(place for place in places if place.name == OWN_FOLDER):
        yield Protected(place, "a folder of Halter's own", secret=True, folder=True)


def of_program() -> Iterator[Protected]:
    """List where this program's own code comes from: whoever could write there could do anything.

    The processes of the machine count as well: this one is among them, with the variables that it was given.
    """
    told = "from which this program loads code"
    virtual = sys.prefix != sys.base_prefix
    installed = {Path(place) for name, place in sysconfig.get_paths().items() if name != "data" or virtual}
    installed |= {Path(halter.__file__).parent, Path(site.getusersitepackages())}
    yield from (Protected(Path(place), "from which programs are started", folder=True) for place in PROGRAMS)
    yield Protected(Path("/proc"), "where the processes of this machine are", folder=True)
    yield from (Protected(place, told, folder=True) for place in sorted(installed))
    yield from (Protected(Path(place) / OWN_FOLDER, told) for place in dict.fromkeys(sys.path) if place)


def refuses(protected: ProtectedPaths, roots: Writable) -> Refuses:
    """Refuse secrets by whatever name, and what lies outside of a root through which it was opened."""

    def refuse(path: Path, fd: int) -> bool:
        secret = protected.sight(reads=True).of_file(identity_of(fd)) is not None
        return secret or roots.leads_out(path, fd)

    return refuse


def demand_unwritten(places: Iterable[Path], loaded: Iterable[Writable]) -> None:
    """Refuse to load what lies where an agent's tools can write: nobody could tell who wrote it."""
    for place in places:
        for agent in (*loaded, *map(writable, agents_above(place))):
            for root in agent.roots:
                if lies_in(place, root):
                    raise ConfigError(
                        f"{place} lies in {root}, where the tools of the agent in {agent.folder} can write: it could "
                        "have been made by that agent. Look through it, and move it elsewhere."
                    )


def hold(tools: Iterable[Tool], paths: ProtectedPaths) -> None:
    """Tell every tool that has a root what it must not reach; refuse, in a ConfigError, one that would."""
    for tool in tools:
        place = tool.place if isinstance(tool, FunctionTool) else None
        if place is None:
            continue
        if found := paths.reach(place.root):
            raise ConfigError(
                f"The root of the tool {tool.spec.name}, {place.root}, {found}. Tools must reach nothing of the kind: "
                "give it a folder of its own."
            )
        place.protect(paths)
