import json
import zlib
from decimal import Decimal
from functools import reduce
from importlib import import_module
from itertools import product
from operator import itemgetter
from typing import Any, cast

import pytest
from genai_prices.data import providers
from genai_prices.types import ModelInfo, Provider
from hypothesis import given
from hypothesis import strategies as st

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
from halter.models.prices import Prices
from halter.models.sellers import Seller
from halter.models.tariffs import MARGIN, Tariff, compile_listed_price, compile_stated_price

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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"regex": "^claude-new"}, {"regex": "^claude-new$"}),
        ({"contains": "new"}, {"contains": "new-1"}),
        ({"starts_with": "claude-"}, {"starts_with": "claude-newer"}),
        ({"ends_with": "-2027"}, {"ends_with": "-2028"}),
        ({"or": [{"equals": "x"}, {"equals": "claude-new-2027"}]}, {"or": [{"equals": "x"}]}),
        ({"and": [{"contains": "new"}]}, {"and": [{"contains": "new"}, {"contains": "old"}]}),
        ({"or": [{"and": [{"regex": "new"}]}]}, {"or": [{"and": [{"regex": "new"}, {"equals": "x"}]}]}),
        ({"contains": "2027"}, None),
    ],
)
@pytest.mark.parametrize("successor", [None, {"regex": "."}])
def test_an_entry_that_matches_fewer_names_lowers_none_of_those_it_matched(
    before: dict[str, Any], after: dict[str, Any] | None, successor: dict[str, Any] | None
) -> None:
    dear, name = make_entry("claude-dear", 9, 20), "claude-new-2027"
    first = add(None, {**dear, "match": {"or": [dear["match"], before]}})
    narrow = {**dear, "match": {"or": [dear["match"], after]} if after else dear["match"]}
    cheap = [{**make_entry("claude-cheap", 2, 1), "match": successor}] if successor else []
    second = add(first, narrow, *cheap, make_entry("claude-other"))
    third = add(second, narrow, *cheap, make_entry("claude-another"))
    assert [find(state, name) for state in (first, second, third)] == [(9, 20)] * 3
    assert find(accept_file(third, NOW), name) == ((2, 1) if successor else None)


def test_entries_in_another_order_lower_no_name_that_both_match() -> None:
    dear = {**make_entry("claude-dear", 9, 20), "match": {"contains": "new"}}
    cheap = {**make_entry("claude-cheap", 2, 1), "match": {"starts_with": "claude"}}
    first = add(None, dear, cheap)
    assert find(add(first, cheap, dear), "claude-new") == (9, 20)
    assert find(add(first, cheap, dear), "claude-old") == (2, 1), "what no dearer entry matched stays as it was"


def test_a_model_that_a_table_lists_at_its_name_is_not_lowered_where_other_tables_look_at_other_sellers() -> None:
    dear = json.loads(make_table({**make_entry("deluxe", 9, 20), "match": {"equals": "deluxe"}}, seller="maker"))
    cheap = json.loads(make_table(make_entry("maker/deluxe", 1, 2), seller="reseller"))
    first = add_file(None, json.dumps(dear).encode(), "x", NOW)
    second = add_file(first, json.dumps([*cheap, *dear]).encode(), "x", NOW)
    name = ModelName("gateway", "maker/deluxe")
    for state in (first, second):
        tariff = PriceTables(state).find(name, None, MARGIN)
        assert isinstance(tariff, Tariff)
        assert tariff_dollars(tariff.find_rates(1, NOW).plain) == 9


def test_a_name_that_falls_without_being_the_name_of_an_entry_is_shown_to_the_person_who_says_yes() -> None:
    dear = {**make_entry("claude-new", 9, 20), "match": {"or": [{"equals": "claude-new"}, {"equals": "claude-alias"}]}}
    thief = {**make_entry("claude-thief", 2, 20), "match": {"contains": "alias"}}
    first = add(None, dear, make_entry("claude-gone"))
    second = add(first, make_entry("claude-new", 9, 20), thief)
    lines = ("anthropic:claude-alias: input $9 → $2", "anthropic:claude-gone: no longer listed")
    assert second.waiting == lines
    assert add(second, make_entry("claude-new", 9, 20), thief, make_entry("claude-x")).waiting == lines


def test_cached_audio_without_a_price_is_not_lowered_by_a_table_that_prices_it() -> None:
    first = add(None, make_entry("claude-new", input_audio_mtok=90))
    second = add(first, make_entry("claude-new", input_audio_mtok=1, cache_audio_read_mtok=1))
    usage = Usage(100, 1, 100, 0, audio_cached_tokens=100)
    costs = [require_tariff(state, ModelName("anthropic", "claude-new")).cost(usage, NOW) for state in (first, second)]
    assert costs[1] >= costs[0] >= 9_000


def test_a_lower_price_from_a_date_on_does_not_count_before_it_where_another_table_has_times_of_day() -> None:
    dear, cheap = make_entry("claude-new", 9, 20), make_entry("claude-new", 1, 1)
    later = [{"prices": dear["prices"]}, {"constraint": {"start_date": "2100-01-01"}, "prices": cheap["prices"]}]
    window = {"start_time": "00:00:00Z", "end_time": "12:00:00Z"}
    daily = [{"prices": cheap["prices"]}, {"constraint": window, "prices": cheap["prices"]}]
    second = add(add(None, {**dear, "prices": later}), {**dear, "prices": daily})
    tariff = require_tariff(second, ModelName("anthropic", "claude-new"))
    assert {tariff_dollars(tariff.find_rates(1, NOW + hour * DAY // 24).plain) for hour in range(24)} == {9}
    assert tariff_dollars(tariff.find_rates(1, 50_000 * DAY).plain) == 1


def test_a_guess_is_not_lowered_by_a_further_table() -> None:
    name = ModelName("anthropic", "claude-unheard-of-9")
    dear = add(None, make_entry("claude-newest", 50, 90))
    states = [None, dear, add(dear, make_entry("claude-other-pro", 1, 2), make_entry("claude-other", 1, 2))]
    for model in (name, ModelName("anthropic", "claude-unheard-of-pro")):
        guesses = [PriceTables(state).guess(model, None, MARGIN) for state in states]
        rates = [each.tariff.find_rates(1, NOW).plain for each in guesses if each is not None]
        assert len(rates) == 3
        assert rates == sorted(rates)


# Any tables one after another

TEXTS = st.sampled_from(("a", "b", "ab", "ba", "abc", "c", "-", "maker/", "-2026-08-07"))
LEAVES: st.SearchStrategy[Any] = st.one_of(
    *(st.fixed_dictionaries({kind: TEXTS}) for kind in ("equals", "starts_with", "ends_with", "contains")),
    st.fixed_dictionaries({"regex": st.sampled_from(("^a", "b$", "a.b?", "(a|b)+c", ".", "^ab$", "[^-]c?$"))}),
)
CLAUSES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda parts: st.one_of(*(st.fixed_dictionaries({kind: st.lists(parts, max_size=3)}) for kind in ("or", "and"))),
    max_leaves=4,
)
AMOUNTS: st.SearchStrategy[Any] = st.sampled_from((0, 1, "2.5", 3, 9.5))
TIERS: st.SearchStrategy[Any] = st.lists(
    st.fixed_dictionaries({"start": st.sampled_from((50, 1_000, 10)), "price": AMOUNTS}),
    max_size=2,
    unique_by=itemgetter("start"),
)
FIGURES: st.SearchStrategy[Any] = AMOUNTS | st.fixed_dictionaries({"base": AMOUNTS, "tiers": TIERS})
OPTIONAL_UNITS = (
    "cache_read_mtok",
    "cache_write_mtok",
    "cache_write_1h_mtok",
    "input_audio_mtok",
    "cache_audio_read_mtok",
    "output_reasoning_mtok",
    "web_searches_kcount",
    "requests_kcount",
)
PRICES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"input_mtok": FIGURES, "output_mtok": FIGURES}, optional=dict.fromkeys(OPTIONAL_UNITS, FIGURES)
)
CONSTRAINTS: st.SearchStrategy[Any] = st.sampled_from(
    (
        None,
        {"start_date": "2020-01-01"},
        {"start_date": "2030-06-01"},
        {"start_time": "00:00:00Z", "end_time": "12:00:00Z"},
        {"start_time": "18:00:00Z", "end_time": "06:00:00Z"},
    )
)
RULES: st.SearchStrategy[Any] = PRICES | st.lists(
    st.fixed_dictionaries({"constraint": CONSTRAINTS, "prices": PRICES}), min_size=1, max_size=3
)
ENTRIES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"id": st.sampled_from("abcd"), "match": CLAUSES, "prices": RULES}
)
SELLERS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {
        "id": st.sampled_from(("maker", "reseller", "google")),
        "name": st.just("Seller"),
        "api_pattern": st.just("x"),
        "models": st.lists(ENTRIES, max_size=4),
    },
    optional={"fallback_model_providers": st.lists(st.sampled_from(("maker", "google", "nobody")), max_size=2)},
)
TABLES: st.SearchStrategy[Any] = st.lists(SELLERS, min_size=1, max_size=3)
NAMES = [
    ModelName(provider, name)
    for provider in ("maker", "reseller", "gateway", "gemini")
    for name in ("a", "AB", "abc", "ba", "c", "maker/ab", "a-20260807", "ab:free")
]
USAGES = [
    Usage(30, 7),
    Usage(2_000, 7, 500, 700, cache_write_1h_tokens=300),
    Usage(100, 0, 40, 10, audio_tokens=30, audio_cached_tokens=20, web_searches=2),
]
MOMENTS = [NOW, NOW + DAY // 3, NOW + DAY * 2 // 3, NOW + DAY - 1, 30_000 * DAY]


def require_tariff(state: FetchedPrices | None, name: ModelName) -> Tariff:
    tariff = PriceTables(state).find(name, None, MARGIN)
    assert isinstance(tariff, Tariff), tariff
    return tariff


@given(st.lists(TABLES, min_size=2, max_size=4))
def test_no_table_after_another_lowers_the_price_of_any_name_for_any_usage_at_any_time(tables: list[Any]) -> None:
    state: FetchedPrices | None = None
    for table in tables:
        try:
            later = add_file(state, json.dumps(table).encode(), "x", NOW)
        except ConfigError:
            continue  # The prices in force stay.
        earlier_prices, later_prices = PriceTables(state), PriceTables(later)
        for name in NAMES:
            before, after = (each.find(name, None, MARGIN) for each in (earlier_prices, later_prices))
            if isinstance(before, Unpriced):
                continue
            assert isinstance(after, Tariff), name
            for usage, at in product(USAGES, MOMENTS):
                assert after.cost(usage, at) >= before.cost(usage, at), (name, usage, at)
                if not usage.has_extras:
                    assert after.bound(usage.input_tokens, usage.output_tokens, at) >= after.cost(usage, at)
        state = later


@given(TABLES)
def test_an_index_finds_the_model_that_the_library_finds(table: list[Any]) -> None:
    read_library_table = cast("Any", import_module("genai_prices.types"))._providers_from_raw  # noqa: SLF001
    raw_table = read_library_table(table)
    sellers = [Seller(listed) for listed in raw_table]
    for listed, seller in zip(raw_table, sellers, strict=True):
        for name in NAMES:
            found = seller.find_model(name.model, sellers)
            assert (found and found[1]) is listed.find_model(name.model, all_providers=raw_table)


def test_an_index_finds_every_model_of_the_bundled_table_that_the_library_finds() -> None:
    sellers = [Seller(listed) for listed in providers]
    for listed, seller in zip(providers, sellers, strict=True):
        for name in {text for entry in listed.models[::3] for text in (entry.id, f"{entry.id}-20260807")}:
            found = seller.find_model(name, sellers)
            assert (found and found[1]) is listed.find_model(name, all_providers=providers)


class CountedName:
    """A clause that counts how often a name was compared with any of its kind."""

    comparisons = 0

    def __init__(self, equals: str) -> None:
        self.equals = equals

    def is_match(self, text: str) -> bool:
        CountedName.comparisons += 1
        return text == self.equals


def test_a_name_is_compared_with_the_entries_that_can_match_it_and_not_with_all() -> None:
    names = [f"model-{number}" for number in range(2_000)]
    models = [ModelInfo(id=name, match=cast("Any", CountedName(name))) for name in names]
    seller = Seller(Provider(id="maker", name="Maker", api_pattern="x", models=models))
    assert [found[1].id for name in names if (found := seller.find_model(name, [seller]))] == names
    assert CountedName.comparisons == len(names)
    assert seller.max_comparisons == 1


@pytest.mark.parametrize("match", ['{"regex": "^mN$"}', '{"and": [{"starts_with": "m"}, {"regex": "N$"}]}'])
def test_a_file_that_would_be_compared_for_hours_is_refused(monkeypatch: pytest.MonkeyPatch, match: str) -> None:
    monkeypatch.setattr(price_tables, "MAX_COMPARISONS", 20 * 20)
    entries = [
        {**make_entry(f"m{number}"), "match": json.loads(match.replace("N", str(number)))} for number in range(20)
    ]
    assert find(add(None, *entries[:10]), "m7") == (4, 20)
    with pytest.raises(ConfigError, match="to be compared"):
        add(None, *entries)


def test_the_prices_of_many_merged_tables_stay_few_and_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_tables, "MAX_PERIODS", 4)
    state: FetchedPrices | None = None
    for year in range(2020, 2030):
        tiers = {"base": 3, "tiers": [{"start": year, "price": year - 2015}]}
        start = {"start_date": f"{year}-01-01"}
        rules = [
            {"prices": make_entry("m")["prices"]},
            {"constraint": start, "prices": make_entry("m", tiers)["prices"]},
        ]
        state = add(state, {**make_entry("m"), "prices": rules})
    tariff = require_tariff(state, ModelName("anthropic", "m"))
    assert len(tariff.periods) <= 4
    assert all(len(period.tiers) <= 4 for period in tariff.periods)
    assert tariff_dollars(tariff.find_rates(1_000_000, 40_000 * DAY).plain) == 14


def test_tiers_count_in_the_order_of_their_starts() -> None:
    tiers = [{"start": 200_000, "price": 9}, {"start": 100_000, "price": 5}]
    tariff = require_tariff(add(None, make_entry("m", {"base": 2, "tiers": tiers})), ModelName("anthropic", "m"))
    rates = [tariff_dollars(tariff.find_rates(tokens, NOW).plain) for tokens in (1, 150_000, 250_000)]
    assert rates == [2, 5, 9]


def test_too_many_earlier_tables_are_refused_with_the_command_that_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_tables, "MAX_EARLIER_TABLES", 1)
    first = add(None, make_entry("a", 9))
    second = add(first, make_entry("b"))
    with pytest.raises(ConfigError, match=f"halter prices accept {second.digest[:12]}"):
        add(second, make_entry("c"))
    assert find(second, "a") == (9, 20)
    assert find(add(accept_file(second, NOW), make_entry("c")), "c") == (4, 20)


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
DEEP_CLAUSE = reduce(lambda clause, _: {"or": [clause]}, range(200), {"equals": "m"})
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
        (make_table(make_entry("m", "1e-99999999")), "is 1e-99999999, not a number of dollars"),
        (make_table(make_entry("m", "0e999999999")), "is 0e999999999, not a number of dollars"),
        (make_table(make_entry("m", "0" * 5_000)), "not a number of dollars"),
        (make_table(make_entry("m", "-inf")), "is -inf, not a number of dollars"),
        (make_table(make_entry("m", {"base": 1})), "has no `tiers`"),
        (make_table(make_entry("m", {"base": 1, "tiers": [{"start": 10**400, "price": 1}]})), "number of tokens"),
        (make_table(make_entry("m", {"base": 1, "tiers": [{"start": 5, "price": 1}] * 2})), "same number of tokens"),
        (make_table(make_entry("m" * 5_000)), "is not a name"),
        (make_table({**make_entry("m"), "match": DEEP_CLAUSE}), "is not a clause"),
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


def test_a_file_with_too_many_parts_is_refused_before_it_is_compared() -> None:
    entry = make_entry("m")
    seller = json.loads(make_table(entry))[0]
    files = {
        "more than 10,000 models": [{**seller, "models": [entry] * 100_000}],
        "more than 100,000 clauses": [{**seller, "models": [{**entry, "match": {"or": [{"equals": "m"}] * 100_000}}]}],
        "more than 500 providers": [seller] * 501,
        "anthropic has 99 fallbacks": [{**seller, "fallback_model_providers": ["x"] * 99}],
    }
    for sentence, table in files.items():
        with pytest.raises(ConfigError, match=sentence):
            add_file(None, json.dumps(table).encode(), "x", NOW)


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
