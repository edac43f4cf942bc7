"""`agent.yaml`: one agent, as far as the guard has to know it."""

from pathlib import Path
from typing import Final

import msgspec

from halter.config.load import Document, Places, load_file
from halter.config.shape import shaped
from halter.core.spec import AgentSpec

AGENT_FILE: Final = "agent.yaml"


class Agent(msgspec.Struct, frozen=True):
    """What an agent's file says, and where."""

    spec: AgentSpec
    places: Places = Places(AGENT_FILE)


def read_agent(path: Path, shown: str | None = None) -> Agent:
    """Read an agent's file, given itself or the folder that it stands in."""
    return agent_of(load_file(path / AGENT_FILE if path.is_dir() else path, shown))


def agent_of(document: Document) -> Agent:
    """Read what a document says about an agent."""
    return Agent(shaped(document, AgentSpec), document.places)
