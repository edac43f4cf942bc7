"""Prices as a table of integers, from which a hold is computed at every step.

Dollars per million tokens are micro-dollars per token, and every rate of the table times SCALE is an integer, so that
only the result is rounded. Batch and priority tiers are not priced. A hold covers cache writes that live for minutes,
as the wires request them; `Tariff.covering` adds the other features of a request: cache writes that live for an hour,
searches, code runs and audio.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from halter.core.clock import DAY
from halter.core.usage import (
    Price,
    RequestExtras,
    Usage,
)

if TYPE_CHECKING:
    from genai_prices.types import ConditionalPrice, ModelInfo, ModelPrice, TieredPrices

    Figure = Decimal | TieredPrices | None

SCALE: Final = 10**18
MARGIN: Final = Decimal("0.02")
NO_LIMIT: Final = 10**9
"""More tokens than the answer of any model has."""

END_OF_TIME: Final = 1 << 60
ALWAYS: Final = -(1 << 63)
_EPOCH: Final = date(1970, 1, 1)
_NOTHING: Final = Decimal(0)


class ExtraFigures(NamedTuple):
    """Prices that may be missing, in dollars per million tokens, and per thousand searches and code runs."""

    cache_write_1h: Decimal | None = None
    thousand_searches: Decimal | None = None
    audio: Decimal | None = None
    audio_cached: Decimal | None = None
    thousand_code_executions: Decimal | None = None


NO_EXTRAS: Final = ExtraFigures()


class Tier(msgspec.Struct, frozen=True):
    """The rates above a number of input tokens, in micro-dollars × SCALE. None means that there is no price."""

    above: int
    plain: int
    cache_read: int
    cache_write: int
    output: int
    request: int
    cache_write_1h: int | None = None
    search: int | None = None
    audio: int | None = None
    audio_cached: int | None = None
    code_execution: int | None = None

    def cost(self, plain: int, read: int, write: int, output: int) -> int:
        return (
            plain * self.plain + read * self.cache_read + write * self.cache_write + output * self.output + self.request
        )

    def cost_with_extras(self, plain_cost: int, usage: Usage) -> int:
        """Add the cost of extras. Without a price, a long cache write costs as a short one, the rest nothing."""
        longer = self.cache_write if self.cache_write_1h is None else self.cache_write_1h
        extra = usage.cache_write_1h_tokens * max(0, longer - self.cache_write)
        extra += usage.audio_tokens * max(0, (self.audio or 0) - self.plain)
        extra += usage.audio_cached_tokens * max(0, (self.audio_cached or self.audio or 0) - self.cache_read)
        tokens_cost = -(-(plain_cost + extra) * (100 + usage.surcharge_percent) // 100)
        return (
            tokens_cost + usage.code_executions * (self.code_execution or 0) + usage.web_searches * (self.search or 0)
        )


class PricePeriod(msgspec.Struct, frozen=True):
    """Rates and the time when they apply: from a date on, and perhaps only daily between two times of day.

    The highest tier comes first. Each tier has a ceiling, which charges all input at the highest rate of this tier and
    of those below: a request that is estimated into a tier may turn out smaller, and may be cached in any way.
    """

    tiers: tuple[Tier, ...]
    ceilings: tuple[Tier, ...]
    since: int = ALWAYS
    daily: tuple[int, int] | None = None

    def holds(self, at: int) -> bool:
        if at < self.since or self.daily is None:
            return at >= self.since
        start, end = self.daily
        now = at % DAY
        return start <= now < end if start <= end else now >= start or now < end


class Tariff(msgspec.Struct, frozen=True):
    """The rates of one model. The first period that applies counts; the last one always applies.

    If a report does not count audio, up to `audio_tokens` of its input are charged as audio. A `guess` says in words
    how a model is priced that no table knows.
    """

    periods: tuple[PricePeriod, ...]
    loading: tuple[int, int]
    audio_tokens: int = 0
    guess: str = ""

    def covering(self, extras: RequestExtras) -> "Tariff | str":
        return _extend_bound(self, extras)

    def cost(self, usage: Usage, at: int) -> int:
        if self.audio_tokens and not (usage.audio_tokens or usage.audio_cached_tokens):
            audio_tokens = min(self.audio_tokens, usage.input_tokens)
            usage = msgspec.structs.replace(usage, audio_tokens=audio_tokens)
        read, write = usage.cache_read_tokens, usage.cache_write_tokens
        tier = self.find_rates(usage.input_tokens, at)
        scaled_cost = tier.cost(usage.input_tokens - read - write, read, write, usage.output_tokens)
        if usage.has_extras:
            scaled_cost = tier.cost_with_extras(scaled_cost, usage)
        return -(-scaled_cost // SCALE)

    def find_rates(self, input_tokens: int, at: int) -> Tier:
        """Find the rates of a request with this number of input tokens at a time."""
        period = self.find_period(at)
        highest = period.tiers[0]
        return highest if input_tokens > highest.above else find_tier(period.tiers, input_tokens)

    def find_period(self, at: int) -> PricePeriod:
        """Find the period that applies at a time."""
        for period in self.periods[:-1]:
            if period.holds(at):
                return period
        return self.periods[-1]

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        """Compute the maximum cost of a request with these tokens, even if it is billed up to a day later."""
        if max_output_tokens < 0:
            raise ValueError(f"A request cannot have {max_output_tokens} output tokens.")
        dearest = 0
        for ceiling in self._ceilings(input_tokens, at):
            cost = input_tokens * ceiling.plain + max_output_tokens * ceiling.output + ceiling.request
            dearest = max(dearest, cost)
        numerator, denominator = self.loading
        return -(-dearest * numerator // (denominator * SCALE))

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, limit: int = NO_LIMIT) -> int:
        """Compute the maximum output, up to `limit`, whose bound the budget covers; 0 if not one token fits."""
        numerator, denominator = self.loading
        scaled_budget = budget_micros * denominator * SCALE // numerator
        output_limits = (
            _output_in(scaled_budget, ceiling, input_tokens) for ceiling in self._ceilings(input_tokens, at)
        )
        return max(0, min(limit, *output_limits))

    def _ceilings(self, input_tokens: int, at: int) -> list[Tier]:
        """List the ceilings that may apply when the request is billed: at any time of day, up to a day later."""
        ceilings: list[Tier] = []
        for period in self.periods:
            if period.since <= at + DAY:
                highest = period.ceilings[0]
                ceilings.append(highest if input_tokens > highest.above else find_tier(period.ceilings, input_tokens))
            if period.since <= at and period.daily is None:
                break
        return ceilings


def find_tier(tiers: Iterable[Tier], input_tokens: int) -> Tier:
    for tier in tiers:
        if input_tokens > tier.above:
            return tier
    raise ValueError(f"A request cannot have {input_tokens} input tokens.")


def _output_in(scaled_budget: int, ceiling: Tier, input_tokens: int) -> int:
    remaining = scaled_budget - ceiling.cost(input_tokens, 0, 0, 0)
    if ceiling.output:
        return remaining // ceiling.output
    return NO_LIMIT if remaining >= 0 else 0


@lru_cache(maxsize=1024)
def _extend_bound(tariff: Tariff, extras: RequestExtras) -> Tariff | str:
    periods: list[PricePeriod] = []
    for period in tariff.periods:
        if extras.long_cache and any(tier.cache_write_1h is None for tier in period.tiers):
            return "it caches for an hour, and the price of that is not listed"
        if extras.searches and any(tier.search is None for tier in period.tiers):
            return "it searches the web, and the price of that is not listed"
        if extras.code_executions and any(tier.code_execution is None for tier in period.tiers):
            return (
                "its provider may run code for it, and the price of that is not listed; set `code_executions` of its "
                "`price` in halter.yaml, in dollars per thousand runs"
            )
        if extras.audio_tokens and any(tier.audio is None for tier in period.tiers):
            return (
                "it is sent audio, which it does not take, or whose price is not listed; set `audio` of its `price` in "
                "halter.yaml"
            )
        ceilings = [
            _extend_ceiling(ceiling, tier, extras)
            for ceiling, tier in zip(reversed(period.ceilings), reversed(period.tiers), strict=True)
        ]
        highest = tuple(reversed(tuple(accumulate(ceilings, _dearer_tier))))
        periods.append(msgspec.structs.replace(period, ceilings=highest))
    return Tariff(tuple(periods), tariff.loading, extras.audio_tokens, tariff.guess)


def _extend_ceiling(ceiling: Tier, tier: Tier, extras: RequestExtras) -> Tier:
    rate = max(ceiling.plain, (tier.cache_write_1h or 0) if extras.long_cache else 0)
    extra_cost = extras.searches * (tier.search or 0) + extras.audio_tokens * max(0, (tier.audio or 0) - rate)
    extra_cost += extras.code_executions * (tier.code_execution or 0)
    return Tier(ceiling.above, rate, rate, rate, ceiling.output, ceiling.request + extra_cost)


def compile_stated_price(price: Price, margin: Decimal = MARGIN) -> Tariff:
    sound = _NOTHING if price.audio is None and price.input == price.output == 0 else price.audio
    extras = ExtraFigures(price.cache_write_1h, price.web_searches, sound, None, price.code_executions)
    tier = _tier(-1, price.input, price.cache_read, price.cache_write, price.output, extras=extras)
    return Tariff((make_period([tier]),), _loading(margin))


def compile_listed_price(model: "ModelInfo", margin: Decimal = MARGIN, *, of_google: bool = False) -> Tariff | None:
    """Compile an entry of the bundled table; None if it lacks a rate for input or output.

    The table leaves out zeros, so an entry without rates may be free or have an unknown price. For a model
    `of_google`, audio without a separate rate costs as much as other input, and running code costs nothing.
    """
    from genai_prices.types import ConditionalPrice, ModelPrice

    rules = model.prices
    if isinstance(rules, ModelPrice):
        rules = [ConditionalPrice(prices=rules)]
    if not rules or any(rule.prices.input_mtok is None or rule.prices.output_mtok is None for rule in rules):
        return None
    # If several rules apply, the last one counts; if none does, the first one.
    periods = [_compile_condition(rule, of_google=of_google) for rule in reversed(rules)]
    fallback = msgspec.structs.replace(periods[-1], since=ALWAYS, daily=None)
    return Tariff((*periods, fallback), _loading(margin))


def _compile_condition(rule: "ConditionalPrice", *, of_google: bool = False) -> PricePeriod:
    from genai_prices.types import StartDateConstraint

    tiers = _tiers(rule.prices, of_google=of_google)
    match rule.constraint:
        case None:
            return make_period(tiers)
        case StartDateConstraint(start_date=day):
            return make_period(tiers, since=(day - _EPOCH).days * DAY)
        case daily:
            return make_period(tiers, daily=(_time_of_day(daily.start_time), _time_of_day(daily.end_time)))


def _time_of_day(moment: time) -> int:
    zoned_time = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since_midnight = datetime.combine(_EPOCH, zoned_time) - datetime.combine(_EPOCH, time(tzinfo=UTC))
    return since_midnight // timedelta(microseconds=1) % DAY


def _tiers(price: "ModelPrice", *, of_google: bool = False) -> list[Tier]:
    """Compile the tiers, lowest first.

    A usage does not distinguish kinds of output, so the highest of their rates applies.
    """
    output = (price.output_mtok, price.output_reasoning_mtok, price.output_citation_mtok)
    sound = price.input_mtok if of_google and price.input_audio_mtok is None else price.input_audio_mtok
    extras = (price.cache_write_1h_mtok, price.web_searches_kcount, sound, price.cache_audio_read_mtok)
    figures = (price.input_mtok, price.cache_read_mtok, price.cache_write_mtok, price.requests_kcount, *extras)
    return [
        _tier(
            above,
            _figure(price.input_mtok, above) or _NOTHING,
            _figure(price.cache_read_mtok, above),
            _figure(price.cache_write_mtok, above),
            max(_figure(rate, above) or _NOTHING for rate in output),
            _figure(price.requests_kcount, above) or _NOTHING,
            ExtraFigures(
                _figure(extras[0], above),
                _figure(extras[1], above),
                _figure(extras[2], above),
                _figure(extras[3], above),
                _NOTHING if of_google else None,
            ),
        )
        for above in _thresholds((*output, *figures))
    ]


def _thresholds(figures: "Iterable[Figure]") -> list[int]:
    from genai_prices.types import TieredPrices

    tiered_figures = (figure for figure in figures if isinstance(figure, TieredPrices))
    return sorted({-1, *(tier.start for figure in tiered_figures for tier in figure.tiers)})


def _figure(figure: "Figure", above: int) -> Decimal | None:
    from genai_prices.types import TieredPrices

    if not isinstance(figure, TieredPrices):
        return figure
    return next((tier.price for tier in reversed(figure.tiers) if tier.start <= above), figure.base)


def _tier(
    above: int,
    plain: Decimal,
    cache_read: Decimal | None,
    cache_write: Decimal | None,
    output: Decimal,
    thousand_requests: Decimal = _NOTHING,
    extras: ExtraFigures = NO_EXTRAS,
) -> Tier:
    searches, runs = _scale_extra(extras.thousand_searches), _scale_extra(extras.thousand_code_executions)
    return Tier(
        above,
        _scale_figure(plain),
        _scale_figure(plain if cache_read is None else cache_read),
        _scale_figure(plain if cache_write is None else cache_write),
        _scale_figure(output),
        _scale_figure(thousand_requests) * 1000,
        _scale_extra(extras.cache_write_1h),
        None if searches is None else searches * 1000,
        _scale_extra(extras.audio),
        _scale_extra(extras.audio_cached),
        None if runs is None else runs * 1000,
    )


def _scale_extra(figure: Decimal | None) -> int | None:
    return None if figure is None else _scale_figure(figure)


def _scale_figure(figure: Decimal) -> int:
    numerator, denominator = figure.as_integer_ratio()
    return -(-numerator * SCALE // denominator)


def make_period(tiers: Sequence[Tier], since: int = ALWAYS, daily: tuple[int, int] | None = None) -> PricePeriod:
    ceilings = accumulate((_flat(tier) for tier in tiers), _dearer_tier)
    return PricePeriod(tuple(reversed(tiers)), tuple(reversed(tuple(ceilings))), since, daily)


def _flat(tier: Tier) -> Tier:
    rate = max(tier.plain, tier.cache_read, tier.cache_write)
    return Tier(tier.above, rate, rate, rate, tier.output, tier.request)


def _dearer_tier(below: Tier, tier: Tier) -> Tier:
    rate = max(below.plain, tier.plain)
    return Tier(tier.above, rate, rate, rate, max(below.output, tier.output), max(below.request, tier.request))


def _loading(margin: Decimal) -> tuple[int, int]:
    numerator, denominator = margin.as_integer_ratio()
    return numerator + denominator, denominator
