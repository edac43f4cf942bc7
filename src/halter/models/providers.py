"""A model by its name: its provider, address, key and price.

A provider in an agent's files is reached at the address given there, with the key referenced there: a key in the
environment belongs to the provider's own address and is sent nowhere else.

Prices come from the configuration, or else from the bundled table of genai-prices. A model on this machine is free. For
any other, the table has the price: at a seller's own address that seller's, behind a gateway that of the sellers of the
model. An entry is compiled once into a `Tariff` of integers, because a hold is computed at every step: dollars per
million tokens are micro-dollars per token, and every rate of the table times SCALE is an integer, so that only the
result is rounded.

A process looks in the bundled table and, in `price_tables`, in those that were fetched since. A lookup fetches nothing,
and the library's updater never runs. Batch and priority tiers are not priced. A hold covers cache writes that live for
minutes, as the wires request them; `Tariff.covering` adds the other features of a request: cache writes that live for
an hour, searches, code runs and audio.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cache, cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from halter.core.clock import DAY
from halter.core.errors import ConfigError, explain_extra
from halter.core.text import join_names, shorten
from halter.core.usage import (
    FREE_PRICE,
    ModelName,
    ModelPrices,
    Price,
    RequestExtras,
    Unpriced,
    Usage,
    is_local_address,
    runs_locally,
)
from halter.models.cloud_credentials import FindKey, make_cloud_credentials
from halter.models.exchange import ExchangeTerms
from halter.models.wire import NO_HABITS, ModelHabits, WireModel
from halter.models.wires.table import WIRES
from halter.spec.models import KNOWN_PROVIDERS, KnownProvider, Provider, WireFormat, choose_wire

if TYPE_CHECKING:
    from genai_prices import types
    from genai_prices.types import ConditionalPrice, ModelInfo, ModelPrice, TieredPrices

    Figure = Decimal | TieredPrices | None

SCALE: Final = 10**18
MARGIN: Final = Decimal("0.02")
NO_LIMIT: Final = 10**9
"""More tokens than the answer of any model has."""

TABLE_NAMES: Final = MappingProxyType(
    {
        "gemini": "google",
        "vertex": "google",
        "vertex_ai": "google",
        "bedrock": "aws",
        "azure_ai": "azure",
        "xai": "x-ai",
        "moonshot": "moonshotai",
        "together_ai": "together",
        "fireworks_ai": "fireworks",
    }
)
"""Names in the table of sellers that have another name in configurations."""
_COMPARED: Final = 10_000
"""Prices are compared for requests with this number of input and output tokens."""
_LAST: Final = 1 << 60
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


class ListedPrices(Protocol):
    """The tables of listed prices. The `edition` changes with them."""

    @property
    def edition(self) -> int: ...

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> "Tariff | Unpriced": ...

    def guess(self, model: ModelName, base_url: str | None, margin: Decimal) -> "PriceGuess | None":
        """Guess the prices of a model that no table knows; None if its maker is unknown too."""
        ...


class PriceGuess(NamedTuple):
    maker: str
    tariff: Tariff


class BundledPrices:
    """The bundled table alone, without guesses."""

    edition = 0

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> "Tariff | Unpriced":
        return find_listed_tariff(read_bundled_table(), model, base_url, margin)

    def guess(self, model: ModelName, base_url: str | None, margin: Decimal) -> PriceGuess | None:
        return None


class Prices:
    """The price table of a fleet. Each model is looked up once for each edition of the `listed` prices.

    `stated_prices` maps `provider:model`, or a provider's name for all its models, to the configured price. With
    `guesses`, a model that no table knows is held and charged at a guess.
    """

    def __init__(
        self,
        stated_prices: Mapping[str, Price] = MappingProxyType({}),
        margin: Decimal = MARGIN,
        listed: ListedPrices | None = None,
        *,
        guesses: bool = False,
    ) -> None:
        if not (margin.is_finite() and margin >= 0):
            raise ValueError(f"Invalid margin of holds: {margin}. It must be a finite number of at least 0.")
        self._own = {
            (str(ModelName.parse(name)) if ":" in name or "/" in name else name): price
            for name, price in stated_prices.items()
        }
        self._margin = margin
        self._listed = listed or BundledPrices()
        self._guesses = guesses
        self._tariffs: dict[tuple[int, ModelName, str | None], Tariff | Unpriced] = {}

    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        """Find the prices of a model, by its address if that is not the provider's default.

        The first lookup imports the bundled table, which takes a quarter of a second: do it before sessions start.
        """
        key = (self._listed.edition, model, base_url)
        tariff = self._tariffs.get(key)
        if tariff is None:
            tariff = self._tariffs[key] = self._find_tariff(model, base_url)
        return tariff

    def _find_tariff(self, model: ModelName, base_url: str | None) -> Tariff | Unpriced:
        stated_price = self._own.get(str(model)) or self._own.get(model.provider)
        if stated_price is not None:
            return compile_stated_price(_with_cache_write(stated_price, model), self._margin)
        if runs_locally(model, base_url):
            return compile_stated_price(FREE_PRICE, self._margin)
        tariff = self._listed.find(model, base_url, self._margin)
        if isinstance(tariff, Unpriced) and (guess := self._listed.guess(model, base_url, self._margin)):
            return guess.tariff if self._guesses else tariff._replace(maker=guess.maker)
        return tariff


CLAUDE_CACHE_WRITE: Final = Decimal("1.25")
"""The price of writing into a cache that lives for minutes, as a multiple of plain input."""


def _with_cache_write(price: Price, model: ModelName) -> Price:
    """Add the surcharge for cache writes of a Claude model to a stated price without one."""
    claude = model.provider == "anthropic" or "claude" in model.model.lower()
    if price.cache_write is not None or not claude:
        return price
    return msgspec.structs.replace(price, cache_write=price.input * CLAUDE_CACHE_WRITE)


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


class Seller:
    """A seller of a price table, which finds its models as the library does: the first whose clause matches counts.

    The library compares a name with every model. Most clauses say what a name equals, begins or ends with, so here
    these texts lead to the few models that can match.
    """

    def __init__(self, listed: "types.Provider") -> None:
        self.id, self.name = listed.id, listed.name
        self.api_pattern, self.model_match = listed.api_pattern, listed.model_match
        self.models = listed.models
        self._fallbacks = listed.fallback_model_providers or ()
        self._tariffs: dict[tuple[int, Decimal], Tariff | None] = {}

    def find_model(self, spelling: str, all_sellers: "Sequence[Seller]") -> "tuple[Seller, ModelInfo] | None":
        """Find a model here, or at the sellers whose models this one sells, with the seller that lists it."""
        name = spelling.lower()
        # The library tries a date as `-2026-08-07`, too; a rule of our own would differ from it.
        dated_name = import_module("genai_prices.types")._normalize_compact_dated_ref(name)  # noqa: SLF001
        return self._find_named(name, all_sellers) or (
            None if dated_name == name else self._find_named(dated_name, all_sellers)
        )

    def _find_named(self, name: str, all_sellers: "Sequence[Seller]") -> "tuple[Seller, ModelInfo] | None":
        fallbacks = (next((each for each in all_sellers if each.id == seller), None) for seller in self._fallbacks)
        for seller in (self, *filter(None, fallbacks)):
            if (model := seller.find_own(name)) is not None:
                return seller, model
        return None

    def find_own(self, name: str) -> "ModelInfo | None":
        """Find the first of this seller's own models that a name in lower case matches."""
        index = self._index
        lowered_name = name.lower()  # As the clauses lower it: lowering twice is not always lowering once.
        texts = (
            ("equals", lowered_name),
            *(("starts_with", lowered_name[:size]) for size in index.start_sizes),
            *(("ends_with", lowered_name[-size:]) for size in index.end_sizes),
        )
        positions = sorted({*index.unbounded, *(each for text in texts for each in index.positions.get(text, ()))})
        return next((self.models[each] for each in positions if self.models[each].is_match(name)), None)

    @cached_property
    def _index(self) -> "_ModelIndex":
        positions: dict[tuple[str, str], list[int]] = {}
        unbounded: list[int] = []
        for position, model in enumerate(self.models):
            bounds = find_bounds(model.match)
            if bounds is None:
                unbounded.append(position)
            for bound in bounds or ():
                positions.setdefault(bound, []).append(position)
        start_sizes, end_sizes = (
            frozenset(len(text) for kind, text in positions if kind == wanted_kind and text)
            for wanted_kind in ("starts_with", "ends_with")
        )
        return _ModelIndex(positions, start_sizes, end_sizes, tuple(unbounded))

    @property
    def max_comparisons(self) -> int:
        """Count the models with which a name is compared at most."""
        counts: dict[tuple[str, int], int] = {}
        for (kind, text), positions in self._index.positions.items():
            key = (kind, 0 if kind == "equals" else len(text))
            counts[key] = max(counts.get(key, 0), len(positions))
        return len(self._index.unbounded) + sum(counts.values())

    def get_tariff(self, model: "ModelInfo", margin: Decimal) -> Tariff | None:
        """Compile the prices of a model of this seller once; None if it lacks a rate for input or output."""
        key = (id(model), margin)
        if key not in self._tariffs:
            # All of Google's own models take audio, and code that they run is billed as tokens.
            self._tariffs[key] = compile_listed_price(model, margin, of_google=self.id == "google")
        return self._tariffs[key]


class _ModelIndex(NamedTuple):
    """Positions of models by a kind of clause and its text, and of those that must be compared with every name."""

    positions: Mapping[tuple[str, str], Sequence[int]]
    start_sizes: frozenset[int]
    end_sizes: frozenset[int]
    unbounded: tuple[int, ...]


def find_bounds(clause: Any) -> set[tuple[str, str]] | None:
    """Find texts of which every name that a clause matches equals, begins or ends with one; None if it has none."""
    for kind in ("equals", "starts_with", "ends_with"):
        if text := getattr(clause, kind, ""):
            return {(kind, text.lower())}
    alternatives = getattr(clause, "or_", None)
    if alternatives is not None:
        parts = [find_bounds(each) for each in alternatives]
        return None if None in parts else {bound for part in parts if part is not None for bound in part}
    conditions = (find_bounds(each) for each in getattr(clause, "and_", ()))
    return next((bounds for bounds in conditions if bounds is not None), None)


@cache
def read_bundled_table() -> list[Seller]:
    """Import the bundled table by name: a type checker would infer its 1.5 MB for minutes."""
    return [Seller(listed) for listed in import_module("genai_prices.data").providers]


def find_listed_tariff(
    providers: Sequence[Seller], model: ModelName, base_url: str | None, margin: Decimal
) -> Tariff | Unpriced:
    """Find the prices of a model in one table."""
    seller = find_seller(providers, model.provider, base_url)
    entries = _entries(providers, seller, model)
    if not entries:
        return Unpriced(model, _explain_unlisted(model, base_url, None if seller is None else seller.name))
    tariffs = (owner.get_tariff(entry, margin) for owner, entry in entries)
    priced_tariffs = [tariff for tariff in tariffs if tariff is not None]
    if not priced_tariffs:
        return Unpriced(model, f"the bundled price table lists {entries[0][1].id} without token prices")
    return max(priced_tariffs, key=lambda tariff: tariff.bound(_COMPARED, _COMPARED, _LAST))


def _explain_unlisted(model: ModelName, base_url: str | None, seller: str | None) -> str:
    if seller is not None:
        return f"the bundled price table has no such model of {seller}"
    if is_local_address(base_url):
        return "a local address may forward to a paid model, and the bundled price table has no model of that name"
    origin = f"provider {model.provider!r}" if base_url is None else f"provider at {_host(base_url)}"
    return f"the bundled price table has no {origin}, and no model of that name"


@lru_cache(maxsize=256)
def find_listed_window(model: ModelName, base_url: str | None = None) -> int | None:
    providers = read_bundled_table()
    entries = _entries(providers, find_seller(providers, model.provider, base_url), model)
    return min((entry.context_window for _, entry in entries if entry.context_window), default=None)


def list_model_names(provider: str, stated_prices: Mapping[str, Price] = MappingProxyType({})) -> list[str]:
    """List the models of a provider that have a price: those of the configuration, then those of the table."""
    stated_names = [str(name).partition(":")[2] for name in stated_prices if str(name).startswith(f"{provider}:")]
    sellers = [seller for seller in read_bundled_table() if seller.id == TABLE_NAMES.get(provider, provider)]
    listed_names = [
        model.id for seller in sellers for model in seller.models if compile_listed_price(model) is not None
    ]
    return list(dict.fromkeys((*stated_names, *listed_names)))


def find_seller(providers: Sequence[Seller], name: str, base_url: str | None) -> Seller | None:
    """Find the seller that bills a request: by the address, or without one by the name.

    Names must match exactly. The library's own lookup takes `my-openai-proxy` for OpenAI.
    """
    matching = [provider for provider in providers if provider.id == TABLE_NAMES.get(name, name)]
    if base_url is None:
        return next(iter(matching), None)
    return next((seller for seller in (*matching, *providers) if re.match(seller.api_pattern, base_url)), None)


def _entries(providers: Sequence[Seller], seller: Seller | None, model: ModelName) -> "list[tuple[Seller, ModelInfo]]":
    """Find a model in the table: at its seller, or else at every seller that its name can refer to."""
    if seller is not None:
        return _find_models(providers, [seller], model.model)
    for name, spelling in list_spellings(model):
        sellers = [each for each in providers if not name or each.id == name]
        if entries := _find_models(providers, sellers, spelling):
            return entries
    return []


def _find_models(
    providers: Sequence[Seller], sellers: Sequence[Seller], spelling: str
) -> "list[tuple[Seller, ModelInfo]]":
    entries = (seller.find_model(spelling, providers) for seller in sellers)
    return [entry for entry in entries if entry is not None]


def list_spellings(model: ModelName) -> Iterator[tuple[str, str]]:
    """List the spellings of a model at gateways, each with its seller, if any.

    Gateways put the seller before the model, and sometimes a tag after it, as in `openai/gpt-6-sol:latest`.
    """
    segments = [model.provider, *model.model.split("/")]
    splits = [
        (TABLE_NAMES.get(segments[index - 1], segments[index - 1]), "/".join(segments[index:]))
        for index in range(1, len(segments))
    ]
    spellings = [*splits, *(("", model_name) for _, model_name in splits)]
    yield from spellings
    yield from ((name, model_name.rpartition(":")[0]) for name, model_name in spellings if ":" in model_name)


def _host(base_url: str) -> str:
    # The full address might contain a password.
    try:
        return urlsplit(base_url).hostname or "an address without a host"
    except ValueError:
        return "an invalid address"


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


LOCAL_WINDOW: Final = 32_000
DEFAULT_WINDOW: Final = 128_000

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")


class Endpoint(msgspec.Struct, frozen=True):
    wire: WireFormat
    url: str
    usual: bool


def is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def make_model(
    name: str,
    providers: Mapping[str, Provider],
    key: FindKey,
    habits: ModelHabits = NO_HABITS,
    *,
    installed: Callable[[str], bool] = is_installed,
) -> WireModel:
    model_name = _parse_model_name(name)
    provider = providers.get(model_name.provider)
    endpoint, secret = find_endpoint(model_name, providers, key)
    if not (installed("pydantic_ai") and installed(WIRES[endpoint.wire].library)):
        raise ConfigError(explain_extra("models", str(model_name)))
    base_url = None if endpoint.usual else endpoint.url
    terms = ExchangeTerms()
    if provider is not None:
        cloud = provider.credentials
        terms = ExchangeTerms(
            bills_errors=provider.bills_errors,
            prompt_cache=provider.prompt_cache,
            vision=provider.vision,
            credentials=cloud and make_cloud_credentials(cloud, endpoint.url, key, installed),
        )
    return WireModel(model_name, endpoint.wire, endpoint.url, secret, base_url=base_url, habits=habits, terms=terms)


def find_endpoint(name: ModelName, providers: Mapping[str, Provider], find_key: FindKey) -> tuple["Endpoint", str]:
    """Find the address of a model, and its key. Raises ConfigError if either is missing."""
    provider = providers.get(name.provider)
    return (
        _resolve_known_provider(name, find_key)
        if provider is None
        else _resolve_described_provider(name, provider, find_key)
    )


@lru_cache(maxsize=256)
def estimate_window(name: ModelName, base_url: str | None = None) -> int:
    """Estimate the context window of a model: from the bundled table, or else a conservative default."""
    provider = KNOWN_PROVIDERS.get(name.provider)
    is_own = is_local_address(base_url) or (provider is not None and provider.local)
    if is_own and runs_locally(name, base_url):
        return LOCAL_WINDOW
    return find_listed_window(name, base_url) or (LOCAL_WINDOW if is_own else DEFAULT_WINDOW)


def _parse_model_name(name: str) -> ModelName:
    try:
        return ModelName.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _resolve_described_provider(name: ModelName, provider: Provider, find_key: FindKey) -> tuple[Endpoint, str]:
    location = f"`providers.{name.provider}`"
    return Endpoint(provider.wire, _address(provider.base_url, location), usual=False), _find_declared_key(
        name, provider, find_key
    )


def _find_declared_key(name: ModelName, provider: Provider, find_key: FindKey) -> str:
    if not provider.api_key:
        return ""
    match = _SECRET.fullmatch(provider.api_key)
    if match is None:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` must refer to a secret. "
            "Keep the key out of the file and write `api_key: ${secret:NAME}`."
        )
    secret = find_key(match[1])
    if not secret:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` refers to the secret {match[1]}, which is not set. Set it, "
            f"or remove the line if {name.provider} needs no key."
        )
    return secret


def _resolve_known_provider(name: ModelName, find_key: FindKey) -> tuple[Endpoint, str]:
    provider = KNOWN_PROVIDERS.get(name.provider)
    if provider is None:
        raise ConfigError(
            f"Unknown provider {shorten(name.provider)!r} of {shorten(str(name))!r}: {_describe(name)} "
            f"Known providers: {join_names(KNOWN_PROVIDERS)}."
        )
    url_override = find_key(provider.url_from) if provider.url_from else None
    if not (url_override or provider.base_url):
        raise ConfigError(f"{name} has no address. Set {provider.url_from}, or {_describe(name)}")
    url = _address(_complete_url(url_override, provider), provider.url_from) if url_override else provider.base_url
    # A local server always keeps its address, which shows whether it runs on this machine.
    wire = choose_wire(name.provider, url, name.model)
    return Endpoint(wire, url, usual=not (url_override or provider.local)), _find_key_in_variables(
        name, provider, url, find_key
    )


def _find_key_in_variables(name: ModelName, provider: KnownProvider, url: str, find_key: FindKey) -> str:
    for variable in provider.keys:
        if secret := find_key(variable):
            return secret
    if provider.keys and not is_local_address(url):
        variables = " or ".join(provider.keys)
        raise ConfigError(
            f"{variables} is not set, and {name} needs a key. Set it, or {_describe(name, provider.wire)}"
        )
    return ""


def _describe(name: ModelName, wire: WireFormat = "openai") -> str:
    block = f"{{wire: {wire}, base_url: https://…, api_key: '${{secret:NAME}}'}}"
    return f"add it to the agent's file as `providers: {{{shorten(name.provider)}: {block}}}`."


def _complete_url(url: str, provider: KnownProvider) -> str:
    """Complete the address of a local server that has no path."""
    lacks_path = provider.local and urlsplit(url).path in {"", "/"}
    return f"{url.rstrip('/')}/v1" if lacks_path else url


def _address(url: str, location: str) -> str:
    try:
        url_parts = urlsplit(url)
        is_usable = url_parts.scheme in {"http", "https"} and bool(url_parts.hostname)
        _ = url_parts.port
    except ValueError:
        is_usable = False
    if not is_usable:
        # The address itself is not quoted, since it might contain a password.
        raise ConfigError(f"Invalid address in {location}. Write it like https://host/v1.")
    return url
