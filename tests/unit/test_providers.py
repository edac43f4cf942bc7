"""A model's name leads to its provider, its address and its key, and no key to anybody else's address."""

from collections.abc import Mapping
from typing import Any

import pytest

from halter.core.errors import ConfigError
from halter.core.usage import ModelName
from halter.models.prices import Prices
from halter.models.providers import DEFAULT_WINDOW, LOCAL_WINDOW, estimate_window, make_model
from halter.models.wire import WireModel
from halter.spec.models import KNOWN_PROVIDERS, Provider


def make_wire_model(name: str, environment: Mapping[str, str] | None = None, **providers: Provider) -> WireModel:
    return make_model(name, providers, (environment or {}).get)


def sentence(name: str, environment: Mapping[str, str] | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_model(name, options.pop("providers", {}), (environment or {}).get, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "variable", "wire"),
    [
        ("openai:gpt-5", "OPENAI_API_KEY", "responses"),
        ("anthropic/claude-opus-4-8", "ANTHROPIC_API_KEY", "anthropic"),
        ("google:gemini-2.5-pro", "GEMINI_API_KEY", "google"),
        ("gemini:gemini-2.5-pro", "GOOGLE_API_KEY", "google"),
        ("openrouter:openai/gpt-5", "OPENROUTER_API_KEY", "openai"),
        ("groq:llama-3.3-70b-versatile", "GROQ_API_KEY", "openai"),
        ("mistral:mistral-large-latest", "MISTRAL_API_KEY", "openai"),
        ("deepseek:deepseek-chat", "DEEPSEEK_API_KEY", "openai"),
        ("together:some/model", "TOGETHER_API_KEY", "openai"),
    ],
)
def test_a_known_provider_needs_only_its_key(name: str, variable: str, wire: str) -> None:
    model = make_wire_model(name, {variable: "made-up"})
    assert (model.name, model.wire, model.base_url) == (ModelName.parse(name), wire, None)
    text = sentence(name)
    assert variable in text
    assert "providers:" in text


@pytest.mark.parametrize("name", ["ollama:qwen3", "llamacpp:qwen3", "vllm:qwen3", "lmstudio:qwen3"])
def test_a_local_server_needs_nothing_and_costs_nothing(name: str) -> None:
    model = make_wire_model(name)
    assert model.base_url is not None
    assert model.base_url.startswith("http://localhost:")
    rates = Prices().find(model.name, model.base_url)
    assert rates.bound(1000, 1000, 0) == 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("variable", "name", "written", "reached"),
    [
        ("OLLAMA_BASE_URL", "ollama:qwen3", "http://gpu:11434", "http://gpu:11434/v1"),
        ("OLLAMA_BASE_URL", "ollama:qwen3", "http://gpu:11434/v1", "http://gpu:11434/v1"),
        ("LLAMAFARM_BASE_URL", "llamafarm:mine", "http://localhost:9000/v1", "http://localhost:9000/v1"),
        ("OPENAI_BASE_URL", "openai:gpt-5", "https://proxy.example/openai", "https://proxy.example/openai"),
        ("ANTHROPIC_BASE_URL", "anthropic:claude-opus-4-8", "https://proxy.example", "https://proxy.example"),
    ],
)
def test_the_environment_can_move_a_provider(variable: str, name: str, written: str, reached: str) -> None:
    model = make_wire_model(name, {variable: written, "OPENAI_API_KEY": "made-up", "ANTHROPIC_API_KEY": "made-up"})
    assert model.base_url == reached


def test_a_moved_provider_on_this_machine_needs_no_key() -> None:
    assert (
        make_wire_model("openai:gpt-5", {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}).base_url
        == "http://127.0.0.1:9/v1"
    )


@pytest.mark.parametrize(
    ("variable", "name"),
    [("OPENAI_BASE_URL", "openai:gpt-5"), ("ANTHROPIC_BASE_URL", "anthropic:claude-opus-4-8")],
)
def test_a_provider_that_the_environment_moves_to_this_machine_still_costs_what_it_costs(
    variable: str, name: str
) -> None:
    model, usual = make_wire_model(name, {variable: "http://127.0.0.1:4000/v1"}), ModelName.parse(name)
    assert Prices().find(model.name, model.base_url) == Prices().find(usual)


def test_a_provider_says_whether_it_bills_errors() -> None:
    mine = Provider(base_url="http://localhost:1/v1", bills_errors=True)
    assert make_wire_model("mine:m", mine=mine).terms.bills_errors
    assert not make_wire_model("mine:m", mine=Provider(base_url="http://localhost:1/v1")).terms.bills_errors


def test_a_provider_says_whether_its_cache_is_used() -> None:
    off = Provider(base_url="http://localhost:1/v1", wire="anthropic", prompt_cache=False)
    assert not make_wire_model("mine:m", mine=off).terms.prompt_cache
    assert make_wire_model("mine:m", mine=Provider(base_url="http://localhost:1/v1")).terms.prompt_cache


def test_a_provider_without_an_address_says_what_to_set() -> None:
    assert "LLAMAFARM_BASE_URL" in sentence("llamafarm:mine")


def test_a_described_provider_wins_over_a_known_one() -> None:
    mine = Provider(wire="anthropic", base_url="https://mine.example", api_key="${secret:MINE}")
    model = make_wire_model("openai:gpt-5", {"MINE": "made-up"}, openai=mine)
    assert (model.wire, model.base_url) == ("anthropic", "https://mine.example")


def test_a_secret_that_nobody_set_is_named() -> None:
    mine = Provider(base_url="https://mine.example", api_key="${secret:MINE}")
    text = sentence("mine:m", providers={"mine": mine})
    assert "providers.mine.api_key" in text
    assert "MINE" in text


def test_a_key_does_not_belong_into_a_file() -> None:
    mine = Provider(base_url="https://mine.example", api_key="sk-made-up")
    text = sentence("mine:m", providers={"mine": mine})
    assert "${secret:NAME}" in text
    assert "sk-made-up" not in text


def test_an_unknown_provider_says_what_to_write() -> None:
    text = sentence("acme:m")
    assert "providers: {acme: {wire: openai, base_url:" in text
    assert all(f"`{output}`" in text for output in KNOWN_PROVIDERS)


@pytest.mark.parametrize("name", ["", "gpt-5", "openai:", ":gpt-5"])
def test_a_name_without_its_provider_says_how_to_write_it(name: str) -> None:
    assert "provider:model" in sentence(name)


@pytest.mark.parametrize(
    "url", ["", "mine.example/v1", "ftp://mine.example", "http://", "https://[::1", "http://h:port"]
)
def test_an_address_that_cannot_be_used_is_refused_without_being_repeated(url: str) -> None:
    text = sentence("mine:m", providers={"mine": Provider(base_url=url)})
    assert text == "Invalid address in `providers.mine`. Write it like https://host/v1."


@pytest.mark.parametrize("missing", ["pydantic_ai", "anthropic"])
def test_a_library_that_is_missing_says_what_to_install(missing: str) -> None:
    text = sentence(
        "anthropic:claude-opus-4-8", {"ANTHROPIC_API_KEY": "k"}, installed=lambda library: library != missing
    )
    assert "pip install 'halter-agents[models]'" in text


def test_a_window_is_the_models_own_or_a_cautious_guess() -> None:
    assert estimate_window(ModelName("openai", "gpt-4.1")) == 1_000_000
    assert estimate_window(ModelName("anthropic", "claude-opus-4-8")) == 1_000_000
    assert estimate_window(ModelName("gemini", "gemini-2.0-flash")) == estimate_window(
        ModelName("google", "gemini-2.0-flash")
    )
    assert estimate_window(ModelName("openai", "nobody-knows-this-one")) == DEFAULT_WINDOW
    assert estimate_window(ModelName("ollama", "qwen3")) == LOCAL_WINDOW
    assert estimate_window(ModelName("mine", "m"), "http://localhost:1/v1") == LOCAL_WINDOW
    assert estimate_window(ModelName("mine", "openai/gpt-4.1"), "http://localhost:1/v1") == 1_000_000
    assert estimate_window(ModelName("mine", "m"), "https://mine.example/v1") == DEFAULT_WINDOW
