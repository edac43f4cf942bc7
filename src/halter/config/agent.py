"""`agent.yaml`: one agent, what it may do and how it thinks."""

from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict, replace

from halter.config.load import Document, Places, load_file
from halter.config.shape import shaped
from halter.core.bounds import Limits
from halter.core.spec import AgentSpec

AGENT_FILE: Final = "agent.yaml"
INSTRUCTIONS: Final = "AGENTS.md"


class Agent(msgspec.Struct, frozen=True):
    """What an agent's file says, and where."""

    spec: AgentSpec
    places: Places = Places(AGENT_FILE)


def read_agent(path: Path, shown: str | None = None) -> Agent:
    """Read an agent's file, given itself or the folder that it stands in."""
    return agent_of(load_file(path / AGENT_FILE if path.is_dir() else path, shown))


def agent_of(document: Document) -> Agent:
    """Read what a document says about an agent."""
    spec = shaped(document, AgentSpec)
    return Agent(replace(spec, limits=_with_guardrails(spec, document.places)), document.places)


def _with_guardrails(spec: AgentSpec, places: Places) -> Limits:
    """Take what stands under `guardrails` as if it stood under `limits`, which is the other place for it."""
    written = {key: word for key, word in asdict(spec.guardrails).items() if word is not UNSET}
    for key in written:
        if getattr(spec.limits, key) is not UNSET:
            there = places.at(("limits", key))
            sentence = f"`guardrails.{key}` stands in {there} already, as `limits.{key}`; keep one of them."
            raise places.wrong(("guardrails", key), sentence)
    return replace(spec.limits, **written)
