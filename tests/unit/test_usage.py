from decimal import Decimal

import msgspec
import pytest

from halter.core.usage import ModelName, Price, Usage


def test_token_budgets_do_not_count_what_was_read_from_a_cache() -> None:
    usage = Usage(input_tokens=100_000, output_tokens=500, cache_read_tokens=90_000, cache_write_tokens=4_000)
    assert usage.uncached == 10_500


@pytest.mark.parametrize("counts", [(-1, 0), (0, -1), (5, 0, -1), (5, 0, 0, -1), (5, 0, -1, 6)], ids=str)
def test_negative_usage_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Usage(*counts)


def test_more_cached_than_sent_is_refused() -> None:
    assert Usage(input_tokens=10, cache_read_tokens=4, cache_write_tokens=6)
    with pytest.raises(ValueError, match="exceed the input tokens"):
        Usage(input_tokens=10, cache_read_tokens=5, cache_write_tokens=6)


@pytest.mark.parametrize(
    "extras",
    [
        {"cache_write_1h_tokens": 5},
        {"cache_write_1h_tokens": -1},
        {"web_searches": -1},
        {"code_executions": -1},
        {"audio_tokens": -1},
        {"audio_cached_tokens": -1},
        {"audio_tokens": 6, "audio_cached_tokens": 5},
    ],
    ids=str,
)
def test_extras_that_cannot_be_are_refused(extras: dict[str, int]) -> None:
    whole = Usage(10, 0, 0, 4, cache_write_1h_tokens=4, audio_tokens=6, audio_cached_tokens=4)
    with pytest.raises(ValueError, match=r"exceed .*, or a count is negative: Usage\("):
        msgspec.structs.replace(whole, **{"cache_write_1h_tokens": 0, "audio_tokens": 0, **extras})


def test_usage_is_the_same_after_being_written_and_read() -> None:
    usage = Usage(1000, 20, 300, 4)
    assert msgspec.json.decode(msgspec.json.encode(usage), type=Usage) == usage
    assert msgspec.json.encode(Usage()) == b"{}"


@pytest.mark.parametrize(
    ("text", "provider", "model"),
    [
        ("openai:gpt-4o", "openai", "gpt-4o"),
        ("openai/gpt-4o", "openai", "gpt-4o"),
        ("ollama/llama3:8b", "ollama", "llama3:8b"),
        ("openrouter:meta/llama-3:free", "openrouter", "meta/llama-3:free"),
        ("scripted:/a folder/replies.yaml", "scripted", "/a folder/replies.yaml"),
    ],
)
def test_the_first_separator_of_a_model_name_wins(text: str, provider: str, model: str) -> None:
    name = ModelName.parse(text)
    assert name == ModelName(provider, model)
    assert str(name) == f"{provider}:{model}"
    assert ModelName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text", ["", "gpt-4o", ":gpt-4o", "/x", "openai:", "openai: ", " openai:x", "open ai:x", "a:x\n"]
)
def test_a_malformed_model_name_is_answered_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"Write provider:model, as in anthropic:"):
        ModelName.parse(text)


@pytest.mark.parametrize("figure", ["-1", "NaN", "Infinity"])
def test_a_price_below_nothing_is_refused(figure: str) -> None:
    with pytest.raises(ValueError, match="dollars from 0 up"):
        Price(Decimal(1), Decimal(figure))
