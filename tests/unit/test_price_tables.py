import json
import zlib
from decimal import Decimal
from typing import Any, cast

import pytest
from genai_prices.data import providers

from halter.core.clock import DAY
from halter.core.errors import ConfigError
from halter.core.usage import ModelName, Price, Unpriced, Usage
from halter.models import price_tables
from halter.models.price_tables import (
    FetchedPrices,
    PriceTables,
    accept_file,
    add_file,
    find_excess,
    merge_tariffs,
    read_table,
)
from halter.models.providers import MARGIN, Prices, Tariff, compile_listed_price, compile_stated_price

NOW = 20_000 * DAY
OPUS = "claude-opus-5-5"
"""$4 in, $20 out, $0.20 cache read, $5 cache write."""


def make_entry(name: str, plain: Any = 4, output: Any = 20, **prices: Any) -> dict[str, Any]:
    caches = {"cache_read_mtok": 0.2, "cache_write_mtok": 5}
    return {
        "id": name,
        "match": {"equals": name},
        "prices": {"input_mtok": plain, "output_mtok": output, **caches, **prices},
    }


def make_table(*entries: dict[str, Any], seller: str = "anthropic") -> bytes:
    table = {"id": seller, "name": seller.title(), "api_pattern": "https://example", "models": list(entries)}
    return json.dumps([table]).encode()


def add(current: FetchedPrices | None, *entries: dict[str, Any]) -> FetchedPrices:
    return add_file(current, make_table(*entries), "example.com/data.json", NOW)


def find(fetched: FetchedPrices | None, name: str) -> tuple[Decimal, Decimal] | None:
    """Return the dollars per million tokens of input and output."""
    tariff = PriceTables(fetched).find(ModelName("anthropic", name), None, MARGIN)
    if isinstance(tariff, Unpriced):
        return None
    rates = tariff.find_rates(1, NOW)
    return tariff_dollars(rates.plain), tariff_dollars(rates.output)


def tariff_dollars(rate: int) -> Decimal:
    return (Decimal(rate) / 10**18).normalize()


# Guesses for models that no table knows


def guess(name: str, base_url: str | None = None) -> tuple[Decimal, Decimal]:
    tariff = Prices(listed=PriceTables(), guesses=True).find(ModelName.parse(name), base_url)
    assert isinstance(tariff, Tariff), tariff
    assert "priced at a guess until the price table knows it: $" in tariff.guess
    rates = tariff.find_rates(1, NOW)
    return tariff_dollars(rates.plain), tariff_dollars(rates.output)


@pytest.mark.parametrize(
    ("name", "base_url"),
    [
        ("anthropic:claude-unheard-of-9", None),
        ("openrouter:anthropic/claude-unheard-of-9", None),
        ("bedrock:anthropic.claude-unheard-of-9", None),
        ("company:claude-unheard-of-9", "https://llm.example.com/v1"),
        ("anthropic:unheard-of", None),
    ],
)
def test_an_unknown_model_costs_twice_the_dearest_of_its_maker_whoever_sells_it(
    name: str, base_url: str | None
) -> None:
    # The dearest of Anthropic that still answers is claude-opus-4-1: $15 in and $75 out.
    assert guess(name, base_url) == (30, 150)


def test_no_unit_of_a_guess_is_below_twice_that_of_any_current_model_of_the_maker() -> None:
    tariff = Prices(listed=PriceTables(), guesses=True).find(ModelName.parse("anthropic:claude-unheard-of-9"))
    assert isinstance(tariff, Tariff)
    for entry in next(seller for seller in providers if seller.id == "anthropic").models:
        known = compile_listed_price(entry)
        if known is not None and entry.id not in {"claude-2", "claude-v1", "claude-3-opus-latest"}:
            assert not find_excess(known, tariff, NOW), entry.id


def test_models_that_are_dead_and_the_dearest_class_do_not_make_a_guess_useless() -> None:
    plain, output = guess("openai:gpt-unheard-of")
    assert plain < 2 * 60, "gpt-4-32k and gpt-4.5-preview are shut down"
    assert output < 2 * 168, "gpt-5.2-pro costs $168"


def test_a_name_of_the_dearest_class_is_compared_with_its_like() -> None:
    # o1-pro costs $150 and $600.
    assert guess("openai:gpt-unheard-of-pro") == (300, 1200)
    assert guess("openai:gpt-prose") < guess("openai:gpt-unheard-of-pro")


def test_a_model_of_a_maker_that_nobody_knows_stays_without_a_price() -> None:
    unpriced = Prices(listed=PriceTables(), guesses=True).find(ModelName.parse("nobody:knows"), "https://x.example/v1")
    assert isinstance(unpriced, Unpriced)
    assert "dearest" not in unpriced.sentence


def test_without_guesses_the_sentence_names_the_policy_that_makes_them() -> None:
    unpriced = Prices(listed=PriceTables()).find(ModelName.parse("anthropic:claude-unheard-of-9"))
    assert isinstance(unpriced, Unpriced)
    assert unpriced.sentence.startswith("Run `halter prices update`, or set the price in halter.yaml")
    assert "`unknown_price: dearest`, which charges twice the highest price of Anthropic" in unpriced.sentence


# The higher of two tariffs


def test_the_higher_of_two_tariffs_covers_both_in_every_unit_at_any_hour() -> None:
    entries = [
        entry for seller in providers if seller.id in {"anthropic", "deepseek", "openai"} for entry in seller.models
    ]
    tariffs = [tariff for entry in entries if (tariff := compile_listed_price(entry)) is not None]
    usages = [Usage(1_000, 100), Usage(300_000, 10, 100_000, 100_000), Usage(10, 9_000)]
    for first, second in zip(tariffs, tariffs[1:] + tariffs[:1], strict=True):
        higher = merge_tariffs(first, second)
        assert not find_excess(first, higher, NOW)
        assert not find_excess(second, higher, NOW)
        for usage in usages:
            for hour in range(0, 24, 3):
                at = NOW + hour * DAY // 24
                assert higher.cost(usage, at) >= max(first.cost(usage, at), second.cost(usage, at))
                assert higher.bound(usage.input_tokens, usage.output_tokens, at) >= higher.cost(usage, at)


def test_of_two_tariffs_the_input_of_one_and_the_output_of_the_other_can_be_higher() -> None:
    first, second = (compile_stated_price(Price(Decimal(plain), Decimal(out))) for plain, out in ((1, 9), (2, 8)))
    assert merge_tariffs(first, second).cost(Usage(100, 100), NOW) == 200 + 900


# The one-way rule


def test_a_new_model_and_a_higher_price_count_immediately() -> None:
    fetched = add(None, make_entry("claude-new", 7, 8), make_entry(OPUS, 6, 20))
    assert (find(None, "claude-new"), find(fetched, "claude-new")) == (None, (7, 8))
    assert (find(None, OPUS), find(fetched, OPUS)) == ((4, 20), (6, 20))
    assert (fetched.added, fetched.raised, fetched.waiting) == (
        ("anthropic:claude-new",),
        (f"anthropic:{OPUS}: input $4 → $6",),
        (),
    )


def test_a_lower_price_waits_for_a_persons_yes_while_the_higher_unit_of_the_same_model_counts() -> None:
    fetched = add(None, make_entry(OPUS, 5, 10))
    assert find(fetched, OPUS) == (5, 20)
    assert fetched.waiting == (f"anthropic:{OPUS}: output $20 → $10",)
    assert find(accept_file(fetched, NOW), OPUS) == (5, 10)


def test_a_model_that_becomes_free_and_a_new_free_one_wait_for_a_persons_yes() -> None:
    fetched = add(None, make_entry(OPUS, 0, 0), make_entry("claude-gift", 0, 0), make_entry("claude-sonnet-5-5", 2, 10))
    assert (find(fetched, OPUS), find(fetched, "claude-gift")) == ((4, 20), None)
    assert f"anthropic:{OPUS}: input $4 → $0, output $20 → $0" in fetched.waiting
    assert "anthropic:claude-gift: free" in fetched.waiting
    accepted = accept_file(fetched, NOW)
    assert (find(accepted, OPUS), find(accepted, "claude-gift")) == ((0, 0), (0, 0))


def test_a_price_that_rose_and_falls_again_waits_and_so_does_that_of_a_new_model() -> None:
    first = add(None, make_entry(OPUS, 9, 20), make_entry("claude-new", 9, 20))
    second = add(first, make_entry(OPUS, 4, 20), make_entry("claude-new", 3, 20))
    assert (find(second, OPUS), find(second, "claude-new")) == ((9, 20), (9, 20))
    third = add(second, make_entry("claude-haiku-5-5", 3, 20))
    assert (find(third, OPUS), find(third, "claude-new")) == ((9, 20), (9, 20)), "what vanished keeps its price"
    assert find(accept_file(second, NOW), "claude-new") == (3, 20)


@pytest.mark.parametrize(
    "match",
    [{"regex": ".*"}, {"contains": "claude"}, {"starts_with": "c"}, {"or": [{"equals": "x"}, {"regex": "new"}]}],
)
def test_an_entry_that_takes_the_names_of_others_lowers_none_of_them(match: dict[str, Any]) -> None:
    first = add(None, make_entry("claude-new", 9, 20))
    thief = {**make_entry("claude-thief", 2, 1), "match": match}
    second = add(first, thief, make_entry("claude-new", 9, 20), make_entry(OPUS))
    assert (find(second, OPUS), find(second, "claude-new")) == ((4, 20), (9, 20))


@pytest.mark.parametrize("taken", ["claude-new-mini", "claude-new-mini-2027"])
def test_a_cheaper_entry_before_another_lowers_none_of_the_names_that_it_takes(taken: str) -> None:
    general = {**make_entry("claude-new", 9, 20), "match": {"starts_with": "claude-new"}}
    thief = {**make_entry("claude-new-mini", 2, 1), "match": {"starts_with": "claude-new-mini"}}
    first = add(None, general)
    second = add(first, thief, general)
    assert (find(first, taken), find(second, taken)) == ((9, 20), (9, 20))
    assert find(add(second, thief, general, make_entry("claude-other")), taken) == (9, 20), "in every later file"
    assert second.waiting == ("anthropic:claude-new-mini: input $9 → $2, output $20 → $1",)
    assert find(accept_file(second, NOW), taken) == (2, 1)


def test_a_price_that_falls_outside_of_a_time_of_day_waits() -> None:
    dear, cheap = make_entry("claude-new", 9, 20), make_entry("claude-new", 2, 1)
    midnight = {"type": "time_of_date", "start_time": "00:00:00Z", "end_time": "01:00:00Z"}
    rules = [
        {"prices": dear["prices"]},
        {"constraint": {"type": "start_date", "start_date": "2020-01-01"}, "prices": cheap["prices"]},
        {"constraint": midnight, "prices": dear["prices"]},
    ]
    second = add(add(None, dear), {**dear, "prices": rules})
    tariff = PriceTables(second).find(ModelName("anthropic", "claude-new"), None, MARGIN)
    assert isinstance(tariff, Tariff)
    assert {tariff_dollars(tariff.find_rates(1, NOW + hour * DAY // 24).plain) for hour in range(24)} == {9}
    assert second.waiting


@pytest.mark.parametrize("unit", ["input_audio_mtok", "web_searches_kcount", "cache_write_1h_mtok"])
def test_a_unit_that_a_file_does_not_price_any_more_keeps_its_price(unit: str) -> None:
    second = add(add(None, make_entry("claude-new", **{unit: 90})), make_entry("claude-new"))
    tariff = PriceTables(second).find(ModelName("anthropic", "claude-new"), None, MARGIN)
    assert isinstance(tariff, Tariff)
    usage = Usage(100, 1, 0, 100, cache_write_1h_tokens=100, audio_tokens=100, web_searches=1)
    assert tariff.cost(usage, NOW) >= 9_000


def test_of_two_entries_with_one_name_the_price_in_force_is_kept() -> None:
    first = add(None, make_entry("claude-new", 9, 20), make_entry("claude-new", 2, 1))
    assert find(add(first, make_entry("claude-new", 2, 1)), "claude-new") == (9, 20)


def test_a_file_that_leaves_too_many_prices_is_refused_instead_of_leaving_no_model_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(price_tables, "MAX_ENTRIES", 2)
    second = add(add(None, make_entry("a"), make_entry("b")), make_entry("c"), make_entry("d"))
    with pytest.raises(ConfigError, match="more than 2 models"):
        add(second, make_entry("e"))
    assert find(second, "a") == (4, 20)


def test_a_file_cannot_say_whose_an_address_is() -> None:
    table = json.loads(make_table(make_entry("gpt-4o", 0.5, 0.5), seller="thief"))
    table[0]["api_pattern"] = ".*"
    fetched = add_file(None, json.dumps(table).encode(), "x", NOW)
    model = ModelName("openai", "gpt-4o")
    for base_url in (None, "https://api.openai.com/v1", "https://llm.example.com"):
        before, after = (PriceTables(state).find(model, base_url, MARGIN) for state in (None, fetched))
        assert isinstance(before, Tariff)
        assert isinstance(after, Tariff)
        assert not find_excess(before, after, NOW)


def test_a_pattern_of_a_file_is_matched_in_linear_time() -> None:
    slow = {**make_entry("claude-slow", 9, 9), "match": {"regex": "(a+)+$"}}
    fetched = add(None, slow, make_entry(OPUS))
    assert find(fetched, "a" * 5_000 + "!") is None
    assert find(fetched, "a" * 5_000) == (9, 9)


def test_a_table_of_another_installed_version_counts_beside_the_accepted_file() -> None:
    accepted = accept_file(add(None, make_entry(OPUS, 3, 20)), NOW)
    assert find(accepted, OPUS) == (3, 20)
    other_version = FetchedPrices(accepted.digest, "x", accepted.newest, NOW, accepted.accepted, bundled="0.0.1")
    assert find(other_version, OPUS) == (4, 20)


def test_the_whole_bundled_table_as_a_file_changes_nothing() -> None:
    fetched = add_file(None, dump_bundled(), "x", NOW)
    assert (fetched.added, fetched.raised, fetched.waiting) == ((), (), ())


def dump_bundled() -> bytes:
    """Write the bundled table of one maker in the format of the file."""
    seller = next(seller for seller in providers if seller.id == "deepseek")
    return json.dumps([encode(seller)], default=str).encode()


def encode(value: Any) -> Any:
    names = {"or_": "or", "and_": "and"}
    if isinstance(value, list):
        return [encode(item) for item in cast("list[Any]", value)]
    if not hasattr(value, "__dict__"):
        return value
    members: dict[str, Any] = {
        name: item for name, item in cast("dict[str, Any]", vars(value)).items() if item is not None
    }
    return {names.get(name, name): encode(item) for name, item in members.items() if name != "extractors"}


# Files that cannot be used

HUGE = "1" + "0" * 30
MANY_TIERS = {"base": 1, "tiers": [{"start": start, "price": 1} for start in range(5_000)]}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "It is not JSON"),
        (b"<html>", "It is not JSON"),
        (b"\xff\xfe", "It is not JSON"),
        (b"[" * 100_000, "It is not JSON"),
        (b'[{"id": NaN}]', "It is not JSON"),
        (b"{}", "It is not a list of providers"),
        (b"[]", "It is not a list of providers"),
        (b"[1]", "provider 1 is not an object"),
        (b'[{"id": "x"}]', "provider 1 has no `name`"),
        (make_table(), "It has no models"),
        (make_table({"id": "m", "prices": {}}), "has no `match`"),
        (make_table({"id": "m", "match": {"equals": "m"}}), "has no `prices`"),
        (make_table({**make_entry("m"), "id": 7}), "is not a name"),
        (make_table({**make_entry("m"), "match": {"sounds_like": "m"}}), "is not a clause"),
        (make_table({**make_entry("m"), "match": "m"}), "is not a clause"),
        (make_table({**make_entry("m"), "prices": []}), "neither an object nor a list"),
        (make_table(make_entry("m", -1)), "`input_mtok` of anthropic:m is -1, not a number of dollars"),
        (make_table(make_entry("m", "NaN")), "is NaN, not a number of dollars"),
        (make_table(make_entry("m", "Infinity")), "is Infinity, not a number of dollars"),
        (make_table(make_entry("m", 1, HUGE)), "not a number of dollars"),
        (make_table(make_entry("m", True)), "is True, not a number of dollars"),
        (make_table(make_entry("m", "$5")), "is $5, not a number of dollars"),
        (make_table(make_entry("m", [5])), "not a number of dollars"),
        (make_table(make_entry("m", input_ktok=1)), "in the unit 'input_ktok'"),
        (make_table(make_entry("m", calc_price=1)), "in the unit 'calc_price'"),
        (make_table(make_entry("m", __class__=1)), "in the unit '__class__'"),
        (make_table(make_entry("m", {"base": 1})), "has no `tiers`"),
        (make_table(make_entry("m", {"base": 1, "tiers": [{"start": -5, "price": 1}]})), "number of tokens"),
        (make_table(make_entry("m", {"base": 1, "tiers": [{"start": 5, "price": -1}]})), "not a number of dollars"),
        (make_table({**make_entry("m"), "prices": [{"prices": {"input_mtok": -1}}]}), "not a number of dollars"),
        (make_table({**make_entry("m"), "prices": [{"constraint": 5, "prices": {}}]}), "not a table of genai-prices"),
        (
            make_table(make_entry("m", MANY_TIERS)),
            "anthropic:m has 5,000 tiers of `input_mtok`; at most 20 can be used",
        ),
        (make_table({**make_entry("m"), "prices": [{"prices": {"input_mtok": 1}}] * 21}), "has 21 prices; at most 20"),
        (make_table(make_entry(OPUS, "0.000004", "0.00002")), "Its prices are in another unit"),
    ],
)
def test_a_file_that_cannot_be_relied_upon_is_refused_in_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        add_file(None, data, "example.com", NOW)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="It is larger than 32 MB"):
        read_table(b"x" * (price_tables.MAX_FILE_SIZE + 1))


@pytest.mark.parametrize("newest", [b"", b"damaged", zlib.compress(b"[]")])
def test_a_stored_table_that_cannot_be_read_leaves_no_model_with_a_price_that_may_be_too_low(newest: bytes) -> None:
    spoiled = FetchedPrices("0" * 64, "example.com", newest)
    for name in (OPUS, "claude-unheard-of"):
        unpriced = Prices(listed=PriceTables(spoiled), guesses=True).find(ModelName("anthropic", name))
        assert isinstance(unpriced, Unpriced)
        assert "the fetched price table in the store cannot be used" in unpriced.sentence
