"""One row for each framework: its driver, by the name of its adapter."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import pytest

from tests.external.driver import Driver

DRIVERS: Mapping[str, tuple[str, str]] = {
    "agent_framework": ("agent_framework", "AgentFramework"),
    "claude_sdk": ("claude_agent_sdk", "ClaudeSDK"),
    "crewai": ("crewai", "CrewAI"),
    "google_adk": ("google.adk", "GoogleADK"),
    "langchain": ("langchain", "LangChain"),
    "openai_agents": ("agents", "OpenAIAgents"),
    "pydantic_ai": ("pydantic_ai", "PydanticAI"),
    "bare_guard": ("halter", "BareGuard"),
}
"""The package that a framework is imported from, and the class of its driver in `NAME_driver`."""

APART: Final = ("claude_sdk", "crewai", "google_adk")
"""Those that only `make frameworks` installs."""


def load_driver(name: str) -> type[Driver]:
    """Import a driver. The tests of a framework that is not installed are skipped: `make frameworks` installs it."""
    package, class_name = DRIVERS[name]
    if not is_installed(package):
        pytest.skip(f"{name} is not installed: run make frameworks")
    pytest.importorskip(package)  # CrewAI warns while it is imported.
    return getattr(import_module(f"tests.external.drivers.{name}_driver"), class_name)


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
