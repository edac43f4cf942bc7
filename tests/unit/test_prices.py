import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from genai_prices.data import providers
from genai_prices.types import ClauseEquals, ModelInfo, ModelPrice

from halter.core.clock import DAY
from halter.core.usage import FREE_PRICE, ModelName, Price, RequestExtras, Unpriced, Usage, is_local_address
from halter.models.prices import Prices
from halter.models.tariffs import Tariff, compile_listed_price, compile_stated_price


def micros(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> int:
    return int(datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp()) * 1_000_000


NOW = micros(2026, 11, 15, 12)


def rates(name: str, base_url: str | None = None, prices: Prices | None = None) -> Tariff:
    found = (prices or Prices()).find(ModelName.parse(name), base_url)
    assert isinstance(found, Tariff), found
    return found


def find_unpriced(name: str, base_url: str | None = None) -> Unpriced:
    outcome = Prices().find(ModelName.parse(name), base_url)
    assert isinstance(outcome, Unpriced), outcome
    return outcome


# What things cost, by hand from the figures of the bundled table

SONNET = "anthropic:claude-sonnet-4-5"


@pytest.mark.parametrize(
    ("name", "usage", "cost"),
    [
        # $3 in, $15 out, $0.30 cache read, $3.75 cache write; above 200,000 tokens $6, $22.50, $0.60, $7.50.
        (SONNET, Usage(1_000, 500), 3_000 + 7_500),
        (SONNET, Usage(10_000, 100, 6_000, 3_000), 3_000 + 1_800 + 11_250 + 1_500),
        (SONNET, Usage(200_000, 100), 600_000 + 1_500),
        (SONNET, Usage(200_001, 100), 1_200_006 + 2_250),
        (SONNET, Usage(250_000, 0, 100_000, 100_000), 300_000 + 60_000 + 750_000),
        # $2.50 in, $10 out, $1.25 cache read; its cache writes cost what plain input costs.
        ("openai:gpt-4o", Usage(1_000, 100), 2_500 + 1_000),
        ("openai/gpt-4o", Usage(1_000, 100, 400, 200), 1_000 + 500 + 500 + 1_000),
        # $1.25 in, $10 out; above 200,000 tokens $2.50 and $15.
        ("google:gemini-2.5-pro", Usage(1_000, 10), 1_250 + 100),
        ("gemini:gemini-2.5-pro", Usage(300_000, 10), 750_000 + 150),
        # Sound costs $1 instead of $0.30, and $0.10 instead of $0.03 where it was read from a cache.
        ("google:gemini-2.5-flash", Usage(1_000, 0, audio_tokens=400), 300 + 280),
        ("google:gemini-2.5-flash", Usage(1_000, 0, 500, audio_tokens=400, audio_cached_tokens=500), 150 + 15 + 315),
        # $1 in, $1 out and $12 for a thousand requests.
        ("perplexity:sonar", Usage(100, 10), 12_110),
        ("perplexity:sonar", Usage(), 12_000),
        # $0.15 in, $0.60 out: rounded up, once.
        ("openai:gpt-4o-mini", Usage(1, 0), 1),
        ("openai:gpt-4o-mini", Usage(1, 1), 1),
        ("openai:gpt-4o-mini", Usage(3, 1), 2),
        ("openai:gpt-4o-mini", Usage(), 0),
        (SONNET, Usage(10**9, 10**9), 6 * 10**9 + 22_500 * 10**6),
        (SONNET, Usage(10**9, 1, 0, 10**9), 7_500 * 10**6 + 23),
    ],
)
def test_a_request_costs_what_the_table_says(name: str, usage: Usage, cost: int) -> None:
    assert rates(name).cost(usage, NOW) == cost


@pytest.mark.parametrize(("hour", "minute", "cost"), [(0, 59, 660), (1, 0, 1_320), (3, 59, 1_320), (4, 0, 660)])
def test_a_price_that_depends_on_the_time_of_day_follows_it(hour: int, minute: int, cost: int) -> None:
    at = micros(2026, 11, 15, hour, minute)
    assert rates("deepseek:deepseek-v4-pro").cost(Usage(1_000), at) == cost


@pytest.mark.parametrize(("at", "cost"), [(micros(2026, 8, 17, 12) - DAY, 435), (micros(2026, 8, 17, 12), 660)])
def test_a_price_that_changes_on_a_day_follows_it(at: int, cost: int) -> None:
    assert rates("deepseek:deepseek-v4-pro").cost(Usage(1_000), at) == cost


# Whose price is not known


@pytest.mark.parametrize(
    ("name", "base_url", "reason"),
    [
        ("mine:llama-3", None, "has no provider 'mine', and no model of that name"),
        ("vllm:llama-3", "http://10.0.0.7:8000/v1", "has no provider at 10.0.0.7"),
        ("ollama:llama3", "http://gpu:11434/v1", "has no provider at gpu"),
        ("openai:big", "https://gateway.example/v1", "has no provider at gateway.example"),
        ("openai:big", "https://user:hunter22@gateway.example/v1", "has no provider at gateway.example"),
        ("openai:big", "http://[::1", "has no provider at an invalid address"),
        ("openai:big", "gateway", "has no provider at an address without a host"),
        ("mine:big", "http://127.0.0.1:4000/v1", "a local address may forward to a paid model"),
        ("mine:llama-3", "http://localhost:8000/v1", "a local address may forward to a paid model"),
        ("llamafarm:mine", "http://localhost:8000/v1", "a local address may forward to a paid model"),
        ("mine:azure/my-deployment", "http://[::1]:4000/v1", "a local address may forward to a paid model"),
        ("ollama:gpt-oss:120b-cloud", "http://localhost:11434/v1", "a local address may forward to a paid"),
        ("ollama:nobody-knows:cloud", None, "has no provider 'ollama'"),
        ("openai:no-such-model", None, "has no such model of OpenAI"),
        ("openai:text-embedding-3-small", None, "without token prices"),
        ("openai-decisions:gpt-6-luna", "https://api.openai.com/v1", "without token prices"),
        ("github-copilot:gpt-4o", None, "without token prices"),
    ],
)
def test_an_unknown_price_is_a_value_that_says_what_to_write(name: str, base_url: str | None, reason: str) -> None:
    sentence = find_unpriced(name, base_url).sentence
    assert name in sentence
    assert reason in sentence
    assert f"in halter.yaml under `models`, `{name}`" in sentence
    assert "`price: free`" in sentence
    assert "`price: {input: 3.00, output: 15.00}`" in sentence
    assert "hunter22" not in sentence


def test_an_entry_without_figures_is_never_taken_for_free() -> None:
    listings = [model for seller in providers for model in seller.models]
    empty = [model for model in listings if isinstance(model.prices, ModelPrice) and not vars(model.prices)]
    assert empty
    empty.append(ModelInfo(id="bare", match=ClauseEquals(equals="bare")))
    assert {compile_listed_price(model) for model in empty} == {None}


@pytest.mark.parametrize(
    ("name", "base_url", "like"),
    [
        ("openai:gpt-4o", "https://api.openai.com/v1", "openai:gpt-4o"),
        (
            "gemini:gemini-2.5-pro",
            "https://generativelanguage.googleapis.com/v1beta",
            "google:gemini-2.5-pro",
        ),
        ("router:perplexity/sonar", "https://openrouter.ai/api/v1", "openrouter:perplexity/sonar"),
        ("openai:perplexity/sonar", "https://openrouter.ai/api/v1", "openrouter:perplexity/sonar"),
    ],
)
def test_the_address_tells_whose_price_counts(name: str, base_url: str, like: str) -> None:
    assert rates(name, base_url) == rates(like)


GATEWAYS = ["http://127.0.0.1:4000/v1", "http://localhost:4000", "http://[::1]:4000/v1", "https://gateway.example/v1"]


@pytest.mark.parametrize("base_url", [*GATEWAYS, None])
@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("mine:gpt-5", "openai:gpt-5"),
        ("mine:GPT-5", "openai:gpt-5"),
        ("mine:gpt-5-2025-08-07", "openai:gpt-5"),
        ("mine:gpt-5:latest", "openai:gpt-5"),
        ("mine:openai/gpt-5", "openai:gpt-5"),
        ("litellm/openai/gpt-5", "openai:gpt-5"),
        ("mine:azure/gpt-5", "azure:gpt-5"),
        ("mine:openrouter/openai/gpt-5", "openrouter:openai/gpt-5"),
        ("mine:claude-opus-4-1-20250805", "aws:eu.anthropic.claude-opus-4-1-20250805-v1:0"),
        ("mine:anthropic/claude-sonnet-4-5-20250929", SONNET),
        ("mine:vertex_ai/claude-sonnet-4-5@20250929", "google:claude-sonnet-4-5"),
        ("mine:us.anthropic.claude-sonnet-4-5-20250929-v1:0", "aws:us.anthropic.claude-sonnet-4-5-20250929-v1:0"),
        ("mine:bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0", "aws:claude-sonnet-4-5-20250929"),
        ("mine:models/gemini-2.5-pro", "google:gemini-2.5-pro"),
        ("mine:gemini/gemini-2.5-pro", "google:gemini-2.5-pro"),
        ("mine:xai/grok-4", "x-ai:grok-4"),
        ("mine:deepseek/deepseek-chat", "deepseek:deepseek-chat"),
    ],
)
def test_a_model_with_a_known_price_costs_it_wherever_it_is_asked_and_however_it_is_spelled(
    name: str, base_url: str | None, like: str
) -> None:
    assert rates(name, base_url).cost(Usage(1_000, 1_000), NOW) == rates(like).cost(Usage(1_000, 1_000), NOW) > 0


@pytest.mark.parametrize("base_url", GATEWAYS)
@pytest.mark.parametrize("name", ["openai:gpt-5", SONNET, "google:gemini-2.5-pro", "mistral:mistral-large-latest"])
def test_a_known_provider_that_was_moved_costs_what_it_costs_at_home(name: str, base_url: str) -> None:
    assert rates(name, base_url) == rates(name)


@pytest.mark.parametrize("name", ["mine:deepseek-r1", "mine:kimi-k2"])
def test_of_several_sellers_the_dearest_counts_where_nobody_says_which(name: str) -> None:
    found = rates(name, "http://localhost:4000").cost(Usage(1_000, 1_000), NOW)
    sold = [seller for seller in providers if seller.find_model(name.partition(":")[2], all_providers=providers)]
    assert len(sold) > 1
    assert found == max(rates(f"{seller.id}:{name[5:]}").cost(Usage(1_000, 1_000), NOW) for seller in sold)


# What costs nothing


@pytest.mark.parametrize(
    "base_url",
    [
        "http://localhost:11434/v1",
        "http://LOCALHOST/v1",
        "https://127.0.0.1:8443",
        "http://127.8.9.10:8000/v1",
        "http://[::1]:8000/v1",
        "unix:///run/model.sock",
        "http+unix://%2Frun%2Fmodel.sock/v1",
    ],
)
@pytest.mark.parametrize("name", ["ollama:gpt-oss:20b", "llamacpp:any", "vllm:meta-llama/Llama-3", "lmstudio:gemma3"])
def test_servers_that_run_models_themselves_are_free_on_this_machine(name: str, base_url: str) -> None:
    assert is_local_address(base_url)
    assert rates(name, base_url).bound(10**9, 10**9, NOW) == 0
    assert rates(name).bound(10**9, 10**9, NOW) == 0


@pytest.mark.parametrize("provider", ["ollama", "llamacpp", "vllm", "lmstudio", "llamafarm", "openai", "mine"])
@pytest.mark.parametrize("model", ["gpt-5", "claude-sonnet-4-5", "gemini-3-pro-preview:latest", "openai/gpt-5", "o3"])
def test_what_only_its_maker_runs_is_not_free_on_this_machine_whatever_the_provider_is_called(
    provider: str, model: str
) -> None:
    assert rates(f"{provider}:{model}", "http://127.0.0.1:4000/v1").cost(Usage(1_000, 1_000), NOW) > 0


@pytest.mark.parametrize(
    "base_url",
    [
        None,
        "",
        "http://localhost.example/v1",
        "http://localhost@example.com/v1",
        "http://127.0.0.1.example/v1",
        "http://128.0.0.1/v1",
        "http://10.0.0.1/v1",
        "http://[::2]/v1",
        "http://[::1",
        "https://example.com/unix:///localhost",
    ],
)
def test_endpoints_elsewhere_are_not_taken_for_this_machine(base_url: str | None) -> None:
    assert not is_local_address(base_url)


@pytest.mark.parametrize("name", ["ollama:llama3:8b", "scripted:replies.yaml", "reflex:rules.yaml"])
def test_brains_that_bill_nobody_are_free(name: str) -> None:
    assert rates(name).cost(Usage(10**9, 10**9), NOW) == 0


@pytest.mark.parametrize(("base_url", "free"), [("http://localhost:11434", True), ("https://gpu.example.com", False)])
def test_ollama_is_free_on_this_machine_and_not_wherever_somebody_runs_it(base_url: str, *, free: bool) -> None:
    assert isinstance(Prices().find(ModelName.parse("ollama:llama3"), base_url), Unpriced) != free


# What the configuration says

CHEAP = Price(Decimal(1), Decimal(2), cache_read=Decimal("0.1"), cache_write=Decimal("1.5"))


@pytest.mark.parametrize("key", ["openai:gpt-4o", "openai/gpt-4o", "openai"])
def test_a_price_of_the_configuration_wins_over_the_table(key: str) -> None:
    tariff = rates("openai:gpt-4o", prices=Prices({key: CHEAP}))
    assert tariff.cost(Usage(1_000, 100, 200, 300), NOW) == 500 + 20 + 450 + 200
    assert tariff.bound(1_000, 100, NOW) == (1_500 + 200) * 102 // 100


def test_a_price_of_the_configuration_wins_on_this_machine_too() -> None:
    prices = Prices({"vllm:llama-3": CHEAP, "ollama": CHEAP})
    assert rates("vllm:llama-3", "http://localhost:8000", prices).cost(Usage(1_000), NOW) == 1_000
    assert rates("ollama:llama3", None, prices).cost(Usage(1_000), NOW) == 1_000


def test_a_models_own_price_wins_over_that_of_its_provider() -> None:
    prices = Prices({"vllm": CHEAP, "vllm:small": FREE_PRICE})
    assert rates("vllm:small", None, prices).cost(Usage(1_000), NOW) == 0
    assert rates("vllm:large", None, prices).cost(Usage(1_000), NOW) == 1_000


def test_a_model_that_is_declared_free_costs_nothing() -> None:
    prices = Prices({"openai:gpt-4o": FREE_PRICE})
    assert rates("openai:gpt-4o", prices=prices).bound(10**9, 10**9, NOW) == 0


def test_cached_tokens_without_a_figure_cost_what_plain_input_costs() -> None:
    tariff = compile_stated_price(Price(Decimal("0.5"), Decimal(2)))
    assert tariff.cost(Usage(1_000, 0, 400, 300), NOW) == 500


def test_a_figure_is_kept_exactly_to_eighteen_digits_and_never_becomes_nothing() -> None:
    tiny = compile_stated_price(Price(Decimal("1e-18"), Decimal("1e-30")))
    assert tiny.cost(Usage(10**18), NOW) == 1
    assert tiny.cost(Usage(10**18 + 1), NOW) == 2
    assert tiny.cost(Usage(0, 1), NOW) == 1


# What sound costs


@pytest.mark.parametrize(
    ("name", "base_url", "audio"),
    [
        ("openai:gpt-audio", None, 32),
        ("google:gemini-2.5-flash", None, 1),
        ("google:gemini-2.5-pro", None, 1.25),
        ("openai:gpt-4.1", None, None),
        (SONNET, None, None),
        ("mine:gpt-4.1", "https://gateway.example/v1", None),
        ("ollama:gemma3", None, 0),
    ],
)
def test_sound_has_a_price_where_it_is_listed_or_where_all_models_take_it(
    name: str, base_url: str | None, audio: float | None
) -> None:
    tariff = rates(name, base_url)
    covering = tariff.covering(RequestExtras(audio_tokens=1_000))
    if audio is None:
        assert isinstance(covering, str)
        assert "whose price is not listed" in covering
        return
    assert isinstance(covering, Tariff)
    held, least = covering.bound(1_000, 0, NOW), round(audio * 1_000)
    assert held >= least
    assert covering.cost(Usage(1_000), NOW) == covering.cost(Usage(1_000, audio_tokens=1_000), NOW) == least
    assert covering.cost(Usage(2_000), NOW) == least + tariff.cost(Usage(1_000), NOW)


# What a lookup does to the process


def test_a_model_is_looked_up_once() -> None:
    prices = Prices()
    assert rates(SONNET, prices=prices) is rates("anthropic/claude-sonnet-4-5", prices=prices)


ALONE = """
import sys, threading
import halter.models.prices as prices
from halter.core.usage import ModelName
assert "genai_prices" not in sys.modules, "the table was imported before it was needed"

def watch(event, arguments):
    assert not event.startswith(("socket.connect", "socket.getaddrinfo")), event

sys.addaudithook(watch)
assert prices.Prices().find(ModelName.parse("openai:gpt-4o")).bound(1000, 1000, 0) > 0
assert "genai_prices" in sys.modules
assert threading.active_count() == 1, threading.enumerate()
"""


def test_prices_are_found_without_network_or_thread_and_imported_only_when_needed() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=60)


def test_cache_writes_of_a_claude_model_are_held_and_charged_with_their_surcharge() -> None:
    name = ModelName("gateway", "us.anthropic.claude-sonnet-4-5")
    outcome = Prices({str(name): Price(Decimal(4), Decimal(20))}, margin=Decimal(0)).find(name)
    assert isinstance(outcome, Tariff)
    assert outcome.cost(Usage(input_tokens=1_000, cache_write_tokens=1_000), 0) == 5_000
    assert outcome.cost(Usage(input_tokens=1_000, cache_read_tokens=1_000), 0) == 4_000
    assert outcome.bound(1_000, 0, 0) == 5_000
