"""The example of each provider is ready to use: it is read, its models are priced, and its keys are references."""

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from halter.config.agent_files import read_agent
from halter.config.decode import agent_schema
from halter.config.merge import FleetConfig, read_fleet
from halter.config.resolve import resolve_agent, resolve_policy
from halter.config.starter_files import render_starter_files
from halter.config.yaml_reader import load_file
from halter.core.clock import SystemClock
from halter.core.usage import ModelName, Unpriced, Usage
from halter.models.prices import Prices
from halter.models.scripted import make_scripted_model
from halter.spec.models import KNOWN_PROVIDERS, BrainSpec

PROVIDERS = Path(__file__).parents[2] / "examples" / "providers"
FOLDERS = sorted(path.parent for path in PROVIDERS.glob("*/agent.yaml"))
FREE = {"ollama", "openai-compatible", "offline-reflex", "offline-scripted"}


def list_models(mind: BrainSpec) -> list[ModelName]:
    return [ModelName.parse(name) for name in (mind.model, *mind.fallback_models, *mind.model_for.values())]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_example_of_a_provider_is_read_and_its_price_known(folder: Path) -> None:
    agent, file = read_agent(folder), folder / "halter.yaml"
    fleet = read_fleet(file) if file.exists() else FleetConfig()
    policy, mind = resolve_policy(fleet, agent), resolve_agent(fleet, agent, folder).model_settings
    assert policy.name == folder.name
    prices, now = Prices(policy.prices), SystemClock().now()
    for model in list_models(mind):
        provider = mind.providers.get(model.provider)
        rates = prices.find(model, provider.base_url or None if provider else None)
        assert not isinstance(rates, Unpriced), rates.sentence
        cost = rates.cost(Usage(1_000_000, 1_000_000), now)
        assert (cost == 0) == (folder.name in FREE or model.provider == "reflex"), model


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_schema_accepts_the_example_of_a_provider(folder: Path) -> None:
    validator = Draft202012Validator(agent_schema())
    assert list(validator.iter_errors(load_file(folder / "agent.yaml").value)) == []


def test_there_is_an_example_for_every_provider_and_the_page_lists_them() -> None:
    providers = {
        model.provider
        for each in FOLDERS
        for model in list_models(resolve_agent(FleetConfig(), read_agent(each), each).model_settings)
    }
    assert providers >= {"openai", "anthropic", "gemini", "ollama", "reflex", "scripted"}
    assert providers >= {"azure", "bedrock", "vertex", "openrouter", "groq", "mistral"}
    assert any(provider not in {*KNOWN_PROVIDERS, "reflex", "scripted"} for provider in providers)
    page = (PROVIDERS / "README.md").read_text("utf-8")
    assert [folder.name for folder in FOLDERS if f"[{folder.name}]({folder.name})" not in page] == []


def test_the_rules_of_the_examples_and_of_a_new_agent_can_be_followed(tmp_path: Path) -> None:
    reflex_from = pytest.importorskip("halter.models.reflex").make_reflex_model
    (tmp_path / "agent.yaml").write_text(render_starter_files("new", "")["agent.yaml"])
    for folder in (tmp_path, PROVIDERS / "ollama", PROVIDERS / "offline-reflex"):
        read = resolve_agent(FleetConfig(), read_agent(folder), folder)
        reflex_from(list(read.model_settings.reflex), read.locate_reflex)


def test_the_script_of_the_example_can_be_played() -> None:
    folder = PROVIDERS / "offline-scripted"
    read = resolve_agent(FleetConfig(), read_agent(folder), folder)
    assert make_scripted_model(list(read.model_settings.script), read.locate_script, SystemClock()).name == ModelName(
        "scripted", "script"
    )
