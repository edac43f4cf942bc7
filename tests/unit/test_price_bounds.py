from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import ROUND_CEILING, Decimal, localcontext
from functools import cache
from itertools import product

import genai_prices
import msgspec
import pytest
from genai_prices.data import providers
from genai_prices.types import (
    ClauseEquals,
    ConditionalPrice,
    ModelInfo,
    ModelPrice,
    Provider,
    StartDateConstraint,
    Tier,
    TieredPrices,
    TimeOfDateConstraint,
)
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import DAY
from halter.core.usage import ModelName, Usage
from halter.models.prices import Prices
from halter.models.tariffs import NO_LIMIT, Tariff, compile_listed_price

SONNET = "anthropic:claude-sonnet-4-5"


def micros(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> int:
    return int(datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp()) * 1_000_000


NOW = micros(2026, 11, 15, 12)


def rates(name: str, base_url: str | None = None, prices: Prices | None = None) -> Tariff:
    found = (prices or Prices()).find(ModelName.parse(name), base_url)
    assert isinstance(found, Tariff), found
    return found


# All models of the table, against the library's own arithmetic


@cache
def list_priced() -> list[tuple[ModelInfo, Tariff]]:
    entries = ((model, compile_listed_price(model)) for seller in providers for model in seller.models)
    return [(model, tariff) for model, tariff in entries if tariff is not None]


def library_cost(model: ModelInfo, usage: Usage, at: int) -> int:
    seller = Provider(id="any", name="Any", api_pattern="")
    fields = msgspec.structs.asdict(usage)
    for name in ("surcharge_percent", "reported_cost", "answered_by", "unpriced"):
        del fields[name]  # Of these the library knows nothing.
    sound, cached = fields.pop("audio_tokens"), fields.pop("audio_cached_tokens")
    counted = genai_prices.Usage(**fields, input_audio_tokens=sound + cached, cache_audio_read_tokens=cached)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at)
    with localcontext(prec=80):
        price = model.calc_price(counted, seller, genai_request_timestamp=moment).total_price
        return int((price * 1_000_000).to_integral_value(ROUND_CEILING))


token_counts = st.one_of(
    st.integers(0, 10**9),
    st.integers(0, 300_000),
    st.sampled_from([0, 1, 128_000, 128_001, 200_000, 200_001]),
)
moments = st.integers(micros(2024, 1, 1), micros(2028, 1, 1))


@st.composite
def usages(draw: st.DrawFn, most_input: int = 10**9, most_output: int = 10**9) -> Usage:
    sent = min(draw(token_counts), most_input)
    read = draw(st.integers(0, sent))
    write = draw(st.integers(0, sent - read))
    return Usage(sent, min(draw(token_counts), most_output), read, write)


def test_most_of_the_bundled_table_has_a_price() -> None:
    assert len(list_priced()) > 1_800


@given(st.deferred(lambda: st.sampled_from(list_priced())), usages(), moments)
def test_costs_agree_with_the_library(entry: tuple[ModelInfo, Tariff], usage: Usage, at: int) -> None:
    model, tariff = entry
    assert tariff.cost(usage, at) == library_cost(model, usage, at)


def test_every_price_of_the_table_is_read_as_the_library_reads_it() -> None:
    for model, tariff in list_priced():
        for usage, at in product(corners(tariff, 999_999, 777), sorted(times_around(tariff))[:4]):
            assert tariff.cost(usage, at) == library_cost(model, usage, at), model.id


# The bound of a hold


def inputs_up_to(tariff: Tariff, most: int) -> set[int]:
    edges = {tier.above + step for period in tariff.periods for tier in period.tiers for step in (0, 1)}
    return {0, most} | {edge for edge in edges if 0 <= edge <= most}


def corners(tariff: Tariff, most_input: int, most_output: int) -> list[Usage]:
    """Cost is linear between these, so if they are within a bound, everything between them is."""
    splits = ((0, 0), (1, 0), (0, 1))
    sizes = inputs_up_to(tariff, most_input)
    return [Usage(n, most_output, read * n, write * n) for n, (read, write) in product(sizes, splits)]


def times_around(tariff: Tariff) -> set[int]:
    starts = {period.since for period in tariff.periods if period.since > 0}
    peaks = {NOW - NOW % DAY + edge for period in tariff.periods for edge in period.daily or ()}
    return {NOW} | {edge + step for edge in starts | peaks for step in (-DAY, -1, 0, DAY)}


def breaches(true: Tariff, holding: Tariff, most_input: int, most_output: int) -> list[tuple[int, int]]:
    """Find what costs more than was held for it, billed at once or up to a day later."""
    times, tries = times_around(true), corners(true, most_input, most_output)
    dearest = {at: max(true.cost(usage, at) for usage in tries) for at in times}
    return [
        (at, billed)
        for at in times
        for bound in (holding.bound(most_input, most_output, at),)
        for billed in times
        if at <= billed <= at + DAY and dearest[billed] > bound
    ]


def test_no_model_of_the_table_can_cost_more_than_its_hold() -> None:
    for model, tariff in list_priced():
        for most_input in inputs_up_to(tariff, 1_000_000):
            assert breaches(tariff, tariff, most_input, 1_000) == [], model.id


@given(st.data(), st.deferred(lambda: st.sampled_from(list_priced())), token_counts, token_counts, moments)
def test_no_split_of_the_tokens_can_cost_more_than_the_hold(
    data: st.DataObject,
    entry: tuple[ModelInfo, Tariff],
    most_input: int,
    most_output: int,
    at: int,
) -> None:
    _, tariff = entry
    usage = data.draw(usages(most_input, most_output))
    assert tariff.cost(usage, at) <= tariff.bound(most_input, most_output, at)


def forget_cache_writes(tariff: Tariff) -> Tariff:
    periods = (msgspec.structs.replace(period, ceilings=period.tiers) for period in tariff.periods)
    return msgspec.structs.replace(tariff, periods=tuple(periods))


def forget_long_contexts(tariff: Tariff) -> Tariff:
    periods = (msgspec.structs.replace(period, ceilings=period.ceilings[-1:]) for period in tariff.periods)
    return msgspec.structs.replace(tariff, periods=tuple(periods))


def forget_peak_hours(tariff: Tariff) -> Tariff:
    return msgspec.structs.replace(tariff, periods=tariff.periods[-1:])


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        (SONNET, forget_cache_writes),
        (SONNET, forget_long_contexts),
        ("deepseek:deepseek-chat", forget_peak_hours),
    ],
)
def test_a_hold_that_forgets_a_dearer_rate_is_caught(name: str, mistake: Callable[[Tariff], Tariff]) -> None:
    true = rates(name)
    assert breaches(true, true, 250_000, 1_000) == []
    assert breaches(true, mistake(true), 250_000, 1_000) != []


def test_the_hold_takes_the_dearest_rate_and_adds_the_margin() -> None:
    assert rates(SONNET).bound(100_000, 64_000, NOW) == (375_000 + 960_000) * 102 // 100
    assert rates(SONNET).bound(200_001, 0, NOW) == -(-200_001 * 7_500 * 102 // 100_000)
    exact = Prices(margin=Decimal(0))
    assert rates(SONNET, prices=exact).bound(100_000, 64_000, NOW) == 375_000 + 960_000
    generous = Prices(margin=Decimal("0.5"))
    assert rates(SONNET, prices=generous).bound(100_000, 64_000, NOW) == 2_002_500


def test_the_hold_covers_a_price_that_rises_before_the_request_is_billed() -> None:
    exact = Prices(margin=Decimal(0))
    tariff = rates("deepseek:deepseek-v4-pro", prices=exact)
    assert tariff.bound(1_000, 0, micros(2026, 11, 15, 12)) == 1_320


@pytest.mark.parametrize("margin", ["-0.01", "NaN", "Infinity"])
def test_a_margin_below_nothing_is_refused(margin: str) -> None:
    with pytest.raises(ValueError, match="margin"):
        Prices(margin=Decimal(margin))


def test_a_bound_of_fewer_than_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 input tokens"):
        rates(SONNET).bound(-1, 0, NOW)
    with pytest.raises(ValueError, match="-1 output tokens"):
        rates(SONNET).bound(0, -1, NOW)
    with pytest.raises(ValueError, match="-1 input tokens"):
        rates(SONNET).max_output_that_fits(-1, 100, NOW)


# Lowering the output to what fits


@given(st.deferred(lambda: st.sampled_from(list_priced())), token_counts, st.integers(0, 10**10), moments)
def test_the_output_that_fits_is_the_most_whose_bound_fits(
    entry: tuple[ModelInfo, Tariff], input_tokens: int, budget: int, at: int
) -> None:
    _, tariff = entry
    output = tariff.max_output_that_fits(input_tokens, budget, at)
    if output > 0:
        assert tariff.bound(input_tokens, output, at) <= budget
    if output < NO_LIMIT:
        assert tariff.bound(input_tokens, output + 1, at) > budget


def test_the_output_that_fits_is_at_most_what_was_asked_for() -> None:
    assert rates(SONNET).max_output_that_fits(1_000, 10**9, NOW, limit=8_192) == 8_192


@pytest.mark.parametrize("budget", [-1_000_000, 0, 3_824, 3_825, 3_840])
def test_no_output_fits_where_the_budget_is_used_up_by_the_input(budget: int) -> None:
    assert rates(SONNET).max_output_that_fits(1_000, budget, NOW) == 0


def test_one_more_micro_dollar_is_one_more_token_where_it_covers_one() -> None:
    assert rates(SONNET).max_output_that_fits(1_000, 3_841, NOW) == 1


def test_a_free_model_may_answer_at_any_length_but_spends_nothing() -> None:
    tariff = rates("ollama:llama3")
    assert tariff.max_output_that_fits(10**6, 0, NOW) == NO_LIMIT
    assert tariff.max_output_that_fits(10**6, 0, NOW, limit=4_096) == 4_096
    assert tariff.max_output_that_fits(10**6, -1, NOW) == 0


# Tables that are stranger than today's: dearer at night, cheaper in long contexts, across midnight, in any zone

figures = st.sampled_from([Decimal(figure) for figure in ("0", "0.1", "3", "100")])
tiers = st.builds(Tier, start=st.sampled_from([0, 100, 1_000]), price=figures)
figure_or_tiers = figures | st.builds(TieredPrices, base=figures, tiers=st.lists(tiers, max_size=2))
zones = st.sampled_from([None, UTC, timezone(timedelta(hours=8)), timezone(timedelta(hours=-8))])
clock_times = st.builds(time, hour=st.sampled_from([0, 6, 12, 18]), tzinfo=zones)
constraints = st.one_of(
    st.none(),
    st.builds(StartDateConstraint, start_date=st.dates(date(2026, 11, 14), date(2026, 11, 17))),
    st.builds(TimeOfDateConstraint, start_time=clock_times, end_time=clock_times),
)


@st.composite
def model_prices(draw: st.DrawFn) -> ModelPrice:
    optional = ("cache_read_mtok", "cache_write_mtok", "requests_kcount")
    values = {key: draw(st.none() | figure_or_tiers) for key in optional}
    return ModelPrice(input_mtok=draw(figure_or_tiers), output_mtok=draw(figure_or_tiers), **values)


rules = st.builds(ConditionalPrice, constraint=constraints, prices=model_prices())
strange_models = st.builds(
    ModelInfo,
    id=st.just("strange"),
    match=st.just(ClauseEquals(equals="strange")),
    prices=model_prices() | st.lists(rules, min_size=1, max_size=3),
)


@given(st.data(), strange_models)
def test_any_table_is_read_as_the_library_reads_it(data: st.DataObject, model: ModelInfo) -> None:
    tariff = compile_listed_price(model)
    assert tariff is not None
    for usage in corners(tariff, 1_500, 10):
        at = data.draw(st.sampled_from(sorted(times_around(tariff))))
        assert tariff.cost(usage, at) == library_cost(model, usage, at)


@given(strange_models, st.sampled_from([0, 50, 100, 101, 1_500]), st.sampled_from([0, 10, 1_000]))
def test_no_table_can_lead_to_a_cost_above_the_hold(model: ModelInfo, most_input: int, most_output: int) -> None:
    tariff = compile_listed_price(model)
    assert tariff is not None
    assert breaches(tariff, tariff, most_input, most_output) == []


@pytest.mark.parametrize(
    "falling",
    [
        {"input_mtok": TieredPrices(base=Decimal(5), tiers=[Tier(start=10_000, price=Decimal(1))])},
        {"output_mtok": TieredPrices(base=Decimal(50), tiers=[Tier(start=10_000, price=Decimal(1))])},
        {"requests_kcount": TieredPrices(base=Decimal(500), tiers=[Tier(start=10_000, price=Decimal(1))])},
    ],
    ids=lambda falling: next(iter(falling)),
)
def test_a_hold_covers_the_short_request_where_long_ones_are_cheaper(falling: dict[str, TieredPrices]) -> None:
    figures = {"input_mtok": Decimal(1), "output_mtok": Decimal(1), **falling}
    tariff = compile_listed_price(
        ModelInfo(id="falling", match=ClauseEquals(equals="falling"), prices=ModelPrice(**figures))
    )
    assert tariff is not None
    assert breaches(tariff, tariff, 10_001, 10_000) == []
    assert tariff.cost(Usage(10_000, 10_000), NOW) > tariff.cost(Usage(10_001, 10_000), NOW)


@pytest.mark.parametrize(
    ("start", "end", "dear_hours"),
    [
        (time(22), time(2), {22, 23, 0, 1}),
        (time(2, tzinfo=UTC), time(4, tzinfo=UTC), {2, 3}),
        (time(6, tzinfo=timezone(timedelta(hours=8))), time(10, tzinfo=timezone(timedelta(hours=8))), {22, 23, 0, 1}),
        (time(5), time(5), set[int]()),
    ],
)
def test_the_hours_of_a_price_are_read_in_their_zone_and_across_midnight(
    start: time, end: time, dear_hours: set[int]
) -> None:
    usual = ConditionalPrice(prices=ModelPrice(input_mtok=Decimal(1), output_mtok=Decimal(1)))
    dear = ConditionalPrice(
        TimeOfDateConstraint(start, end), prices=ModelPrice(input_mtok=Decimal(9), output_mtok=Decimal(9))
    )
    tariff = compile_listed_price(ModelInfo(id="daily", match=ClauseEquals(equals="daily"), prices=[usual, dear]))
    assert tariff is not None
    costs = {hour: tariff.cost(Usage(1), micros(2026, 11, 15, hour)) for hour in range(24)}
    assert {hour for hour, cost in costs.items() if cost == 9} == dear_hours
