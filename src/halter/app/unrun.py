"""An agent as its files say it: nothing of it is run, and no store is needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from halter.app.agent import OWN_TOOLS, playbooks_of
from halter.app.delegating import neighbours
from halter.brain.fastpaths import Surroundings
from halter.config.agent import read_agent
from halter.config.fleet import Fleet
from halter.config.mcp import MCP_FILE
from halter.config.mind import Read, read_mind
from halter.config.resolve import resolve
from halter.core.playbook import Playbook
from halter.core.spec import Resolved


@dataclass(frozen=True, slots=True)
class Written:
    """What an agent's files say."""

    folder: Path
    policy: Resolved
    read: Read
    playbooks: Mapping[str, Playbook]

    @property
    def has_tools(self) -> bool:
        """Tell whether the agent will have tools; which ones its code and its servers bring is seen when they run."""
        wanted = self.policy.tools
        built_in = any(each is not UNSET for each in (wanted.files, wanted.http, wanted.shell))
        own = (self.folder / OWN_TOOLS).exists() or (self.folder / MCP_FILE).exists()
        return built_in or own or bool(self.read.tasks.verbs)


def read_folder(folder: Path, fleet: Fleet) -> Written:
    """Read an agent's folder, below what holds for the fleet. Raises ConfigError."""
    agent = read_agent(folder)
    policy, read = resolve(fleet, agent), read_mind(fleet, agent, folder)
    return Written(folder, policy, read, playbooks_of(folder, read.tasks))


def surroundings_of(
    written: Written, now: int, schedules: tuple[str, ...] = (), decisions: tuple[str, ...] = ()
) -> Surroundings:
    """Tell the names that mean something in a message to this agent."""
    triggers = tuple(each.name for each in written.read.tasks.triggers())
    return Surroundings(
        agent=written.policy.name,
        now=now,
        timezone=written.policy.caps.zone,
        has_tools=written.has_tools,
        agents=tuple(neighbours(written.folder)),
        playbooks=tuple(written.playbooks),
        schedules=tuple(dict.fromkeys((*schedules, *triggers))),
        fields=tuple(written.read.pacing.fields),
        decisions=decisions,
    )
